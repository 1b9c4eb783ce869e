"""Every alert fires where it should and resolves afterwards: Prometheus's own rule engine, on series of real events."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from holdfast.diagnose.knowledge.index import FINDINGS
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AnyEvent,
    AttemptStarted,
    CheckpointCommitted,
    FabricObserved,
    FindingRaised,
    NodeRequested,
    Outcome,
    RanksStarted,
    RankState,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ScalingEffect,
    StepCommitted,
    WorldSizeChanged,
)
from holdfast.findings import Finding, Severity
from holdfast.observe.alert_catalog import ALERTS
from holdfast.observe.exposition import format_metrics
from holdfast.observe.rules_file import rules_document
from holdfast.observe.run_observation import RunObservation, observe_event

MINUTE = 60
SAMPLE = re.compile(r"^(?P<series>\S+\{.*\}) (?P<value>\S+)$")


class Scenario(NamedTuple):
    """What happens in a run, and when its alert must have fired and have ended, in minutes."""

    events: list[AnyEvent]
    fires: int
    resolved: int


def attempt(number: int, at: float) -> list[AnyEvent]:
    states = (RankState(rank=0, pid=1), RankState(rank=1, pid=2))
    return [
        AttemptStarted(at=at, replica=0, attempt=number, world_size=2, master_addr="a", master_port=1, nodes=(0, 1)),
        RanksStarted(at=at, node=0, replica=0, attempt=number, ranks=states),
    ]


def steps(first: int, last: int, *, attempt: int = 0) -> list[AnyEvent]:
    """A step each minute, of one minute; step N ends at minute N."""
    return [
        StepCommitted(
            at=step * MINUTE, replica=0, attempt=attempt, step=step, started=(step - 1) * MINUTE, ended=step * MINUTE
        )
        for step in range(first, last + 1)
    ]


def begun() -> list[AnyEvent]:
    nodes = [event for node in range(2) for event in (NodeRequested(at=0, node=node, generation=0), joined(node))]
    return [RunCreated(at=0, run="r-1", job={"name": "r"}), *nodes, *attempt(0, 1)]


def joined(node: int, at: float = 1) -> AgentConnected:
    return AgentConnected(
        at=at, node=node, generation=0, incarnation="i", hostname=f"host{node}", address="a", port=1, pid=1
    )


def saved(at_minute: int) -> CheckpointCommitted:
    return CheckpointCommitted(at=at_minute * MINUTE, node=0, replica=0, attempt=0, step=at_minute, path="c")


def failed(at_minute: float, attempt: int = 0, code: str = "rank-killed") -> RecoveryDecided:
    finding = Finding(code=code, what="it failed")
    at = at_minute * MINUTE
    return RecoveryDecided(at=at, replica=0, attempt=attempt, action="restart", failed_at=at, finding=finding)


def raised(code: str) -> Scenario:
    finding = FindingRaised(at=5 * MINUTE, finding=Finding(code=code, what="seen", severity=Severity.WARNING))
    return Scenario(in_order([*begun(), *steps(1, 30), finding]), fires=10, resolved=25)


def in_order(events: list[AnyEvent]) -> list[AnyEvent]:
    return sorted(events, key=lambda event: event.at)


def _loop() -> list[AnyEvent]:
    found = begun() + steps(1, 4)
    for number in range(5):
        found += [failed(5 + number, number), *attempt(number + 1, (5 + number) * MINUTE + 20)]
    return in_order(found + steps(10, 60, attempt=5))


def _without_a_node() -> list[AnyEvent]:
    missing = WorldSizeChanged(
        at=1,
        replica=0,
        attempt=0,
        nodes=(0,),
        missing_nodes=(1,),
        world_size=1,
        full_world_size=2,
        global_batch=ScalingEffect.KEPT,
        learning_rate=ScalingEffect.KEPT,
    )
    whole = WorldSizeChanged(
        at=40 * MINUTE + 1,
        replica=0,
        attempt=1,
        nodes=(0, 1),
        world_size=2,
        full_world_size=2,
        global_batch=ScalingEffect.KEPT,
        learning_rate=ScalingEffect.KEPT,
    )
    return in_order([*begun(), missing, *steps(1, 40), *attempt(1, 40 * MINUTE), whole, *steps(42, 60, attempt=1)])


def _other_network() -> list[AnyEvent]:
    seen = FabricObserved(
        at=3 * MINUTE,
        node=0,
        replica=0,
        attempt=0,
        promised="infiniband",
        communicator="0x2",
        size=2,
        ranks=((0, 0),),
        spans_nodes=True,
        network="Socket",
        between={"NET/Socket": 8},
        nics=1,
    )
    return in_order([*begun(), *steps(1, 9), seen, failed(10), *attempt(1, 11 * MINUTE), *steps(12, 20, attempt=1)])


def _lost_agent() -> list[AnyEvent]:
    lost = AgentDisconnected(at=3 * MINUTE, node=1, generation=0, incarnation="i")
    return in_order([*begun(), *steps(1, 20), lost, joined(1, 12 * MINUTE)])


FINISHED = RunFinished(at=10 * MINUTE, outcome=Outcome.FAILED, exit_code=1)
SCENARIOS: Mapping[str, Scenario] = {
    "HoldfastRunFailed": Scenario([*begun(), *steps(1, 9), FINISHED], fires=12, resolved=28),
    "HoldfastRunStalled": Scenario([*begun(), *steps(1, 5), *steps(40, 45)], fires=30, resolved=42),
    "HoldfastRunNotStarting": Scenario([begun()[0], *attempt(0, 40 * MINUTE), *steps(41, 45)], fires=35, resolved=43),
    "HoldfastRunRecovering": Scenario(
        in_order([*begun(), *steps(1, 5), failed(6), *attempt(1, 25 * MINUTE), *steps(26, 30, attempt=1)]), 20, 28
    ),
    "HoldfastRestartsLooping": Scenario(_loop(), fires=12, resolved=50),
    "HoldfastEttrLow": Scenario(
        in_order([*begun(), *steps(1, 5), failed(6), *attempt(1, 20 * MINUTE), *steps(21, 170, attempt=1)]), 80, 165
    ),
    "HoldfastCheckpointOld": Scenario(in_order([*begun(), *steps(1, 200), saved(30), saved(180)]), 160, 190),
    "HoldfastFabricFallback": Scenario(_other_network(), fires=8, resolved=18),
    "HoldfastDegraded": Scenario(_without_a_node(), fires=35, resolved=50),
    "HoldfastNodeDown": Scenario(_lost_agent(), fires=10, resolved=15),
    "HoldfastStraggler": raised("straggler"),
    "HoldfastRunSlow": raised("run-slow"),
    "HoldfastGpuFault": Scenario(
        in_order([*begun(), *steps(1, 4), failed(5, code="gpu-failed"), *attempt(1, 360), *steps(7, 30, attempt=1)]),
        fires=10,
        resolved=25,
    ),
    "HoldfastNetworkFault": raised("nic-link-down"),
    "HoldfastNotFinite": raised("loss-not-finite"),
    "HoldfastSilentCorruption": raised("silent-corruption"),
    "HoldfastMemoryGrowing": raised("memory-growing"),
    "HoldfastMachineQuarantined": raised("machine-quarantined"),
    "HoldfastDisk": raised("disk-full"),
}


def input_series(events: Iterable[AnyEvent], minutes: int) -> list[dict[str, str]]:
    """What Prometheus sees of a run that it scrapes each minute."""
    known, left = RunObservation(), list(events)
    values: dict[str, list[str]] = {}
    for minute in range(minutes + 1):
        while left and left[0].at <= minute * MINUTE:
            known = observe_event(known, left.pop(0))
        text, _ = format_metrics({"r-1": known}, now=minute * MINUTE)
        found = {
            match["series"]: match["value"] for line in text.decode().splitlines() if (match := SAMPLE.match(line))
        }
        for series in values.keys() | found.keys():
            values.setdefault(series, ["_"] * minute).append(found.get(series, "stale"))
    return [{"series": series, "values": " ".join(each)} for series, each in values.items()]


def test_every_alert_has_a_scenario() -> None:
    assert {alert.name for alert in ALERTS} == SCENARIOS.keys()


def test_codes_in_expressions_exist() -> None:
    known = {each.code for rows in FINDINGS.values() for each in rows}
    for alert in ALERTS:
        for pattern in set(re.findall(r'code=~"([^"]*)"', alert.expression)):
            for alternative in re.split(r"\|(?![^(]*\))", pattern):
                assert any(re.fullmatch(alternative, code) for code in known), f"{alert.name}: no {alternative}"


@pytest.mark.slow
@pytest.mark.needs("promtool")
def test_every_alert_fires_and_resolves(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules_document()))
    tests: list[dict[str, object]] = []
    for alert in ALERTS:
        scenario = SCENARIOS[alert.name]
        series = input_series(scenario.events, scenario.resolved + 1)
        firing = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing",run="r-1"}}) > 0'
        tests.append(
            {
                "name": alert.name,
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": firing, "eval_time": "1m", "exp_samples": []},
                    {
                        "expr": firing,
                        "eval_time": f"{scenario.fires}m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    },
                    {"expr": firing, "eval_time": f"{scenario.resolved}m", "exp_samples": []},
                ],
            }
        )
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    ran = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
