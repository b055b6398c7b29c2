"""What the tests of `bookings extend` and `outbox relay` share: tokens, keys, events, what arrived in Kafka."""

import functools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import jwt
from confluent_kafka import Consumer, TopicPartition
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.expire_support import Connection, fingerprints, rows, scalar
from tests.kafka_fixtures import Record
from tests.prefork import run_crmctl
from tests.support import CallResult, Database, insert_booking, start_crmctl

ISSUER: Final = "https://login.example/realms/crm"
AUDIENCE: Final = "crmctl-tests"
PERMISSION: Final = "crm.bookings.decide"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@dataclass(frozen=True, slots=True)
class Signer:
    """An identity provider: it signs tokens, and crmctl believes it once it has its settings."""

    key: PrivateKey
    algorithm: str

    @property
    def public_key(self) -> str:
        """The public key in PEM form."""
        return (
            self.key.public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode()
        )

    @property
    def settings(self) -> dict[str, str]:
        """The environment in which crmctl believes this signer."""
        return auth(self.algorithm) | {"CRMCTL_AUTH__PUBLIC_KEY": self.public_key}

    def token(self, tenant_id: UUID, *, headers: Mapping[str, Any] | None = None, **claims: object) -> str:
        """A good token of a manager of this tenant; a claim that is given replaces the good one, None removes it."""
        # Not jwt.encode, which refuses to sign what a test wants to see refused.
        payload = json.dumps(manager_claims(tenant_id, **claims)).encode()
        return jwt.PyJWS().encode(payload, self.key, algorithm=self.algorithm, headers=dict(headers or {}))

    def jwk(self, kid: str | None = None) -> dict[str, Any]:
        """The public key as a member of a JWKS."""
        algorithm: Any = jwt.get_algorithm_by_name(self.algorithm)
        made: dict[str, Any] = algorithm.to_jwk(self.key.public_key(), as_dict=True)
        return made if kid is None else {**made, "kid": kid}


def manager_claims(tenant_id: UUID, **claims: object) -> dict[str, Any]:
    """The claims of a good token; one that is given replaces the good one, None removes it."""
    good: dict[str, Any] = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "manager-17",
        "exp": round(time.time()) + 600,
        "developer_company_id": str(tenant_id),
        "permissions": ["crm.deals.view", PERMISSION],
    }
    return {name: value for name, value in (good | claims).items() if value is not None}


def auth(algorithm: str) -> dict[str, str]:
    """The settings of the issuer, the audience and the algorithm, without a key."""
    return {
        "CRMCTL_AUTH__ISSUER": ISSUER,
        "CRMCTL_AUTH__AUDIENCE": AUDIENCE,
        "CRMCTL_AUTH__ALGORITHM": algorithm,
    }


@functools.cache
def rsa_signer(number: int = 1) -> Signer:
    """The provider that most tests believe is number 1; another number has another key."""
    return Signer(rsa.generate_private_key(65_537, 2048), "RS256")


@functools.cache
def ec_signer() -> Signer:
    return Signer(ec.generate_private_key(ec.SECP256R1()), "ES256")


@functools.cache
def ed25519_signer() -> Signer:
    return Signer(ed25519.Ed25519PrivateKey.generate(), "EdDSA")


# --- extensions -------------------------------------------------------------------------------------------------------


def tenant_of(connection: Connection, booking_id: UUID) -> UUID:
    """Whose booking it is."""
    tenant_id = scalar(connection, "select tenant_id from crm.bookings where id = %s", booking_id)
    assert isinstance(tenant_id, UUID)
    return tenant_id


def extend(
    database: Database | str,
    booking_id: UUID,
    *args: str,
    token: str | None,
    env: Mapping[str, str] | None = None,
    form: str = "json",
    timeout: float = 60.0,
) -> CallResult:
    """Run `crmctl bookings extend` to its end, and check that it shows no part of the token."""
    result = run_crmctl(
        "bookings",
        "extend",
        str(booking_id),
        "-o",
        form,
        *args,
        database=database,
        env=actor(token) | dict(env or {}),
        timeout=timeout,
    )
    assert_hidden(token, result)
    return result


def start_extend(
    database: Database | str, booking_id: UUID, *args: str, token: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `crmctl bookings extend -o json`; use it as a context manager."""
    return start_crmctl(
        "bookings",
        "extend",
        str(booking_id),
        "-o",
        "json",
        *args,
        database=database,
        env=actor(token) | dict(env or {}),
    )


def actor(token: str | None) -> dict[str, str]:
    """The environment in which crmctl believes signer number 1, with a token to believe."""
    return rsa_signer().settings | ({} if token is None else {"CRMCTL_ACTOR_TOKEN": token})


def assert_hidden(token: str | None, result: CallResult) -> None:
    """No part of the token, signature or not, is in what the command wrote."""
    for part in (token or "").split("."):
        for text in (result.stdout, result.stderr):
            assert len(part) < 8 or part not in text


def insert_booked(connection: Connection, **overrides: object) -> UUID:
    """Insert a Booked booking that is due in a day unless an override says otherwise."""
    now = scalar(connection, "select clock_timestamp()")
    deadline = scalar(connection, "select %s::timestamptz + interval '1 day'", now)
    return insert_booking(connection, **{"status": "Booked", "booking_expires_at": deadline, **overrides})


def work(connection: Connection) -> dict[str, str]:
    """A hash over the rows of each table but the run records, which tell of failures too."""
    return {table: digest for table, digest in fingerprints(connection).items() if table != "crm.job_runs"}


def error_of(result: CallResult) -> dict[str, Any]:
    """The JSON error document, which is alone on stdout."""
    document = result.json
    assert set(document) == {"error"}
    error: dict[str, Any] = document["error"]
    return error


# --- the outbox -------------------------------------------------------------------------------------------------------


def insert_events(
    connection: Connection,
    topic: str,
    *,
    aggregates: int = 1,
    each: int = 1,
    first: int = 1,
    size: int = 0,
    prefix: str = "a",
) -> None:
    """Insert numbered events of `aggregates` aggregates, interleaved: the first of each, then the second of each, …

    `size` bytes of padding make a record big. The aggregates are called a-1, a-2, … after the prefix.
    """
    rows(
        connection,
        """
        insert into crm.outbox_messages (topic, key, aggregate_type, aggregate_id, contract_version, payload, headers)
        select %s, x.id, 'Booking', x.id, 1,
               jsonb_build_object('Aggregate', x.id, 'Number', n, 'Padding', repeat('x', %s)),
               jsonb_build_object('traceparent', '00-' || md5(x.id) || '-00f067aa0ba902b7-01')
        from generate_series(%s::int, %s::int) n
        cross join lateral (select %s || '-' || a as id, a from generate_series(1, %s) a) x
        order by n, x.a
        """,
        topic,
        size,
        first,
        first + each - 1,
        prefix,
        aggregates,
    )


def insert_event(connection: Connection, topic: str, aggregate: str, number: int = 1, *, size: int = 0) -> UUID:
    """Insert one event of an aggregate; returns its MessageId."""
    message_id = scalar(
        connection,
        """
        insert into crm.outbox_messages (topic, key, aggregate_type, aggregate_id, contract_version, payload)
        values (%s, %s, 'Booking', %s, 1,
                jsonb_build_object('Aggregate', %s::text, 'Number', %s::int, 'Padding', repeat('x', %s)))
        returning id
        """,
        topic,
        aggregate,
        aggregate,
        aggregate,
        number,
        size,
    )
    assert isinstance(message_id, UUID)
    return message_id


def messages(connection: Connection, condition: str = "true") -> list[dict[str, Any]]:
    """The outbox rows that satisfy a condition, in position order."""
    return rows(connection, f"select * from crm.outbox_messages where {condition} order by position")


def count(connection: Connection, condition: str = "true") -> int:
    """How many outbox rows satisfy a condition."""
    number = scalar(connection, f"select count(*) from crm.outbox_messages where {condition}")
    assert isinstance(number, int)
    return number


def let_pauses_pass(connection: Connection) -> None:
    """Time passes for held rows: their next attempt is due now."""
    connection.execute(
        "update crm.outbox_messages set next_attempt_at = now() where published_at is null and next_attempt_at > now()"
    )


def relay(
    database: Database | str,
    bootstrap_servers: str | None,
    *args: str,
    env: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> CallResult:
    """Run `crmctl outbox relay -o json` to its end; `options` are librdkafka's."""
    environment = relay_environment(bootstrap_servers, options) | dict(env or {})
    return run_crmctl("outbox", "relay", "-o", "json", *args, database=database, env=environment, timeout=timeout)


def start_relay(
    database: Database | str,
    bootstrap_servers: str | None,
    *args: str,
    env: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `crmctl outbox relay -o json`; use it as a context manager."""
    environment = relay_environment(bootstrap_servers, options) | dict(env or {})
    return start_crmctl("outbox", "relay", "-o", "json", *args, database=database, env=environment)


def relay_environment(bootstrap_servers: str | None, options: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of Kafka in the environment."""
    environment = {} if bootstrap_servers is None else {"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers}
    return environment | ({"CRMCTL_KAFKA__OPTIONS": json.dumps(dict(options))} if options else {})


# --- what arrived -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What a topic holds, by MessageId: the records in the order of their arrival within a partition."""

    records: Sequence[Record]
    by_id: dict[UUID, list[Record]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Arrivals":
        """Sort records, which come by partition and offset, by their MessageId."""
        arrivals = cls(list(records))
        for record in arrivals.records:
            arrivals.by_id.setdefault(message_id(record), []).append(record)
        return arrivals

    @property
    def duplicates(self) -> int:
        """How many records repeat an earlier one."""
        return len(self.records) - len(self.by_id)

    def assert_complete_and_in_order(self, connection: Connection) -> None:
        """Every outbox row has arrived, at first in the order of positions per aggregate, and always the same."""
        for copies in self.by_id.values():
            assert len({(r.partition, r.key, r.value, r.headers) for r in copies}) == 1
        by_aggregate: dict[str, list[UUID]] = {}
        for row in messages(connection):
            by_aggregate.setdefault(row["aggregate_id"], []).append(row["id"])
        arrived: dict[str, list[UUID]] = {}
        for first_copies in self.by_id.values():
            aggregate = envelope(first_copies[0])["AggregateId"]
            arrived.setdefault(aggregate, []).append(message_id(first_copies[0]))
        assert arrived == by_aggregate


def envelope(record: Record) -> dict[str, Any]:
    """A record's value, which is UTF-8 JSON."""
    assert record.value is not None
    document: dict[str, Any] = json.loads(record.value.decode("utf-8"))
    return document


def message_id(record: Record) -> UUID:
    """The MessageId in a record's envelope."""
    return UUID(envelope(record)["MessageId"])


def numbers(records: Iterable[Record]) -> dict[str, list[int]]:
    """Of each aggregate, the numbers of its events in the order in which they arrived."""
    found: dict[str, list[int]] = {}
    for record in records:
        payload = envelope(record)["Payload"]
        found.setdefault(payload["Aggregate"], []).append(payload["Number"])
    return found


@contextmanager
def record_count(bootstrap_servers: str, topic: str) -> Iterator[Callable[[], int]]:
    """How many records the topic holds at the moment of each call, in a few milliseconds."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "test-record-count"})
    try:
        partitions = [
            TopicPartition(topic, number) for number in consumer.list_topics(topic, timeout=30).topics[topic].partitions
        ]
        yield lambda: sum(consumer.get_watermark_offsets(partition, timeout=30)[1] for partition in partitions)
    finally:
        consumer.close()


@dataclass(slots=True)
class Chessboard:
    """A stand-in for the chessboard: an event frees its property object; a MessageId that was seen changes nothing."""

    freed: Counter[UUID] = field(default_factory=Counter)
    seen: set[UUID] = field(default_factory=set)
    repeated: int = 0

    def consume(self, records: Iterable[Record]) -> None:
        """Handle records as they come."""
        for record in records:
            event = envelope(record)
            if UUID(event["MessageId"]) in self.seen:
                self.repeated += 1
                continue
            self.seen.add(UUID(event["MessageId"]))
            self.freed[UUID(event["Payload"]["PropertyObjectId"])] += 1
