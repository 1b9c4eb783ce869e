"""Counters of RDMA ports, read from trees as mlx5 and EFA make them."""

from __future__ import annotations

from pathlib import Path

from holdfast.host.rdma_counters import RdmaCounterFiles, parse_pauses, pauses

# mlx5_1 of an H100 node, as in leptonai/gpud (Apache-2.0):
# components/accelerator/nvidia/infiniband/class/testdata/sys-class-infiniband-h100.0. link_downed has eight bits.
H100_PORT = {
    "state": "4: ACTIVE",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    "counters/port_rcv_data": "205128687774249",
    "counters/link_downed": "255",
    "counters/symbol_error": "0",
    "counters/port_xmit_wait": "N/A (no PMA)",
    "hw_counters/out_of_sequence": "0",
}
# https://enterprise-support.nvidia.com/s/article/understanding-mlx5-ethtool-counters has these names.
ETHTOOL = """NIC statistics:
     rx_packets: 904
     rx_prio3_bytes: 1000
     rx_prio3_pause: 12085
     rx_prio3_pause_duration: 4521
     tx_prio3_pause: 0
"""


def write(root: Path, device: str, values: dict[str, str]) -> None:
    for name, text in values.items():
        path = root / "sys/class/infiniband" / device / "ports/1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_counters_of_an_h100_node_are_read_again_at_each_reading(tmp_path: Path) -> None:
    write(tmp_path, "mlx5_1", H100_PORT)
    write(tmp_path, "mlx5_2", H100_PORT | {"state": "1: DOWN"})
    files = RdmaCounterFiles(tmp_path)
    first = {"port_rcv_data": 205128687774249, "link_downed": 255, "symbol_error": 0, "out_of_sequence": 0}
    assert files.read(1.0).ports == {"mlx5_1:1": first}
    assert files.kinds == {"mlx5_1:1": "400 Gb/sec (4X NDR) InfiniBand"}
    write(tmp_path, "mlx5_1", {"counters/symbol_error": "7"})
    assert files.read(2.0).ports == {"mlx5_1:1": first | {"symbol_error": 7}}
    files.close()


def test_port_over_ethernet_has_its_interface(tmp_path: Path) -> None:
    write(tmp_path, "mlx5_0", H100_PORT | {"link_layer": "Ethernet"})
    (tmp_path / "sys/class/infiniband/mlx5_0/device/net/ens3np0").mkdir(parents=True)
    files = RdmaCounterFiles(tmp_path)
    assert files.interfaces == {"mlx5_0:1": "ens3np0"}
    files.close()


def test_node_without_devices_has_none(tmp_path: Path) -> None:
    assert RdmaCounterFiles(tmp_path).read(1.0).ports == {}


def test_pauses_are_read_from_ethtool() -> None:
    assert parse_pauses(ETHTOOL) == {"rx_prio3_pause": 12085, "tx_prio3_pause": 0}


def test_interface_without_pauses_has_none() -> None:
    assert pauses("lo") == {}
