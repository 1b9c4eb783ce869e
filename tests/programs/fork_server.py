"""Runs scripts in children of one process with their imports done, since the imports take far longer than the scripts.

`fork_server.py MODULE,MODULE...` reads one run per line, `{"script": [...], "env": {...}, "ranks": 2, "faults":
[...]}`. With `ranks` it uses torchrun's agent, otherwise a bare process; for faults see scripted_faults.py. It prints
how each run ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from importlib import import_module
from typing import Any

import scripted_faults
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from holdfast.train.zygote.huge_pages import use_huge_pages


def tell(words: str) -> None:
    """Print one line in one write: print() makes several, and output of other processes may come between them."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"\n{words}\n".encode())


def child(script: list[str], env: dict[str, str], faults: list[dict[str, Any]]) -> None:
    os.environ.update(env)
    if faults:
        scripted_faults.install_faults(faults)
    try:
        scripted_faults.run(*script)
    except SystemExit as left:
        tell(f"left with {left.code}")
        raise


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
        shutdown_timeout=300,  # its default is 30 s; a save may take more on a busy machine
    )
    try:
        elastic_launch(config, child)(*given)
    except ChildFailedError:  # of either rank: a survivor may fail before the dead one is noticed
        return "failed"
    except SignalException as told:
        return told.sigval.name
    return "0"


if __name__ == "__main__":
    for module in sys.argv[1].split(","):
        import_module(module)
    use_huge_pages()
    for line in sys.stdin:
        run = json.loads(line)
        given = (run["script"], run["env"], run.get("faults", []))
        how = torchrun(run["ranks"], given) if "ranks" in run else bare(given)
        tell(f"ended {how}")
