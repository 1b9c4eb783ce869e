"""The generated reference is complete."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import holdfast
from holdfast.control.policy import FailureKind

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(holdfast.__file__).parent
NO_CODES = {"events", "protocol", "control", "agent", "diagnose"}
"""Folders whose words with hyphens are names of events, failures, and rules of diagnosis."""
OTHER_WORDS = {
    "exit-reason",
    "log-unreplicated",
    "restore-scratch",
    "dist-packages",
    "site-packages",
    "holdfast-checkpoint",
    "holdfast-checkpoint-store",
    "holdfast-peer-copy",
    "holdfast-recall",
    "holdfast-seal",
    "holdfast-staging",
    "holdfast-tidy",
    "per-rank",
    "per-node",
    "accelerate-launch",
    "in-place",
    "jobset-controller-manager",
    "kubeflow-trainer-controller-manager",
    "kueue-controller-manager",
    "mpi-operator",
    "oke-roce",
    "rdma-shared",
    "training-operator",
    "unicode-escape",
    "util-linux",
}


def test_findings_page_lists_every_code_in_the_source() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "_ext" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = reference.findings_page()
    written = {
        node.value
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in NO_CODES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"[a-z]+(-[a-z]+)+", node.value)
    }
    codes = written - OTHER_WORDS | set(map(str, FailureKind))
    assert {code for code in codes if f"`{code}`" not in page} == set()
