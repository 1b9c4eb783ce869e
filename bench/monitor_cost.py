"""What the monitors of an agent cost, and how soon they see a lost link and a record of the kernel.

.venv/bin/python -m bench.monitor_cost [--seconds 60] [--tree]

A process as light as an agent runs the table of monitors of this node for so long, and one without monitors waits
meanwhile: CPU time is from /proc/PID/stat, memory is VmRSS. With `--tree` the node is a tree of files with eight RDMA
ports and two processors, and NVML is the tests' fake with eight GPUs, whose answers cost Python time instead of the
driver's; a GPU is lost at the end. The link is one of a network namespace, which `ip link set down` takes; the record
is written to /dev/kmsg, in words that no rule but this bench's knows. Both need root.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.paired_stats import headline, say, table
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsInterface, NetnsNetwork

CPU_GOAL, MEMORY_GOAL_MIB = 0.005, 15.0
WARM_UP_S = 3.0
MARK = "holdfast-bench: a record that reports nothing"
LOST = "a GPU is lost"

_NODE = """
import asyncio, os, sys
from pathlib import Path
import holdfast.agent.agent
from holdfast.agent import node_monitors
from holdfast.clock import Clock
from holdfast.events import DeviceFault, MonitorsStarted
from msgspec.structs import replace
from bench.monitor_cost import LOST, MARK
from holdfast.watch.monitor_table import NodePlace, monitors

mode, root, address = sys.argv[1:]

def table(place):
    place = replace(place, classify=lambda line: DeviceFault.RESET if MARK in line else None)
    if root != "/":
        from tests.watch.fake_nvml import FakeNvml
        nvml = FakeNvml(8)
        def lose():
            nvml.gpus[3].lost = 15
        asyncio.get_running_loop().add_reader(0, lose)
        place = replace(place, load_nvml=lambda: nvml)
    return monitors(place)

async def main():
    def send(event):
        if isinstance(event, MonitorsStarted):
            print("ready", ", ".join(event.sources), flush=True)
        else:
            print(event.finding.code, flush=True)
    watched = node_monitors.WatchedNode(node=0, generation=0, address=address)
    if mode == "with":
        node_monitors.NodeMonitors(watched, Clock(), send, lambda: None, Path(root), table).start(devices=True)
    else:
        print("ready nothing", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Node:
    """A process with or without monitors."""

    def __init__(self, mode: str, root: Path, prefix: tuple[str, ...] = (), address: str = "127.0.0.1") -> None:
        self.process = subprocess.Popen(
            (*prefix, sys.executable, "-c", _NODE, mode, str(root), address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.sources = self.line().removeprefix("ready ")

    def line(self) -> str:
        """Its next line; waits for it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure_cost(seconds: float, root: Path) -> bool:
    """Print the difference between the two processes; return whether it is within the goals."""
    nodes = {mode: Node(mode, root) for mode in ("without", "with")}
    time.sleep(WARM_UP_S)
    before = {mode: node.cpu_s() for mode, node in nodes.items()}
    time.sleep(seconds)
    used = {mode: (node.cpu_s() - before[mode]) / seconds for mode, node in nodes.items()}
    memory = {mode: node.memory_mib() for mode, node in nodes.items()}
    rows = [(mode, nodes[mode].sources, f"{used[mode]:.3%}", f"{memory[mode]:.1f} MiB") for mode in nodes]
    say(table(("monitors", "sources", "of a core", "memory"), rows))
    share, mib = used["with"] - used["without"], memory["with"] - memory["without"]
    say(f"\nmonitors cost {share:.3%} of a core (goal {CPU_GOAL:.1%}) and {mib:.1f} MiB (goal {MEMORY_GOAL_MIB:g} MiB)")
    if root != Path("/"):
        stdin = nodes["with"].process.stdin
        assert stdin is not None
        began = time.monotonic()
        stdin.write("x\n")
        stdin.flush()
        say(f"{LOST}: seen as {nodes['with'].line()} after {time.monotonic() - began:.2f} s (goal 10 s)")
    for node in nodes.values():
        node.end()
    return share <= CPU_GOAL and mib <= MEMORY_GOAL_MIB


def measure_record(times: int) -> None:
    """Write records to the kernel's log, and print when they are seen."""
    node = Node("with", Path("/"))
    took: list[float] = []
    for number in range(times):  # each names another device, so that each is another finding
        began = time.monotonic()
        Path("/dev/kmsg").write_text(f"0000:{number:02x}:00 {MARK}\n")
        node.line()
        took.append(time.monotonic() - began)
        time.sleep(0.5)
    node.end()
    say(f"record of the kernel: median {statistics.median(took):.3f} s, longest {max(took):.3f} s (goal 2 s)")


def measure_link(times: int) -> None:
    """Take a link of a network namespace down, and print when that is seen."""
    network = NetnsNetwork.create(f"mc{os.getpid() % 10**6}", interfaces=(NetnsInterface(name="data0"),))
    try:
        inside = network.add_node("node0")
        node = Node("with", Path("/"), inside.prefix, inside.address)
        took: list[float] = []
        for _ in range(times):
            subprocess.run((*inside.prefix, "ip", "link", "set", "data0", "down"), check=True)
            began = time.monotonic()
            node.line()
            took.append(time.monotonic() - began)
            subprocess.run((*inside.prefix, "ip", "link", "set", "data0", "up"), check=True)
            time.sleep(0.5)
        node.end()
    finally:
        network.remove()
    say(f"link that goes down: median {statistics.median(took):.3f} s, longest {max(took):.3f} s (goal 30 s)")


def make_tree(root: Path) -> None:
    """A node with eight RDMA ports, a disk and two processors."""
    from tests.watch.test_rdma_ports import h100_node

    h100_node(root)
    for name in ("meminfo", "diskstats"):
        (root / "proc/self").mkdir(parents=True, exist_ok=True)
        (root / "proc" / name).write_text(Path("/proc", name).read_text())
    for cpu in range(2):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        for name, text in (
            ("topology/physical_package_id", f"{cpu}"),
            ("thermal_throttle/package_throttle_count", "0"),
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def main() -> int:
    """Measure, and return nonzero if the monitors cost more than their goals."""
    parser = argparse.ArgumentParser(prog="bench.monitor_cost", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=int, default=5, help="how often a link goes down and a record is written")
    parser.add_argument("--tree", action="store_true", help="a node with eight GPUs and eight RDMA ports, of files")
    options = parser.parse_args()
    headline("monitors of an agent: cost, and how soon they see a fault")
    with tempfile.TemporaryDirectory(prefix="monitored-") as folder:
        root = Path(folder) if options.tree else Path("/")
        if options.tree:
            make_tree(root)
        cheap = measure_cost(options.seconds, root)
    if not options.tree and os.geteuid() == 0:
        measure_record(options.times)
        if not (reason := netns.unavailable()):
            measure_link(options.times)
        else:
            say(f"link that goes down: not done here: {reason}")
    return 0 if cheap else 1


if __name__ == "__main__":
    sys.exit(main())
