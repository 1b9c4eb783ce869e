"""What anybody may have put into a file: one bad input costs neither the others nor the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.cli.diagnose import render_diagnosis
from holdfast.diagnose.diagnosis import to_dict
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.pipeline import diagnose
from holdfast.diagnose.redact import redact_diagnosis

EVICTED = "The node was low on resource: ephemeral-storage."
POD = f'apiVersion: v1\nkind: Pod\nmetadata: {{name: w-3}}\nstatus: {{reason: Evicted, message: "{EVICTED}"}}\nodd: '
TAGGED = [
    "!!timestamp foo",
    "!!int ''",
    "!!float ''",
    "!!bool foo",
    "!!binary é",
    "!!int " + "9" * 5000,
    "!!set x",
    "!!python/object/apply:os.system [exit]",
]


@pytest.mark.parametrize("odd", TAGGED, ids=range(len(TAGGED)))
def test_tag_that_its_value_belies_costs_nothing_of_a_pod(tmp_path: Path, odd: str) -> None:
    (tmp_path / "pod.yaml").write_text(POD + odd + "\n")
    answer = diagnose(LogInput((tmp_path,)))
    assert answer.failure_class is FailureClass.STORAGE
    assert answer.first_failure is not None
    assert answer.first_failure.node == "w-3"


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path) -> None:
    pods = f"items: [{', '.join(['*pod'] * 100_000)}]"
    rows = ", ".join(["{type: x}"] * 10_000)
    (tmp_path / "pods.yaml").write_text(
        f"apiVersion: v1\nkind: List\nx: &pod {{kind: Pod, status: {{conditions: [{rows}]}}}}\n{pods}\n"
    )
    assert any(b"&pod" in block.data for block in LogInput((tmp_path,)).chunks())  # as text


def test_half_a_surrogate_pair_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(
        '{"message": {"message": "ValueError: bad \\ud800", "extraInfo": {"py_callstack": ""}}}'
    )
    (tmp_path / "lines.log").write_text('{"log": "KeyError: torn \\ud83d", "time": "2026-11-20T10:00:00Z"}\n')
    for rank in range(2):
        dump = {"entries": [{"profiling_name": f"nccl:a\udc80{rank}", "collective_seq_id": 1}], "pg_config": {}}
        (tmp_path / f"trace_rank_{rank}").write_text(json.dumps(dump))
    answer = diagnose(LogInput((tmp_path,)))
    assert msgspec.json.encode(to_dict(answer))
    assert "ValueError: bad ?" in render_diagnosis(answer).plain
    assert "KeyError: torn ?" in diagnose(LogInput((tmp_path / "lines.log",))).what


words = st.text(max_size=6) | st.sampled_from(
    ["\ud800", "KeyError: x", "9" * 20, "-1", "OOMKilled", "True", "\0", "\x1b[2J"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words | st.sampled_from([10**30, 1e308])
NAMES = """
items kind metadata name status conditions containerStatuses state lastState terminated reason message exitCode rank
finishedAt extraInfo py_callstack timestamp errorCode log involvedObject lastTimestamp type entries time ranks line
pg_config pg_status frames collective_seq_id profiling_name input_sizes time_created_ns last_enqueued_collective
"""
names = st.sampled_from(NAMES.split())
trees = st.recursive(
    scalars,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(names | words, below, max_size=4),
    max_leaves=12,
)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("error.json", {"message": "x"}),
    ("pods.json", {"apiVersion": "v1", "kind": "Pod"}),
    ("event.json", {"apiVersion": "v1", "kind": "Event", "items": [{"kind": "Event"}]}),
    ("trace_rank_0", {"pg_config": {}, "entries": []}),
    ("lines.log", {"log": "KeyError: x"}),
]
YAML = [
    *TAGGED,
    "[",
    "*a",
    "&a [*a]",
    "<<: {a: b}",
    "? [a]",
    '"\\ud800"',
    '"\\UFFFFFFFF"',
    "2026-13-45",
    "1:2:3",
    "!x y",
    "%",
]


def judged(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    answer = diagnose(LogInput((folder,)))
    assert render_diagnosis(redact_diagnosis(answer)).plain
    assert msgspec.json.encode(to_dict(answer))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "base"), KINDS, ids=[name for name, _ in KINDS])
def test_random_documents_are_answered(tmp_path: Path, name: str, base: dict[str, Any]) -> None:
    (tmp_path / "trace_rank_1").write_text('{"pg_config": {}, "entries": [{"collective_seq_id": 3}]}')

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.dictionaries(names, trees, max_size=5), st.booleans())
    def check(tree: dict[str, Any], over: bool) -> None:
        judged(tmp_path, name, json.dumps({**base, **tree} if over else {**tree, **base}).encode())

    check()


@pytest.mark.slow
def test_random_yaml_of_kubernetes_is_answered(tmp_path: Path) -> None:
    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(st.tuples(names, st.sampled_from(YAML) | words), max_size=4), st.binary(max_size=8))
    def check(fields: list[tuple[str, str]], rest: bytes) -> None:
        lines = "".join(f"{name}: {value}\n" for name, value in fields)
        judged(tmp_path, "pod.yaml", f"{POD}x\n{lines}".encode("utf-8", "surrogatepass") + rest)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("deep", [b"[", b'{"a":', b"- ", b"{a: "], ids=["list", "dict", "sequence", "mapping"])
def test_nesting_without_end_is_answered(tmp_path: Path, deep: bytes) -> None:
    for head in (b'{"apiVersion": "v1", "kind": "Pod", "x": ', b"apiVersion: v1\nkind: Pod\nx: ", b'{"pg_config": '):
        judged(tmp_path, "log", head + deep * 50_000)
