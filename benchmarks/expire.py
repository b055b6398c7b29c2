"""`crmctl bookings expire --drain` beside psql, one giant statement and an ORM loop, and under adverse conditions.

Every drain starts from its own copy of the same database, ends with a count of what it did, and is measured
once per round, the rounds forwards and backwards in turn, so that the machine's drift falls on all alike.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Final

import psycopg
from psycopg.rows import tuple_row

from benchmarks import orm, psql
from benchmarks.harness import Figure, Lab, Report, Scale, compare, run_crmctl, say

# What the drain must reach of the giant statement, by its batch size.
_GIANT_TARGETS: Final = {1000: 0.75, 5000: 0.90}
_SMALL, _LARGE = _GIANT_TARGETS
_UNIT: Final = "bookings/s"
_MEMORY_TARGET_MIB: Final = 96

# The 10,000 (or fewer) due rows that both phases' queues begin with.
_LOCK_HEAD: Final = """
    select from crm.bookings
    where id in (
        select id
        from (
            select id, reserve_expires_at as deadline
            from crm.bookings
            where status in ('Reserved', 'AwaitingPayment')
            union all
            select id, booking_expires_at
            from crm.bookings
            where status = 'Booked'
        ) as queue
        where deadline < %(as_of)s
        order by deadline
        limit %(limit)s
    )
    for no key update
"""

# What a drain did: transitions, events, timeline rows, and how many bookings those events are about.
_DONE: Final = """
    select (select count(*) from crm.bookings where expired_at = %(as_of)s),
           (select count(*) from crm.outbox_messages),
           (select count(*) from crm.deal_timeline_events),
           (
               select count(distinct b.id)
               from crm.outbox_messages o
               join crm.bookings b on b.id = o.aggregate_id::uuid
               where b.expired_at = %(as_of)s
           )
"""


class _Drains:
    """The drains of one benchmark run: rates in bookings per second by name, one per round."""

    def __init__(self, lab: Lab, scale: Scale) -> None:
        self._lab = lab
        self._scale = scale
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.peaks: list[float] = []
        # What is compared with each other stands close together.
        self._measurements = {
            **self._beside_psql(_SMALL),
            "locked head": self._locked_head,
            "old snapshot": self._old_snapshot,
            "orm": self._orm,
            "giant": self._giant,
            **self._beside_psql(_LARGE),
            "two workers": self._two_workers,
        }

    def _beside_psql(self, size: int) -> dict[str, Callable[[str], float]]:
        return {
            f"psql, whole job {size}": partial(self._psql, size=size, whole_job=True),
            f"psql, expire only {size}": partial(self._psql, size=size, whole_job=False),
            f"crmctl {size}": partial(self._crmctl, size=size),
        }

    def run(self) -> None:
        """Measure everything once per round."""
        for number in range(self._scale.rounds):
            names = list(self._measurements)
            for name in names if number % 2 == 0 else reversed(names):
                with self._lab.database() as url:
                    rate = self._measurements[name](url)
                self.rates[name].append(rate)
                say(f"round {number + 1} of {self._scale.rounds}: {name}: {rate:,.0f} {_UNIT}")

    def _crmctl(self, url: str, size: int) -> float:
        self._lab.checkpoint()
        (report,) = self._drain(url, size)
        self._verify(url, self._lab.total_due)
        self.rates[f"process {size}"].append(self._lab.total_due / report.seconds)
        return self._lab.total_due / _job_seconds(report)

    def _psql(self, url: str, size: int, whole_job: bool) -> float:
        self._lab.checkpoint()
        seconds = psql.drain(url, self._lab.due, size, self._lab.as_of, whole_job=whole_job)
        self._verify(url, self._lab.total_due)
        return self._lab.total_due / seconds

    def _giant(self, url: str) -> float:
        self._lab.checkpoint()
        seconds = psql.giant(url, self._lab.as_of, self._lab.total_due)
        self._verify(url, self._lab.total_due)
        return self._lab.total_due / seconds

    def _orm(self, url: str) -> float:
        self._lab.checkpoint()
        size = _SMALL
        expired, seconds = orm.drain(url, self._lab.as_of, size, batches=_orm_batches(self._scale))
        self._verify(url, expired)
        return expired / seconds

    def _locked_head(self, url: str) -> float:
        with psycopg.connect(url) as other:
            other.execute(_LOCK_HEAD, {"as_of": self._lab.as_of, "limit": self._scale.locked})
            self._lab.checkpoint()
            (report,) = self._drain(url, _SMALL)
            free = self._lab.total_due - self._scale.locked
            self._verify(url, free)
            skipped = report.document["skipped_locked_count"]
            if skipped != self._scale.locked:
                raise AssertionError(f"{self._scale.locked} rows were locked, {skipped} were reported as skipped")
        return free / _job_seconds(report)

    def _old_snapshot(self, url: str) -> float:
        with psycopg.connect(url) as other:
            other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            other.execute("select count(*) from crm.bookings")
            self._lab.checkpoint()
            (report,) = self._drain(url, _SMALL)
            self._verify(url, self._lab.total_due)
        return self._lab.total_due / _job_seconds(report)

    def _two_workers(self, url: str) -> float:
        self._lab.checkpoint()
        reports = self._drain(url, _LARGE, processes=2)
        self._verify(url, self._lab.total_due)
        return self._lab.total_due / max(report.seconds for report in reports)

    def _drain(self, url: str, size: int, processes: int = 1) -> list[Report]:
        options = ("--drain", "--batch-size", str(size), "--time-budget", "10m", "-o", "json")
        as_of = self._lab.as_of.isoformat()
        reports = run_crmctl("bookings", "expire", *options, "--as-of", as_of, url=url, processes=processes)
        self.peaks += [report.peak_mib for report in reports]
        return reports

    def _verify(self, url: str, expected: int) -> None:
        with psycopg.connect(url, row_factory=tuple_row) as connection:
            done = connection.execute(_DONE, {"as_of": self._lab.as_of}).fetchone()
        if done != (expected,) * 4:
            raise AssertionError(f"{expected} bookings were to expire: expired, events, timeline, bookings = {done}")


def measure(lab: Lab, scale: Scale) -> list[Figure]:
    """The drain's ratios, then its peak memory."""
    drains = _Drains(lab, scale)
    drains.run()
    rates = drains.rates
    figures = []
    for size, giant_target in _GIANT_TARGETS.items():
        ours, label = rates[f"crmctl {size}"], f"drain, N = {size}"
        whole_job, expire_only = rates[f"psql, whole job {size}"], rates[f"psql, expire only {size}"]
        figures += [
            compare(f"{label}, by psql, every statement of the job", ours, whole_job, 0.90, _UNIT),
            compare(f"{label}, by psql, only the expire statements", ours, expire_only, 0.90, _UNIT),
            compare(f"{label}, by one giant statement per phase", ours, rates["giant"], giant_target, _UNIT),
            compare(f"its floor: psql, only expire, N = {size}, by giant", expire_only, rates["giant"], None, _UNIT),
            compare(f"{label}, whole process by the job itself", rates[f"process {size}"], ours, None, _UNIT),
        ]
    small = rates[f"crmctl {_SMALL}"]
    figures += [
        compare("drain, N = 1000, by the ORM loop", small, rates["orm"], 8, _UNIT),
        compare(f"{scale.locked:,} head rows locked, by the clean drain", rates["locked head"], small, 0.85, _UNIT),
        compare("beside an old snapshot, by the clean drain", rates["old snapshot"], small, 0.85, _UNIT),
        compare(
            "two workers, N = 5000, by one; zero double events", rates["two workers"], rates["process 5000"], 1.2, _UNIT
        ),
    ]
    return [*figures, _memory(drains.peaks)]


def _memory(peaks: list[float]) -> Figure:
    peak = max(peaks)
    met = peak <= _MEMORY_TARGET_MIB
    return Figure("peak memory of any drain", f"{peak:.1f} MiB", "", f"≤ {_MEMORY_TARGET_MIB} MiB", met)


def _job_seconds(report: Report) -> float:
    """The duration that the job itself reports: from connecting to the last commit."""
    milliseconds: int = report.document["duration_ms"]
    return milliseconds / 1000


def _orm_batches(scale: Scale) -> int:
    """The ORM loop drains a tenth: it keeps its pace, and the bench its time."""
    return max(1, scale.due // 10 // (2 * _SMALL))
