"""The NVIDIA driver of a node answers, and it has as many GPUs as the job needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.gpu_symptoms import Symptom, SymptomKind, findings_of, job_gpus, listed_gpus, visible_devices
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.nvidia_smi import BrokenReport, Gpu, read_report

OTHER_DRIVERS = ("kfd", "dxg", "neuron0")
"""Device files of AMD GPUs, of GPUs under WSL, and of AWS Neuron devices, which nvidia-smi does not list."""

_DEVICE_FILE = re.compile(r"nvidia(\d+)")
_SHOWN_LINES = 8

_ANSWERS: Mapping[str, str] = {
    # NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA
    # driver is installed and running.
    "couldn't communicate with the NVIDIA driver": "Load the driver: `modprobe nvidia`. If that fails, install it for "
    "the kernel that runs (`dkms status`, `uname -r`) or restart the node.",
    # Failed to initialize NVML: Driver/library version mismatch
    # NVML library version: 570.124
    "Driver/library version mismatch": "The driver's libraries were updated under a loaded module: restart the node, "
    "or unload and load the nvidia modules. In a container, recreate it.",
    # Failed to initialize NVML: Unknown Error
    "Failed to initialize NVML": "In a container: recreate it, since it has lost access to its device files. On the "
    "machine: see `dmesg`, and restart the node.",
    # Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU
    "Unable to determine the device handle": "Restart the node. If the GPU is lost again, have it replaced.",
    # No devices were found
    "No devices were found": "Compare `lspci -d 10de:` and `dmesg | grep NVRM`. In a container: request GPUs "
    "(nvidia.com/gpu, `--gpus all`).",
}
"""Part of an answer without GPUs, with what to do; above each a real one."""

_LOST = re.compile(r"Unable to determine the device handle|GPU is lost|fallen off the bus", re.IGNORECASE)
_CORRUPTED = re.compile(r"infoROM is corrupted", re.IGNORECASE)
"""WARNING: infoROM is corrupted at gpu 0000:3B:00.0"""

NOT_ANSWERING = SymptomKind(
    code="gpu-not-answering",
    severity=Severity.ERROR,
    what="the driver has lost access to {gpus}",
    remedy="Restart the node; `dmesg | grep Xid` shows why. If it is lost again, have the GPU replaced.",
)
UNREADABLE = SymptomKind(
    code="gpu-values-unreadable",
    severity=Severity.WARNING,
    what="the driver cannot read some values of {gpus}",
    remedy="See `dmesg | grep -i nvrm`; restart the node if it repeats.",
)
RECOVERY = SymptomKind(
    code="gpu-recovery-required",
    severity=Severity.ERROR,
    what="the driver requests a recovery of {gpus}, after an error that it could not correct",
    remedy="End the processes on it and run `nvidia-smi --gpu-reset -i N`, or restart the node.",
)


def gpu_driver(view: NodeView) -> Iterator[Finding]:
    """nvidia-smi answers, lists GPUs, and the driver reads them all."""
    if not view.wanted.gpus:
        return
    try:
        report = view.once(read_report)
    except TimeoutError as error:
        yield _driver_hangs(view, str(error))
        return
    except BrokenReport:
        raise
    except NotLookedAt as error:
        yield from _driver_missing(view, error)
        return
    lost = tuple(note for note in report.notes if _LOST.search(note))
    if not report.gpus or lost:
        yield _driver_fails(lost or report.notes or ("nvidia-smi -q -x printed nothing",))
    if corrupted := tuple(note for note in report.notes if _CORRUPTED.search(note)):
        yield Finding(
            code="gpu-inforom-corrupted",
            severity=Severity.WARNING,
            what="a GPU's infoROM is corrupted: its configuration and its record of memory errors may be lost",
            where="nvidia-smi",
            evidence=corrupted,
            remedy="Restart the node; if the warning remains, have the GPU replaced.",
            owner=Owner.CLUSTER,
        )
    yield from findings_of(_driver_symptoms(job_gpus(view) if report.gpus else ()))


def gpu_count(view: NodeView) -> Iterator[Finding]:
    """The node has as many GPUs as the job needs, and nvidia-smi lists each one that has a device file."""
    if not view.wanted.gpus:
        return
    listed, visible = listed_gpus(view), visible_devices(view)
    usable = sum(each.mig_devices if each.divided else 1 for each in job_gpus(view))
    unlisted = _unlisted_devices(view, listed)
    if usable < view.wanted.gpus:
        hidden = visible is not None and len(listed) >= view.wanted.gpus
        shown = [f"CUDA_VISIBLE_DEVICES={visible}"] if visible is not None else []
        shown += [f"{device} is not listed by nvidia-smi" for device in unlisted]
        yield Finding(
            code="gpus-missing",
            what=f"the job needs {view.wanted.gpus} GPUs on each node, and this node has {usable}",
            where="nvidia-smi",
            evidence=(*shown, *(f"GPU {each.index}: {each.model} (UUID: {each.uuid})" for each in listed)),
            remedy="Unset CUDA_VISIBLE_DEVICES where the agent starts, or name all of the GPUs in it."
            if hidden
            else "`dmesg | grep Xid` and `lspci -d 10de:` show a GPU that is lost: restart the node. In a container, "
            "request more GPUs; with MIG, make more instances.",
            owner=Owner.USER if hidden else Owner.CLUSTER,
        )
    elif unlisted and "SLURM_JOB_ID" not in view.environ:  # Slurm leaves files of GPUs that it keeps from the job
        yield Finding(
            code="gpu-not-listed",
            severity=Severity.WARNING,
            what=f"{', '.join(unlisted)} exists, and nvidia-smi does not list its GPU: it may be lost",
            where=unlisted[0],
            evidence=tuple(f"GPU {each.index}: {each.bus_id}, minor number {each.minor}" for each in listed),
            remedy="`dmesg | grep Xid` shows whether it is lost; restart the node then.",
            owner=Owner.CLUSTER,
        )


def _driver_hangs(view: NodeView, error: str) -> Finding:
    """Without persistence mode each call initialises all GPUs, which can take longer than a hang is waited for."""
    persistent = bool(view.list("run/nvidia-persistenced"))
    return Finding(
        code="gpu-driver-hangs",
        severity=Severity.ERROR if persistent else Severity.WARNING,
        what="nvidia-smi does not answer: the driver or a GPU hangs"
        + ("" if persistent else ", or persistence mode is off and each call initialises all GPUs"),
        where="nvidia-smi",
        evidence=(error, f"nvidia-persistenced {'runs' if persistent else 'does not run'} here"),
        remedy="Run `time nvidia-smi` on the node: if it ends, switch persistence mode on (`nvidia-smi -pm 1`); if "
        "not, restart the node, and see `dmesg | grep Xid`.",
        owner=Owner.CLUSTER,
    )


def _driver_missing(view: NodeView, error: NotLookedAt) -> Iterator[Finding]:
    devices = set(view.list("dev"))
    if devices & {*OTHER_DRIVERS}:
        raise NotLookedAt("these GPUs are not NVIDIA's, or are reached through WSL; nvidia-smi does not list them")
    if "nvidiactl" in devices or view.list("proc/driver/nvidia"):
        raise NotLookedAt(f"{error}; a container gets nvidia-smi with NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    yield Finding(
        code="gpu-driver-missing",
        what=f"the job needs {view.wanted.gpus} GPUs on each node, and this node has no NVIDIA driver",
        where="nvidia-smi",
        evidence=(str(error), "/dev/nvidiactl and /proc/driver/nvidia do not exist"),
        remedy="On Kubernetes: resources.limits nvidia.com/gpu and runtimeClassName nvidia; in a container: "
        "`--gpus all`; on a machine: install the driver.",
        owner=Owner.CLUSTER,
    )


def _driver_fails(lines: tuple[str, ...]) -> Finding:
    remedy = next((remedy for part, remedy in _ANSWERS.items() if any(part in line for line in lines)), None)
    return Finding(
        code="gpu-driver-fails",
        what=f"nvidia-smi cannot use the GPUs of this node: {lines[0]}",
        where="nvidia-smi",
        evidence=lines[:_SHOWN_LINES],
        remedy=remedy or "Run `nvidia-smi` and `dmesg | grep -i nvrm` on the node; restart it.",
        owner=Owner.CLUSTER,
    )


def _driver_symptoms(gpus: tuple[Gpu, ...]) -> Iterator[Symptom]:
    for gpu in gpus:
        if gpu.recovery:
            yield Symptom(RECOVERY, gpu, gpu.recovery)
        if gpu.unreadable:
            lost = any(field.endswith(("is lost", "requires reset")) for field in gpu.unreadable)
            yield Symptom(NOT_ANSWERING if lost else UNREADABLE, gpu, gpu.unreadable[0])


def _unlisted_devices(view: NodeView, listed: tuple[Gpu, ...]) -> tuple[str, ...]:
    minors = {gpu.minor for gpu in listed}
    files = (_DEVICE_FILE.fullmatch(name) for name in view.list("dev"))
    return () if None in minors else tuple(f"/dev/{each[0]}" for each in files if each and int(each[1]) not in minors)
