"""Scale: one controller and thousands of simulated agents; joining, a lost node, the restart's fan-out, idle load.

.venv/bin/python -m bench.scale [--quick | --nodes 128,512,2048] [--rest-s S] [--losses N]

The controller is the real one in a separate process (controller_main.py, its API port, its log on disk). Agents are
simulated, but each uses the real protocol over its connection; 8 ranks per node. They use as much CPU as the
controller, on the same cores, so every wall time here includes the work of 2,048 other machines. The bench therefore
also prints the controller's own CPU seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench import load_gate, result_file
from bench.paired_stats import headline, percentile, say, table
from bench.simulated_run import SimulatedRun
from holdfast.events import AgentConnected, AnyEvent, NodesStarted, StepCommitted

SIZES, QUICK_SIZES = (128, 512, 2048), (32, 128)
STEP_S = 10.0
"""Seconds of a step while the idle load of the controller is measured."""
FANOUT_GOAL_S, MEMORY_GOAL_MIB, REST_GOAL = 1.0, 1024, 0.25
WITHIN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one size."""

    nodes: int
    join_s: float
    join_cpu_s: float
    stop_s: list[float]
    """From a node's loss until each agent had its stop order."""
    start_s: list[float]
    """From a node's loss until each agent had its start order."""
    restart_cpu_s: float
    resident_mib: float
    highest_mib: float
    rest: float
    """Share of a core."""


def main() -> None:
    """Measure each size, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    parser.add_argument("--nodes", help="sizes, separated by commas")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_SIZES}")
    parser.add_argument("--rest-s", type=float, default=60.0, help="seconds to measure the idle controller")
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--host", default="127.0.0.1", help="address of the controller; beyond loopback it uses TLS")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    sizes = tuple(map(int, options.nodes.split(","))) if options.nodes else QUICK_SIZES if options.quick else SIZES
    headline("scale: one controller, simulated agents of 8 ranks each")
    measured = [
        measure(nodes, rest_s=10.0 if options.quick else options.rest_s, losses=options.losses, host=options.host)
        for nodes in sizes
    ]
    found = [each for one in measured for each in _results(one)]
    result_file.save(options.json, "Thousands of nodes", found)
    say("")
    say(table(HEAD, [_row(one) for one in measured]))


def _results(one: Measured) -> list[result_file.Result]:
    start_s = percentile(one.start_s, 99)
    return [
        result_file.absolute(
            f"{one.nodes:,} nodes ({one.nodes * 8:,} ranks): node lost → next attempt starts, p99",
            start_s,
            "s",
            goal=FANOUT_GOAL_S,
        ),
        result_file.absolute(
            f"{one.nodes:,} nodes: peak memory of the controller",
            one.highest_mib,
            "MiB",
            goal=MEMORY_GOAL_MIB,
            decimals=0,
        ),
        result_file.absolute(
            f"{one.nodes:,} nodes: CPU of the controller at rest", 100 * one.rest, "%", goal=100 * REST_GOAL, decimals=1
        ),
    ]


def measure(nodes: int, *, rest_s: float, losses: int, host: str = "127.0.0.1") -> Measured:
    """One run of a size, from its first agent to a few lost nodes."""
    load_gate.wait_until_idle()
    env = {f"NCCL_SETTING_{number}": "a value of an ordinary length" for number in range(20)}
    with (
        tempfile.TemporaryDirectory(prefix="fleet") as folder,
        SimulatedRun(Path(folder), nodes, env=env, host=host) as run,
    ):
        run.wait_until(lambda events: _count(events, AgentConnected) == nodes, WITHIN_S)
        join_s, join_cpu_s = time.monotonic() - run.began, load_gate.cpu_s(run.controller.pid)
        run.orders("start", 0, WITHIN_S)
        run.wait_until(lambda events: _count(events, NodesStarted) > 0, WITHIN_S)
        time.sleep(2)
        before = load_gate.cpu_s(run.controller.pid)
        began = time.monotonic()
        steps = 0
        while time.monotonic() < began + rest_s:
            steps += 1
            run.step(steps, STEP_S)
            time.sleep(max(0.0, began + steps * STEP_S - time.monotonic()))
        rest = (load_gate.cpu_s(run.controller.pid) - before) / (time.monotonic() - began)
        run.wait_until(lambda events: _count(events, StepCommitted) >= steps, WITHIN_S)
        resident_mib = run.resident_bytes() / 2**20
        stop_s: list[float] = []
        start_s: list[float] = []
        before = load_gate.cpu_s(run.controller.pid)
        for attempt in range(losses):
            gone = run.remove_node(nodes // 2)
            stop_s += [at - gone for at in run.orders("stop", attempt, WITHIN_S)]
            start_s += [at - gone for at in run.orders("start", attempt + 1, WITHIN_S)]
            time.sleep(2)
        restart_cpu_s = (load_gate.cpu_s(run.controller.pid) - before) / losses
        measured = Measured(
            nodes=nodes,
            join_s=join_s,
            join_cpu_s=join_cpu_s,
            stop_s=stop_s,
            start_s=start_s,
            restart_cpu_s=restart_cpu_s,
            resident_mib=resident_mib,
            highest_mib=run.resident_bytes("VmHWM") / 2**20,
            rest=rest,
        )
        say(" | ".join(_row(measured)) + f" | log {run.folder.events.stat().st_size / 2**20:.2f} MiB")
        return measured


HEAD = (
    "nodes", "ranks", "all joined", "CPU of it", "loss → stop, p50 / p99 / max", "loss → start, p50 / p99 / max",
    "CPU of a restart", "memory, at rest / highest", "CPU at rest",
)  # fmt: skip


def _row(one: Measured) -> tuple[str, ...]:
    return (
        f"{one.nodes:,}",
        f"{one.nodes * 8:,}",
        f"{one.join_s:.2f} s",
        f"{one.join_cpu_s:.2f} s",
        _spread(one.stop_s),
        _spread(one.start_s),
        f"{one.restart_cpu_s:.2f} s",
        f"{one.resident_mib:.0f} / {one.highest_mib:.0f} MiB",
        f"{100 * one.rest:.1f} %",
    )


def _spread(seconds: list[float]) -> str:
    return f"{percentile(seconds, 50):.2f} / {percentile(seconds, 99):.2f} / {max(seconds):.2f} s"


def _count(events: list[AnyEvent], kind: type[AnyEvent]) -> int:
    return sum(isinstance(event, kind) for event in events)


if __name__ == "__main__":
    main()
