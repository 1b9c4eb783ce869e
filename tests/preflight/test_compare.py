"""Facts that differ between nodes: the minority has the finding, or all have it where there is no majority."""

from __future__ import annotations

from holdfast.findings import Severity
from holdfast.preflight.compare import compare

GOOD = {"torch": "2.15.0+cu132", "NCCL": "2.30.7", "CPUs": "224"}
OLD = {**GOOD, "torch": "2.14.1+cu130"}


def test_equal_nodes_have_no_finding() -> None:
    assert compare(dict.fromkeys(range(64), GOOD)) == {}
    assert compare({0: GOOD}) == {}
    assert compare({}) == {}


def test_the_minority_has_the_finding_with_the_value_of_the_majority() -> None:
    found = compare({node: OLD if node == 5 else GOOD for node in range(12)})
    [(node, [finding])] = found.items()
    assert node == 5
    assert (finding.code, finding.severity, finding.where) == ("node-differs", Severity.ERROR, "torch")
    assert finding.what == "torch is 2.14.1+cu130 on this node, and 2.15.0+cu132 on 11 of 12"
    assert finding.evidence == (
        "2.15.0+cu132: node0, node1, node2, node3, node4, node6, node7, node8 and 3 more",
        "2.14.1+cu130: node5",
    )


def test_without_a_majority_each_node_has_the_finding() -> None:
    found = compare({0: GOOD, 1: OLD})
    assert [*found] == [0, 1]
    assert found[0][0].what == ("torch is 2.15.0+cu132 on this node; the 2 nodes have 2 values, none on more than half")
    assert [*compare({0: GOOD, 1: GOOD, 2: OLD, 3: OLD})] == [0, 1, 2, 3]
    assert [*compare({0: GOOD, 1: GOOD, 2: {"torch": "1"}, 3: {"torch": "2"}})] == [0, 1, 2, 3]


def test_each_label_is_judged_apart_by_its_severity() -> None:
    nodes = {0: GOOD, 1: GOOD, 2: {**OLD, "CPUs": "16"}}
    assert [(finding.where, finding.severity) for finding in compare(nodes)[2]] == [
        ("torch", Severity.ERROR),
        ("CPUs", Severity.WARNING),
    ]


def test_a_fact_that_a_node_could_not_read_is_no_difference() -> None:
    assert compare({0: GOOD, 1: GOOD, 2: {"torch": "2.15.0+cu132"}}) == {}
