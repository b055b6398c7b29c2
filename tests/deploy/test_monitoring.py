"""Alerts and the dashboard: every figure in them is exported, every alert has its page, its twin and its test."""

import inspect
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from crmctl.domain.times import parse_duration
from crmctl.jobs import serve_metrics
from crmctl.telemetry.metrics import ChatStatusMetrics
from tests.deploy.support import CRONJOBS, EXPORTER_METRICS, MONITORING, ROOT, Document, documents, tool

RULE_FILES: Final = sorted(
    file
    for file in MONITORING.glob("*.yaml")
    if not file.name.endswith("_test.yaml") and documents(file)[0]["kind"] == "PrometheusRule"
)
_PROMTOOL: Final = tool("promtool")
# A series that is away does no harm: what vanishes with it is told by another alert.
NO_TWIN: Final = {
    "crm_job_last_failure_timestamp_seconds": "a job that never failed has none",
    "crm_bookings_due": "it stands beside crm_bookings_oldest_due_seconds, which has one",
}
# Alerts that somebody would otherwise forget; the issue asks for each of these.
ASKED_FOR: Final = {
    "CrmConsumerLag": ("crm_chat_status_group_lag_seconds", "> 300"),
    "CrmDeadLettersOpen": ("crm_chat_status_dlq_open", "> 0"),
    "CrmChatStatusFailed": ("crm_chat_status_applied_total", "> 10"),
    "CrmBookingsPoison": ("crm_bookings_poison", "> 0"),
    "CrmBookingsOverdue": ("crm_bookings_oldest_due_seconds", "> 180"),
    "CrmOutboxOverdue": ("crm_outbox_oldest_unpublished_seconds", "> 120"),
    "CrmJobStalled": ("crm_job_last_success_timestamp_seconds", "> "),
    "CrmInstallationsUnclear": ("crm_installations_unclear", "> 0"),
    "CrmRelayStuck": ("crm_outbox_pending", "> 0"),
    "CrmChatStatusRetention": ("crm_chat_status_retention_headroom_messages", "<"),
}
SCHEDULED: Final = {"expire-bookings", "relay-outbox", "consume-chat-status", "sweep-installations", "prune"}


def rules() -> Iterator[Document]:
    for file in RULE_FILES:
        (manifest,) = documents(file)
        for group in manifest["spec"]["groups"]:
            yield from group["rules"]


def exported() -> dict[str, frozenset[str]]:
    """Every metric that Prometheus gets from us, with its labels."""
    found = dict(EXPORTER_METRICS)
    for family in ChatStatusMetrics().registry.collect():
        for sample in family.samples:
            found[sample.name] = frozenset(sample.labels)
    return found


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bcrm_[a-z0-9_]+", expression))


def panels() -> list[Document]:
    board = json.loads((MONITORING / "pin-crm.json").read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


ALERTS: Final = list(rules())
every_rule = pytest.mark.parametrize(
    "rule",
    ALERTS,
    ids=lambda rule: f"{rule['alert']}-{rule['labels'].get('metric', '')}{rule['labels'].get('job', '')}",
)


def test_every_alert_that_was_asked_for_is_there() -> None:
    for name, (metric, comparison) in ASKED_FOR.items():
        found = [rule["expr"] for rule in ALERTS if rule["alert"] == name]
        assert any(metric in expr for expr in found), name
        assert all(comparison in expr for expr in found), name


def test_the_age_of_the_last_success_of_every_job_is_watched() -> None:
    stalled = " ".join(rule["expr"] for rule in ALERTS if rule["alert"] == "CrmJobStalled")
    watched = re.findall(r'crm_job_last_success_timestamp_seconds\{job=~?"([a-z|-]+)"\}', stalled)
    assert set("|".join(watched).split("|")) == SCHEDULED
    failing = " ".join(rule["expr"] for rule in ALERTS if rule["alert"] == "CrmJobFailing")
    assert all(job in failing for job in SCHEDULED)


@every_rule
def test_an_alert_says_how_bad_it_is_what_it_means_and_where_to_read_on(rule: Document) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    notes: Mapping[str, str] = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert len(notes["summary"]) < 120
    assert notes["runbook_url"].endswith(f"/runbooks/{rule['alert']}.md")
    assert (ROOT / "runbooks" / f"{rule['alert']}.md").is_file()


@pytest.mark.parametrize("expression", [rule["expr"] for rule in ALERTS] + panel_expressions())
def test_every_metric_and_label_in_a_query_is_exported(expression: str) -> None:
    known = exported()
    assert metrics_in(expression) <= known.keys()
    for metric, selector in re.findall(r"\b(crm_[a-z0-9_]+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)) <= known[metric]
    grouped = {label for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in labels.split(", ")}
    labels = frozenset().union(*(known[name] for name in metrics_in(expression)))
    assert grouped - {""} <= labels


def test_the_exporter_exports_what_we_count_on_and_nothing_else() -> None:
    source = inspect.getsource(serve_metrics)
    families = re.findall(r'_(?:gauge|family)\(\s*"(crm_[a-z_]+)"', source)
    assert sorted(families) == sorted(EXPORTER_METRICS)
    for name, labels in EXPORTER_METRICS.items():
        (arguments,) = re.findall(rf'"{name}",\s*"[^"]*"((?:,\s*"[a-z]+")*)', source)
        assert frozenset(re.findall(r"[a-z]+", arguments)) == labels, name


def test_every_series_of_an_alert_has_an_absence_twin_in_the_same_file() -> None:
    for file in RULE_FILES:
        (manifest,) = documents(file)
        found = [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]
        twins = {pair for rule in found if rule["alert"] == "CrmMetricAbsent" for pair in absent_in(rule["expr"])}
        own = {pair for rule in found if rule["alert"] != "CrmMetricAbsent" for pair in series(leading(rule["expr"]))}
        jobs_with_a_twin = {metric: {job for name, job in twins if name == metric} for metric, _ in twins}
        for metric, job in own:
            if metric not in NO_TWIN and (metric, job) not in twins:
                # One alert of all jobs needs the twins of each.
                assert (job, jobs_with_a_twin.get(metric)) == (None, SCHEDULED), (file.name, metric, job)


def series(expression: str) -> set[tuple[str, str | None]]:
    """The metrics of an expression, each with the jobs that its selector names (None: it names none)."""
    found: set[tuple[str, str | None]] = set()
    for metric, selector in re.findall(r"\b(crm_[a-z0-9_]+)(?:\{([^}]*)\})?", expression):
        jobs = re.search(r'job=~?"([^"]+)"', selector)
        found |= {(metric, job) for job in jobs[1].split("|")} if jobs else {(metric, None)}
    return found


def absent_in(expression: str) -> set[tuple[str, str | None]]:
    """What a twin tells to be away: in `absent(…)`, or after `unless` for each database of another metric."""
    forms = r"absent\((.+?)\)(?= and| *$)|unless on \(database\)\s+(.+)"
    return {pair for both in re.findall(forms, expression.strip()) for part in both for pair in series(part)}


def leading(expression: str) -> str:
    """The part that makes the alert; what comes after `on ()` or `on (database)` only narrows it."""
    return re.split(r"\b(?:and|unless) on \((?:database)?\)", expression)[0]


def test_the_twins_name_the_metric_and_the_job_that_are_away() -> None:
    for rule in ALERTS:
        if rule["alert"] == "CrmMetricAbsent":
            assert absent_in(rule["expr"]) == {(rule["labels"]["metric"], rule["labels"].get("job"))}


def test_a_twin_waits_for_its_own_source_and_no_other() -> None:
    """One source that is away, or is not there on purpose, must not disarm the twins of the others."""
    collectors: dict[str, list[Any]] = {
        "database": [*serve_metrics.MAIN, *serve_metrics.EVERYWHERE],
        "kafka": list(serve_metrics.KAFKA),
        "dead_letters": [serve_metrics.OpenLetters],
        "installations": [serve_metrics.installations],
    }
    texts = {source: "".join(map(inspect.getsource, found)) for source, found in collectors.items()}
    guarded = 0
    for rule in ALERTS:
        if rule["alert"] == "CrmMetricAbsent" and (guards := re.findall(r"and on .*crm_scrape_up(.*)$", rule["expr"])):
            (source,) = (source for source, text in texts.items() if f'"{rule["labels"]["metric"]}"' in text)
            assert guards == [f'{{source="{source}"}}) == 1)'], rule["expr"]
            guarded += 1
    assert guarded > 10


def test_prune_is_told_to_have_failed_when_two_nights_have_left_what_it_should_delete() -> None:
    (manifest,) = documents(CRONJOBS / "base" / "prune.yaml")
    (container,) = manifest["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    age = parse_duration(container["args"][container["args"].index("--older-than") + 1])
    (limit,) = (
        re.findall(r"crm_prunable_oldest_seconds\) > (\d+)", rule["expr"])[0]
        for rule in ALERTS
        if "prunable" in rule["expr"]
    )
    assert timedelta(seconds=int(limit)) == age + timedelta(days=2)


def test_only_the_file_that_a_consumer_as_a_cronjob_leaves_out_looks_at_the_consumer_s_own_figures() -> None:
    for file in RULE_FILES:
        (manifest,) = documents(file)
        expressions = [rule["expr"] for group in manifest["spec"]["groups"] for rule in group["rules"]]
        if file.stem != "consumer":
            assert metrics_in(" ".join(expressions)) <= EXPORTER_METRICS.keys(), file.name


def test_the_label_job_of_our_metrics_survives_the_scrape() -> None:
    monitors = {d["metadata"]["name"]: d["spec"] for d in documents(MONITORING / "pod-monitors.yaml")}
    (endpoint,) = monitors["crmctl-serve-metrics"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    components = {m["selector"]["matchLabels"]["app.kubernetes.io/component"] for m in monitors.values()}
    assert components == {"serve-metrics", "consume-chat-status"}


def test_every_rule_file_has_its_test_in_which_every_alert_fires_and_stays_silent() -> None:
    for file in RULE_FILES:
        (manifest,) = documents(file)
        alerts = {rule["alert"] for group in manifest["spec"]["groups"] for rule in group["rules"]}
        (cases,) = documents_of_test(file)
        checks = [check for test in cases["tests"] for check in test["alert_rule_test"]]
        assert {check["alertname"] for check in checks if check.get("exp_alerts")} == alerts
        assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == alerts


def documents_of_test(file: Path) -> list[Document]:
    test: Any = yaml.safe_load(file.with_name(f"{file.stem}_test.yaml").read_text(encoding="utf-8"))
    return [test]


@pytest.mark.skipif(_PROMTOOL is None, reason="promtool is not on the PATH (Debian: the package prometheus)")
@pytest.mark.parametrize("file", RULE_FILES, ids=lambda file: file.stem)
def test_promtool_accepts_the_rules_and_their_tests_pass(file: Path, tmp_path: Path) -> None:
    assert _PROMTOOL is not None
    (manifest,) = documents(file)
    extracted = tmp_path / f"{file.stem}.rules.yaml"
    extracted.write_text(yaml.safe_dump(manifest["spec"]), encoding="utf-8")
    cases = tmp_path / f"{file.stem}_test.yaml"
    shutil.copy(file.with_name(cases.name), cases)
    for arguments in (["check", "rules", str(extracted)], ["test", "rules", str(cases)]):
        done = subprocess.run([_PROMTOOL, *arguments], capture_output=True, encoding="utf-8", timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_pin_crm_and_shows_every_figure_of_the_exporter() -> None:
    board = json.loads((MONITORING / "pin-crm.json").read_text(encoding="utf-8"))
    assert (board["uid"], board["title"]) == ("pin-crm", "pin-crm")
    shown = set().union(*(metrics_in(expression) for expression in panel_expressions()))
    assert EXPORTER_METRICS.keys() <= shown
    assert {"crm_messenger_consumer_lag_seconds", "crm_chat_status_applied_total"} <= shown


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    board = json.loads((MONITORING / "pin-crm.json").read_text(encoding="utf-8"))
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        own = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_an_alert_s_threshold_is_the_line_that_the_dashboard_draws() -> None:
    by_title = {panel["title"]: panel for panel in panels() if panel["type"] == "stat"}
    for title, limit in (("Oldest due booking", 180), ("Oldest unpublished message", 120), ("Consumer lag", 300)):
        steps = by_title[title]["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[-1] == {"color": "red", "value": limit}
