"""How long the choice of nodes takes among 10,000, and what crosses the spine compared with other orders.

.venv/bin/python -m bench.rank_layout [--json FILE]

10,000 nodes in 4 zones, 40 blocks and 2,500 racks, of which a random tenth is in use. The traffic is that of Llama 3.1
405B on 16,384 GPUs (TP 8, PP 16, DP 128), as plan/traffic.py predicts it.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import median, quantiles

from bench import result_file
from bench.paired_stats import headline, say, table
from holdfast.plan.layout import Layout
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.rank_layout import RankGrid, Topology, lay_out, ordered_nodes, topology
from holdfast.plan.traffic import Step, step_traffic

LEVELS = ("zone", "block", "rack")
ZONES, BLOCKS, RACKS, PER_RACK, PER_NODE = 4, 40, 2500, 4, 8
IN_USE = 0.1
JOBS = 300
LLAMA_405B = Layout(tp=8, pp=16, dp=128)


def labels(dice: random.Random) -> dict[str, dict[str, str]]:
    """The labels of the free nodes, in the order of their names."""
    count = RACKS * PER_RACK
    return {
        f"node{node:05d}": {
            "zone": f"zone{node * ZONES // count}",
            "block": f"block{node * BLOCKS // count}",
            "rack": f"rack{node // PER_RACK}",
        }
        for node in range(count)
        if dice.random() >= IN_USE
    }


def durations_ms(tree: Topology, dice: random.Random, sent: dict[str, float]) -> list[float]:
    """Milliseconds of each of many choices."""
    found: list[float] = []
    for _ in range(JOBS):
        layout = Layout(tp=8, pp=dice.choice((1, 4, 16)), dp=dice.choice((1, 2, 8, 31, 128, 500)))
        began = time.process_time()
        ordered_nodes(tree, RankGrid(layout=layout, per_node=PER_NODE), sent)
        found.append(1000 * (time.process_time() - began))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.rank_layout", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline(f"{RACKS * PER_RACK:,} nodes, {JOBS} jobs")
    dice = random.Random(0)
    free = labels(dice)
    began = time.process_time()
    tree = topology(free, LEVELS)
    assert tree.leaves
    assert tree.leaf_domains
    build_ms = 1000 * (time.process_time() - began)
    step = Step(model=MODELS["llama-3-405b"], layout=LLAMA_405B, batch=2048, length=8192, gradient_bytes=4)
    sent = step_traffic(step)
    times = durations_ms(tree, dice, sent)
    p99 = quantiles(times, n=100)[-1]
    say(
        f"choice and order: p50 {median(times):.1f} ms, p99 {p99:.1f} ms; the tree from its labels: {build_ms:.0f} ms\n"
    )
    found = lay_out(tree, RankGrid(layout=LLAMA_405B, per_node=PER_NODE), sent)
    assert found is not None
    orders = {"holdfast": found.crossing, "order of names": found.given, "random": found.at_random}
    say(table(("TB that cross a step", *LEVELS), [
        (name, *(f"{crossing[level] / 1e12:.3g}" for level in LEVELS)) for name, crossing in orders.items()
    ]))  # fmt: skip
    details = {
        f"{name}: TB a step across {level}": f"{crossing[level] / 1e12:.3g}"
        for name, crossing in orders.items()
        for level in LEVELS
    }
    details |= {"p50": f"{median(times):.1f} ms", "the tree from its labels": f"{build_ms:.0f} ms"}
    claim = f"nodes and order of ranks among {RACKS * PER_RACK:,} nodes, p99 of CPU time"
    result = result_file.absolute(claim, p99, "ms", goal=10.0, decimals=1)
    result_file.save(options.json, "Rank layout", [_with(result, details)])


def _with(result: result_file.Result, details: dict[str, str]) -> result_file.Result:
    from msgspec.structs import replace

    return replace(result, details=details, conditions=f"{JOBS} jobs of 1 to 8,000 nodes, a tenth of the nodes in use")


if __name__ == "__main__":
    main()
