"""What the tests of deploy/ share: manifests as documents, the command tree, the names of the exporter's metrics."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer
import yaml
from typer.core import TyperGroup

from crmctl.cli.app import app

ROOT: Final = Path(__file__).parents[2]
CRONJOBS: Final = ROOT / "deploy" / "cronjobs"
MONITORING: Final = ROOT / "deploy" / "monitoring"
OVERLAYS: Final = ("dev", "production", "consumer-as-cronjob", "installations-database")

Document = dict[str, Any]

# What `crmctl metrics serve` exports, with the labels of each; a test holds it against the code.
EXPORTER_METRICS: Final[Mapping[str, frozenset[str]]] = {
    "crm_bookings_due": frozenset({"phase"}),
    "crm_bookings_oldest_due_seconds": frozenset({"phase"}),
    "crm_bookings_poison": frozenset(),
    "crm_bookings_never_expire": frozenset(),
    "crm_outbox_pending": frozenset({"database"}),
    "crm_outbox_held": frozenset({"database"}),
    "crm_outbox_oldest_unpublished_seconds": frozenset({"database"}),
    "crm_job_last_success_timestamp_seconds": frozenset({"job", "database"}),
    "crm_job_last_failure_timestamp_seconds": frozenset({"job", "database"}),
    "crm_job_paused": frozenset({"job", "database"}),
    "crm_prunable_oldest_seconds": frozenset({"database"}),
    "crm_chat_status_deferred": frozenset(),
    "crm_chat_status_oldest_deferred_seconds": frozenset(),
    "crm_chat_status_group_lag_messages": frozenset({"partition"}),
    "crm_chat_status_group_lag_seconds": frozenset(),
    "crm_chat_status_retention_headroom_messages": frozenset({"partition"}),
    "crm_chat_status_dlq_open": frozenset(),
    "crm_installations_stale": frozenset(),
    "crm_installations_unclear": frozenset(),
    "crm_installations_anomalies": frozenset(),
    "crm_scrape_up": frozenset({"source"}),
}


class Workload(NamedTuple):
    """A pod template, and the manifest that it is in."""

    manifest: Document
    template: Document

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def pod(self) -> Document:
        spec: Document = self.template["spec"]
        return spec

    @property
    def container(self) -> Document:
        (only,) = self.pod["containers"]
        assert isinstance(only, dict)
        return only

    @property
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.template["metadata"]["labels"]
        return found


def documents(file: Path) -> list[Document]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document]


def is_manifest(document: Document) -> bool:
    """Whether it goes to Kubernetes by itself: neither kustomize's own, nor a patch of a part."""
    return not str(document["apiVersion"]).startswith("kustomize.config.k8s.io")


def plain_manifests() -> Iterator[tuple[Path, Document]]:
    """Every complete manifest, as it is written: the base, and what an overlay adds."""
    for file in sorted(CRONJOBS.rglob("*.yaml")):
        patches = file.parent.name in {"dev", "production"}
        for document in documents(file):
            if is_manifest(document) and not patches:
                yield file, document


def workloads() -> list[Workload]:
    """Every pod template of the plain manifests."""
    return [found for _, manifest in plain_manifests() if (found := workload(manifest)) is not None]


def workload(manifest: Document) -> Workload | None:
    """The pod template in a manifest, if it has one."""
    if manifest["kind"] == "CronJob":
        return Workload(manifest, manifest["spec"]["jobTemplate"]["spec"]["template"])
    if manifest["kind"] == "Deployment":
        return Workload(manifest, manifest["spec"]["template"])
    return None


def leaves() -> dict[str, Any]:
    """Every command that does something, by its path: `bookings expire`, …"""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(command, TyperGroup):
            for name, child in command.commands.items():
                yield from walk(child, (*path, name))
        else:
            yield " ".join(path), command

    return dict(walk(typer.main.get_command(app), ()))


def command_of(args: list[str]) -> tuple[str, list[str]]:
    """Split a container's arguments into the command's path and its options."""
    known = leaves().keys()
    for length in (2, 1):
        if (path := " ".join(args[:length])) in known:
            return path, args[length:]
    raise AssertionError(f"crmctl has no command {args}")


def tool(name: str) -> str | None:
    """Where a program is, or None."""
    return shutil.which(name)
