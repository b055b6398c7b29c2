"""The booking's life as UC-BKG-003 has it: statuses, the two phases that expire, and what makes a row poison."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class BookingStatus(StrEnum):
    """The statuses that crmctl knows. The CRM may have others: those are not ours to touch."""

    RESERVED = "Reserved"
    AWAITING_PAYMENT = "AwaitingPayment"
    BOOKED = "Booked"
    RESERVE_EXPIRED = "ReserveExpired"
    BOOKING_EXPIRED = "BookingExpired"


class Defect(StrEnum):
    """Why a due row is poison before anything is written: it breaks a rule of the domain.

    The same codes stand in the `defect` expression of `sql/expire_bookings.sql`.
    """

    DEADLINE_INFINITE = "DEADLINE_INFINITE"
    TENANT_MISSING = "TENANT_MISSING"
    PROPERTY_OBJECT_MISSING = "PROPERTY_OBJECT_MISSING"
    BASE_MISSING = "BASE_MISSING"
    DURATION_MISSING = "DURATION_MISSING"
    DEADLINE_BEFORE_BASE = "DEADLINE_BEFORE_BASE"
    DEAL_MISSING = "DEAL_MISSING"


@dataclass(frozen=True, slots=True)
class Phase:
    """One of the two timers: which rows it watches, by which index, and where they end (INV-BKG-5).

    `base` and `duration` are the columns that the deadline was computed from when the timer was set.
    """

    name: str
    statuses: tuple[BookingStatus, ...]
    deadline: str
    index: str
    base: str
    duration: str
    target: BookingStatus
    timeline_type: str


RESERVE: Final = Phase(
    name="Reserve",
    statuses=(BookingStatus.RESERVED, BookingStatus.AWAITING_PAYMENT),
    deadline="reserve_expires_at",
    index="ix_bookings_reserve_expires_at",
    base="created_at",
    duration="reserve_duration_minutes",
    target=BookingStatus.RESERVE_EXPIRED,
    timeline_type="BookingReserveExpired",
)
BOOKING: Final = Phase(
    name="Booking",
    statuses=(BookingStatus.BOOKED,),
    deadline="booking_expires_at",
    index="ix_bookings_booking_expires_at",
    base="booked_at",
    duration="booking_duration_hours",
    target=BookingStatus.BOOKING_EXPIRED,
    timeline_type="BookingExpired",
)
PHASES: Final = (RESERVE, BOOKING)
