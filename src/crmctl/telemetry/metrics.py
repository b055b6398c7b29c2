"""Prometheus metrics of the deal-chat-status consumer, with the names of source 003, and the port that serves them."""

import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from crmctl.domain.chat_status import ChatStatus

_BUCKETS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000)


class ChatStatusMetrics:
    """What the consumer counts, after each commit.

    `oldest_unread_ms` gives Kafka's timestamp of the oldest record that is not handled, None when there is none. It is
    asked from the thread that serves the metrics.
    """

    def __init__(self, oldest_unread_ms: Callable[[], float | None] = lambda: None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one series for each counter, not two
        self.registry = CollectorRegistry()
        self.consume_duration_ms = Histogram(
            "crm_chat_status_consume_duration_ms",
            "Milliseconds from a polled batch to its committed offsets",
            buckets=_BUCKETS_MS,
            registry=self.registry,
        )
        self.applied = Counter(
            "crm_chat_status_applied_total", "Events applied to a deal", ["to_status"], registry=self.registry
        )
        for status in (ChatStatus.PROVISIONING, ChatStatus.FAILED, ChatStatus.READY):
            # There from the start: Prometheus sees no increase in a series that begins at 5.
            self.applied.labels(to_status=status.value)
        self.stale = self._counter("stale", "Events that the rank guard skipped")
        self.duplicates = self._counter("duplicates", "Events whose MessageId was done before")
        self.dlq = self._counter("dlq", "Events written to the dead-letter topic")
        self.contract_mismatch = self._counter("contract_mismatch", "Events whose ContractVersion is not 1")
        self._oldest_unread_ms = oldest_unread_ms
        lag = Gauge(
            "crm_messenger_consumer_lag_seconds",
            "Seconds since the Kafka timestamp of the oldest unread record",
            registry=self.registry,
        )
        lag.set_function(self.lag_seconds)

    def lag_seconds(self) -> float:
        """The lag now; it grows while nothing is handled."""
        oldest = self._oldest_unread_ms()
        return 0.0 if oldest is None else max(0.0, time.time() - oldest / 1000)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"crm_chat_status_{name}_total", documentation, registry=self.registry)


class _Server(ThreadingHTTPServer):
    """Says nothing of clients that hang up: its own way is a traceback on stderr."""

    def handle_error(self, _request: object, _client_address: object) -> None:
        """Stay silent."""


def serve(registry: CollectorRegistry, host: str, port: int, ready: Callable[[], bool]) -> ThreadingHTTPServer:
    """Serve /metrics, /healthz (the process lives) and /readyz (`ready`) from a thread of its own.

    Raises OSError where the port cannot be had.
    """

    class Handler(BaseHTTPRequestHandler):
        """Answers three paths."""

        def do_GET(self) -> None:
            """Answer a GET."""
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path == "/healthz":
                self._answer(200, b"ok\n", "text/plain")
            elif path == "/readyz":
                self._answer(*((200, b"ok\n") if ready() else (503, b"not ready\n")), "text/plain")
            else:
                self._answer(404, b"not found\n", "text/plain")

        def log_message(self, *_args: object) -> None:
            """Stay silent: probes come every few seconds."""

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = _Server((host, port), Handler)
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
