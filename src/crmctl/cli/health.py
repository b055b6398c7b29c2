"""`crmctl doctor` and `crmctl status`: what is wrong and how to mend it; how every queue stands."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Output, duration

if TYPE_CHECKING:
    from crmctl.cli.command import Command
    from crmctl.domain.health import Check

_CONNECT_SECONDS = 3
# A signal must not wait for the whole pause between two looks.
_SLICE_SECONDS = 0.2
_CLEAR = "\x1b[H\x1b[2J"


def doctor(
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="Ask whether this role may run that job.")
    ] = None,
    form: Output = output.Format.TABLE,
) -> None:
    """Check everything that crmctl needs, and name the fix of what is wrong. Changes nothing; ends within ten seconds.

    Each check is ok, a warning, failed, or skipped with the reason. The exit code is 0, or that of the worst failure.

    \b
    Examples:
      crmctl doctor
      crmctl doctor --job relay-outbox -o json
    """
    from crmctl.cli.command import Command
    from crmctl.domain.jobs import NAMES

    if job is not None and job not in NAMES:
        raise typer.BadParameter(f"no such job: {job}; the jobs are {', '.join(NAMES)}")
    with Command(form) as command:
        checks, _ = _look(command, job)
        command.report({"checks": [check.document() for check in checks]}, _render_doctor)
        command.exit(_code(checks))


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until a signal (exit 0).")] = False,
    interval: Annotated[
        timedelta, typer.Option("--interval", metavar="DURATION", parser=duration, help="Between two looks.")
    ] = timedelta(seconds=5),
    form: Output = output.Format.TABLE,
) -> None:
    """Show on one screen how every queue stands, what is paused, and the faults that `doctor` would name.

    A server that is away is named, and the rest is still shown. The exit code is `doctor`'s; with --watch it is 0.

    \b
    Examples:
      crmctl status
      crmctl status --watch -o json
    """
    from crmctl.cli.command import Command
    from crmctl.cli.signals import Interrupted

    with Command(form) as command:
        if not watch:
            checks, figures = _look(command)
            command.report(_status(checks, figures), _render_status)
            command.exit(_code(checks))
        try:
            while True:
                document = _status(*_look(command))
                if form is output.Format.JSON:
                    output.write_json(document, one_line=True)
                else:
                    output.write((_CLEAR if sys.stdout.isatty() else "") + _render_status(document) + "\n")
                end = time.monotonic() + interval.total_seconds()
                while (left := end - time.monotonic()) > 0:
                    time.sleep(min(left, _SLICE_SECONDS))
        except Interrupted:
            command.exit(0)


def _look(command: "Command", job: str | None = None) -> tuple[list["Check"], dict[str, Any]]:
    """Look at everything once: the checks in their order, and the figures of the queues that could be read."""
    from functools import partial

    from crmctl.adapters import kafka, postgres
    from crmctl.adapters.bitrix24 import Bitrix24
    from crmctl.adapters.postgres import Database, Dsn
    from crmctl.cli.readers import open_letters
    from crmctl.domain import health
    from crmctl.domain.databases import DatabaseName
    from crmctl.domain.errors import ConfigurationError
    from crmctl.domain.jobs import names_in
    from crmctl.jobs import examine, examine_database, examine_dead_letters, examine_installations, examine_kafka

    try:
        settings = command.settings
    except ConfigurationError as error:
        names = (
            *examine_database.CHECKS,
            *examine_kafka.CHECKS,
            *examine_dead_letters.CHECKS,
            *examine_installations.CHECKS,
        )
        why = "the settings cannot be read"
        return [health.failed("settings", error), *(health.skipped(name, why) for name in names)], {}
    limits = settings.database.model_copy(update={"connect_timeout": timedelta(seconds=_CONNECT_SECONDS)})

    def database(which: DatabaseName) -> examine_database.Look:
        return examine_database.Look(
            connect=lambda: postgres.connect(command.dsn(which), limits, application_name="crmctl doctor"),
            prefix=limits.role_prefix,
            job=job,
            which=which,
            jobs=names_in(which, command.databases),
        )

    every = {which: database(which) for which in command.databases}
    databases = {which: look for which, look in every.items() if job in (None, *look.jobs)}
    brokers = settings.kafka
    cluster = examine_kafka.Look(
        admin=lambda: kafka.admin(brokers, command.log),
        reader=lambda: kafka.consumer(brokers, command.log, group=settings.chat_status.group),
        chat=settings.chat_status,
    )

    def connection(which: DatabaseName = DatabaseName.MAIN) -> Database:
        try:
            dsn = command.dsn(which)
        except ConfigurationError:  # `database` says so
            dsn = Dsn("")
        return Database(dsn, limits, application_name="crmctl doctor")

    bitrix24 = settings.bitrix24.model_copy(update={"request_timeout": timedelta(seconds=_CONNECT_SECONDS)})
    letters = examine_dead_letters.Look(connection(), lambda: open_letters(command, seconds=_CONNECT_SECONDS))
    portals = examine_installations.Look(connection(DatabaseName.INSTALLATIONS), bitrix24, lambda: Bitrix24(bitrix24))
    checked = {DatabaseName.MAIN: examine_database.CHECKS, DatabaseName.INSTALLATIONS: examine_database.SECOND}
    parts = {
        **{f"the {which} database": examine.Part(checked[which], which) for which in databases},
        "kafka": examine.Part(examine_kafka.CHECKS),
        "dead letters": examine.Part(examine_dead_letters.CHECKS),
        "installations": examine.Part(examine_installations.CHECKS),
    }
    looks: dict[str, Callable[[examine.Part], None]] = {
        "dead letters": partial(examine_dead_letters.examine_dead_letters, look=letters),
        "installations": partial(examine_installations.examine_installations, look=portals),
        **{
            f"the {which} database": partial(examine_database.examine_database, look=look)
            for which, look in databases.items()
        },
        "kafka": partial(examine_kafka.examine_kafka, look=cluster),
    }
    checks = examine.examine({name: (part, looks[name]) for name, part in parts.items()})
    figures: dict[str, Any] = {"jobs": []}
    for part in parts.values():
        found = dict(part.figures)
        figures["jobs"] += found.pop("jobs", [])
        if part.database is not DatabaseName.MAIN and "outbox" in found:
            found["installations_outbox"] = found.pop("outbox")
        figures |= found
    return [health.ok("settings", "read"), *checks], figures


def _code(checks: Iterable["Check"]) -> int:
    """The exit code of the worst failure: what needs a person before what time may mend."""
    from crmctl.cli.exits import Exit, exit_code

    codes = {exit_code(check.error) for check in checks if check.error is not None}
    worst = (Exit.CONFIGURATION, Exit.UNAVAILABLE, Exit.TRY_AGAIN)
    return next((int(code) for code in worst if code in codes), Exit.BUG if codes else Exit.OK)


def _status(checks: Iterable["Check"], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The document of `status`; a queue that could not be read is null."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from crmctl.domain import health

    listed = list(checks)
    servers = ("database", "database (installations)", "kafka")
    broken = [check.name for check in listed if check.error is not None and check.name in servers]
    bookings, group = figures.get("bookings"), figures.get("group")
    return {
        "checked_at": datetime.now(UTC),
        "unreachable": broken,
        "faults": [check.document() for check in health.faults(listed)],
        "bookings": asdict(bookings) if bookings else None,
        "outbox": asdict(figures["outbox"]) if "outbox" in figures else None,
        "installations_outbox": asdict(figures["installations_outbox"]) if "installations_outbox" in figures else None,
        "deferred": asdict(figures["deferred"]) if "deferred" in figures else None,
        "group": group.document() if group else None,
        "dead_letters": asdict(figures["dead_letters"]) if "dead_letters" in figures else None,
        "installations": asdict(figures["installations"]) if "installations" in figures else None,
        "jobs": [asdict(job) for job in figures.get("jobs", ())] or None,
    }


def _render_doctor(document: Mapping[str, Any]) -> str:
    rows = [(check["result"], check["name"], check["detail"], check["fix"] or "") for check in document["checks"]]
    return output.table(("result", "check", "detail", "fix"), rows)


def _render_status(document: Mapping[str, Any]) -> str:
    faults = document["faults"]
    rows = [(fault["result"], fault["name"], fault["detail"], fault["fix"]) for fault in faults]
    text = output.table(("result", "check", "detail", "fix"), rows) if rows else "No faults.\n"
    text += "\n" + output.fields(_queues(document))
    if document["jobs"] is not None:
        now = document["checked_at"]
        elsewhere = any(job["database"] != document["jobs"][0]["database"] for job in document["jobs"])
        jobs = [
            (
                job["job"],
                *((job["database"],) if elsewhere else ()),
                job["paused"],
                _age(now, job["last_success_at"]),
                _age(now, job["last_failure_at"]),
            )
            for job in document["jobs"]
        ]
        head = ("job", *(("database",) if elsewhere else ()), "paused", "last success", "last failure")
        text += "\n" + output.table(head, jobs)
    return text


def _queues(document: Mapping[str, Any]) -> dict[str, object]:
    lines: dict[str, object] = {"At": document["checked_at"].isoformat(timespec="seconds")}
    if document["unreachable"]:
        lines["Not reachable"] = ", ".join(document["unreachable"])
    bookings, outbox, deferred, group = (document[name] for name in ("bookings", "outbox", "deferred", "group"))
    for name, phase in (bookings["phases"] if bookings else {}).items():
        lines[f"{name}: due, overdue"] = f"{phase['due_count']}, {phase['overdue_count']}"
    if bookings:
        lines["Poison, never expiring"] = (
            f"{bookings['poison_count']}, {sum(p['never_expire_count'] for p in bookings['phases'].values())}"
        )
    if outbox:
        lines["Outbox: pending, held"] = f"{outbox['pending_count']}, {outbox['held_count']}"
        lines["  oldest message, s"] = round(outbox["oldest_unpublished_seconds"])
    if other := document["installations_outbox"]:
        lines["Installations' outbox: pending, held"] = f"{other['pending_count']}, {other['held_count']}"
        lines["  its oldest message, s"] = round(other["oldest_unpublished_seconds"])
    if group:
        lines["Consumer: members, unread"] = f"{group['members']}, {group['lag_messages']}"
        lines["  oldest record, s"] = round(group["lag_seconds"])
    if deferred:
        lines["Waiting for their deal"] = deferred["deferred_count"]
    if letters := document["dead_letters"]:
        lines["Dead letters: open, lost"] = f"{letters['open_count']}, {letters['lost_count']}"
    if pairs := document["installations"]:
        names = ("stale_count", "unclear_count", "anomaly_count")
        lines["Installations: stale, unclear, anomalies"] = ", ".join(str(pairs[name]) for name in names)
    return lines


def _age(now: Any, moment: Any) -> str | None:
    return None if moment is None else f"{max(0, round((now - moment).total_seconds()))} s ago"
