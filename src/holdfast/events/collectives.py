"""A rank's position in the collectives of its process groups, as its flight recorder shows it."""

from __future__ import annotations

import msgspec

from holdfast.events.ranges import Ranges


class CollectiveCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A collective that a rank has entered."""

    seq: int
    op: str = ""
    sizes: str = ""
    """Its tensors' sizes and types."""
    where: str = ""
    """`file:line` of the program that made the call, where the recorder keeps it."""
    started: bool = False
    """Whether it has begun on the device; Gloo never shows it."""
    done: bool = False


class GroupCollectives(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank's position in one process group."""

    group: str
    """The group's name in torch; empty for a group that torch does not know by name."""
    ranks: Ranges = ()
    """The group's ranks, if they are known and few ranges describe them."""
    enqueued: int = 0
    """Number of the last collective that it entered."""
    completed: int = 0
    """Number of the last collective that it completed."""
    pending: int = 0
    """Number of the first collective that it entered and has not completed; 0 if there is none."""
    calls: tuple[CollectiveCall, ...] = ()
    """The collective with the number `pending`, or else `enqueued`, and up to two before it."""
    point_to_point: str = ""
    """A pending send or receive, which has no number, instead of a position."""
