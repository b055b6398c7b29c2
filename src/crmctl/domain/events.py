"""The integration events that crmctl writes to the outbox: topic, contract version, payload fields."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EventContract:
    """What a consumer may count on: nothing outside `payload_fields` is ever in the payload."""

    topic: str
    contract_version: int
    aggregate_type: str
    payload_fields: tuple[str, ...]


BOOKING_EXPIRED: Final = EventContract(
    topic="pin.crm.booking-expired.v1",
    contract_version=1,
    aggregate_type="Booking",
    payload_fields=("BookingId", "TenantId", "DealId", "PropertyObjectId", "Phase", "ExpiredAt"),
)
INSTALLATION_MARKED_STALE: Final = EventContract(
    topic="pin.crm.application-installation-stale.v1",
    contract_version=1,
    aggregate_type="ApplicationInstallation",
    payload_fields=(
        "InstallationId",
        "AccountId",
        "MemberId",
        "InstallationFromStatus",
        "InstallationToStatus",
        "AccountFromStatus",
        "AccountToStatus",
        "Verdict",
        "Reason",
        "TtlSeconds",
        "AgeSeconds",
        "RunId",
        "OccurredAt",
    ),
)
