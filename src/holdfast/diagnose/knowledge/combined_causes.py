"""Explains causes that only several lines, or the logs of several ranks, show together."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.diagnose.knowledge.explanation import Explanation
from holdfast.diagnose.rules.combinations import COMBINATIONS

RANKS_SOURCE = "holdfast, watchdogs of several ranks"
FABRIC_SOURCE = "holdfast, init logs of NCCL"

RANKS: tuple[tuple[str, str, str, str], ...] = (
    (
        "collective-not-entered",
        "Some ranks waited in a collective that another rank never entered, as their sequence numbers or stacks show.",
        "`py-spy dump --pid PID` on the rank that is behind; flight recorder dumps of all ranks.",
        "The same calls in the same order on every rank: equal numbers of batches, no branch by rank.",
    ),
    (
        "collective-mismatch",
        "Ranks waited in different collectives at one sequence number, or one rank waited at another line of "
        "the program.",
        "Stacks of all ranks (`py-spy dump`), flight recorder dumps, or TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        "The same calls in the same order on every rank.",
    ),
    (
        "rank-conflict",
        "Log lines disagree about the number of ranks, or give two processes the same rank.",
        "WORLD_SIZE, RANK and the number of processes on every node.",
        "nodes × ranks per node = WORLD_SIZE everywhere; a fresh rendezvous for each run.",
    ),
    (
        "communicator-incomplete",
        "Some ranks waited for the rest, and the rest never wrote a line.",
        "Check whether those ranks were started: their nodes, pods and logs.",
        "Start the missing ranks, or request fewer.",
    ),
)

FABRIC: tuple[tuple[str, str, str, str], ...] = (
    (
        "fabric-verified",
        "Every connection between nodes in the logs uses the expected network.",
        "The quoted lines: `via NET/...` of each pair.",
        "Nothing.",
    ),
    (
        "fabric-degraded",
        "The fast network is used, but below its full speed.",
        "The finding named as the cause.",
        "Follow that finding.",
    ),
    (
        "fabric-failed",
        "NCCL found the fast network, but cannot connect the nodes by it: the communicator's set-up fails or waits.",
        "The quoted warning of NCCL, from the rank's private file.",
        "Follow its remedy: locked memory, GID, peer memory, device names or interface of that node.",
    ),
    (
        "fabric-nodes-differ",
        "While a run lasts, one node reports something else of the fabric than the others: network, devices, NICs, "
        "GPUDirect or NCCL's version.",
        "The evidence; `holdfast events` has the reports of all nodes.",
        "Make that node like the others, or replace it.",
    ),
    (
        "network-mixed",
        "Ranks chose different networks: some the fast one, others sockets.",
        "`Using network` in each rank's log, and the lines above it.",
        "Give the nodes on sockets what the others have: libraries, devices, plugin.",
    ),
    (
        "transport-asymmetric",
        "A connection differs between its two ends, or between its two directions.",
        "`via` in the logs of both ranks of a pair.",
        "Check the node that most such pairs have in common.",
    ),
    (
        "link-layer-mixed",
        "InfiniBand and Ethernet devices are used together.",
        "`NET/IB : Using` shows /IB and /RoCE.",
        "Set NCCL_IB_HCA to devices of one kind.",
    ),
    (
        "fewer-nics-used",
        "Some nodes use fewer network devices than the others.",
        "`NET/IB : Using` and `via NET/` per node; the topology of a node with fewer devices.",
        "Make the nodes alike: a port that is down, a device missing from the pod, NCCL_IB_HCA.",
    ),
    (
        "env-skew",
        "An NCCL variable differs between ranks.",
        "`set by environment to` in the logs.",
        "Set one value on all ranks, or on none.",
    ),
    (
        "driver-mismatch",
        "Ranks have different CUDA drivers.",
        "`cudaDriverVersion` in each rank's log; `nvidia-smi` on each node.",
        "Install one driver on all nodes.",
    ),
    (
        "plugin-mismatch",
        "Ranks use different NCCL network plugins.",
        "`NET/Plugin` in each rank's log.",
        "Use one image for all nodes.",
    ),
    (
        "ranks-missing",
        "The logs of some ranks of a communicator are missing from the input.",
        "The list of files; `nranks` in the lines.",
        "Add them; if they were there, those ranks never started.",
    ),
    (
        "comm-init-unfinished",
        "Some ranks began to set up a communicator and did not finish.",
        "`Init START` without `Init COMPLETE`.",
        "Check first for a missing rank, then the last line of those that are present.",
    ),
)


def rows() -> Iterator[Explanation]:
    """Every explanation by its code; a code that several rules share is explained by the first."""
    for joint in {joint.code: joint for joint in reversed(COMBINATIONS)}.values():
        yield Explanation(
            code=joint.code,
            cause=f"{joint.message[:1].upper()}{joint.message[1:]}. It points to {joint.failure_class}.",
            confirm=f"The log has lines of {' and '.join(f'`{code}`' for code in joint.requires)} together.",
            remedy="; ".join(joint.remedy),
            source="holdfast, rules for lines together",
        )
    for source, written in ((RANKS_SOURCE, RANKS), (FABRIC_SOURCE, FABRIC)):
        for code, cause, confirm, remedy in written:
            yield Explanation(code=code, cause=cause, confirm=confirm, remedy=remedy, source=source)
