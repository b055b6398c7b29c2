"""The one wrapper around every job: transaction, job, commit, next batch, report.

A job never commits, prints or catches a signal; it is given an open transaction and the progress so far, and
returns the progress after it. Here that work is committed together with its `job_runs` row, retried as a
whole on a serialization failure or a deadlock, and reported once.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Generic, NoReturn, TypeVar
from uuid import UUID, uuid4

import psycopg
import typer
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from crmctl.adapters import postgres
from crmctl.adapters.postgres import Transaction
from crmctl.cli import output
from crmctl.cli.command import Command
from crmctl.cli.exits import Exit
from crmctl.cli.signals import Interrupted
from crmctl.domain import jobs
from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import CrmctlError, TryAgainError, UnavailableError
from crmctl.jobs.job import Budget, Job, Progress, Run
from crmctl.jobs.job_pauses import Pause, find_pause
from crmctl.jobs.job_runs import RunRecord
from crmctl.telemetry.trace_context import traceparent

O = TypeVar("O")  # noqa: E741
P = TypeVar("P", bound=Progress)
_FAILURE_RECORD_TIMEOUT: Final = timedelta(seconds=1)
# Seconds between two looks at an empty queue, and the longest wait for a server that is away.
_FOLLOW_PAUSE: Final = 1.0
_FOLLOW_LONGEST_PAUSE: Final = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """How a command's result is shown: the format, and the table that people get."""

    format: output.Format
    render: Callable[[Mapping[str, Any]], str]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How the batches of a run follow each other: one, or `drain`, or `follow` until a signal."""

    as_of: datetime | None = None
    drain: bool = False
    follow: bool = False
    time_budget: timedelta | None = None
    dry_run: bool = False


def run_job(command: Command, job: Job[O, P], options: O, view: View, plan: Plan) -> NoReturn:
    """Run a job's batches, one transaction each, print the result and exit with its code."""
    interrupts = command.interrupts
    run = Run(uuid4(), traceparent(), Budget(plan.time_budget), stopping=lambda: interrupts.pending is not None)
    command.kind = jobs.kind_of(job.name)
    command.bind(job=job.name, run_id=str(run.id), dry_run=plan.dry_run or None)
    runner = _Runner(command, job, options, run, plan)
    # Until the result is printed a signal is raised in an open transaction or a pause only, and noted elsewhere.
    interrupts.settle()
    runner.run()
    progress, paused = runner.progress, runner.pause.document() if runner.pause else {}
    command.log.info("run finished", **progress.counts(), **paused, duration_ms=command.elapsed_ms)
    if not plan.follow:
        document = {"job": job.name, "run_id": run.id, "dry_run": plan.dry_run, **progress.document(), **paused}
        command.report(
            {**document, "duration_ms": command.elapsed_ms}, lambda result: render_result(result, view.render)
        )
    command.exit(Exit.NEEDS_PERSON if view.strict and progress.needs_person else Exit.OK)


def run_query(
    name: str,
    query: Callable[[Transaction], Mapping[str, Any]],
    view: View,
    database: DatabaseName = DatabaseName.MAIN,
) -> NoReturn:
    """Run a read-only query in one transaction, print what it returns and exit."""
    with Command(view.format) as command:
        command.use_database(database)
        connection = command.database(f"crmctl {name}")
        document = query(connection.begin(read_only=True))
        connection.rollback()
        command.report(document, view.render)
        command.exit(Exit.OK)


class _Runner(Generic[O, P]):
    """The transactions of one run."""

    def __init__(self, command: Command, job: Job[O, P], options: O, run: Run, plan: Plan) -> None:
        self._command = command
        self._job = job
        self._options = options
        self._run = run
        self._plan = plan
        self._database = command.database(f"crmctl {job.name}", **job.guards)
        self._retrying = Retrying(
            retry=retry_if_exception(_may_succeed_again),
            stop=stop_after_attempt(command.settings.database.transaction_attempts),
            wait=wait_random_exponential(multiplier=0.05, max=2),
            sleep=self._sleep,
            before_sleep=self._before_retry,
            reraise=True,
        )
        self._record = RunRecord(run.id, job.name, job.actor, plan.as_of)
        self._batches = 0
        self._warned: set[str] = set()
        self._started_at: datetime | None = None
        self._in_batch = False
        self.progress: P = job.start(options)
        # What ended the run, or what `follow` waits for.
        self.pause: Pause | None = None

    def run(self) -> None:
        """Run the plan; on a failure leave its record, and say what had been committed before it."""
        if self._plan.dry_run:
            self.progress = self._retrying(self._preview)
            return
        try:
            if self._plan.follow:
                self._follow()
            else:
                self._commit_batches()
        except BaseException as error:
            if any(self.progress.counts().values()):
                self._command.committed = {"batches": self._batches, **self.progress.counts()}
                self._command.log.info("committed before the failure", **self._command.committed)
            self._record_failure(error)
            raise

    def _commit_batches(self) -> None:
        """Commit one batch, or with `drain` one after the other until nothing new is reached or time is up.

        A signal that arrives when all of that is done comes too late; a graceful batch may have been cut short by it.
        """
        while True:
            self.progress = self._prepared(self.progress)
            self._retrying(self._commit_batch)
            if self.pause is not None:
                return
            if self.progress.failure is not None:
                raise self.progress.failure
            if not self.progress.more:
                return
            if self._plan.drain or self._job.graceful:
                self._command.interrupts.check()
            if not self._plan.drain or self._run.budget.spent:
                return

    def _follow(self) -> None:
        """Commit batch after batch until a signal: at once while there is more, else after a second.

        What is unreachable or busy is waited for, longer each time; so is the end of a pause. Other failures end it.
        """
        troubles = 0
        try:
            while True:
                before, paused = self.progress.counts(), self.pause
                try:
                    self._retrying(self._commit_batch)
                    failure = self.progress.failure if self.pause is None else None
                    self._tell_pause(paused)
                except (psycopg.Error, CrmctlError) as error:
                    explained = self._command.explain(error)
                    if not isinstance(explained, UnavailableError | TryAgainError):
                        raise
                    failure = explained
                    self._database.close()
                self._report_batch(before)
                self._command.interrupts.check()
                if failure is not None and not isinstance(failure, UnavailableError | TryAgainError):
                    raise failure
                troubles = troubles + 1 if failure is not None else 0
                if failure is not None:
                    pause = min(_FOLLOW_LONGEST_PAUSE, 2.0 ** min(troubles - 1, 10))
                    self._command.log.warning("waiting to try again", reason=str(failure), seconds=pause)
                    self._sleep(pause)
                elif self.pause is not None or not self.progress.more:
                    self._sleep(_FOLLOW_PAUSE)
        except Interrupted:
            return

    def _tell_pause(self, before: Pause | None) -> None:
        if self.pause is not None and before is None:
            self._command.log.warning("paused", **self.pause.document())
        elif self.pause is None and before is not None:
            self._command.log.info("resumed")

    def _report_batch(self, before: Mapping[str, int]) -> None:
        counts = _difference(before, self.progress.counts())
        if any(counts.values()):
            self._command.report_line({"job": self._job.name, "run_id": self._run.id, "batch": self._batches, **counts})

    def _preview(self) -> P:
        """Do the same work in one transaction and roll it back."""
        progress = self._prepared(self.progress)
        try:
            tx = self._begin()
            while self.pause is None:
                with self._command.interrupts.interruptible():
                    progress = self._job.batch(tx, self._run, self._options, progress)
                if not self._plan.drain or not progress.more or self._run.budget.spent:
                    return progress
                if self._job.prepare is not None:
                    self._rollback()
                    progress = self._prepared(progress)
                    tx = self._begin()
            return progress
        finally:
            self._rollback()

    def _prepared(self, progress: P) -> P:
        """What the job does before a batch, with no transaction open."""
        if self._job.prepare is None:
            return progress
        self._begin()
        self._rollback()
        if self.pause is not None:
            return progress
        progress = self._job.prepare(self._run, self._options, progress)
        self._command.interrupts.check()
        return progress

    def _commit_batch(self) -> None:
        before = self.progress
        try:
            tx = self._begin()
            if self.pause is not None:
                self._rollback()
                return
            with nullcontext() if self._job.graceful else self._command.interrupts.interruptible():
                after = self._job.batch(tx, self._run, self._options, before)
                if after.counts() != before.counts():
                    self._record.committed(tx, self._batches + 1, _difference(before.counts(), after.counts()))
                elif after.failure is None and getattr(after, "skipped", None) is None:
                    # It had nothing to do; a run that was kept from its work leaves no sign of life.
                    self._record.idle(tx, self._batches + 1)
        except BaseException:
            self._rollback()
            raise
        try:
            self._database.commit()
        except psycopg.Error as error:
            self._rollback()
            raise _explain_commit(error, self._run.id) from None
        self._in_batch = False
        self._batches += 1
        self.progress = after
        self._job.log(self._command.log, before, after)

    def _begin(self) -> Transaction:
        """Open a transaction, and see whether the job is paused."""
        with self._command.interrupts.interruptible():
            tx = self._database.begin()
            self.pause = find_pause(tx, self._job.name)
        self._started_at, self._in_batch = tx.now, True
        for warning in set(self._database.warnings) - self._warned:
            self._warned.add(warning)
            self._command.log.warning(warning)
        return tx

    def _sleep(self, seconds: float) -> None:
        with self._command.interrupts.interruptible():
            time.sleep(seconds)

    def _rollback(self) -> None:
        try:
            self._database.rollback()
        except psycopg.Error:
            self._database.close()

    def _record_failure(self, error: BaseException) -> None:
        """Leave a row about a run that failed; best effort, and only where the job had begun its work."""
        failure = self._command.explain(error)
        begun = self._started_at is not None or self._job.prepare is not None
        stopped_between_batches = isinstance(error, Interrupted) and not self._in_batch
        if not begun or stopped_between_batches or isinstance(error, typer.Exit):
            return
        guards = {"statement_timeout": _FAILURE_RECORD_TIMEOUT, "lock_timeout": _FAILURE_RECORD_TIMEOUT}
        try:
            self._database.close()
            database = self._command.database(
                f"crmctl {self._job.name}", connect_timeout=timedelta(seconds=1), **guards
            )
            tx = database.begin()
            self._record.failed(
                tx,
                self._batches + 1,
                began=self._started_at or tx.now,
                code=failure.code if isinstance(failure, CrmctlError) else type(failure).__name__,
                message=failure.message if isinstance(failure, CrmctlError) else None,
            )
            database.commit()
        except (psycopg.Error, CrmctlError) as reason:
            self._command.log.debug("the failure could not be recorded", reason=type(reason).__name__)

    def _before_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        reason = postgres.describe(error) if isinstance(error, psycopg.Error) else None
        self._command.log.warning("retrying the transaction", attempt=state.attempt_number, reason=reason)


def render_result(document: Mapping[str, Any], render: Callable[[Mapping[str, Any]], str]) -> str:
    """The result; where the run was kept from its work: by what, and then what it had done before that."""
    if document.get("skipped") is None:
        return render(document)
    if "paused_by" in document:
        text = output.fields(
            {
                "Skipped": document["skipped"],
                "By": document["paused_by"],
                "Since": document["paused_at"],
                "Reason": document["pause_reason"],
                "Go on with": f"crmctl jobs resume {document['job']}",
            }
        )
    else:
        text = f"Skipped: {document['skipped']} by another run of {document['job']}.\n"
    return f"{text}\n{render(document)}" if document.get("batches") else text


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _may_succeed_again(error: BaseException) -> bool:
    return isinstance(error, psycopg.Error) and error.sqlstate in postgres.RETRYABLE


def _explain_commit(error: psycopg.Error, run_id: UUID) -> Exception:
    """A connection lost during COMMIT leaves the outcome unknown; anything else was a rollback."""
    failure = postgres.translate(error)
    if isinstance(failure, CrmctlError) and error.sqlstate is None:
        return type(failure)(
            f"the connection was lost during the commit of run {run_id}: it may or may not have been kept",
            hint="running it again is safe in both cases",
        )
    return error
