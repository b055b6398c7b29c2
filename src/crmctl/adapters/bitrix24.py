"""Bitrix24 as the sweep needs it: app.info of a portal, and the renewal of a token by the OAuth server.

The renewal is a GET whose URL carries the client secret and the token, as Bitrix24 documents it: it goes to the
configured OAuth server and to no other host, and no URL is ever logged or put into an error. What a portal says
about endpoints or domains is not followed.
"""

from collections.abc import Callable
from typing import Final, Protocol
from urllib.parse import urlencode, urlsplit

from tenacity import RetryCallState, Retrying, retry_if_result, stop_after_attempt

from crmctl.adapters.checked_http import AddressRefusedError, CheckedHttp, host_of, parse_stand_in
from crmctl.domain.errors import ConfigurationError
from crmctl.domain.portal_answers import Answer, Failure
from crmctl.settings import Bitrix24Settings

_ATTEMPTS: Final = 2
_APP_INFO: Final = "/rest/app.info"
_RENEWAL: Final = "/oauth/token/"


class Portals(Protocol):
    """Who can be asked. Nothing is raised: what goes wrong is in the answer."""

    def host(self, domain_url: str) -> str | None:
        """A portal's host name in its one canonical spelling; None for what is no bare host name."""
        ...

    def app_info(self, host: str, access_token: str, turn: Callable[[], None]) -> Answer:
        """Ask a portal about the application. `turn` is called before each request: it waits for the portal's turn."""
        ...

    def renew(self, refresh_token: str) -> Answer:
        """Ask the OAuth server for new tokens."""
        ...


class Bitrix24:
    """The real one. Raises ConfigurationError without credentials, or for an OAuth server that is none."""

    def __init__(self, settings: Bitrix24Settings, http: CheckedHttp | None = None) -> None:
        if not settings.client_id or settings.client_secret is None:
            raise ConfigurationError(
                "the application's own credentials are not configured",
                hint="set CRMCTL_BITRIX24__CLIENT_ID and CRMCTL_BITRIX24__CLIENT_SECRET_FILE",
            )
        self._client_id = settings.client_id
        self._client_secret = settings.client_secret
        self._oauth_host = _oauth_host(settings.oauth_url)
        stand_in = parse_stand_in(settings.stand_in, self._oauth_host)
        self._http = http or CheckedHttp(settings.request_timeout.total_seconds(), stand_in)

    def host(self, domain_url: str) -> str | None:
        """What `request` would refuse before it resolves anything is none."""
        try:
            return host_of(domain_url)
        except AddressRefusedError:
            return None

    def app_info(self, host: str, access_token: str, turn: Callable[[], None]) -> Answer:
        """Ask twice at the most: again after a lost connection or a server error that names no cause."""

        def ask() -> Answer:
            turn()
            return self._http.request(host, "POST", _APP_INFO, {"auth": access_token})

        return _twice(ask, lambda answer: answer.transient)

    def renew(self, refresh_token: str) -> Answer:
        """Ask again only where nothing can have been sent: an answer that is lost may have used the token up."""
        query = urlencode(
            {
                "grant_type": "refresh_token",
                "client_id": self._client_id,
                "client_secret": self._client_secret.get_secret_value(),
                "refresh_token": refresh_token,
            }
        )
        return _twice(
            lambda: self._http.request(self._oauth_host, "GET", f"{_RENEWAL}?{query}"),
            lambda answer: answer.failure is Failure.UNREACHABLE,
        )


def _twice(ask: Callable[[], Answer], again: Callable[[Answer], bool]) -> Answer:
    def last(state: RetryCallState) -> Answer:
        assert state.outcome is not None  # noqa: S101  tenacity calls this after an attempt
        answer: Answer = state.outcome.result()
        return answer

    retrying = Retrying(retry=retry_if_result(again), stop=stop_after_attempt(_ATTEMPTS), retry_error_callback=last)
    answer: Answer = retrying(ask)
    return answer


def _oauth_host(url: str) -> str:
    parts = urlsplit(url)
    try:
        host = host_of(parts.netloc)
    except AddressRefusedError:
        host = ""
    if not host or parts.scheme != "https" or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigurationError(
            "CRMCTL_BITRIX24__OAUTH_URL is not https:// with a bare host name", hint="https://oauth.bitrix.info"
        )
    return host
