"""Faults planted in a simulated InfiniBand fabric, found by the checks with the real programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.preflight.simulated_fabric import NODES, PROGRAMS, SimulatedFabric, wait_until

from holdfast.events import DeviceFault
from holdfast.findings import CheckOutcome, Finding
from holdfast.host.rdma_counters import CounterReading
from holdfast.preflight.checks import rdma, rdma_links
from holdfast.preflight.compare import compare
from holdfast.preflight.node_view import NotLookedAt
from holdfast.preflight.run_checks import run_checks
from holdfast.preflight.subnet_links import COUNTERS, error_counters
from holdfast.protocol.node_requirements import NodeRequirements
from holdfast.watch.rdma_ports import port_judge

pytestmark = pytest.mark.needs(*PROGRAMS)

CHECKS = (rdma.rdma_ports, rdma.rdma_rate, rdma_links.rdma_links)
EVERY_NODE = range(1, NODES + 1)
# Full members: SELF is node 1; node 3 lacks the partition of the jobs, and node 4 is a limited member of the default.
PARTITIONS = """Default=0x7fff : ALL=limited, SELF=full, 0x100003=full, 0x100005=full;
jobs=0x0012 : 0x100001=full, 0x100003=full, 0x100007=full;
"""


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedFabric]:
    running = SimulatedFabric(tmp_path_factory.mktemp("fabric"))
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def managed(fabric: SimulatedFabric) -> SimulatedFabric:
    found = {node: findings_of(fabric, node) for node in EVERY_NODE}
    assert {node: codes(each) for node, each in found.items()} == {node: ["rdma-subnet-manager"] for node in EVERY_NODE}
    fabric.start_manager(PARTITIONS)
    return fabric


def findings_of(fabric: SimulatedFabric, node: int) -> list[Finding]:
    results = run_checks(fabric.view(node), CHECKS, 60.0)
    assert [each.reason for each in results if each.outcome is CheckOutcome.NOT_LOOKED_AT] == []
    return [finding for each in results for finding in each.findings]


def codes(found: list[Finding]) -> list[str]:
    return [each.code for each in found]


def test_programs_agree_on_a_fabric_that_a_manager_has_configured(managed: SimulatedFabric) -> None:
    assert "SMINFO_MASTER" in managed.run(2, ("sminfo",))
    assert managed.run(2, ("ibnetdiscover",)).count("4xQDR") == 2 * NODES
    assert managed.run(2, ("iblinkinfo", "-l")).count("Active/  LinkUp") == 2 * NODES
    assert "0 ports have errors" in managed.run(2, ("ibqueryerrors", "--skip-sl"))


def test_node_of_a_healthy_fabric_passes(managed: SimulatedFabric) -> None:
    assert findings_of(managed, 2) == []


def test_limited_member_of_the_default_partition_is_named(managed: SimulatedFabric) -> None:
    assert codes(findings_of(managed, 4)) == ["rdma-partition-limited"]


def test_node_outside_a_partition_differs_from_the_others(managed: SimulatedFabric) -> None:
    found = compare({node: rdma.rdma_facts(managed.view(node)) for node in (1, 2, 3)})
    assert {node: [each.where for each in findings] for node, findings in found.items()} == {
        3: ["InfiniBand partitions"]
    }


@pytest.mark.parametrize(
    ("setting", "healthy", "named"), [("speed", "7", "2.5 Gbit/s a lane"), ("width", "3", "width of 1X")]
)
def test_link_of_low_width_or_speed_is_located_at_its_switch_port(
    managed: SimulatedFabric, setting: str, healthy: str, named: str
) -> None:
    managed.run(1, ("ibportstate", "-D", "0,1", "2", setting, "1"))
    (found,) = findings_of(managed, 2)
    assert (found.code, found.where) == ("rdma-link-degraded", "ibsim0:1, leaf1 port 2")
    assert named in found.what
    assert "because leaf1 port 2 does not enable more" in found.what
    assert findings_of(managed, 3) == []
    managed.run(1, ("ibportstate", "-D", "0,1", "2", setting, healthy))
    assert findings_of(managed, 2) == []


def test_symbol_errors_of_one_link_are_located_at_its_switch_port(managed: SimulatedFabric) -> None:
    managed.command('PerformanceSet "leaf1"[3] PortCounters.SymbolErrorCounter=5000')
    wait_until(lambda: "SymbolErrorCounter == 5000" in managed.run(1, ("ibqueryerrors", "--skip-sl")))
    (found,) = findings_of(managed, 3)
    assert (found.code, found.where) == ("rdma-link-errors", "ibsim0:1, leaf1 port 3")
    assert found.evidence == ("leaf1 port 3: SymbolErrorCounter 5000",)
    assert findings_of(managed, 2) == []
    managed.run(1, ("ibqueryerrors", "-k", "--skip-sl"))


def test_errors_that_grow_while_a_job_runs_are_found_by_perfquery_too(managed: SimulatedFabric) -> None:
    def reading(at_s: float) -> CounterReading:
        counted = error_counters(managed.run(1, ("perfquery", "1", "1")))
        return CounterReading(at_s=at_s, ports={"ibsim0:1": {COUNTERS[name]: each for name, each in counted.items()}})

    judge = port_judge(None)
    assert [*judge(reading(0.0), 0.0)] == []
    managed.command('PerformanceSet "node1"[1] PortCounters.SymbolErrorCounter=900')
    wait_until(lambda: reading(0.0).ports["ibsim0:1"]["symbol_error"] == 900)
    (found,) = judge(reading(5.0), 5.0)
    assert (found.code, found.evidence()) == ("fabric-link-errors", ("ibsim0:1 in 5 s: symbol_error +900",))
    managed.command('PerformanceSet "node1"[1] PortCounters.LinkDownedCounter=2')
    wait_until(lambda: reading(5.0).ports["ibsim0:1"]["link_downed"] == 2)
    (lost,) = judge(reading(10.0), 10.0)
    assert (lost.code, lost.fault) == ("fabric-link-down", DeviceFault.NIC_LINK_DOWN)
    managed.run(1, ("ibqueryerrors", "-k", "--skip-sl"))


def test_port_without_link_is_down(managed: SimulatedFabric) -> None:
    managed.command('Unlink "node3"[1]')
    wait_until(lambda: "Polling" in managed.run(3, ("ibstat",)))
    assert codes(findings_of(managed, 3)) == ["rdma-port-down"]
    assert findings_of(managed, 2) == []
    managed.command('ReLink "node3"[1]')
    wait_until(lambda: "Active" in managed.run(3, ("ibstat",)))


def test_node_without_the_programs_is_no_pass(managed: SimulatedFabric) -> None:
    with pytest.raises(NotLookedAt, match="no program `smpquery`"):
        list(rdma_links.rdma_links(managed.view(2, programs=False)))


def test_file_that_may_not_be_opened_is_no_pass(managed: SimulatedFabric) -> None:
    view = managed.view(2)
    (view.root / "dev/infiniband/umad0").unlink()
    with pytest.raises(NotLookedAt, match="/dev/infiniband/umad0: missing, or no permission"):
        list(rdma_links.rdma_links(view))


def test_network_without_verbs_needs_no_programs(managed: SimulatedFabric) -> None:
    view = managed.view(2, programs=False)
    assert [*rdma_links.rdma_links(type(view)(wanted=NodeRequirements(network="Socket"), root=view.root))] == []
