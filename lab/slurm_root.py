"""Builds the root file system that Slurm 24.11 runs in: Debian 13's packages, by mmdebstrap, once per list of them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from lab.cache import cached_dir, is_cached

_SUITE = "trixie"
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


def slurm_root() -> Path:
    """The root file system with Slurm 24.11 and MariaDB; built in half a minute if it is missing."""
    return cached_dir("slurm", _ingredients(), _build)


def slurm_impossible_reason() -> str | None:
    """Why Slurm 24.11 cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "it needs root, for a chroot and namespaces of each node"
    if not is_cached("slurm", _ingredients()) and shutil.which("mmdebstrap") is None:
        return "there is no `mmdebstrap` on PATH: apt-get install mmdebstrap"
    return None


def _ingredients() -> list[bytes]:
    return [repr((_SUITE, _PACKAGES, _EXCLUDED)).encode(), platform.machine().encode()]


def _build(folder: Path) -> None:
    print("building the lab's Slurm 24.11", flush=True)
    started = time.monotonic()
    root = folder / "root"
    _run(
        *("mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(_PACKAGES)}"),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED),
        *(_SUITE, str(root), *_archive()),
    )
    print(f"built the lab's Slurm 24.11 in {time.monotonic() - started:.0f} s", flush=True)


def _archive() -> list[str]:
    """The archive that this machine uses; none, for that of mmdebstrap, on another distribution."""
    done = subprocess.run(_ARCHIVE, capture_output=True, text=True, check=False)
    return done.stdout.split()[:1]


def _run(*argv: str) -> None:
    if reason := slurm_impossible_reason():
        raise _failed(reason)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failed(*done.stderr.splitlines()[-_EVIDENCE_LINES:])


def _failed(*evidence: str) -> Exception:
    return failure(
        "lab-build-failed",
        "the lab's Slurm 24.11 cannot be built",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        evidence=evidence,
        remedy="As root, with mmdebstrap and Debian's archive within reach; free 1 GB if the disk is full.",
        owner=Owner.CLUSTER,
    )
