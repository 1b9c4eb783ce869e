"""Runs scripts in children of one process that has imported what they need, which takes far longer than they do.

`forker.py MODULE,MODULE... < RUNS`, a JSON list of `{"script": [...], "env": {...}, "ranks": 2, "dies": [FILE, RANK,
STEP]}`: with `ranks` they are started by torchrun's own agent, and else as a bare process. How each ended is printed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mortal
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def child(script: list[str], env: dict[str, str], dies: list[Any] | None) -> None:
    os.environ.update(env)
    if dies:
        mortal.arm(Path(dies[0]), *dies[1:])
    mortal.run(*script)


def bare(given: tuple[Any, ...]) -> str:
    process = multiprocessing.get_context("fork").Process(target=child, args=given)
    process.start()
    process.join()
    return str(process.exitcode)


def torchrun(ranks: int, given: tuple[Any, ...]) -> str:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=0,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
    )
    try:
        elastic_launch(config, child)(*given)
    except ChildFailedError:  # of which rank, depends: one that is left may fail before the dead one is noticed
        return "failed"
    return "0"


if __name__ == "__main__":
    for module in sys.argv[1].split(","):
        import_module(module)
    for run in json.load(sys.stdin):
        given = (run["script"], run["env"], run.get("dies"))
        print("ended", torchrun(run["ranks"], given) if "ranks" in run else bare(given), flush=True)
