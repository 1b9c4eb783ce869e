"""Faults of devices: what the policy does on each, which rank is the cause, and whose machine is used no more."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from tests.control.test_machine import Run, exited, joined, stopped
from tests.control.test_root_cause import CLOSED, hung, root_cause
from tests.control.test_root_cause import exited as rank_exited
from tests.control.test_standby_promotion import promotions, ready, starts
from tests.golden import Golden, printed

from holdfast.control.commands import AvoidMachine, Command, ReplaceNode
from holdfast.control.policy import Action, Failure, FailureKind, NodeBlame, Spare, Verdict, decide, node_blame
from holdfast.control.state import Timer
from holdfast.errors import ExitCode
from holdfast.events import (
    ControllerStarted,
    DeviceFault,
    ExitReason,
    NodeCreated,
    NodeUnavailable,
    RankExited,
    RecoveryDecided,
    TimerExpired,
)
from holdfast.findings import Owner
from holdfast.job.backend import NodeId
from holdfast.job.quarantine import Certainty, MachineEvidence
from holdfast.job.spec import Recovery

RECOVERY = Recovery(max_restarts=100)
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
HARDWARE = [fault for fault in DeviceFault if node_blame(fault) is NodeBlame.CERTAIN]
SUSPECT = [DeviceFault.CONTAINED, DeviceFault.NIC_LINK_DOWN, DeviceFault.UNCLEAR, DeviceFault.NCCL_SYSTEM]


def failed(fault: DeviceFault, **changes: object) -> Failure:
    known = Failure(
        kind=FailureKind(fault.value),
        at=100_000.0,
        node=1,
        machine="m7",
        attempt=4,
        rank=3,
        code=1,
        error="RuntimeError: ?",
        step=50,
        has_session=True,
        uptime_s=60.0,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def replaces(verdict: Verdict) -> tuple[Action, bool, bool]:
    return verdict.action, verdict.replace_node, verdict.avoid_machine


# The policy


def test_classes_are_told_apart_by_what_follows_them() -> None:
    assert set(HARDWARE) == {
        DeviceFault.GPU,
        DeviceFault.MEMORY,
        DeviceFault.NVLINK,
        DeviceFault.RESET,
        DeviceFault.NIC,
        DeviceFault.NOT_READY,
    }
    assert set(DeviceFault) - {*HARDWARE, *SUSPECT} == {DeviceFault.NCCL_REMOTE}


@pytest.mark.parametrize("fault", HARDWARE)
@pytest.mark.parametrize("step", [0, 50])
def test_node_is_replaced_at_its_first_fault_of_hardware(fault: DeviceFault, step: int) -> None:
    verdict = decide(failed(fault, step=step), (), RECOVERY)
    assert replaces(verdict) == (Action.REPLACE_NODE, True, True)
    assert verdict.finding.code == fault.value
    assert verdict.finding.owner is Owner.CLUSTER


def test_each_fault_has_its_repair(golden: Golden) -> None:
    first = (failed(fault, at=90_000.0, step=20) for fault in SUSPECT)
    golden(
        *(printed(decide(failed(fault), (), RECOVERY).finding) for fault in HARDWARE),
        *(printed(decide(each, (), RECOVERY).finding) for each in first),
        printed(decide(failed(SUSPECT[0]), (failed(SUSPECT[0], at=90_000.0, step=20),), RECOVERY).finding),
    )


@pytest.mark.parametrize("fault", SUSPECT)
def test_fault_that_hardware_may_have_caused_replaces_the_node_the_second_time(fault: DeviceFault) -> None:
    first, now = failed(DeviceFault.CONTAINED, at=90_000.0, step=20), failed(fault)
    assert replaces(decide(first, (), RECOVERY)) == (Action.RESTART, False, False)
    assert replaces(decide(now, (first,), RECOVERY)) == (Action.REPLACE_NODE, True, True)


@pytest.mark.parametrize("fault", [DeviceFault.UNCLEAR, DeviceFault.NCCL_SYSTEM])
def test_error_that_settings_may_cause_replaces_no_node_before_the_first_step_and_ends_the_run(
    fault: DeviceFault,
) -> None:
    tries = [failed(fault, step=0, rank=rank, node=rank, machine="m7") for rank in (3, 1, 2)]
    assert replaces(decide(tries[0], (), RECOVERY)) == (Action.RESTART, False, False)
    assert replaces(decide(tries[1], tuple(tries[:1]), RECOVERY)) == (Action.RESTART, False, False)
    assert decide(tries[2], tuple(tries[:2]), RECOVERY).action is Action.STOP


@pytest.mark.parametrize("fault", [DeviceFault.UNCLEAR, DeviceFault.NCCL_SYSTEM])
def test_such_an_error_of_a_program_without_a_session_counts_once_it_has_run_for_30_s(fault: DeviceFault) -> None:
    late = failed(fault, step=0, has_session=False, uptime_s=3600.0)
    assert "A second fault of node1" in decide(late, (), RECOVERY).finding.remedy
    assert decide(late, (replace(late, at=90_000.0),), RECOVERY).action is Action.REPLACE_NODE
    for early in (replace(late, uptime_s=29.0), replace(late, has_session=True)):
        assert "A second fault" not in decide(early, (), RECOVERY).finding.remedy
        assert decide(late, (replace(early, at=90_000.0),), RECOVERY).action is Action.RESTART


@pytest.mark.parametrize("fault", [DeviceFault.CONTAINED, DeviceFault.NIC_LINK_DOWN])
def test_fault_that_no_setting_explains_counts_before_the_first_step_too(fault: DeviceFault) -> None:
    first = failed(fault, step=0)
    assert "A second fault of node1" in decide(first, (), RECOVERY).finding.remedy
    for step in (0, 50):
        second = failed(fault, step=step)
        assert decide(second, (replace(first, at=90_000.0),), RECOVERY).action is Action.REPLACE_NODE


@pytest.mark.parametrize(
    "earlier",
    [
        failed(DeviceFault.CONTAINED, machine="m8"),
        failed(DeviceFault.CONTAINED, at=100_000.0 - 86_400.0),
        failed(DeviceFault.NCCL_REMOTE),
        failed(DeviceFault.CONTAINED, kind=FailureKind.KILLED, code=15),
        failed(DeviceFault.CONTAINED, kind=FailureKind.CRASHED),
    ],
    ids=["another machine", "too long ago", "a peer's fault", "a signal", "a program error"],
)
def test_other_failures_make_no_node_suspect(earlier: Failure) -> None:
    assert decide(failed(DeviceFault.CONTAINED), (earlier,), RECOVERY).action is Action.RESTART


def test_shorter_window_forgets_sooner() -> None:
    first = failed(DeviceFault.CONTAINED, at=99_000.0, step=20)
    assert decide(failed(DeviceFault.UNCLEAR), (first,), RECOVERY).action is Action.REPLACE_NODE
    short = Recovery(max_restarts=100, suspect_window_s=600.0)
    assert decide(failed(DeviceFault.UNCLEAR), (first,), short).action is Action.RESTART


def test_peer_that_has_gone_is_no_fault_of_the_node() -> None:
    remote = failed(DeviceFault.NCCL_REMOTE)
    earlier = tuple(replace(remote, at=at, step=step) for at, step in ((99_000.0, 20), (99_500.0, 30)))
    assert decide(remote, earlier, RECOVERY).action is Action.RESTART


def test_finding_says_what_takes_the_place_of_the_node(golden: Golden) -> None:
    verdicts = [decide(failed(DeviceFault.GPU), (), RECOVERY, spare) for spare in Spare]
    actions = [Action.PROMOTE if spare is Spare.STANDBY else Action.REPLACE_NODE for spare in Spare]
    assert [verdict.action for verdict in verdicts] == actions
    golden(*(f"{spare.name}\n{printed(verdict.finding)}" for spare, verdict in zip(Spare, verdicts, strict=True)))
    crash = failed(DeviceFault.GPU, kind=FailureKind.CRASHED)
    assert not [spare for spare in Spare if str(spare) in decide(crash, (), RECOVERY, spare).finding.remedy]


def test_replaced_machines_that_all_fail_alike_without_a_step_end_the_run(golden: Golden) -> None:
    three = [failed(DeviceFault.NOT_READY, step=0, machine=f"m{number}") for number in range(3)]
    assert decide(three[1], (three[0],), RECOVERY).action is Action.REPLACE_NODE
    verdict = decide(three[2], tuple(three[:2]), RECOVERY)
    assert (verdict.action, verdict.exit_code) == (Action.STOP, ExitCode.NODES_LOST)
    golden(printed(verdict.finding))


def test_budget_of_restarts_holds_for_replaced_nodes_too() -> None:
    verdict = decide(failed(DeviceFault.GPU), (), Recovery(max_restarts=0))
    assert (verdict.action, verdict.exit_code) == (Action.STOP, ExitCode.NODES_LOST)


def test_replica_of_a_failed_device_gets_another_node_at_once() -> None:
    several = Recovery(max_restarts=100, replicas=2)
    assert replaces(decide(failed(DeviceFault.NVLINK), (), several)) == (Action.REPLACE_NODE, True, True)


# The root cause


def device(rank: int, at: float, fault: DeviceFault, error: str = ECC, **how: object) -> RankExited:
    return msgspec.structs.replace(rank_exited(rank, at, error=error), device_fault=fault, **how)


@pytest.mark.parametrize("fault", DeviceFault)
def test_every_fault_is_a_kind_of_failure_with_the_line_as_evidence(fault: DeviceFault) -> None:
    line = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
    failure = root_cause(rank_failures=(device(1, 11.0, fault, evidence=line),))
    assert failure.kind == fault.value
    assert failure.evidence == (line,)
    assert not failure.is_program_error


def test_signal_that_ended_a_rank_with_a_failed_device_is_its_exit_code_as_a_shell_says_it() -> None:
    end = device(1, 11.0, DeviceFault.CONTAINED, reason=ExitReason.SIGNAL, code=6)
    failure = root_cause(rank_failures=(end,))
    assert failure.code == 134
    assert decide(failure, (), Recovery(max_restarts=0)).exit_code == 134
    assert root_cause(rank_failures=(device(1, 11.0, DeviceFault.CONTAINED, code=3),)).code == 3


@pytest.mark.parametrize(
    "peer",
    [
        rank_exited(0, 10.0, error=CLOSED),
        device(0, 10.0, DeviceFault.NCCL_REMOTE, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1"),
        device(0, 10.0, DeviceFault.NCCL_SYSTEM, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1"),
        device(0, 10.0, DeviceFault.NIC_LINK_DOWN, CLOSED),
    ],
    ids=["gloo", "remote", "system", "a link that flapped before"],
)
def test_rank_with_the_failed_device_is_the_cause_though_its_peers_end_first(peer: RankExited) -> None:
    failure = root_cause(rank_failures=(peer, device(1, 11.0, DeviceFault.MEMORY)))
    assert (failure.rank, failure.kind) == (1, FailureKind.GPU_MEMORY_FAILED)


def test_failed_device_explains_a_hang_of_the_others() -> None:
    failure = root_cause(hangs=(hung(0),), rank_failures=(device(1, 19.0, DeviceFault.GPU),))
    assert (failure.rank, failure.kind) == (1, FailureKind.GPU_FAILED)


def test_of_ranks_that_end_together_the_one_with_the_failed_device_is_the_cause() -> None:
    failure = root_cause(
        rank_failures=(rank_exited(0, 11.0, error="RuntimeError: ?"), device(1, 11.0, DeviceFault.GPU))
    )
    assert failure.rank == 1


# The run


def fails(node: int, fault: DeviceFault, *, attempt: int = 0, at: float = 20.0) -> RankExited:
    return msgspec.structs.replace(exited(node, code=1, attempt=attempt, at=at), device_fault=fault, error=ECC)


def decided(run: Run) -> RecoveryDecided:
    (event,) = (event for event in run.decisions if isinstance(event, RecoveryDecided))
    return event


def replacements(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, AvoidMachine | ReplaceNode)]


def test_failed_node_is_replaced_once_its_ranks_are_gone_and_its_machine_avoided_first() -> None:
    run = Run(nodes=2)
    run.do(NodeCreated(at=0.5, node=1, generation=0, machine="m7"))
    run.running()
    assert replacements(run.do(fails(1, DeviceFault.GPU), stopped(0))) == []
    avoid, request = replacements(run.do(stopped(1)))
    evidence = MachineEvidence(certainty=Certainty.CERTAIN, finding=decided(run).finding)
    assert avoid == AvoidMachine(node_id=NodeId(node=1, generation=0), machine="m7", evidence=evidence)
    assert isinstance(request, ReplaceNode)
    assert request.node_id == NodeId(node=1, generation=1)
    assert decided(run).finding.remedy.startswith(Spare.NONE)
    run.do(NodeCreated(at=22.0, node=1, generation=1, machine="m8"))
    assert starts(run.do(joined(1, generation=1, at=23.0))) == [(0, 1)]


def test_ready_standby_takes_the_place_of_a_node_with_a_failed_device() -> None:
    run = Run(nodes=2, standby=1).running()
    run.do(ready(2))
    run.do(fails(1, DeviceFault.MEMORY), stopped(0))
    commands = run.do(stopped(1))
    assert (promotions(run), starts(commands)) == ([(2, 1)], [(0, 2)])
    assert decided(run).action == Action.PROMOTE
    assert decided(run).finding.remedy.startswith(Spare.STANDBY)


def test_elastic_run_without_a_spare_goes_on_with_fewer_nodes() -> None:
    run = Run(nodes=3, least=2).running()
    run.do(fails(2, DeviceFault.GPU), stopped(0), stopped(1))
    run.do(stopped(2))
    assert decided(run).finding.remedy.startswith(Spare.FEWER_NODES)
    run.do(NodeUnavailable(at=21.0, node=2, generation=1, reason="there are 3 machines for nodes here"))
    assert starts(run.do(TimerExpired(at=80.0, timer=Timer.MIN_NODES.key(0)))) == [(0, 1)]


def test_second_suspicion_counts_per_machine_and_not_per_node_number() -> None:
    run = Run(nodes=1, max_restarts=10).running()
    faults = [DeviceFault.CONTAINED, DeviceFault.NIC_LINK_DOWN, DeviceFault.CONTAINED]
    for attempt, (fault, replaced) in enumerate(zip(faults, [False, True, False], strict=True)):
        run.do(fails(0, fault, attempt=attempt, at=20.0 + attempt))
        commands = run.do(stopped(0, attempt=attempt))
        assert bool(replacements(commands)) is replaced
        if replaced:
            commands = run.do(joined(0, generation=1, incarnation="other", at=30.0))
        assert starts(commands) == [(0,)]


def test_next_controller_avoids_the_machine_too() -> None:
    run = Run(nodes=2)
    run.do(NodeCreated(at=0.5, node=1, generation=0, machine="m7"))
    run.running()
    run.do(fails(1, DeviceFault.GPU), stopped(0), stopped(1))
    again = [one for one in run.do(ControllerStarted(at=40.0, pid=2, incarnation="d")) if isinstance(one, AvoidMachine)]
    assert again == [AvoidMachine(node_id=NodeId(node=1, generation=0), machine="m7")]
