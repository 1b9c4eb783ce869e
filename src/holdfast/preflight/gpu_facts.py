"""What of GPUs must be equal on all nodes of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from holdfast.preflight.checks.gpu_links import job_links
from holdfast.preflight.gpu_symptoms import job_gpus
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.nvidia_smi import Gpu, read_report


def gpu_facts(view: NodeView) -> Mapping[str, str]:
    """By label; without those that cannot be read."""
    try:
        gpus = job_gpus(view)
    except NotLookedAt:
        return {}
    if not gpus:
        return {}
    report = view.once(read_report)
    models = Counter(gpu.model for gpu in gpus)
    facts = {
        "NVIDIA driver": report.driver,
        "CUDA version of the driver": report.cuda,
        "GPUs": ", ".join(f"{count} × {model}" for model, count in sorted(models.items())),
        "MIG mode": _different(gpu.mig_mode for gpu in gpus),
        "ECC mode": _different(gpu.ecc for gpu in gpus),
        "power limit of a GPU, W": _different(f"{gpu.limits.get('power limit, W', 0):g}" for gpu in gpus),
        "PCIe lanes of a GPU": _different(str(gpu.pcie_lanes or "") for gpu in gpus),
        "active NVLinks of a GPU": _active_links(view, tuple(gpu for gpu in gpus if not gpu.divided)),
    }
    return {label: value for label, value in facts.items() if value}


def _active_links(view: NodeView, gpus: tuple[Gpu, ...]) -> str:
    try:
        links = job_links(view, gpus)
    except NotLookedAt:
        return ""
    return _different(str(len(links[gpu.uuid].active)) for gpu in gpus if gpu.uuid in links)


def _different(values: Iterable[str]) -> str:
    """The values that occur, such as `Enabled`, or `Disabled, Enabled` where GPUs differ."""
    return ", ".join(sorted({value for value in values if value}))
