"""Plants what only active probes find, and runs `python -m holdfast.train.probe` in eight network namespaces.

All links carry LINK_MBIT, so that eight ranks on two cores are not slower than their links.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.planted.nodes import NODES, ROOT, end
from holdfast.events.probe_results import ProbeOutcome, ProbeResult, ProbeStage
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsInterface, NetnsNetwork, ip_command

LINK_MBIT, SLOW_MBIT = 200, 20
DEADLINE_S = 120.0
PORT = 29400
PROBE = ("-m", "holdfast.train.probe")
OPTIONS = ("--backend=gloo", f"--deadline-s={DEADLINE_S:g}", "--burn-in-s=0.2", f"--most-bytes={1 << 21}")


def _nothing(_: NetnsNetwork, __: str) -> None:
    """Leave the network as it is."""


def _slow_link(network: NetnsNetwork, name: str) -> None:
    slow = f"qdisc replace dev eth0 root tbf rate {SLOW_MBIT}mbit burst 64kb latency 50ms"
    ip_command.tc(slow, inside=network.nodes[name].prefix)


def _cut_off(network: NetnsNetwork, name: str) -> None:
    network.partition(name)


@dataclass(frozen=True, kw_only=True)
class ProbeKind:
    """A fault that one node has, and the stage of the probe that has to name it."""

    name: str
    how: str
    stage: ProbeStage
    plant: Callable[[NetnsNetwork, str], None] = _nothing
    program: tuple[str, ...] = PROBE
    """Arguments of Python on the planted node."""


PROBE_KINDS = (
    ProbeKind(
        name="slow link",
        how=f"{SLOW_MBIT} instead of {LINK_MBIT} Mbit/s (tbf)",
        stage=ProbeStage.PAIRS,
        plant=_slow_link,
    ),
    ProbeKind(
        name="silent node",
        how="all its packets are dropped",
        stage=ProbeStage.ARRIVE,
        plant=_cut_off,
    ),
    ProbeKind(
        name="wrong product",
        how="one element of each matrix product is off by one",
        stage=ProbeStage.MATMUL,
        program=(str(ROOT / "bench/programs/wrong_product.py"),),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What the probe named."""

    result: ProbeResult
    took_s: float

    def finds(self, kind: ProbeKind) -> tuple[int, ...]:
        """The nodes that the stage names, if each suspect is one node."""
        return tuple(sorted({node for each in self.result.suspects if each.stage is kind.stage for node in each.nodes}))


def probe(kind: ProbeKind | None, planted: int) -> Probed:
    """Run the probe on eight nodes, of which one has the fault; the result is that of rank 0."""
    network = NetnsNetwork.create(f"pf{os.getpid()}", interfaces=(NetnsInterface(mbit=LINK_MBIT),))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        nodes = [network.add_node(f"node{each}") for each in range(NODES)]
        if kind:
            kind.plant(network, nodes[planted].name)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for rank, node in enumerate(nodes):
                program = kind.program if kind and rank == planted else PROBE
                environ = os.environ | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(NODES),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": nodes[0].address,
                    "MASTER_PORT": str(PORT),
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                }
                argv = [*node.prefix, sys.executable, *program, *OPTIONS]
                with Path(folder, str(rank)).open("wb") as out:
                    ranks.append(subprocess.Popen(argv, env=environ, stdout=out, stderr=subprocess.DEVNULL, cwd=ROOT))
            ranks[0].wait(2 * DEADLINE_S)
            last = Path(folder, "0").read_text().splitlines()[-1]
        return Probed(result=msgspec.json.decode(last, type=ProbeResult), took_s=time.monotonic() - began)
    finally:
        for rank in ranks:
            end(rank)
        netns.remove(network.tag)


def passes(probed: Probed) -> bool:
    """Whether the probe named no node."""
    return probed.result.outcome is ProbeOutcome.PASSED
