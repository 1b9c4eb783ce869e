"""The files of a run's folder, and the folder of all runs; all are private to their user.

RUNS/<run id>/
    events.jsonl            the log
    job.json                the accepted job
    run-row.json            a finished run's row in the list of runs
    controller.json         where the controller listens, its supervisor's process and machine
    remote.json             of a remote run: its location; log and rank output here are then synced copies
    allocation, allocation.port   on Slurm: the number of the Slurm job, and where its nodes connect
    synced                  on the remote side: the machine that started the run has synced all of them
    readers                 on the remote side: locked by each client that copies them
    restore-scratch/        while there is no log: replicas of it and of the code, as nodes upload them
    notified                how many events the receivers of messages have been told of
    log-unreplicated        on the remote side: the log was restored, and no node has replicated it since
    code-upload.json        on the local side: how far the upload of the code is; absent if none is in progress
    cluster-contact.json    on the local side: since when and why the cluster is unreachable; absent if reachable
    control.sock            the controller's socket for this user's commands
    lock                    locked while the run has a supervisor or a controller
    token, secrets.json     0600; secrets.json is deleted when the run ends
    ca.pem, identity.pem    if agents connect over a network: the CA for agents, and the controller's key (0600),
                            deleted with the secrets; on Kubernetes none of these four are in the folder: the
                            controller reads them from its Secret
    mesh/                   with Monarch on other machines: its CA with the key, and its client's certificate (0600);
                            deleted with the secrets
    controller.log          the controller's log output
    lighthouse.sock, .port, .log   with replicas: the quorum service's control socket, port and log
    code/                   the shipped code: DIGEST.tar, and DIGEST/ where this machine's nodes unpack it
    nodes/node1.0/          one node slot and generation: agent.json (its process), agent.log, stacks, exit-reason,
                            the path of its cgroup, the node's own token (0600)
    nodes/node1.0/evidence/ one folder per failed attempt; agent/failure_evidence.py lists its files
    logs/attempt-0/rank-3.log
    traces/attempt-0-step-20/rank-3.json.gz   traces of profiles, and merged.json.gz of several ranks
    checkpoints/            the default checkpoint path
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.host.files import open_regular, private_opener, read_object, regular_opener

LOCK_POLL_S = 0.05
"""Seconds between two looks at a lock that is waited for."""

EVENTS_NAME = "events.jsonl"
"""Name of the log in every run's folder."""

AGENT_RECORD_NAME = "agent.json"
"""Record of the agent's process, in a node's folder."""

EXIT_REASON_NAME = "exit-reason"
"""Why an agent exited by itself, in a node's folder, for a later controller."""

EVIDENCE_NAME = "evidence"
"""Folder of the evidence of failures, in a node's folder."""

TAIL_BYTES = 64 * 1024
"""Bytes at the end of the controller's log from which its last lines are read."""

_ID_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
"""Without letters and digits that are easily confused."""

_PORTS = ("port", "former_port")
_RECORD_FIELDS: dict[str, type | tuple[type, ...]] = {
    "host": str,
    "port": int,
    "former_port": int,
    "taken_by": str,
    "supervisor_pid": int,
    "id": str,
    "hostname": str,
    "boot": str,
    "failed": int,
    "failing_since": (int, float),
}
"""Fields of `controller.json`."""

_ATTEMPT = re.compile(r"(?P<before>(?:replica-\d+-)?attempt-)(?P<attempt>\d+)")


def runs_root() -> Path:
    """The folder of all runs: HOLDFAST_HOME, else the XDG state folder."""
    home = os.environ.get("HOLDFAST_HOME")
    if home:
        return Path(home).absolute() / "runs"
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state).absolute() / "holdfast" / "runs"


class RunDir(Struct, frozen=True):
    """One run's folder."""

    path: Path
    secrets_dir: Path | None = None
    """Folder of its keys and secrets, read-only and not removable; None if they are in the run's folder."""

    @classmethod
    def create(cls, job_name: str) -> RunDir:
        """Create a private folder under a new id, such as `demo-k3m9tz`."""
        root = runs_root()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            suffix = "".join(secrets.choice(_ID_ALPHABET) for _ in range(6))
            path = root / f"{job_name}-{suffix}"
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return cls(path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def events(self) -> Path:
        return self.path / EVENTS_NAME

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def run_row(self) -> Path:
        return self.path / "run-row.json"

    @property
    def controller_record(self) -> Path:
        return self.path / "controller.json"

    def read_controller_record(self) -> dict[str, Any]:
        """What the supervisor recorded about itself and the controller; ignores unknown fields."""
        return read_controller_record(self.controller_record)

    @property
    def remote(self) -> Path:
        return self.path / "remote.json"

    @property
    def control_socket(self) -> Path:
        return self.path / "control.sock"

    @property
    def code_upload(self) -> Path:
        return self.path / "code-upload.json"

    @property
    def cluster_contact(self) -> Path:
        return self.path / "cluster-contact.json"

    @property
    def synced(self) -> Path:
        return self.path / "synced"

    @property
    def readers(self) -> Path:
        return self.path / "readers"

    @property
    def restore_scratch(self) -> Path:
        return self.path / "restore-scratch"

    @property
    def notified(self) -> Path:
        return self.path / "notified"

    @property
    def log_unreplicated(self) -> Path:
        return self.path / "log-unreplicated"

    @property
    def controller_log(self) -> Path:
        return self.path / "controller.log"

    @property
    def token(self) -> Path:
        return self._secrets_path / "token"

    @property
    def secrets(self) -> Path:
        return self._secrets_path / "secrets.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def ca(self) -> Path:
        return self._secrets_path / "ca.pem"

    @property
    def identity(self) -> Path:
        return self._secrets_path / "identity.pem"

    @property
    def mesh(self) -> Path:
        return self.path / "mesh"

    @property
    def _secrets_path(self) -> Path:
        return self.secrets_dir or self.path

    def delete_secrets(self) -> None:
        """Delete what only an unfinished run needs."""
        if self.secrets_dir is not None:
            return
        self.secrets.unlink(missing_ok=True)
        self.identity.unlink(missing_ok=True)
        shutil.rmtree(self.mesh, ignore_errors=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def lock(self) -> int | None:
        """Lock the run for a supervisor and the controllers that inherit the descriptor; None if it is locked."""
        return self._locked(fcntl.LOCK_EX)

    def alive(self) -> bool:
        """Whether the run has a supervisor or a controller; concurrent callers do not mistake each other for one."""
        try:
            descriptor = self._locked(fcntl.LOCK_SH, os.O_RDONLY)  # it may be on a read-only file system
        except OSError:  # there is no lock file, or something else that cannot be locked
            return False
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def is_free(self, *, within_s: float) -> bool:
        """Wait until no supervisor or controller has the run's lock; returns whether that came."""
        deadline = time.monotonic() + within_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_POLL_S)
        return True

    def _locked(self, how: int, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
        descriptor = regular_opener(str(self.path / "lock"), flags | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    def node_dir(self, node: int, generation: int) -> Path:
        return self.nodes / f"node{node}.{generation}"

    def controller_log_tail(self) -> tuple[str, ...]:
        """The last lines of the controller's log; empty if there is none."""
        return self.log_tail(self.controller_log)

    def log_tail(self, log: Path) -> tuple[str, ...]:
        """The last lines of a log; empty if there is none."""
        try:
            with open_regular(log) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                return tuple(file.read().decode(errors="replace").splitlines()[-5:])
        except OSError:
            return ()

    def evidence(self, attempt: int | None = None, replica: int = 0, replicas: int = 1) -> list[Path]:
        """Folders with the evidence of an attempt, one per node; of all attempts without a number."""
        name = "*attempt-*" if attempt is None else attempt_name(attempt, replica, replicas)
        return sorted(self.nodes.glob(f"node*/{EVIDENCE_NAME}/{name}"))

    def evidence_paths(self) -> tuple[str, ...]:
        """Those of all attempts, the newest last."""
        return tuple(map(str, sorted(self.evidence(), key=lambda path: path.stat().st_mtime_ns)))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    def attempt_log_dir(self, attempt: int, replica: int = 0, replicas: int = 1) -> Path:
        """Folder of an attempt's rank logs; with several replicas each has its own."""
        return self.logs / attempt_name(attempt, replica, replicas)

    def rank_log(self, attempt: int, rank: int, replica: int = 0, replicas: int = 1) -> Path:
        return self.attempt_log_dir(attempt, replica, replicas) / rank_log_name(rank)


def read_controller_record(record: Path) -> dict[str, Any]:
    """The fields of a `controller.json` that a supervisor writes; empty if there is none."""
    try:
        found = read_object(record)
    except OSError:
        return {}
    known = {name: value for name, value in found.items() if isinstance(value, _RECORD_FIELDS.get(name, ()))}
    return {name: value for name, value in known.items() if name not in _PORTS or 0 < value < 1 << 16}


TRACE_NAME = re.compile(r"(replica-\d{1,6}-)?attempt-\d{1,6}-step-\d{1,12}/rank-\d{1,9}(\.json|-memory\.pickle)\.gz")
"""A trace, or a snapshot of GPU memory, in the folder of traces."""
MAX_TRACE_BYTES = 64 << 20
"""Most bytes of one trace, compressed."""


def trace_name(step: int, rank: int, attempt: int, replica: int = 0, replicas: int = 1) -> str:
    """Name of a trace in the folder of traces."""
    return f"{attempt_name(attempt, replica, replicas)}-step-{step}/rank-{rank}.json.gz"


def attempt_name(attempt: int, replica: int = 0, replicas: int = 1) -> str:
    """Name of an attempt's folders; with several replicas each has its own."""
    return f"attempt-{attempt}" if replicas == 1 else f"replica-{replica}-attempt-{attempt}"


def rank_log_name(rank: int) -> str:
    """Name of a rank's log in its attempt's folder."""
    return f"rank-{rank}.log"


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its user may read."""
    with open(path, "x", opener=private_opener) as file:
        file.write(text)


def earlier_logs(rank_log: Path) -> list[Path]:
    """Logs of the same rank in earlier attempts, oldest first; empty for a file outside an attempt's folder."""
    found = _ATTEMPT.fullmatch(rank_log.parent.name)
    if found is None:
        return []
    folders = (rank_log.parent.with_name(f"{found['before']}{earlier}") for earlier in range(int(found["attempt"])))
    return [log for folder in folders if (log := folder / rank_log.name).exists()]
