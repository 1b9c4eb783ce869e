"""Renders the transport as text: the verdict, a matrix for each communicator, and what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from holdfast.diagnose.nccl_transport.link_matrix import Cells, node_cells, rank_cells
from holdfast.diagnose.nccl_transport.merge import format_numbers, format_ranges
from holdfast.diagnose.nccl_transport.transport_report import (
    Communicator,
    FabricOutcome,
    TransportKind,
    TransportReport,
)

_MAX_ROWS = 16
"""A matrix with more rows than this is summarised."""
_MAX_COMMUNICATORS = 6
_MIN_WIDTH = 40
_CORNER = "from\\to"
"""The heading of a matrix's rows and columns."""


def format_transport(transport: TransportReport, width: int = 120) -> list[str]:
    """The transport as text; no line is longer than `width`, except evidence and what it quotes."""
    verdict = transport.verdict
    text = [f"fabric: {verdict.outcome.value}: {verdict.what}"]
    if verdict.expected:
        text.append(f"  expected because {verdict.expected}")
    if verdict.missing:
        text.append(f"  would decide: {verdict.missing}")
    text += [f"  | {evidence}" for evidence in verdict.evidence]
    if verdict.remedy:
        text.append(f"  to do: {verdict.remedy}")
    text += [f"  {line}" for line in _facts(transport)]
    for communicator in transport.communicators[:_MAX_COMMUNICATORS]:
        text += ["", *_communicator(communicator, transport, max(width, _MIN_WIDTH))]
    others = transport.communicators[_MAX_COMMUNICATORS:]
    if others:
        alike = Counter((communicator.size, _format_link_types(communicator, transport)) for communicator in others)
        text += [
            "",
            *(f"and {count:,} of {size} ranks: {ways}" for (size, ways), count in alike.most_common(_MAX_ROWS)),
        ]
    for finding in transport.findings:
        if finding.code not in {FabricOutcome.TCP_FALLBACK.value, FabricOutcome.DEGRADED.value}:
            text += ["", f"{finding.code}: {finding.what}" + (f" ({finding.where})" if finding.where else "")]
            text += [f"  | {evidence}" for evidence in finding.evidence]
            text += [f"  to do: {finding.remedy}"] if finding.remedy else []
    return [*text, *_left_out(transport)]


def _facts(transport: TransportReport) -> Iterator[str]:
    facts = (
        ("NCCL", [f"{one.nccl}+cuda{one.cuda}" for one in transport.processes if one.nccl] or [*transport.versions]),
        ("CUDA driver", [one.driver for one in transport.processes if one.driver]),
        ("network", [one.network for one in transport.processes if one.network]),
        ("plugin", [one.plugin for one in transport.processes if one.plugin]),
        ("RDMA devices", [" ".join(one.hcas) for one in transport.processes if one.hcas]),
        ("met over", [one.bootstrap.partition(":")[0] for one in transport.processes if one.bootstrap]),
    )
    for name, values in facts:
        if values:
            shares = Counter(values).most_common(3)
            yield f"{name}: " + "; ".join(
                f"{value} ({count:,})" if len(shares) > 1 else value for value, count in shares
            )


def _communicator(communicator: Communicator, transport: TransportReport, width: int) -> Iterator[str]:
    nodes = {transport.processes[member.process].node for member in communicator.members}
    seen = len(communicator.members)
    count = f"{seen:,} of {communicator.size:,} ranks seen" if seen != communicator.size else f"{seen:,} ranks"
    split = f", id {communicator.id}" if communicator.id else ""
    yield f"{communicator.name}: {count} on {len(nodes):,} node{'s' if len(nodes) != 1 else ''}{split}"
    if communicator.missing:
        yield f"  missing: rank {format_ranges(communicator.missing)}"
    if communicator.inferred:
        yield f"  {communicator.inferred:,} connections could be another communicator's of the same processes"
    switched = sorted({link.sender for link in communicator.links if link.link_type.kind is TransportKind.COLLNET})
    if switched:
        yield f"  through the switch (CollNet): rank {format_numbers(switched)}"
    if not communicator.links:
        yield "  no connection seen"
    elif seen <= _MAX_ROWS:
        ranks = sorted({rank for link in communicator.links for rank in (link.sender, link.receiver) if rank >= 0})
        yield from _matrix([str(rank) for rank in ranks], rank_cells(communicator, transport.processes), width)
    else:
        cells = node_cells(communicator, transport.processes)
        yield from _matrix(sorted({name for pair in cells for name in pair}, key=_natural), cells, width)


def _format_link_types(communicator: Communicator, transport: TransportReport) -> str:
    cells = node_cells(communicator, transport.processes)
    return ", ".join(sorted({label for labels in cells.values() for label in labels})) or "no connection seen"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """node2 before node10."""
    parts: list[tuple[int, str]] = []
    word = ""
    for letter in name:
        if word and letter.isdigit() != word[-1].isdigit():
            parts.append((int(word) if word.isdecimal() else -1, word))
            word = ""
        word += letter
    return (*parts, (int(word) if word.isdecimal() else -1, word))


def _matrix(names: Sequence[str], between: Cells, width: int) -> Iterator[str]:
    shown = {pair: "/".join(label for label, _ in sorted(labels.items())) for pair, labels in between.items()}
    first = max(len(name) for name in (_CORNER, *names))
    columns = [max(len(name), *(len(shown.get((row, name), ".")) for row in names)) for name in names]
    if len(names) > _MAX_ROWS or 2 + first + sum(2 + column for column in columns) > width:
        yield from _summary(names, between)
        return
    rows = [(_CORNER, names), *((row, [shown.get((row, name), ".") for name in names]) for row in names)]
    for row, values in rows:
        cells = "".join(f"  {value:<{column}}" for value, column in zip(values, columns, strict=True))
        yield f"  {row:<{first}}{cells}".rstrip()


def _summary(names: Sequence[str], cells: Cells) -> Iterator[str]:
    """For each link type, how many pairs use it; the rarest with their names."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    channels: Counter[str] = Counter()
    for pair, labels in cells.items():
        label = "/".join(sorted(labels))
        where = "within" if pair[0] == pair[1] else "between"
        pairs.setdefault(f"{where} {label}", []).append(pair)
        channels[f"{where} {label}"] += sum(labels.values())
    for key in sorted(pairs, key=lambda key: -len(pairs[key])):
        where, _, label = key.partition(" ")
        joined = pairs[key]
        what = "nodes or ranks within themselves" if where == "within" else "pairs"
        yield f"  {label}: {len(joined):,} {what}, {channels[key]:,} channel ends" + _exceptions(joined, len(names))


def _exceptions(pairs: Sequence[tuple[str, str]], rows: int) -> str:
    if len(pairs) > max(4, rows // 8):
        return ""
    named = ", ".join(a if a == b else f"{a} -> {b}" for a, b in pairs[:4])
    return f": {named}{' …' if len(pairs) > 4 else ''}"


def _left_out(transport: TransportReport) -> Iterator[str]:
    for count, what in (
        (transport.truncated_lines, "connection lines were torn and count for nothing"),
        (transport.unassigned_links, "connections belong to processes whose set-up is not in the logs"),
        (transport.left_out, "lines were over the limit"),
    ):
        if count:
            yield f"{count:,} {what}"
