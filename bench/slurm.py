"""Two nodes of a Slurm cluster (lab/slurm_cluster.py): launch against others, recovery against local runs.

.venv/bin/python -m bench.slurm [--quick | --rounds N]

launch: from the command to the end of the first all-reduce; the peers are `sbatch --wait` with `srun torchrun`, and
submitit where it is installed. kill: from SIGKILL of a rank to the next whole step; the peer is the local target.
node: from the loss of a node to the next whole step on a spare of the allocation, beyond `recovery.node_grace_s`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import tempfile
from pathlib import Path

from bench import result_file
from bench.paired_stats import headline, say
from bench.target_runs import ALL_REDUCE, BIN, TargetRuns, beyond_grace, compared, options_of
from lab.slurm_cluster import slurm_cluster

LAUNCH_GOAL, KILL_GOAL, NODE_GOAL_S = 1.05, 1.1, 5.0
PORTS = itertools.count(29400)
SUBMITIT = Path(__file__).parent / "programs" / "submitit_allreduce.py"
TITLE = "Slurm"


def main() -> None:
    """Measure, and print a table."""
    count, results = options_of("bench.slurm", __doc__)
    headline("Slurm: 2 nodes x 1 rank, each node a slurmd of this machine")
    with tempfile.TemporaryDirectory() as base, slurm_cluster(Path(base) / "slurm", "n1", "n2", "n3") as cluster:
        os.environ.update(cluster.environ)
        say(cluster.command("sinfo", "--version").strip())
        runs = TargetRuns(Path(base), {"two": _target(base, spares=0), "three": _target(base, spares=1)})

        def torchrun() -> float:
            cluster.wait_until_idle()  # else a job waits for the end of the last one
            return runs.all_reduce_s(lambda out: [_srun_torchrun(out)])

        def submitit() -> float:
            cluster.wait_until_idle()
            return runs.all_reduce_s(lambda out: [[sys.executable, str(SUBMITIT), str(ALL_REDUCE), str(out)]])

        def launch() -> float:
            cluster.wait_until_idle()
            return runs.launch("two")

        def kill(target: str) -> float:
            cluster.wait_until_idle()
            return runs.kill(target)

        def lose_node() -> float:
            cluster.wait_until_idle()
            return runs.lose("three", lambda _, node: cluster.kill_processes(node))[1]

        claim = "Slurm: command → first all-reduce, 2 nodes"
        torchrun()
        launch()  # the first run reads 5 GB of torch
        found = [compared(claim, count, "sbatch, srun torchrun", torchrun, launch, LAUNCH_GOAL)]
        if importlib.util.find_spec("submitit") is not None:
            found.append(compared(claim, count, "submitit", submitit, launch, LAUNCH_GOAL))
        else:
            say("submitit is not installed, so it is left out: pip install submitit==1.5.3")
        claim = "Slurm: SIGKILL of a rank → next whole step"
        found.append(compared(claim, count, "holdfast, local", lambda: kill("local"), lambda: kill("two"), KILL_GOAL))
        claim = "Slurm: node lost → next whole step on a spare, beyond `node_grace_s`, median"
        found.append(beyond_grace(claim, [lose_node() for _ in range(count)], goal_s=NODE_GOAL_S))
    result_file.save(results, TITLE, found)


def _target(base: str, *, spares: int) -> str:
    return f"kind: slurm\nslurm: {{address: 127.0.0.1, spares: {spares}, folder: {base}/nodes}}\n"


def _srun_torchrun(out: Path) -> list[str]:
    common = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {next(PORTS)}"
    program = f"{BIN}/torchrun {common} --node-rank $SLURM_NODEID {ALL_REDUCE} {out}"
    options = ("--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={out}/job")
    return ["sbatch", *options, "--wrap", f"srun bash -c '{program}'"]


if __name__ == "__main__":
    main()
