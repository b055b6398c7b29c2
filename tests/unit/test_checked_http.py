"""Server-side request forgery: where a portal's domain may lead, and where it may not."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator

import httpcore
import pytest

from crmctl.adapters.bitrix24 import Bitrix24
from crmctl.adapters.checked_http import (
    LOOKUPS,
    AddressRefusedError,
    CheckedHttp,
    StandIn,
    host_of,
    is_public,
    parse_stand_in,
)
from crmctl.dev.bitrix24_portal import Bitrix24StandIn, Mood, Reply, app_info
from crmctl.domain.errors import ConfigurationError
from crmctl.domain.portal_answers import Failure
from crmctl.settings import Bitrix24Settings

PUBLIC = "93.184.215.14"


@pytest.mark.parametrize(
    "domain",
    [
        "127.0.0.1",
        "169.254.169.254",
        "10.0.0.1",
        "[::1]",
        "::1",
        "localhost",
        "localhost@evil",
        "user@portal.example",
        "portal.example@127.0.0.1",
        "portal.example:8443",
        "portal.example/rest",
        "portal.example?x=.example",
        "portal.example#.example",
        "https://portal.example",
        "portal.example\\@127.0.0.1",
        "portal.example\r\nHost: other.example",
        "portal .example",
        "127.1",
        "0x7f.0.0.1",
        "2130706433",
        "0x7f000001",
        "1.2.3.0x7f",
        "portal..example",
        ".portal.example",
        "portal.example.",
        "-portal.example",
        "",
        " ",
        "a" * 64 + ".example",
        ".".join(["abcdefgh"] * 32),
        "портал\u2024рф:80",
    ],
)
def test_what_is_no_bare_host_name_is_refused_before_it_is_resolved(domain: str) -> None:
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    answer = CheckedHttp(1, resolve=resolve).request(domain, "POST", "/rest/app.info", {})
    assert answer.failure is Failure.ADDRESS_REFUSED
    # A name that is merely odd may be resolved, an address or a URL never is.
    assert asked == []


@pytest.mark.parametrize(
    ("domain", "host"),
    [
        ("Portal.Bitrix24.RU", "portal.bitrix24.ru"),
        ("пример.рф", "xn--e1afmkfd.xn--p1ai"),
        (" b24-abc.bitrix24.com ", "b24-abc.bitrix24.com"),
    ],
)
def test_a_host_name_in_its_ascii_form(domain: str, host: str) -> None:
    assert host_of(domain) == host


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fec0::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:93.184.215.14",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2001:db8::1",
        "nonsense",
    ],
)
def test_an_address_that_is_not_global_unicast(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2a00:1450:4010:c05::65", "64:ff9b::808:808"])
def test_a_public_address(address: str) -> None:
    assert is_public(address)


class Connections:
    """Notes where connections go, and makes none."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []

    def __call__(self, address: str, port: int, timeout: float) -> httpcore.NetworkStream:
        assert timeout > 0
        self.made.append((address, port))
        raise httpcore.ConnectError("refused")


@pytest.mark.parametrize(
    "answer", [["127.0.0.1"], ["10.0.0.7"], ["::1"], [PUBLIC, "127.0.0.1"], ["169.254.169.254"], []]
)
def test_a_name_that_leads_to_a_private_address_is_not_connected_to(answer: list[str]) -> None:
    connections = Connections()
    http = CheckedHttp(1, resolve=lambda _host, _port: answer, connect=connections)
    assert http.request("portal.example", "POST", "/", {}).failure is Failure.ADDRESS_REFUSED
    assert connections.made == []


def test_a_name_is_resolved_once_and_the_checked_address_is_the_one_connected_to() -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]])
    connections = Connections()
    http = CheckedHttp(1, resolve=lambda _host, _port: next(answers), connect=connections)
    assert http.request("portal.example", "POST", "/", {}).failure is Failure.UNREACHABLE
    assert connections.made == [(PUBLIC, 443)]
    assert http.request("portal.example", "POST", "/", {}).failure is Failure.ADDRESS_REFUSED
    assert connections.made == [(PUBLIC, 443)]


class Resolver:
    """A DNS that answers when it is let; it notes how many are waiting for it at once."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.asked: list[str] = []
        self.waiting = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, host: str, _port: int) -> list[str]:
        with self._lock:
            self.asked.append(host)
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        self.let.wait(20)
        with self._lock:
            self.waiting -= 1
        return [PUBLIC]


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    resolver = Resolver()
    yield resolver
    resolver.let.set()


def test_a_name_that_takes_too_long_to_resolve_is_a_timeout(resolver: Resolver) -> None:
    connections = Connections()
    http = CheckedHttp(0.2, resolve=resolver, connect=connections)
    began = time.monotonic()
    assert http.request("portal.example", "POST", "/", {}).failure is Failure.TIMEOUT
    assert time.monotonic() - began < 1
    resolver.let.set()
    # What comes too late leads nowhere; the next request resolves anew.
    assert http.request("portal.example", "POST", "/", {}).failure is Failure.UNREACHABLE
    assert (resolver.asked, connections.made) == (["portal.example"] * 2, [(PUBLIC, 443)])


def test_names_that_hang_hold_up_no_process_and_are_bounded_in_number(resolver: Resolver) -> None:
    http = CheckedHttp(0.02, resolve=resolver)
    hosts = [f"p{number}.example" for number in range(LOOKUPS + 20)]
    for host in hosts:
        assert http.request(host, "POST", "/", {}).failure is Failure.TIMEOUT
    assert (resolver.waiting, resolver.most) == (LOOKUPS, LOOKUPS)
    # One that had no turn was never asked about; the process does not wait for those that had.
    assert resolver.asked == hosts[:LOOKUPS]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "resolver")


def test_the_time_that_a_name_took_is_part_of_the_requests_time() -> None:
    left: list[float] = []

    def resolve(_host: str, _port: int) -> list[str]:
        time.sleep(0.3)
        return [PUBLIC]

    def connect(_address: str, _port: int, timeout: float) -> httpcore.NetworkStream:
        left.append(timeout)
        raise httpcore.ConnectError("refused")

    CheckedHttp(1, resolve=resolve, connect=connect).request("portal.example", "GET", "/")
    assert len(left) == 1
    assert 0 < left[0] <= 0.7


def test_a_name_that_cannot_be_resolved() -> None:
    def resolve(_host: str, _port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    connections = Connections()
    answer = CheckedHttp(1, resolve=resolve, connect=connections).request("portal.example", "POST", "/", {})
    assert (answer.failure, connections.made) == (Failure.UNREACHABLE, [])


def test_a_proxy_in_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    connections = Connections()
    CheckedHttp(1, resolve=lambda _host, _port: [PUBLIC], connect=connections).request("portal.example", "GET", "/")
    assert connections.made == [(PUBLIC, 443)]


class Recorder(httpcore.MockStream):
    """A connection that notes under which name TLS was begun."""

    names: list[str | None]

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        assert ssl_context.check_hostname
        assert ssl_context.verify_mode is ssl.CERT_REQUIRED
        self.names.append(server_hostname)
        return self


def test_tls_verifies_the_name_although_an_address_is_connected_to() -> None:
    Recorder.names = []
    stream = Recorder([b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"result":1', b"}"])
    http = CheckedHttp(1, resolve=lambda _host, _port: [PUBLIC], connect=lambda *_: stream)
    http.request("portal.example", "GET", "/")
    assert Recorder.names == ["portal.example"]


@pytest.fixture
def portal() -> Iterator[Bitrix24StandIn]:
    with Bitrix24StandIn(patience=5) as stand_in:
        yield stand_in


def http_to(portal: Bitrix24StandIn, timeout: float = 1.0) -> CheckedHttp:
    address, port = portal.address.split(":")

    def no_names(host: str, _port: int) -> list[str]:
        raise AssertionError(f"{host} was resolved")

    return CheckedHttp(timeout, StandIn(address, int(port)), resolve=no_names)


def test_an_answer_is_read(portal: Bitrix24StandIn) -> None:
    portal.portals["p.test"] = app_info(installed=True)
    answer = http_to(portal).request("p.test", "POST", "/rest/app.info", {"auth": "token"})
    assert (answer.status, answer.failure, answer.body["result"]["INSTALLED"]) == (200, None, True)
    assert [(request.path, request.token) for request in portal.asked("p.test")] == [("/rest/app.info", "token")]


@pytest.mark.parametrize("location", ["http://127.0.0.1:1/", "https://elsewhere.test/", "http://169.254.169.254/"])
def test_a_redirect_is_not_followed(portal: Bitrix24StandIn, location: str) -> None:
    portal.portals["p.test"] = Reply(mood=Mood.REDIRECT, location=location)
    assert http_to(portal).request("p.test", "POST", "/", {}).failure is Failure.REDIRECTED
    assert [request.host for request in portal.requests] == ["p.test"]


@pytest.mark.parametrize(
    ("mood", "failure"),
    [
        (Mood.TIMEOUT, Failure.TIMEOUT),
        (Mood.TRICKLE, Failure.TIMEOUT),
        (Mood.BROKEN, Failure.BROKEN),
        (Mood.NOT_JSON, Failure.UNREADABLE),
        (Mood.HUGE, Failure.UNREADABLE),
    ],
)
def test_what_goes_wrong_is_in_the_answer(portal: Bitrix24StandIn, mood: Mood, failure: Failure) -> None:
    portal.portals["p.test"] = Reply(mood=mood)
    assert http_to(portal, timeout=0.5).request("p.test", "POST", "/", {}).failure is failure


def test_nobody_listens() -> None:
    with Bitrix24StandIn() as gone:
        http = http_to(gone)
    assert http.request("p.test", "POST", "/", {}).failure is Failure.UNREACHABLE


class TestTheStandIn:
    """The way to the loopback, which tests need, cannot be left open in production."""

    def test_it_is_refused_beside_a_real_oauth_server(self) -> None:
        with pytest.raises(ConfigurationError, match="real OAuth server"):
            parse_stand_in("127.0.0.1:80", "oauth.bitrix.info")

    @pytest.mark.parametrize(
        "setting", ["10.0.0.1:80", "portal.example:80", "127.0.0.1", "127.0.0.1:0", "[::2]:80", ""]
    )
    def test_it_is_a_loopback_address_with_a_port(self, setting: str) -> None:
        with pytest.raises(ConfigurationError, match="loopback"):
            parse_stand_in(setting, "oauth.test")

    def test_it_answers_for_reserved_names_only(self, portal: Bitrix24StandIn) -> None:
        address, port = portal.address.split(":")
        http = CheckedHttp(1, StandIn(address, int(port)), resolve=lambda _host, _port: ["127.0.0.1"])
        for host in ("portal.example", "test.example", "127.0.0.1", "localhost"):
            assert http.request(host, "POST", "/", {}).failure is Failure.ADDRESS_REFUSED
        assert portal.requests == []

    def test_without_it_reserved_names_are_resolved_and_checked_like_all(self) -> None:
        http = CheckedHttp(1, resolve=lambda _host, _port: ["127.0.0.1"])
        assert http.request("p.test", "POST", "/", {}).failure is Failure.ADDRESS_REFUSED


@pytest.mark.parametrize(
    "url",
    [
        "http://oauth.bitrix.info",
        "https://oauth.bitrix.info/elsewhere",
        "https://user@oauth.bitrix.info",
        "https://127.0.0.1",
        "https://oauth.bitrix.info:8443",
        "oauth.bitrix.info",
    ],
)
def test_an_oauth_server_is_https_and_a_bare_name(url: str) -> None:
    with pytest.raises(ConfigurationError, match="OAUTH_URL"):
        Bitrix24(Bitrix24Settings(client_id="id", client_secret="secret", oauth_url=url))  # type: ignore[arg-type]


def test_a_host_is_refused_with_an_error_that_is_not_a_value_error() -> None:
    with pytest.raises(AddressRefusedError):
        host_of("127.0.0.1")
