"""Prints the Dockerfile of a run's image, as a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from holdfast import __version__
from holdfast.fabric.fabric import Fabric
from holdfast.launch.image.base_images import BaseImage
from holdfast.launch.image.image_libraries import MPI, NETWORKS

EXTRAS = ("train", "ft", "hf", "kubernetes", "diagnose")
"""The extras that an image may need."""
REQUIRED_EXTRA = "kubernetes"
"""Every image of a cluster has it: the controller's pod runs the job's image."""


class ImageRequest(Struct, frozen=True, kw_only=True):
    """What an image must contain."""

    base: BaseImage
    extras: Sequence[str] = ("train",)
    """Extras of holdfast, besides `kubernetes`."""
    fabric: Fabric
    mpi: bool = False
    """Whether `mpirun` starts the ranks (`workload: mpijob`)."""
    user: int = 1000
    """Number of the user that the image runs as."""


def render_dockerfile(request: ImageRequest) -> str:
    """The Dockerfile, with the reason for what is not obvious."""
    base, network = request.base, NETWORKS.get(request.fabric.network)
    extras = ",".join(sorted({REQUIRED_EXTRA, *request.extras}))
    lines = [
        f"# {base.description} {base.note}",
        f"# {base.source}",
        f"ARG BASE={base.image}",
        "FROM $BASE",
        "USER root",
        *base.setup,
    ]
    if network is not None:
        lines += [f"# fabric {request.fabric.name}", *network.lines]
    if request.mpi:
        lines += ["# mpirun reaches the nodes by ssh", *MPI.lines]
    lines += [
        "# Debian's Python refuses pip outside a virtual environment otherwise",
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1",
        "# pip reads it from the environment: another index, such as a mirror",
        "ARG PIP_INDEX_URL",
    ]
    lines += [f'ARG HOLDFAST="holdfast[{extras}]=={__version__}"', *_install(keep_torch=base.has_torch)]
    lines += [
        "# A number: Kubernetes cannot tell whether a name is root",
        f"RUN getent passwd {request.user} > /dev/null || useradd --create-home --uid {request.user} holdfast",
        f"USER {request.user}",
        "WORKDIR /workspace",
    ]
    return "\n".join(lines) + "\n"


def _install(*, keep_torch: bool) -> tuple[str, ...]:
    install = 'python -m pip install --no-cache-dir "$HOLDFAST"'
    if not keep_torch:
        return (f"RUN {install}",)
    version = "$(python -c 'import torch; print(torch.__version__)')"
    return (
        "# Fails rather than replace the image's torch, which is built for its libraries",
        f'RUN before="{version}" \\',
        f" && {install} \\",
        f' && test "$before" = "{version}"',
    )
