"""What the checks of some nodes found, folded from the events of the run that checks them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast.errors import ExitCode
from holdfast.events import AnyEvent, FindingRaised, NodeChecked, NodeProbed, RunFinished
from holdfast.events.probe_results import ProbeResult
from holdfast.findings import Finding
from holdfast.preflight import probe_verdict

_OF_ALL_NODES = ("node-differs", "node-check-hangs")
"""Findings that no report of a single node has; those of the probes, `probe-...`, are others."""


class NodeReports(NamedTuple):
    """What the checks of some nodes found."""

    checks: tuple[str, ...]
    """Names of the checks, in order."""
    nodes: Mapping[int, NodeChecked | None]
    """Of each node the report that it failed with, else its last; None for one that did not report."""
    findings: tuple[Finding, ...]
    """What the comparison of the nodes found, and checks that did not end."""
    passed: bool
    """Whether all nodes, or those that replaced them, could run the job."""
    probe: ProbeResult | None = None
    """What the probes measured, with `full`; it numbers the nodes in their order."""
    line_rate: str = ""
    """What the catalogue expects of the fabric, in Gbit/s."""


class NodeReportsFold:
    """Collects the reports of `nodes` nodes, event by event."""

    def __init__(self, nodes: int) -> None:
        self._nodes = dict[int, NodeChecked | None].fromkeys(range(nodes))
        self._findings = dict[Finding, None]()
        self._probes = defaultdict[int, list[NodeProbed]](list)
        """By number."""
        self._passed = False

    def add(self, event: AnyEvent) -> None:
        """Add the run's next event."""
        match event:
            case NodeChecked():
                known = self._nodes[event.node]
                self._nodes[event.node] = known if known and known.problem else event
            case NodeProbed():
                self._probes[event.number].append(event)
            case FindingRaised(finding=found) if found.code in _OF_ALL_NODES or found.code.startswith("probe-"):
                self._findings[found] = None  # a replacement has often the same
            case RunFinished():
                self._passed = event.exit_code == ExitCode.OK
            case _:
                pass

    def result(self, *, checks: tuple[str, ...], line_rate: str) -> NodeReports:
        """All that was reported; `checks` names the quick checks."""
        known = [reports for reports in self._probes.values() if probe_verdict.result_of(reports)]
        first = next(iter(known or self._probes.values()), None)
        nodes = self._nodes
        if first:
            checks = (*checks, *probe_verdict.CHECKS)
            outcomes = probe_verdict.probe_results(first)
            nodes = {
                node: report
                and msgspec.structs.replace(
                    report, results=(*report.results, *outcomes.get(node, probe_verdict.NOT_PROBED))
                )
                for node, report in nodes.items()
            }
        return NodeReports(
            checks=checks,
            nodes=nodes,
            findings=tuple(self._findings),
            passed=self._passed,
            probe=probe_verdict.result_of(first) if first else None,
            line_rate=line_rate,
        )
