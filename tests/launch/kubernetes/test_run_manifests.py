"""Manifests: each like its golden file, and true to the data behind it whatever the job.

`HOLDFAST_WRITE_GOLDEN=1 pytest tests/launch/kubernetes` writes the files anew; read their diff.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.golden import WRITE
from tests.job.loading import make_job
from tests.launch.kubernetes.golden_cases import CASES, FABRIC_CASES, Case, of_kind, render_context, tree_context

from holdfast.job.spec import JOB_NAME_PATTERN
from holdfast.launch.kubernetes.manifests.run_manifests import render, render_tree
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, to_plain, to_yaml
from holdfast.launch.kubernetes.object_names import MAX_NAME_LENGTH, ObjectNames
from holdfast.launch.kubernetes.preflight.dry_run_pods import pods_of

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", CASES)
def test_manifest_is_like_its_golden_file(name: str) -> None:
    rendered, path = render(render_context(CASES[name])).text, GOLDEN / f"{name}.yaml"
    if WRITE:
        path.write_text(rendered)
    assert rendered == path.read_text()


@pytest.mark.parametrize("name", ["jobset-tcp", "jobset-tcp-bare", "mpijob-tcp"])
def test_tree_is_like_its_golden_file(name: str) -> None:
    rendering, path = render_tree(tree_context(CASES[name]), b"code"), GOLDEN / "trees" / f"{name}.yaml"
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(rendering.text)
    assert rendering.text == path.read_text()
    assert list(yaml.safe_load_all(rendering.text)) == rendering.objects


@pytest.mark.parametrize("name", CASES)
def test_tree_has_what_a_start_creates_except_values_that_only_a_start_knows(name: str) -> None:
    """Neither a key nor what outlives the run, which would be deleted with the tree."""
    tree, started = (
        {(each["kind"], each["metadata"]["name"]): each for each in rendering.objects}
        for rendering in (render_tree(tree_context(CASES[name]), b"code"), render(render_context(CASES[name])))
    )
    own = {("ConfigMap", "llama-000000-code"), ("Role", "llama-000000-keys"), ("RoleBinding", "llama-000000-keys")}
    missing = {
        ("ConfigMap", "holdfast-quarantine"),
        ("PersistentVolumeClaim", "made"),
        ("Secret", "llama-000000-keys"),
        ("Secret", "llama-000000-secrets"),
    }
    assert tree.keys() - started.keys() <= own
    assert started.keys() - tree.keys() <= missing
    assert all("stringData" not in each and "data" not in each for (kind, _), each in tree.items() if kind == "Secret")


@pytest.mark.parametrize("name", CASES)
def test_text_reads_back_as_the_objects_that_are_sent(name: str) -> None:
    rendering = render(render_context(CASES[name]))
    assert list(yaml.safe_load_all(rendering.text)) == rendering.objects


@pytest.mark.parametrize("name", [name for name in FABRIC_CASES if name != "tcp"])
def test_fabric_adds_to_a_manifest_what_its_golden_file_says(name: str) -> None:
    """The difference from the same run over TCP."""
    case, path = FABRIC_CASES[name], GOLDEN / "fabrics" / f"{name}.diff"
    plain = Case(job={**case.job, "fabric": "tcp"})
    lines = [render(render_context(each)).text.splitlines() for each in (plain, case)]
    added = "".join(f"{line}\n" for line in list(difflib.unified_diff(*lines, n=1, lineterm=""))[2:])
    added = re.sub(r"(?m)^@@.*", "@@", added)
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(added)
    assert added == path.read_text()


@pytest.mark.parametrize("workload", ["trainjob", "pytorchjob", "mpijob", "leaderworkerset"])
@pytest.mark.parametrize("name", FABRIC_CASES)
def test_nodes_reach_the_fabric_alike_whatever_their_kind_of_object(name: str, workload: str) -> None:
    def access(case: Case) -> list[object]:
        (pod, *_) = [
            each
            for each in pods_of(render_context(case), render(render_context(case)).objects)
            if each["metadata"]["labels"]["holdfast/part"] == "node"
        ]
        (container,) = pod["spec"]["containers"]
        folders = {each["name"] for each in pod["spec"]["volumes"] if "hostPath" in each}
        return [
            {key: text for key, text in pod["metadata"].get("annotations", {}).items() if "kueue" not in key},
            container["resources"],
            folders,
            pod["spec"].get("resourceClaims"),
            pod["spec"].get("hostNetwork"),
            [each for each in pod["spec"].get("initContainers", ()) if each.get("restartPolicy") == "Always"],
        ]

    assert access(of_kind(FABRIC_CASES[name], workload)) == access(FABRIC_CASES[name])


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)
    assert {path.stem for path in (GOLDEN / "fabrics").iterdir()} == set(FABRIC_CASES) - {"tcp"}


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["on", "No", "null", "1e3", "0x1", "1:30", "- a", "a: b", "# c", "a\nb\n", "{", "~", "2026-11-21"]),
)
keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
nodes = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner.map(lambda node: node if node is not None else 0), max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        inner.map(lambda node: Commented(node, "for reasons: # that are many")),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(keys, nodes, min_size=1, max_size=4))
def test_any_data_reads_back_as_it_was(node: dict[str, Any]) -> None:
    node = {"kind": "Thing", **node}
    text = to_yaml([node])
    assert list(yaml.safe_load_all(text)) == [to_plain(node)]
    assert yaml.safe_load(text) == to_plain(node)
    assert to_yaml([node]) == text


LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.slow
@settings(deadline=None)
@given(name=st.from_regex(JOB_NAME_PATTERN, fullmatch=True), count=st.integers(1, 99_999))
@example(name="a" * 40, count=99_999)
def test_every_name_is_a_dns_label_however_long_the_jobs(name: str, count: int) -> None:
    names = ObjectNames.of(make_job({"command": "true", "name": name}), "k3m9tz")
    assert len(names.name) <= MAX_NAME_LENGTH
    longest = (f"{names.name}-node-0-{count}-abcde", f"{names.name}-node-{count}-0-abcde", names.controller, names.keys)
    for each in (names.name, names.secrets, *longest):
        assert LABEL.fullmatch(each), each
        assert len(each) <= 63


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    env=st.dictionaries(st.from_regex(r"[A-Z][A-Z0-9_]{0,10}", fullmatch=True), st.text(st.characters(codec="utf-8"))),
    words=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=3),
)
def test_whatever_the_job_says_reaches_the_cluster_word_for_word(env: dict[str, str], words: list[str]) -> None:
    env = {f"X{name}": value.replace("\0", "") for name, value in env.items()}
    asked = render_context(Case(job={"env": env, "command": words, "launch": "per-node"}, target={"agent": False}))
    rendering = render(asked)
    assert list(yaml.safe_load_all(rendering.text)) == rendering.objects
    (owner,) = (each for each in rendering.objects if each["kind"] == "JobSet")
    container = owner["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert [word.replace("$$(", "$(") for word in container["command"]] == words
    assert {each["name"] for each in container["env"]} >= set(env)


def test_a_commands_own_variables_are_left_alone() -> None:
    (owner, *_) = render(render_context(CASES["jobset-tcp-no-agent"])).objects
    container = owner["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-1] == "$$(HOME)"


def test_secrets_are_named_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_show")
    for case in CASES.values():
        rendering = render(render_context(case))
        assert "hf_do_not_show" not in rendering.text
        for each in rendering.objects:
            if each["kind"] == "Secret":
                assert set(each["stringData"].values()) == {"(set when the run is started)"}
