"""What can be broken on purpose: every row has somebody who does it; the rest is refused with a reason."""

from __future__ import annotations

import pytest

from holdfast.agent import fault_injection as of_agents
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import FaultAction, FaultRequested, FaultTarget
from holdfast.findings import Finding
from holdfast.job.fault_catalog import FAULTS, NEEDS_MEMORY_LIMIT, NEEDS_NETNS, NEEDS_REPLICAS, Executor, check_fault
from holdfast.job.isolation import Isolation
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Nodes, Recovery, Resources
from holdfast.launch.local import controller_faults as outside

TWO_NODES = RunSpec(
    job=Job(command=("train",), nodes=Nodes(min=2, max=2), ranks_per_node=3), base="/", created_at=1.0, fabric="tcp"
)


def asked(
    action: FaultAction,
    target: FaultTarget,
    index: int = 0,
    *,
    for_s: float | None = None,
    amount: float | None = None,
) -> FaultRequested:
    return FaultRequested(at=1.0, action=action, target=target, index=index, for_s=for_s, amount=amount)


def refusal(drill: FaultRequested, code: ExitCode) -> Finding:
    with pytest.raises(HoldfastError) as raised:
        check_fault(drill, TWO_NODES, "run-1")
    assert raised.value.exit_code is code
    return raised.value.findings[0]


def test_every_row_is_carried_out_by_who_it_says() -> None:
    assert {pair for pair, row in FAULTS.items() if row.executor is Executor.AGENT} == set(of_agents.INJECT_FUNCTIONS)
    assert {pair for pair, row in FAULTS.items() if row.executor is Executor.CONTROLLER} == set(
        outside.INJECT_FUNCTIONS
    )


def test_every_row_is_accepted_where_nodes_are_kept_apart_as_it_needs() -> None:
    for (action, target), row in FAULTS.items():
        limited = {"resources": Resources(memory=1 << 30)} if row.precondition is NEEDS_MEMORY_LIMIT else {}
        several = {"recovery": Recovery(replicas=2)} if row.precondition is NEEDS_REPLICAS else {}
        apart = {"isolation": Isolation.NETNS} if row.precondition is NEEDS_NETNS else {}
        place = TWO_NODES.model_copy(update={**apart, "job": TWO_NODES.job.model_copy(update={**limited, **several})})
        much, span = 9.0 if row.amount_unit else None, 2.0 if row.reversible else None
        check_fault(asked(action, target, amount=much, for_s=span), place, "run-1")


@pytest.mark.parametrize(("action", "amount"), [(FaultAction.CLOCK_SKEW, None), (FaultAction.KILL, 3.0)])
def test_amount_is_given_where_a_drill_takes_one_and_nowhere_else(action: FaultAction, amount: float | None) -> None:
    finding = refusal(asked(action, FaultTarget.AGENT, amount=amount), ExitCode.USAGE)
    assert finding.code == "bad-fault"
    assert "--amount" in finding.remedy


def test_pair_without_a_row_is_refused_with_what_there_is() -> None:
    finding = refusal(asked(FaultAction.PARTITION, FaultTarget.RANK), ExitCode.USAGE)
    assert finding.code == "bad-fault"
    assert "`partition` takes `node`" in finding.remedy
    assert "a rank takes `kill` or `stop` or `raise` or `hang`" in finding.remedy


def test_kill_for_a_while_is_refused() -> None:
    finding = refusal(asked(FaultAction.KILL, FaultTarget.NODE, for_s=3.0), ExitCode.USAGE)
    assert "cannot last 3 s" in finding.what
    reversible = ("data-stall", "fill", "leak", "link-errors", "partition", "slow", "stop", "throttle")
    assert f"`--for` goes with {' or '.join(f'`{name}`' for name in reversible)}" in finding.remedy


def test_partition_of_nodes_that_share_a_network_is_refused_with_the_remedy() -> None:
    finding = refusal(asked(FaultAction.PARTITION, FaultTarget.NODE), ExitCode.CANNOT_RUN_HERE)
    assert finding.code == "fault-unavailable"
    assert finding.evidence == ("the nodes of run-1 have `isolation: process`",)
    assert "isolation: netns" in finding.remedy


def test_memory_of_a_node_without_a_limit_is_not_exhausted() -> None:
    finding = refusal(asked(FaultAction.OOM, FaultTarget.NODE), ExitCode.CANNOT_RUN_HERE)
    assert (finding.code, finding.where) == ("fault-unavailable", "resources.memory")


@pytest.mark.parametrize(
    ("target", "index", "last"),
    [(FaultTarget.RANK, 6, 5), (FaultTarget.NODE, 2, 1), (FaultTarget.AGENT, 2, 1), (FaultTarget.NODE, -1, 1)],
)
def test_target_that_a_run_does_not_have_is_refused_with_those_it_has(
    target: FaultTarget, index: int, last: int
) -> None:
    finding = refusal(asked(FaultAction.KILL, target, index), ExitCode.NOT_FOUND)
    assert finding.code == "no-such-fault-target"
    assert finding.remedy == f"It has {target}s 0 to {last}."


def test_return_of_a_machine_waits_for_no_step() -> None:
    back = FaultRequested(at=1.0, action=FaultAction.RESTORE, target=FaultTarget.NODE, index=1, at_step=3)
    assert "--at-step" in refusal(back, ExitCode.USAGE).remedy


def test_quorum_of_a_single_replica_is_refused_with_the_remedy() -> None:
    finding = refusal(asked(FaultAction.KILL, FaultTarget.LIGHTHOUSE), ExitCode.CANNOT_RUN_HERE)
    assert (finding.code, finding.where) == ("fault-unavailable", "recovery.replicas")
    assert "recovery.replicas=2" in finding.remedy


def test_nothing_is_slowed_by_less_than_once() -> None:
    assert "--amount 3" in refusal(asked(FaultAction.SLOW, FaultTarget.NODE, amount=0.5), ExitCode.USAGE).remedy
