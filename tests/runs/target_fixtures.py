"""Places to run that a test starts for real: hosts with sshd, and a Slurm cluster; one of each per worker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.launch.local import netns
from lab.slurm_cluster import SlurmCluster, slurm_cluster
from lab.slurm_conf import SlurmRelease
from lab.slurm_root import is_slurm_built, slurm_impossible_reason
from lab.ssh_hosts import SshHosts, ssh_hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Three hosts, each with its own network, name, host key and /var/tmp."""
    if reason := netns.unavailable():
        pytest.skip(f"needs network namespaces: {reason}")
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), "alpha", "beta", "gamma") as made:
        yield made


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster of three nodes, of the Slurm that this machine has."""
    if missing := [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}: apt-get install slurm-wlm munge")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), "n1", "n2", "n3") as cluster:
        yield cluster


def _in_chroot(release: SlurmRelease, folder: Path) -> AbstractContextManager[SlurmCluster]:
    """A cluster of three nodes, each with its own network and processes, with accounting."""
    if reason := slurm_impossible_reason(release) or netns.unavailable():
        pytest.skip(f"Slurm {release} cannot run here: {reason}")
    return slurm_cluster(folder, "n1", "n2", "n3", release=release)


@pytest.fixture(scope="session")
def slurm_24_11(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Slurm 24.11."""
    with _in_chroot(SlurmRelease.V24_11, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_26_05(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Slurm 26.05."""
    with _in_chroot(SlurmRelease.V26_05, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


NEXT_RELEASE = ("slurm_26_05",) if is_slurm_built(SlurmRelease.V26_05) else ()
"""Debian may have another one by now: then `lab build` has none, and no test uses it."""


@pytest.fixture(scope="module", params=["slurm", "slurm_24_11", *NEXT_RELEASE])
def cluster(request: pytest.FixtureRequest) -> SlurmCluster:
    """A cluster of each release."""
    return request.getfixturevalue(request.param)


ON_24_11 = pytest.mark.parametrize("cluster", ["slurm_24_11"], indirect=True)
"""For what other tests have on 22.05 or does not depend on the release. Each node has its own name and network."""


def accepted(base: Path, target: str) -> dict[str, str]:
    """The verdicts of an acceptance of a target in `base`, of the checks that no other test makes there."""
    (base / "acceptance.yaml").write_text("gang: {rounds: 1}\n")
    words = ("accept", "gang", "first-run", "--on", target, "--agreement", "acceptance.yaml", "-o", "json")
    done = subprocess.run(
        [Path(sys.executable).with_name("holdfast"), *words],
        cwd=base,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    reports = json.loads(done.stdout)["reports"]
    assert done.returncode == 0, reports
    return {report["check"]: report["verdict"] for report in reports}


def remove_sockets(base: Path, run: str, node: str) -> None:
    """Delete what a lost node would have deleted, on Slurm, where nodes share this machine's disk."""
    folders = base / "nodes" / "runs" / run / "nodes"
    for sockets in (folders / node / "sockets", folders / node.replace("node", "monarch") / "sockets"):
        if sockets.is_symlink():
            shutil.rmtree(sockets.readlink())


def write_target(base: Path, name: str, text: str) -> None:
    """Write a target file of the project in `base`."""
    folder = base / ".holdfast" / "targets"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)


def hosts_target(hosts: SshHosts, *names: str, python: str = sys.executable) -> str:
    """A target file that names some of the hosts."""
    return f"kind: hosts\nhosts: [{', '.join(names)}]\nssh: {{python: {python}, config: {hosts.config}}}\n"


def slurm_target(cluster: SlurmCluster, base: Path, *, spares: int = 0) -> str:
    """A target file for a cluster."""
    return f"kind: slurm\nslurm: {{address: {cluster.address}, spares: {spares}, folder: {base / 'nodes'}}}\n"


def use_cluster(cluster: SlurmCluster, patch: pytest.MonkeyPatch) -> None:
    """Have Slurm's commands find a cluster."""
    for name, value in cluster.environ.items():
        patch.setenv(name, value)
