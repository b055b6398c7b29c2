"""HTTPS to hosts whose names other people chose: nothing but public addresses, and nowhere else than asked.

A portal's domain comes out of a database row that its owner filled in. So: the name must be a bare host name; it
is resolved once; every address that it resolves to must be global unicast; the connection is made to one of those
addresses, and TLS verifies the name. httpcore follows no redirects and reads no proxies from the environment. A
request has one deadline from the look-up of its name to its last byte, and an answer one size limit.

Tests need a portal on the loopback. `stand_in` does not loosen the check: it is an address that all names under
`.test`, which exist in no DNS (RFC 6761), are led to, without TLS. It is refused unless the OAuth server is such
a name as well, so that a configuration with real credentials for a real server cannot have it.
"""

import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import httpcore
import orjson

from crmctl.domain.errors import ConfigurationError
from crmctl.domain.portal_answers import Answer, Failure

Resolve = Callable[[str, int], list[str]]
Connect = Callable[[str, int, float], httpcore.NetworkStream]

# Names that are looked up at once, at the most: as many as there can be workers (`bitrix24.concurrency`).
LOOKUPS: Final = 64
_LARGEST_ANSWER: Final = 1 << 20
_HOST: Final = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]", re.ASCII)
_HTTPS: Final = 443
_RESERVED_SUFFIX: Final = ".test"
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class AddressRefusedError(Exception):
    """The name is no bare public host name, or leads to an address that is not global unicast."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """The loopback server that answers for names under `.test`."""

    address: str
    port: int


def host_of(domain_url: str) -> str:
    """The bare host name in its ASCII form. Raises AddressRefusedError for anything else, IP addresses included."""
    try:
        host = domain_url.strip().encode("idna").decode("ascii").lower()
    except UnicodeError:
        raise AddressRefusedError("not a host name") from None
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise AddressRefusedError("not a bare host name")
    return host


def is_public(address: str) -> bool:
    """Whether an IP address is global unicast, and so is the IPv4 address that it may embed.

    Of an address that NAT64 makes of an IPv4 address (RFC 6052), that one alone decides.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    parts: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.is_site_local or ip.ipv4_mapped is not None:
            return False
        if ip in _NAT64:
            parts = [ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)]
        parts += [part for part in (ip.sixtofour, *(ip.teredo or ())) if part is not None]
    kinds = ("is_private", "is_loopback", "is_link_local", "is_multicast", "is_reserved", "is_unspecified")
    return all(part.is_global and not any(getattr(part, kind) for kind in kinds) for part in parts)


def parse_stand_in(setting: str | None, oauth_host: str) -> StandIn | None:
    """Read the `stand_in` setting. Raises ConfigurationError unless it is a loopback address and a port beside an
    OAuth server under `.test`.
    """
    if setting is None:
        return None
    address, _, port = setting.rpartition(":")
    try:
        loopback = ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigurationError("CRMCTL_BITRIX24__STAND_IN is not a loopback address with a port")
    if not oauth_host.endswith(_RESERVED_SUFFIX):
        raise ConfigurationError(
            "CRMCTL_BITRIX24__STAND_IN is for tests, and is refused beside a real OAuth server",
            hint="unset it, or set CRMCTL_BITRIX24__OAUTH_URL to a name under .test",
        )
    return StandIn(address.strip("[]"), int(port))


class CheckedHttp:
    """Sends one request per connection. Safe to use from several threads."""

    def __init__(
        self,
        timeout: float,
        stand_in: StandIn | None = None,
        *,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._timeout = timeout
        self._stand_in = stand_in
        self._resolve = _Resolver(resolve or _resolve)
        self._connect = connect or _connect
        self._tls: ssl.SSLContext | None = None

    def request(self, host: str, method: str, target: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a request and read its answer; whatever goes wrong is in the answer, and nothing is raised.

        `host` is checked here, `target` is the path with its query, a `body` is sent as JSON.
        """
        deadline = time.monotonic() + self._timeout
        try:
            name = host_of(host)
            stood_in = self._stand_in if name.endswith(_RESERVED_SUFFIX) else None
            backend = self._backend(name, stood_in, deadline)
            scheme = "http" if stood_in else "https"
            url = httpcore.URL(scheme=scheme, host=name, port=None, target=target.encode("ascii"))
            return self._exchange(backend, method, url, body)
        except AddressRefusedError:
            return Answer(failure=Failure.ADDRESS_REFUSED)
        except httpcore.TimeoutException:
            return Answer(failure=Failure.TIMEOUT)
        except httpcore.ConnectError:
            return Answer(failure=Failure.UNREACHABLE)
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
            return Answer(failure=Failure.BROKEN)

    def _exchange(
        self, backend: httpcore.NetworkBackend, method: str, url: httpcore.URL, body: Mapping[str, Any] | None
    ) -> Answer:
        headers: list[tuple[bytes | str, bytes | str]] = [
            ("Accept", "application/json"),
            ("User-Agent", "crmctl"),
            ("Connection", "close"),
        ]
        if body is not None:
            headers.append(("Content-Type", "application/json"))
        if self._tls is None and url.scheme == b"https":
            self._tls = httpcore.default_ssl_context()
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._timeout)
        with (
            httpcore.ConnectionPool(
                ssl_context=self._tls, max_keepalive_connections=0, retries=0, network_backend=backend
            ) as pool,
            pool.stream(
                method,
                url,
                headers=headers,
                content=None if body is None else orjson.dumps(body),
                extensions={"timeout": timeouts},
            ) as response,
        ):
            if 300 <= response.status < 400:
                return Answer(failure=Failure.REDIRECTED)
            received = bytearray()
            for chunk in response.iter_stream():
                received += chunk
                if len(received) > _LARGEST_ANSWER:
                    return Answer(failure=Failure.UNREADABLE)
        return _parse(response.status, bytes(received))

    def _backend(self, name: str, stood_in: StandIn | None, deadline: float) -> httpcore.NetworkBackend:
        if stood_in is not None:
            return _Fixed([stood_in.address], stood_in.port, deadline, self._connect)
        addresses = self._resolve(name, _HTTPS, deadline)
        if not addresses or not all(is_public(address) for address in addresses):
            raise AddressRefusedError("not a public address")
        return _Fixed(addresses, _HTTPS, deadline, self._connect)


class _Resolver:
    """Looks names up under a deadline, of which getaddrinfo knows none.

    Each look-up has a thread that nobody waits for longer than that. One that hangs keeps its thread until it ends;
    while there are LOOKUPS of them, further ones wait for their turn under their own deadlines.
    """

    def __init__(self, look_up: Resolve) -> None:
        self._look_up = look_up
        self._free = threading.BoundedSemaphore(LOOKUPS)

    def __call__(self, host: str, port: int, deadline: float) -> list[str]:
        """The addresses of a name. Raises ConnectTimeout at the deadline, ConnectError where it cannot be resolved."""
        if not self._free.acquire(timeout=_left(deadline, httpcore.ConnectTimeout)):
            raise httpcore.ConnectTimeout("too many names are being looked up")
        found: Future[list[str]] = Future()
        threading.Thread(target=self._run, args=(host, port, found), name="resolver", daemon=True).start()
        try:
            return found.result(_left(deadline, httpcore.ConnectTimeout))
        except TimeoutError:
            raise httpcore.ConnectTimeout("the name was not resolved in time") from None
        except OSError:
            raise httpcore.ConnectError("the name cannot be resolved") from None

    def _run(self, host: str, port: int, found: Future[list[str]]) -> None:
        try:
            found.set_result(self._look_up(host, port))
        except BaseException as error:
            found.set_exception(error)
        finally:
            self._free.release()


class _Fixed(httpcore.NetworkBackend):
    """Connects to the addresses that were checked, whatever name it is asked for."""

    def __init__(self, addresses: list[str], port: int, deadline: float, connect: Connect) -> None:
        self._addresses = addresses
        self._port = port
        self._deadline = deadline
        self._connect = connect

    def connect_tcp(
        self,
        host: str,  # noqa: ARG002
        port: int,  # noqa: ARG002
        timeout: float | None = None,  # noqa: ARG002
        local_address: str | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """Try the addresses one after the other until the deadline."""
        failure: httpcore.ConnectError | None = None
        for address in self._addresses:
            try:
                stream = self._connect(address, self._port, _left(self._deadline, httpcore.ConnectTimeout))
            except httpcore.ConnectError as error:
                failure = error
            else:
                return _Deadline(stream, self._deadline)
        raise failure or httpcore.ConnectError("no address")


class _Deadline(httpcore.NetworkStream):
    """A stream of which every step ends at one deadline: a slow trickle of bytes cannot stretch a request."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        """Read some bytes."""
        return self._stream.read(max_bytes, _left(self._deadline, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        """Write all bytes."""
        self._stream.write(buffer, _left(self._deadline, httpcore.WriteTimeout))

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """Begin TLS, which verifies the name."""
        left = _left(self._deadline, httpcore.ConnectTimeout)
        return _Deadline(self._stream.start_tls(ssl_context, server_hostname, left), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        """What httpcore asks of the socket."""
        return self._stream.get_extra_info(info)


def _left(deadline: float, error: type[httpcore.TimeoutException]) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise error("the request's time is over")
    return left


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _connect(address: str, port: int, timeout: float) -> httpcore.NetworkStream:
    return httpcore.SyncBackend().connect_tcp(address, port, timeout)


def _parse(status: int, received: bytes) -> Answer:
    try:
        body = orjson.loads(received)
    except orjson.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        return Answer(status, body)
    return Answer(failure=Failure.UNREADABLE) if status == 200 else Answer(status)
