"""Rules for the end of a run as its event log records it: what holdfast's agents and controller saw."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.gpu_driver import DRAIN
from holdfast.diagnose.rules.rule import Role, Rule

_SOURCE = "the run's event log"

_CAUSES: tuple[tuple[str, tuple[FailureClass, ...], Confidence, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "run-rank-killed",
        (FailureClass.KILLED, FailureClass.PREEMPTED),
        Confidence.LIKELY,
        ("find the sender of the signal: no out-of-memory kill was seen on the node",),
        ("who-sent-signal", "kernel-log"),
    ),
    (
        "run-rank-out-of-memory",
        (FailureClass.OOM_HOST,),
        Confidence.CERTAIN,
        ("give the node or pod more memory, or use less: fewer DataLoader workers, smaller buffers",),
        (),
    ),
    (
        "run-rank-terminated-externally",
        (FailureClass.KILLED,),
        Confidence.CERTAIN,
        ("nothing is lost: it had saved; if it happens again, find the sender of SIGTERM",),
        ("who-sent-signal",),
    ),
    (
        "run-rank-crashed",
        (FailureClass.PROGRAM_ERROR,),
        Confidence.UNSURE,
        ("the rank's own last lines give the reason: holdfast logs --rank {rank}",),
        ("first-traceback",),
    ),
    (
        "run-rank-hung",
        (FailureClass.HANG_UNKNOWN, FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER),
        Confidence.LIKELY,
        ("the stacks show where it waits; `holdfast events` names their file",),
        ("stacks",),
    ),
    (
        "run-weights-not-finite",
        (FailureClass.NAN_DATA,),
        Confidence.LIKELY,
        (
            "if it returns at the same step: a lower learning rate, clipped gradients, or without that step's samples",
            "if it returns on the same rank at another step, suspect its device",
        ),
        ("all-ranks",),
    ),
    (
        "run-loss-spike",
        (FailureClass.NAN_DATA,),
        Confidence.LIKELY,
        ("if it returns: a lower learning rate, clipped gradients, or without the samples of that step",),
        ("all-ranks",),
    ),
    (
        "run-silent-corruption",
        (FailureClass.SILENT_CORRUPTION,),
        Confidence.CERTAIN,
        ("test the devices and memory of that node before it is used again",),
        (),
    ),
    (
        "run-ranks-diverged",
        (FailureClass.SILENT_CORRUPTION, FailureClass.PROGRAM_ERROR),
        Confidence.LIKELY,
        (
            "check the nodes of these ranks: `holdfast check`; with three ranks or more the majority decides",
            "if it returns at the same step, look for weights that are changed outside optimizer.step",
        ),
        ("all-ranks",),
    ),
    (
        "run-rank-left-early",
        (FailureClass.COLLECTIVE_MISMATCH, FailureClass.PROGRAM_ERROR),
        Confidence.LIKELY,
        (
            "find out why that rank finished before the others: fewer batches, an early return, a branch by rank",
            "every rank must make the same calls: equal numbers of batches, or `Join` for uneven ones",
        ),
        ("last-collectives",),
    ),
    (
        "run-node-lost",
        (FailureClass.NODE_LOST,),
        Confidence.CERTAIN,
        ("check the node before it is used again: its kernel log, its power, its network",),
        (),
    ),
    (
        "run-gpu-failed",
        (FailureClass.GPU_XID,),
        Confidence.CERTAIN,
        (DRAIN,),
        (),
    ),
    (
        "run-gpu-memory-failed",
        (FailureClass.GPU_XID,),
        Confidence.CERTAIN,
        (DRAIN,),
        (),
    ),
    (
        "run-nvlink-failed",
        (FailureClass.GPU_XID,),
        Confidence.CERTAIN,
        (DRAIN,),
        (),
    ),
    (
        "run-gpu-needs-reset",
        (FailureClass.GPU_XID,),
        Confidence.CERTAIN,
        (DRAIN,),
        (),
    ),
    (
        "run-gpu-memory-error-contained",
        (FailureClass.GPU_XID,),
        Confidence.CERTAIN,
        ("reset the GPU at the next pause, so that the row is remapped",),
        (),
    ),
    (
        "run-gpu-not-ready",
        (FailureClass.DRIVER,),
        Confidence.CERTAIN,
        ("start nvidia-fabricmanager in the driver's version",),
        (),
    ),
    (
        "run-nic-failed",
        (
            FailureClass.NETWORK_LOSS,
            FailureClass.DRIVER,
        ),
        Confidence.LIKELY,
        ("power-cycle the node, then check the adapter's firmware and cooling",),
        ("link-counters",),
    ),
    (
        "run-nic-link-down",
        (FailureClass.NETWORK_LOSS,),
        Confidence.LIKELY,
        ("check cable, transceiver and switch port of the adapter in the line",),
        ("link-counters",),
    ),
    (
        "run-gpu-error-unclear",
        (
            FailureClass.PROGRAM_ERROR,
            FailureClass.GPU_XID,
        ),
        Confidence.UNSURE,
        ("CUDA_LAUNCH_BLOCKING=1 shows the call; if it stays with one GPU, replace it",),
        ("cuda-sync", "xid"),
    ),
    (
        "run-nccl-system-call-failed",
        (
            FailureClass.NETWORK_LOSS,
            FailureClass.SHM_TOO_SMALL,
            FailureClass.MEMLOCK,
        ),
        Confidence.UNSURE,
        ("NCCL_DEBUG=WARN names the call that failed",),
        ("nccl-warn", "shm"),
    ),
    (
        "run-nccl-peer-gone",
        (
            FailureClass.PROGRAM_ERROR,
            FailureClass.NODE_LOST,
            FailureClass.NETWORK_LOSS,
        ),
        Confidence.UNSURE,
        ("find the rank whose log ends first",),
        ("all-ranks",),
    ),
    (
        "run-disk-full",
        (FailureClass.STORAGE,),
        Confidence.CERTAIN,
        ("df -h of the path in the line; keep fewer checkpoints, or write elsewhere",),
        (),
    ),
    (
        "run-read-only-file-system",
        (FailureClass.STORAGE,),
        Confidence.CERTAIN,
        (
            "mount the file system in the line read-write (`mount -o remount,rw`), or write elsewhere; `dmesg` shows whether the kernel made it read-only after an error",
        ),
        (),
    ),
    (
        "run-program-not-started",
        (FailureClass.NOT_STARTED,),
        Confidence.CERTAIN,
        ("check the command and its environment: `holdfast render` shows them; the evidence has the reason",),
        (),
    ),
    (
        "run-spawn-resources-exhausted",
        (FailureClass.NOT_STARTED,),
        Confidence.CERTAIN,
        ("raise what the node ran out of: `ulimit -n`, `ulimit -u`, pids.max and memory.max of the cgroup",),
        (),
    ),
    (
        "run-code-not-delivered",
        (FailureClass.NOT_STARTED,),
        Confidence.CERTAIN,
        ("check the node's disk and its connection to the controller: nodes/NODE/agent.log in the run's folder",),
        (),
    ),
    (
        "run-rendezvous-port-in-use",
        (FailureClass.RENDEZVOUS,),
        Confidence.CERTAIN,
        ("end the process that holds the port; a new attempt uses another one",),
        (),
    ),
)
"""Code, classes, confidence, remedy, and the evidence that would confirm it."""

RULES: tuple[Rule, ...] = (
    *(
        Rule(code=code, classes=classes, confidence=sure, message="{what}", remedy=remedy, needs=needs, source=_SOURCE)
        for code, classes, sure, remedy, needs in _CAUSES
    ),
    Rule(code="run-failure", role=Role.CONTEXT, message="{what}", source=_SOURCE),
)

FOR_FINDING = {
    "node-never-joined": "run-node-lost",
}
"""Run findings that use another rule; any other finding uses `run-` and its code, or only names the rank."""
