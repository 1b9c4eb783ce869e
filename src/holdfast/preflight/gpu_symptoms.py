"""Symptoms of GPUs, one finding for all GPUs of a node that share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.nvidia_smi import Gpu, is_visible, read_report


class SymptomKind(Struct, frozen=True, kw_only=True):
    """A finding without its GPUs."""

    code: str
    severity: Severity
    what: str
    """A sentence in which `{gpus}` is replaced by `GPU 3 (dram_uncorrectable 4)`."""
    remedy: str


class Symptom(Struct, frozen=True):
    """What is wrong with one GPU."""

    kind: SymptomKind
    gpu: Gpu
    figure: str
    """What nvidia-smi prints of it, such as `dram_uncorrectable 4`."""


def findings_of(symptoms: Iterable[Symptom]) -> Iterator[Finding]:
    """One finding per kind, with its GPUs in their order."""
    kinds: dict[SymptomKind, dict[Gpu, list[str]]] = {}
    for symptom in symptoms:
        kinds.setdefault(symptom.kind, {}).setdefault(symptom.gpu, []).append(symptom.figure)
    for kind, gpus in kinds.items():
        figures = {gpu: ", ".join(each) for gpu, each in gpus.items()}
        yield Finding(
            code=kind.code,
            severity=kind.severity,
            what=kind.what.format(gpus=", ".join(f"GPU {gpu.index} ({figure})" for gpu, figure in figures.items())),
            where=", ".join(f"GPU {gpu.index}" for gpu in figures),
            evidence=tuple(f"{gpu.bus_id} {gpu.model}: {figure}" for gpu, figure in figures.items()),
            remedy=kind.remedy,
            owner=Owner.CLUSTER,
        )


def job_gpus(view: NodeView) -> tuple[Gpu, ...]:
    """The GPUs that the job may use; none if it needs none. Raises NotLookedAt if nvidia-smi lists none."""
    if not view.wanted.gpus:
        return ()
    visible = visible_devices(view)
    gpus = listed_gpus(view)
    by_instance = visible is not None and "MIG-" in visible  # names instances, not the GPUs that they are parts of
    return tuple(gpu for gpu in gpus if by_instance or is_visible(gpu.index, gpu.uuid, visible))


def listed_gpus(view: NodeView) -> tuple[Gpu, ...]:
    """All GPUs that nvidia-smi lists. Raises NotLookedAt if there are none, which gpu-driver reports."""
    try:
        report = view.once(read_report)
    except TimeoutError as error:
        raise NotLookedAt(f"{error}: see gpu-driver") from error
    if not report.gpus:
        raise NotLookedAt("nvidia-smi lists no GPU: see gpu-driver")
    return report.gpus


def visible_devices(view: NodeView) -> str | None:
    """CUDA_VISIBLE_DEVICES of the ranks; None if it is unset."""
    return view.environ.get("CUDA_VISIBLE_DEVICES")
