"""Manifest files are read as kubectl reads them, and no text breaks the reader."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.launch.kubernetes.foreign.manifests import WORKLOADS, manifest

from holdfast.launch.kubernetes.foreign.foreign_kinds import read_workload
from holdfast.launch.kubernetes.foreign.lint import lint_manifest, lint_workload
from holdfast.launch.kubernetes.foreign.manifest_source import MAX_VALUES, ManifestObject, is_manifest, parse_manifest

TWO = """
apiVersion: v1
kind: Service
metadata: {name: llama}
---
---
# the job
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llama}
spec:
  pytorchReplicaSpecs:
    Master: &pods
      replicas: 1
      template:
        spec:
          containers:
          - name: pytorch
            resources:
              limits: {nvidia.com/gpu: 8}
    Worker:
      <<: *pods
      replicas: 3
"""
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 64))


def test_objects_of_several_documents_have_their_own_lines() -> None:
    linted = lint_manifest(TWO, "two.yaml")
    (workload,) = linted.workloads
    assert [(group.name, group.replicas) for group in workload.groups] == [("Master", 1), ("Worker", 3)]
    assert workload.nodes == 4
    (shm,) = (finding for finding in linted.findings if finding.code == "manifest-shm-default")
    assert shm.where == "two.yaml:18"


def test_list_gives_its_items() -> None:
    items = {"apiVersion": "v1", "kind": "List", "items": [manifest("Job"), manifest("PyTorchJob")]}
    assert len(lint_manifest(json.dumps(items), "list.json").workloads) == 2


@pytest.mark.parametrize("word", ["y", "N", "yes", "on", "OFF", "True"])
def test_words_that_are_booleans_to_kubectl_are_booleans(word: str) -> None:
    (read,) = parse_manifest(f"a: {word}\nb: '{word}'\n", "m.yaml").objects
    assert isinstance(read.data["a"], bool)
    assert read.data["b"] == word


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, f"more than {MAX_VALUES:,} values"),
        ("a: &a [*a]", "names no value before it"),
        ("a: *b", "names no value before it"),
        ("a: " + "[" * 500, "levels deep"),
        ("a: {" * 200, "levels deep"),
        ("? [a, b]\n: c\n", "plain word"),
        ("kind: {{ .Values.kind }}\n", "plain word"),
        ("{% if a %}\nkind: Job\n", "this is not YAML"),
        ("a: 1\na: 2\n", "written twice"),
        ('a: "\\U00110000"\n', "does not exist"),
        ("a: \x00\n", "special characters"),
        ("a: !!python/object/apply:os.system [true]\n---\nb: [\n", "this is not YAML"),
    ],
)
def test_hostile_text_gives_one_finding_with_a_line(text: str, words: str) -> None:
    started = time.monotonic()
    read = parse_manifest(text, "m.yaml")
    (finding,) = read.findings
    assert words in finding.what
    assert finding.where.startswith("m.yaml:")
    assert time.monotonic() - started < 10
    assert [each.code for each in lint_manifest(text, "m.yaml").findings] == ["bad-yaml"]


def test_unrendered_template_names_the_command_that_renders_it() -> None:
    (finding,) = parse_manifest("kind: {{ .Values.kind }}\n", "m.yaml").findings
    assert "helm template" in finding.remedy


WRONG: tuple[Any, ...] = (None, 7, True, "text", [], [None, 7], {}, {"a": None})


@pytest.mark.parametrize("kind", WORKLOADS)
def test_field_of_a_wrong_type_does_not_break_the_linter(kind: str) -> None:
    """Each field of each manifest, replaced by two values in turn: a manifest has many fields of each type."""
    text = json.dumps(manifest(kind))
    for number, path in enumerate(_paths(json.loads(text))):
        for wrong in (WRONG[number % len(WRONG)], WRONG[(number + 3) % len(WRONG)]):
            data = json.loads(text)
            *parents, last = path
            here = data
            for key in parents:
                here = here[key]
            here[last] = wrong
            workload = read_workload(ManifestObject(file="m.yaml", data=data, locations={}))
            assert all(finding.where for finding in (lint_workload(workload) if workload else ()))


def _paths(node: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [below for key, value in items for below in ((*path, key), *_paths(value, (*path, key)))]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (TWO, True),
        (json.dumps(manifest("Job"), indent=2), True),
        ("version: 1\ncommand: [python, train.py]\n", False),
        ("command:\n- sh\n- -c\n- |\n  cat <<E\n  apiVersion: v1\n", False),
        ("", False),
    ],
)
def test_manifest_is_told_from_a_job_file_by_its_api_version(text: str, is_one: bool) -> None:
    assert is_manifest(text) is is_one


@pytest.mark.parametrize(
    ("text", "severity", "words"),
    [
        ("apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: a}\n", "error", "not a kind that holdfast checks"),
        ("apiVersion: v1\nkind: Service\n", "error", "no object that creates the pods"),
        ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {}\n", "info", "no pod template"),
        (
            "apiVersion: apps/v1\nkind: StatefulSet\nspec: {template: {spec: {containers: [{image: postgres}]}}}\n",
            "info",
            "requests no GPUs",
        ),
    ],
)
def test_what_is_not_checked_is_named(text: str, severity: str, words: str) -> None:
    (finding,) = lint_manifest(text, "m.yaml").findings
    assert (finding.code, finding.severity.value) == ("manifest-not-checked", severity)
    assert words in finding.what
