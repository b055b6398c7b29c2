"""What no schema knows: that the manifests fit crmctl's exit codes, timeouts and options, and are safe to run."""

import re
from datetime import timedelta
from typing import Any, Final

import pytest

from crmctl import __version__
from crmctl.cli.exits import Exit
from crmctl.domain.databases import DatabaseName
from crmctl.domain.jobs import JOBS, names_in
from crmctl.domain.times import parse_duration
from crmctl.settings import DatabaseSettings, Settings
from tests.deploy.support import (
    CRONJOBS,
    ROOT,
    Document,
    Workload,
    command_of,
    documents,
    leaves,
    plain_manifests,
    workload,
    workloads,
)
from tests.unit.test_docs import setting_names

FAIL: Final = {
    Exit.USAGE,
    Exit.NEEDS_PERSON,
    Exit.NOT_FOUND,
    Exit.FORBIDDEN,
    Exit.INVALID_STATE,
    Exit.CONFIGURATION,
}
# What a run may take beyond its time budget: tenacity's longest pause before an attempt, the watchdog of a signal.
_LONGEST_RETRY_PAUSE: Final = timedelta(seconds=2)
_SIGNAL_WATCHDOG: Final = timedelta(seconds=4.5)
# The Job controller's pause before the first retry; it doubles, up to six minutes.
_FIRST_BACKOFF: Final = timedelta(seconds=10)

ALL: Final = workloads()
CRON: Final = [w for w in ALL if w.manifest["kind"] == "CronJob"]
DEPLOYMENTS: Final = [w for w in ALL if w.manifest["kind"] == "Deployment"]

every_workload = pytest.mark.parametrize("work", ALL, ids=lambda w: f"{w.manifest['kind']}-{w.name}")
every_cronjob = pytest.mark.parametrize("work", CRON, ids=lambda w: w.name)
every_deployment = pytest.mark.parametrize("work", DEPLOYMENTS, ids=lambda w: w.name)


def job(work: Workload) -> Document:
    spec: Document = work.manifest["spec"]["jobTemplate"]["spec"]
    return spec


def seconds(value: int) -> timedelta:
    return timedelta(seconds=value)


def longest_run(work: Workload) -> timedelta:
    """How long one run of crmctl can take by its own guards: the budget, then the last batch with all its attempts."""
    guards = DatabaseSettings()
    args = work.container["args"]
    budget = parse_duration(args[args.index("--time-budget") + 1]) if "--time-budget" in args else timedelta(0)
    attempt = guards.statement_timeout + guards.lock_timeout + _LONGEST_RETRY_PAUSE
    last_batch = max(guards.transaction_attempts * attempt, guards.idle_in_transaction_timeout)
    return guards.connect_timeout + budget + last_batch + _SIGNAL_WATCHDOG


def test_there_is_something_to_look_at() -> None:
    assert {w.name for w in CRON} == {
        "expire-bookings",
        "relay-outbox",
        "sweep-installations",
        "prune",
        "consume-chat-status",
        "relay-outbox-installations",
        "prune-installations",
    }
    assert {w.name for w in DEPLOYMENTS} == {"consume-chat-status", "serve-metrics"}


@every_cronjob
def test_a_cronjob_never_overlaps_itself_and_keeps_a_short_history(work: Workload) -> None:
    spec = work.manifest["spec"]
    assert spec["timeZone"] == "Etc/UTC"
    assert spec["concurrencyPolicy"] == "Forbid"
    # The controller looks every ten seconds: a shorter deadline is one that no start can keep.
    assert spec["startingDeadlineSeconds"] >= 10
    assert 1 <= spec["successfulJobsHistoryLimit"] <= 3
    assert 1 <= spec["failedJobsHistoryLimit"] <= 5
    assert work.pod["restartPolicy"] == "Never"


@every_cronjob
def test_the_schedule_has_five_valid_fields_and_no_macro(work: Workload) -> None:
    schedule = work.manifest["spec"]["schedule"]
    bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
    fields = schedule.split()
    assert len(fields) == 5
    for text, (low, high) in zip(fields, bounds, strict=True):
        found = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/(\d+))?", text)
        assert found, text
        assert all(low <= int(number) <= high for number in found.groups()[:2] if number)
    every_minute = {"expire-bookings", "relay-outbox", "consume-chat-status", "relay-outbox-installations"}
    assert (schedule == "* * * * *") == (work.name in every_minute)


@every_cronjob
def test_the_deadline_leaves_every_try_of_a_job_the_time_that_crmctl_gives_itself(work: Workload) -> None:
    tries = job(work)["backoffLimit"] + 1
    pauses = sum((_FIRST_BACKOFF * 2**n for n in range(tries - 1)), timedelta(0))
    assert seconds(job(work)["activeDeadlineSeconds"]) >= tries * longest_run(work) + pauses


@every_cronjob
def test_a_budget_that_is_spent_lets_the_next_minute_start_in_time(work: Workload) -> None:
    args = work.container["args"]
    if work.manifest["spec"]["schedule"] == "* * * * *":
        budget = parse_duration(args[args.index("--time-budget") + 1])
        assert budget < timedelta(minutes=1)
        assert work.manifest["spec"]["startingDeadlineSeconds"] < 60


@every_cronjob
def test_the_failure_policy_ignores_disruptions_first_and_gives_up_on_what_no_retry_mends(work: Workload) -> None:
    assert job(work)["podReplacementPolicy"] == "Failed"
    ignore, fail = job(work)["podFailurePolicy"]["rules"]
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert fail["action"] == "FailJob"
    codes = fail["onExitCodes"]
    assert (codes["containerName"], codes["operator"]) == (work.container["name"], "In")
    assert codes["values"] == sorted(FAIL)


def test_those_exit_codes_are_the_ones_that_the_page_says_a_cronjob_should_fail_on() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| [A-Z_]* \|[^|]*\| (.*) \|$", page, re.MULTILINE)
    assert {int(code) for code, advice in rows if advice.startswith("fail")} == FAIL


@every_workload
def test_a_container_is_restricted(work: Workload) -> None:
    assert work.pod["automountServiceAccountToken"] is False
    pod = work.pod["securityContext"]
    assert pod["runAsNonRoot"] is True
    for name in ("runAsUser", "runAsGroup", "fsGroup"):
        assert isinstance(pod[name], int)
        assert pod[name] >= 10_000
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for name in ("hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"):
        assert name not in work.pod
    context = work.container["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for volume in work.pod["volumes"]:
        assert set(volume) <= {"name", "projected", "emptyDir"}


@every_workload
def test_the_image_is_this_version_and_the_user_is_the_image_s(work: Workload) -> None:
    assert work.container["image"] == f"crmctl:{__version__}"
    user = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert user == [(str(work.pod["securityContext"]["runAsUser"]), str(work.pod["securityContext"]["runAsGroup"]))]


@every_workload
def test_requests_are_within_limits(work: Workload) -> None:
    def cpu(text: Any) -> float:
        return int(str(text)[:-1]) / 1000 if str(text).endswith("m") else float(text)

    def memory(text: str) -> int:
        return int(text.removesuffix("Mi"))

    resources = work.container["resources"]
    assert 0 < cpu(resources["requests"]["cpu"]) <= cpu(resources["limits"]["cpu"])
    assert 0 < memory(resources["requests"]["memory"]) <= memory(resources["limits"]["memory"])


@every_workload
def test_signals_reach_crmctl_which_has_more_time_than_it_needs_to_leave(work: Workload) -> None:
    assert "command" not in work.container
    assert all(isinstance(argument, str) for argument in work.container["args"])
    assert "preStop" not in work.container.get("lifecycle", {})
    assert seconds(work.pod["terminationGracePeriodSeconds"]) >= 2 * _SIGNAL_WATCHDOG


@every_workload
def test_the_arguments_are_a_command_line_that_crmctl_takes(work: Workload) -> None:
    path, options = command_of(work.container["args"])
    leaves()[path].make_context(path, list(options))


@every_workload
def test_every_setting_in_a_manifest_exists_and_no_secret_is_in_one(work: Workload) -> None:
    names = {f"CRMCTL_{name.replace('.', '__').upper()}" for name in setting_names(Settings)}
    for variable in work.container.get("env", []):
        assert variable["name"] in names
        assert not re.search("PASSWORD|TOKEN|DATABASE_URL", variable["name"])


def test_the_settings_of_base_and_overlays_exist_are_valid_and_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"CRMCTL_{name.replace('.', '__').upper()}" for name in setting_names(Settings)} | {"CRMCTL_SECRETS_DIR"}
    base = dict(line.split("=", 1) for line in (CRONJOBS / "base" / "settings.env").read_text().split())
    for file in sorted(CRONJOBS.rglob("settings.env")):
        merged = base | dict(line.split("=", 1) for line in file.read_text().split())
        assert merged.keys() <= names
        assert not [name for name in merged if re.search("PASSWORD|TOKEN|DATABASE_URL", name)]
        with monkeypatch.context() as patch:
            for name, value in merged.items():
                patch.setenv(name, value)
            Settings()


def secrets_of(work: Workload) -> list[str]:
    return [source["secret"]["name"] for volume in work.pod["volumes"] for source in volume["projected"]["sources"]]


@every_workload
def test_a_workload_has_a_database_secret_and_an_account_of_its_own(work: Workload) -> None:
    (volume,) = work.pod["volumes"]
    secrets = secrets_of(work)
    databases = [name for name in secrets if name.startswith("crmctl-database-")]
    assert len(databases) == 1
    shared = {w.name for w in ALL if databases[0] in secrets_of(w)}
    assert shared == {work.name}
    (mount,) = work.container["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": "/etc/crmctl/secrets", "readOnly": True}
    assert "CRMCTL_SECRETS_DIR=/etc/crmctl/secrets" in (CRONJOBS / "base" / "settings.env").read_text().split()
    assert work.pod["serviceAccountName"] == work.name
    # A workload gets Kafka's credentials exactly where it may reach Kafka.
    assert ("crmctl-kafka" in secrets) == (work.labels.get("crmctl/reaches-kafka") == "true")


def test_every_service_account_is_somebody_s_and_has_no_token() -> None:
    accounts = [manifest for _, manifest in plain_manifests() if manifest["kind"] == "ServiceAccount"]
    assert {account["metadata"]["name"] for account in accounts} == {w.name for w in ALL}
    assert all(account["automountServiceAccountToken"] is False for account in accounts)


@every_deployment
def test_a_deployment_has_probes_and_a_disruption_budget(work: Workload) -> None:
    container = work.container
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert "startupProbe" in container
    assert [port["name"] for port in container["ports"]] == ["metrics"]
    (budget,) = (
        d for _, d in plain_manifests() if d["kind"] == "PodDisruptionBudget" and d["metadata"]["name"] == work.name
    )
    assert budget["spec"]["maxUnavailable"] == 1
    selector = work.manifest["spec"]["selector"]
    assert budget["spec"]["selector"] == selector
    assert selector["matchLabels"].items() <= work.labels.items()


def test_the_consumer_s_port_is_the_one_that_its_probes_ask() -> None:
    (consumer,) = (w for w in DEPLOYMENTS if w.name == "consume-chat-status")
    environment = {variable["name"]: variable["value"] for variable in consumer.container["env"]}
    (port,) = consumer.container["ports"]
    assert environment["CRMCTL_CHAT_STATUS__METRICS_PORT"] == str(port["containerPort"])


def test_nothing_goes_in_or_out_that_no_policy_names() -> None:
    policies = {d["metadata"]["name"]: d["spec"] for d in documents(CRONJOBS / "base" / "network-policies.yaml")}
    assert policies.pop("default-deny") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert set(policies) == {"to-dns", "to-postgresql", "to-kafka", "to-portals", "from-prometheus"}
    for name in ("postgresql", "kafka", "portals"):
        label = f"crmctl/reaches-{name}"
        assert policies[f"to-{name}"]["podSelector"]["matchLabels"] == {label: "true"}
        assert any(w.labels.get(label) == "true" for w in ALL)
    for spec in policies.values():
        for rule in [*spec.get("egress", []), *spec.get("ingress", [])]:
            assert rule["ports"]
            assert rule.get("to") or rule.get("from")
    (ingress,) = policies["from-prometheus"]["podSelector"]["matchExpressions"]
    assert set(ingress["values"]) == {w.name for w in DEPLOYMENTS}


def test_the_portals_policy_keeps_the_sweep_out_of_private_networks() -> None:
    policies = {d["metadata"]["name"]: d["spec"] for d in documents(CRONJOBS / "base" / "network-policies.yaml")}
    (rule,) = policies["to-portals"]["egress"]
    blocks = {to["ipBlock"]["cidr"]: to["ipBlock"] for to in rule["to"]}
    private = {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "127.0.0.0/8", "100.64.0.0/10"}
    assert private <= set(blocks["0.0.0.0/0"]["except"])
    assert set(blocks) == {"0.0.0.0/0", "2000::/3"}
    assert rule["ports"] == [{"protocol": "TCP", "port": 443}]


def test_the_namespace_enforces_restricted_pods() -> None:
    (namespace,) = documents(CRONJOBS / "base" / "namespace.yaml")
    labels = namespace["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}


def test_names_leave_room_for_what_the_controllers_append() -> None:
    for _, manifest in plain_manifests():
        name = manifest["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= 52


def test_no_file_of_deploy_names_latest() -> None:
    for file in [ROOT / "Dockerfile", *(ROOT / "deploy").rglob("*.yaml")]:
        assert not re.search(r":latest\b|newTag: *\"?latest", file.read_text()), file


def test_overlays_deploy_this_version() -> None:
    for file in CRONJOBS.glob("overlays/*/kustomization.yaml"):
        (kustomization,) = documents(file)
        assert [image["newTag"] for image in kustomization["images"]] == [__version__]


def test_a_patch_changes_only_what_the_base_has() -> None:
    names = {(d["kind"], d["metadata"]["name"]) for _, d in plain_manifests()}
    for file in [*CRONJOBS.glob("overlays/dev/*.yaml"), *CRONJOBS.glob("overlays/production/*.yaml")]:
        for document in documents(file):
            if file.name != "kustomization.yaml":
                assert (document["kind"], document["metadata"]["name"]) in names
                if (patched := workload(document)) is not None:
                    path, options = command_of(patched.container["args"])
                    leaves()[path].make_context(path, list(options))


def test_the_database_of_the_installations_has_every_job_that_runs_there() -> None:
    """The sweep finds it by itself; the others are told."""
    commands = {job.name: job.command for job in JOBS}
    there = [w for w in ALL if "installations" in w.container["args"]]
    run = {command_of(w.container["args"])[0] for w in there}
    assert run == {commands[name] for name in names_in(DatabaseName.INSTALLATIONS, tuple(DatabaseName))}
    page = (ROOT / "deploy" / "README.md").read_text()
    needing = {name for w in there for name in secrets_of(w) if name.startswith("crmctl-database-")}
    for secret in {*needing, "crmctl-database-readonly"}:
        (keys,) = re.findall(rf"^ *\| `{secret}` \| (.+?) \|", page, re.MULTILINE)
        assert "crmctl_installations_database_url" in keys, secret


@every_workload
def test_a_workload_has_its_runbook(work: Workload) -> None:
    command = command_of(work.container["args"])[0]
    page = next((job.name for job in JOBS if job.command == command), work.name)
    assert (ROOT / "runbooks" / f"{page}.md").is_file()


def test_every_command_has_a_manifest_or_a_stated_reason() -> None:
    page = (ROOT / "deploy" / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z -]+)` \| (.+) \|$", page, re.MULTILINE))
    assert rows.keys() == leaves().keys()
    run_by: dict[str, set[str]] = {}
    for work in ALL:
        run_by.setdefault(command_of(work.container["args"])[0], set()).add(work.name)
    for command, reason in rows.items():
        named = set(re.findall(r"\]\((cronjobs/[^)]+)\)", reason))
        assert all((ROOT / "deploy" / target).is_file() for target in named)
        assert bool(named) == (command in run_by), command
        assert all(any(name in target for target in named) for name in run_by.get(command, ()))
        assert named or len(reason.split()) >= 3, command
