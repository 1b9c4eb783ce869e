"""Builds root file systems and real archives of them, as `docker save` and OCI tools write them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zstandard

Tree = Mapping[str, str | bytes | None]
"""Content by path: bytes of a file, the target of a link, None for a folder."""
Compress = Callable[[bytes], bytes]
PACKERS: Mapping[str, Compress] = {"": bytes, "+gzip": gzip.compress, "+zstd": zstandard.ZstdCompressor().compress}


def write_tree(root: Path, tree: Tree) -> Path:
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        elif content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(content)
            path.chmod(0o755)
    return root


def layer(tree: Tree) -> bytes:
    """A layer: a tar archive in which `dir/.wh.name` removes a file of the layers below."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in tree.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if isinstance(content, bytes):
                member.size = len(content)
            else:
                member.type = tarfile.DIRTYPE if content is None else tarfile.SYMTYPE
                member.linkname = content or ""
            tar.addfile(member, io.BytesIO(content if isinstance(content, bytes) else b""))
    return packed.getvalue()


def oci_files(layers: Sequence[Tree], config: Mapping[str, object], *, packing: str = "+gzip") -> dict[str, bytes]:
    """The files of an OCI layout with one image, behind an index of two platforms."""
    files = dict[str, bytes]()

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        files[f"blobs/sha256/{digest}"] = data
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    kind = "application/vnd.oci.image."
    packed = [blob(PACKERS[packing](layer(tree)), f"{kind}layer.v1.tar{packing}") for tree in layers]
    about = blob(
        json.dumps({"os": "linux", "architecture": "amd64", "config": config}).encode(), f"{kind}config.v1+json"
    )
    manifest = {"schemaVersion": 2, "config": about, "layers": packed}
    windows = {"mediaType": f"{kind}manifest.v1+json", "digest": f"sha256:{'0' * 64}", "platform": {"os": "windows"}}
    linux = {**blob(json.dumps(manifest).encode(), f"{kind}manifest.v1+json"), "platform": {"os": "linux"}}
    inner = blob(json.dumps({"manifests": [windows, linux]}).encode(), f"{kind}index.v1+json")
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [inner]}).encode()
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    return files


def docker_files(layers: Sequence[Tree], config: Mapping[str, object]) -> dict[str, bytes]:
    """The files that `docker save` wrote before version 25."""
    files = {f"{number}/layer.tar": layer(tree) for number, tree in enumerate(layers)}
    manifest = [{"Config": "config.json", "RepoTags": ["image:1"], "Layers": [*files]}]
    about = {"os": "linux", "architecture": "amd64", "config": config}
    return {**files, "config.json": json.dumps(about).encode(), "manifest.json": json.dumps(manifest).encode()}


def archive(path: Path, files: Mapping[str, bytes], mode: str = "w") -> Path:
    packed = io.BytesIO(layer(files))
    path.write_bytes(gzip.compress(packed.getvalue()) if mode == "w:gz" else packed.getvalue())
    return path
