"""`crmctl chat-status consume`: project messenger's events onto `deals.chat_status` (source 003).

A loop of batches; a batch is, in this order:

1. poll and decode; write the malformed records to the dead-letter topic, with no transaction open;
2. one transaction (`jobs/project_chat_status.py`) that applies the batch and the deferred events that are due. If it
   has dead letters, it is rolled back, they are written, and it runs again;
3. commit the offsets.

Killed between 1 and 2, or in 2: the records are read again; a dead letter may be written twice, with the same source
position. Killed between 2 and 3: they are read again, and are duplicates by their marks. So no offset is committed
past a record that is neither in the database nor in the dead-letter topic.

While PostgreSQL or Kafka is away, the batch is kept and tried again after 1 s, 2 s, … 60 s with paused partitions;
polling goes on, so the group does not rebalance. A pause of the job is waited out in the same way. What belongs to a
partition that has moved on is dropped: its new owner reads it.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import psycopg

from crmctl.adapters import postgres
from crmctl.adapters.dead_letters import DeadLetters, Letter, Stopped
from crmctl.adapters.postgres import Database, Transaction
from crmctl.adapters.record_source import RecordSource
from crmctl.adapters.records import RawRecord
from crmctl.domain.chat_status import Decision, ErrorCode, Event, Outcome, Plan, Position
from crmctl.domain.chat_status_decoding import MalformedError, decode
from crmctl.domain.errors import TryAgainError, UnavailableError
from crmctl.jobs.job import Run
from crmctl.jobs.job_pauses import JobPausedError, Pause, find_pause
from crmctl.jobs.job_runs import RunRecord
from crmctl.jobs.project_chat_status import Batch, DeadLettersFirst, Scope, project
from crmctl.telemetry.logs import Log
from crmctl.telemetry.metrics import ChatStatusMetrics
from crmctl.telemetry.tracing import Tracing

T = TypeVar("T")

JOB_NAME: Final = "consume-chat-status"
_POLL_SECONDS: Final = 0.2
# How often deferred events are looked at while no records come.
_RETRY_SECONDS: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
# How often it looks whether to leave a record although nothing comes.
_SIGN_SECONDS: Final = 60.0
# How often a paused consumer looks whether it may go on.
_PAUSED_SECONDS: Final = 1.0
# A member without partitions waits so long for the group to give it some, before it is caught up.
_JOIN_SECONDS: Final = 5.0
# What nobody reads about above the debug level, one by one.
_ORDINARY: Final = frozenset({Outcome.APPLIED, Outcome.STALE, Outcome.DUPLICATE})
_COUNTS: Final = {
    Outcome.APPLIED: "applied_count",
    Outcome.STALE: "stale_count",
    Outcome.DUPLICATE: "duplicate_count",
    Outcome.SOFT_DELETED: "soft_deleted_count",
    Outcome.DEFERRED: "deferred_count",
    Outcome.DEAD_LETTERED: "dead_lettered_count",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Records per transaction, and when to end: never, at today's end of the topic, or with the run's budget."""

    batch_size: int = 1000
    until_caught_up: bool = False


@dataclass(slots=True)
class Totals:
    """What the run did, in events; `caught_up` is whether it read to the end offsets seen at its start."""

    counts: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    caught_up: bool = False
    pause: Pause | None = None

    def document(self) -> dict[str, object]:
        """The result as it is printed."""
        return {
            **{name: self.counts[name] for name in _COUNTS.values()},
            "batches": self.batches,
            "caught_up": self.caught_up,
            **(self.pause.document() if self.pause else {}),
        }


@dataclass(slots=True)
class Consumption:
    """One run of the consumer, with everything that it talks to."""

    source: RecordSource
    database: Database
    dead_letters: DeadLetters
    metrics: ChatStatusMetrics
    tracing: Tracing
    log: Log
    group: str
    run: Run
    options: Options
    totals: Totals = field(default_factory=Totals)
    ready: bool = False
    _paused: bool = False
    _records: int = 0
    _next_sign: float = 0.0

    def consume(self) -> Totals:
        """Consume until a signal, the time budget, or the end. Raises what cannot be waited for."""
        try:
            self._consume()
        except JobPausedError as paused:
            self.totals.pause = paused.pause
            if not self._paused:
                self.log.warning("paused", **paused.pause.document())
        except Stopped:
            self.log.info("stopped with a batch in hand")
        except (UnavailableError, TryAgainError) as error:
            if not self.run.stopping():
                raise
            self.log.warning("stopped while it could not go on", reason=error.message)
        return self.totals

    def _consume(self) -> None:
        self._patiently(lambda: self.source.subscribe(self.run.stopping))
        ends = self._patiently(self.source.end_offsets) if self.options.until_caught_up else None
        started = last_look = time.monotonic()
        while not self.run.stopping() and not self.run.budget.spent:
            records = self._patiently(
                lambda: self.source.poll(self.options.batch_size, _POLL_SECONDS),
                wait=lambda seconds: self.source.hold(seconds, self.run.stopping),
            )
            self.source.take_moved()
            self.ready = self.source.joined
            if records or (self.source.assigned and time.monotonic() - last_look >= _RETRY_SECONDS):
                self._handle(records)
                last_look = time.monotonic()
            waited = bool(self.source.assigned) or time.monotonic() - started > _JOIN_SECONDS
            if ends is not None and waited and self.source.at_end(ends):
                while self._handle(()):  # a CronJob, too, tries again everything that is due
                    pass
                self.totals.caught_up = True
                break

    def _patiently(self, step: Callable[[], T], wait: Callable[[float], None] | None = None) -> T:
        pause, wait = 1.0, wait or self.run.wait
        while True:
            try:
                return step()
            except (UnavailableError, TryAgainError) as error:
                if self.options.until_caught_up or self.run.stopping() or self.run.budget.spent:
                    raise
                seconds = self.run.budget.cap(pause)
                self.log.warning("waiting to try again", reason=error.message, seconds=seconds)
                wait(seconds)
                pause = min(_LONGEST_PAUSE, pause * 2)

    def _handle(self, records: Sequence[RawRecord]) -> int:
        """Carry one batch through, however long PostgreSQL or Kafka is away; return how much was decided.

        Raises Stopped where a signal comes before that: nothing may be committed any more, the batch is read again.
        """
        started, decided = time.monotonic(), 0
        batch, malformed = self._decode(records)
        condemned: dict[Position, tuple[ErrorCode, str]] = {}
        pause = 1.0
        while True:
            try:
                if malformed:
                    self._check_pause()
                    self._write_letters(malformed, {}, condemned)
                    malformed = []
                if batch is not None:
                    decided = self._apply(batch, condemned)
                    batch = None
                self.source.commit()
                break
            except (JobPausedError, psycopg.Error, UnavailableError, TryAgainError) as error:
                pause = self._wait_out(error, pause)
                if self.run.stopping():
                    raise Stopped from None
                moved = self.source.take_moved()
                batch = None if batch is None else _without(batch, moved)
                malformed = [
                    letter
                    for letter in malformed
                    if letter[0].position.partition not in moved and letter[0].position not in condemned
                ]
        if records:
            self.metrics.consume_duration_ms.observe((time.monotonic() - started) * 1000)
        return decided

    def _check_pause(self, tx: Transaction | None = None) -> None:
        """Raise JobPausedError while the job is paused; without a transaction, look in one of its own."""
        pause = find_pause(tx or self.database.begin(), JOB_NAME)
        if tx is None:
            self.database.rollback()
        if pause is not None:
            raise JobPausedError(pause)
        if self._paused:
            self._paused = False
            self.log.info("resumed")

    def _wait_out(self, error: Exception, seconds: float) -> float:
        """Wait, with held partitions, for what kept the batch from being carried through; return the next wait.

        Raises what cannot be waited for, and everything when the run is to end anyway.
        """
        ending = self.options.until_caught_up or self.run.budget.spent
        if isinstance(error, JobPausedError):
            if ending:
                raise error
            if not self._paused:
                self._paused = True
                self.log.warning("paused", **error.pause.document())
            self.source.hold(self.run.budget.cap(_PAUSED_SECONDS), self.run.stopping)
            return seconds
        failure = postgres.translate(error) if isinstance(error, psycopg.Error) else error
        if not isinstance(failure, UnavailableError | TryAgainError) or ending:
            raise error
        capped = self.run.budget.cap(seconds)
        self.log.warning("waiting to try again", reason=failure.message, seconds=capped)
        self.database.close()
        self.source.hold(capped, self.run.stopping)
        return min(_LONGEST_PAUSE, seconds * 2)

    def _decode(self, records: Iterable[RawRecord]) -> tuple[Batch | None, list[Letter]]:
        events: list[Event] = []
        raws: dict[Position, RawRecord] = {}
        malformed: list[Letter] = []
        debug = self.log.is_enabled_for(logging.DEBUG)
        for record in records:
            try:
                event = decode(record.value, record.position)
            except MalformedError as error:
                malformed.append((record, ErrorCode.MALFORMED, str(error), 0))
                continue
            if debug:
                self.log.debug("consumed", **_fields(event))
            events.append(event)
            raws[record.position] = record
        return Batch(tuple(events), raws), malformed

    def _write_letters(
        self,
        letters: Sequence[Letter],
        events: Mapping[Position, Event],
        condemned: dict[Position, tuple[ErrorCode, str]],
    ) -> None:
        """Write dead letters; those that are there are condemned, so that only the others are written again."""

        def acknowledged(written: Sequence[Letter]) -> None:
            condemned.update({record.position: (code, reason) for record, code, reason, _ in written})
            self._count_letters(written, events)

        self.dead_letters.write(letters, self.run.stopping, acknowledged)

    def _count_letters(self, letters: Sequence[Letter], events: Mapping[Position, Event]) -> None:
        self.metrics.dlq.inc(len(letters))
        for record, code, reason, attempts in letters:
            event = events.get(record.position)  # None: it is malformed
            fields = _place(record.position) | (_fields(event) if event is not None else {})
            if code is ErrorCode.TENANT_MISMATCH:
                self.log.error("tenant-mismatch", **fields)
            self.log.error("dead-lettered", code=code.value, reason=reason, attempts=attempts, **fields)
        self.totals.counts["dead_lettered_count"] += len(letters)

    def _apply(self, batch: Batch, condemned: dict[Position, tuple[ErrorCode, str]]) -> int:
        """Commit the batch; write dead letters in between, with no transaction open, until it has none left."""
        while True:
            try:
                tx = self.database.begin()
                self._check_pause(tx)
                scope = Scope(
                    group=self.group,
                    topic=self.source.topic.name,
                    topic_id=self.source.topic.id,
                    partition_count=self.source.topic.partition_count,
                    partitions=tuple(self.source.assigned),
                )
                with self.tracing.batch([_traceparent(batch.raws[event.position]) for event in batch.events]):
                    decided = project(tx, scope, batch, tx.now, condemned, retry_limit=self.options.batch_size)
                counts = counts_of(decided)
                recorded = self._leave_record(tx, counts)
                self.database.commit()
            except DeadLettersFirst as first:
                self.database.rollback()
                letters = [(raw, d.code or ErrorCode.APPLY_FAILED, d.reason, d.attempts) for raw, d in first.letters]
                events = {raw.position: decision.event for raw, decision in first.letters}
                self._write_letters(letters, events, condemned)
            except BaseException:
                self._rollback()
                raise
            else:
                self._records += recorded
                self._count(decided, counts, batch)
                return len(decided.decisions)

    def _leave_record(self, tx: Transaction, counts: Mapping[str, int]) -> bool:
        """Record the batch, or now and then that there was nothing to do; whether there is a row now."""
        record = RunRecord(self.run.id, JOB_NAME, "system")
        if any(counts.values()):
            record.committed(tx, self._records + 1, counts)
            return True
        if time.monotonic() < self._next_sign:
            return False
        self._next_sign = time.monotonic() + _SIGN_SECONDS
        return record.idle(tx, self._records + 1)

    def _rollback(self) -> None:
        try:
            self.database.rollback()
        except psycopg.Error:
            self.database.close()

    def _count(self, decided: Plan, counts: Counter[str], batch: Batch) -> None:
        if any(counts.values()):
            self.totals.batches += 1
            self.log.info("batch", **counts)
        # Dead letters were counted when they were written.
        self.totals.counts.update({name: n for name, n in counts.items() if name != "dead_lettered_count"})
        debug = self.log.is_enabled_for(logging.DEBUG)
        for decision in decided.decisions:
            event, outcome = decision.event, decision.outcome
            if event.contract_version != 1 and outcome is not Outcome.DUPLICATE and event.position in batch.raws:
                self.metrics.contract_mismatch.inc()
                self.log.warning("contract mismatch", **_fields(event, decision.from_status))
            if outcome is Outcome.APPLIED:
                self.metrics.applied.labels(to_status=str(event.status)).inc()
            elif outcome is Outcome.STALE:
                self.metrics.stale.inc()
            elif outcome is Outcome.DUPLICATE:
                self.metrics.duplicates.inc()
            if debug or outcome not in _ORDINARY or event.failure_reason is not None:
                self._tell(decision)

    def _tell(self, decision: Decision) -> None:
        """One line per event: what is ordinary at debug level, what someone may have to look at above it."""
        event = decision.event
        if decision.outcome is Outcome.DEAD_LETTERED:
            return  # told when it was written
        tell = self.log.debug
        if decision.outcome in (Outcome.DEFERRED, Outcome.SOFT_DELETED):
            tell = self.log.warning
        elif decision.outcome is Outcome.APPLIED and event.failure_reason is not None:
            tell = self.log.info
        tell(decision.outcome.value, **_fields(event, decision.from_status))


def _fields(event: Event, from_status: str | None = None) -> dict[str, object]:
    """What every line about an event says (source 003, observability)."""
    return {
        "DealId": event.deal_id,
        "TenantId": event.tenant_id,
        "ChatId": event.chat_id,
        "FromStatus": from_status,
        "ToStatus": event.sent_status,
        "MessageId": event.message_id,
        "FailureReason": event.failure_reason,
        "payload.Version": event.contract_version,
    }


def counts_of(decided: Plan) -> Counter[str]:
    """What was decided, by the names of the result."""
    return Counter(_COUNTS[decision.outcome] for decision in decided.decisions)


def _without(batch: Batch, partitions: set[int]) -> Batch:
    if not partitions:
        return batch
    return Batch(tuple(e for e in batch.events if e.position.partition not in partitions), batch.raws)


def _traceparent(record: RawRecord) -> str | None:
    return next((value.decode("latin-1") for name, value in record.headers if name == "traceparent" and value), None)


def _place(position: Position) -> dict[str, object]:
    return {"partition": position.partition, "offset": position.offset}
