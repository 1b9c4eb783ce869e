"""Runs a program as two Slurm tasks, as submitit's documentation does: `submitit_allreduce.py PROGRAM OUT`."""

import importlib
import os
import runpy
import sys
from typing import Any

submitit: Any = importlib.import_module("submitit")


def _task(program: str, out: str) -> None:
    submitit.helpers.TorchDistributedEnvironment().export()
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # the names of the lab's nodes have no address
    sys.argv = [program, out]
    runpy.run_path(program, run_name="__main__")


program, out = sys.argv[1:]
executor = submitit.AutoExecutor(folder=f"{out}/submitit", cluster="slurm")
executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=5)
executor.submit(_task, program, out).results()
