"""The yardstick that everybody would write first: a SQLAlchemy ORM loop over the due bookings."""

import time
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
from sqlalchemy import DateTime, ForeignKey, create_engine, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, selectinload
from sqlalchemy.pool import NullPool

from benchmarks.harness import TRACEPARENT
from crmctl.domain.bookings import PHASES, Phase
from crmctl.domain.events import BOOKING_EXPIRED


class _Base(DeclarativeBase):
    type_annotation_map = {datetime: DateTime(timezone=True), dict[str, Any]: JSONB}  # noqa: RUF012


class _Deal(_Base):
    __tablename__ = "deals"
    __table_args__ = {"schema": "crm"}  # noqa: RUF012

    id: Mapped[UUID] = mapped_column(primary_key=True)
    status: Mapped[str]


class _Booking(_Base):
    __tablename__ = "bookings"
    __table_args__ = {"schema": "crm"}  # noqa: RUF012

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    deal_id: Mapped[UUID] = mapped_column(ForeignKey(_Deal.id))
    property_object_id: Mapped[UUID]
    status: Mapped[str]
    reserve_expires_at: Mapped[datetime | None]
    booking_expires_at: Mapped[datetime | None]
    expired_at: Mapped[datetime | None]
    version: Mapped[int]
    updated_at: Mapped[datetime]
    deal: Mapped[_Deal | None] = relationship()


class _TimelineEvent(_Base):
    __tablename__ = "deal_timeline_events"
    __table_args__ = {"schema": "crm"}  # noqa: RUF012

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[UUID]
    deal_id: Mapped[UUID]
    type: Mapped[str]
    payload: Mapped[dict[str, Any]]
    occurred_at: Mapped[datetime]


class _OutboxMessage(_Base):
    __tablename__ = "outbox_messages"
    __table_args__ = {"schema": "crm"}  # noqa: RUF012

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    topic: Mapped[str]
    key: Mapped[str]
    aggregate_type: Mapped[str]
    aggregate_id: Mapped[str]
    contract_version: Mapped[int]
    payload: Mapped[dict[str, Any]]
    headers: Mapped[dict[str, Any]]


def drain(url: str, as_of: datetime, batch_size: int, batches: int) -> tuple[int, float]:
    """Expire up to `batches` batches of each phase, a commit per batch; returns the rows and the seconds."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool)
    started = time.perf_counter()
    expired = 0
    for _ in range(batches):
        with Session(engine) as session:
            expired += sum(_expire(session, phase, as_of, batch_size) for phase in PHASES)
            session.commit()
    return expired, time.perf_counter() - started


def _expire(session: Session, phase: Phase, as_of: datetime, batch_size: int) -> int:
    deadline = getattr(_Booking, phase.deadline)
    query = select(_Booking).where(_Booking.status.in_(phase.statuses), deadline < as_of)
    query = query.order_by(deadline, _Booking.id).limit(batch_size).with_for_update(skip_locked=True, key_share=True)
    # The job expires no booking whose deal is gone; neither does this.
    loaded = session.scalars(query.options(selectinload(_Booking.deal))).all()
    bookings = [booking for booking in loaded if booking.deal is not None]
    for booking in bookings:
        booking.status = phase.target
        booking.expired_at = as_of
        booking.version += 1
        booking.updated_at = as_of
        session.add(_timeline_event(booking, phase, as_of))
        session.add(_message(booking, phase, as_of))
    return len(bookings)


def _timeline_event(booking: _Booking, phase: Phase, as_of: datetime) -> _TimelineEvent:
    return _TimelineEvent(
        tenant_id=booking.tenant_id,
        deal_id=booking.deal_id,
        type=phase.timeline_type,
        payload={"BookingId": str(booking.id)},
        occurred_at=as_of,
    )


def _message(booking: _Booking, phase: Phase, as_of: datetime) -> _OutboxMessage:
    return _OutboxMessage(
        topic=BOOKING_EXPIRED.topic,
        key=str(booking.id),
        aggregate_type=BOOKING_EXPIRED.aggregate_type,
        aggregate_id=str(booking.id),
        contract_version=BOOKING_EXPIRED.contract_version,
        payload={
            "BookingId": str(booking.id),
            "TenantId": str(booking.tenant_id),
            "DealId": str(booking.deal_id),
            "PropertyObjectId": str(booking.property_object_id),
            "Phase": phase.name,
            "ExpiredAt": as_of.isoformat(),
        },
        headers={"traceparent": TRACEPARENT},
    )
