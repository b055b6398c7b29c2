"""What the sweep writes about a decision: comment, journal row, and the fields that all of them share.

Comment, journal, event and installation_checks come out of one record, so that they agree on verdict, reason, age,
TTL and run. A journal row meets the constraints of bitrix24-php-lib's JournalItem.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from crmctl.domain.installation_reasons import explain
from crmctl.domain.installations import Decision, Verdict

LABEL: Final = "stale-installation"
OVERRIDE_LABEL: Final = "stale-installation-override"
# The journal wants 16 bytes; a sweep has no client, so it names the IPv4 loopback, mapped into IPv6.
_IP_ADDRESS: Final = bytes(10) + b"\xff\xff\x7f\x00\x00\x01"


def uuid7(moment: datetime) -> UUID:
    """A version 7 UUID of this moment, as the library numbers its journal."""
    milliseconds = int(moment.timestamp() * 1000)
    value = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    return UUID(int=value)


def listed(decision: Decision) -> dict[str, object]:
    """A decision in a result document or a log line."""
    pair = decision.pair
    return {
        "installation_id": str(pair.installation_id),
        "account_id": str(pair.account_id),
        "member_id": pair.member_id,
        "verdict": decision.finding.verdict.value,
        "reason": decision.finding.reason.value,
        "outcome": decision.outcome,
        "age_seconds": _seconds(decision.pair.age.total_seconds()),
        "ttl_seconds": _seconds(decision.ttl.total_seconds()),
        "attempts": decision.attempts,
    }


@dataclass(frozen=True, slots=True)
class Audit:
    """The run that writes: its id, its moment, PHP's time zone, its trace."""

    run_id: UUID
    now: datetime
    zone: str
    traceparent: str

    def params(self, label: str) -> dict[str, object]:
        """The parameters that every record shares."""
        return {
            "run_id": self.run_id,
            "zone": self.zone,
            "traceparent": self.traceparent,
            "label": label,
            "ip_address": _IP_ADDRESS,
        }

    def record(self, decision: Decision) -> dict[str, object]:
        """One element of the `decisions` parameter of `write`."""
        pair, transition = decision.pair, decision.transition
        statuses = {
            "installation_from": pair.installation_status,
            "installation_to": transition.installation.end.value if transition else pair.installation_status,
            "account_from": pair.account_status,
            "account_to": transition.account.end.value if transition else pair.account_status,
        }
        facts = listed(decision)
        return {
            **facts,
            **statuses,
            "next_check_seconds": decision.next_check_in.total_seconds() if decision.next_check_in else None,
            "comment": self._sentence(decision),
            "journal_id": str(uuid7(self.now)),
            "level": _level(decision),
            "message": self._sentence(decision),
            "context": {**facts, **statuses, "run_id": str(self.run_id)},
        }

    def overridden(self, row: Mapping[str, Any]) -> dict[str, object]:
        """One element of the `overridden` parameter of `note_overridden`."""
        facts = {
            "installation_id": str(row["installation_id"]),
            "verdict": row["verdict"],
            "outcome": row["outcome"],
            "swept_by": str(row["swept_by"]),
            "installation_status": row["installation_status"],
            "account_status": row["account_status"],
        }
        return {
            "installation_id": facts["installation_id"],
            "member_id": row["member_id"],
            "journal_id": str(uuid7(self.now)),
            "message": (
                f"The installation is active again after run {row['swept_by']} had left it {row['outcome']}:"
                " its finish step arrived at the same moment, or somebody unblocked it."
            ),
            "context": {**facts, "run_id": str(self.run_id)},
        }

    def _sentence(self, decision: Decision) -> str:
        facts = listed(decision)
        what = {
            "left": "Stale installation, left as it is",
            "blocked": "Stale installation, blocked: reinstall the application",
            "deleted": "Stale installation, deleted",
        }[decision.outcome]
        return (
            f"{what}. Why: {explain(decision.finding.reason)}. verdict={facts['verdict']} reason={facts['reason']}"
            f" age={facts['age_seconds']}s ttl={facts['ttl_seconds']}s run={self.run_id}"
        )


def _level(decision: Decision) -> str:
    if decision.finding.verdict is Verdict.ANOMALY:
        return "error"
    return "warning" if decision.alert or decision.transition else "notice"


def _seconds(value: float) -> int:
    return int(value)
