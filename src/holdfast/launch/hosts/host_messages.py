"""Messages between a run's controller and its process on a host (host_process.py), over ssh: one JSON line each.

A FileChunk is followed by as many bytes as it states.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.job.backend import NodeId
from holdfast.launch.changed_files import CHUNK_BYTES, SYNCED_FILES
from holdfast.launch.monarch.mesh_tls import MeshIdentity

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]

MAX_SMALL_CODE_BYTES = 1 << 19
"""Most bytes of code in a message, which is one line of at most a MiB."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="is"):
    """Has its kind as `is`."""


class _NodeMessage(_Message, frozen=True, kw_only=True):
    """Is about one node."""

    node: int
    generation: int

    @property
    def node_id(self) -> NodeId:
        return NodeId(node=self.node, generation=self.generation)


class Setup(_Message, frozen=True, kw_only=True, tag="setup"):
    """First message to the host."""

    run: Name
    node_slots: int
    ca: str
    """The certificate that the controller presents, as PEM."""
    controller_host: Name
    controller_port: int
    """Where agents on the host reach the controller."""
    nodes: tuple[tuple[int, int], ...]
    """Number and generation of each node that the controller placed there before."""
    exclusive: bool
    """Whether the host takes one node at a time, of any run."""
    sizes: dict[str, int]
    """Bytes that the controller has of each synced file."""


class ReserveHost(_Message, frozen=True, kw_only=True, tag="reserve"):
    """Keep other runs from the host, until the connection ends or a node of this run starts there."""


class ReleaseHost(_Message, frozen=True, kw_only=True, tag="release"):
    """Other runs may have the host again."""


class SmallCode(msgspec.Struct, frozen=True, kw_only=True):
    """The archive of the job's code."""

    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    archive: Annotated[bytes, msgspec.Meta(max_length=MAX_SMALL_CODE_BYTES)]


class StartNode(_NodeMessage, frozen=True, kw_only=True, tag="start"):
    """Start the agent of a node."""

    token: str
    address: str
    controller_grace_s: float
    node_grace_s: float
    stop_grace_s: float
    memory_bytes: int | None
    code: SmallCode | None = None
    """Without it the agent downloads the code, in another process."""
    mesh: MeshIdentity | None = None
    """Has Monarch start the agent: the host starts Monarch's process with it, and answers with NodePrepared."""


class WatchNode(_NodeMessage, frozen=True, kw_only=True, tag="watch"):
    """Report the end of a node whose agent Monarch has started."""


class RemoveNode(_NodeMessage, frozen=True, kw_only=True, tag="remove"):
    """Kill all processes of a node."""


class EndRun(_Message, frozen=True, kw_only=True, tag="end"):
    """Delete the run's files on the host, except its checkpoints; the host's last message is RunEnded."""


class HostReady(_Message, frozen=True, kw_only=True, tag="ready"):
    """First message of the host."""

    hostname: Name
    address: Name
    """The host's own end of its connection."""
    cpus: int
    gpus: int
    nodes: tuple[tuple[int, int], ...]
    """Number and generation of each node of the run that may have processes there."""


class HostReserved(_Message, frozen=True, kw_only=True, tag="reserved"):
    """The host is kept for this run."""


class HostBusy(_Message, frozen=True, kw_only=True, tag="busy"):
    """Another run has the host."""

    reason: Text


class NodePrepared(_NodeMessage, frozen=True, kw_only=True, tag="prepared"):
    """Monarch can start the agent of a node."""

    mesh: Name
    """Address of Monarch's process on the host, in Monarch's notation."""
    order: Text
    """File of the AgentOrder there."""


class NodeRunning(_NodeMessage, frozen=True, kw_only=True, tag="running"):
    """The agent of a node runs."""


class NodeEnded(_NodeMessage, frozen=True, kw_only=True, tag="ended"):
    """The agent of a node has ended."""

    reason: Text


class NodeRemoved(_NodeMessage, frozen=True, kw_only=True, tag="removed"):
    """No process of a node is left, and the last bytes of its files were sent before."""


class NodeNotStarted(_NodeMessage, frozen=True, kw_only=True, tag="refused"):
    """The agent of a node could not be started."""

    reason: Text


class EndAnnounced(_Message, frozen=True, kw_only=True, tag="ending"):
    """The host's processes got SIGTERM: the scheduler takes the host back soon."""


class RunEnded(_Message, frozen=True, kw_only=True, tag="over"):
    """The run's files are deleted."""


class FileChunk(_Message, frozen=True, kw_only=True, tag="file"):
    """Bytes of a file follow; the file ends after them, until the next chunk."""

    name: Annotated[str, msgspec.Meta(pattern=f"^({SYNCED_FILES.pattern})$")]
    at: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=CHUNK_BYTES)]


ToHost = Setup | ReserveHost | ReleaseHost | StartNode | WatchNode | RemoveNode | EndRun
FromHost = (
    HostReady
    | HostReserved
    | HostBusy
    | NodePrepared
    | NodeRunning
    | NodeEnded
    | NodeRemoved
    | NodeNotStarted
    | EndAnnounced
    | RunEnded
    | FileChunk
)

decode_to_host = msgspec.json.Decoder(ToHost).decode
decode_from_host = msgspec.json.Decoder(FromHost).decode


def encode(message: ToHost | FromHost) -> bytes:
    """A message as it is sent, with its end of line."""
    return msgspec.json.encode(message) + b"\n"
