"""A program in the background of a directory: started there, found again by any process, signalled, waited for."""

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from crmctl.domain.errors import ConfigurationError, UnavailableError

_POLL_SECONDS: Final = 0.01
_KILL_SECONDS: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1

# This process's children by pid: whichever object stops one can also reap it.
_children: dict[int, subprocess.Popen[bytes]] = {}


class BackgroundProcess:
    """The one process called `name` of a directory, whoever started it; its output is in `log`."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory.resolve()
        self.log = self.directory / f"{name}.log"
        self._pid_file = self.directory / f"{name}.pid"

    @property
    def pid(self) -> int | None:
        """The process id, or None while it does not run."""
        try:
            pid = int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None
        return pid if self._is_ours(pid) else None

    def launch(self, command: list[str], environment: Mapping[str, str], *, dies_with_parent: bool) -> None:
        """Start it in its directory, in a session of its own, with nothing on stdin and its output in the log.

        With `dies_with_parent` it is killed when the thread that called this ends, however it ends
        (elsewhere than on Linux: when the interpreter exits). Raises ConfigurationError if it cannot be run.
        """
        self._pid_file.unlink(missing_ok=True)
        try:
            with self.log.open("ab") as log, self._pid_file.open("wb", buffering=0) as pid_file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    env=dict(environment),
                    start_new_session=True,
                    preexec_fn=_in_child(pid_file.fileno(), os.getpid() if dies_with_parent else None),
                )
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be run in {self.directory}: {error.strerror}") from error
        _children[process.pid] = process
        if dies_with_parent and sys.platform != "linux":
            atexit.register(self.kill)

    def signal(self, signum: signal.Signals) -> bool:
        """Send a signal; whether there was a process to send it to."""
        pid = self.pid
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        return True

    def stop(self, patience: float) -> None:
        """End it with SIGTERM, or with SIGKILL after `patience` seconds. Nothing to do is success."""
        if self.signal(signal.SIGTERM) and self.signal(signal.SIGCONT) and not self._ends_within(patience):
            self.kill()

    def kill(self) -> None:
        """End it with SIGKILL. Nothing to do is success."""
        if self.signal(signal.SIGKILL) and not self._ends_within(_KILL_SECONDS):
            raise UnavailableError(f"Process {self.pid} in {self.directory} survives SIGKILL")

    def output_after(self, position: int) -> str:
        """What the log says after a position in bytes."""
        with self.log.open("rb") as log:
            log.seek(position)
            return log.read().decode(errors="replace")

    def failure(self, what: str, said_before: int) -> UnavailableError:
        """An error that quotes the end of the log, from the position `said_before` on."""
        tail = "\n".join(self.output_after(said_before).splitlines()[-20:])
        return UnavailableError(f"{what}; its log {self.log} ends with:\n{tail}")

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pid is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _is_ours(self, pid: int) -> bool:
        """Whether `pid` is alive and (where that can be seen) runs in this directory."""
        child = _children.get(pid)
        if child is not None and child.poll() is not None:
            del _children[pid]
            return False
        with contextlib.suppress(OSError):
            if Path("/proc/self/cwd").exists():
                return Path(f"/proc/{pid}/cwd").readlink() == self.directory
            os.kill(pid, 0)
            return True
        return False


def _in_child(pid_file: int, parent: int | None) -> Callable[[], None]:
    # Loaded here, because the forked child must do no more than make the calls.
    prctl = ctypes.CDLL(None).prctl if parent is not None and sys.platform == "linux" else None

    def run() -> None:
        # The child writes its own pid: a parent killed at this moment leaves no process that nobody can find.
        os.write(pid_file, b"%d" % os.getpid())
        if prctl is not None:
            # SIGKILL, which also ends a process that is stopped.
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return run
