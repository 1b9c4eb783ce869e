"""Keeps what a node can show of a failed attempt, in one bounded, private folder, written when its ranks have ended.

NODE/evidence/[replica-R-]attempt-A/
    output/rank-3.log     the last lines of each rank's output
    stacks-...txt         stacks that were dumped during a hang: links, not copies
    flight-...            dumps of flight recorders: links, not copies
    environment.json      variables of the ranks, without values that may be secret
    counters.json         counters of the node's kernel, network and devices, read when the ranks had ended
    monitors.json         the latest reading of each monitor, and how many seconds old it was
    versions.json         of holdfast, the interpreter, its packages, the kernel and the driver

The next attempt may already be running meanwhile, so that nothing waits for this.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from holdfast.diagnose import secret_patterns
from holdfast.host.files import open_regular, private_opener, regular_opener
from holdfast.run_dir import EVIDENCE_NAME, attempt_name
from holdfast.watch.monitor_loop import Latest

MAX_FAILURES = 8
"""Newest failures kept per node: as many as ten restarts in an hour (`recovery.max_restarts`) leave room to compare."""
MAX_BYTES = 64 << 20
"""Most bytes of one failure: eight ranks with 1 MiB of output and two flight recorder dumps of 1 MiB take 24 MiB."""
MAX_LINES = 1000
"""Last lines kept of each rank's output."""
MAX_OUTPUT_BYTES = 1 << 20
"""Most bytes of those lines."""
MAX_COUNTER_BYTES = 64 << 10
"""Most bytes of one file of counters; /proc/net/dev has 130 per interface."""

_COUNTERS = (
    *("/proc/loadavg", "/proc/meminfo", "/proc/net/dev", "/proc/net/snmp", "/proc/net/netstat", "/proc/diskstats"),
    *("/proc/pressure/cpu", "/proc/pressure/io", "/proc/pressure/memory", "/proc/driver/nvidia/version"),
)
_COUNTER_FOLDERS = ("class/infiniband/*/ports/*/counters/*", "class/infiniband/*/ports/*/hw_counters/*")
_PACKAGES = (
    *("torch", "numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformers", "accelerate", "lightning"),
    *("deepspeed", "megatron-core", "transformer-engine", "flash-attn", "torchft-nightly", "jax", "jaxlib", "mpi4py"),
)
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|SIGNATURE|DSN|CONNECTION_STRING", re.IGNORECASE
)
_HIDDEN = "<hidden>"


class FailedRanks(Struct, frozen=True, kw_only=True):
    """What is known of an attempt's ranks on this node when the last of them has ended."""

    folder: Path
    """The node's folder."""
    replica: int
    replica_count: int
    attempt: int
    logs: tuple[Path, ...]
    """The output of each process."""
    environs: Mapping[int, Mapping[str, str]]
    secret_names: frozenset[str] = frozenset()
    """Variables that the job takes from its secrets."""


class KeptEvidence(Struct, frozen=True, kw_only=True):
    """The folder with the evidence of a failure."""

    folder: Path
    files: int
    bytes: int
    left_out: int
    """Files over the limit, or that could not be read."""


def keep_evidence(
    ranks: FailedRanks, readings: Mapping[str, Latest] | None = None, *, system: Path = Path("/sys")
) -> KeptEvidence:
    """Write the folder, and delete the oldest ones; raises `OSError` if it cannot be written.

    `readings` are those of the node's monitors, by source.
    """
    name = attempt_name(ranks.attempt, ranks.replica, ranks.replica_count)
    above = ranks.folder / EVIDENCE_NAME
    above.mkdir(mode=0o700, exist_ok=True)
    into = _Folder(above / f".{name}")
    shutil.rmtree(into.path, ignore_errors=True)
    into.path.mkdir(mode=0o700)
    into.write("versions.json", _json(_versions()))
    into.write("environment.json", _json(_environment(ranks)))
    into.write("counters.json", _json(_counters(system)))
    into.write("monitors.json", msgspec.json.format(msgspec.json.encode(readings or {}, enc_hook=str)))
    secrets = [value.encode() for value in _secret_values(ranks)]
    for log in ranks.logs:
        into.write(f"output/{log.name}", _without(last_output(log), secrets))
    for file in _dumps(ranks):
        into.link(file)
    folder = above / name
    shutil.rmtree(folder, ignore_errors=True)
    into.path.rename(folder)
    for old in sorted(_kept(above), key=lambda path: path.stat().st_mtime_ns)[:-MAX_FAILURES]:
        shutil.rmtree(old, ignore_errors=True)
    return KeptEvidence(folder=folder, files=into.files, bytes=into.bytes, left_out=into.left_out)


class _Folder(Struct):
    """A folder that takes no more than `MAX_BYTES`."""

    path: Path
    files: int = 0
    bytes: int = 0
    left_out: int = 0

    def write(self, name: str, data: bytes) -> None:
        if not self._has_room(len(data)):
            return
        path = self.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(path, "xb", opener=private_opener) as file:
            file.write(data)
        self._count(len(data))

    def link(self, source: Path) -> None:
        """Link a file that has been written whole; copy it where the file system has no links."""
        try:
            size = source.lstat().st_size
            if not source.is_file() or source.is_symlink() or not self._has_room(size):
                return
            try:
                os.link(source, self.path / source.name, follow_symlinks=False)
            except OSError:
                with open_regular(source) as read, open(self.path / source.name, "xb", opener=private_opener) as file:
                    shutil.copyfileobj(read, file)
        except OSError:
            self.left_out += 1
            return
        self._count(size)

    def _has_room(self, size: int) -> bool:
        fits = self.bytes + size <= MAX_BYTES
        self.left_out += not fits
        return fits

    def _count(self, size: int) -> None:
        self.files += 1
        self.bytes += size


def last_output(log: Path) -> bytes:
    """The last lines of a rank's output; empty if it cannot be read."""
    try:
        with open_regular(log) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_OUTPUT_BYTES))
            data = file.read(MAX_OUTPUT_BYTES)
    except OSError:
        return b""
    return b"".join(data.splitlines(keepends=True)[-MAX_LINES:])


def _dumps(ranks: FailedRanks) -> Iterator[Path]:
    """Stacks and flight recorder dumps of the attempt."""
    attempt = re.escape(str(ranks.attempt))
    names = re.compile(
        rf"flight-attempt-{attempt}-rank-\d+(?:\D.*)?|"
        rf"stacks-(?:requested-)?replica-{ranks.replica}-attempt-{attempt}-rank-\d+(?:\D.*)?"
    )
    yield from sorted(path for path in ranks.folder.iterdir() if names.fullmatch(path.name))


def _environment(ranks: FailedRanks) -> dict[str, dict[str, str]]:
    """The variables that all ranks share, and those of each rank; values that may be secret are hidden."""
    of_rank = {rank: set(environ.items()) for rank, environ in ranks.environs.items()}
    shared = set[tuple[str, str]]().union(*of_rank.values()).intersection(*of_rank.values())
    own = {f"rank {rank}": variables - shared for rank, variables in of_rank.items()}
    names = {"all ranks": shared} | own
    secrets = _secret_values(ranks)  # on this machine the user's own variables have them too

    def shown(name: str, text: str) -> str:
        known = name in ranks.secret_names or any(secret in text for secret in secrets)
        return _HIDDEN if known or _SECRET_NAME.search(name) or any(_secrets_in(f"{name}={text}")) else text

    return {who: {name: shown(name, text) for name, text in sorted(variables)} for who, variables in names.items()}


def _secrets_in(text: str) -> Iterator[tuple[int, int]]:
    for pattern in secret_patterns.own_patterns():
        yield from secret_patterns.secret_spans(pattern, text)
    yield from secret_patterns.random_words(text)


def _secret_values(ranks: FailedRanks) -> set[str]:
    """The values of the job's secrets, which a rank may have printed."""
    values = (environ.get(name, "") for environ in ranks.environs.values() for name in ranks.secret_names)
    return {value for value in values if len(value) >= 4}


def _without(text: bytes, secrets: Iterable[bytes]) -> bytes:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN.encode())
    return text


def _counters(system: Path) -> dict[str, str]:
    paths = [*map(Path, _COUNTERS), *(path for pattern in _COUNTER_FOLDERS for path in sorted(system.glob(pattern)))]
    found: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb", opener=regular_opener) as file:
            found[str(path)] = file.read(MAX_COUNTER_BYTES).decode(errors="replace").strip()
    return found


def _versions() -> dict[str, str]:
    """Versions on this node; of packages, those that the agent's own interpreter has."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine()}
    for package in ("holdfast", *_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _json(content: object) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _kept(above: Path) -> list[Path]:
    return [path for path in above.iterdir() if path.is_dir() and not path.name.startswith(".")]
