"""The exporter's cache and patience, on sources that a test controls."""

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from crmctl.domain.errors import UnavailableError
from crmctl.jobs.serve_metrics import Exporter
from crmctl.telemetry import logs

LOG = logs.configure(level="error")


def gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, name, value=value)


def page(exporter: Exporter) -> str:
    registry = CollectorRegistry()
    registry.register(exporter)
    return generate_latest(registry).decode()


def counting(name: str) -> tuple[Callable[[], list[Metric]], list[int]]:
    reads: list[int] = []

    def read() -> list[Metric]:
        reads.append(1)
        return [gauge(name, len(reads))]

    return read, reads


def test_scrapes_that_come_together_share_one_snapshot() -> None:
    read, reads = counting("a")
    exporter = Exporter({"database": read}, LOG, max_age=60)
    threads = [threading.Thread(target=page, args=(exporter,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert "a 1.0" in page(exporter)


def test_a_snapshot_that_is_too_old_is_taken_anew() -> None:
    read, reads = counting("a")
    exporter = Exporter({"database": read}, LOG, max_age=0)
    assert "a 1.0" in page(exporter)
    assert "a 2.0" in page(exporter)
    assert len(reads) == 2


def test_a_source_that_fails_loses_its_series_and_the_others_stay() -> None:
    def fails() -> list[Metric]:
        raise UnavailableError("it is away")

    text = page(Exporter({"database": fails, "kafka": lambda: [gauge("b", 7)]}, LOG))
    assert 'crm_scrape_up{source="database"} 0.0' in text
    assert 'crm_scrape_up{source="kafka"} 1.0' in text
    assert "b 7.0" in text


def test_a_figure_of_two_databases_is_one_family() -> None:
    def of(database: str) -> Callable[[], list[Metric]]:
        def read() -> list[Metric]:
            family = GaugeMetricFamily("a", "a", labels=["database"])
            family.add_metric([database], 1)
            return [family]

        return read

    exporter = Exporter({"database": of("main"), "installations": of("installations")}, LOG, max_age=0)
    for _ in range(2):
        text = page(exporter)
        assert text.count("# TYPE a gauge") == 1
        assert text.count('a{database="main"} 1.0') == text.count('a{database="installations"} 1.0') == 1


def test_a_source_that_hangs_is_given_up_and_not_asked_twice() -> None:
    released, asked = threading.Event(), []

    def hangs() -> list[Metric]:
        asked.append(1)
        released.wait(30)
        return [gauge("late", 1)]

    exporter = Exporter({"kafka": hangs, "database": lambda: [gauge("b", 7)]}, LOG, max_age=0, timeout=0.2)
    started = time.monotonic()
    for _ in range(2):
        text = page(exporter)
        assert 'crm_scrape_up{source="kafka"} 0.0' in text
        assert "b 7.0" in text
    assert time.monotonic() - started < 5
    assert len(asked) == 1
    released.set()
    for _ in range(100):
        if "late 1.0" in page(exporter):
            break
        time.sleep(0.02)
    assert 'crm_scrape_up{source="kafka"} 1.0' in page(exporter)


def test_registering_reads_nothing() -> None:
    read, reads = counting("a")
    CollectorRegistry().register(Exporter({"database": read}, LOG))
    assert reads == []
