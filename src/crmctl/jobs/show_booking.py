"""`crmctl bookings show`: reads one booking with its timeline and its events, changes nothing."""

from typing import Any, Final
from uuid import UUID

from crmctl.adapters.postgres import Transaction
from crmctl.domain.errors import BookingNotFoundError
from crmctl.sql import load

STATEMENTS: Final = load("bookings")


def query(tx: Transaction, booking_id: UUID) -> dict[str, Any]:
    """Return `{"booking": {column: value}, "timeline": […], "events": […]}`, both in the order of their writing.

    Raises BookingNotFoundError.
    """
    params = {"booking_id": booking_id}
    row = tx.first(STATEMENTS["show"], params)
    if row is None:
        raise BookingNotFoundError(f"no such booking: {booking_id}", hint="list them with: crmctl bookings list")
    return {
        "booking": row["booking"],
        "timeline": [row["event"] for row in tx.all(STATEMENTS["timeline"], params)],
        "events": [row["event"] for row in tx.all(STATEMENTS["events"], params)],
    }
