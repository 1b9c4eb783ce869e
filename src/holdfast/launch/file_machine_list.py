"""Lists the machines of a target without a cluster, and releases one from quarantine: hosts, or this machine."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.host.files import read_line
from holdfast.job.quarantine import Quarantine, release
from holdfast.job.run_spec import RunSpec
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import TargetSpec
from holdfast.launch.machine_pool import MACHINE_NAME
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.launch.target import is_alive
from holdfast.launch.target_machines import TargetMachines, list_machines, not_quarantined
from holdfast.run_dir import RunDir, runs_root


def simulated_names(capacity: int) -> tuple[str, ...]:
    """Names of a local target's simulated machines."""
    return tuple(f"machine{number}" for number in range(capacity))


def read_machines(target: str, spec: TargetSpec, names: tuple[str, ...] = ()) -> TargetMachines:
    """All machines of the target; `names` if its file does not name them."""
    known, findings = QuarantineFile(target).read()
    simulated = simulated_names(spec.capacity) if spec.capacity else ()
    own = (socket.gethostname(),) if spec.kind == LOCAL else ()
    return list_machines(
        names or spec.hosts or simulated or own, _uses(target), known, now=time.time(), findings=findings
    )


def release_machine(target: str, machine: str) -> tuple[Finding, ...]:
    """End the quarantine of a machine; raises HoldfastError if it has none."""
    now = time.time()

    def change(known: Quarantine) -> Quarantine:
        changed = release(known, machine, now)
        if changed is None:
            raise not_quarantined(machine, target, known, now)
        return changed

    return QuarantineFile(target).change(change)


def _uses(target: str) -> Iterator[tuple[str, str]]:
    """Machines of the nodes of this user's live runs on the target."""
    for path in sorted(runs_root().glob("*")):
        run = RunDir(path)
        with contextlib.suppress(HoldfastError, OSError):
            if RunSpec.read(run.job).target == target and is_alive(run):
                yield from ((machine, run.run_id) for machine in _machines(run))


def _machines(run: RunDir) -> Iterator[str]:
    """Simulated machines and hosts have names in the nodes' folders; else all nodes are on this machine."""
    accepted = RunSpec.read(run.job)
    named = accepted.capacity is not None or accepted.target_kind != LOCAL
    for token in run.nodes.glob("node*.*/token"):  # deleted when the node is gone
        yield read_line(token.with_name(MACHINE_NAME)) if named else socket.gethostname()
