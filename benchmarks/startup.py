"""How long a person, or a CronJob with nothing to do, waits: whole processes beside `python -c pass`."""

import subprocess
import sys
import time
from statistics import median
from typing import Final

from benchmarks.harness import CRMCTL, Figure, Lab, Scale, clean_environment

_TARGETS: Final = {
    "crmctl --version": 12,
    "crmctl --help": 12,
    "crmctl bookings expire --help": 20,
    "crmctl bookings expire, nothing due": 60,
}
_COMMANDS: Final = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "crmctl --version": [CRMCTL, "--version"],
    "crmctl --help": [CRMCTL, "--help"],
    "crmctl bookings expire --help": [CRMCTL, "bookings", "expire", "--help"],
    "crmctl bookings expire, nothing due": [CRMCTL, "bookings", "expire"],
}


def measure(lab: Lab, scale: Scale) -> list[Figure]:
    """Medians of interleaved runs, as multiples of the bare interpreter's."""
    environment = clean_environment() | {"CRMCTL_DATABASE_URL": lab.idle_url}
    seconds: dict[str, list[float]] = {name: [] for name in _COMMANDS}
    for number in range(scale.startup_runs + 1):
        for name, command in _COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, env=environment, cwd="/", check=True, capture_output=True)
            # The first time warms the caches up.
            if number:
                seconds[name].append(time.perf_counter() - started)
    bare = median(seconds["python -c pass"])
    return [_figure(name, median(seconds[name]), bare, target) for name, target in _TARGETS.items()]


def _figure(name: str, seconds: float, bare: float, target: int) -> Figure:
    ratio = seconds / bare
    return Figure(
        f"{name}, by python -c pass",
        f"{seconds * 1000:,.0f} ms against {bare * 1000:,.1f} ms",
        f"{ratio:.1f}",
        f"≤ {target}",
        ratio <= target,
    )
