"""`crmctl bookings expire`: expire the reserves and bookings whose deadline has passed (UC-BKG-003, steps 1-7).

One batch is one transaction. It changes, in this order and for up to N due bookings of each phase:

1. `bookings`: locks the rows by (deadline, id) with FOR NO KEY UPDATE SKIP LOCKED, then moves them to
   ReserveExpired or BookingExpired with expired_at = AsOf and version + 1 (INV-BKG-5);
2. `deal_timeline_events`: one BookingReserveExpired or BookingExpired row each;
3. `outbox_messages`: one BookingExpiredEvent each, which `crmctl outbox relay` publishes after the commit;
4. `job_runs`: the batch's own record, written by the wrapper in the same transaction.

1 to 3 are a single statement (`sql/expire_bookings.sql`, `expire`). A crash at any point leaves all of a batch or
nothing of it, and the next run goes on from there: expired rows have left the queue (INV-BKG-8). No row lock is
waited for: a row that a manager or another worker holds is skipped, counted, and picked up by a later run. A
confirm with an optimistic `version` loses if it commits after us, since we raise the version, and wins if
it commits before, since the lock sees its row as it is then (AC5).

Poison rows never fail the batch. A row that breaks a rule of the domain is left out by the query itself. A row
on which the write fails (SQLSTATE classes 22, 23, 27, 44, P0) is found by halving the batch under savepoints;
each half selects again, because rolling back to a savepoint gives its locks back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import psycopg
from psycopg.rows import DictRow

from crmctl.adapters.postgres import Transaction, describe, is_data_error
from crmctl.domain.bookings import BOOKING, PHASES, RESERVE, Phase
from crmctl.domain.errors import BookingNotFoundError, UsageError
from crmctl.domain.events import BOOKING_EXPIRED
from crmctl.jobs.job import Job, Run
from crmctl.sql import load
from crmctl.telemetry.logs import Log

# The result lists so many of a run; the log names so many of each phase and batch, and counts the rest.
POISON_LIST_LIMIT: Final = 100
POISON_LOG_LIMIT: Final = 10_000
# A BEFORE UPDATE trigger of the CRM returned null: the row stays as it is, without an error.
UPDATE_SUPPRESSED: Final = "UPDATE_SUPPRESSED"


@dataclass(frozen=True, slots=True)
class Options:
    """What one run was asked for. `as_of` None means each batch's transaction timestamp."""

    batch_size: int = 1000
    drain: bool = False
    time_budget: timedelta = timedelta(seconds=50)
    max_expire: int | None = None
    tenant_id: UUID | None = None
    booking_ids: tuple[UUID, ...] = ()
    as_of: datetime | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Poison:
    """A due booking that could not be expired, and why."""

    booking_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class NotExpired:
    """A booking that was named with --id and did not expire in this run, and why."""

    booking_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Key:
    """A place in the queue of one phase: the row comparison is (deadline, id). The deadline is PostgreSQL's text."""

    deadline: str
    id: UUID


START: Final = Key("-infinity", UUID(int=0))
END: Final = Key("infinity", UUID(int=2**128 - 1))


@dataclass(frozen=True, slots=True)
class Result:
    """What a run did: the metrics of UC-BKG-003 step 7, counted in rows."""

    as_of: datetime | None = None
    reserve_expired_count: int = 0
    booking_expired_count: int = 0
    skipped_locked_count: int = 0
    poison_count: int = 0
    undetermined_count: int = 0
    poison: tuple[Poison, ...] = ()
    not_expired: tuple[NotExpired, ...] = ()
    batches: int = 0
    has_more: bool = False

    @property
    def expired_count(self) -> int:
        """Bookings of both phases."""
        return self.reserve_expired_count + self.booking_expired_count


@dataclass(frozen=True, slots=True)
class Progress:
    """The result so far, and how far each phase's queue has been walked (END when it is exhausted).

    The result lists the run's first poison bookings; `just_found` are the last batch's, for the log.
    """

    result: Result = field(default_factory=Result)
    floors: Mapping[str, Key] = field(default_factory=lambda: {phase.name: START for phase in PHASES})
    just_found: tuple[Poison, ...] = ()
    more: bool = False
    failure: None = None

    @property
    def needs_person(self) -> bool:
        """Poison and undetermined rows stay due until somebody mends them."""
        return self.result.poison_count + self.result.undetermined_count > 0

    def counts(self) -> dict[str, int]:
        """The result's figures, without has_more."""
        return {
            f.name: value
            for f in fields(self.result)
            if f.name.endswith("_count") and isinstance(value := getattr(self.result, f.name), int)
        }

    def document(self) -> dict[str, object]:
        """The result, field by field."""
        return asdict(self.result)


def _statements(phase: Phase) -> dict[str, str]:
    """Fill the templates of `sql/expire_bookings.sql` in for one phase."""
    raw = load("expire_bookings")

    def names(of: Phase) -> dict[str, object]:
        return {"deadline": of.deadline, "base": of.base, "duration": of.duration}

    def literals(*statuses: str) -> str:
        return ", ".join(f"'{status}'" for status in statuses)

    common = {
        **names(phase),
        "index": phase.index,
        "statuses": literals(*phase.statuses),
        "target": phase.target,
        "phase": phase.name,
        "timeline_type": phase.timeline_type,
        "topic": BOOKING_EXPIRED.topic,
        "aggregate_type": BOOKING_EXPIRED.aggregate_type,
        "contract_version": BOOKING_EXPIRED.contract_version,
        "defect": raw["defect"].format(**names(phase)),
        "reserve_statuses": literals(*RESERVE.statuses),
        "booking_statuses": literals(*BOOKING.statuses),
        "terminal_statuses": literals(*(p.target for p in PHASES)),
        "reserve_defect": raw["defect"].format(**names(RESERVE)),
        "booking_defect": raw["defect"].format(**names(BOOKING)),
    }
    for fragment in ("queue", "behind_floor"):
        common[fragment] = raw[fragment].format(**common)
    return {name: statement.format(**common) for name, statement in raw.items() if name != "prepare"}


PREPARE: Final = load("expire_bookings")["prepare"]
STATEMENTS: Final = {phase.name: _statements(phase) for phase in PHASES}


def batch(tx: Transaction, run: Run, options: Options, before: Progress) -> Progress:
    """Expire up to `options.batch_size` due bookings of each phase, behind where the last batch stopped.

    Raises UsageError for an `as_of` in the future of PostgreSQL's clock (except in a dry run) and
    BookingNotFoundError for a `booking_ids` entry that does not exist; then nothing has been written.
    """
    as_of = _as_of(tx, options)
    tx.execute(PREPARE)
    after, found = before, list[Poison]()
    for phase in PHASES:
        if after.floors[phase.name] != END:
            after, poison = _expire_phase(tx, run, options, phase, as_of, after)
            found += poison
    has_more = any(floor != END for floor in after.floors.values())
    result = replace(
        after.result,
        as_of=as_of,
        batches=before.result.batches + 1,
        poison=(*before.result.poison, *found)[:POISON_LIST_LIMIT],
        not_expired=_not_expired(tx, options, as_of, after.floors, found),
        has_more=has_more,
    )
    capped = options.max_expire is not None and result.expired_count >= options.max_expire
    return replace(after, result=result, just_found=tuple(found), more=has_more and not capped)


def _as_of(tx: Transaction, options: Options) -> datetime:
    if options.as_of is None:
        return tx.now
    if options.as_of > tx.now and not options.dry_run:
        raise UsageError(
            f"--as-of {options.as_of.isoformat()} lies in the future of PostgreSQL's clock",
            hint="expiry is final: a time to come is accepted with --dry-run only",
        )
    return options.as_of


def _expire_phase(
    tx: Transaction, run: Run, options: Options, phase: Phase, as_of: datetime, before: Progress
) -> tuple[Progress, tuple[Poison, ...]]:
    """One batch of one phase: expire, then look back at what was passed over. Also returns the poison found."""
    result, floor = before.result, before.floors[phase.name]
    limit = max(options.batch_size, len(options.booking_ids))
    if options.max_expire is not None:
        limit = min(limit, options.max_expire - result.expired_count)
    queue = _Queue(tx, phase, options, as_of, run)
    if limit == 0:
        stop = floor if queue.count_due(floor, 1) else END
        return replace(before, floors={**before.floors, phase.name: stop}), ()

    walk = queue.walk(floor, limit)
    left = queue.left_behind(floor, walk)
    result = replace(
        result,
        reserve_expired_count=result.reserve_expired_count + (walk.expired if phase is RESERVE else 0),
        booking_expired_count=result.booking_expired_count + (walk.expired if phase is BOOKING else 0),
        skipped_locked_count=result.skipped_locked_count + left["skipped_locked_count"],
        poison_count=result.poison_count + left["defect_count"] + len(walk.failed),
        undetermined_count=result.undetermined_count + walk.undetermined,
    )
    floors = {**before.floors, phase.name: walk.reached if left["has_more"] else END}
    return replace(before, result=result, floors=floors), (*(Poison(**row) for row in left["defects"]), *walk.failed)


@dataclass(frozen=True, slots=True)
class _Walk:
    """What one batch did in one phase: it walked the queue from its floor to `reached`."""

    reached: Key
    expired: int = 0
    failed: tuple[Poison, ...] = ()
    undetermined: int = 0


class _Queue:
    """The queue of one phase within one transaction."""

    def __init__(self, tx: Transaction, phase: Phase, options: Options, as_of: datetime, run: Run) -> None:
        self._tx = tx
        self._run = run
        self._sql = STATEMENTS[phase.name]
        self._scope: dict[str, object] = {
            "as_of": as_of,
            "tenant_id": options.tenant_id,
            "booking_ids": list(options.booking_ids) or None,
            "traceparent": run.traceparent,
        }

    def walk(self, floor: Key, limit: int) -> _Walk:
        """Expire up to `limit` rows behind `floor`; find the rows on which the write fails by halving.

        A window that fails is tried again at half its size, one that succeeds lets the next one double. At
        size 0 a single row is locked and tried: if it fails, it is poison. Poison does not count against `limit`.
        """
        walk, window, troubled = _Walk(floor), limit, False
        while walk.expired < limit and walk.reached != END:
            if troubled and self._run.budget.spent:
                return replace(walk, undetermined=self.count_due(walk.reached, limit - walk.expired))
            before = walk
            window = min(window, limit - walk.expired)
            try:
                walk = self._expire(walk, window) if window else self._expire_single(walk)
            except psycopg.Error as error:
                if not is_data_error(error):
                    raise
                window, troubled = window // 2, True
            else:
                if walk.expired > before.expired:
                    window = max(1, min(window * 2, limit))
        return walk

    def _expire(self, walk: _Walk, window: int, only: UUID | None = None) -> _Walk:
        """Expire up to `window` rows behind the walk's end; fewer than that means END."""
        scope = self._scope if only is None else {**self._scope, "booking_ids": [only]}
        with self._tx.savepoint():
            row = self._tx.one(self._sql["expire"], {**scope, **_behind(walk.reached), "batch_size": window})
        full = row["picked_count"] == window
        reached = Key(row["reached_deadline"], row["reached_id"]) if full else END
        suppressed = tuple(Poison(str(booking_id), UPDATE_SUPPRESSED) for booking_id in row["suppressed_ids"])
        return replace(
            walk,
            reached=reached,
            expired=walk.expired + row["expired_count"],
            failed=(*walk.failed, *suppressed),
        )

    def _expire_single(self, walk: _Walk) -> _Walk:
        """Expire the next row alone, locked first, so that a failure can be blamed on its id."""
        row = self._tx.first(self._sql["pick_one"], {**self._scope, **_behind(walk.reached)})
        if row is None:
            return replace(walk, reached=END)
        here = Key(row["deadline"], row["id"])
        try:
            return replace(self._expire(walk, 1, only=here.id), reached=here)
        except psycopg.Error as error:
            if not is_data_error(error):
                raise
            return replace(walk, reached=here, failed=(*walk.failed, Poison(str(here.id), describe(error))))

    def left_behind(self, floor: Key, walk: _Walk) -> DictRow:
        """Count what stands between `floor` and the end of `walk` and is still due, by reason."""
        return self._tx.one(
            self._sql["left_behind"],
            {
                **self._scope,
                **_behind(floor),
                "reached_deadline": walk.reached.deadline,
                "reached_id": walk.reached.id,
                "end_id": END.id,
                "failed_ids": [UUID(poison.booking_id) for poison in walk.failed],
                "list_limit": POISON_LOG_LIMIT,
            },
        )

    def count_due(self, floor: Key, limit: int) -> int:
        """Count the rows behind `floor` that may expire, up to `limit`."""
        row = self._tx.one(self._sql["count_due"], {**self._scope, **_behind(floor), "count_limit": limit})
        return int(row["count"])


def _behind(floor: Key) -> dict[str, object]:
    return {"floor_deadline": floor.deadline, "floor_id": floor.id}


def _not_expired(
    tx: Transaction, options: Options, as_of: datetime, floors: Mapping[str, Key], failed: Iterable[Poison]
) -> tuple[NotExpired, ...]:
    """Say of each booking named with --id why it did not expire; one that does not exist is an error."""
    if not options.booking_ids:
        return ()
    rows = tx.all(
        STATEMENTS[RESERVE.name]["not_expired"],
        {
            "as_of": as_of,
            "tenant_id": options.tenant_id,
            "booking_ids": list(options.booking_ids),
            "reserve_floor_deadline": floors[RESERVE.name].deadline,
            "reserve_floor_id": floors[RESERVE.name].id,
            "booking_floor_deadline": floors[BOOKING.name].deadline,
            "booking_floor_id": floors[BOOKING.name].id,
        },
    )
    missing = [str(row["booking_id"]) for row in rows if row["reason"] == "NOT_FOUND"]
    if missing:
        raise BookingNotFoundError(
            f"no such booking: {', '.join(missing[:10])}", hint="nothing was expired; check --id and --tenant"
        )
    poison = {poison.booking_id: poison.reason for poison in failed}
    reasons = {str(row["booking_id"]): row["reason"] for row in rows if row["reason"] != "EXPIRED"} | poison
    return tuple(NotExpired(booking_id, reason) for booking_id, reason in reasons.items())


def _log(log: Log, before: Progress, after: Progress) -> None:
    for poison in after.just_found:
        log.error("poison booking", booking_id=poison.booking_id, reason=poison.reason)
    unnamed = after.result.poison_count - before.result.poison_count - len(after.just_found)
    if unnamed:
        log.error("poison bookings that are not named here", count=unnamed)


JOB: Final = Job(name="expire-bookings", actor="system", start=lambda _: Progress(), batch=batch, log=_log)
