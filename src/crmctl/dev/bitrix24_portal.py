"""A stand-in for Bitrix24 on the loopback, for tests: portals that answer app.info, and the OAuth server.

A portal is told apart by the Host header. What it answers is set by the test: a behaviour per host. The OAuth server
rotates refresh tokens as Bitrix24 does: one that was used is not valid any more.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

OAUTH_HOST: Final = "oauth.test"
CLIENT_ID: Final = "local.0123456789abcd.01234567"
CLIENT_SECRET: Final = "stand-in-client-secret-0123456789"  # noqa: S105  of the stand-in itself


class Mood(StrEnum):
    """How a server answers when it does not answer as it should."""

    TIMEOUT = "timeout"
    TRICKLE = "trickle"
    BROKEN = "broken"
    REDIRECT = "redirect"
    NOT_JSON = "not-json"
    HUGE = "huge"


@dataclass(frozen=True, slots=True)
class Reply:
    """A status and a JSON body, or a mood."""

    status: int = 200
    body: Mapping[str, Any] = field(default_factory=dict)
    mood: Mood | None = None
    location: str = "http://elsewhere.test/"


def app_info(*, installed: object, cloud: bool = True) -> Reply:
    """What a portal says of an application; self-hosted ones know no license types."""
    result = {
        "ID": 5 if cloud else "7",
        "CODE": "local.0123456789abcd.01234567",
        "VERSION": 1,
        "STATUS": "L",
        "INSTALLED": installed,
        "PAYMENT_EXPIRED": "N",
        "DAYS": None,
        "LANGUAGE_ID": "ru",
        "LICENSE": "ru_ent250" if cloud else "selfhosted",
    }
    if cloud:
        result |= {"LICENSE_TYPE": "ent250", "LICENSE_FAMILY": "ent"}
    return Reply(body={"result": result, "time": {"start": 1.0, "finish": 1.1, "duration": 0.1}})


def error(code: str, description: str = "", *, status: int = 400) -> Reply:
    """An error as Bitrix24 writes it."""
    return Reply(status, {"error": code, "error_description": description})


@dataclass(slots=True)
class Grant:
    """What the OAuth server knows of one portal: its member, and the token that renews."""

    member_id: str
    refresh_token: str
    reply: Reply | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request that arrived: when (monotonic seconds), for which host, which path, which tokens."""

    at: float
    host: str
    path: str
    token: str
    secret: str | None = None


class Bitrix24StandIn:
    """The server. Use it as a context manager; `address` is what `CRMCTL_BITRIX24__STAND_IN` takes."""

    def __init__(self, *, patience: float = 30.0) -> None:
        self.portals: dict[str, Reply | Callable[[str], Reply]] = {}
        self.grants: list[Grant] = []
        self.requests: list[Request] = []
        self.before_answer: Callable[[Request], None] = lambda _request: None
        self.after_renewal: Callable[[], None] = lambda: None
        self.patience = patience
        self.access_tokens: set[str] | None = None
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self._server = _Server(self)

    def __enter__(self) -> "Bitrix24StandIn":
        threading.Thread(target=self._server.serve_forever, name="stand-in", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"{host if isinstance(host, str) else host.decode()}:{port}"

    @property
    def settings(self) -> dict[str, str]:
        """The environment in which crmctl asks this stand-in."""
        return {
            "CRMCTL_BITRIX24__STAND_IN": self.address,
            "CRMCTL_BITRIX24__OAUTH_URL": f"https://{OAUTH_HOST}",
            "CRMCTL_BITRIX24__CLIENT_ID": CLIENT_ID,
            "CRMCTL_BITRIX24__CLIENT_SECRET": CLIENT_SECRET,
            "CRMCTL_BITRIX24__REQUEST_TIMEOUT": "2s",
        }

    def asked(self, host: str) -> list[Request]:
        """The requests for one host."""
        with self._lock:
            return [request for request in self.requests if request.host == host]

    def answer(self, request: Request) -> Reply:
        """Note the request and decide what to say."""
        with self._lock:
            self.requests.append(request)
        self.before_answer(request)
        if request.host == OAUTH_HOST:
            return self._renew(request)
        if self.access_tokens is not None and request.token not in self.access_tokens:
            return error("expired_token", "The access token provided has expired.", status=401)
        reply = self.portals.get(request.host, Reply(404, {}))
        return reply(request.token) if callable(reply) else reply

    def _renew(self, request: Request) -> Reply:
        with self._lock:
            if request.secret != CLIENT_SECRET:
                return error("invalid_client", status=401)
            grant = next((g for g in self.grants if g.refresh_token == request.token), None)
            if grant is None:
                return error("invalid_grant")
            if grant.reply is not None:
                return grant.reply
            access, grant.refresh_token = secrets.token_hex(32), secrets.token_hex(32)
            if self.access_tokens is not None:
                self.access_tokens.add(access)
            body = {
                "access_token": access,
                "refresh_token": grant.refresh_token,
                "expires": int(time.time()) + 3600,
                "expires_in": 3600,
                "member_id": grant.member_id,
                "client_endpoint": "http://elsewhere.test/rest/",
                "server_endpoint": f"https://{OAUTH_HOST}/rest/",
                "domain": OAUTH_HOST,
                "scope": "app",
                "status": "L",
            }
        self.after_renewal()
        return Reply(body=body)


class _Server(ThreadingHTTPServer):
    """Bears many connections at once, and clients that hang up."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, stand_in: Bitrix24StandIn) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stand_in = stand_in

    def handle_error(self, _request: object, _client_address: object) -> None:
        """Stay silent."""


class _Handler(BaseHTTPRequestHandler):
    """Reads the token, and answers as it is told."""

    server: _Server

    def do_GET(self) -> None:
        """The OAuth server."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._serve(parts.path, query.get("refresh_token", ""), query.get("client_secret"))

    def do_POST(self) -> None:
        """A portal's REST method."""
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._serve(self.path, json.loads(body or b"{}").get("auth", ""), None)

    def log_message(self, *_args: object) -> None:
        """Stay silent."""

    def _serve(self, path: str, token: str, secret: str | None) -> None:
        host = self.headers.get("Host", "").partition(":")[0]
        stand_in = self.server.stand_in
        reply = stand_in.answer(Request(time.monotonic(), host, path, token, secret))
        if reply.mood is Mood.TIMEOUT:
            stand_in.closing.wait(stand_in.patience)
        elif reply.mood is Mood.TRICKLE:
            self._trickle()
        elif reply.mood is Mood.REDIRECT:
            self._send(302, b"", location=reply.location)
        elif reply.mood is Mood.NOT_JSON:
            self._send(200, b"<html>Bitrix24</html>")
        elif reply.mood is Mood.HUGE:
            self._send(200, b'{"result": "' + b"x" * (2 << 20) + b'"}')
        elif reply.mood is None:
            self._send(reply.status, json.dumps(reply.body).encode())
        self.close_connection = True

    def _trickle(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        stand_in = self.server.stand_in
        deadline = time.monotonic() + stand_in.patience
        while time.monotonic() < deadline and not stand_in.closing.wait(0.05):
            self.wfile.write(b" ")
            self.wfile.flush()

    def _send(self, status: int, body: bytes, *, location: str | None = None) -> None:
        self.send_response(status)
        if location is not None:
            self.send_header("Location", location)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
