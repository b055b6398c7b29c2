"""A database's side of `doctor` and `status`. Reads only; each check has a savepoint of its own.

The database of bitrix24-php-lib's tables, where that is another one, has the checks of SECOND.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg
from psycopg.rows import DictRow

from crmctl.adapters.postgres import MAX_CLOCK_DIFFERENCE, Transaction, describe
from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import (
    ConfigurationError,
    CrmctlError,
    GrantMissingError,
    SchemaError,
    TryAgainError,
)
from crmctl.domain.grants import Kind
from crmctl.domain.health import Check, failed, ok, skipped, warning
from crmctl.domain.jobs import JOBS, NAMES, kind_of
from crmctl.jobs import figures, roles
from crmctl.jobs.check_schema import core_faults
from crmctl.jobs.examine import Part
from crmctl.migrations import SCHEMA, VERSION_TABLE, check_revisions
from crmctl.sql import load

STATEMENTS: Final = load("examine")
CHECKS: Final = (
    "database",
    "writable",
    "clock",
    "schema",
    "contract",
    "roles",
    "grants",
    "jobs",
    "bookings",
    "outbox",
    "deferred",
)
# Bookings, deals and what belongs to them are in the main database alone.
SECOND: Final = tuple(name for name in CHECKS if name not in {"contract", "bookings", "deferred"})
_QUEUES: Final = frozenset({"jobs", "bookings", "outbox", "deferred"})
# A host whose clock is off by this much should look at its time service; an hour stops the jobs.
_CLOCK_WARNING: Final = timedelta(seconds=10)
# The relay runs every minute: what is older than two has been passed over.
_STUCK_AFTER: Final = timedelta(minutes=2)
# Longer than the five retries of an event whose deal is missing take together.
_DEFERRED_AFTER: Final = timedelta(minutes=10)
_LIST_LIMIT: Final = 5
# No such table, column or schema.
_MISFITS: Final = frozenset({"42P01", "42703", "3F000"})


@dataclass(frozen=True, slots=True)
class Look:
    """How to look: a connection on demand, the roles' prefix, the job that is asked about (None: any), and at what."""

    connect: Callable[[], psycopg.Connection[DictRow]]
    prefix: str
    job: str | None = None
    which: DatabaseName = DatabaseName.MAIN
    jobs: tuple[str, ...] = NAMES


def examine_database(part: Part, look: Look) -> None:
    """Fill in the checks, and the figures `bookings`, `outbox`, `deferred` and `jobs`."""
    connection = part.attempt("database", look.connect)
    if connection is None:
        return
    try:
        _examine(part, connection, look)
    except psycopg.Error as error:  # the connection was lost
        if len(part.checks) < len(part.names):
            part.fail(part.names[len(part.checks)], error)
    finally:
        connection.close()


def _examine(part: Part, connection: psycopg.Connection[DictRow], look: Look) -> None:
    before = time.time()
    tx = Transaction(connection, datetime.now(UTC))
    session = tx.one(STATEMENTS["begin"], {"statement_timeout": "3000", "lock_timeout": "1000"})
    part.add(ok("database", f"PostgreSQL {session['version']} as {session['role']}"))
    part.add(_writable(session, look.which))
    part.add(_clock(session["clock"], (before + time.time()) / 2))
    for name in part.names[len(part.checks) :]:
        try:
            with tx.savepoint():
                found = _CHECKS[name](part, tx, look)
            part.add(found)
        except CrmctlError as error:
            part.fail(name, error)
        except psycopg.Error as error:
            if connection.closed:
                raise
            _fail(part, name, error)


def _fail(part: Part, name: str, error: psycopg.Error) -> None:
    """Note a check's failure; what follows from another check's, or is not this role's to read, is none of its own."""
    if error.sqlstate == "42501" and name in _QUEUES:
        part.add(skipped(name, f"this role may not read it ({describe(error)}); ask as one that has crmctl_readonly"))
    elif (error.sqlstate or "") in _MISFITS and (part.broken("schema") or part.broken("contract")):
        part.add(skipped(name, f"the schema does not fit ({describe(error)})"))
    else:
        part.fail(name, error)


def _writable(session: DictRow, which: DatabaseName) -> Check:
    if session["in_recovery"]:
        return failed(
            "writable",
            TryAgainError("this PostgreSQL is a standby in recovery", hint=f"name the primary in {which.setting}"),
        )
    if session["read_only"]:
        return failed(
            "writable",
            ConfigurationError(
                "this PostgreSQL session is read-only by configuration",
                hint="look at default_transaction_read_only of the server, the database and the role",
            ),
        )
    return ok("writable", "the server takes writes")


def _clock(theirs: float, ours: float) -> Check:
    difference = timedelta(seconds=abs(theirs - ours))
    text = f"the clocks of PostgreSQL and of this host differ by {difference.total_seconds():.1f} s"
    fix = "find out which clock is wrong: look at the time service of both hosts"
    if difference > MAX_CLOCK_DIFFERENCE:
        return failed("clock", ConfigurationError(f"{text}; no job runs", hint=fix))
    return warning("clock", text, fix) if difference > _CLOCK_WARNING else ok("clock", text)


def _schema(_part: Part, tx: Transaction, _look: Look) -> Check:
    if not tx.one(STATEMENTS["has_revisions"], {"schema": SCHEMA, "table": VERSION_TABLE})["found"]:
        raise SchemaError("the database has no crmctl schema", hint="run: crmctl db upgrade")
    row = tx.one(STATEMENTS["revisions"])
    at = ", ".join(sorted(row["revisions"] or ()))
    if ahead := check_revisions(row["revisions"], row["minimum_version"]):
        return warning("schema", "; ".join(ahead), "deploy the newer crmctl")
    return ok("schema", f"at {at}")


def _contract(_part: Part, tx: Transaction, _look: Look) -> Check:
    if found := core_faults(tx):
        raise SchemaError(
            _listed(found), hint="mend the CRM's tables: crmctl db check lists what they must have; docs/contracts.md"
        )
    return ok("contract", "the core tables have what crmctl needs")


def _roles(_part: Part, tx: Transaction, look: Look) -> Check:
    differences = roles.compare(tx, look.prefix)
    if not any(difference.exists for difference in differences):
        return skipped("roles", f"there are no roles {look.prefix}…; crmctl db roles creates them")
    missing = [f"{d.role} lacks {_listed(d.describe(d.missing))}" for d in differences if d.missing]
    if missing:
        raise GrantMissingError(_listed(missing), hint="as the schema's owner run: crmctl db roles")
    excess = [f"{d.role} has {_listed(d.describe(d.excess))}" for d in differences if d.excess]
    if excess:
        return warning("roles", f"more than the least: {_listed(excess)}", "run: crmctl db roles")
    return ok("roles", f"{len(differences)} roles have their grants and no others")


def _grants(_part: Part, tx: Transaction, look: Look) -> Check:
    """The connected role against the kinds of work that it is meant for: one that is named, or those it inherits."""
    if look.job is not None:
        kinds = [kind_of(look.job)]
    else:
        names = {f"{look.prefix}{kind}": kind for kind in Kind}
        kinds = [names[row["role"]] for row in tx.all(STATEMENTS["memberships"], {"roles": list(names)})]
    lacking = {kind: roles.lacking(tx, kind) for kind in (kinds or Kind)}
    if kinds and (bad := [kind for kind, missing in lacking.items() if missing]):
        raise _lacks(tx, look, bad[0], lacking[bad[0]])
    able = [kind for kind, missing in lacking.items() if not missing]
    if not able:
        raise _lacks(tx, look, Kind.READONLY, lacking[Kind.READONLY])
    commands = [job.name for job in JOBS if job.kind in able and job.name in look.jobs]
    return ok("grants", f"this role may run: {', '.join(commands) or 'what reads only'}")


def _jobs(part: Part, tx: Transaction, look: Look) -> Check:
    found = part.figures["jobs"] = figures.jobs(tx, look.jobs, look.which)
    if paused := [job for job in found if job.paused]:
        words = [f"{job.job} by {job.paused_by} since {_moment(job.paused_at)}: {job.pause_reason}" for job in paused]
        names = " ".join(job.job for job in paused)
        return warning("jobs", f"paused: {'; '.join(words)}", f"when its reason is gone: crmctl jobs resume {names}")
    failing = [
        job
        for job in found
        if job.last_failure_at and (job.last_success_at is None or job.last_failure_at > job.last_success_at)
    ]
    if failing:
        words = [f"{job.job} failed at {_moment(job.last_failure_at)}" for job in failing]
        return warning("jobs", "; ".join(words), f"crmctl runs list --failed --job {failing[0].job}")
    return ok("jobs", "none is paused, and the last run of each that left a record was good")


def _bookings(part: Part, tx: Transaction, _look: Look) -> Check:
    found = part.figures["bookings"] = figures.bookings(tx)
    if found.overdue_count:
        raise _waiting(
            part,
            "expire-bookings",
            f"{found.overdue_count} bookings should have expired more than {_minutes(figures.OVERDUE_AFTER)} ago",
            "is the CronJob running? by hand: crmctl bookings expire --drain",
        )
    problems = []
    if found.never_expire_count:
        problems.append(f"{found.never_expire_count} active bookings can never expire: no finite deadline")
    if found.poison_count:
        problems.append(f"{found.poison_count} bookings could not be expired by the last run")
    if problems:
        return warning("bookings", "; ".join(problems), "mend the rows: runbooks/expire-bookings.md, Mitigation 3")
    return ok("bookings", f"{sum(phase.due_count for phase in found.phases.values())} are due, none is overdue")


def _outbox(part: Part, tx: Transaction, _look: Look) -> Check:
    found = part.figures["outbox"] = figures.outbox(tx)
    oldest = timedelta(seconds=found.oldest_unpublished_seconds)
    if oldest > _STUCK_AFTER:
        waiting = f"{found.pending_count} messages wait and {found.held_count} are held back"
        raise _waiting(
            part,
            "relay-outbox",
            f"the outbox is stuck: {waiting}, the oldest for {oldest.total_seconds():.0f} s",
            "crmctl outbox list --held"
            if found.held_count
            else "is the relay running? by hand: crmctl outbox relay --drain",
        )
    return ok("outbox", f"{found.pending_count} messages wait, {found.held_count} are held back")


def _deferred(part: Part, tx: Transaction, _look: Look) -> Check:
    found = part.figures["deferred"] = figures.deferred(tx)
    if found.oldest_deferred_seconds > _DEFERRED_AFTER.total_seconds():
        return warning(
            "deferred",
            f"{found.deferred_count} events wait for their deal, the oldest for {found.oldest_deferred_seconds:.0f} s",
            "nobody retries them: is the consumer running? crmctl chat-status consume --until-caught-up",
        )
    return ok("deferred", f"{found.deferred_count} events wait for their deal")


_CHECKS: Final[dict[str, Callable[[Part, Transaction, Look], Check]]] = {
    "schema": _schema,
    "contract": _contract,
    "roles": _roles,
    "grants": _grants,
    "jobs": _jobs,
    "bookings": _bookings,
    "outbox": _outbox,
    "deferred": _deferred,
}


def _waiting(part: Part, job: str, detail: str, fix: str) -> TryAgainError:
    paused = any(entry.job == job and entry.paused for entry in part.figures.get("jobs", ()))
    return TryAgainError(detail, hint=f"{job} is paused: crmctl jobs resume {job}" if paused else fix)


def _lacks(tx: Transaction, look: Look, kind: Kind, missing: list[str]) -> GrantMissingError:
    return roles.missing_error(tx.connection.info.user, f"{look.prefix}{kind}", [_listed(missing)])


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _LIST_LIMIT} more" if len(items) > _LIST_LIMIT else ""
    return "; ".join(items[:_LIST_LIMIT]) + more


def _moment(value: datetime | None) -> str:
    return "?" if value is None else value.isoformat(timespec="seconds")


def _minutes(value: timedelta) -> str:
    return f"{value.total_seconds() / 60:.0f} minutes"
