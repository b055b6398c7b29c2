"""`crmctl outbox list`: reads the outbox, changes nothing."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from crmctl.adapters.postgres import Transaction
from crmctl.sql import load

_RAW: Final = load("outbox")
STATEMENTS: Final = {name: text.format(columns=_RAW["columns"]) for name, text in _RAW.items() if name != "columns"}


@dataclass(frozen=True, slots=True)
class Options:
    """What to list; by default what is not published yet. `held` goes with unpublished ones only."""

    all: bool = False
    held: bool = False
    topic: str | None = None
    aggregate_id: str | None = None
    limit: int = 50


def query(tx: Transaction, options: Options) -> dict[str, Any]:
    """Return `{"messages": [{position, message_id, topic, aggregate_type, aggregate_id, state, …}]}`.

    state is pending, held or published.
    """
    return {"messages": tx.all(STATEMENTS["list_all" if options.all else "list_unpublished"], asdict(options))}
