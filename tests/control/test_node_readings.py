"""What a node's monitors read becomes numbers that a scrape of the controller shows."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.control.agent_connections import AgentConnection, AgentRegistry
from holdfast.control.node_readings import MAX_NODES_READ, MIN_INTERVAL_S, STALE_S, NodeReadingsStore
from holdfast.events import AgentConnected, DeviceFault
from holdfast.host.memory_usage import MemoryUsage
from holdfast.observe.exported_metrics import NODE_ROWS
from holdfast.protocol.orders import NodeReadings, Order, ReadMonitors
from holdfast.watch.gpu_readings import GpuReading, GpuState
from holdfast.watch.monitor import Symptom
from holdfast.watch.monitor_loop import MonitorLoop
from holdfast.watch.monitor_table import GPUS, MEMORY, NodePlace, monitors
from holdfast.watch.node_values import NODE_VALUES, node_values


def classify(_text: str) -> None:
    """No line tells of a fault."""


def ignore(_source: str, _symptom: Symptom) -> None: ...


def is_visible(_index: int, _uuid: str) -> bool:
    return True


PLACE = NodePlace(address="127.0.0.1", classify=classify, is_visible=is_visible)


def test_every_number_has_a_row_and_each_row_a_number() -> None:
    assert {row.name.removeprefix("node_") for row in NODE_ROWS} == set(NODE_VALUES)


def test_every_number_is_of_a_source_that_an_agent_reads() -> None:
    assert {row.source for row in NODE_VALUES.values()} <= {row.source for row in monitors(PLACE)}


def test_this_machine_has_numbers_of_its_memory_and_network() -> None:
    loop = MonitorLoop([row for row in monitors(PLACE) if not row.asks_driver], ignore)
    loop.open()
    loop.step()
    found = node_values((source, each.reading) for source, each in loop.latest().items())
    assert 0 < found["memory_used_ratio"] < 1
    assert "links_down" in found
    assert "gpus_failed" not in found


def test_devices_of_a_node_are_added_up() -> None:
    cold = GpuState(temperature_c=40, power_w=100.0, utilisation=50, uncorrectable=1)
    hot = replace(cold, temperature_c=90, uncorrectable=2)
    lost = GpuState(failure=DeviceFault.GPU)
    gpus = GpuReading(at_s=1.0, gpus={"GPU 0": cold, "GPU 1": hot, "GPU 2": lost})
    memory = MemoryUsage(where="machine", used_bytes=3, limit_bytes=4, stalled=25.0)
    assert node_values([(GPUS, gpus), (MEMORY, memory)]) == {
        "memory_used_ratio": 0.75,
        "memory_stalled_ratio": 0.25,
        "gpus_failed": 1.0,
        "gpu_temperature_celsius": 90.0,
        "gpu_power_watts": 200.0,
        "gpu_utilization_ratio": 0.5,
        "gpu_memory_errors": 3.0,
    }


class Node:
    """The controller's end of a connection."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def send(self, order: Order) -> None:
        self.orders.append(order)

    def after_sent(self, act: object) -> None: ...

    def close(self) -> None: ...


def test_agents_are_asked_only_when_the_controller_is_scraped() -> None:
    agents, now, peers = AgentRegistry(), [0.0], list[Node]()
    store = NodeReadingsStore(agents, lambda: now[0])
    for node in range(MAX_NODES_READ + 1):
        joined = AgentConnected(
            at=0, node=node, generation=0, incarnation="a", hostname="h", address="a", port=1, pid=1
        )
        peers.append(Node())
        agents.add(AgentConnection(peer=peers[-1], joined=joined, clock_offset_s=0.0))
    assert peers[0].orders == []
    assert store.read() == store.read() == {}
    assert peers[0].orders == [ReadMonitors()]
    assert peers[MAX_NODES_READ].orders == []
    for node in (0, MAX_NODES_READ):
        store.add(NodeReadings(node=node, values={"links_down": 1.0, "made up": 2.0}))
    now[0] = MIN_INTERVAL_S
    assert store.read() == {0: {"links_down": 1.0}}
    assert peers[0].orders == [ReadMonitors()] * 2
    now[0] = STALE_S
    assert store.read() == {}
