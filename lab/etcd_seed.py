"""The seed of every lab: etcd's files after all manifests of the operators are installed.

It is built once and cached, since installing takes the API server longer than the rest of a start.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from holdfast.host import processes
from lab import manifests, pki, ports, programs, runner, toolchain
from lab.cache import cached_dir
from lab.client import LabClient
from lab.install import install
from lab.programs import LabPaths

_END_WITHIN_S = 60.0


def build_seed() -> Path:
    """Return the folder of etcd's files, building it if necessary."""
    published = manifests.collected_manifests()
    controlplane = toolchain.program_folder(toolchain.CONTROLPLANE)
    here = Path(__file__)
    sources = [here.read_bytes(), here.with_name("install.py").read_bytes()]
    ingredients = [published.name.encode(), controlplane.name.encode(), *sources]
    return cached_dir("seed", ingredients, lambda folder: _make(folder, controlplane, published))


def copy_seed(data: Path) -> None:
    """Copy the seed to etcd's data folder, which must not exist yet."""
    shutil.copytree(build_seed(), data, ignore=shutil.ignore_patterns("*.tmp"))
    data.chmod(0o700)


def _make(folder: Path, controlplane: Path, published: Path) -> None:
    making = folder / "making"
    making.mkdir()
    for name in ("log", "configuration"):
        (making / name).mkdir()
    pki.make_pki(making / "pki")
    block, chosen = ports.claim_ports()
    paths = LabPaths(
        folder=making,
        data=folder,
        controlplane=controlplane,
        operators=making,
        operator_manifests=published,
        ports=chosen,
        nodes=(),
    )
    started = [programs.etcd(paths), programs.apiserver(paths)]
    try:
        running = {program.name: runner.start(program, paths, dies_with_parent=True) for program in started}
        runner.wait_ready(started, paths, lambda name: not running[name].alive)
        client = LabClient(paths.server, paths.pki)
        install(client, manifests.published_objects(published))
        client.close()
        for process in reversed(running.values()):  # the API server does not exit while etcd is unreachable
            os.kill(process.pid, signal.SIGTERM)
            processes.wait_for_end([process.pid], time.monotonic() + _END_WITHIN_S)
    finally:
        processes.kill_all(lambda: processes.by_env(processes.all_pids(), **{runner.MARK: str(making)}), within_s=10)
        os.close(block)
    shutil.rmtree(making)
