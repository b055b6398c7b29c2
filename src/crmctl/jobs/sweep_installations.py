"""`crmctl installations sweep`: end installs whose finish step never arrived (source 000, docs/stale-installations.md).

Without `--verify-portal` a batch is one transaction, the third of these. With it, three kinds of transactions:

1. **claim** (`prepare`): takes an advisory transaction lock, so that claims follow each other; selects up to N stale
   installations in the order of next_check_at, locks them with SKIP LOCKED, and commits a lease for each in
   `installation_checks`. From then on no other sweep asks for them, nor for others of their portals. No transaction
   is open while portals are asked, on any connection.
2. **token store**, one per renewed token, at once when it arrives: replaces the account's tokens if its refresh token
   is still the one that was used (compare-and-set). Locks one account row, for that statement.
3. **apply** (`batch`, in the wrapper's transaction): locks the installations and then their accounts, each in id order
   and with SKIP LOCKED, so it never waits and cannot deadlock; reads both rows and their member's others again in a
   later statement; leaves what is not ours any more (finished meanwhile, a lost lease, a held row); decides by
   `domain/installations.py`; and writes both rows of each pair, comment, journal, outbox and installation_checks in one
   statement, the rest of the leases and the job_runs row beside it.

A crash before the claim's commit leaves nothing. After it, until the apply's commit, it leaves leases, which run out by
themselves; the next run asks again. Between the OAuth server's answer and the token store's commit it leaves a token
that is used up: the next run finds the lease of a run that died, calls it "unclear: TOKEN_LOST" and changes nothing.
A run that fails or is stopped gives its leases back, but for those whose renewal has no answer or was not stored.
During the apply it leaves all or nothing, never one row of a pair; a rerun finds applied pairs done.

A failing write (a trigger or a constraint of the application) is isolated by halving the batch under savepoints; the
locks were taken before them and stay. That pair is an anomaly from then on, and the rest commits.

An OnAppInstall that read its rows before our commit and writes them after it makes the pair active all the same (the
library updates by id). Nothing is lost then; the next run notices and journals it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from psycopg.types.json import Jsonb

from crmctl.adapters.postgres import Transaction, array_literal
from crmctl.domain.errors import InstallationNotFoundError
from crmctl.domain.installations import (
    NOT_VERIFIED,
    Decision,
    Finding,
    Policy,
    Status,
    anomaly,
    decide,
)
from crmctl.jobs import sweep_audit, sweep_queue
from crmctl.jobs.job import Job, Run
from crmctl.jobs.sweep_claims import Claims
from crmctl.jobs.sweep_writing import Failed, write
from crmctl.settings import Bitrix24Settings
from crmctl.telemetry.logs import Log

JOB_NAME: Final = "sweep-installations"
# Rows that are listed in the result and in the log; the counts are always complete.
_LISTED: Final = 100


@dataclass(frozen=True, slots=True)
class Options:
    """What to sweep. `ids` are looked at whenever they are stale, also before their next look is due."""

    policy: Policy = field(default_factory=Policy)
    ids: tuple[UUID, ...] = ()
    batch_size: int = 100
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class NotSwept:
    """An installation that was named with --id and not looked at, and why."""

    installation_id: UUID
    reason: str


@dataclass(frozen=True, slots=True)
class Overridden:
    """A pair that the sweep had moved and that is active again."""

    installation_id: UUID
    verdict: str
    outcome: str
    swept_by: UUID


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts of the run so far, and what was found for the batch that is next.

    `findings`: by installation; None for one that needs no answer, because its rows are in disorder. `refused`: new
    tokens that PostgreSQL did not take. `passed`: what this run has looked at, and does not look at again.
    """

    counters: Mapping[str, int] = field(default_factory=dict)
    verdicts: Mapping[str, int] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    latest: tuple[Decision, ...] = ()
    overridden: tuple[Overridden, ...] = ()
    failed: tuple[Failed, ...] = ()
    not_swept: tuple[NotSwept, ...] = ()
    findings: Mapping[UUID, Finding | None] = field(default_factory=dict)
    refused: tuple[Failed, ...] = ()
    claimed: frozenset[UUID] = frozenset()
    passed: frozenset[UUID] = frozenset()
    batches: int = 0
    as_of: datetime | None = None
    more: bool = False
    failure: None = None

    @property
    def needs_person(self) -> bool:
        """Whatever raised an alert stays as it is until somebody looks."""
        counts = self.counts()
        return counts["alert_count"] + counts["overridden_count"] + counts["failed_count"] > 0

    def counts(self) -> dict[str, int]:
        """Counted in installations."""
        return {name: self.counters.get(name, 0) for name in COUNTS}

    def document(self) -> dict[str, object]:
        """The result as it is printed."""
        return {
            "as_of": self.as_of,
            **self.counts(),
            "verdicts": dict(self.verdicts),
            "installations": [sweep_audit.listed(decision) for decision in self.decisions],
            "overridden": [_document(row) for row in self.overridden],
            "failed": [_document(row) for row in self.failed],
            "not_swept": [_document(row) for row in self.not_swept],
            "batches": self.batches,
            "has_more": self.more,
        }


COUNTS: Final = (
    "checked_count",
    "blocked_count",
    "deleted_count",
    "left_count",
    "alert_count",
    "skipped_locked_count",
    "finished_count",
    "unasked_count",
    "overridden_count",
    "failed_count",
)


class Sweep:
    """The job. `claims` asks the portals between its own transactions; without it no portal is asked."""

    def __init__(self, settings: Bitrix24Settings, claims: Claims | None = None) -> None:
        self._settings = settings
        self._claims = claims
        self._statements: dict[str, str] | None = None

    def prepare(self, run: Run, options: Options, before: Progress) -> Progress:
        """Claim a batch and ask its portals, with no transaction open."""
        assert self._claims is not None  # noqa: S101  the job has this step only with it
        found = self._claims.find(
            run,
            policy=options.policy,
            ids=options.ids,
            passed=before.passed,
            limit=options.batch_size,
            dry_run=options.dry_run,
        )
        return replace(before, findings=found.findings, claimed=found.claimed, refused=found.refused)

    def batch(self, tx: Transaction, run: Run, options: Options, before: Progress) -> Progress:
        """Apply what is known to a batch of stale installations."""
        statements = self._resolve(tx)
        zone = self._settings.php_timezone
        if options.ids and not before.batches:
            self._check_named(tx, options)
        if self._claims is None:
            findings: Mapping[UUID, Finding | None] = dict.fromkeys(self._select(tx, options, before), NOT_VERIFIED)
            taken = frozenset(findings)
        else:
            findings, taken = before.findings, before.claimed
        tally = Counter(before.counters)
        owner = run.id if self._claims is not None and not options.dry_run else None
        decisions = self._decide(tx, options.policy, findings, owner, tally)
        audit = sweep_audit.Audit(run.id, tx.now, zone, run.traceparent)
        written, unwritten = write(tx, statements["write"], audit, decisions)
        failed = (*before.refused, *unwritten)
        overridden = () if before.batches else self._note_overridden(tx, audit)
        tally["unasked_count"] += len(taken - findings.keys())
        if self._claims is not None and owner is not None:
            unsettled = array_literal(list(self._claims.unsettled))
            tx.execute(statements["give_back"], {"run_id": owner, "unsettled": unsettled})
        for decision in written:
            tally["checked_count"] += 1
            tally[f"{decision.outcome}_count"] += 1
            tally["alert_count"] += decision.alert
        tally["overridden_count"] += len(overridden)
        tally["failed_count"] += len(failed)
        passed = before.passed | taken
        return replace(
            before,
            counters=tally,
            verdicts=Counter(before.verdicts) + Counter(d.finding.verdict.value for d in written),
            decisions=(before.decisions + tuple(written))[:_LISTED],
            latest=tuple(written),
            overridden=before.overridden + overridden,
            failed=(before.failed + failed)[:_LISTED],
            not_swept=self._not_swept(tx, options, {d.pair.installation_id for d in written}),
            findings={},
            refused=(),
            claimed=frozenset(),
            passed=passed,
            batches=before.batches + 1,
            as_of=tx.now,
            more=len(taken) == options.batch_size,
        )

    def _resolve(self, tx: Transaction) -> dict[str, str]:
        if self._statements is None:
            self._statements = sweep_queue.statements(tx, self._settings)
        return self._statements

    def _select(self, tx: Transaction, options: Options, before: Progress) -> list[UUID]:
        params = sweep_queue.due_params(self._settings, options.policy, options.ids, before.passed, options.batch_size)
        impatient = options.policy.action != "alert"
        return [
            row["installation_id"]
            for row in tx.all(self._resolve(tx)["select_due"], {**params, "impatient": impatient})
        ]

    def _decide(
        self,
        tx: Transaction,
        policy: Policy,
        findings: Mapping[UUID, Finding | None],
        owner: UUID | None,
        tally: Counter[str],
    ) -> list[Decision]:
        """Lock what can be locked, read it again, and decide what is still stale and still ours."""
        statements = self._resolve(tx)
        locked = {
            row["installation_id"]: row["account_id"]
            for row in tx.all(statements["lock_installations"], {"ids": array_literal(list(findings))})
        }
        accounts = {
            row["account_id"]
            for row in tx.all(statements["lock_accounts"], {"ids": array_literal(list(locked.values()))})
        }
        tally["skipped_locked_count"] += len(findings.keys() - locked.keys())
        decisions = []
        params = {"ids": array_literal(list(locked)), "zone": self._settings.php_timezone}
        for row in tx.all(statements["read_pairs"], params):
            pair = sweep_queue.read_pair(row)
            unlocked = row["has_account"] and pair.account_id not in accounts
            if unlocked or (owner is not None and row["claimed_by"] != owner):
                tally["skipped_locked_count"] += 1
            elif not policy.is_stale(pair):
                tally["finished_count"] += 1
            elif (finding := anomaly(pair) or findings[pair.installation_id]) is None:
                tally["unasked_count"] += 1
            else:
                again = row["last_verdict"] == finding.verdict
                attempts = row["last_attempts"] + 1 if again else 1
                decisions.append(decide(pair, finding, policy, attempts=attempts))
        return decisions

    def _note_overridden(self, tx: Transaction, audit: sweep_audit.Audit) -> tuple[Overridden, ...]:
        statements = self._resolve(tx)
        rows = tx.all(statements["find_overridden"])
        if rows:
            notes = [audit.overridden(row) for row in rows]
            tx.execute(
                statements["note_overridden"],
                {**audit.params(sweep_audit.OVERRIDE_LABEL), "overridden": Jsonb(notes)},
            )
        return tuple(
            Overridden(row["installation_id"], row["verdict"], row["outcome"], row["swept_by"]) for row in rows
        )

    def _check_named(self, tx: Transaction, options: Options) -> None:
        for row in self._named(tx, options.ids):
            if row["status"] is None:
                raise InstallationNotFoundError(
                    f"no such installation: {row['installation_id']}",
                    hint="list them with: crmctl installations list",
                    installation_id=str(row["installation_id"]),
                )

    def _not_swept(self, tx: Transaction, options: Options, looked_at: set[UUID]) -> tuple[NotSwept, ...]:
        """Why a named installation is not among those that were looked at."""
        missing = [] if not options.ids else [i for i in options.ids if i not in looked_at]
        return tuple(
            NotSwept(row["installation_id"], _why_not(row, options.policy)) for row in self._named(tx, missing)
        )

    def _named(self, tx: Transaction, ids: Sequence[UUID]) -> list[Any]:
        if not ids:
            return []
        params = {"ids": array_literal(ids), "zone": self._settings.php_timezone}
        return list(tx.all(self._resolve(tx)["named"], params))


def _why_not(row: Mapping[str, Any], policy: Policy) -> str:
    if row["status"] != Status.NEW:
        return f"its status is {row['status']}"
    if row["age_seconds"] < policy.ttl.total_seconds():
        return "it is younger than the TTL"
    return "another run is asking for it" if row["claimed"] else "it is locked, or there was no time left to ask"


def _document(row: NotSwept | Failed | Overridden) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__slots__}


def _log(log: Log, before: Progress, after: Progress) -> None:
    """A line for each installation of the batch: a warning where a person should look."""
    for decision in after.latest[:_LISTED]:
        write = log.warning if decision.alert else log.info
        write("stale installation", **sweep_audit.listed(decision))
    for failed in after.failed[len(before.failed) :]:
        log.error("the pair could not be changed", installation_id=str(failed.installation_id), reason=failed.reason)
    for row in after.overridden[len(before.overridden) :]:
        log.warning(
            "an installation that was swept is active again",
            installation_id=str(row.installation_id),
            outcome=row.outcome,
            swept_by=str(row.swept_by),
        )


def job(settings: Bitrix24Settings, claims: Claims | None = None) -> Job[Options, Progress]:
    """The job; with `claims` it verifies."""
    sweep = Sweep(settings, claims)
    return Job(
        name=JOB_NAME,
        actor="system",
        start=lambda _options: Progress(),
        batch=sweep.batch,
        prepare=sweep.prepare if claims is not None else None,
        log=_log,
    )
