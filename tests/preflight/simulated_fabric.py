"""An InfiniBand fabric simulated by ibsim, with opensm and infiniband-diags as Debian ships them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.protocol.node_requirements import NodeRequirements

PROGRAMS = ("ibsim", "opensm", "smpquery", "perfquery", "iblinkinfo", "ibnetdiscover", "ibqueryerrors", "ibstat")
LIBRARY = "/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so"
NODES = 4
SWITCH = "leaf1"
DEADLINE_S = 60.0
COPY_SYSFS = """
import ctypes, os, shutil, sys
ctypes.CDLL(None).opendir(b"/sys/class/infiniband")
shutil.copytree(f"sys-{os.getpid()}/sys", sys.argv[1])
"""
"""The preloaded library writes the node's files to a folder of the process, which goes with it."""


def topology() -> str:
    """One switch; node N is at its port N, by a link of 4X QDR."""
    lines = ["speed=7", "width=3", f'Switch 8 "{SWITCH}"', *(f'[{n}] "node{n}"[1]' for n in range(1, NODES + 1)), ""]
    for n in range(1, NODES + 1):
        lines += [f'Hca 1 "node{n}"', f'[1] "{SWITCH}"[{n}]', ""]
    return "\n".join([*lines, ""])


class SimulatedFabric:
    """A running simulator, with or without a subnet manager on node 1."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, f"holdfast-{os.getpid()}-{folder.name}"
        self.views = 0
        (folder / "net").write_text(topology())
        with (folder / "ibsim.log").open("w") as log:
            self.simulator = subprocess.Popen(
                ["ibsim", "-s", "net"], cwd=folder, env=self.env(""), stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self.manager: subprocess.Popen[bytes] | None = None
        wait_until(lambda: "LinkUp" in self.run(1, ("ibstat",)))

    def env(self, host: str) -> dict[str, str]:
        """Of a program on a host; the simulator itself is none."""
        own = {"IBSIM_SOCKNAME": self.socket, "OSM_TMP_DIR": ".", "OSM_CACHE_DIR": "."}
        return {**os.environ, **own, **({"SIM_HOST": host, "LD_PRELOAD": LIBRARY} if host else {})}

    def run(self, node: int, argv: Sequence[str], timeout_s: float = DEADLINE_S) -> str:
        """The output of an unmodified program on a node; its devices are called `ibsim0`."""
        env = self.env(f"node{node}")
        done = subprocess.run(
            argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return done.stdout

    def start_manager(self, partitions: str) -> None:
        """Start opensm, and wait until it has configured all nodes."""
        (self.folder / "partitions").write_text(partitions)
        options = ("-P", str(self.folder / "partitions"), "-s", "0", "-f", "opensm.log")
        with (self.folder / "opensm.out").open("w") as out:
            self.manager = subprocess.Popen(
                ["opensm", *options], cwd=self.folder, env=self.env("node1"), stdout=out, stderr=out
            )
        for node in range(1, NODES + 1):
            wait_until(lambda node=node: "Active" in self.run(node, ("ibstat",)))

    def command(self, line: str) -> None:
        """A command of the simulator's console, such as `Unlink "node3"[1]`."""
        assert self.simulator.stdin
        self.simulator.stdin.write(f"{line}\n".encode())
        self.simulator.stdin.flush()

    def view(self, node: int, *, programs: bool = True) -> NodeView:
        """A node with its own sysfs, where programs of infiniband-diags run on this fabric."""
        self.views += 1
        root = self.folder / f"root-{self.views}"
        self.run(node, (sys.executable, "-SE", "-c", COPY_SYSFS, str(root / "sys")))
        (root / "dev/infiniband").mkdir(parents=True)
        (root / "dev/infiniband/umad0").touch()

        def run(argv: Sequence[str], timeout_s: float) -> str:
            if not programs or shutil.which(argv[0]) is None:
                raise NotLookedAt(f"there is no program `{argv[0]}`")
            return self.run(node, argv, timeout_s)

        return NodeView(wanted=NodeRequirements(network="IB"), root=root, run=run)

    def stop(self) -> None:
        """End both; opensm ignores SIGTERM."""
        for process in (self.manager, self.simulator):
            if process:
                process.kill()
                process.wait()


def wait_until(holds: Callable[[], bool]) -> None:
    """Ask again until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
