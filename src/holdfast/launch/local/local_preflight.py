"""Checks whether a job can start on this machine, and reports all problems before anything starts.

Rules that do not depend on the machine are in job/rules.py.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath

import msgspec
from msgspec import Struct

from holdfast.errors import missing_extra
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.cgroups import cgroup_parent
from holdfast.job.isolation import Isolation
from holdfast.job.notify import Notification
from holdfast.job.quarantine import QuarantineRow
from holdfast.job.quarantine_text import avoided_finding, release_command
from holdfast.job.spec import Job, Launch
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import TargetSpec
from holdfast.launch.file_machine_list import simulated_names
from holdfast.launch.local.resource_split import visible_devices
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.launch.secret_values import missing_secrets
from holdfast.os_errors import os_error_finding, probe_disk
from holdfast.run_dir import runs_root
from holdfast.security.api_limits import CONTROLLER_FILES, FILES_PER_NODE, MIN_PENDING

RANKS_PER_CPU = 32
"""More ranks per core than this are a typing error: imports alone would take minutes."""

VERSION_TIMEOUT_S = 10.0
"""Longest time that a program may take to print its version."""


class LocalMachine(Struct, frozen=True, kw_only=True):
    """The properties of a machine that the checks need."""

    base: Path
    """Absolute folder that the job's relative paths start from."""
    environ: Mapping[str, str]
    """The environment of the command that starts the run."""
    isolation: Isolation
    cpus: int
    memory: int
    """Bytes."""
    gpus: int
    memory_unlimited_reason: str = ""
    """Why memory limits cannot be enforced; empty if they can."""
    open_files: int = 1 << 20
    """Hard limit of open files per process."""
    checkpoint_root: str | None = None
    """The target's folder for checkpoints."""
    capacity: int | None = None
    """Number of nodes that the target has machines for."""
    target: str = LOCAL
    archived: bool = False
    """Whether the job's code is an archive, so that the files in `base` do not matter."""
    quarantined: tuple[QuarantineRow, ...] = ()
    """Simulated machines that runs avoid."""
    quarantine_findings: tuple[Finding, ...] = ()
    notify: tuple[Notification, ...] = ()
    """The target's receivers of messages."""
    mpi_version: str = ""
    """Version line of the job's `mpirun`, if the job has one."""


def check_locally(
    job: Job,
    spec: TargetSpec,
    *,
    base: Path,
    environ: Mapping[str, str],
    target: str = LOCAL,
    archived: bool = False,
) -> tuple[Finding, ...]:
    """Errors that prevent this job on this machine, and notices of what will differ from the job file.

    `archived`: its code is an archive, so the files in `base` do not matter.
    """
    quarantined, unreadable = _quarantined(target, spec)
    here = LocalMachine(
        base=base.absolute(),
        environ=environ,
        isolation=spec.isolation,
        cpus=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=len(visible_devices(environ)),
        memory_unlimited_reason=where if isinstance(where := cgroup_parent(), str) else "",
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        checkpoint_root=spec.checkpoint_root,
        capacity=spec.capacity,
        target=target,
        archived=archived,
        notify=spec.notify,
        quarantined=quarantined,
        quarantine_findings=unreadable,
        mpi_version=_mpi_version(job, base, environ) if job.launch is Launch.MPI else "",
    )
    return run_checks(job, here)


def _quarantined(target: str, spec: TargetSpec) -> tuple[tuple[QuarantineRow, ...], tuple[Finding, ...]]:
    """Simulated machines that runs avoid; a single machine never is."""
    if spec.capacity is None:
        return (), ()
    known, findings = QuarantineFile(target).read()
    names = simulated_names(spec.capacity)
    return tuple(row for row in known.active(time.time()) if row.machine in names), findings


def run_checks(job: Job, here: LocalMachine) -> tuple[Finding, ...]:
    """Run all checks for a described machine."""
    return tuple(finding for check in CHECKS for finding in check(job, here))


def folders(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Checks that the working directory exists, and that run and checkpoint folders can be written."""
    if not here.archived:
        yield from _workdir(here.base / job.workdir)
    yield from _writable("HOLDFAST_HOME", runs_root(), "the folder of all runs", "Set HOLDFAST_HOME to another folder.")
    if job.checkpoint.write_path is not None:
        folder = here.base / job.checkpoint.write_path
        field = "checkpoint.local" if job.checkpoint.local else "checkpoint.path"
        yield from _writable(field, folder, "the checkpoint folder", "Name a folder you may write to.")
    elif here.checkpoint_root is not None:
        remedy = "Set `checkpoint.path`, or another `checkpoint_root` in the target."
        yield from _writable(
            "checkpoint_root", here.base / here.checkpoint_root, "the target's checkpoint_root", remedy
        )


def _workdir(workdir: Path) -> Iterator[Finding]:
    if not workdir.is_dir():
        reason = "is not a folder" if workdir.exists() else "does not exist"
        yield _error(
            "missing-workdir", "workdir", f"the working directory {workdir} {reason}", "Make it, or change it."
        )
    elif not os.access(workdir, os.R_OK | os.X_OK):
        yield _error("missing-workdir", "workdir", f"the working directory {workdir} may not be entered", "Permit it.")


def program(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Checks that a rank would find the command's program, and the Python script that it runs."""
    workdir = here.base / job.workdir
    name = job.command[0]
    search = job.env.get("PATH", here.environ.get("PATH", os.defpath))
    if here.archived and "/" in name:
        return
    if not _find_program(name, workdir, search):
        if "/" in name and (workdir / name).is_file():
            remedy = f"Run `chmod +x {shlex.quote(name)}`, or name its interpreter: `python {name}`, `bash {name}`."
            yield _error("not-executable", "command", f"`{name}` is not executable", remedy, _mode(workdir / name))
            return
        near = [other for other in ("python3", "python") if PurePath(name).name == "python" and shutil.which(other)]
        remedy = f"Write `{near[0]}`." if near else "Install it, or write its whole path."
        evidence = (f"relative to {workdir}",) if "/" in name else (f"PATH={search}",)
        yield _error("missing-program", "command", f"there is no program `{name}`", remedy, evidence)
    elif PurePath(name).name.startswith("python") and len(job.command) > 1 and not here.archived:
        script = job.command[1]
        if not script.startswith("-") and workdir.is_dir() and not (workdir / script).exists():
            remedy = "Correct the path, or set `workdir`."
            yield _error("missing-script", "command", f"there is no file {script} in {workdir}", remedy)


def devices(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Checks GPUs, cores, memory and files: all nodes of the job share this machine's."""
    nodes = job.node_slots
    each = "" if nodes == 1 else f" ({nodes} nodes on this one machine)"
    gpus = nodes * job.gpus_per_node
    if gpus > here.gpus:
        visible = here.environ.get("CUDA_VISIBLE_DEVICES")
        limits = () if visible is None else (f"CUDA_VISIBLE_DEVICES={visible}",)
        evidence = (f"{here.gpus} NVIDIA devices under /dev", *limits)
        what = f"the job asks for {gpus} GPU{'s' * (gpus > 1)}{each}, and this machine has {here.gpus}"
        yield _error("too-few-gpus", "gpus_per_node", what, "Ask for fewer GPUs or nodes.", evidence)
    memory = nodes * (job.resources.memory or 0)
    if memory > here.memory:
        what = f"the job asks for {_gib(memory)} of memory{each}, and this machine has {_gib(here.memory)}"
        yield _error("too-little-memory", "resources.memory", what, "Ask for less memory or fewer nodes.")
    elif memory and here.memory_unlimited_reason:
        what = f"nodes cannot be held to `resources.memory` here: {here.memory_unlimited_reason}"
        yield _notice("not-enforced-locally", Severity.INFO, "resources.memory", what, "Nothing, unless nodes must be.")
    cpus = nodes * (job.resources.cpu or 0)
    if cpus > here.cpus:
        what = f"the job asks for {cpus:g} CPU cores{each}, and this machine has {here.cpus}; its ranks will share them"
        yield _notice("too-few-cpus", Severity.WARNING, "resources.cpu", what, "Ask for fewer cores or fewer nodes.")
    processes = nodes * job.processes_per_node
    if processes > RANKS_PER_CPU * here.cpus:
        what = f"{processes} processes are too many for a machine with {here.cpus} CPU cores"
        remedy = f"Ask for at most {RANKS_PER_CPU * here.cpus}: fewer nodes, or fewer ranks on each."
        yield _error("too-many-ranks", "nodes", what, remedy)
    elif (
        files := CONTROLLER_FILES + MIN_PENDING + FILES_PER_NODE * max(nodes, job.processes_per_node)
    ) > here.open_files:
        what = f"a process of holdfast needs {files:,} open files for this job, and may have {here.open_files:,}"
        yield _error("too-few-open-files", "nodes", what, "Raise the hard limit: `ulimit -Hn`, or LimitNOFILE=.")


def gpu_numbering(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """DeepSpeed's launcher numbers GPUs from 0 on each node and overrides the node's CUDA_VISIBLE_DEVICES."""
    if job.launch is Launch.DEEPSPEED and job.gpus_per_node and job.nodes.max > 1:
        what = (
            "`deepspeed` takes GPUs from number 0 on, and all nodes are on this one machine, so they would share them"
        )
        remedy = "Write `nodes: 1`, or start the program without `deepspeed` and with `launch: per-rank`."
        yield _error("deepspeed-gpu-numbering", "launch", what, remedy)


def quorum(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Replicas need the lighthouse, which needs gRPC."""
    if job.recovery.replicas > 1 and (lacking := missing_extra("ft", "grpc", "replicas need")):
        yield lacking


def capacity(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """The target may have machines for fewer nodes than the job requests."""
    usable = None if here.capacity is None else here.capacity - len(here.quarantined)
    if here.capacity is None or usable is None or usable >= job.nodes.max:
        return
    asked = f"{job.nodes.min} to {job.nodes.max}" if job.nodes.is_elastic else f"{job.nodes.max}"
    bad = f", of which {len(here.quarantined)} quarantined" if here.quarantined else ""
    what = f"the job asks for {asked} nodes, and the target has a `capacity` of {here.capacity}{bad}"
    if usable < job.nodes.min:
        release = f", or `{release_command(here.quarantined[0].machine, here.target)}`" if here.quarantined else ""
        yield _error("too-few-nodes", "nodes", what, f"Ask for fewer nodes, raise the target's `capacity`{release}.")
    else:
        starts = f"it starts with {usable} after {job.nodes.min_nodes_wait_s:g} s"
        remedy = "Nothing, if that will do. Else raise the target's `capacity`."
        yield _notice("starts-with-fewer-nodes", Severity.WARNING, "nodes", f"{what}: {starts}", remedy)


def quarantined(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Machines that this run avoids, because an earlier one found them to be at fault."""
    yield from here.quarantine_findings
    yield from avoided_finding(here.quarantined, here.capacity, here.target)


def open_mpi(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Any other MPI ignores Open MPI 4's variables and would start all ranks on one node."""
    if job.launch is Launch.MPI and here.mpi_version and not re.search(r"\((Open MPI|OpenRTE)\) 4\.", here.mpi_version):
        what = f"`launch: mpi` needs Open MPI 4, and `{job.command[0]}` is another"
        remedy = "Install it (Debian: apt-get install openmpi-bin), or start the program with `launch: per-rank`."
        yield _error("not-open-mpi-4", "command", what, remedy, (here.mpi_version,))


def secrets(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Every secret must be readable now."""
    yield from missing_secrets(job, here.base, here.environ, here.notify)


def isolation(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Network namespaces need a kernel that allows them."""
    if here.isolation is not Isolation.NETNS:
        return
    from holdfast.launch.local import netns

    reason = netns.unavailable()
    if reason is not None:
        what = f"nodes cannot have network namespaces here: {reason}"
        remedy = "Use a target with `isolation: process`."
        yield Finding(code="no-netns", what=what, where="isolation", remedy=remedy, owner=Owner.CLUSTER)


def unused(job: Job, here: LocalMachine) -> Iterator[Finding]:
    """Fields that only clusters use, and GPUs that the job does not request."""
    for field, value in (("image", job.image), ("queue", job.queue), ("resources.shm", job.resources.shm)):
        if value is not None:
            what = f"`{field}` is not used by the local target"
            yield _notice("not-used-locally", Severity.INFO, field, what, "Nothing: a cluster uses it.")
    if here.gpus and not job.gpus_per_node:
        count = f"{here.gpus} GPU{'s' * (here.gpus > 1)}"
        what = f"this machine has {count} and the job asks for none, so ranks see none"
        yield _notice("gpus-not-requested", Severity.INFO, "gpus_per_node", what, "Set `gpus_per_node`, to use them.")


CHECKS: tuple[Callable[[Job, LocalMachine], Iterator[Finding]], ...] = (
    folders,
    program,
    devices,
    gpu_numbering,
    capacity,
    quarantined,
    quorum,
    open_mpi,
    secrets,
    isolation,
    unused,
)


def _mpi_version(job: Job, base: Path, environ: Mapping[str, str]) -> str:
    """The first line of `PROGRAM --version`; empty if that fails."""
    search = job.env.get("PATH", environ.get("PATH", os.defpath))
    program = shutil.which(job.command[0], path=search) if "/" not in job.command[0] else base / job.command[0]
    try:
        done = subprocess.run(
            [program or job.command[0], "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


def _find_program(name: str, workdir: Path, search: str) -> bool:
    """Whether execvpe would find the program from the working directory."""
    if "/" in name:
        return _executable(workdir / name)
    return any(_executable(workdir / folder / name) for folder in search.split(os.pathsep))


def _mode(path: Path) -> tuple[str, ...]:
    return (f"{stat.filemode(path.stat().st_mode)} {path}",)


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _writable(where: str, folder: Path, subject: str, remedy: str) -> Iterator[Finding]:
    """Checks that the folder, or its nearest existing parent, is writable."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        yield _error("unwritable-folder", where, f"{subject} cannot be {folder}: {nearest} is not a folder", remedy)
    elif (refusal := probe_disk(nearest)) is not None:  # first: os.access also fails on a read-only mount
        found = os_error_finding(refusal, f"{subject} cannot be {folder}", nearest)
        yield msgspec.structs.replace(found, where=where, remedy=f"{found.remedy} {remedy}")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield _error("unwritable-folder", where, f"{subject} cannot be {folder}: {nearest} may not be written", remedy)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _error(code: str, where: str, what: str, remedy: str, evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(code=code, what=what, where=where, remedy=remedy, evidence=evidence)


def _notice(code: str, severity: Severity, where: str, what: str, remedy: str) -> Finding:
    return Finding(code=code, severity=severity, what=what, where=where, remedy=remedy)
