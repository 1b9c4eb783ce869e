"""Rules for the end of a run as its event log records it: what holdfast's agents and controller saw."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

_SOURCE = "the run's event log"

RULES: tuple[Rule, ...] = (
    Rule(
        code="run-rank-killed",
        classes=(FailureClass.KILLED, FailureClass.PREEMPTED),
        confidence=Confidence.LIKELY,
        message="{what}",
        remedy=("find the sender of the signal: no out-of-memory kill was seen on the node",),
        needs=("who-sent-signal", "kernel-log"),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-out-of-memory",
        classes=(FailureClass.OOM_HOST,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=("give the node or pod more memory, or use less: fewer DataLoader workers, smaller buffers",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-terminated-externally",
        classes=(FailureClass.KILLED,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=("nothing is lost: it had saved; if it happens again, find the sender of SIGTERM",),
        needs=("who-sent-signal",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-crashed",
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.UNSURE,
        message="{what}",
        remedy=("the rank's own last lines give the reason: holdfast logs --rank {rank}",),
        needs=("first-traceback",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-hung",
        classes=(FailureClass.HANG_UNKNOWN, FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER),
        confidence=Confidence.LIKELY,
        message="{what}",
        remedy=("the stacks show where it waits; `holdfast events` names their file",),
        needs=("stacks",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-left-early",
        classes=(FailureClass.COLLECTIVE_MISMATCH, FailureClass.PROGRAM_ERROR),
        confidence=Confidence.LIKELY,
        message="{what}",
        remedy=(
            "find out why that rank finished before the others: fewer batches, an early return, a branch by rank",
            "every rank must make the same calls: equal numbers of batches, or `Join` for uneven ones",
        ),
        needs=("last-collectives",),
        source=_SOURCE,
    ),
    Rule(
        code="run-node-lost",
        classes=(FailureClass.NODE_LOST,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=("check the node before it is used again: its kernel log, its power, its network",),
        source=_SOURCE,
    ),
    Rule(
        code="run-disk-full",
        classes=(FailureClass.STORAGE,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=("df -h of the path in the line; keep fewer checkpoints, or write elsewhere",),
        source=_SOURCE,
    ),
    Rule(
        code="run-read-only-file-system",
        classes=(FailureClass.STORAGE,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=(
            "mount the file system in the line read-write (`mount -o remount,rw`), or write elsewhere; `dmesg` "
            "shows whether the kernel made it read-only after an error",
        ),
        source=_SOURCE,
    ),
    Rule(
        code="run-program-not-started",
        classes=(FailureClass.NOT_STARTED,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=("check the command and its environment: `holdfast render` shows them; the evidence has the reason",),
        source=_SOURCE,
    ),
    Rule(
        code="run-spawn-resources-exhausted",
        classes=(FailureClass.NOT_STARTED,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=("raise what the node ran out of: `ulimit -n`, `ulimit -u`, pids.max and memory.max of the cgroup",),
        source=_SOURCE,
    ),
    Rule(
        code="run-code-not-delivered",
        classes=(FailureClass.NOT_STARTED,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=(
            "check the node's disk and its connection to the controller: nodes/NODE/agent.log in the run's folder",
        ),
        source=_SOURCE,
    ),
    Rule(
        code="run-rendezvous-port-in-use",
        classes=(FailureClass.RENDEZVOUS,),
        confidence=Confidence.CERTAIN,
        message="{what}",
        remedy=("end the process that holds the port; a new attempt uses another one",),
        source=_SOURCE,
    ),
    Rule(
        code="run-failure",
        role=Role.CONTEXT,
        message="{what}",
        source=_SOURCE,
    ),
)

FOR_FINDING = {
    "node-never-joined": "run-node-lost",
}
"""Run findings that use another rule; any other finding uses `run-` and its code, or only names the rank."""
