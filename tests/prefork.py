"""crmctl without the half second of its start: a process that has it loaded, and forks for every command."""

import atexit
import functools
import json
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support import CallResult, Database, environment, run_process

# What a variable of the interpreter's own begins with: it is read at its start.
_INTERPRETERS: Final = ("PYTHON", "LC_", "LANG")
_PREFORK: Final = """
import json, os, sys, tempfile, time
import crmctl.adapters.identity, crmctl.adapters.publisher, crmctl.adapters.topic_reader
import crmctl.cli.consumer, crmctl.cli.run
import crmctl.jobs.expire_bookings, crmctl.jobs.extend_booking, crmctl.jobs.relay_outbox
import crmctl.jobs.list_dead_letters, crmctl.jobs.replay_dead_letters, crmctl.jobs.sweep_installations
from crmctl.__main__ import main

def run(command):
    os.environ.clear()
    os.environ.update(command["env"])
    time.tzset()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["crmctl", *command["args"]]
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                code = run(json.loads(line))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stdout.seek(0)
        stderr.seek(0)
        result = {"exit_code": code, "stdout": stdout.read().decode(), "stderr": stderr.read().decode()}
    print(json.dumps(result), file=answers, flush=True)
"""


class Prefork:
    """Each command is the real `main` in a process of its own, one at a time. Use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PREFORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path("/"),
            encoding="utf-8",
        )

    def __enter__(self) -> "Prefork":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, *args: str, database: Database | str | None = None, env: Mapping[str, str] | None = None) -> None:
        """Start a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"args": args, "env": environment(env, database)}) + "\n")
        self._process.stdin.flush()

    def finish(self, timeout: float = 60.0) -> CallResult:
        """Wait for the command that was started."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self._process.kill()
            raise AssertionError(f"the command had not ended after {timeout:.0f} s")
        return CallResult(**json.loads(self._process.stdout.readline()))

    def run(
        self,
        *args: str,
        database: Database | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> CallResult:
        """Run a command to its end."""
        self.start(*args, database=database, env=env)
        return self.finish(timeout)


@functools.cache
def _shared() -> Prefork:
    made = Prefork()
    atexit.register(made.__exit__)
    return made


def run_crmctl(
    *args: str,
    env: Mapping[str, str] | None = None,
    database: Database | str | None = None,
    timeout: float = 60.0,
) -> CallResult:
    """Run crmctl to its end, in a fork of the one process that all tests of a session share for this.

    In a process of its own where `env` tells the interpreter something, and in threads, which run several at once.
    """
    own = any(name.startswith(_INTERPRETERS) for name in env or ())
    if own or threading.current_thread() is not threading.main_thread():
        return run_process(*args, env=env, database=database, timeout=timeout)
    try:
        return _shared().run(*args, database=database, env=env, timeout=timeout)
    except BaseException:
        # Its answer would be the next command's.
        _shared.cache_clear()
        raise
