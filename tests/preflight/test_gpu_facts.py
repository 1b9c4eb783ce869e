"""What nodes are compared by."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.preflight.conftest import MakeNode
from tests.preflight.gpu_nodes import NVLINK, SMI, board, links

from holdfast.findings import CheckOutcome
from holdfast.preflight.gpu_facts import gpu_facts
from holdfast.preflight.node_view import NodeView
from holdfast.preflight.run_checks import GPU_CHECKS, run_checks
from holdfast.protocol.node_requirements import NodeRequirements


def test_facts_of_a_board(node: MakeNode) -> None:
    assert gpu_facts(node(commands={SMI: board(), NVLINK: links()}, gpus=8)) == {
        "NVIDIA driver": "590.44.01",
        "CUDA version of the driver": "13.1",
        "GPUs": "8 × NVIDIA H100 80GB HBM3",
        "MIG mode": "Disabled",
        "ECC mode": "Enabled",
        "power limit of a GPU, W": "700",
        "PCIe lanes of a GPU": "16",
        "active NVLinks of a GPU": "18",
    }


def test_what_cannot_be_read_is_left_out(node: MakeNode) -> None:
    assert gpu_facts(node()) == {}
    assert gpu_facts(node(gpus=8)) == {}
    changes = {0: {"current_ecc": "Disabled", "current_mig": "N/A", "product_name": "NVIDIA A100-SXM4-80GB"}}
    facts = gpu_facts(node(commands={SMI: board(changes, gpus=2)}, gpus=2))
    assert facts["GPUs"] == "1 × NVIDIA A100-SXM4-80GB, 1 × NVIDIA H100 80GB HBM3"
    assert (facts["ECC mode"], facts["MIG mode"]) == ("Disabled, Enabled", "Disabled")
    assert "active NVLinks of a GPU" not in facts


def test_all_checks_and_facts_share_one_call_of_each_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.xml").write_text(board())
    (tmp_path / "links.txt").write_text(links())
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f"case $1 in -q) cat {tmp_path}/report.xml;; *) cat {tmp_path}/links.txt;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    view = NodeView(wanted=NodeRequirements(gpus=8, processes=8))
    results = {result.check: result for result in run_checks(view, GPU_CHECKS, 30.0) if result.check.startswith("gpu")}
    assert gpu_facts(view)["active NVLinks of a GPU"] == "18"
    assert len(results) == 10
    assert {result.outcome for result in results.values()} == {CheckOutcome.PASSED}
    assert sorted((tmp_path / "calls").read_text().splitlines()) == ["-q -x", "nvlink -s"]
