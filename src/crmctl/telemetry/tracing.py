"""Traces of the consumer: receive → process → database, in the context that the event's headers carry.

Only with the extra `otel` and OTEL_EXPORTER_OTLP_ENDPOINT set; otherwise nothing is imported and nothing is done.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final

from crmctl.domain.errors import ConfigurationError

_SHUTDOWN_SECONDS: Final = 2.0


class Tracing:
    """A tracer, or none."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._tracer: Any = None
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            self._provider = _provider()
            self._tracer = self._provider.get_tracer("crmctl")

    @contextmanager
    def batch(self, traceparents: Sequence[str | None]) -> Iterator[None]:
        """Span a batch: a receive and a process span for each event, one database span that links to all."""
        if self._tracer is None:
            yield
            return
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        spans = []
        for traceparent in traceparents:
            context = extract({"traceparent": traceparent} if traceparent else {})
            receive = self._tracer.start_span("chat-status receive", context=context, kind=trace.SpanKind.CONSUMER)
            process = self._tracer.start_span("chat-status process", context=trace.set_span_in_context(receive))
            spans += [process, receive]
        links = [trace.Link(span.get_span_context()) for span in spans[::2]]
        parent = trace.set_span_in_context(spans[0]) if spans else None
        database = self._tracer.start_span("chat-status database", context=parent, links=links)
        with trace.use_span(database, record_exception=False, set_status_on_exception=False):
            yield
        # Not where the batch was rolled back: it comes again, and a span that has no end is never sent.
        for span in (database, *spans):
            span.end()

    def close(self) -> None:
        """Send what is left; a collector that does not answer costs two seconds."""
        if self._provider is not None:
            # The flush has no limit of its own: each of its requests may take a second.
            flush = Thread(target=self._provider.force_flush, name="traces", daemon=True)
            flush.start()
            flush.join(_SHUTDOWN_SECONDS)


def _provider() -> Any:
    # What the exporter says of a collector that is away would stand between our JSON lines.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    logging.getLogger("opentelemetry").propagate = False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigurationError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed",
            hint="pip install 'crmctl[otel]', or unset it",
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "crmctl"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=1)))
    return provider
