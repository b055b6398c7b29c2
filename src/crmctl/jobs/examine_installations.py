"""The installations' side of `doctor` and `status`: what waits for its finish step, and our own credentials."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg

from crmctl.adapters.bitrix24 import Portals
from crmctl.adapters.postgres import Database
from crmctl.domain.errors import ConfigurationError, CrmctlError, UnavailableError
from crmctl.domain.health import Check, ok, skipped, warning
from crmctl.jobs import list_installations
from crmctl.jobs.examine import Part
from crmctl.settings import Bitrix24Settings

CHECKS: Final = ("installations", "portal credentials")
# No token of anybody: the OAuth server looks at the application's credentials first.
_NOBODYS: Final = "crmctl-doctor"


@dataclass(frozen=True, slots=True)
class InstallationFigures:
    """New installations beyond the default TTL, those of an unclear portal, those that the sweep leaves alone."""

    stale_count: int
    unclear_count: int
    anomaly_count: int


@dataclass(frozen=True, slots=True)
class Look:
    """How to look: a connection of its own, and the OAuth server on demand."""

    database: Database
    settings: Bitrix24Settings
    portals: Callable[[], Portals]


def examine_installations(part: Part, look: Look) -> None:
    """Fill in the checks, and the figures `installations`."""
    part.add(_installations(part, look))
    if (found := part.attempt(CHECKS[1], lambda: _credentials(look))) is not None:
        part.add(found)


def _installations(part: Part, look: Look) -> Check:
    name = CHECKS[0]
    try:
        found = InstallationFigures(**list_installations.figures(look.database.begin(read_only=True), look.settings))
    except (psycopg.Error, CrmctlError) as error:
        reason = error.message if isinstance(error, ConfigurationError) else "they cannot be counted now"
        return skipped(name, reason)
    finally:
        look.database.close()
    part.figures["installations"] = found
    if found.unclear_count or found.anomaly_count:
        detail = f"{found.unclear_count} are unclear, {found.anomaly_count} are anomalies"
        return warning(name, detail, "look at them: crmctl installations list --stale")
    return ok(name, f"{found.stale_count} are stale and wait for the sweep")


def _credentials(look: Look) -> Check:
    name = CHECKS[1]
    if look.settings.client_id is None and look.settings.client_secret is None:
        return skipped(name, "none are configured: installations sweep --verify-portal cannot be used")
    answer = look.portals().renew(_NOBODYS)
    if answer.failure is not None:
        raise UnavailableError(
            f"Bitrix24's OAuth server gives no answer ({answer.failure})", hint="look at the network; then run it again"
        )
    if answer.error in {"INVALID_CLIENT", "WRONG_CLIENT"}:
        raise ConfigurationError(
            "Bitrix24 refuses the application's own credentials",
            hint="set CRMCTL_BITRIX24__CLIENT_ID and CRMCTL_BITRIX24__CLIENT_SECRET_FILE",
        )
    return ok(name, "the OAuth server knows them")
