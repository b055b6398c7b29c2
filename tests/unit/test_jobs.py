"""The list of jobs, by which pauses, roles, metrics and runbooks go, is the jobs themselves."""

import typer
from typer.core import TyperGroup

from crmctl.cli.app import app
from crmctl.domain.grants import Kind
from crmctl.domain.jobs import JOBS, NAMES, kind_of
from crmctl.jobs import consume_chat_status, expire_bookings, prune


def test_every_job_is_named_once_and_as_it_names_itself() -> None:
    assert len(set(NAMES)) == len(NAMES)
    named = {expire_bookings.JOB.name, prune.JOB.name, consume_chat_status.JOB_NAME}
    assert named <= set(NAMES)


def test_every_job_s_command_is_there() -> None:
    for job in JOBS:
        command: object = typer.main.get_command(app)
        for word in job.command.split():
            assert isinstance(command, TyperGroup)
            command = command.commands[word]
        assert not isinstance(command, TyperGroup), job.command


def test_what_is_no_job_reads_only() -> None:
    assert kind_of("no-such-job") is Kind.READONLY
    assert all(kind_of(job.name) is job.kind is not Kind.READONLY for job in JOBS)
