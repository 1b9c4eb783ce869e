"""The row of RDMA ports, on a tree whose files change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.host.test_rdma_counters import H100_PORT, write

from holdfast.events import DeviceFault
from holdfast.host.rdma_counters import COUNTERS, HW_COUNTERS
from holdfast.watch.monitor import SourceMissing, Symptom
from holdfast.watch.rdma_ports import PERIOD_S, open_ports, port_judge

MOST_OF_A_CORE = 0.002


def h100_node(root: Path) -> None:
    counters = {f"counters/{name}": "205128687774249" for name in COUNTERS}
    counters |= {f"hw_counters/{name}": "12" for name in HW_COUNTERS}
    for number in range(8):
        write(root, f"mlx5_{number}", H100_PORT | counters | {"counters/link_downed": "2"})


def test_each_loss_of_a_link_is_a_fault_of_its_port(tmp_path: Path) -> None:
    h100_node(tmp_path)
    source = open_ports(tmp_path)
    judge = port_judge(source)

    def poll(at_s: float, **files: str) -> list[Symptom]:
        write(tmp_path, "mlx5_4", {name.replace("__", "/"): text for name, text in files.items()})
        return [*judge(source.read(at_s), at_s)]

    down, up = "1: DOWN", "4: ACTIVE"
    assert poll(0.0) == []
    (found,) = poll(5.0, counters__link_downed="3", state=down)
    assert (found.code, found.fault, found.device) == ("fabric-link-down", DeviceFault.NIC_LINK_DOWN, "mlx5_4:1")
    assert found.finding("node3").evidence == ("mlx5_4:1 in 5 s: link_downed +1",)
    assert poll(10.0) == []
    assert poll(15.0, state=up) == []
    (again,) = poll(20.0, counters__link_downed="5")
    assert "went down 2 times" in again.what
    assert poll(25.0) == []
    (silent,) = poll(30.0, state=down)  # a driver without that counter
    assert silent.finding("node3").evidence == ("mlx5_4:1: its state is not ACTIVE",)
    source.close()


def test_port_that_is_gone_is_down(tmp_path: Path) -> None:
    h100_node(tmp_path)
    source = open_ports(tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_4/ports/1/state").unlink()
    assert source.read(0.0).down == {"mlx5_4:1"}
    source.close()


def test_node_without_active_ports_has_no_such_source(tmp_path: Path) -> None:
    write(tmp_path, "mlx5_0", H100_PORT | {"state": "1: DOWN"})
    with pytest.raises(SourceMissing, match="no active RDMA port"):
        open_ports(tmp_path)


def test_reading_of_eight_ports_costs_little(tmp_path: Path) -> None:
    h100_node(tmp_path)
    source = open_ports(tmp_path)
    judge = port_judge(source)
    began = time.thread_time()
    polls = 20
    for poll in range(polls):
        assert not [*judge(source.read(PERIOD_S * poll), PERIOD_S * poll)]
    source.close()
    assert (time.thread_time() - began) / polls <= MOST_OF_A_CORE * PERIOD_S
