"""Owns what a kubelet is told when it starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lab.kubelet.nodes import NodeSpec


class KubeletConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a kubelet is told."""

    folder: Path
    pki: Path
    tag: str
    """Of its network."""
    host: str
    port: int
    """Where the API server reaches it."""
    apiserver: int
    """Where it reaches the API server."""
    nodes: tuple[NodeSpec, ...]
    bad_images: tuple[str, ...] = ()
    """Patterns of images that cannot be pulled."""

    @property
    def api_socket(self) -> Path:
        return self.folder / "api.sock"

    @property
    def own_socket(self) -> Path:
        return self.folder / "own.sock"


def load(path: Path) -> KubeletConfig:
    """Read what a kubelet is told."""
    return msgspec.json.decode(path.read_bytes(), type=KubeletConfig, dec_hook=lambda kind, value: kind(value))
