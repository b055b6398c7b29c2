"""The manifests are what Kubernetes takes: its own schemas, strictly, as written and as kustomize renders them."""

import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.support import (
    CRONJOBS,
    MONITORING,
    OVERLAYS,
    Document,
    documents,
    is_manifest,
    plain_manifests,
    tool,
    workload,
)

# The oldest release that has all that we use (podFailurePolicy, unhealthyPodEvictionPolicy), and the newest one.
VERSIONS = ("1.31", kubernetes_validate.latest_version())
_KUBECTL = tool("kubectl")


def render(directory: Path) -> list[Document]:
    """What `kubectl kustomize` makes of a directory."""
    if _KUBECTL is None:
        pytest.skip("kubectl is not on the PATH")
    done = subprocess.run(
        [_KUBECTL, "kustomize", str(directory)], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def validate(document: Document, version: str) -> None:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        pytest.fail(f"{document['kind']} {document['metadata']['name']}: {where}: {error.message}", pytrace=False)


def manifest_ids() -> list[Any]:
    return [
        pytest.param(document, id=f"{file.relative_to(CRONJOBS)}-{document['kind']}-{document['metadata']['name']}")
        for file, document in plain_manifests()
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", manifest_ids())
def test_every_manifest_is_valid_as_it_is_written(manifest: Document, version: str) -> None:
    validate(manifest, version)


def test_the_validation_is_strict() -> None:
    (job,) = documents(CRONJOBS / "base" / "prune.yaml")
    job["spec"]["jobTemplate"]["spec"]["backofLimit"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_renders_into_valid_manifests_of_one_namespace(overlay: str) -> None:
    directory = CRONJOBS / "overlays" / overlay
    (kustomization,) = documents(directory / "kustomization.yaml")
    rendered = render(directory)
    for document in rendered:
        validate(document, VERSIONS[-1])
    (namespace,) = (d["metadata"]["name"] for d in rendered if d["kind"] == "Namespace")
    others = {d["metadata"].get("namespace") for d in rendered if d["kind"] != "Namespace"}
    assert {namespace} == others == {kustomization["namespace"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_names_a_registry_and_hands_its_settings_to_every_container(overlay: str) -> None:
    rendered = render(CRONJOBS / "overlays" / overlay)
    text = yaml.safe_dump_all(rendered)
    (settings,) = (d for d in rendered if d["kind"] == "ConfigMap")
    references = text.count(f"name: {settings['metadata']['name']}\n")
    workloads = sum(d["kind"] in {"CronJob", "Deployment"} for d in rendered)
    assert references == workloads + 1
    assert text.count("image: registry.example/crm/crmctl:") == text.count("image: ") == workloads


def test_the_consumer_is_either_a_deployment_or_a_cronjob() -> None:
    kinds = {
        overlay: [
            d["kind"]
            for d in render(CRONJOBS / "overlays" / overlay)
            if d["metadata"]["name"] == "consume-chat-status" and d["kind"] != "ServiceAccount"
        ]
        for overlay in OVERLAYS
    }
    for overlay in ("production", "dev", "installations-database"):
        assert sorted(kinds[overlay]) == ["Deployment", "PodDisruptionBudget"]
    assert kinds["consumer-as-cronjob"] == ["CronJob"]


def test_a_system_without_bitrix24_has_no_sweep_and_no_way_to_the_portals(tmp_path: Path) -> None:
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(CRONJOBS / "overlays" / "production", tmp_path)],
        "components": [os.path.relpath(CRONJOBS / "components" / "without-bitrix24", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))

    def named(directory: Path) -> set[tuple[str, str]]:
        return {(d["kind"], d["metadata"]["name"]) for d in render(directory)}

    assert named(CRONJOBS / "overlays" / "production") - named(tmp_path) == {
        ("CronJob", "sweep-installations"),
        ("ServiceAccount", "sweep-installations"),
        ("NetworkPolicy", "to-portals"),
    }


def test_a_sweep_that_asks_no_portal_needs_no_credentials() -> None:
    """A Secret that is not there, and not optional, keeps a pod from starting."""
    for overlay in OVERLAYS:
        for document in render(CRONJOBS / "overlays" / overlay):
            if document["kind"] == "CronJob" and document["metadata"]["name"] == "sweep-installations":
                found = workload(document)
                assert found is not None
                (volume,) = found.pod["volumes"]
                (credentials,) = (
                    source["secret"]
                    for source in volume["projected"]["sources"]
                    if source["secret"]["name"] == "crmctl-bitrix24"
                )
                assert credentials.get("optional", False) == ("--verify-portal" not in found.container["args"])


def test_every_manifest_of_the_base_is_in_its_kustomization() -> None:
    for directory in (CRONJOBS / "base", MONITORING):
        (kustomization,) = documents(directory / "kustomization.yaml")
        files = {f.name for f in directory.glob("*.yaml")} - {"kustomization.yaml"}
        assert set(kustomization["resources"]) == {name for name in files if not name.endswith("_test.yaml")}


def test_monitoring_renders() -> None:
    rendered = [document for document in render(MONITORING) if is_manifest(document)]
    assert {d["kind"] for d in rendered} == {"PrometheusRule", "PodMonitor", "ConfigMap"}
