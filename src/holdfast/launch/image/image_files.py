"""Reads the files of a container image without unpacking it: a directory, an OCI layout, or an archive of either kind.

Nothing is written, no link is followed outside the image, and no path of an archive is opened on this machine.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import posixpath
import re
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import IO, Protocol, cast

import msgspec
import zstandard
from msgspec import Struct, field

from holdfast.errors import ExitCode, HoldfastError, failure

MAX_FILES = 3_000_000
"""Largest number of files in all layers; the largest published images have about a tenth."""
MAX_BYTES = 1 << 40
"""Largest size of all files of a layer."""
MAX_METADATA_BYTES = 16 << 20
"""Largest manifest or configuration."""
MAX_TEXT_BYTES = 1 << 20
"""Largest file whose content is kept."""
MAX_INDEXES = 4
"""Indexes that name one another; one for an archive with several platforms."""
MAX_LINKS = 40
"""Links that a path may go through, as in Linux."""
_KEPT = re.compile(r"etc/passwd|(.+/)?pyvenv\.cfg")
"""Files whose content the checks read."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
"""Names by which a layer removes files of the layers below (OCI image specification, layer.md)."""
_BLOCK_BYTES = 1 << 20
_LAYER_TYPE = re.compile(
    r"application/vnd\.oci\.image\.layer\.v1\.tar(\+gzip|\+zstd)?"
    r"|application/vnd\.docker\.image\.rootfs\.diff\.tar(\.gzip|\.zstd)?"
)
_GZIP_START, _ZSTD_START = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of compressed data (RFC 1952 and RFC 8878)."""


class FileKind(StrEnum):
    """What a path of an image is."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


class ImageFile(Struct, frozen=True):
    """One path of an image."""

    kind: FileKind
    target: str = ""
    """Where a link points, as written."""
    executable: bool = False


class ImageConfig(Struct, frozen=True, kw_only=True):
    """What an image's configuration says; a directory has none."""

    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    platform: str = ""
    """Such as `linux/amd64`."""


class ImageFiles(Struct, frozen=True, kw_only=True):
    """All paths of an image, without the leading slash."""

    files: Mapping[str, ImageFile]
    texts: Mapping[str, str]
    """Content of `etc/passwd` and of `pyvenv.cfg` files."""
    config: ImageConfig | None = None

    def resolve(self, path: str) -> str | None:
        """The path without links, within the image; None if it does not exist."""
        rest, done, links = path.strip("/").split("/"), list[str](), 0
        while rest:
            part = rest.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            found = self.files.get("/".join([*done, part]))
            if found is not None and found.kind is FileKind.LINK:
                if (links := links + 1) > MAX_LINKS:
                    return None
                done = [] if found.target.startswith("/") else done
                rest = [*found.target.split("/"), *rest]
            else:
                done.append(part)
        resolved = "/".join(done)
        return resolved if resolved in self.files else None


def read_image(path: Path) -> ImageFiles:
    """The files of an image; raises HoldfastError if there is none, or if it cannot be read."""
    try:
        if path.is_dir():
            return _read_layout(_FolderBlobs(path)) if (path / "oci-layout").is_file() else _read_folder(path)
        if path.is_file():
            with _TarBlobs(path) as blobs:
                return _read_layout(blobs)
    except (
        OSError,
        EOFError,
        tarfile.TarError,
        zlib.error,
        zstandard.ZstdError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    raise failure(
        "image-not-found",
        f"there is no image {path}",
        exit_code=ExitCode.NOT_FOUND,
        where=str(path),
        remedy="Write one with `docker save IMAGE -o FILE` or `skopeo copy docker://IMAGE oci-archive:FILE`.",
    )


def _unreadable(path: Path, why: str) -> HoldfastError:
    return failure(
        "image-unreadable",
        f"{path} is no root file system, `docker save` archive or OCI image that can be read",
        exit_code=ExitCode.INVALID_JOB,
        where=str(path),
        evidence=(why[:500],),
        remedy="Write it again with `docker save IMAGE -o FILE`; read a directory as the user who unpacked it.",
    )


def _read_folder(root: Path) -> ImageFiles:
    """The files of an unpacked root file system."""
    files, texts = dict[str, ImageFile](), dict[str, str]()
    for folder, folders, names in os.walk(root, onerror=_raise):
        for name in (*folders, *names):
            place = Path(folder, name)
            path = str(place.relative_to(root))
            about = place.lstat()
            files[path] = _file_of_mode(about.st_mode, str(place.readlink()) if place.is_symlink() else "")
            _check_count(files)
            if _KEPT.fullmatch(path) and stat.S_ISREG(about.st_mode) and about.st_size <= MAX_TEXT_BYTES:
                texts[path] = place.read_bytes().decode(errors="replace")
    if not files.keys() & {"bin", "usr", "opt"}:
        raise ValueError("it has none of the folders bin, usr and opt")
    return ImageFiles(files=files, texts=texts)


def _raise(error: OSError) -> None:
    """A folder that may not be read would look empty, and what it has would be reported missing."""
    raise error


def _file_of_mode(mode: int, target: str) -> ImageFile:
    if stat.S_ISLNK(mode):
        return ImageFile(FileKind.LINK, target)
    if stat.S_ISDIR(mode):
        return ImageFile(FileKind.FOLDER)
    return ImageFile(FileKind.FILE if stat.S_ISREG(mode) else FileKind.OTHER, executable=bool(mode & 0o111))


class _Blobs(Protocol):
    """The files of a layout."""

    def open(self, name: str) -> IO[bytes]: ...

    def has(self, name: str) -> bool: ...


class _FolderBlobs:
    """A layout in a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> IO[bytes]:
        return (self._root / _safe(name)).open("rb")

    def has(self, name: str) -> bool:
        return (self._root / _safe(name)).is_file()


class _TarBlobs:
    """A layout in a tar archive, which may be compressed as a whole."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path)  # noqa: SIM115 - closed by __exit__
        self._members = {posixpath.normpath(member.name): member for member in self._tar}

    def __enter__(self) -> _TarBlobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def open(self, name: str) -> IO[bytes]:
        member = self._members[_safe(name)]
        if member.issym():  # older versions of docker save link equal layers
            member = self._members[posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))]
        content = self._tar.extractfile(member) if member.isreg() else None
        if content is None:
            raise ValueError(f"{name} is no file")
        return content

    def has(self, name: str) -> bool:
        return _safe(name) in self._members


def _safe(name: str) -> str:
    """A relative path without `..`; raises ValueError for any other."""
    path = posixpath.normpath(name)
    if path.startswith(("/", "..")):
        raise ValueError(f"the path {name[:200]!r} leads out of the image")
    return path


class _Platform(msgspec.Struct, frozen=True):
    os: str = "linux"


class _Descriptor(msgspec.Struct, frozen=True, rename={"media_type": "mediaType"}):
    """A reference to a blob (OCI image specification, descriptor.md)."""

    digest: str
    media_type: str = ""
    platform: _Platform | None = None


class _OciIndex(msgspec.Struct, frozen=True):
    manifests: tuple[_Descriptor, ...] = ()


class _OciManifest(msgspec.Struct, frozen=True):
    config: _Descriptor
    layers: tuple[_Descriptor, ...]


class _SavedImage(msgspec.Struct, frozen=True, rename={"config": "Config", "layers": "Layers"}):
    """An image in the manifest.json of `docker save`."""

    config: str
    layers: tuple[str, ...]


class _RunConfig(msgspec.Struct, frozen=True, rename={"user": "User", "env": "Env"}):
    user: str | None = None
    env: tuple[str, ...] | None = None


class _ConfigDocument(msgspec.Struct, frozen=True):
    """An image's configuration (OCI image specification, config.md)."""

    config: _RunConfig = _RunConfig()
    os: str = "linux"
    architecture: str = ""


def _read_layout(blobs: _Blobs) -> ImageFiles:
    """The files of an image in a layout: that of `docker save`, or of OCI."""
    if blobs.has("index.json"):
        config, layers = _oci_parts(blobs)
    else:
        (saved, *_) = msgspec.json.decode(_small(blobs, "manifest.json"), type=tuple[_SavedImage, ...])
        config, layers = _small(blobs, saved.config), saved.layers
    files, texts = dict[str, ImageFile](), dict[str, str]()
    for layer in layers:
        _apply_layer(blobs, layer, files, texts)
    return ImageFiles(files=files, texts=texts, config=_parse_config(config))


def _oci_parts(blobs: _Blobs) -> tuple[bytes, tuple[str, ...]]:
    """The configuration and the layers of an OCI layout's first image for Linux."""
    document = _small(blobs, "index.json")
    for _ in range(MAX_INDEXES):
        listed = msgspec.json.decode(document, type=_OciIndex).manifests
        if not listed:
            break
        usable = [each for each in listed if each.platform is None or each.platform.os == "linux"]
        if not usable:
            raise ValueError("it has no image for Linux")
        document = _verified(blobs, usable[0].digest)
    manifest = msgspec.json.decode(document, type=_OciManifest)
    for each in manifest.layers:
        if not _LAYER_TYPE.fullmatch(each.media_type):
            raise ValueError(f"a layer is of the unsupported type {each.media_type}")
        _verify(blobs, each.digest)
    return _verified(blobs, manifest.config.digest), tuple(_blob_name(each.digest) for each in manifest.layers)


def _blob_name(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError(f"{digest[:100]!r} is no SHA-256 digest")
    return f"blobs/sha256/{value}"


def _verify(blobs: _Blobs, digest: str) -> None:
    with blobs.open(_blob_name(digest)) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType] - IO[bytes] does
    if digest != f"sha256:{found}":
        raise ValueError(f"{digest} has other content: the archive is damaged")


def _verified(blobs: _Blobs, digest: str) -> bytes:
    _verify(blobs, digest)
    return _small(blobs, _blob_name(digest))


def _small(blobs: _Blobs, name: str) -> bytes:
    with blobs.open(name) as file:
        data = file.read(MAX_METADATA_BYTES + 1)
    if len(data) > MAX_METADATA_BYTES:
        raise ValueError(f"{name} has more than {MAX_METADATA_BYTES} bytes")
    return data


def _parse_config(text: bytes) -> ImageConfig:
    found = msgspec.json.decode(text, type=_ConfigDocument)
    parts = [each.partition("=") for each in found.config.env or ()]
    env = {name: value for name, _, value in parts}
    return ImageConfig(user=found.config.user or "", env=env, platform=f"{found.os}/{found.architecture}")


def _apply_layer(blobs: _Blobs, layer: str, files: dict[str, ImageFile], texts: dict[str, str]) -> None:
    """Add a layer's files, and remove those that it hides."""
    added, kept = dict[str, ImageFile](), dict[str, str]()
    removed, emptied, size = set[str](), set[str](), 0
    with blobs.open(layer) as packed, _uncompressed(packed) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
        for member in tar:
            if (size := size + member.size) > MAX_BYTES:
                raise ValueError(f"a layer has more than {MAX_BYTES} bytes")
            path = _safe(member.name.lstrip("/"))
            folder, name = posixpath.split(path)
            if name == _OPAQUE:
                emptied.add(folder)
            elif name.startswith(_WHITEOUT):
                removed.add(posixpath.join(folder, name.removeprefix(_WHITEOUT)))
            elif path != ".":
                added[path] = _file_of_member(member)
                _check_count(added)
                if _KEPT.fullmatch(path) and member.isreg() and member.size <= MAX_TEXT_BYTES:
                    content = tar.extractfile(member)
                    kept[path] = content.read().decode(errors="replace") if content else ""
    replaced = {path for path, file in added.items() if file.kind is not FileKind.FOLDER}
    hidden = [path for path in files if path in removed or _below(path, removed | emptied | replaced)]
    for path in hidden:
        del files[path]
    for path in [path for path in texts if path not in files or path in replaced]:
        del texts[path]
    files |= added
    texts |= kept
    _check_count(files)


def _uncompressed(packed: IO[bytes]) -> IO[bytes]:
    """A layer's tar archive: its first bytes tell how it is compressed, which `docker save` does not."""
    start = packed.read(len(_ZSTD_START))
    packed.seek(0)
    if start.startswith(_GZIP_START):
        return cast(IO[bytes], gzip.GzipFile(fileobj=packed))
    if start == _ZSTD_START:
        return cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(packed))
    return packed


def _below(path: str, folders: set[str]) -> bool:
    return any(parent in folders for parent in _parents(path))


def _parents(path: str) -> Iterator[str]:
    while path:
        path = posixpath.dirname(path)
        yield path


def _file_of_member(member: tarfile.TarInfo) -> ImageFile:
    if member.issym():
        return ImageFile(FileKind.LINK, member.linkname)
    if member.islnk():  # a hard link names a path from the root
        return ImageFile(FileKind.LINK, "/" + member.linkname.lstrip("/"))
    if member.isdir():
        return ImageFile(FileKind.FOLDER)
    return ImageFile(FileKind.FILE if member.isreg() else FileKind.OTHER, executable=bool(member.mode & 0o111))


def _check_count(files: Mapping[str, ImageFile]) -> None:
    if len(files) > MAX_FILES:
        raise ValueError(f"it has more than {MAX_FILES} files")
