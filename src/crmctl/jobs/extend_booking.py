"""`crmctl bookings extend`: move the deadline of one active booking by its program's duration (UC-BKG-003 A1).

One transaction, in this order:

1. `extension_requests`: inserts the request id. If it is there already, the stored answer is returned and
   nothing changes, so a retry of an extension whose answer was lost extends nothing twice;
2. `bookings`: locks the row, waiting at most lock_timeout for the expiry or a manager, and reads it again. Only
   a Booked one is extended (INV-BKG-6): booking_expires_at += booking_duration_hours, extensions_count + 1,
   version + 1;
3. `deal_timeline_events`: BookingExtended; `deal_notifications`: the same for the deal's participants;
4. `extension_requests`: the answer; `job_runs`: by the wrapper.

No Kafka event: the property object stays booked. A crash before the commit leaves nothing, not even the
request id; a crash after it leaves everything, and a retry with the same id prints the first answer. Against
the expiry exactly one outcome holds: it skips a row that we lock, and a row that it locked first is terminal
when we read it again, which is BookingInvalidStateError (A2). So is a row that a constraint or a trigger of the
CRM's does not let change: then nothing is written either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import errors

from crmctl.adapters.identity import Actor
from crmctl.adapters.postgres import Transaction, describe, is_data_error
from crmctl.domain.bookings import BookingStatus
from crmctl.domain.errors import BookingForbiddenError, BookingInvalidStateError, BookingNotFoundError
from crmctl.jobs.job import Job, Run
from crmctl.sql import load

PERMISSION: Final = "crm.bookings.decide"
STATEMENTS: Final = load("extend_booking")


@dataclass(frozen=True, slots=True)
class Options:
    """Which booking, by whom, under which request id; the tenant is the actor's."""

    booking_id: UUID
    request_id: UUID
    actor: Actor


@dataclass(frozen=True, slots=True)
class Progress:
    """The answer, and whether this very run extended the booking or found the answer of an earlier one."""

    request_id: UUID
    answer: Mapping[str, Any] | None = None
    extended: bool = False
    more: bool = False
    needs_person: bool = False
    failure: None = None

    def counts(self) -> dict[str, int]:
        """One extension, or none."""
        return {"extended_count": int(self.extended)}

    def document(self) -> dict[str, object]:
        """The answer's fields, with the request id and whether it is a repeated answer."""
        return {"request_id": self.request_id, "repeated": not self.extended, **(self.answer or {})}


def authorise(actor: Actor, tenant_id: UUID | None) -> None:
    """Raise BookingForbiddenError unless the actor may decide on bookings, and of that tenant if one is named."""
    if PERMISSION not in actor.permissions:
        raise BookingForbiddenError(
            f"the actor lacks the permission {PERMISSION}", hint="ask for it, and get a new token"
        )
    if tenant_id is not None and tenant_id != actor.tenant_id:
        raise BookingForbiddenError(
            f"tenant {tenant_id} is not the actor's", hint="leave --tenant out, or use a token of that tenant"
        )


def batch(tx: Transaction, run: Run, options: Options, before: Progress) -> Progress:  # noqa: ARG001
    """Extend the booking, or return what an earlier run with this request id answered.

    Raises BookingForbiddenError for a token that PostgreSQL's clock does not accept, BookingNotFoundError
    unless the booking is one of the actor's tenant, BookingInvalidStateError unless it is Booked with a finite
    deadline, when a constraint or a trigger of the CRM's refuses the extension, or when the request id was used
    for another booking.
    """
    options.actor.check_time(tx.now)
    tx.execute(STATEMENTS["prepare"])
    params: dict[str, object] = {
        "tenant_id": options.actor.tenant_id,
        "request_id": options.request_id,
        "booking_id": options.booking_id,
        "actor_subject": options.actor.subject,
    }
    if tx.first(STATEMENTS["claim_request"], params) is None:
        return _repeat(tx, options, params)
    row = tx.first(STATEMENTS["lock_booking"], params)
    if row is None:
        raise BookingNotFoundError(
            f"no such booking: {options.booking_id}", hint="check the id", booking_id=str(options.booking_id)
        )
    if row["status"] != BookingStatus.BOOKED:
        raise _invalid(options.booking_id, row["status"], f"its status is {row['status']}, and only Booked is extended")
    if not row["finite"]:
        raise _invalid(options.booking_id, row["status"], f"its deadline is {row['old_deadline'] or 'missing'}")
    try:
        extended = tx.first(STATEMENTS["extend"], {**params, "old_deadline": row["old_deadline"]})
    except errors.DatetimeFieldOverflow:
        raise _invalid(options.booking_id, row["status"], "the new deadline would be out of range") from None
    except psycopg.Error as error:
        if not is_data_error(error):
            raise
        raise _refused(options.booking_id, row["status"], describe(error)) from None
    if extended is None:
        raise _refused(options.booking_id, row["status"], "the update was suppressed by a trigger")
    return Progress(options.request_id, extended["result"], extended=True)


def _repeat(tx: Transaction, options: Options, params: Mapping[str, object]) -> Progress:
    earlier = tx.one(STATEMENTS["earlier_request"], params)
    if earlier["booking_id"] != options.booking_id:
        raise BookingInvalidStateError(
            f"request {options.request_id} was used for booking {earlier['booking_id']}",
            hint="use a new --request-id for another booking",
            booking_id=str(options.booking_id),
        )
    return Progress(options.request_id, earlier["result"])


def _invalid(
    booking_id: UUID, status: str, why: str, hint: str = "an expired booking is not revived: create a new one"
) -> BookingInvalidStateError:
    return BookingInvalidStateError(
        f"booking {booking_id} cannot be extended: {why}", hint=hint, booking_id=str(booking_id), status=status
    )


def _refused(booking_id: UUID, status: str, why: str) -> BookingInvalidStateError:
    """A constraint or a trigger of the CRM's does not let this row change."""
    return _invalid(booking_id, status, why, "a rule of the CRM's own database refuses it: ask who keeps those rules")


def job(actor: Actor) -> Job[Options, Progress]:
    """The job, recorded in the actor's name."""
    return Job(
        name="extend-booking",
        actor=actor.subject,
        start=lambda options: Progress(options.request_id),
        batch=batch,
    )
