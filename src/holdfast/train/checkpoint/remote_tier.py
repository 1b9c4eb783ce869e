"""Owns the tier of checkpoints that all nodes reach: a folder or a bucket, by its fsspec URL.

STORE/
    writer-0.json          who commits there, for replica 0: the one that wrote it last
    step-00000042.3/       what attempt 3 brought; its seal comes last, and without one it is no checkpoint

Object stores rename nothing and lock nothing. So each attempt writes under names of its own, and looks who the writer
is before it seals. Refuses to own what is brought, and when (tiered_storage.py).
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
    """Who commits: an attempt, as one process is it."""

    token: str


class RemoteTier:
    """A folder of checkpoints behind a URL such as `s3://bucket/run`; a plain path is one too.

    Methods raise whatever the store's client does.
    """

    def __init__(self, url: str, writer: WriterId) -> None:
        self.url = url
        self._writer = WriterToken(
            run=writer.run, replica=writer.replica, attempt=writer.attempt, token=uuid.uuid4().hex
        )
        try:
            # The ignore: fsspec says of what it returns only that it is a tuple.
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)  # pyright: ignore[reportUnknownVariableType]
        except (ImportError, ValueError) as error:
            raise failure(
                "checkpoint-store-unknown",
                "no installed package speaks to stores of this kind",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                where=url,
                evidence=(str(error),),
                remedy="install the one that fsspec names (s3fs for s3://, gcsfs for gs://), or use a plain path",
            ) from None
        within, self._root = found
        if isinstance(within, DirFileSystem):
            self._root = f"{within.path}/{self._root}"
        self._fs: Any = within.fs if isinstance(within, DirFileSystem) else within
        self._local = isinstance(self._fs, LocalFileSystem)

    def folder(self, step: int) -> str:
        """The name of what this attempt brings of a step."""
        return f"step-{step:08d}.{self._writer.attempt}"

    def name(self, step: int) -> str:
        """The URL of that."""
        return f"{self.url.rstrip('/')}/{self.folder(step)}"

    def take_over(self) -> None:
        """From here on nobody else seals anything; raises HoldfastError when a later attempt of this run has it."""
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
        """Steps and folders of what is complete, newest first."""
        self._fs.invalidate_cache()
        named = (
            _FOLDER.fullmatch(path.split("/")[-2]) for path in self._fs.glob(self._at("step-*", manifest_file.NAME))
        )
        found = [(int(match[1]), int(match[2]), match[0]) for match in named if match]
        return [(step, folder) for step, _, folder in sorted(found, reverse=True)]

    def read_manifest(self, folder: str) -> Manifest | str:
        """The seal of a checkpoint, or the damage to it."""
        step = int(folder.removeprefix("step-").partition(".")[0])
        try:
            self._refuse_irregular(self._at(folder, manifest_file.NAME))
            return manifest_file.decode(self._fs.cat_file(self._at(folder, manifest_file.NAME)), step)
        except FileNotFoundError:
            return f"{manifest_file.NAME}: there is none"
        except OSError as error:
            # Clients of remote stores also raise EIO for answers that they do not know, such as 502.
            if not (self._local and is_damage(error)):
                raise
            return f"{manifest_file.NAME}: {error}"

    def upload(self, step: int, files: Iterable[Path]) -> None:
        """Copy files of a complete checkpoint to the store."""
        for file in files:
            there = self._at(self.folder(step), file.name)
            self._write_into(self.folder(step), lambda file=file, there=there: self._fs.put_file(str(file), there))

    def commit(self, manifest: Manifest, retention: RetentionPolicy) -> None:
        """Seal what all ranks have brought, and drop what is too old; raises HoldfastError where another is writer."""
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
        for step in retention.expired({step for step, _ in there}):
            for folder in (folder for of, folder in there if of == step):
                self.drop(folder)

    def drop(self, folder: str) -> None:
        """Remove a checkpoint: its seal first, so that it is never seen in part."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(folder, manifest_file.NAME))
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(folder), recursive=True)

    def quarantine(self, folder: str) -> str:
        """Have a damaged one counted no more, by its seal's name; returns where it is."""
        with suppress(FileNotFoundError):
            self._fs.mv(self._at(folder, manifest_file.NAME), self._at(folder, QUARANTINED))
        return f"{self.url.rstrip('/')}/{folder}"

    def download(self, folder: str, name: str, into: Path) -> None:
        """Copy one file here; there is nothing of that name until it is whole, and nothing where the store has none."""
        fresh = into / f"{name}.new"
        with suppress(FileNotFoundError, UnexpectedFile):
            self._refuse_irregular(self._at(folder, name))
            self._fs.get_file(self._at(folder, name), str(fresh))
            fresh.rename(into / name)

    def _refuse_irregular(self, path: str) -> None:
        """Raise OSError where a store that is a folder has a FIFO, a device or a loop of links for a file."""
        if self._local:
            open_regular(Path(path)).close()

    def _write_into(self, folder: str, write: Callable[[], object]) -> None:
        """Write into a folder, which is made where the store wants it to be there before."""
        try:
            write()
        except FileNotFoundError:
            # Objects need no folder, and asked for one some clients would make the bucket of a mistyped name.
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
