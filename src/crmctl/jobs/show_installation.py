"""`crmctl installations show`: one installation, why it is or is not stale, and what the sweep did and why."""

from typing import Any
from uuid import UUID

from crmctl.adapters.postgres import Transaction, array_literal
from crmctl.domain.errors import InstallationNotFoundError
from crmctl.domain.events import INSTALLATION_MARKED_STALE
from crmctl.domain.installation_reasons import Reason, explain
from crmctl.domain.installations import Pair, Policy, Status, anomaly
from crmctl.domain.times import format_duration
from crmctl.jobs import sweep_queue
from crmctl.jobs.list_installations import statements
from crmctl.jobs.sweep_audit import LABEL, OVERRIDE_LABEL
from crmctl.settings import Bitrix24Settings


def query(tx: Transaction, settings: Bitrix24Settings, installation_id: UUID, policy: Policy) -> dict[str, Any]:
    """Return `{"installation": {…}, "stale": bool, "why": [sentence], "journal": […], "events": […]}`.

    Raises InstallationNotFoundError.
    """
    own = statements(tx, settings)
    params = {
        "zone": settings.php_timezone,
        "ttl": policy.ttl,
        "installation_id": installation_id,
        "labels": [LABEL, OVERRIDE_LABEL],
        "aggregate_type": INSTALLATION_MARKED_STALE.aggregate_type,
    }
    row = tx.first(own["show"], params)
    if row is None:
        raise InstallationNotFoundError(
            f"no such installation: {installation_id}",
            hint="list them with: crmctl installations list",
            installation_id=str(installation_id),
        )
    queue = sweep_queue.statements(tx, settings)
    pair = sweep_queue.read_pair(
        tx.one(queue["read_pairs"], {"ids": array_literal([installation_id]), "zone": settings.php_timezone})
    )
    return {
        "installation": row,
        "stale": policy.is_stale(pair),
        "why": _why(pair, policy, row["reason"]),
        "journal": tx.all(own["journal"], params),
        "events": tx.all(own["events"], params),
    }


def _why(pair: Pair, policy: Policy, last_reason: str | None) -> list[str]:
    ttl = format_duration(policy.ttl)
    sentences = []
    if pair.installation_status != Status.NEW:
        sentences.append(f"not stale: its status is {pair.installation_status}")
    elif pair.age < policy.ttl:
        sentences.append(f"not stale: it is younger than the TTL of {ttl}")
    else:
        sentences.append(f"stale: it is new, and older than the TTL of {ttl}")
        if (found := anomaly(pair)) is not None:
            sentences.append(f"the sweep leaves it alone: {explain(found.reason)}")
    if last_reason in set(Reason):
        sentences.append(f"last verdict: {explain(Reason(last_reason))}")
    return sentences
