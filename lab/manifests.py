"""The operators' manifests for a cluster: CRDs, roles and webhooks, read from the operators' own modules.

They go through kustomize rather than being read raw: kustomize adds prefixes to names and selectors to webhooks.
Deployments and Services are left out, since the lab runs the operators itself.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from lab.cache import cached_dir
from lab.toolchain import CONTROLPLANE, OPERATORS, program_folder, source_folder, sources

COMPONENT = "lab.holdfast/component"
"""The label that names an object's operator."""

_KINDS = (
    "Namespace",
    "CustomResourceDefinition",
    "ServiceAccount",
    "ClusterRole",
    "Role",
    "ClusterRoleBinding",
    "RoleBinding",
    "ValidatingWebhookConfiguration",
    "MutatingWebhookConfiguration",
)
"""Kinds, in creation order."""


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """An operator, and the folders of its module that go to kustomize."""

    component: str
    module: str
    folders: tuple[str, ...]
    namespace: str
    """Namespace of its objects that name none."""
    leaves_out: tuple[str, ...] = ()
    """Its objects that another operator provides in the version that we use."""


PUBLISHERS = (
    Publisher(component="kueue", module="sigs.k8s.io/kueue", folders=("config/default",), namespace="kueue-system"),
    Publisher(component="jobset", module="sigs.k8s.io/jobset", folders=("config/default",), namespace="jobset-system"),
    Publisher(
        component="trainer",
        module="github.com/kubeflow/trainer/v2",
        folders=("manifests/base/crds", "manifests/base/rbac", "manifests/base/webhook"),
        namespace="kubeflow-system",
    ),
    Publisher(
        component="training-operator",
        module="github.com/kubeflow/training-operator",
        folders=("manifests/overlays/standalone",),
        namespace="kubeflow",
        # v1; mpi-operator has v2beta1.
        leaves_out=("mpijobs.kubeflow.org",),
    ),
    Publisher(
        component="mpi-operator",
        module="github.com/kubeflow/mpi-operator",
        folders=("manifests/base",),
        namespace="mpi-operator",
    ),
    Publisher(component="lws", module="sigs.k8s.io/lws", folders=("config/default",), namespace="lws-system"),
)


@dataclass(frozen=True, kw_only=True)
class PublishedCrds:
    """CRDs of an operator that the lab does not run: the API server judges its objects, and nothing acts on them."""

    component: str
    module: str
    """With its version."""
    checksum: str
    """That of Go's checksum database."""
    files: tuple[str, ...]


CRDS_ONLY = (
    PublishedCrds(
        component="prometheus-operator",
        module="github.com/prometheus-operator/prometheus-operator@v0.85.0",
        checksum="h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        files=(
            "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
            "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        ),
    ),
)

_STAGES = (
    "node/fast/node-initialize",
    "node/heartbeat-with-lease/node-heartbeat-with-lease",
    "pod/fast/pod-ready",
    "pod/fast/pod-delete",
)
"""KWOK's stages, except its stage for pods of Jobs, which completes them immediately; the lab has its own."""

_OWN_STAGES = Path(__file__).with_name("stages.yaml")


def collected_manifests() -> Path:
    """The folder with objects.json and stages.yaml, for all operators."""
    ingredients = [*sources(OPERATORS), Path(__file__).read_bytes(), _OWN_STAGES.read_bytes()]
    return cached_dir("manifests", ingredients, _collect)


def published_objects(folder: Path) -> list[dict[str, Any]]:
    """Every object of every operator; webhooks still name Services, which the lab does not have."""
    return json.loads((folder / "objects.json").read_text())


def _collect(folder: Path) -> None:
    stages = source_folder(OPERATORS, "sigs.k8s.io/kwok") / "kustomize" / "stage"
    texts = [(stages / f"{name}.yaml").read_text() for name in _STAGES]
    (folder / "stages.yaml").write_text("\n---\n".join([*texts, _OWN_STAGES.read_text()]))
    seen: dict[tuple[str, str, str], dict[str, Any]] = {}
    for publisher in PUBLISHERS:
        for one in (_namespace(publisher), *_objects(publisher)):
            seen.setdefault((one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]), one)
    for crds in CRDS_ONLY:
        base = source_folder(OPERATORS, crds.module, checksum=crds.checksum)
        for name in crds.files:
            one = yaml.load((base / name).read_text(), yaml.CSafeLoader)
            seen[one["kind"], "", one["metadata"]["name"]] = _adapted(one, crds.component)
    ordered = sorted(seen.values(), key=lambda one: _KINDS.index(one["kind"]))
    (folder / "objects.json").write_text(json.dumps(ordered))


def _namespace(publisher: Publisher) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": publisher.namespace, "labels": {COMPONENT: publisher.component}},
    }


def _objects(publisher: Publisher) -> Iterator[dict[str, Any]]:
    base = source_folder(OPERATORS, publisher.module)
    for folder in publisher.folders:
        for one in yaml.load_all(_kustomize(base / folder), yaml.CSafeLoader):
            if one and one["kind"] in _KINDS and one["metadata"]["name"] not in publisher.leaves_out:
                yield _adapted(one, publisher.component, publisher.namespace)


def _adapted(one: dict[str, Any], component: str, namespace: str = "") -> dict[str, Any]:
    one["metadata"].setdefault("labels", {})[COMPONENT] = component
    if one["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
        one["metadata"].setdefault("namespace", namespace)
    for subject in one.get("subjects", ()):
        if subject["kind"] == "ServiceAccount":
            subject.setdefault("namespace", namespace)
    if one["kind"] == "CustomResourceDefinition":
        for version in one["spec"]["versions"]:
            version["schema"] = _without_descriptions(version["schema"])
        if component in ("jobset", "lws"):
            # They serve one version, and nothing at the path that their conversion names.
            one["spec"].pop("conversion", None)
    return one


def _without_descriptions(schema: Any, *, names: bool = False) -> Any:
    """The schema without descriptions, nine tenths of its size; `names` if the keys are property names."""
    if isinstance(schema, dict):
        schema = cast("dict[str, Any]", schema)
        return {
            key: _without_descriptions(value, names=key == "properties" and not names)
            for key, value in schema.items()
            if names or key != "description" or not isinstance(value, str)
        }
    if isinstance(schema, list):
        schema = cast("list[Any]", schema)
        return [_without_descriptions(value) for value in schema]
    return schema


def _kustomize(folder: Path) -> str:
    # Use the full path: kustomize takes one that starts with `github.com` for a URL.
    program = program_folder(CONTROLPLANE) / "kubectl"
    done = subprocess.run([program, "kustomize", folder], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise failure(
            "lab-manifests-unreadable",
            "an operator's manifests could not be built",
            exit_code=ExitCode.INTERNAL,
            where=str(folder),
            evidence=tuple(done.stderr.splitlines()),
            remedy="The Go module cache may be corrupt: run `go clean -modcache`, and try again.",
            owner=Owner.HOLDFAST,
        )
    return done.stdout
