"""Owns which order, to which agents, a command of the machine is.

Not the orders to start ranks: what a rank is given is the launcher's business.
"""

from __future__ import annotations

from holdfast.control.commands import (
    Checkpoint,
    Command,
    Fetch,
    Inject,
    Look,
    Release,
    Split,
    Stacks,
    Stop,
    TellBack,
    TellLost,
    WindDown,
)
from holdfast.events import orders
from holdfast.events.orders import Order

Dispatch = tuple[tuple[int, ...] | None, Order]
"""Nodes (None: all that are connected) and what each of them is ordered."""


def dispatch_of(command: Command, *, replica_world_size: int) -> Dispatch:
    """The order that a command is, and to whom; `replica_world_size` is the ranks of one replica.

    Raises `AssertionError` for a command that is no order.
    """
    match command:
        case Stop(replica=replica, attempt=attempt, nodes=nodes, grace_s=grace_s, together=together):
            return nodes, orders.StopRanks(replica=replica, attempt=attempt, grace_s=grace_s, together=together)
        case WindDown(nodes=nodes, reason=reason, hand_over=hand_over):
            return nodes, orders.WindDown(reason=reason, hand_over=hand_over)
        case Fetch(nodes=nodes, digest=digest):
            return nodes, orders.FetchCode(digest=digest)
        case Release(node=node, replica=replica):
            return (node,), orders.Release(replica=replica)
        case Look(replica=replica, attempt=attempt, nodes=nodes, everyone=everyone):
            return nodes, orders.Look(replica=replica, attempt=attempt, everyone=everyone)
        case TellLost(replica=replica, attempt=attempt, nodes=nodes):
            return nodes, orders.ReplicaLost(replica=replica, attempt=attempt)
        case TellBack(replica=replica, attempt=attempt, nodes=nodes):
            return nodes, orders.ReplicaBack(replica=replica, attempt=attempt)
        case Inject(drill=drill, node=int(node)):
            return (node,), orders.Break(
                requested_at=drill.at,
                target=drill.target,
                rank=drill.index % replica_world_size,
                index=drill.index,
                action=drill.action,
                at_step=drill.at_step,
                for_s=drill.for_s,
                amount=drill.amount,
            )
        case Checkpoint():
            return None, orders.AskCheckpoint()
        case Split():
            return None, orders.AskSplit()
        case Stacks():
            return None, orders.TakeStacks()
        case _:
            raise AssertionError(f"{command} is no order")
