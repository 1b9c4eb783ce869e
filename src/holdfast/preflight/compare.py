"""Finds nodes whose software or hardware differs from that of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from holdfast.findings import Finding, Owner, Severity

Facts = Mapping[str, str]
"""What must be equal on all nodes of a run: label for users → value."""

SEVERITIES: Mapping[str, Severity] = {
    "torch": Severity.ERROR,
    "CUDA": Severity.ERROR,
    "NCCL": Severity.ERROR,
    "GPUs": Severity.ERROR,
}
"""What ranks refuse or hang on if it differs; all else makes a run slow at worst."""
SHOWN = 8
"""Values that the evidence lists, and nodes that it names for each."""


def compare(facts: Mapping[int, Facts]) -> Mapping[int, tuple[Finding, ...]]:
    """The findings of each node, by number, whose facts differ from those of most nodes; lacking one is no difference.

    Where no value is that of more than half of the nodes, each node has the finding.
    """
    found: dict[int, list[Finding]] = {}
    for label in dict.fromkeys(label for of_node in facts.values() for label in of_node):
        values = {node: of_node[label] for node, of_node in facts.items() if label in of_node}
        for node, finding in _differing(label, values):
            found.setdefault(node, []).append(finding)
    return {node: tuple(findings) for node, findings in sorted(found.items())}


def _differing(label: str, values: Mapping[int, str]) -> Iterator[tuple[int, Finding]]:
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return
    common, number = counts[0]
    whole = len(values)
    nodes = {value: [node for node, its in values.items() if its == value] for value, _ in counts[:SHOWN]}
    evidence = tuple(f"{value}: {name_nodes(having)}" for value, having in nodes.items())
    for node, value in values.items():
        if 2 * number <= whole:
            what = (
                f"{label} is {value} on this node; the {whole} nodes have {len(counts)} values, none on more than half"
            )
        elif value != common:
            what = f"{label} is {value} on this node, and {common} on {number} of {whole}"
        else:
            continue
        yield (
            node,
            Finding(
                code="node-differs",
                severity=SEVERITIES.get(label, Severity.WARNING),
                what=what,
                where=label,
                evidence=evidence,
                remedy="Give all nodes the same image, environment and kind of machine, or run without this node.",
                owner=Owner.CLUSTER,
            ),
        )


def name_nodes(nodes: Sequence[int]) -> str:
    """The first of some nodes by name, and how many more there are."""
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    return ", ".join(f"node{node}" for node in sorted(nodes)[:SHOWN]) + more
