"""Messages between a run's controller and its Monarch client (monarch_client.py): one JSON line each."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from msgspec import Struct

from holdfast.job.backend import NodeId
from holdfast.launch.local.node_processes import AgentStart
from holdfast.run_dir import RunDir, write_private

MESH_RECORD_NAME = "mesh.json"
"""Record of the Monarch process that started a node's agent, in the node's folder."""
ORDER_NAME = "agent-start.json"


class AgentOrder(Struct, frozen=True, kw_only=True):
    """An agent to start. It is a private file: Monarch's messages are not encrypted, and name only its path."""

    run: str
    """The run's folder."""
    node_slots: int
    node: int
    generation: int
    start: AgentStart

    @property
    def node_id(self) -> NodeId:
        return NodeId(node=self.node, generation=self.generation)


def write_order(folder: RunDir, node_slots: int, node_id: NodeId, start: AgentStart) -> Path:
    """Write what a Monarch process needs to start a node's agent; returns the file."""
    order = AgentOrder(
        run=str(folder.path), node_slots=node_slots, node=node_id.node, generation=node_id.generation, start=start
    )
    path = folder.node_dir(node_id.node, node_id.generation) / ORDER_NAME
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    # Not msgspec: a variable may hold bytes that are no UTF-8, which only `json` can escape.
    write_private(path, json.dumps(msgspec.to_builtins(order)))
    return path


def take_order(path: Path) -> AgentOrder:
    """Read an agent's order, and delete it: it has the node's token and the run's environment."""
    found = json.loads(path.read_text())
    path.unlink()
    return msgspec.convert(found, AgentOrder)


class AgentPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent is to start."""

    order: str
    """File of the AgentOrder, on the node's machine."""
    host: str = ""
    """Address of Monarch's process on that machine, in Monarch's notation; empty for this machine."""
    tunnel: tuple[str, ...] = ()
    """Command that lets that process and the client reach one another while it runs (mesh_tunnel.py); empty if they do
    without."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="is"):
    """Has its kind as `is`, and concerns a node."""

    node: int
    generation: int

    @property
    def node_id(self) -> NodeId:
        return NodeId(node=self.node, generation=self.generation)


class PlaceAgent(_Message, frozen=True, kw_only=True, tag="place"):
    """Create a process mesh, and start a node's agent in it."""

    where: AgentPlacement


class ForgetAgent(_Message, frozen=True, kw_only=True, tag="forget"):
    """A node on another machine is removed, with all of its processes: nothing of it is reported any more."""


class AgentPlaced(_Message, frozen=True, kw_only=True, tag="placed"):
    """The agent of a node runs."""


class AgentNotPlaced(_Message, frozen=True, kw_only=True, tag="refused"):
    """Monarch did not start the agent of a node."""

    reason: str


class AgentEnded(_Message, frozen=True, kw_only=True, tag="ended"):
    """The agent of a node has ended; its Monarch process says how."""

    reason: str


class MeshLost(_Message, frozen=True, kw_only=True, tag="lost"):
    """Monarch reports that a node's process mesh has failed."""

    reason: str


class ClientAlive(msgspec.Struct, frozen=True, tag="alive", tag_field="is"):
    """Sent every HEARTBEAT_S by a client that can serve."""


ToClient = PlaceAgent | ForgetAgent
FromClient = AgentPlaced | AgentNotPlaced | AgentEnded | MeshLost | ClientAlive

HEARTBEAT_S = 2.0
START_TIMEOUT_S = 60.0
"""Longest time for Monarch to start a process and its actor; it takes 0.3 s on an idle machine."""
STOP_TIMEOUT_S = 30.0
"""Longest wait for Monarch to stop a mesh, which the client does before it refuses an agent; one with a stopped
process takes 20 s."""
PLACE_TIMEOUT_S = 150.0
"""Longest wait for an agent; the client answers earlier. It may have to import Monarch first."""

decode_to_client = msgspec.json.Decoder(ToClient).decode
decode_from_client = msgspec.json.Decoder(FromClient).decode


def encode(message: ToClient | FromClient) -> bytes:
    """A message as it is sent, with its end of line."""
    return msgspec.json.encode(message) + b"\n"
