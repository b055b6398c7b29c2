"""Whom `crmctl bookings extend` believes: keys, signatures, claims and times of the actor's token."""

import base64
import hashlib
import hmac
import http.server
import json
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import jwt
import psycopg
import pytest
from cryptography.hazmat.primitives import serialization

from crmctl.dev.postgres import PostgresServer
from tests.expire_support import Connection, bookings, scalar
from tests.prefork import Prefork, run_crmctl
from tests.relay_support import (
    AUDIENCE,
    ISSUER,
    Signer,
    actor,
    assert_hidden,
    auth,
    ec_signer,
    ed25519_signer,
    error_of,
    insert_booked,
    manager_claims,
    rsa_signer,
    tenant_of,
    work,
)
from tests.support import CallResult, Database

FAKE_CLOCK = Path(__file__).parents[1] / "fakeclock"


@pytest.fixture(scope="module")
def prefork() -> Iterator[Prefork]:
    with Prefork() as made:
        yield made


@pytest.fixture(scope="module")
def database(postgres_server: PostgresServer, template_database: str) -> Iterator[Database]:
    """One for all tests of the module: each looks at a booking of its own, and at what it changes."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute(f"create database test_identity template {template_database}".encode())
    database = Database(postgres_server.url("test_identity"))
    yield database
    database.close()


@pytest.fixture(scope="module")
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


@pytest.fixture
def attempt(prefork: Prefork, database: Database) -> Callable[..., CallResult]:
    """Extend a booking with a token, believing number 1 unless told otherwise; no part of the token is shown."""

    def run(booking_id: UUID, token: str | None, settings: Mapping[str, str] | None = None) -> CallResult:
        believed = rsa_signer().settings if settings is None else dict(settings)
        env = believed if token is None else {**believed, "CRMCTL_ACTOR_TOKEN": token}
        result = prefork.run("bookings", "extend", str(booking_id), "-o", "json", database=database, env=env)
        assert_hidden(token, result)
        return result

    return run


Attempt = Callable[..., CallResult]


def unpadded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def compact(header: Mapping[str, Any], claims: object, sign: Callable[[bytes], bytes]) -> str:
    """A token put together by hand, as no library would."""
    signed = f"{unpadded(json.dumps(header).encode())}.{unpadded(json.dumps(claims).encode())}"
    return f"{signed}.{unpadded(sign(signed.encode()))}"


def unsigned(tenant_id: UUID, algorithm: str = "none") -> str:
    return compact({"alg": algorithm, "typ": "JWT"}, manager_claims(tenant_id), lambda _: b"")


def confused(tenant_id: UUID, secret: str) -> str:
    """Signed with HS256, and the secret is the text of the public key."""
    return compact(
        {"alg": "HS256", "typ": "JWT"},
        manager_claims(tenant_id),
        lambda text: hmac.new(secret.encode(), text, hashlib.sha256).digest(),
    )


def altered(tenant_id: UUID) -> str:
    """A good token of another tenant's manager, whose payload was exchanged under the signature."""
    header, _, signature = rsa_signer().token(uuid.uuid4()).split(".")
    return f"{header}.{unpadded(json.dumps(manager_claims(tenant_id)).encode())}.{signature}"


def compressed(tenant_id: UUID) -> str:
    return rsa_signer().token(tenant_id, headers={"crit": ["zip"], "zip": "DEF"})


def embedded_key(tenant_id: UUID) -> str:
    """Signed by a stranger, whose key the token brings along in its own header."""
    stranger = rsa_signer(2)
    return stranger.token(tenant_id, headers={"jwk": stranger.jwk(), "jku": "http://127.0.0.1:1/keys"})


def claims_of(**claims: object) -> Callable[[UUID], str]:
    return lambda tenant_id: rsa_signer().token(tenant_id, **dict[str, Any](claims))


def now() -> int:
    return round(time.time())


REFUSED: Mapping[str, Callable[[UUID], str | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: "",
    "no token at all": lambda _: "please let me in, it is urgent",
    "two parts": lambda tenant_id: rsa_signer().token(tenant_id).rpartition(".")[0],
    "not ASCII": lambda tenant_id: rsa_signer().token(tenant_id) + "я",
    "a NUL in the middle of the base64": lambda tenant_id: rsa_signer().token(tenant_id).replace(".", ".=.", 1),
    "longer than any": lambda tenant_id: rsa_signer().token(tenant_id, padding="x" * 20_000),
    "claims that are a list": lambda _: compact({"alg": "RS256"}, [1, 2], lambda _: b"x"),
    "unsigned": unsigned,
    "unsigned in other words": lambda tenant_id: unsigned(tenant_id, "NoNe"),
    "unsigned under the right name": lambda tenant_id: unsigned(tenant_id, "RS256"),
    "signed with the public key": lambda tenant_id: confused(tenant_id, rsa_signer().public_key),
    "signed with the public key, trimmed": lambda tenant_id: confused(tenant_id, rsa_signer().public_key.strip()),
    "signed with another key": lambda tenant_id: rsa_signer(2).token(tenant_id),
    "signed with a key that it brings along": embedded_key,
    "signed with another algorithm": lambda tenant_id: Signer(rsa_signer().key, "PS256").token(tenant_id),
    "signed with a longer hash": lambda tenant_id: Signer(rsa_signer().key, "RS512").token(tenant_id),
    "signed by an elliptic curve": lambda tenant_id: ec_signer().token(tenant_id),
    "altered": altered,
    "with a critical extension": compressed,
    "another issuer": claims_of(iss="https://login.example/realms/other"),
    "the issuer with a slash more": claims_of(iss=ISSUER + "/"),
    "an issuer that is a number": claims_of(iss=7),
    "another audience": claims_of(aud="crm-frontend"),
    "other audiences": claims_of(aud=["crm-frontend", AUDIENCE + "-other"]),
    "no iss": claims_of(iss=None),
    "no aud": claims_of(aud=None),
    "no exp": claims_of(exp=None),
    "no sub": claims_of(sub=None),
    "no developer_company_id": claims_of(developer_company_id=None),
    "no permissions": claims_of(permissions=None),
    "permissions that are a text": claims_of(permissions="crm.bookings.decide"),
    "permissions that are no texts": claims_of(permissions=[["crm.bookings.decide"]]),
    "an empty sub": claims_of(sub=""),
    "a sub that is a number": claims_of(sub=17),
    "a developer_company_id that is no UUID": claims_of(developer_company_id="ACME"),
    "a developer_company_id that is a number": claims_of(developer_company_id=17),
    "an exp that is a text": claims_of(exp="tomorrow"),
    "an exp that is true": claims_of(exp=True),
    "an exp before the calendar": claims_of(exp=-(10**15)),
    "an nbf that is a text": claims_of(nbf="yesterday"),
    "expired beyond the leeway": claims_of(exp=now() - 600),
    "not valid yet": claims_of(nbf=now() + 86400),
}


class TestATokenThatIsNotToBeBelieved:
    @pytest.mark.parametrize("case", REFUSED)
    def test_is_forbidden_and_nothing_is_written(self, attempt: Attempt, connection: Connection, case: str) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        result = attempt(booking_id, REFUSED[case](tenant_of(connection, booking_id)))
        assert result.exit_code == 11, result.stderr
        error = error_of(result)
        assert (error["code"], error["http_status"], error["exit_code"]) == ("CRM_BOOKING_FORBIDDEN", 403, 11)
        assert error["hint"]
        assert work(connection) == before

    @pytest.mark.parametrize(
        "claims",
        [
            {"sub": "man\0ager"},
            {"sub": "\ud800"},
            {"exp": 253_402_300_799},
            {"exp": 1e300},
            {"nbf": -62_135_596_800},
        ],
        ids=["NUL in sub", "half a surrogate pair in sub", "the last exp", "an exp beyond floats", "the first nbf"],
    )
    def test_or_is_believed_but_is_never_a_bug(
        self, attempt: Attempt, connection: Connection, claims: dict[str, Any]
    ) -> None:
        """Odd claims under a good signature: the answer is yes or no."""
        booking_id = insert_booked(connection)
        result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id), **claims))
        assert result.exit_code in {0, 11}, result.stderr


class TestATokenThatIsToBeBelieved:
    @pytest.mark.parametrize(
        "claims",
        [
            {"aud": ["crm-frontend", AUDIENCE]},
            {"exp": time.time() + 86400.5},
            {"nbf": None, "iat": None, "jti": "7", "realm_access": {"roles": []}},
            {"sub": "Менеджер Ёлкина 🏠"},
        ],
        ids=["one audience of several", "a fraction of a second", "claims that nobody asked for", "any alphabet"],
    )
    def test_may_differ_in_what_does_not_matter(
        self, attempt: Attempt, connection: Connection, claims: dict[str, Any]
    ) -> None:
        booking_id = insert_booked(connection)
        result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id), **claims))
        assert result.exit_code == 0, result.stderr

    def test_stays_hidden_in_the_most_talkative_log(self, attempt: Attempt, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        token = rsa_signer().token(tenant_of(connection, booking_id))
        talkative = rsa_signer().settings | {"CRMCTL_LOG_LEVEL": "debug"}
        assert attempt(booking_id, token, talkative).exit_code == 0
        assert attempt(booking_id, token + "x", talkative).exit_code == 11
        away = talkative | {"CRMCTL_DATABASE_URL": "postgresql://127.0.0.1:1/crm?connect_timeout=2"}
        assert attempt(booking_id, token, away).exit_code == 69


class TestTheTimeOfAToken:
    @pytest.mark.parametrize(
        ("claims", "exit_code"),
        [
            ({"exp": -45}, 0),
            ({"exp": -75}, 11),
            ({"nbf": 45}, 0),
            ({"nbf": 75}, 11),
            ({"nbf": -3600}, 0),
            ({"iat": 86_400}, 0),
        ],
        ids=str,
    )
    def test_may_be_a_minute_off(
        self, attempt: Attempt, connection: Connection, claims: dict[str, int], exit_code: int
    ) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        clock = float(scalar(connection, "select extract(epoch from clock_timestamp())"))
        times = {name: round(clock + seconds, 3) for name, seconds in claims.items()}
        result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id), **dict[str, Any](times)))
        assert result.exit_code == exit_code
        assert (work(connection) == before) == (exit_code == 11)

    @pytest.mark.parametrize(
        ("claims", "exit_code"), [({"exp": 600}, 0), ({"exp": -600}, 11), ({"nbf": 600}, 11)], ids=str
    )
    @pytest.mark.parametrize("host_is_off", [-1800, 1800])
    def test_is_told_by_the_clock_of_postgresql_alone(
        self, database: Database, connection: Connection, claims: dict[str, int], exit_code: int, host_is_off: int
    ) -> None:
        booking_id = insert_booked(connection)
        times = {name: now() + seconds for name, seconds in claims.items()}
        token = rsa_signer().token(tenant_of(connection, booking_id), **dict[str, Any](times))
        clock = {"PYTHONPATH": str(FAKE_CLOCK), "FAKE_CLOCK_OFFSET_SECONDS": str(host_is_off)}
        result = run_crmctl("bookings", "extend", str(booking_id), database=database, env=actor(token) | clock)
        assert result.exit_code == exit_code


class TestThePublicKey:
    @pytest.mark.parametrize(
        "signer",
        [rsa_signer(), Signer(rsa_signer().key, "PS384"), ec_signer(), ed25519_signer()],
        ids=lambda signer: signer.algorithm,
    )
    def test_of_each_kind_believes_its_own_signatures_only(
        self, attempt: Attempt, connection: Connection, signer: Signer
    ) -> None:
        booking_id = insert_booked(connection)
        tenant_id = tenant_of(connection, booking_id)
        assert attempt(booking_id, unsigned(tenant_id), signer.settings).exit_code == 11
        assert attempt(booking_id, confused(tenant_id, signer.public_key), signer.settings).exit_code == 11
        assert attempt(booking_id, rsa_signer(2).token(tenant_id), signer.settings).exit_code == 11
        assert attempt(booking_id, signer.token(tenant_id), signer.settings).exit_code == 0

    def test_may_come_on_one_line_with_escaped_line_feeds(self, attempt: Attempt, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        settings = auth("RS256") | {"CRMCTL_AUTH__PUBLIC_KEY": rsa_signer().public_key.replace("\n", "\\n")}
        assert attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id)), settings).exit_code == 0

    def test_may_come_with_its_token_from_files(self, attempt: Attempt, connection: Connection, tmp_path: Path) -> None:
        booking_id = insert_booked(connection)
        token = rsa_signer().token(tenant_of(connection, booking_id))
        (tmp_path / "key").write_text(rsa_signer().public_key)
        (tmp_path / "token").write_text(token + "\n")
        files = {"CRMCTL_AUTH__PUBLIC_KEY_FILE": "key", "CRMCTL_ACTOR_TOKEN_FILE": "token"}
        settings = auth("RS256") | {name: str(tmp_path / file) for name, file in files.items()}
        result = attempt(booking_id, None, settings)
        assert_hidden(token, result)
        assert result.exit_code == 0

    def test_is_not_accepted_with_its_private_half(self, attempt: Attempt, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = rsa_signer().key.private_bytes(serialization.Encoding.PEM, *private).decode()
        result = attempt(booking_id, "anything", auth("RS256") | {"CRMCTL_AUTH__PUBLIC_KEY": pem})
        assert result.exit_code == 78
        assert pem.splitlines()[1] not in result.stdout + result.stderr


class TestSettingsThatAreIncomplete:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            auth("RS256"),
            rsa_signer().settings | {"CRMCTL_AUTH__ISSUER": ""},
            rsa_signer().settings | {"CRMCTL_AUTH__AUDIENCE": ""},
            rsa_signer().settings | {"CRMCTL_AUTH__ALGORITHM": "none"},
            rsa_signer().settings | {"CRMCTL_AUTH__ALGORITHM": "HS256"},
            rsa_signer().settings | {"CRMCTL_AUTH__ALGORITHM": "ES256"},
            rsa_signer().settings | {"CRMCTL_AUTH__JWKS_URL": "https://login.example/keys"},
            auth("RS256") | {"CRMCTL_AUTH__PUBLIC_KEY": "no key"},
            auth("RS256") | {"CRMCTL_AUTH__JWKS_FILE": "/nowhere/keys.json"},
            auth("RS256") | {"CRMCTL_AUTH__JWKS_URL": "http://login.example/keys"},
            auth("RS256") | {"CRMCTL_AUTH__JWKS_URL": "file:///etc/hostname"},
        ],
        ids=[
            "nothing",
            "no key",
            "no issuer",
            "no audience",
            "algorithm none",
            "a symmetric algorithm",
            "an algorithm of another kind of key",
            "two sources of keys",
            "a key that is none",
            "a file that is not there",
            "a URL in the clear",
            "a URL of a file",
        ],
    )
    def test_are_a_configuration_error_and_nothing_is_written(
        self, attempt: Attempt, connection: Connection, settings: dict[str, str]
    ) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id)), settings)
        assert result.exit_code == 78
        assert error_of(result)["code"] == "CRMCTL_CONFIGURATION"
        assert "CRMCTL_AUTH__" in json.dumps(error_of(result))
        assert work(connection) == before


def private_jwk(signer: Signer, kid: str) -> dict[str, Any]:
    """The signer's JWK with the private half in it."""
    algorithm: Any = jwt.get_algorithm_by_name(signer.algorithm)
    made: dict[str, Any] = algorithm.to_jwk(signer.key, as_dict=True)
    return made | {"kid": kid}


def jwks(*keys: dict[str, Any]) -> str:
    return json.dumps({"keys": keys})


class TestAJwksFile:
    @pytest.fixture
    def believe(self, tmp_path: Path) -> Callable[[str], dict[str, str]]:
        """Write a file, and return the settings that name it."""

        def write(content: str) -> dict[str, str]:
            (tmp_path / "keys.json").write_text(content)
            return auth("RS256") | {"CRMCTL_AUTH__JWKS_FILE": str(tmp_path / "keys.json")}

        return write

    def test_offers_the_key_that_the_token_names(
        self, attempt: Attempt, connection: Connection, believe: Callable[[str], dict[str, str]]
    ) -> None:
        booking_id = insert_booked(connection)
        tenant_id = tenant_of(connection, booking_id)
        settings = believe(jwks(ec_signer().jwk("curve"), rsa_signer().jwk("one"), rsa_signer(2).jwk("two")))
        for kid, signer, exit_code in [
            ("one", rsa_signer(), 0),
            ("two", rsa_signer(2), 0),
            ("two", rsa_signer(), 11),
            ("one", rsa_signer(3), 11),
            ("curve", rsa_signer(), 11),
            ("curve", ec_signer(), 11),
            ("three", rsa_signer(), 11),
        ]:
            result = attempt(booking_id, signer.token(tenant_id, headers={"kid": kid}), settings)
            assert result.exit_code == exit_code, (kid, signer)
        assert attempt(booking_id, rsa_signer().token(tenant_id), settings).exit_code == 11
        assert bookings(connection)[booking_id]["extensions_count"] == 2

    def test_with_one_key_needs_no_key_id(
        self, attempt: Attempt, connection: Connection, believe: Callable[[str], dict[str, str]]
    ) -> None:
        booking_id = insert_booked(connection)
        tenant_id = tenant_of(connection, booking_id)
        settings = believe(jwks(rsa_signer().jwk()))
        assert attempt(booking_id, rsa_signer(2).token(tenant_id), settings).exit_code == 11
        assert attempt(booking_id, rsa_signer().token(tenant_id), settings).exit_code == 0

    def test_with_a_symmetric_key_lets_nobody_sign_with_it(
        self, attempt: Attempt, connection: Connection, believe: Callable[[str], dict[str, str]]
    ) -> None:
        booking_id = insert_booked(connection)
        tenant_id = tenant_of(connection, booking_id)
        settings = believe(jwks({"kty": "oct", "k": unpadded(b"s3cret" * 8), "kid": "shared"}))
        token = compact(
            {"alg": "HS256", "kid": "shared"},
            manager_claims(tenant_id),
            lambda text: hmac.new(b"s3cret" * 8, text, hashlib.sha256).digest(),
        )
        assert attempt(booking_id, token, settings).exit_code == 11
        assert attempt(booking_id, rsa_signer().token(tenant_id, headers={"kid": "shared"}), settings).exit_code == 11

    @pytest.mark.parametrize("signer", [rsa_signer(2), ec_signer(), ed25519_signer()], ids=lambda s: s.algorithm)
    def test_with_a_private_key_is_a_configuration_error_whatever_key_the_token_names(
        self, attempt: Attempt, connection: Connection, believe: Callable[[str], dict[str, str]], signer: Signer
    ) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        private = private_jwk(signer, "private")
        settings = believe(jwks(rsa_signer().jwk("one"), private)) | {"CRMCTL_AUTH__ALGORITHM": signer.algorithm}
        for kid in ("one", "private"):
            result = attempt(
                booking_id, signer.token(tenant_of(connection, booking_id), headers={"kid": kid}), settings
            )
            assert result.exit_code == 78
            assert "CRMCTL_AUTH__JWKS holds a private key" in result.stderr
            assert private["d"] not in result.stdout + result.stderr
        assert work(connection) == before

    def test_passes_over_keys_that_are_not_for_signatures(
        self, attempt: Attempt, connection: Connection, believe: Callable[[str], dict[str, str]]
    ) -> None:
        booking_id = insert_booked(connection)
        tenant_id = tenant_of(connection, booking_id)
        for_secrets, for_signatures = (
            rsa_signer(2).jwk("same") | {"use": "enc"},
            rsa_signer().jwk("same") | {"use": "sig"},
        )
        settings = believe(jwks(for_secrets, for_signatures))
        for headers in ({"kid": "same"}, {}):
            assert attempt(booking_id, rsa_signer(2).token(tenant_id, headers=headers), settings).exit_code == 11
            assert attempt(booking_id, rsa_signer().token(tenant_id, headers=headers), settings).exit_code == 0
        alone = believe(jwks(for_secrets))
        assert attempt(booking_id, rsa_signer(2).token(tenant_id), alone).exit_code == 11

    @pytest.mark.parametrize(
        "content",
        ["", "[]", "{}", "7", '{"keys": 7}', '{"keys": []}', '{"keys": ["x"]}', '{"keys": [{"kty": "RSA"}]}', "<html>"],
    )
    def test_that_is_none_is_a_configuration_error(
        self, attempt: Attempt, connection: Connection, believe: Callable[[str], dict[str, str]], content: str
    ) -> None:
        booking_id = insert_booked(connection)
        result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id)), believe(content))
        assert result.exit_code == 78


@contextmanager
def served(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A web server on loopback whose every GET is answered by a function; yields the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/keys"
        finally:
            server.shutdown()


def reply(body: bytes, status: int = 200, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def hang_up_rudely(request: http.server.BaseHTTPRequestHandler) -> None:
    """Half an answer, and then a reset instead of an end."""
    request.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


def from_url(url: str) -> dict[str, str]:
    return auth("RS256") | {"CRMCTL_AUTH__JWKS_URL": url}


class TestAJwksUrl:
    def test_offers_the_key_that_the_token_names(self, attempt: Attempt, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        tenant_id = tenant_of(connection, booking_id)
        keys = jwks(rsa_signer(2).jwk("two"), rsa_signer().jwk("one")).encode()
        with served(reply(keys)) as url:
            one, two = (rsa_signer().token(tenant_id, headers={"kid": kid}) for kid in ("one", "two"))
            assert attempt(booking_id, two, from_url(url)).exit_code == 11
            assert attempt(booking_id, one, from_url(url)).exit_code == 0

    @pytest.mark.parametrize("what", ["silence", "a drop at a time"])
    def test_that_hangs_is_given_up_after_five_seconds(
        self, attempt: Attempt, connection: Connection, what: str
    ) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        gone = threading.Event()

        def hang(request: http.server.BaseHTTPRequestHandler) -> None:
            if what == "silence":
                gone.wait(30)
                return
            request.send_response(200)
            request.end_headers()
            for _ in range(15):
                if not gone.wait(1):
                    request.wfile.write(b" ")

        with served(hang) as url:
            started = time.monotonic()
            try:
                result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id)), from_url(url))
            finally:
                gone.set()
        assert result.exit_code == 69
        assert error_of(result)["code"] == "CRMCTL_UNAVAILABLE"
        assert 4 < time.monotonic() - started < 10
        assert work(connection) == before

    def test_that_is_not_there_is_unavailable(self, attempt: Attempt, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}/keys"
            result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id)), from_url(url))
        assert result.exit_code == 69

    @pytest.mark.parametrize(
        ("answer", "exit_code"),
        [
            (reply(b"no", 500), 69),
            (reply(b"no", 404), 69),
            (reply(b"", 302, Location="http://127.0.0.1:1/elsewhere"), 69),
            (lambda request: request.connection.close(), 69),
            (lambda request: request.connection.sendall(b"this is no HTTP\r\n\r\n"), 69),
            (lambda request: request.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), 69),
            (hang_up_rudely, 69),
            (reply(b"<html>"), 78),
            (reply(b"\xff\xfe"), 78),
            (reply(b"[]"), 78),
            (reply(b'{"keys": []}'), 78),
            (reply(jwks(rsa_signer().jwk(), private_jwk(rsa_signer(2), "private")).encode()), 78),
        ],
        ids=[
            "500",
            "404",
            "302",
            "a hang-up",
            "no HTTP",
            "half an answer",
            "a reset",
            "HTML",
            "no text",
            "a list",
            "no keys",
            "a private key",
        ],
    )
    def test_with_another_answer_is_explained(
        self,
        attempt: Attempt,
        connection: Connection,
        answer: Callable[[http.server.BaseHTTPRequestHandler], None],
        exit_code: int,
    ) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        with served(answer) as url:
            result = attempt(booking_id, rsa_signer().token(tenant_of(connection, booking_id)), from_url(url))
        assert result.exit_code == exit_code, result.stderr
        assert work(connection) == before
