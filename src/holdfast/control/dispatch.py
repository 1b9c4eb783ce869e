"""Maps a command of the state machine to an order and its target agents.

Start orders are not here: launch expands each rank's launch.
"""

from __future__ import annotations

from holdfast.control.commands import (
    AnnounceReplicaDown,
    AnnounceReplicaStarting,
    CheckpointAndExit,
    Command,
    DumpStacks,
    FetchCode,
    FreeState,
    InjectFault,
    ProfileSteps,
    ReportSilentRanks,
    StopRanks,
    TakeCheckpoint,
)
from holdfast.protocol import orders
from holdfast.protocol.orders import Order

Dispatch = tuple[tuple[int, ...] | None, Order]
"""Nodes (None: all connected ones) and their order."""


def order_for(command: Command, *, replica_world_size: int) -> Dispatch:
    """The order for a command, and its targets; `replica_world_size` is the number of ranks of one replica.

    Raises `AssertionError` for a command that is not an order.
    """
    match command:
        case StopRanks(replica=replica, attempt=attempt, nodes=nodes, grace_s=grace_s, all_replicas=all_replicas):
            return nodes, orders.StopRanks(replica=replica, attempt=attempt, grace_s=grace_s, all_replicas=all_replicas)
        case CheckpointAndExit(nodes=nodes, reason=reason, transfer_state=transfer_state):
            return nodes, orders.CheckpointAndExit(reason=reason, transfer_state=transfer_state)
        case FetchCode(nodes=nodes, digest=digest):
            return nodes, orders.FetchCode(digest=digest)
        case FreeState(node=node, replica=replica):
            return (node,), orders.FreeState(replica=replica)
        case ReportSilentRanks(replica=replica, attempt=attempt, nodes=nodes, all_ranks=all_ranks):
            return nodes, orders.ReportSilentRanks(replica=replica, attempt=attempt, all_ranks=all_ranks)
        case AnnounceReplicaDown(replica=replica, attempt=attempt, nodes=nodes):
            return nodes, orders.AnnounceReplicaDown(replica=replica, attempt=attempt)
        case AnnounceReplicaStarting(replica=replica, attempt=attempt, nodes=nodes):
            return nodes, orders.AnnounceReplicaStarting(replica=replica, attempt=attempt)
        case InjectFault(fault=fault, node=int(node)):
            return (node,), orders.InjectFault(
                requested_at=fault.at,
                target=fault.target,
                rank=fault.index % replica_world_size,
                index=fault.index,
                action=fault.action,
                at_step=fault.at_step,
                for_s=fault.for_s,
                amount=fault.amount,
            )
        case TakeCheckpoint():
            return None, orders.TakeCheckpoint()
        case ProfileSteps():
            return None, orders.ProfileSteps()
        case DumpStacks():
            return None, orders.DumpStacks()
        case _:
            raise AssertionError(f"{command} is not an order")
