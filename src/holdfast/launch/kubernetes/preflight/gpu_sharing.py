"""Finds GPUs that are only parts (MIG) or shares (time-slicing, MPS) of a GPU, by resource name and by label.

A part or a share is not a GPU to NCCL: it refuses two ranks on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.findings import Finding, Severity
from holdfast.launch.kubernetes.client.api_paths import KubeObject
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.preflight.pod_checks import TARGET_PREFIX

_WHERE = f"{TARGET_PREFIX}gpu_resource"
WHOLE = "nvidia.com/gpu"
"""The resource that is a whole GPU, unless labels of the machine say otherwise."""


class _Piece(NamedTuple):
    """What a resource is instead of a GPU."""

    name: str
    consequence: str


_PART = _Piece(
    "a part of a GPU (MIG)",
    "NCCL refuses two ranks on parts of one GPU (`Duplicate GPU detected`), and parts have no P2P, so ranks exchange "
    "data through host memory or the network",
)
_SHARE = _Piece(
    "a share of a GPU (time-slicing or MPS)",
    "two ranks can get shares of the same one, which NCCL refuses (`Duplicate GPU detected`)",
)


def by_name(ctx: RenderContext) -> Iterator[Finding]:
    """Pieces that NVIDIA's device plugin names as such."""
    resource = ctx.target.gpu_resource
    piece = _PART if resource.startswith("nvidia.com/mig-") else _SHARE if resource.endswith(".shared") else None
    if piece and _has_several_ranks(ctx):
        what = f"`{resource}` is {piece.name}: {piece.consequence}"
        remedy = "Train with one rank, or set a whole GPU as `gpu_resource`."
        yield Finding(code="gpu-shared", severity=Severity.WARNING, what=what, where=_WHERE, remedy=remedy)


def by_label(ctx: RenderContext, machines: Sequence[KubeObject]) -> Iterator[Finding]:
    """Pieces that are named like whole GPUs on these machines, which a run may get."""
    if ctx.target.gpu_resource != WHOLE or not _has_several_ranks(ctx):
        return
    with_gpus = [node for node in machines if WHOLE in node.get("status", {}).get("allocatable", {})]
    for piece in (_PART, _SHARE):
        signs = [sign for node in with_gpus if (sign := _sign(node["metadata"].get("labels", {}), piece))]
        if signs:
            on = f"on {len(signs)} of {len(with_gpus)} machines"
            what = f"{on} `{WHOLE}` is {piece.name}: {piece.consequence}"
            remedy = "Train with one rank, or select machines with whole GPUs by `node_selector` in the target."
            seen = tuple(dict.fromkeys(signs))
            yield Finding(
                code="gpu-shared", severity=Severity.WARNING, what=what, where=_WHERE, evidence=seen, remedy=remedy
            )


def _sign(labels: Mapping[str, str], piece: _Piece) -> str:
    """The label by which a machine shows that its GPUs are such pieces; empty if there is none."""
    return next((f"{key}={labels[key]}" for key, value in _SIGNS[piece] if value in labels.get(key, "")), "")


# Labels of NVIDIA's GPU feature discovery, and of GKE. `nvidia.com/mig.strategy=single` is no sign: machines without
# MIG have it too. A machine whose GPUs are not shared has the strategy `none`.
_SIGNS: Mapping[_Piece, Sequence[tuple[str, str]]] = {
    _PART: (("nvidia.com/gpu.product", "-MIG-"), ("cloud.google.com/gke-gpu-partition-size", "g.")),
    _SHARE: (
        ("nvidia.com/gpu.sharing-strategy", "time-slicing"),
        ("nvidia.com/gpu.sharing-strategy", "mps"),
        ("nvidia.com/gpu.product", "-SHARED"),
        ("cloud.google.com/gke-gpu-sharing-strategy", "time-sharing"),
        ("cloud.google.com/gke-gpu-sharing-strategy", "mps"),
    ),
}
"""By what a machine's GPUs are: a label, and a part of its value."""


def _has_several_ranks(ctx: RenderContext) -> bool:
    return bool(ctx.job.gpus_per_node) and ctx.job.world_size > 1
