"""Rules for what a run's own log says of its end: how holdfast's agents and controller saw it."""

from __future__ import annotations

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Role, Rule, Sureness

_SOURCE = "the run's event log"

RULES: tuple[Rule, ...] = (
    Rule(
        code="run-rank-killed",
        classes=(Class.KILLED, Class.PREEMPTED),
        sure=Sureness.LIKELY,
        says="{what}",
        remedy=("look for who sent the signal: no out-of-memory kill was seen on the node",),
        decides=("who-sent-signal", "kernel-log"),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-out-of-memory",
        classes=(Class.OOM_HOST,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("give the node or pod more memory, or use less: fewer DataLoader workers, smaller buffers",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-told-to-stop",
        classes=(Class.KILLED,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("nothing is lost: it had saved; if it comes again, look for who sends SIGTERM",),
        decides=("who-sent-signal",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-crashed",
        classes=(Class.PROGRAM_ERROR,),
        sure=Sureness.UNSURE,
        says="{what}",
        remedy=("the rank's own last lines say why: holdfast logs --rank {rank}",),
        decides=("first-traceback",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-hung",
        classes=(Class.HANG_UNKNOWN, Class.COLLECTIVE_MISMATCH, Class.STRAGGLER),
        sure=Sureness.LIKELY,
        says="{what}",
        remedy=("the stacks that were taken show where it stands; `holdfast events` names their file",),
        decides=("stacks",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rank-left-early",
        classes=(Class.COLLECTIVE_MISMATCH, Class.PROGRAM_ERROR),
        sure=Sureness.LIKELY,
        says="{what}",
        remedy=(
            "see why that rank was done before the others: fewer batches, an early return, a branch by rank",
            "every rank must make the same calls: equal numbers of batches, or `Join` for uneven ones",
        ),
        decides=("last-collectives",),
        source=_SOURCE,
    ),
    Rule(
        code="run-node-lost",
        classes=(Class.NODE_LOST,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("look at the node before it is used again: its kernel log, its power, its network",),
        source=_SOURCE,
    ),
    Rule(
        code="run-disk-full",
        classes=(Class.STORAGE,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("df -h of the path in the line; keep fewer checkpoints, or write elsewhere",),
        source=_SOURCE,
    ),
    Rule(
        code="run-read-only-file-system",
        classes=(Class.STORAGE,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=(
            "mount the file system in the line read-write (`mount -o remount,rw`), or write elsewhere; `dmesg` tells "
            "whether the kernel made it read-only after an error",
        ),
        source=_SOURCE,
    ),
    Rule(
        code="run-program-not-started",
        classes=(Class.NOT_STARTED,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("check the command and its environment: `holdfast render` shows them; the evidence has the reason",),
        source=_SOURCE,
    ),
    Rule(
        code="run-no-room-to-start",
        classes=(Class.NOT_STARTED,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("raise what the node ran out of: `ulimit -n`, `ulimit -u`, pids.max and memory.max of the cgroup",),
        source=_SOURCE,
    ),
    Rule(
        code="run-code-not-delivered",
        classes=(Class.NOT_STARTED,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("look at the node's disk and at its way to the controller: nodes/NODE/agent.log in the run's folder",),
        source=_SOURCE,
    ),
    Rule(
        code="run-rendezvous-port-taken",
        classes=(Class.RENDEZVOUS,),
        sure=Sureness.CERTAIN,
        says="{what}",
        remedy=("end the process that holds the port; a new attempt takes another one",),
        source=_SOURCE,
    ),
    Rule(
        code="run-failure",
        role=Role.CONTEXT,
        says="{what}",
        source=_SOURCE,
    ),
)

FOR_FINDING = {
    "node-never-joined": "run-node-lost",
}
"""Findings of a run that have the row of another; any other has `run-` and its code, or else only names the rank."""
