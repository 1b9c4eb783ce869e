"""What connects a node's GPUs: NVLink, the NVSwitch fabric, and PCIe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from holdfast.findings import Finding, Severity
from holdfast.preflight.gpu_symptoms import Symptom, SymptomKind, findings_of, job_gpus, listed_gpus
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.nvidia_smi import Gpu, GpuLinks, by_model, read_links

NVLINK_INACTIVE = SymptomKind(
    code="gpu-nvlink-inactive",
    severity=Severity.ERROR,
    what="NVLinks are inactive that other GPUs of this model have active, on {gpus}",
    remedy="`nvidia-smi nvlink -s` and `dmesg | grep -iE 'nvlink|sxid'`. Reset all GPUs or restart the node; if the "
    "links stay inactive, the GPU or its board needs service.",
)
FABRIC_NOT_READY = SymptomKind(
    code="gpu-fabric-not-ready",
    severity=Severity.ERROR,
    what="the NVSwitch fabric is not ready on {gpus}: CUDA fails with error 802 (system not yet initialized), or NCCL "
    "runs without NVLink",
    remedy="`systemctl status nvidia-fabricmanager`: its version must be exactly the driver's. Start it and reset the "
    "GPUs; in a virtual machine the host activates the partition.",
)
FABRIC_UNHEALTHY = SymptomKind(
    code="gpu-fabric-unhealthy",
    severity=Severity.ERROR,
    what="the NVSwitch fabric is unhealthy on {gpus}",
    remedy="See `nvidia-smi -q | grep -A 12 Fabric`, /var/log/fabricmanager.log and `dmesg | grep -i sxid`; reset the "
    "GPUs or restart the node.",
)
FABRIC_DEGRADED = replace(FABRIC_UNHEALTHY, severity=Severity.WARNING)
PCIE_NARROW = SymptomKind(
    code="gpu-pcie-narrow",
    severity=Severity.WARNING,
    what="fewer PCIe lanes are in use than on other GPUs of this model, on {gpus}",
    remedy="Reseat the GPU or its riser; `lspci -vv -s BUS_ID | grep LnkSta` shows the link as downgraded.",
)

_UNKNOWN_STATES = ("", "Not Supported")
"""GPUs without NVSwitch, and of generations before Hopper, give no state."""
_HEALTH: Mapping[tuple[str, str], SymptomKind] = {
    ("route_unhealthy", "True"): FABRIC_UNHEALTHY,
    ("summary", "Unhealthy"): FABRIC_UNHEALTHY,
    ("summary", "Limited Capacity"): FABRIC_DEGRADED,
    ("bandwidth", "Degraded"): FABRIC_DEGRADED,
    ("route_recovery_in_progress", "True"): FABRIC_DEGRADED,
    ("access_timeout_recovery", "True"): FABRIC_DEGRADED,
}
"""A field of the fabric's health and its value."""


def gpu_nvlink(view: NodeView) -> Iterator[Finding]:
    """Each GPU has as many active NVLinks as the others of its model."""
    yield from findings_of(_nvlink_symptoms(view, _undivided_gpus(view)))


def gpu_fabric_manager(view: NodeView) -> Iterator[Finding]:
    """Fabric Manager has registered each GPU with the NVSwitch fabric, and the fabric is healthy."""
    yield from findings_of(
        symptom for gpu in _undivided_gpus(view) for symptom in _fabric_symptoms(gpu, alone=len(listed_gpus(view)) == 1)
    )


def gpu_pcie(view: NodeView) -> Iterator[Finding]:
    """Each GPU uses as many PCIe lanes as the others of its model.

    Fewer lanes than the GPU's maximum are usual: an A10G of AWS has 8 of 16. Idle GPUs lower the link's generation.
    """
    for siblings in by_model(job_gpus(view)).values():
        widest = max(gpu.pcie_lanes or 0 for gpu in siblings)
        yield from findings_of(
            Symptom(PCIE_NARROW, gpu, f"{gpu.pcie_lanes} of {widest} lanes")
            for gpu in siblings
            if gpu.pcie_lanes is not None and gpu.pcie_lanes < widest
        )


def job_links(view: NodeView, gpus: tuple[Gpu, ...]) -> Mapping[str, GpuLinks]:
    """NVLinks by UUID; none if a GPU is alone, whose links lead nowhere."""
    if len(gpus) < 2:
        return {}
    try:
        return view.once(read_links)
    except TimeoutError as error:
        raise NotLookedAt(str(error)) from error


def _undivided_gpus(view: NodeView) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in job_gpus(view) if not gpu.divided)


def _nvlink_symptoms(view: NodeView, gpus: tuple[Gpu, ...]) -> Iterator[Symptom]:
    links = job_links(view, gpus)
    for siblings in by_model(gpus).values():
        known = [(gpu, links[gpu.uuid]) for gpu in siblings if gpu.uuid in links]
        usual = max((each.active for _, each in known), key=len, default=frozenset[int]())
        for gpu, each in known:
            if len(each.active) < len(usual):
                missing = ", ".join(map(str, sorted(usual - each.active)))
                figure = f"{len(each.active)} of {len(usual)} links, without {missing}"
                yield Symptom(_inactive_links(view, siblings), gpu, figure)


def _inactive_links(view: NodeView, siblings: tuple[Gpu, ...]) -> SymptomKind:
    """Boards of GPUs have all links alike; bridges between cards may join only some of them."""
    board = any(gpu.fabric.get("state") == "Completed" or "SXM" in gpu.model for gpu in siblings)
    if board or "nvidia-nvswitchctl" in view.list("dev"):
        return NVLINK_INACTIVE
    return replace(NVLINK_INACTIVE, severity=Severity.WARNING)


def _fabric_symptoms(gpu: Gpu, *, alone: bool) -> Iterator[Symptom]:
    state, status = gpu.fabric.get("state", ""), gpu.fabric.get("status", "Success")
    if state in _UNKNOWN_STATES:
        return
    if state != "Completed":
        # A single GPU of a board works without the fabric if its links are off.
        kind = replace(FABRIC_NOT_READY, severity=Severity.WARNING) if alone else FABRIC_NOT_READY
        yield Symptom(kind, gpu, f"state {state}")
    elif status != "Success":
        yield Symptom(FABRIC_NOT_READY, gpu, f"status {status}")
    for (name, value), kind in _HEALTH.items():
        if gpu.fabric.get(name, "").lower() == value.lower():
            yield Symptom(kind, gpu, f"{name} {value}")
