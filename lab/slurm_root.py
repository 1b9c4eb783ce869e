"""Builds root file systems with a release of Slurm: Debian's packages, by mmdebstrap, once per list of them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from lab.cache import cached_dir, is_cached
from lab.slurm_conf import SlurmRelease

_SUITES: Mapping[SlurmRelease, str] = {SlurmRelease.V24_11: "trixie", SlurmRelease.V26_05: "forky"}
"""The suite of Debian that has the release; forky is not released yet, and so may have another one soon."""
_PACKAGES = (
    *("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "mariadb-server"),
    *("iproute2", "procps", "ca-certificates"),
    # Libraries of a Python that was built on the machine, and is found at the same path inside.
    *(
        "libbz2-1.0",
        "libexpat1",
        "libffi8",
        "liblzma5",
        "libncursesw6",
        "libreadline8t64",
        "libsqlite3-0",
        "libssl3t64",
    ),
)
_EXCLUDED = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")
_EVIDENCE_LINES = 20
_ARCHIVE = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
"""Prints the archives of Debian that this machine's packages come from."""


def slurm_root(release: SlurmRelease) -> Path:
    """The root file system with a release of Slurm and MariaDB; built in half a minute if it is missing.

    Raises HoldfastError if that is impossible, or if the suite has another release by now.
    """
    return cached_dir("slurm", _ingredients(release), lambda folder: _build(folder, release))


def is_slurm_built(release: SlurmRelease) -> bool:
    """Whether the root file system of a release is there."""
    return is_cached("slurm", _ingredients(release))


def slurm_impossible_reason(release: SlurmRelease) -> str | None:
    """Why a release of Slurm cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "it needs root, for a chroot and namespaces of each node"
    if not is_slurm_built(release) and shutil.which("mmdebstrap") is None:
        return "there is no `mmdebstrap` on PATH: apt-get install mmdebstrap"
    return None


def _ingredients(release: SlurmRelease) -> list[bytes]:
    return [repr((_SUITES[release], _PACKAGES, _EXCLUDED)).encode(), platform.machine().encode()]


def _build(folder: Path, release: SlurmRelease) -> None:
    print(f"building the lab's Slurm {release}", flush=True)
    started = time.monotonic()
    root = folder / "root"
    if reason := slurm_impossible_reason(release):
        raise _failed(release, reason)
    _run(
        release,
        *("mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(_PACKAGES)}"),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED),
        '--aptopt=Acquire::Check-Valid-Until "false"',  # a mirror may lag behind a suite that changes daily
        *(_SUITES[release], str(root), *_archive()),
    )
    version = _run(release, "chroot", str(root), "slurmd", "-V")
    if f" {release}." not in version:
        raise _failed(release, f"Debian's {_SUITES[release]} has {version.strip()}")
    print(f"built the lab's Slurm {release} in {time.monotonic() - started:.0f} s", flush=True)


def _archive() -> list[str]:
    """The archive that this machine uses; none, for that of mmdebstrap, on another distribution."""
    done = subprocess.run(_ARCHIVE, capture_output=True, text=True, check=False)
    return done.stdout.split()[:1]


def _run(release: SlurmRelease, *argv: str) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failed(release, *done.stderr.splitlines()[-_EVIDENCE_LINES:])
    return done.stdout


def _failed(release: SlurmRelease, *evidence: str) -> Exception:
    return failure(
        "lab-build-failed",
        f"the lab's Slurm {release} cannot be built",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        evidence=evidence,
        remedy="As root, with mmdebstrap and Debian's archive within reach; free 1 GB if the disk is full.",
        owner=Owner.CLUSTER,
    )
