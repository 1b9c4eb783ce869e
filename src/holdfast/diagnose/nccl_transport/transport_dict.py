"""The transport as plain lists and strings, ready for JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.diagnose.nccl_transport.link_matrix import Cells, node_cells
from holdfast.diagnose.nccl_transport.transport_report import Communicator, TransportReport

MAX_LINKS = 4096
"""A communicator with more connections than this is given by pairs of nodes alone; `links_left_out` reports it."""


def to_dict(transport: TransportReport) -> dict[str, Any]:
    """All of it, as msgspec's and the standard library's JSON encoders accept it."""
    plain: dict[str, Any] = msgspec.to_builtins(
        {
            "verdict": transport.verdict,
            "findings": transport.findings,
            "versions": transport.versions,
            "processes": transport.processes,
            "info_lines": transport.info_lines,
            "truncated_lines": transport.truncated_lines,
            "unassigned_links": transport.unassigned_links,
            "left_out": transport.left_out,
        }
    )
    plain["communicators"] = [_communicator(communicator, transport) for communicator in transport.communicators]
    return plain


def _communicator(communicator: Communicator, transport: TransportReport) -> dict[str, Any]:
    short = len(communicator.links) <= MAX_LINKS
    return {
        "name": communicator.name,
        "id": communicator.id,
        "size": communicator.size,
        "missing": [[gap[0], gap[-1]] for gap in communicator.missing],
        "inferred": communicator.inferred,
        "members": msgspec.to_builtins(communicator.members),
        "nodes": _pairs(node_cells(communicator, transport.processes)),
        "links": [
            {
                "from": link.sender,
                "to": link.receiver,
                "channels": [channel for channel in range(link.channels.bit_length()) if link.channels >> channel & 1],
                **msgspec.to_builtins(link.link_type),
            }
            for link in (communicator.links if short else ())
        ],
        "links_left_out": 0 if short else len(communicator.links),
    }


def _pairs(cells: Cells) -> list[dict[str, Any]]:
    return [{"from": sender, "to": receiver, "via": dict(labels)} for (sender, receiver), labels in cells.items()]
