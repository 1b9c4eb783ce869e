"""Owns what is explained of causes that several lines, or the logs of several ranks, show only together."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.diagnose.knowledge.explanation import Explanation
from holdfast.diagnose.rules.combinations import COMBINATIONS

RANKS_SOURCE = "holdfast, watchdogs of several ranks"
FABRIC_SOURCE = "holdfast, init logs of NCCL"

RANKS: tuple[tuple[str, str, str, str], ...] = (
    (
        "collective-not-entered",
        "Some ranks waited in a collective that another never entered, as their numbers or stacks show.",
        "`py-spy dump --pid PID` on the rank that is behind; flight recorder dumps of all.",
        "The same calls in the same order on every rank: equal numbers of batches, no branch by rank.",
    ),
    (
        "collective-mismatch",
        "Ranks waited in different collectives at one number, or one of them at another place of the program.",
        "Stacks of all ranks (`py-spy dump`), flight recorder dumps, or TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        "The same calls in the same order on every rank.",
    ),
    (
        "rank-conflict",
        "Lines say different numbers of ranks, or give two processes the same rank.",
        "WORLD_SIZE, RANK and the number of processes on every node.",
        "nodes × ranks per node = WORLD_SIZE everywhere; a fresh rendezvous for each run.",
    ),
    (
        "communicator-incomplete",
        "Some ranks waited for all, and others never wrote a line.",
        "Whether those ranks were started at all: their nodes, pods and logs.",
        "Start what is missing, or ask for fewer.",
    ),
)

FABRIC: tuple[tuple[str, str, str, str], ...] = (
    (
        "fabric-verified",
        "Every connection between nodes that the logs show takes the network that was expected.",
        "The lines of evidence: `via NET/...` of each pair.",
        "Nothing.",
    ),
    (
        "fabric-degraded",
        "The fast network is used, but not as it could be.",
        "The finding that is named as the cause.",
        "What that finding says.",
    ),
    (
        "network-mixed",
        "Ranks chose different networks: some the fast one, others sockets.",
        "`Using network` in each rank's log, and the lines above it.",
        "Give the nodes on sockets what the others have: libraries, devices, plugin.",
    ),
    (
        "transport-asymmetric",
        "A connection is not the same at both ends, or in both directions.",
        "`via` in the logs of both ranks of a pair.",
        "Look at the node that most such pairs have in common.",
    ),
    (
        "link-layer-mixed",
        "InfiniBand and Ethernet devices are used together.",
        "`NET/IB : Using` shows /IB and /RoCE.",
        "NCCL_IB_HCA with the devices of one kind.",
    ),
    (
        "fewer-nics-used",
        "Some nodes use fewer network devices than the others.",
        "`NET/IB : Using` and `via NET/` per node; the topology of a node with fewer.",
        "Make the nodes alike: a port that is down, a device the pod does not get, NCCL_IB_HCA.",
    ),
    (
        "env-skew",
        "A variable of NCCL is not the same on all ranks.",
        "`set by environment to` in the logs.",
        "One value for all ranks, or none.",
    ),
    (
        "driver-mismatch",
        "Ranks have different CUDA drivers.",
        "`cudaDriverVersion` in each rank's log; `nvidia-smi` on each node.",
        "One driver on all nodes.",
    ),
    (
        "plugin-mismatch",
        "Ranks have different network plugins of NCCL.",
        "`NET/Plugin` in each rank's log.",
        "One image for all nodes.",
    ),
    (
        "ranks-missing",
        "The logs of some ranks of a communicator are not among what was read.",
        "The list of files; `nranks` in the lines.",
        "Add them; where they are there, those ranks never began.",
    ),
    (
        "comm-init-unfinished",
        "Some ranks began a communicator's set-up and did not end it.",
        "`Init START` without `Init COMPLETE`.",
        "Look first at a rank that is missing, then at the last line of those that are.",
    ),
)


def rows() -> Iterator[Explanation]:
    """Every one by its code; a code that several sets of lines have is explained by the first."""
    for joint in {joint.code: joint for joint in reversed(COMBINATIONS)}.values():
        yield Explanation(
            code=joint.code,
            cause=f"{joint.message[:1].upper()}{joint.message[1:]}. It speaks for {joint.failure_class}.",
            confirm=f"Lines of {' and '.join(f'`{code}`' for code in joint.requires)} are there together.",
            remedy="; ".join(joint.remedy),
            source="holdfast, rules for lines together",
        )
    for source, written in ((RANKS_SOURCE, RANKS), (FABRIC_SOURCE, FABRIC)):
        for code, cause, confirm, remedy in written:
            yield Explanation(code=code, cause=cause, confirm=confirm, remedy=remedy, source=source)
