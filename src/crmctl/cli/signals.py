"""SIGINT and SIGTERM: undo the open transaction and leave, within seconds, whatever the process is doing.

The first signal raises `Interrupted` in the main thread, and psycopg then cancels the running statement.
From a commit to the next transaction or the report the signal is only noted: what was committed must be told. A thread
watches from the side, because Python's handlers wait for C calls to return: it ends the process when a second
signal arrives, or when the first has not ended it in time. PostgreSQL rolls back when the connection drops.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS: Final = 4.5


class Interrupted(KeyboardInterrupt):
    """A signal to stop; a KeyboardInterrupt, so that psycopg cancels the statement that it waits for."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """The signal handlers of a run, installed once from the main thread."""

    def __init__(self) -> None:
        self.pending: int | None = None
        self._settled = False

    def install(self) -> None:
        """Take SIGINT and SIGTERM over, and start the thread that watches from the side."""
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for signum in _SIGNALS:
            signal.signal(signum, self._handle)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Once settled: raise a signal that was noted, or that arrives in this block."""
        outside = self._settled
        try:
            self._settled = False
            self.check()
            yield
        finally:
            self._settled = outside

    def settle(self) -> None:
        """Only note every further signal: the outcome stands, and is about to be told."""
        self._settled = True

    def check(self) -> None:
        """Raise the signal that was noted, if any."""
        if self.pending is not None:
            raise Interrupted(self.pending)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self.pending = signum
        if not self._settled:
            raise Interrupted(signum)


def _watch(reader: socket.socket) -> None:
    first = _next_signal(reader)
    reader.settimeout(_GRACE_SECONDS)
    try:
        _next_signal(reader)
    except TimeoutError:
        pass
    finally:
        os._exit(128 + first)


def _next_signal(reader: socket.socket) -> int:
    while True:
        (received,) = reader.recv(1) or b"\0"
        if received in _SIGNALS:
            return received
