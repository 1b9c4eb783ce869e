"""The kubelet's configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.launch.local.netns import NetnsInterface
from lab.kubelet.nodes import NodeSpec


class KubeletConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a kubelet."""

    folder: Path
    pki: Path
    tag: str
    """Tag of its network."""
    host: str
    port: int
    """Port on which the API server reaches the kubelet."""
    apiserver: int
    """Port of the API server."""
    nodes: tuple[NodeSpec, ...]
    interfaces: tuple[NetnsInterface, ...] = (NetnsInterface(),)
    """Network interfaces of every pod."""
    bad_images: tuple[str, ...] = ()
    """Patterns of images that cannot be pulled."""

    @property
    def api_socket(self) -> Path:
        return self.folder / "api.sock"

    @property
    def own_socket(self) -> Path:
        return self.folder / "own.sock"


def load(path: Path) -> KubeletConfig:
    """Read the configuration."""
    return msgspec.json.decode(path.read_bytes(), type=KubeletConfig, dec_hook=lambda kind, value: kind(value))
