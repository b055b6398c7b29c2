"""Logs on stderr: JSON lines when stderr is no terminal, readable lines when it is."""

import logging
import sys
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

Log = FilteringBoundLogger


def configure(*, level: str = "info", form: Literal["auto", "json", "text"] = "auto") -> Log:
    """Build the logger of this run; a stderr that cannot be written to never stops the run."""
    if form == "auto":
        form = "text" if sys.stderr is not None and sys.stderr.isatty() else "json"
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        processors += [
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(default=str),
        ]
    else:
        processors.append(_readable)
    log: Log = structlog.wrap_logger(
        _StderrLogger(sys.stderr),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
    )
    return log


def _readable(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """`12:00:00 info  run finished  job=… counts=…`, plain enough for every terminal."""
    clock = str(event.pop("timestamp"))[11:19]
    level = event.pop("level")
    text = event.pop("event")
    fields = " ".join(f"{name}={value}" for name, value in event.items() if value is not None)
    return f"{clock} {level:<7} {text}" + (f"  {fields}" if fields else "")


class _StderrLogger:
    """Writes whole lines; swallows what a closed or full stderr raises."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def msg(self, message: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(message + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = error = msg
