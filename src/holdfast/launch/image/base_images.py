"""The table of base images for which a Dockerfile can be printed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from holdfast.launch.image.image_libraries import apt_install


class BaseImage(Struct, frozen=True, kw_only=True):
    """An image on which a run's image can be built."""

    name: str
    description: str
    """One line."""
    image: str
    """Its reference; a build argument replaces it."""
    has_torch: bool
    """Whether it brings torch, which the build must keep."""
    note: str
    """What to know about its versions; a comment of the Dockerfile."""
    source: str
    """Where its contents are documented."""
    setup: tuple[str, ...] = ()
    """Dockerfile lines before anything is installed."""


_ROWS = (
    BaseImage(
        name="pytorch",
        description="PyTorch's own image, for NVIDIA GPUs.",
        image="pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime",
        has_torch=True,
        note="Any tag with torch 2.10 to 2.15.",
        source="https://hub.docker.com/r/pytorch/pytorch",
    ),
    BaseImage(
        name="nvidia",
        description="NVIDIA's PyTorch image (NGC), with its builds of torch, NCCL, UCX and Open MPI.",
        image="nvcr.io/nvidia/pytorch:26.02-py3",
        has_torch=True,
        note="Its torch is a preview: 2.10.0a0 sorts before 2.10, so take a tag with 2.11.0a0 or later.",
        source="https://docs.nvidia.com/deeplearning/frameworks/pytorch-release-notes/",
    ),
    BaseImage(
        name="rocm",
        description="AMD's PyTorch image (ROCm), with RCCL.",
        image="rocm/pytorch:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0",
        has_torch=True,
        note="Any tag with torch 2.10 to 2.15 that matches the machines' driver.",
        source="https://hub.docker.com/r/rocm/pytorch",
    ),
    BaseImage(
        name="python",
        description="Debian with Python; torch comes from PyPI, with its NVIDIA libraries.",
        image="python:3.12-slim-bookworm",
        has_torch=False,
        note="Any Debian or Ubuntu image that has Python 3.11 to 3.13 as `python`.",
        source="https://hub.docker.com/_/python",
    ),
    BaseImage(
        name="ubuntu",
        description="Ubuntu with its own Python, in a virtual environment; torch comes from PyPI.",
        image="ubuntu:24.04",
        has_torch=False,
        note="24.04 has Python 3.12; older releases have a Python that is too old.",
        source="https://hub.docker.com/_/ubuntu",
        setup=(
            apt_install("python3-venv"),
            "RUN python3 -m venv /opt/venv",
            "ENV PATH=/opt/venv/bin:$PATH",
        ),
    ),
)
BASE_IMAGES: Mapping[str, BaseImage] = MappingProxyType({row.name: row for row in _ROWS})
"""The rows by name."""
