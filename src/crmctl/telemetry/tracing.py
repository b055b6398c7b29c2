"""Traces of the consumer: receive → process → database, in the context that the event's headers carry.

Only with the extra `otel` and OTEL_EXPORTER_OTLP_ENDPOINT set; otherwise nothing is imported and nothing is done.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from crmctl.domain.errors import ConfigurationError

_SHUTDOWN_MS: Final = 2_000


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
        with self._tracer.start_as_current_span("chat-status database", context=parent, links=links):
            yield
        for span in spans:
            span.end()

    def close(self) -> None:
        """Send what is left; a collector that does not answer costs about two seconds."""
        if self._provider is not None:
            self._provider.force_flush(_SHUTDOWN_MS)


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
