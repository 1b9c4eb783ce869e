"""Remote tier of checkpoints that all nodes reach: a folder or a bucket, by its fsspec URL.

STORE/
    writer-0.json          the writer that may commit, for replica 0: the last one to write this file
    step-00000042.3/       files uploaded by attempt 3; the manifest comes last, and commits the checkpoint

Object stores have no rename and no lock. So each attempt writes under its own names, and checks that it is still the
writer before it commits. What is uploaded, and when: tiered_storage.py.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec.core
import msgspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from holdfast.errors import ExitCode, failure
from holdfast.host.files import UnexpectedFile
from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.regular_file import is_damage, open_regular
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.writer_fence import WriterId, in_use, superseded

QUARANTINED = "manifest.damaged.json"

_FOLDER = re.compile(r"step-(\d{8,})\.(\d+)")


class WriterToken(WriterId, frozen=True, kw_only=True):
    """The process of an attempt that may commit."""

    token: str


class RemoteTier:
    """A folder of checkpoints behind a URL such as `s3://bucket/run`, or at a plain path.

    Methods raise whatever the store's client raises.
    """

    def __init__(self, url: str, writer: WriterId) -> None:
        self.url = url
        self._writer = WriterToken(
            run=writer.run, replica=writer.replica, attempt=writer.attempt, token=uuid.uuid4().hex
        )
        try:
            # The ignore: fsspec annotates its return value only as a tuple.
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)  # pyright: ignore[reportUnknownVariableType]
        except (ImportError, ValueError) as error:
            raise failure(
                "checkpoint-store-unknown",
                "no installed package speaks to stores of this kind",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                where=url,
                evidence=(str(error),),
                remedy="install the package that fsspec names (s3fs for s3://, gcsfs for gs://), or use a plain path",
            ) from None
        within, self._root = found
        if isinstance(within, DirFileSystem):
            self._root = f"{within.path}/{self._root}"
        self._fs: Any = within.fs if isinstance(within, DirFileSystem) else within
        self._local = isinstance(self._fs, LocalFileSystem)

    def folder(self, step: int) -> str:
        """Folder name for this attempt's upload of a step."""
        return f"step-{step:08d}.{self._writer.attempt}"

    def name(self, step: int) -> str:
        """URL of that folder."""
        return f"{self.url.rstrip('/')}/{self.folder(step)}"

    def take_over(self) -> None:
        """Become the only writer that may commit; raises HoldfastError if a later attempt of this run is the writer."""
        holder = self._current_writer()
        if holder is not None and self._writer.precedes(holder):
            raise superseded(self._writer, holder, self._at(self._writer_file()))
        self._fs.invalidate_cache()
        self._write_into(
            "", lambda: self._fs.pipe_file(self._at(self._writer_file()), msgspec.json.encode(self._writer))
        )
        known = {path.split("/")[-2] for path in self._fs.glob(self._at("step-*", "manifest.*"))}
        every = {path.rstrip("/").split("/")[-1] for path in self._fs.glob(self._at("step-*"))}
        for left in filter(_FOLDER.fullmatch, every - known):
            self._fs.rm(self._at(left), recursive=True)

    def list_complete(self) -> list[tuple[int, str]]:
        """Steps and folders of complete checkpoints, newest first."""
        self._fs.invalidate_cache()
        named = (
            _FOLDER.fullmatch(path.split("/")[-2]) for path in self._fs.glob(self._at("step-*", manifest_file.NAME))
        )
        found = [(int(match[1]), int(match[2]), match[0]) for match in named if match]
        return [(step, folder) for step, _, folder in sorted(found, reverse=True)]

    def read_manifest(self, folder: str) -> Manifest | str:
        """The manifest of a checkpoint, or the damage to it."""
        step = int(folder.removeprefix("step-").partition(".")[0])
        try:
            self._refuse_irregular(self._at(folder, manifest_file.NAME))
            return manifest_file.decode(self._fs.cat_file(self._at(folder, manifest_file.NAME)), step)
        except FileNotFoundError:
            return f"{manifest_file.NAME}: there is none"
        except OSError as error:
            # Clients of remote stores also raise EIO for unknown responses, such as 502.
            if not (self._local and is_damage(error)):
                raise
            return f"{manifest_file.NAME}: {error}"

    def upload(self, step: int, files: Iterable[Path]) -> None:
        """Copy files of a complete checkpoint to the store."""
        for file in files:
            there = self._at(self.folder(step), file.name)
            self._write_into(self.folder(step), lambda file=file, there=there: self._fs.put_file(str(file), there))

    def commit(self, manifest: Manifest, retention: RetentionPolicy, agreed_step: int | None = None) -> None:
        """Write the manifest after all uploads, and drop expired checkpoints; raises HoldfastError if superseded."""
        holder = self._current_writer()
        if holder is not None and holder.token != self._writer.token:
            refusal = (
                superseded(self._writer, holder, self.url)
                if self._writer.precedes(holder)
                else in_use(holder, self.url)
            )
            raise refusal
        self._fs.pipe_file(self._at(self.folder(manifest.step), manifest_file.NAME), manifest_file.encode(manifest))
        there = self.list_complete()
        for step in retention.expired({step for step, _ in there}, agreed_step):
            for folder in (folder for of, folder in there if of == step):
                self.drop(folder)

    def drop(self, folder: str) -> None:
        """Remove a checkpoint, its manifest first, so that a partial one is never visible."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(folder, manifest_file.NAME))
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(folder), recursive=True)

    def quarantine(self, folder: str) -> str:
        """Hide a damaged checkpoint by renaming its manifest; returns the new location."""
        with suppress(FileNotFoundError):
            self._fs.mv(self._at(folder, manifest_file.NAME), self._at(folder, QUARANTINED))
        return f"{self.url.rstrip('/')}/{folder}"

    def download(self, folder: str, name: str, into: Path) -> None:
        """Download one file; `into` has it only once it is complete, and not if the store lacks it."""
        fresh = into / f"{name}.new"
        with suppress(FileNotFoundError, UnexpectedFile):
            self._refuse_irregular(self._at(folder, name))
            self._fs.get_file(self._at(folder, name), str(fresh))
            fresh.rename(into / name)

    def _refuse_irregular(self, path: str) -> None:
        """Raise OSError if a file of a folder store is a FIFO, a device or a loop of links."""
        if self._local:
            open_regular(Path(path)).close()

    def _write_into(self, folder: str, write: Callable[[], object]) -> None:
        """Write into a folder; creates it first if the store requires that."""
        try:
            write()
        except FileNotFoundError:
            # Objects need no folder, and some clients would create the bucket of a mistyped name.
            bucket = self._root.partition("/")[0]
            if bucket and not self._fs.exists(bucket):
                raise
            self._fs.makedirs(self._at(folder), exist_ok=True)
            write()

    def _current_writer(self) -> WriterToken | None:
        try:
            return msgspec.json.decode(self._fs.cat_file(self._at(self._writer_file())), type=WriterToken)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _writer_file(self) -> str:
        return f"writer-{self._writer.replica}.json"

    def _at(self, *names: str) -> str:
        return "/".join((self._root.rstrip("/"), *names))
