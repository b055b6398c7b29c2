"""Kafka: clients from the settings, librdkafka's logs in ours, and what its errors mean.

The one module that builds producers, consumers and admin clients. No message made here holds a password.
"""

import logging
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from crmctl.domain.errors import ConfigurationError, CrmctlError, UnavailableError
from crmctl.settings import KafkaSettings
from crmctl.telemetry.logs import Log

# How long a record may wait for its acknowledgement, and how long a look at the cluster may take (seconds).
DELIVERY_TIMEOUT: Final = 15.0
METADATA_TIMEOUT: Final = 10.0
# What a consumer reads in a fetch and ahead in all (bytes): with records of any size its memory is bounded.
_FETCH: Final = 8 * 1024 * 1024
_READ_AHEAD: Final = 16 * 1024 * 1024
_SLICE: Final = 1.0


C = TypeVar("C", Producer, Consumer, AdminClient)


class Fault(StrEnum):
    """Whose fault a failed delivery is: this record's, the cluster's for now, or our client's for good."""

    RECORD = "record"
    OUTAGE = "outage"
    FATAL = "fatal"


# The broker, or the client for it, says that this very record will not do; another one may.
_RECORD_FAULTS: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._INVALID_ARG,
    }
)


def classify(error: KafkaError) -> Fault:
    """Say whose fault an error is; what is not known to be the record's is taken for an outage."""
    if error.fatal():
        return Fault.FATAL
    return Fault.RECORD if error.code() in _RECORD_FAULTS else Fault.OUTAGE


def describe(error: KafkaError) -> str:
    """The error's name and text in one line."""
    return f"{error.name()}: {' '.join(error.str().split())[:200]}"


def forbids(error: KafkaError) -> bool:
    """Whether an ACL is missing: no time mends that."""
    return error.code() in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED}


def unavailable(error: KafkaError, doing: str | None = None) -> CrmctlError:
    """What a failed call means to the person who ran the command; `doing` is an operation and what it is on."""
    if forbids(error):
        return ConfigurationError(
            f"Kafka forbids {doing or 'this'} ({describe(error)})",
            hint="allow it in the cluster's ACLs; see crmctl doctor",
        )
    if error.code() in {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._SSL,
    }:
        return ConfigurationError(
            f"Kafka refused the connection ({describe(error)})", hint="check CRMCTL_KAFKA__… and the cluster's ACLs"
        )
    return UnavailableError(
        f"Kafka is not reachable ({describe(error)})", hint="check the brokers and CRMCTL_KAFKA__BOOTSTRAP_SERVERS"
    )


def producer(settings: KafkaSettings, log: Log, **options: str | int | bool) -> Producer:
    """An idempotent producer: acks=all, no record waits longer than DELIVERY_TIMEOUT unless `options` say so."""
    return _build(
        Producer,
        settings,
        log,
        {
            "enable.idempotence": True,
            "acks": "all",
            "delivery.timeout.ms": round(DELIVERY_TIMEOUT * 1000),
            "partitioner": "murmur2_random",
            **{name.replace("_", "."): value for name, value in options.items()},
        },
    )


def admin(settings: KafkaSettings, log: Log) -> AdminClient:
    """A client for topics and groups."""
    return _build(AdminClient, settings, log, {})


def consumer(settings: KafkaSettings, log: Log, *, group: str, **options: str | int | bool) -> Consumer:
    """A consumer that commits nothing by itself and reads committed records only."""
    return _build(
        Consumer,
        settings,
        log,
        {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            # Its default of 1 s stalls a reader that has outrun its queue.
            "fetch.queue.backoff.ms": 10,
            "queued.max.messages.kbytes": _READ_AHEAD // 1024,
            "fetch.max.bytes": _FETCH,
            **{name.replace("_", "."): value for name, value in options.items()},
        },
    )


def take(client: Consumer, limit: int, limit_bytes: int, seconds: float) -> Iterator[Message]:
    """Take up to `limit` messages, waiting at most so long; no more are asked for once they have `limit_bytes`.

    A call that waits takes whatever arrives meanwhile: so what is queued is taken, and else a single one waited for.
    """
    end = time.monotonic() + seconds
    count = size = 0
    while count < limit and size < limit_bytes:
        messages = client.consume(limit - count, 0) or client.consume(1, max(0.0, end - time.monotonic()))
        if not messages:
            return
        count += len(messages)
        size += sum(map(len, messages))
        yield from messages


def is_mock(cluster_id: str | None) -> bool:
    """Whether a cluster is librdkafka's mock (laptops without Java): it knows no topic ids, settings or groups."""
    return (cluster_id or "").startswith("mockCluster")


def existing_topics(
    client: Producer | AdminClient | Consumer, stopping: Callable[[], bool] = lambda: False
) -> frozenset[str]:
    """The topics of the cluster. Raises UnavailableError, also when it should stop, or ConfigurationError."""
    deadline = time.monotonic() + METADATA_TIMEOUT
    while True:
        try:
            return frozenset(client.list_topics(timeout=_SLICE).topics)
        except KafkaException as error:
            away = error.args[0].code() in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}
            if not away or stopping() or time.monotonic() >= deadline:
                raise unavailable(error.args[0]) from None


def _build(kind: type[C], settings: KafkaSettings, log: Log, options: dict[str, Any]) -> C:
    config = {**_common(settings), **options, **settings.options, "error_cb": _ErrorLog(log)}
    try:
        return kind(config, logger=_bridge(log))
    except (KafkaException, ValueError, TypeError) as error:
        # librdkafka names the property, and may quote its value.
        secrets = [s.get_secret_value() for s in (settings.sasl_password, settings.ssl_key_password) if s]
        text = str(error.args[0].str() if isinstance(error, KafkaException) else error)
        for secret in secrets:
            text = text.replace(secret, "***")
        raise ConfigurationError(f"the Kafka settings are refused: {text}", hint="check CRMCTL_KAFKA__…") from None


def _common(settings: KafkaSettings) -> dict[str, Any]:
    if not settings.bootstrap_servers:
        raise ConfigurationError(
            "no Kafka is configured", hint="set CRMCTL_KAFKA__BOOTSTRAP_SERVERS, or start one with: crmctl dev up"
        )
    config: dict[str, Any] = {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": "crmctl",
        "security.protocol": settings.security_protocol,
        "log.connection.close": False,
    }
    if settings.security_protocol == "SASL_SSL":
        if not settings.sasl_username or not settings.sasl_password:
            raise ConfigurationError(
                "SASL_SSL needs a user and a password",
                hint="set CRMCTL_KAFKA__SASL_USERNAME and CRMCTL_KAFKA__SASL_PASSWORD_FILE",
            )
        config["sasl.mechanism"] = settings.sasl_mechanism
        config["sasl.username"] = settings.sasl_username
        config["sasl.password"] = settings.sasl_password.get_secret_value()
    files = {
        "ssl.ca.location": settings.ssl_ca_location,
        "ssl.certificate.location": settings.ssl_certificate_location,
        "ssl.key.location": settings.ssl_key_location,
    }
    config |= {name: str(path) for name, path in files.items() if path is not None}
    if settings.ssl_key_password:
        config["ssl.key.password"] = settings.ssl_key_password.get_secret_value()
    return config


class _ErrorLog:
    """Notes what librdkafka reports outside any call, each kind once: it repeats itself while a broker is away."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._seen: set[int] = set()

    def __call__(self, error: KafkaError) -> None:
        if error.code() not in self._seen:
            self._seen.add(error.code())
            self._log.warning("kafka client", reason=describe(error), fatal=error.fatal() or None)


class _Bridge(logging.Handler):
    """librdkafka's log lines, in ours."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        # What librdkafka says at its error level is repeated by error_cb and by the calls that fail.
        self._log.debug("librdkafka", text=record.getMessage())


def _bridge(log: Log) -> logging.Logger:
    logger = logging.Logger("librdkafka")
    logger.addHandler(_Bridge(log))
    return logger
