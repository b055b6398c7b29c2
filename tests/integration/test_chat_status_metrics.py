"""What `chat-status consume` tells of itself: /metrics, probes, logs and traces, with the names of source 003."""

import os
import re
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from psycopg import conninfo

from tests.chat_status_support import Chat, edited, hour_ago_ms, log_lines, metric, outgoing
from tests.expire_support import finish, rows, scalar, wait_until
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing
from tests.prefork import run_crmctl
from tests.support import CallResult, Database

METRICS: Final = {
    "crm_chat_status_consume_duration_ms": "histogram",
    "crm_chat_status_applied_total": "counter",
    "crm_chat_status_stale_total": "counter",
    "crm_chat_status_duplicates_total": "counter",
    "crm_chat_status_dlq_total": "counter",
    "crm_chat_status_contract_mismatch_total": "counter",
    "crm_messenger_consumer_lag_seconds": "gauge",
}
# What every line about an event says.
FIELDS: Final = {"DealId", "TenantId", "ChatId", "FromStatus", "ToStatus", "MessageId", "payload.Version"}
TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID: Final = "b7ad6b7169203331"


@pytest.fixture
def chat(kafka: Kafka, database: Database, make_topic: MakeTopic) -> Chat:
    return Chat.make(kafka, database, make_topic)


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; status 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert isinstance(port, int)
    return port


def listening_on(port: int) -> dict[str, str]:
    return {"CRMCTL_CHAT_STATUS__METRICS_HOST": "127.0.0.1", "CRMCTL_CHAT_STATUS__METRICS_PORT": str(port)}


def stop(consumer: "subprocess.Popen[str]") -> CallResult:
    consumer.terminate()
    return finish(consumer)


def wait_for_metric(port: int, name: str, value: float, **labels: str) -> str:
    """Wait until a metric has a value; returns the whole page."""

    def page() -> str | None:
        text = get(port, "/metrics")[1]
        return text if metric(text, name, **labels) == value else None

    found = wait_until(page, f"{name} {labels} to be {value}")
    assert isinstance(found, str)
    return found


# --- metrics and probes -----------------------------------------------------------------------------------------------


def test_every_outcome_is_counted_once_under_the_names_of_the_source_and_no_others(chat: Chat) -> None:
    deal, ready, missing = chat.deal(), chat.deal(chat_status="Ready"), chat.missing_deal()
    twice = deal.event("Failed")
    sent = [
        deal.event("Provisioning"),
        twice,
        deal.event("Provisioning", contract_version=2),
        deal.event("Ready"),
        twice,
        ready.event("Failed"),
        ready.event("Provisioning"),
        deal.event("Closed", contract_version=3),
        deal.event("Ready", tenant_id=uuid.uuid4()),
        missing.event("Ready"),
    ]
    chat.send(*sent, Outgoing(b"garbage", "key"))
    port = free_port()
    with chat.running(env=listening_on(port)) as consumer:
        wait_for_metric(port, "crm_chat_status_dlq_total", 3)
        wait_for_metric(port, "crm_chat_status_duplicates_total", 1)
        wait_for_metric(port, "crm_chat_status_stale_total", 2)
        wait_for_metric(port, "crm_chat_status_applied_total", 1, to_status="Ready")
        page = wait_for_metric(port, "crm_messenger_consumer_lag_seconds", 0)
        result = stop(consumer)
    assert result.exit_code == 0, result.stderr
    assert dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)) == METRICS
    applied = {
        name: metric(page, "crm_chat_status_applied_total", to_status=name) for name in ("Provisioning", "Failed")
    }
    assert applied == {"Provisioning": 2, "Failed": 1}
    assert metric(page, "crm_chat_status_contract_mismatch_total") == 2
    batches = metric(page, "crm_chat_status_consume_duration_ms_count")
    assert batches is not None
    assert 1 <= batches <= len(sent) + 1
    assert (metric(page, "crm_chat_status_consume_duration_ms_sum") or 0) > 0


def test_a_duplicate_with_another_contract_version_is_a_duplicate_and_nothing_else(chat: Chat) -> None:
    event = chat.deal().event("Ready", contract_version=2)
    chat.send(event, event)
    port = free_port()
    with chat.running(env=listening_on(port)) as consumer:
        page = wait_for_metric(port, "crm_chat_status_duplicates_total", 1)
        stop(consumer)
    assert metric(page, "crm_chat_status_contract_mismatch_total") == 1


def test_liveness_and_readiness_do_not_depend_on_postgresql_and_the_lag_grows_while_it_is_away(chat: Chat) -> None:
    deal = chat.deal()
    chat.kafka.produce(chat.topic, [outgoing(deal.event("Ready"), partition=0, timestamp_ms=hour_ago_ms())])
    port = free_port()
    away = {"CRMCTL_DATABASE_URL": "postgresql://crm:secret@127.0.0.1:1/crm"}
    with chat.running(env=listening_on(port) | away) as consumer:
        wait_until(lambda: get(port, "/readyz") == (200, "ok\n"), "the consumer to be ready")
        assert consumer.stderr is not None
        waiting = [next(line for line in consumer.stderr if "waiting to try again" in line) for _ in range(2)]
        assert get(port, "/healthz") == (200, "ok\n")
        page = get(port, "/metrics")[1]
        result = stop(consumer)
    assert [log_lines(line)[0]["seconds"] for line in waiting] == [1.0, 2.0]
    assert 3600 <= (metric(page, "crm_messenger_consumer_lag_seconds") or 0) < 4000
    assert metric(page, "crm_chat_status_applied_total", to_status="Ready") == 0
    assert (result.exit_code, chat.committed()) == (0, {})
    assert "secret" not in "".join(waiting) + result.stderr + result.stdout


@contextmanager
def no_postgresql(chat: Chat) -> Iterator[None]:
    """The test's database takes no connections, and the consumer's is gone."""
    name = scalar(chat.connection, "select current_database()")
    allow = "alter database {} allow_connections {}"
    with psycopg.connect(conninfo.make_conninfo(chat.database.url, dbname="postgres"), autocommit=True) as admin:
        admin.execute(allow.format(name, "false").encode())
        try:
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s and datname = %s",
                ["crmctl consume-chat-status", name],
            )
            yield
        finally:
            admin.execute(allow.format(name, "true").encode())


@contextmanager
def paused_job(chat: Chat) -> Iterator[None]:
    """The consumer's job is paused."""
    for command in (("pause", "--reason", "INC-1"), ("resume",)):
        name, *options = command
        assert run_crmctl("jobs", name, "consume-chat-status", *options, database=chat.database).exit_code == 0
        if name == "pause":
            yield


@pytest.mark.parametrize("interruption", [no_postgresql, paused_job])
def test_the_lag_grows_though_the_topic_was_idle_when_the_consumer_was_kept_from_its_work(
    chat: Chat, interruption: Callable[[Chat], AbstractContextManager[None]]
) -> None:
    deal = chat.deal()
    chat.send(deal.event("Provisioning"), partition=0)
    port = free_port()
    lag = "crm_messenger_consumer_lag_seconds"
    with chat.running(env=listening_on(port)) as consumer:
        wait_for_metric(port, "crm_chat_status_applied_total", 1, to_status="Provisioning")
        wait_for_metric(port, lag, 0)
        with interruption(chat):
            assert consumer.stderr is not None
            next(line for line in consumer.stderr if "waiting to try again" in line or '"paused"' in line)
            sent = outgoing(deal.event("Ready"), partition=1, timestamp_ms=hour_ago_ms())
            chat.kafka.produce(chat.topic, [sent, outgoing(deal.event("Ready"), partition=1)])
            wait_until(lambda: 3600 <= (metric(get(port, "/metrics")[1], lag) or 0) < 4000, "the lag to be an hour")
            assert chat.committed().get(1, 0) == 0
        wait_for_metric(port, "crm_chat_status_applied_total", 1, to_status="Ready")
        wait_for_metric(port, lag, 0)
        result = stop(consumer)
    assert result.exit_code == 0, result.stderr
    assert chat.committed()[1] == 2


def test_without_kafka_the_consumer_lives_is_not_ready_and_stops_when_it_is_told_to(chat: Chat) -> None:
    port = free_port()
    with chat.running(env=listening_on(port) | {"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}) as consumer:
        wait_until(lambda: get(port, "/healthz") == (200, "ok\n"), "the consumer to live")
        assert get(port, "/readyz") == (503, "not ready\n")
        result = stop(consumer)
    assert result.exit_code == 0, result.stderr


def test_a_port_that_is_taken_is_a_configuration_error(chat: Chat) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = chat.consume(env=listening_on(port))
    assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_CONFIGURATION")
    assert f"the metrics port {port} cannot be had" in result.json["error"]["message"]


def test_clients_that_ask_for_nothing_or_hang_up_leave_no_trace_in_the_log(chat: Chat) -> None:
    port = free_port()
    with chat.running(env=listening_on(port)) as consumer:
        wait_until(lambda: get(port, "/readyz")[0] == 200, "the consumer to be ready")
        assert get(port, "/")[0] == get(port, "/metrics/../secret")[0] == 404
        assert get(port, "/metrics?from=prometheus")[0] == 200
        for request in (b"", b"nonsense\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n" * 50):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(request)
            # The connection is reset, so that the answer meets a client that has gone.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        assert get(port, "/healthz")[0] == 200
        result = stop(consumer)
    assert result.exit_code == 0
    assert {line["level"] for line in log_lines(result)} <= {"info", "warning"}


# --- logs -------------------------------------------------------------------------------------------------------------


def test_every_outcome_is_a_line_of_the_log_with_the_fields_of_the_source(chat: Chat) -> None:
    deal, missing = chat.deal(), chat.missing_deal()
    applied, failed, stale = (
        deal.event("Provisioning"),
        deal.event("Failed", failure_reason="no room"),
        deal.event("Failed"),
    )
    foreign, unknown = deal.event("Ready", tenant_id=uuid.uuid4()), deal.event("Closed")
    waits = missing.event("Ready", contract_version=2)
    sent = [applied, failed, stale, applied, foreign, unknown, waits]
    chat.send(*sent, partition=0)
    result = chat.consume(env={"CRMCTL_LOG_LEVEL": "debug"})
    assert result.exit_code == 0, result.stderr[-2000:]

    def line(message: str, event: Any) -> dict[str, Any]:
        found = [x for x in log_lines(result, message) if x.get("MessageId") == str(event.message_id)]
        assert len(found) == 1, f"{message}: {len(found)} lines"
        assert found[0].keys() >= FIELDS
        ids = [found[0][name] for name in ("DealId", "TenantId", "ChatId")]
        assert ids == [str(value) for value in (event.deal_id, event.tenant_id, event.chat_id)]
        return found[0]

    def statuses(found: Mapping[str, Any]) -> tuple[str, str, int]:
        return found["FromStatus"], found["ToStatus"], int(found["payload.Version"])

    assert statuses(line("applied", applied)) == ("Pending", "Provisioning", 1)
    assert statuses(line("applied", failed)) == ("Provisioning", "Failed", 1)
    assert line("applied", failed)["FailureReason"] == "no room"
    assert statuses(line("skipped-stale", stale)) == ("Failed", "Failed", 1)
    assert line("skipped-duplicate", applied)["ToStatus"] == "Provisioning"
    not_found = line("deal-not-found", waits)
    assert (not_found["level"], str(not_found["payload.Version"])) == ("warning", "2")
    assert line("tenant-mismatch", foreign)["level"] == "error"
    for event, code in ((foreign, "CRM_CHAT_STATUS_TENANT_MISMATCH"), (unknown, "CRM_CHAT_STATUS_UNKNOWN")):
        letter = line("dead-lettered", event)
        assert (letter["level"], letter["code"], letter["partition"]) == ("error", code, 0)
        assert letter["offset"] == sent.index(event)
    consumed = [x["MessageId"] for x in log_lines(result, "consumed")]
    assert consumed == [str(event.message_id) for event in sent]


def test_at_the_level_of_every_day_ordinary_events_are_figures_and_no_lines(chat: Chat) -> None:
    deal = chat.deal()
    chat.send(*(deal.event("Provisioning") for _ in range(20)))
    result = chat.consume()
    assert {line["message"] for line in log_lines(result)} == {"batch", "run finished"}
    (finished,) = log_lines(result, "run finished")
    assert (finished["applied_count"], finished["stale_count"]) == (1, 19)
    assert finished["job"] == "consume-chat-status"
    assert finished["run_id"] == result.json["run_id"]


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP collector on loopback: its address, and the bodies of what it was sent."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def spans_of(bodies: list[bytes]) -> list[Any]:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans = []
    for body in bodies:
        for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {x.key: x.value.string_value for x in resource.resource.attributes}
            assert names["service.name"] == "crmctl"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    return spans


def test_spans_go_on_from_the_events_own_trace_through_processing_to_the_database(
    chat: Chat, collector: tuple[str, list[bytes]]
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    endpoint, bodies = collector
    traced, plain, bad = chat.deal(), chat.deal(), chat.deal()
    context = f"00-{TRACE_ID}-{SPAN_ID}-01".encode()
    chat.send(
        outgoing(traced.event("Ready"), partition=0, headers=(("traceparent", context),)),
        outgoing(plain.event("Ready"), partition=0),
        outgoing(bad.event("Ready"), partition=0, headers=(("traceparent", b"\xff nonsense"), ("traceparent", None))),
        outgoing(bad.event("Closed"), partition=0, headers=(("traceparent", context.replace(b"0af7", b"ffff")),)),
    )
    document = chat.consumed(env={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    assert (document["applied_count"], document["dead_lettered_count"]) == (3, 1)
    spans = spans_of(bodies)
    mine = {span.name: span for span in spans if span.trace_id.hex() == TRACE_ID}
    assert {"chat-status receive", "chat-status process", "chat-status database"} == mine.keys()
    receive, process, database = (mine[f"chat-status {name}"] for name in ("receive", "process", "database"))
    assert receive.parent_span_id.hex() == SPAN_ID
    assert process.parent_span_id == receive.span_id
    assert database.parent_span_id == process.span_id
    receives = [span for span in spans if span.name == "chat-status receive"]
    assert len({span.trace_id for span in receives}) == len(receives) == 4
    assert {span.span_id for span in spans if span.name == "chat-status process"} >= {
        link.span_id for link in database.links
    }
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in spans)
    assert not any(span.status.code == 2 for span in spans), "dead letters are no failure of the consumer"


@contextmanager
def black_hole() -> Iterator[str]:
    """A collector that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def seconds_to_leave(result: CallResult) -> float:
    """From the last commit to the end of the run."""
    last = log_lines(result, "batch")[-1]["timestamp"]
    end = log_lines(result, "run finished")[0]["timestamp"]
    return (datetime.fromisoformat(end) - datetime.fromisoformat(last)).total_seconds()


def test_a_collector_that_does_not_answer_costs_at_most_three_seconds_at_the_end(chat: Chat) -> None:
    pytest.importorskip("opentelemetry.sdk")
    deals = [chat.deal() for _ in range(20)]
    events = [deal.event(status) for _ in range(60) for status in ("Provisioning", "Failed") for deal in deals]
    chat.send(*events, linger_ms=5)
    with black_hole() as endpoint:
        result = chat.consume(env={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    assert result.exit_code == 0, result.stderr
    assert result.json["applied_count"] == len(events)
    # Without a collector a run leaves within half a second.
    assert seconds_to_leave(result) <= 3.5


def test_sigterm_ends_with_0_though_the_collector_does_not_answer(chat: Chat) -> None:
    pytest.importorskip("opentelemetry.sdk")
    deals = [chat.deal() for _ in range(20)]
    chat.send(*(deal.event(s) for _ in range(60) for s in ("Provisioning", "Failed") for deal in deals), linger_ms=5)
    applied = "select sum((counts ->> 'applied_count')::int) as applied from crm.job_runs"
    with black_hole() as endpoint, chat.running(env={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}) as consumer:
        wait_until(lambda: rows(chat.connection, applied)[0]["applied"] == 2400, "everything to be applied")
        result = stop(consumer)
    assert result.exit_code == 0, result.stderr
    assert result.json["applied_count"] == 2400


def test_without_an_endpoint_opentelemetry_is_not_even_imported(chat: Chat) -> None:
    chat.send(chat.deal().event("Ready"))
    result = chat.consume(env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert result.exit_code == 0
    assert "crmctl.telemetry.tracing" in result.stderr
    assert "opentelemetry" not in result.stderr


def test_an_endpoint_without_the_extra_is_a_configuration_error(chat: Chat, tmp_path: Path) -> None:
    package = tmp_path / "opentelemetry"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = chat.consume(env={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "PYTHONPATH": path})
    assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_CONFIGURATION")
    assert "crmctl[otel]" in result.json["error"]["hint"]


def test_what_was_sent_as_a_version_is_shown_in_short_whatever_it_was(chat: Chat) -> None:
    events = [chat.missing_deal().event("Ready") for _ in range(2)]
    versions: list[Any] = ["x" * 100_000, {"Major": ["1"] * 10_000}]
    chat.send(
        *(outgoing(e, value=edited(e, ContractVersion=v)) for e, v in zip(events, versions, strict=True)),
    )
    result = chat.consume()
    assert result.exit_code == 0
    assert max(len(line) for line in result.stderr.splitlines()) < 2_000
