"""Lists what agents monitor on their nodes, and what the nodes lack for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.events import to_ranges
from holdfast.report.formatting import format_ranges, sanitize
from holdfast.report.run_status import NodeStatus


def monitor_lines(nodes: Iterable[NodeStatus]) -> Iterator[str]:
    """Lines for each group of nodes that have the same sources."""
    groups: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], list[int]] = {}
    for node in nodes:
        if node.sources:
            groups.setdefault((node.sources, tuple(node.missing_sources.items())), []).append(node.node)
    if not groups:
        yield "monitors  none has started"
    for (sources, missing), numbers in groups.items():
        which = format_ranges(to_ranges(numbers))
        yield sanitize(f"monitors  node{'s' if len(numbers) > 1 else ''} {which}: {', '.join(sources)}")
        for source, reason in missing:
            yield sanitize(f"          not read: {source} ({reason})")
