"""The write of the sweep's third transaction: all of a pair or nothing of it, and one bad pair holds up no other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from crmctl.adapters.postgres import Transaction, describe, is_data_error
from crmctl.domain.installation_reasons import Reason
from crmctl.domain.installations import Decision, Finding, Verdict
from crmctl.jobs.sweep_audit import LABEL, Audit

# Decisions in one statement: more of them would cost memory, not time.
_WINDOW: Final = 500
# What stands for PostgreSQL's message where a trigger skips the row without one.
UPDATE_SUPPRESSED: Final = "UPDATE_SUPPRESSED"


@dataclass(frozen=True, slots=True)
class Failed:
    """A pair of which PostgreSQL refused a change, and what it said."""

    installation_id: UUID
    reason: str


def write(
    tx: Transaction, statement: str, audit: Audit, decisions: Sequence[Decision]
) -> tuple[list[Decision], list[Failed]]:
    """Write decisions; returns those that were written, and the pairs that PostgreSQL refused to change.

    A refused pair is among the first as well, as an anomaly that was left as it is.
    """
    written: list[Decision] = []
    failed: list[Failed] = []
    for first in range(0, len(decisions), _WINDOW):
        done, refused = _write_window(tx, statement, audit, decisions[first : first + _WINDOW])
        written += done
        failed += refused
    return written, failed


class _SuppressedError(Exception):
    """The statement changed fewer rows than it was told to: a trigger skips them without an error."""


def _write_window(
    tx: Transaction, statement: str, audit: Audit, decisions: Sequence[Decision]
) -> tuple[list[Decision], list[Failed]]:
    """Write decisions, halving them until what PostgreSQL refuses stands alone; returns what was written, and that."""
    if not decisions:
        return [], []
    try:
        with tx.savepoint():
            records = Jsonb([audit.record(decision) for decision in decisions])
            row = tx.one(statement, {**audit.params(LABEL), "decisions": records})
            if not row["moved_installations"] == row["moved_accounts"] == row["expected"]:
                raise _SuppressedError
            return list(decisions), []
    except (psycopg.Error, _SuppressedError) as error:
        if isinstance(error, psycopg.Error) and not is_data_error(error):
            raise
        if len(decisions) == 1:
            reason = describe(error) if isinstance(error, psycopg.Error) else UPDATE_SUPPRESSED
            return _leave(tx, statement, audit, decisions[0], reason)
    middle = len(decisions) // 2
    written, failed = _write_window(tx, statement, audit, decisions[:middle])
    more_written, more_failed = _write_window(tx, statement, audit, decisions[middle:])
    return written + more_written, failed + more_failed


def _leave(
    tx: Transaction, statement: str, audit: Audit, decision: Decision, reason: str
) -> tuple[list[Decision], list[Failed]]:
    """A pair that cannot be changed waits as an anomaly, so that it does not stand at the queue's head."""
    failed = [Failed(decision.pair.installation_id, reason)]
    if decision.transition is None:
        return [], failed
    left = replace(
        decision,
        finding=Finding(Verdict.ANOMALY, Reason.WRITE_FAILED),
        transition=None,
        alert=True,
        next_check_in=timedelta(hours=1),
    )
    written, _ = _write_window(tx, statement, audit, [left])
    return written, failed
