"""Groups ranks by what they do in C and C++ within a Python call, for a reader; no rank is named by it.

Ranks that wait in one call may differ there: one polls, another sleeps. So ranks are compared by Python frames alone
(stack_groups.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from holdfast.diagnose.rank_stack import Stack
from holdfast.diagnose.stack_groups import MAX_GROUPS_SHOWN, describe_group
from holdfast.events import StacksDumped, to_ranges
from holdfast.findings import replica_suffix
from holdfast.job.parallel_layout import format_spans

OLDER = "its agent or the controller is of an older holdfast, which reads Python frames only"


def describe_native(taken: Sequence[StacksDumped]) -> tuple[str, ...]:
    """A line for each group of equal native frames, the largest first, with the Python frame around them."""
    groups: dict[tuple[int, Stack], list[int]] = defaultdict(list)
    for each in taken:
        if each.native is not None:
            groups[each.replica, (*each.native, *each.frames[:1])].append(each.rank)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1], group[0]))
    lines = [
        f"native: {describe_group(to_ranges(ranks), frames, replica_suffix(replica))}"
        for (replica, frames), ranks in ordered[:MAX_GROUPS_SHOWN]
    ]
    return (*lines, *([f"native: {len(ordered) - len(lines)} more kinds"] * (len(ordered) > len(lines))))


def describe_missing(taken: Sequence[StacksDumped]) -> tuple[str, ...]:
    """A line for each reason why ranks have no native frames."""
    missing: dict[tuple[int, str], list[int]] = defaultdict(list)
    for each in taken:
        if each.native is None:
            missing[each.replica, each.native_missing or OLDER].append(each.rank)
    return tuple(
        f"no native frames of rank {format_spans(to_ranges(ranks))}{replica_suffix(replica)}: {reason}"
        for (replica, reason), ranks in missing.items()
    )
