"""Diagnosis of real drills: injects each fault into a run, and asks holdfast and torchrun for the root cause.

.venv/bin/python -m bench.drill_diagnosis [--only "kill rank"] [--times 4] [--peer]

The diagnosis is blind: the log's record of the drill is removed first. A drill that causes no failure is right when the
diagnosis names no root cause. Each drill runs N times, on rank or node 1 and 0 in turn. With `--peer` the same faults
hit two torchrun nodes, whose error summary is read for PEER_S seconds. Filling a disk needs root, cutting off a node
needs network namespaces, exhausting its memory needs a memory cgroup; the bench skips and lists what cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.paired_stats import headline, say, table
from holdfast import api
from holdfast.diagnose.diagnosis import Diagnosis
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.errors import HoldfastError
from holdfast.events import (
    AnyEvent,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    FindingRaised,
    NodeUnavailable,
    RecoveryDecided,
    StepCommitted,
    StragglerObserved,
)
from holdfast.host.cgroups import CgroupParent, cgroup_parent
from holdfast.launch.local import netns
from holdfast.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
TORCH_FREE_TRAINER = ROOT / "tests" / "programs" / "torch_free_trainer.py"
DDP_SESSION = Path(__file__).parent / "programs" / "ddp_session.py"
WATCHED_LOOP = Path(__file__).parent / "programs" / "watched_loop.py"
ALLREDUCE_LOOP = Path(__file__).parent / "programs" / "allreduce_loop.py"
STEPS, STEP_S, AT_STEP = 100_000, 0.02, 12
CALM_STEPS = 100
"""Steps after a drill that causes no failure."""
MAX_WAIT_S = 150.0
PEER_S = 45.0
RUN_DISK_BYTES, CHECKPOINT_DISK_BYTES = 1 << 20, 1 << 16

_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (?P<rank>\d+).*?exitcode\s*: (?P<code>-?\d+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drill, and its expected diagnosis."""

    failure_class: FailureClass | None = None
    """None where nothing fails."""
    first_failure: str = ""
    """As in the answer, with {0} for the number of the rank or node; empty where the cause is no rank or node."""
    program: Path = TORCH_FREE_TRAINER
    """What the ranks run: a program with plain sockets, or DDP for drills about collectives."""
    overrides: tuple[str, ...] = ()
    amount: float | None = None
    replicas: int = 1
    """Fewest replicas that the run must have."""
    warning: str = ""
    """The finding that names the rank, where nothing fails."""
    where: str = "rank {0} on node{0}"
    """The place of that finding."""
    at_step: int = AT_STEP
    needs: str = ""
    """`netns`, `resources.memory`, or the name of the variable or field whose disk is a small one."""
    peer: Callable[[Peer], None] | None = None
    """The same fault in torchrun; None where torchrun has no such part."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Two torchrun nodes with a rank each."""

    agents: tuple[subprocess.Popen[bytes], ...]
    folder: Path

    def rank(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def output(self, node: int) -> str:
        return (self.folder / f"node{node}.log").read_text(errors="replace")


def _kill_rank(peer: Peer) -> None:
    os.kill(peer.rank(1), signal.SIGKILL)


def _kill_agent(peer: Peer) -> None:
    peer.agents[1].kill()


def _kill_node(peer: Peer) -> None:
    os.kill(peer.rank(1), signal.SIGKILL)
    peer.agents[1].kill()


def _stop_rank(peer: Peer) -> None:
    os.kill(peer.rank(1), signal.SIGSTOP)


def _stop_node(peer: Peer) -> None:
    os.kill(peer.rank(1), signal.SIGSTOP)
    peer.agents[1].send_signal(signal.SIGSTOP)


_DEADLINE = ("recovery.step_timeout_s=3",)
_GRACE = ("recovery.node_grace_s=9",)
_KILL, _STOP, _SKEW, _FILL = FaultAction.KILL, FaultAction.STOP, FaultAction.CLOCK_SKEW, FaultAction.FILL
_LIGHTHOUSE = FaultTarget.LIGHTHOUSE
_RANK, _NODE, _AGENT, _CONTROLLER = FaultTarget.RANK, FaultTarget.NODE, FaultTarget.AGENT, FaultTarget.CONTROLLER

CASES: Mapping[tuple[FaultAction, FaultTarget], Case] = {
    (_KILL, _RANK): Case(failure_class=FailureClass.KILLED, first_failure="rank {0} on node{0}", peer=_kill_rank),
    (_KILL, _NODE): Case(failure_class=FailureClass.NODE_LOST, first_failure="on node{0}", peer=_kill_node),
    (_KILL, _AGENT): Case(failure_class=FailureClass.NODE_LOST, first_failure="on node{0}", peer=_kill_agent),
    (_KILL, _CONTROLLER): Case(),
    (FaultAction.REMOVE, _NODE): Case(
        failure_class=FailureClass.NODE_LOST, first_failure="on node{0}", peer=_kill_node
    ),
    (FaultAction.RESTORE, _NODE): Case(failure_class=FailureClass.NODE_LOST, first_failure="on node{0}"),
    (_STOP, _RANK): Case(
        failure_class=FailureClass.HANG_UNKNOWN,
        first_failure="rank {0} on node{0}",
        overrides=_DEADLINE,
        peer=_stop_rank,
    ),
    (_STOP, _NODE): Case(
        failure_class=FailureClass.NODE_LOST, first_failure="on node{0}", overrides=_GRACE, peer=_stop_node
    ),
    (_STOP, _AGENT): Case(failure_class=FailureClass.NODE_LOST, first_failure="on node{0}", overrides=_GRACE),
    (_STOP, _CONTROLLER): Case(),
    (FaultAction.PARTITION, _NODE): Case(
        failure_class=FailureClass.NODE_LOST, first_failure="on node{0}", overrides=_GRACE, needs="netns"
    ),
    (_SKEW, _AGENT): Case(amount=3600.0),
    (_SKEW, _CONTROLLER): Case(amount=-3600.0),
    (_FILL, FaultTarget.RUN_DIR): Case(
        failure_class=FailureClass.STORAGE,
        overrides=("nodes.min_nodes_wait_s=100",),  # a later finding about slow nodes would hide that of the disk
        needs="HOLDFAST_HOME",
    ),
    (_FILL, FaultTarget.CHECKPOINTS): Case(failure_class=FailureClass.STORAGE, needs="checkpoint.path"),
    (FaultAction.OOM, _NODE): Case(
        failure_class=FailureClass.OOM_HOST,
        first_failure="rank {0} on node{0}",
        overrides=("resources.memory=300MiB",),
        needs="resources.memory",
    ),
    (FaultAction.RAISE, _RANK): Case(failure_class=FailureClass.PROGRAM_ERROR, first_failure="rank {0} on node{0}"),
    (FaultAction.HANG, _RANK): Case(
        failure_class=FailureClass.HANG_UNKNOWN, first_failure="rank {0} on node{0}", overrides=_DEADLINE
    ),
    (FaultAction.HANG, FaultTarget.COLLECTIVE): Case(
        failure_class=FailureClass.COLLECTIVE_MISMATCH,
        first_failure="rank {0} on node{0}",
        overrides=_DEADLINE,
        program=DDP_SESSION,
    ),
    **{
        (FaultAction.NAN, target): Case(
            failure_class=FailureClass.NAN_DATA, first_failure="rank {0} on node{0}", program=WATCHED_LOOP
        )
        for target in (FaultTarget.LOSS, FaultTarget.GRADIENT)
    },
    **{
        (FaultAction.SPIKE, target): Case(amount=100.0, program=WATCHED_LOOP)
        for target in (FaultTarget.LOSS, FaultTarget.GRADIENT)
    },
    **{
        (FaultAction.BITFLIP, target): Case(
            failure_class=FailureClass.SILENT_CORRUPTION,
            program=WATCHED_LOOP,
            overrides=("recovery.verify_every_steps=5",),
        )
        for target in (FaultTarget.WEIGHTS, FaultTarget.OPTIMIZER, FaultTarget.GRADIENT, FaultTarget.ACTIVATIONS)
    },
    **{
        drill: Case(failure_class=failure_class, first_failure="rank {0} on node{0}")
        for drill, failure_class in (
            ((FaultAction.FAIL, FaultTarget.GPU), FailureClass.GPU_XID),
            ((FaultAction.ECC_ERROR, FaultTarget.GPU), FailureClass.GPU_XID),
            ((FaultAction.FAIL, FaultTarget.NVLINK), FailureClass.GPU_XID),
            ((FaultAction.FAIL, FaultTarget.NIC), FailureClass.NETWORK_LOSS),
        )
    },
    (FaultAction.THROTTLE, FaultTarget.GPU): Case(warning="gpu-throttled", where="node{0}, GPU of rank {0}"),
    (FaultAction.LINK_ERRORS, FaultTarget.NIC): Case(warning="fabric-link-errors", where="node{0}, NIC of rank {0}"),
    (FaultAction.SLOW, _NODE): Case(amount=3.0, overrides=("recovery.step_timeout_s=auto",)),
    **{
        (FaultAction.SLOW, target): Case(
            amount=4.0,
            warning="data-stall" if target is FaultTarget.DATA else "straggler",
            # A rank is late compared with itself, of which several rounds must be known; a busy machine has fewer.
            at_step=300 if target is FaultTarget.COMMUNICATION else 60,
            program=WATCHED_LOOP,
        )
        for target in FaultTarget
        if target.is_phase
    },
    (FaultAction.DATA_STALL, _RANK): Case(amount=0.05, warning="data-stall", program=WATCHED_LOOP),
    (FaultAction.LEAK, _RANK): Case(
        amount=0.2,  # MiB a step: slow enough to be named before the limit, on an idle machine too
        warning="memory-growing",
        overrides=("resources.memory=700MiB",),
        needs="resources.memory",
        program=WATCHED_LOOP,
    ),
    (_KILL, _LIGHTHOUSE): Case(replicas=2),
    (_STOP, _LIGHTHOUSE): Case(replicas=2),
}


class Unavailable(Exception):
    """The drill cannot run on this machine."""


def is_correct(case: Case, answer: Diagnosis, replicas: int = 1, number: int = 1) -> bool:
    """Whether class and root-cause rank or node match the drill; without a failure, whether no root cause is named.

    Each of two replicas is a node with a rank 0.
    """
    culprit = (case.first_failure if replicas == 1 else case.first_failure.replace("rank {0}", "rank 0")).format(number)
    if case.failure_class is None:
        return answer.failure_class is FailureClass.UNKNOWN and not answer.code and answer.first_failure is None
    return answer.failure_class is case.failure_class and (not culprit or str(answer.first_failure) == culprit)


def diagnose_drill(
    action: FaultAction,
    target: FaultTarget,
    base: Path,
    replicas: int = 1,
    number: int = 1,
    overrides: Sequence[str] = (),
) -> Diagnosis:
    """Start a run, inject the fault into the rank or node of that number, and diagnose it blind."""
    case = CASES[action, target]
    with _run(case, base, max(replicas, case.replicas), overrides) as run:
        wait_until(run, lambda event: isinstance(event, StepCommitted))  # a busy machine has no controller earlier
        if action is FaultAction.RESTORE:
            api.inject_fault(run, target=target, index=number, action=FaultAction.REMOVE, at_step=AT_STEP)
            wait_until(run, lambda event: isinstance(event, NodeUnavailable))
            api.inject_fault(run, target=target, index=number, action=action)
        else:
            index = number if target.is_numbered else 0
            api.inject_fault(run, target=target, index=index, action=action, at_step=case.at_step, amount=case.amount)
        wait_until(run, _noticed(case, target, action, number))
        return api.diagnose_run(run, [event for event in api.events(run) if not _tells(event)])


def _tells(event: AnyEvent) -> bool:
    return isinstance(event, FaultRequested | FaultInjected)


def _noticed(case: Case, target: FaultTarget, action: FaultAction, number: int) -> Callable[[AnyEvent], bool]:
    """Whether the run has come far enough after its drill for the diagnosis."""
    if case.warning:
        return lambda event: (
            isinstance(event, FindingRaised | StragglerObserved)
            and event.finding.code == case.warning
            and event.finding.where == case.where.format(number)
        )
    if case.failure_class is None:
        return lambda event: isinstance(event, StepCommitted) and event.step > AT_STEP + CALM_STEPS
    if target is FaultTarget.RUN_DIR:
        return lambda event: isinstance(event, FindingRaised) and event.finding.code == "disk-full"
    if action is FaultAction.RESTORE:
        return lambda event: isinstance(event, StepCommitted) and event.attempt > 0
    return lambda event: isinstance(event, RecoveryDecided)


def wait_until(run: RunDir, holds: Callable[[AnyEvent], bool]) -> None:
    """Follow a run to an event."""
    deadline = time.monotonic() + MAX_WAIT_S
    for event in api.follow(run):
        if event is not None and holds(event):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"no such event within {MAX_WAIT_S:g} s")
    raise TimeoutError("the run ended before the event")


@contextlib.contextmanager
def _run(case: Case, base: Path, replicas: int, more: Sequence[str]) -> Generator[RunDir]:
    """A run of two nodes with a rank each, cleaned up at the end."""
    overrides = [
        "nodes=2",
        f"recovery.replicas={replicas}",
        "name=drilled",
        "nodes.min_nodes_wait_s=1",
        *case.overrides,
        *more,
    ]
    with contextlib.ExitStack() as stack:
        home = base / "home"
        if case.needs == "netns" and (reason := netns.unavailable()):
            raise Unavailable(reason)
        if case.needs == "resources.memory" and not isinstance(reason := cgroup_parent(), CgroupParent):
            raise Unavailable(reason)
        if case.needs == "HOLDFAST_HOME":
            home = stack.enter_context(_disk(base / "disk", RUN_DISK_BYTES))
            overrides += [f"checkpoint.path={base / 'checkpoints'}", "env.TRAINER_METRICS=100"]
        if case.needs == "checkpoint.path":
            disk = stack.enter_context(_disk(base / "disk", CHECKPOINT_DISK_BYTES))
            overrides += [f"checkpoint.path={disk}"]
        targets = base / ".holdfast" / "targets"
        targets.mkdir(parents=True)
        isolation = "netns" if case.needs == "netns" else "process"
        (targets / "drilled.yaml").write_text(f"kind: local\nisolation: {isolation}\n")
        stack.enter_context(_environment("HOLDFAST_HOME", str(home)))
        command = (sys.executable, str(case.program), str(STEPS), str(STEP_S))
        run = api.start(api.load_job(None, command=command, overrides=overrides), "drilled", base=base)
        try:
            yield run
        finally:
            end_run(run)


def end_run(run: RunDir) -> None:
    """Clean up; retry where a busy controller did not answer."""
    for _ in range(10):
        try:
            api.cancel(run, force=True)
        except HoldfastError:
            if not run.alive():
                return
        else:
            break
    for _ in api.follow(run):
        pass


@contextlib.contextmanager
def _environment(name: str, value: str) -> Generator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _disk(folder: Path, size_bytes: int) -> Generator[Path]:
    """A small file system, removed at the end."""
    folder.mkdir()
    options = f"size={size_bytes},mode=0700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
    if done.returncode:
        raise Unavailable("a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


# The peer


def ask_torchrun(case: Case, base: Path) -> str:
    """Torchrun's answer to the same fault, and whether it is right."""
    assert case.peer is not None
    with _torchrun(base) as peer:
        case.peer(peer)
        deadline = time.monotonic() + PEER_S
        while time.monotonic() < deadline:
            if summary := _ROOT_CAUSE.search(peer.output(0)) or _ROOT_CAUSE.search(peer.output(1)):
                right = "right" if summary["rank"] == "1" and int(summary["code"]) < 0 else "wrong"
                return f"{right}: rank {summary['rank']}, exit code {summary['code']}"
            time.sleep(0.1)
        return f"nothing in {PEER_S:g} s"


@contextlib.contextmanager
def _torchrun(base: Path) -> Generator[Peer]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents: list[subprocess.Popen[bytes]] = []
    for node in range(2):
        words = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--master-addr=127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, f"--master-port={port}", str(ALLREDUCE_LOOP)]
        with (base / f"node{node}.log").open("wb") as log:
            agents.append(
                subprocess.Popen([*command, str(base)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )
    peer = Peer(agents=tuple(agents), folder=base)
    try:
        deadline = time.monotonic() + MAX_WAIT_S
        while not all((base / f"up-{rank}").exists() for rank in range(2)):
            if time.monotonic() > deadline:
                raise TimeoutError("torchrun's ranks did not come up")
            time.sleep(0.05)
        yield peer
    finally:
        for rank in range(2):
            with contextlib.suppress(OSError):
                os.kill(peer.rank(rank), signal.SIGKILL)
        for agent in agents:
            agent.kill()
            agent.wait()


def main() -> int:
    """Inject, diagnose, and return nonzero unless every answer was right."""
    parser = argparse.ArgumentParser(prog="bench.drill_diagnosis", description=__doc__)
    parser.add_argument("--only", help="one drill, such as 'kill rank'")
    parser.add_argument("--times", type=int, default=1, help="how often each runs, on number 1 and 0 in turn")
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=1, help="with 2, each node is a replica")
    parser.add_argument("--peer", action="store_true", help="read torchrun's error summary too")
    options = parser.parse_args()
    headline("drills diagnosed, blind to the drill: class and culprit")
    rows: list[tuple[str, ...]] = []
    wrong = asked = 0
    for (action, target), case in CASES.items():
        name = f"{action} {target}"
        if options.only not in (None, name):
            continue
        told: Counter[str] = Counter()
        right = 0
        try:
            for turn in range(options.times):
                said, is_right = _asked(action, target, (turn + 1) % 2, options.replicas)
                told[said] += 1
                right += is_right
        except Unavailable as error:
            rows.append((name, "-", f"not done here: {error}", "-"))
            continue
        asked, wrong = asked + options.times, wrong + options.times - right
        peer = "no such part"
        if case.peer is not None:
            with tempfile.TemporaryDirectory(prefix="drilled-") as base:
                peer = ask_torchrun(case, Path(base)) if options.peer else "not asked"
        said = "; ".join(f"{said} ({times})" if options.times > 1 else said for said, times in told.items())
        rows.append((name, f"{right} of {options.times}", said, peer))
    say("")
    say(table(("drill", "right", "holdfast says", "torchrun's error summary"), rows))
    say(f"\n{asked - wrong} of {asked} right")
    return 1 if wrong else 0


def _asked(action: FaultAction, target: FaultTarget, number: int, replicas: int) -> tuple[str, bool]:
    """The diagnosis of a drill on the rank or node of that number, and whether it is right."""
    case, name = CASES[action, target], f"{action} {target}" + (f":{number}" if target.is_numbered else "")
    with tempfile.TemporaryDirectory(prefix="drilled-") as base:
        try:
            answer = diagnose_drill(action, target, Path(base), replicas, number)
        except (HoldfastError, TimeoutError) as error:
            # One drill that a busy machine refuses must not take the others' answers with it.
            say(f"{name}: FAILED: {error}")
            return f"FAILED: {error}", False
    right = is_correct(case, answer, max(replicas, case.replicas), number)
    told = f"{answer.failure_class}, {answer.first_failure or 'no rank or node'}" if answer.code else "nothing failed"
    say(f"{name}: {'right' if right else 'WRONG'}: {told} ({answer.what})")
    return told, right


if __name__ == "__main__":
    sys.exit(main())
