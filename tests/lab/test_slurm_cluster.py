"""The clusters of Slurm that other tests use."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from tests.waiting import until

from holdfast.host.processes import all_pids, by_env
from holdfast.launch.local import netns
from lab.slurm_cluster import slurm_cluster
from lab.slurm_conf import SlurmRelease
from lab.slurm_root import is_slurm_built, slurm_impossible_reason, slurm_root

SRUN = ("srun", "--nodelist=n2", "--gres=gpu:1", "sh", "-c", "hostname; exit 3")
FIELDS = ("-X", "-n", "-P", "-o", "JobID,State,ExitCode,NodeList,AllocTRES")


RELEASES = [SlurmRelease.V24_11, *([SlurmRelease.V26_05] if is_slurm_built(SlurmRelease.V26_05) else [])]


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_cluster_isolates_nodes_accounts_jobs_and_leaves_nothing(tmp_path: Path, release: SlurmRelease) -> None:
    if reason := slurm_impossible_reason(release) or netns.unavailable():
        pytest.skip(f"Slurm {release} cannot run here: {reason}")
    with slurm_cluster(tmp_path, "n1", "n2", release=release) as cluster:
        assert f" {release}." in cluster.command("sinfo", "--version")
        environ = {**os.environ, **cluster.environ}
        done = subprocess.run(("env", *SRUN), env=environ, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("n2\n", 3)
        accounted = "1|FAILED|3:0|n2|billing=1,cpu=1,gres/gpu=1,node=1\n"
        until(lambda: cluster.command("sacct", *FIELDS) == accounted, "the job is accounted")
        assert _is_here(cluster.address)
    assert by_env(all_pids(), SLURM_CONF=cluster.environ["SLURM_CONF"]) == []
    assert not _is_here(cluster.address)
    assert str(slurm_root(release)) not in Path("/proc/self/mountinfo").read_text()


def _is_here(address: str) -> bool:
    """Whether an interface of this machine has the address."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
