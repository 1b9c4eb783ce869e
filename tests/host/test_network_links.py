"""Links of interfaces, of this machine and of a network namespace in which one goes down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.events import DeviceFault
from holdfast.host.network_links import LinkReading, NetworkLinks, interface_with, is_hardware
from holdfast.launch.local.netns import NetnsInterface, NetnsNetwork, NetnsNode
from holdfast.watch.link_state import LinkJudge

WATCH = """
import sys, time
from holdfast.watch.monitor_loop import MonitorLoop
from holdfast.watch.monitor_table import NodePlace, monitors
place = NodePlace(address=sys.argv[1], classify=lambda _: None, is_visible=lambda index, uuid: True)
rows = [row for row in monitors(place) if row.source == "network interfaces"]
loop = MonitorLoop(rows, lambda source, each: print(each.fault.value, each.device, each.what, sep="|", flush=True))
loop.start(lambda opened: print(opened.present, flush=True))
sys.stdin.read()
"""


def test_interfaces_that_lose_their_link_are_faults_as_often_as_they_do() -> None:
    judge = LinkJudge(lambda name: name != "veth7")
    up = {"eth0": True, "ib0": True, "veth7": True}
    readings = [
        LinkReading(links=up),
        LinkReading(links={**up, "eth0": False}, lost=frozenset({"eth0", "veth7"})),
        LinkReading(links={**up, "eth0": False}),
        LinkReading(links=up),
        LinkReading(links={"eth0": True}, lost=frozenset({"eth0", "ib0"})),
    ]
    found = [[each.what.removeprefix("the interface ") for each in judge(reading, 0.0)] for reading in readings]
    again = "eth0 lost its link, and has it again"
    assert found == [[], ["eth0 lost its link"], [], [], [again, "ib0 is gone"]]


def test_interfaces_of_this_machine_are_read_again_at_each_reading() -> None:
    links = NetworkLinks()
    first = links.read()
    assert "lo" not in first.links
    assert not first.lost
    links.close()
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("192.0.2.1") == ""


def test_interface_of_a_device_is_told_by_sysfs(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/ens1/device").mkdir(parents=True)
    (tmp_path / "sys/class/net/veth1").mkdir()
    assert [is_hardware(name, tmp_path) for name in ("ens1", "veth1", "gone")] == [True, False, False]


def set_link(node: NetnsNode, state: str) -> None:
    subprocess.run((*node.prefix, "ip", "link", "set", "data0", state), check=True)


@pytest.mark.root
def test_link_that_goes_down_in_a_node_is_reported_at_once() -> None:
    network = NetnsNetwork.create(f"lk{os.getpid() % 10**6}", interfaces=(NetnsInterface(name="data0"),))
    try:
        node = network.add_node("node0")
        argv = (*node.prefix, sys.executable, "-c", WATCH, str(node.address))
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            assert watch.stdout.readline() == "('network interfaces',)\n"
            for _ in range(2):
                set_link(node, "down")
                fault, device, what = watch.stdout.readline().strip().split("|")
                assert (fault, device) == (DeviceFault.NIC_LINK_DOWN.value, "data0")
                assert what.startswith("the interface data0 lost its link")
                set_link(node, "up")  # and down again at once: the kernel's messages tell of both
            watch.communicate()
    finally:
        network.remove()
