"""Rules for records of a hung rank: flight recorder dumps and stacks."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

_TORCH = "torch flight recorder; torch 2.4 and later"

FLIGHT_MISMATCH = Rule(
    code="flight-mismatch",
    classes=(FailureClass.COLLECTIVE_MISMATCH,),
    confidence=Confidence.CERTAIN,
    message="the ranks made different calls as collective {seq} of group {group}",
    remedy=(
        "compare the two calls: ranks took different branches of the program (an `if` on the rank, uneven data, "
        "an unused parameter), or passed tensors of different shapes",
    ),
    source=_TORCH,
)
FLIGHT_BEHIND = Rule(
    code="flight-behind",
    classes=(FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER, FailureClass.HANG_UNKNOWN),
    confidence=Confidence.LIKELY,
    message="one rank never entered {op}, collective {seq} of group {group}, in which the others wait",
    remedy=("py-spy dump --pid PID of that rank shows what it does instead: data, a checkpoint, another collective",),
    needs=("stacks", "all-ranks"),
    source=_TORCH,
)
FLIGHT_CROSSED = Rule(
    code="flight-crossed",
    classes=(FailureClass.COLLECTIVE_MISMATCH, FailureClass.HANG_UNKNOWN),
    confidence=Confidence.LIKELY,
    message="ranks wait for one another in different groups, most of them in {op}, collective {seq} of group {group}",
    remedy=("have every rank enter the collectives of its groups in the same order",),
    needs=("stacks",),
    source=_TORCH,
)
FLIGHT_NOT_STARTED = Rule(
    code="flight-not-started",
    classes=(FailureClass.STRAGGLER, FailureClass.GPU_XID, FailureClass.HANG_UNKNOWN),
    confidence=Confidence.LIKELY,
    message="all ranks entered {op}, collective {seq} of group {group}, and it has not begun on one rank's device",
    remedy=("look at what that rank's GPU does before it: a kernel that never ends, Xid lines in dmesg",),
    needs=("stacks", "xid"),
    source=_TORCH,
)
FLIGHT_ABSENT = Rule(
    code="flight-absent",
    classes=(FailureClass.HANG_UNKNOWN, FailureClass.NODE_LOST, FailureClass.STRAGGLER),
    message="the others wait in {op}, collective {seq} of group {group}, and one of its ranks has left no dump",
    remedy=("read the end of that rank's log: it died, or was killed before it could dump",),
    needs=("all-ranks",),
    source=_TORCH,
)
FLIGHT_ALL_WAITING = Rule(
    code="flight-all-waiting",
    classes=(FailureClass.HANG_UNKNOWN, FailureClass.NETWORK_LOSS, FailureClass.GPU_XID),
    message="every rank entered {op}, collective {seq} of group {group}, and none completed it: not the program, "
    "but the network or GPUs under it",
    remedy=("check the network and the GPUs: NCCL_DEBUG=INFO, dmesg, link counters",),
    needs=("link-counters", "xid"),
    source=_TORCH,
)

STACK = Rule(
    code="stack",
    matches={
        r'^(?:\[rank(?P<rank>\d{1,7})\]: ?)?(?:Thread \S{1,20} \([\w+]{1,20}\): "MainThread"|(?:Current t|T)hread 0x[0-9a-f]{1,16} (?:\[[^\]\n]{1,80}\] )?\(most recent call first\):)': 'Thread 811 (idle): "MainThread"',
    },
    role=Role.CONTEXT,
    message="where a rank waited: {stack_location}",
    source="py-spy dump, Python's faulthandler",
)

FLIGHT_RULES: tuple[Rule, ...] = (
    FLIGHT_MISMATCH,
    FLIGHT_BEHIND,
    FLIGHT_CROSSED,
    FLIGHT_NOT_STARTED,
    FLIGHT_ABSENT,
    FLIGHT_ALL_WAITING,
)
"""In the order of `HangKind`."""
RULES: tuple[Rule, ...] = (*FLIGHT_RULES, STACK)
