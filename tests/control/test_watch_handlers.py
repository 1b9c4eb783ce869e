"""What is observed in running ranks and nodes: who ends an attempt for it, and who only reads of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.control.test_machine import Run, gone, joined, stopped
from tests.control.test_rollout import step
from tests.control.test_standby_promotion import ready

from holdfast.control.commands import AvoidMachine, Command, ReplaceNode, Send, StartAttempt
from holdfast.control.machine import Machine
from holdfast.control.requests import dump_interval_s
from holdfast.control.state import ReplicaPhase
from holdfast.control.watch_handlers import LINK_WINDOW_S
from holdfast.events import (
    DeviceFault,
    DeviceFaultObserved,
    FindingRaised,
    NumericFault,
    NumericFaultObserved,
    RecoveryDecided,
    StragglerObserved,
    TrafficStopped,
)
from holdfast.findings import Finding
from holdfast.job.spec import Job, Watch
from holdfast.protocol.orders import DumpStacks, StopRanks
from holdfast.protocol.watch_levels import WatchLevel


def at_work(watch: Watch | None = None, *, nodes: int = 2, replicas: int = 1, standby: int = 0) -> Run:
    """At work, after step 5."""
    run = Run(nodes=nodes, replicas=replicas, standby=standby, max_restarts=100)
    if watch is not None:
        run.job = Job.model_validate(run.job.model_dump() | {"watch": watch})
        run.machine = Machine(run.job)
    run.running()
    for replica in range(replicas):
        run.do(step(5, replica=replica))
    return run


def numeric(*, damaged: bool = False, spike: bool = False, quantity: str = "loss", at: float = 30.0) -> Any:
    return NumericFaultObserved(
        at=at,
        node=1,
        replica=0,
        attempt=0,
        rank=1,
        step=5,
        fault=NumericFault.SPIKE if spike else NumericFault.NON_FINITE,
        quantity=quantity,
        damaged=damaged,
        finding=Finding(code=f"{quantity}-spike" if spike else "gradient-not-finite", what="the loss of rank 1 is 9"),
    )


def device(fault: DeviceFault, node: int = 1, *, at: float = 30.0, generation: int = 0) -> DeviceFaultObserved:
    finding = Finding(code=fault.value, what="GPU 3 is gone", evidence=("Xid 79",))
    return DeviceFaultObserved(at=at, node=node, generation=generation, fault=fault, device="GPU 3", finding=finding)


def slow(rank: int = 1, *, at: float = 30.0, attempt: int = 0, replica: int = 0) -> StragglerObserved:
    return StragglerObserved(
        at=at,
        node=rank,
        replica=replica,
        attempt=attempt,
        rank=rank,
        phase="forward",
        slowdown=1.4,
        first_step=3,
        last_step=5,
        finding=Finding(code="straggler", what="rank 1 is slow", evidence=("1.4 times the median",)),
    )


def codes(run: Run) -> list[str]:
    return [event.finding.code for event in run.decisions if isinstance(event, FindingRaised)]


def stops(commands: list[Command]) -> bool:
    return any(isinstance(command, Send) and isinstance(command.order, StopRanks) for command in commands)


def replaced(commands: list[Command]) -> list[int]:
    return [command.node_id.node for command in commands if isinstance(command, ReplaceNode)]


@pytest.mark.parametrize(
    ("level", "fault", "acts"),
    [
        (WatchLevel.WARN, numeric(damaged=True), True),
        (WatchLevel.WARN, numeric(), False),
        (WatchLevel.WARN, numeric(spike=True), False),
        (WatchLevel.ACT, numeric(spike=True), True),
        (WatchLevel.ACT, numeric(quantity="gradient"), False),
    ],
    ids=["damage", "a skipped update", "a spike", "a spike that is acted on", "a skipped update, spikes acted on"],
)
def test_damage_ends_the_attempt_and_a_spike_only_where_the_job_wants_it(
    level: WatchLevel, fault: NumericFaultObserved, acts: bool
) -> None:
    run = at_work(Watch(spikes=level))
    assert stops(run.do(fault)) is acts
    assert codes(run) == ([] if acts else [fault.finding.code])
    assert run.phase() is (ReplicaPhase.STOPPING if acts else ReplicaPhase.RUNNING)


def test_node_without_traffic_has_the_stacks_of_its_replica_compared_once_in_an_attempt() -> None:
    run = at_work(replicas=2)
    quiet = TrafficStopped(at=900.0, node=1, finding=Finding(code="traffic-stopped", what="no data"))
    (sent,) = [command for command in run.do(quiet) if isinstance(command, Send)]
    assert sent.order == DumpStacks(requested_at=900.0, rounds=5, interval_s=dump_interval_s(1.0))
    assert sent.nodes == tuple(node.node for node in run.state.nodes_of(run.state.nodes[1].replica or 0))
    assert codes(run) == ["traffic-stopped"]
    assert run.do(msgspec.structs.replace(quiet, at=1600.0)) == []


def test_each_kind_of_spike_is_reported_once_in_an_attempt() -> None:
    run = at_work()
    run.do(numeric(spike=True), numeric(spike=True, at=31.0), numeric(spike=True, quantity="gradient", at=32.0))
    assert codes(run) == ["loss-spike", "gradient-spike"]


def test_observation_of_an_earlier_attempt_changes_nothing() -> None:
    run = at_work()
    run.do(numeric(damaged=True), stopped(0), stopped(1))
    before = run.state
    run.do(numeric(damaged=True, at=40.0), slow())
    assert run.state == before


def test_node_whose_device_fails_is_replaced_before_its_rank_notices() -> None:
    run = at_work()
    assert stops(run.do(device(DeviceFault.GPU)))
    commands = run.do(stopped(0, port=6000), stopped(1, port=6001))
    assert replaced(commands) == [1]
    assert [type(command) for command in commands if isinstance(command, AvoidMachine)] == [AvoidMachine]
    (decided,) = (event for event in run.decisions if isinstance(event, RecoveryDecided))
    assert (decided.finding.code, decided.finding.where, decided.first_failed_rank) == ("gpu-failed", "node1", None)
    assert decided.finding.evidence == ("Xid 79",)


def test_device_that_fails_while_wrong_numbers_stop_the_ranks_is_their_cause() -> None:
    run = at_work()
    run.do(numeric(damaged=True), device(DeviceFault.GPU, at=30.5))
    run.do(stopped(0), stopped(1))
    (decided,) = (event for event in run.decisions if isinstance(event, RecoveryDecided))
    assert decided.finding.code == "gpu-failed"


def test_node_without_ranks_whose_device_fails_is_replaced_too() -> None:
    run = at_work(standby=1)
    commands = run.do(device(DeviceFault.GPU, 2))
    assert replaced(commands) == [2]
    assert not stops(commands)
    assert run.phase() is ReplicaPhase.RUNNING


@pytest.mark.parametrize(
    ("watch", "fault", "reports"),
    [
        (WatchLevel.WARN, DeviceFault.GPU, True),
        (WatchLevel.OFF, DeviceFault.GPU, False),
        (WatchLevel.ACT, DeviceFault.CONTAINED, True),
    ],
    ids=["only warned of", "not watched", "of one program"],
)
def test_device_fault_that_is_not_acted_on_stops_nothing(watch: WatchLevel, fault: DeviceFault, reports: bool) -> None:
    run = at_work(Watch(device_faults=watch))
    assert run.do(device(fault)) == []
    assert codes(run) == [fault.value] * reports


def test_link_that_is_lost_is_tolerated_twice_in_five_minutes() -> None:
    run = at_work()
    times = (30.0, 31.0, 40.0 + LINK_WINDOW_S, 41.0 + LINK_WINDOW_S)
    for at in times:
        assert run.do(device(DeviceFault.NIC_LINK_DOWN, at=at)) == []
    assert stops(run.do(device(DeviceFault.NIC_LINK_DOWN, at=times[-1] + 1.0)))
    assert replaced(run.do(stopped(0), stopped(1))) == [1]


def test_fault_of_a_node_that_was_replaced_since_is_ignored() -> None:
    run = at_work()
    run.do(gone(1), stopped(0), joined(1, generation=1))
    before = run.state
    run.do(device(DeviceFault.GPU, generation=0))
    assert run.state == before


def test_slow_rank_is_replaced_only_where_a_node_can_take_its_place_at_once_and_not_twice() -> None:
    warned = at_work(standby=1)
    assert warned.do(ready(2), slow()) == []
    assert codes(warned) == ["straggler"]
    alone = at_work(Watch(stragglers=WatchLevel.ACT))
    assert alone.do(slow()) == []
    assert codes(alone) == ["straggler"]
    run = at_work(Watch(stragglers=WatchLevel.ACT), standby=1)
    run.do(ready(2))
    assert stops(run.do(slow()))
    commands = run.do(stopped(0, port=6000), stopped(1, port=6001))
    (start,) = (command for command in commands if isinstance(command, StartAttempt))
    assert start.nodes == (0, 2)
    run.do(step(6, 1))
    assert run.do(slow(0, attempt=1, at=60.0)) == []
    assert codes(run) == ["straggler"]
