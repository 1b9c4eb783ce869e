"""GPUs of a node: none is in use, broken, slowed down, or limited below the others."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping

from holdfast.findings import Finding, Owner, Severity
from holdfast.host.processes import descendants
from holdfast.preflight.gpu_symptoms import Symptom, SymptomKind, findings_of, job_gpus
from holdfast.preflight.node_view import NodeView
from holdfast.preflight.nvidia_smi import UNLISTED_MEMORY_MIB, Gpu, by_model

BACKGROUND_PROCESSES = ("nvidia-cuda-mps-server",)
"""They hold some MiB of each GPU on healthy nodes."""

_SHOWN_LINES = 8

ECC_ERRORS = SymptomKind(
    code="gpu-ecc-uncorrectable",
    severity=Severity.ERROR,
    what="memory errors that ECC could not correct have occurred since the driver loaded on {gpus}",
    remedy="Reset the GPU (`nvidia-smi --gpu-reset -i N`) or restart the node. If they return, run NVIDIA's field "
    "diagnostic and have it replaced.",
)
REPAIR_FAILED = SymptomKind(
    code="gpu-memory-repair-failed",
    severity=Severity.ERROR,
    what="broken memory could not be repaired on {gpus}",
    remedy="Have the GPU replaced: a row remapping that failed qualifies it for a return.",
)
REPAIR_PENDING = SymptomKind(
    code="gpu-memory-repair-pending",
    severity=Severity.WARNING,
    what="a repair of memory waits for a reset on {gpus}",
    remedy="Reset the GPU (`nvidia-smi --gpu-reset -i N`) or restart the node when it is free.",
)
SRAM_WORN = SymptomKind(
    code="gpu-sram-errors",
    severity=Severity.WARNING,
    what="errors of SRAM have exceeded NVIDIA's threshold on {gpus}",
    remedy="Run NVIDIA's field diagnostic; the GPU qualifies for a return if that fails.",
)
ECC_OFF = SymptomKind(
    code="gpu-ecc-off",
    severity=Severity.WARNING,
    what="ECC is off on {gpus} and on for other GPUs of this model",
    remedy="`nvidia-smi -e 1 -i N`, then reset the GPU or restart the node.",
)
_REPAIRS: Mapping[str, SymptomKind] = {
    "remapped_row_failure": REPAIR_FAILED,
    "unrepairable_memory": REPAIR_FAILED,
    "sram_threshold_exceeded": SRAM_WORN,
    "remapped_row_pending": REPAIR_PENDING,  # new work is not affected, says NVIDIA's guide to GPU memory errors
    "pending_retirement": REPAIR_PENDING,
    "channel_repair_pending": REPAIR_PENDING,
    "tpc_repair_pending": REPAIR_PENDING,
}
SLOWED = SymptomKind(
    code="gpu-slowed-by-hardware",
    severity=Severity.ERROR,
    what="the hardware has at least halved the clocks of {gpus}",
    remedy="Thermal: cooling, fans, dust. Power brake: power supplies and cables. `nvidia-smi -q -d PERFORMANCE`.",
)
SLOW = SymptomKind(
    code="gpu-slowdown",
    severity=Severity.WARNING,
    what="the clocks of {gpus} are reduced",
    remedy="See `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` again after a minute; if it lasts, check the cooling.",
)
_SLOWDOWNS: Mapping[str, SymptomKind] = {
    "hw_thermal_slowdown": SLOWED,
    "hw_power_brake_slowdown": SLOWED,
    "hw_slowdown": SLOW,  # for a moment it is also active at each change of clocks
    "sw_thermal_slowdown": SLOW,
}
PERSISTENCE_OFF = SymptomKind(
    code="gpu-persistence-off",
    severity=Severity.INFO,
    what="the driver unloads the state of {gpus} when no process uses it, which delays every start by seconds",
    remedy="Run nvidia-persistenced, or `nvidia-smi -pm 1`.",
)
SLOWER = SymptomKind(
    code="gpu-limited-below-siblings",
    severity=Severity.WARNING,
    what="clocks or power are limited below those of the other GPUs of this model on {gpus}; every rank waits for it",
    remedy="`nvidia-smi -rac -i N` resets application clocks, `-rgc` locked clocks, `-pl WATTS` sets the power limit.",
)


def gpu_idle(view: NodeView) -> Iterator[Finding]:
    """No other process holds memory of the job's GPUs, except this agent's own."""
    gpus = job_gpus(view)
    own = {*descendants(os.getpid())} if any(gpu.processes for gpu in gpus) else set[int]()
    if used := [line for gpu in gpus for line in _memory_in_use(gpu, own)]:
        yield Finding(
            code="gpu-in-use",
            severity=Severity.WARNING,
            what=f"memory of the job's GPUs is in use by others: {used[0]}",
            where="nvidia-smi",
            evidence=tuple(used[:_SHOWN_LINES]),
            remedy="End the process if it is yours. One that cannot be seen is in another container, or dead and not "
            "let go: `fuser -v /dev/nvidia*` on the machine, or reset the GPU.",
            owner=Owner.CLUSTER,
        )


def gpu_ecc(view: NodeView) -> Iterator[Finding]:
    """No error of memory that ECC could not correct, no repair that failed or is pending, and ECC alike on all."""
    yield from findings_of(_ecc_symptoms(job_gpus(view)))


def gpu_throttle(view: NodeView) -> Iterator[Finding]:
    """Heat or power does not slow a GPU down that has nothing to do yet."""
    yield from findings_of(_throttle_symptoms(job_gpus(view)))


def gpu_persistence(view: NodeView) -> Iterator[Finding]:
    """The driver keeps its state between processes."""
    off = (gpu for gpu in job_gpus(view) if gpu.persistence == "Disabled")
    yield from findings_of(Symptom(PERSISTENCE_OFF, gpu, "persistence_mode Disabled") for gpu in off)


def gpu_clocks(view: NodeView) -> Iterator[Finding]:
    """Limits of clocks and power are alike on all GPUs of a model."""
    yield from findings_of(
        Symptom(SLOWER, gpu, f"{name}: {gpu.limits[name]:g}, others {highest:g}")
        for siblings in by_model(job_gpus(view)).values()
        for name in siblings[0].limits
        for highest in [max(gpu.limits.get(name, 0.0) for gpu in siblings)]
        for gpu in siblings
        if name in gpu.limits and gpu.limits[name] < highest
    )


def _memory_in_use(gpu: Gpu, own: Container[int]) -> Iterator[str]:
    """A GPU in MIG mode lists the processes of all its instances, of which the job may use only one."""
    if gpu.divided:
        return
    for each in gpu.processes:
        large = (each.used_mib or 0) >= UNLISTED_MEMORY_MIB
        counts = (each.kind == "C" or large) and not each.name.endswith(BACKGROUND_PROCESSES)
        if counts and each.pid not in own:
            amount = "an unknown amount" if each.used_mib is None else f"{each.used_mib:,} MiB"
            yield f"GPU {gpu.index}: {amount} held by process {each.pid} ({each.name})"
    if not gpu.processes and (gpu.used_mib or 0) >= UNLISTED_MEMORY_MIB:
        yield f"GPU {gpu.index}: {gpu.used_mib:,} MiB held by no process that can be seen"


def _ecc_symptoms(gpus: tuple[Gpu, ...]) -> Iterator[Symptom]:
    for siblings in by_model(gpus).values():
        on = any(gpu.ecc == "Enabled" for gpu in siblings)
        for gpu in siblings:
            for name, count in gpu.uncorrectable.items():
                yield Symptom(ECC_ERRORS, gpu, f"{name} {count}")
            for name in sorted(gpu.repairs):
                yield Symptom(_REPAIRS[name], gpu, f"{name} Yes")
            if on and gpu.ecc == "Disabled":
                yield Symptom(ECC_OFF, gpu, "current_ecc Disabled")


def _throttle_symptoms(gpus: tuple[Gpu, ...]) -> Iterator[Symptom]:
    for gpu in gpus:
        active = [name for name in _SLOWDOWNS if name in gpu.slowdowns]
        if active:
            kind = _SLOWDOWNS[active[0]]
            if "Laptop" in gpu.model:  # on battery, or warm: that is how laptops work
                kind = SLOW
            yield Symptom(kind, gpu, ", ".join(active))
