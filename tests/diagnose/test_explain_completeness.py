"""Whatever code a person can be shown, `holdfast explain` knows; and no class that was ever given is renamed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.control.policy import FailureKind
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.knowledge.index import find
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.combinations import COMBINATIONS

SOURCE = Path(holdfast.__file__).parent
CODE = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
CODE_FIRST = {"failure", "_error", "_finding"}
"""Functions whose first argument is a code."""
CLASSES = """
acs/iommu|collective mismatch (desync)|driver/peermem|firewall/networkpolicy|gdr-missing|gpu-xid|hang-unknown
memlock/ulimit|nan/data|mtu/pfc/roce-loss|oom-gpu|oom-host|rank-count mismatch|rdma-device-missing|rendezvous/dns
shm-too-small|straggler|tcp-fallback|version-mismatch|wrong-interface|other|program-error|storage|preempted|killed
node-lost|not-started|unknown
"""
"""Labels that incidents, scripts and people hold; more may come."""


def written_codes() -> Iterator[str]:
    """Every code that is given by name as text, also where it is one of two, and those of calls of `CODE_FIRST`."""
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
            if isinstance(call.func, ast.Name) and call.func.id in CODE_FIRST:
                given += call.args[:1]
            for value in given:
                for node in ast.walk(value):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
                        yield node.value


def explained(code: str) -> bool:
    return code in {row.code for row in find(code)}


@pytest.mark.slow
def test_every_code_in_the_source_is_explained() -> None:
    codes = {*written_codes()}
    assert len(codes) > 200
    unexplained = sorted(code for code in codes if not explained(code))
    assert unexplained == [], "a new code gets its row in a *_findings.py of diagnose/knowledge"


@pytest.mark.parametrize(
    "codes",
    [
        [*FailureKind],
        [*FailureClass],
        [*RULES],
        [joint.code for joint in COMBINATIONS],
        [one for one in FabricOutcome if one is not FabricOutcome.UNKNOWN],
        ["driver-mismatch", "plugin-mismatch"],
    ],
    ids=["failures of a run", "classes", "rules", "rules together", "verdicts on the fabric", "differences by name"],
)
def test_every_kind_of_code_is_explained(codes: list[str]) -> None:
    assert [code for code in map(str, codes) if not explained(code)] == []


def test_no_class_is_renamed() -> None:
    assert set(re.split(r"[|\n]", CLASSES.strip())) - {one.value for one in FailureClass} == set()
