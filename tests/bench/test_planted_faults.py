"""Faults that are planted on one of eight nodes, most of them real ones, are found there, and nothing on the others."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench.planted.kinds import KINDS
from bench.planted.probes import PROBE_KINDS
from bench.planted_faults import Outcome

from holdfast.launch.local import netns
from holdfast.preflight.run_checks import quick_checks
from holdfast.protocol.node_requirements import NodeRequirements

ROOT = Path(__file__).parents[2]
SOME = (
    "full disk",
    "host name is loopback",
    "interface without address",
    "other torch",
    "memlock",
    "NVLink down",
    "RDMA adapter missing",
    "RoCE GID",
)
"""Real ones in namespaces, one that only the comparison finds, GPUs, InfiniBand and RoCE."""
CLEAN = 3
"""One run on nodes without a fault of each base."""


@pytest.mark.root
@pytest.mark.slow
def test_planted_faults_are_found_on_their_nodes_only(tmp_path: Path) -> None:
    if reason := netns.unavailable():
        pytest.skip(reason)
    kinds = [word for name in SOME for word in ("--kind", name)]
    answer = tmp_path / "results.json"
    options = ("--part=planted", "--part=clean", "--forked", *kinds, f"--clean={CLEAN}", "--json", answer)
    done = subprocess.run(
        [sys.executable, "-m", "bench.planted_faults", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    planted, clean = json.loads(answer.read_text())["results"]
    assert (planted["met"], planted["figure"]["value"]) == ("yes", len(SOME)), done.stdout
    assert (clean["met"], clean["figure"]["value"]) == ("yes", 0), done.stdout


def test_a_finding_on_another_node_is_not_right() -> None:
    right = Outcome(kind="small /dev/shm", planted=3, found=(3,), code="shared-memory-small", stops=False, took_s=1.0)
    assert right.right
    assert not replace(right, found=()).right
    assert not replace(right, found=(3, 4)).right
    assert not replace(right, others=("node4: /dev/shm has 1 MiB",)).right


def test_each_kind_names_a_check_that_exists() -> None:
    every = quick_checks(NodeRequirements(gpus=8, network="IB"))
    names = {check.__name__.replace("_", "-") for check in every} | {"comparison"}
    assert [kind.name for kind in KINDS if kind.check not in names] == []
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_page_lists_each_kind() -> None:
    page = (ROOT / "docs/preflight.md").read_text()
    rows = [f"| {kind.name} | {kind.how} | {kind.check} | {kind.code} | " for kind in KINDS]
    rows += [f"| {kind.name} | {kind.how} | probe-{kind.stage} | probe-{kind.stage} | " for kind in PROBE_KINDS]
    assert [row for row in rows if row not in page] == []
