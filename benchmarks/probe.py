"""Runs the command in its arguments and reports on it: `python probe.py COMMAND …` prints one JSON object.

A process of its own, because the peak memory of a child includes that of the process which forked it: this
one is far smaller than what it measures.
"""

import json
import resource
import subprocess
import sys
import time


def main() -> None:
    """Run, wait, report: exit code, seconds, peak resident memory in MiB, and both outputs."""
    started = time.perf_counter()
    done = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    report = {
        "exit_code": done.returncode,
        "seconds": seconds,
        "peak_mib": peak / (2**20 if sys.platform == "darwin" else 2**10),
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
