"""`python -m benchmarks [--scale full|small]`: measure everything and print one table of ratios.

Only the full scale writes benchmarks/results.md.
"""

import argparse
from pathlib import Path

from benchmarks import consumer, expire, relay, report, startup
from benchmarks.harness import SCALES, laboratory, say


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure crmctl; print the ratios.")
    parser.add_argument("--scale", choices=SCALES, default="full", help="small: a quick try that writes no file")
    scale = SCALES[parser.parse_args().scale]
    with laboratory(scale) as lab:
        figures = [figure for subject in (expire, startup, relay, consumer) for figure in subject.measure(lab, scale)]
        page = report.page(figures, lab, scale)
    print(page)
    if scale.name == "full":
        results = Path(__file__).with_name("results.md")
        results.write_text(page, encoding="utf-8")
        say(f"written to {results}")


if __name__ == "__main__":
    main()
