"""Reads and writes tensor files in the format of torch.distributed.checkpoint, verifying checksums while reading.

Any program can load the files with torch.distributed.checkpoint alone. What the tensors are: train_state.py; the
expected checksums: manifest_file.py.
"""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, WriteItem

# The ignores: torch annotates PathLike without a type argument.
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.state_dict_saver import save  # pyright: ignore[reportUnknownVariableType]

from holdfast.host.files import UnexpectedFile
from holdfast.train.accelerator import bind_like_this_thread
from holdfast.train.checkpoint import manifest_file, safe_state
from holdfast.train.checkpoint.deferred_pickle import IMMUTABLE_TYPES
from holdfast.train.checkpoint.manifest_file import FileChecksum
from holdfast.train.checkpoint.regular_file import open_regular
from holdfast.train.checkpoint.safe_state import Global, RestrictedUnpickler, globals_of
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.torch_private import index_types, offset_in_file, set_loaded

INDEX = ".metadata"
"""The index file, shared by all ranks, with the location of each tensor."""
READERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that read a rank's tensors: one reads 3 GB/s here."""


class DamagedFile(Exception):
    """A file does not match the manifest; the rank that found it sends this to all ranks."""


class StoreUnreachable(Exception):
    """The storage that has the files does not answer; sent to all ranks likewise."""


class UnsafeValue(Exception):
    """A value, by its name, has types that a checkpoint does not load; sent to all ranks likewise."""


class ReadSource(ABC):
    """Storage that files are read from."""

    folder: Path
    """Where its files can be read after `fetch`."""

    @abstractmethod
    def fetch(self, names: Iterable[str]) -> None:
        """Make these files available in the folder; raises StoreUnreachable."""

    def find_damage(self, name: str, expected: FileChecksum) -> str | None:
        """Describe the damage to a file; None if it matches `expected`."""
        return manifest_file.find_damage(self.folder / name, expected)


def write(tensors: dict[str, Any], folder: Path, ranks: ControlGroup) -> list[Path]:
    """Write this rank's part of a checkpoint, without fsync; returns its files. A collective call.

    Raises HoldfastError, on all ranks, for a value that a checkpoint does not load.
    """
    with _allow_single_process():
        # Without copying ahead: torch would do that on the default stream of the first GPU, and wait for what trains
        # there. All tensors are on the host already.
        writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
        try:
            save(
                tensors,
                storage_writer=writer,
                planner=_SafeSavePlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if isinstance(cause, UnsafeValue):
                    raise safe_state.unsafe_state(*cause.args) from None
            raise
    return [*folder.glob(f"__{ranks.rank}_*"), *([folder / INDEX] if ranks.rank == 0 else [])]


def read(
    make_state: Callable[[Collection[str]], dict[str, Any]],
    source: ReadSource,
    expected: Mapping[str, FileChecksum],
    ranks: ControlGroup,
    *,
    also: str,
) -> dict[str, Any] | str:
    """Read into tensors whose sharding may differ from the saved one, and return them. A collective call.

    `make_state` makes these tensors, given the parameters that were saved with optimizer state. Every file that this
    rank reads, and `also`, is checked against the manifest. If any rank's files are damaged, every rank returns the
    damage, and the tensors must not be used. Raises CheckpointException if these tensors are not the saved ones, and
    StoreUnreachable.
    """
    checked = _VerifiedSource(source, expected)
    found = ranks.first_not_none(checked.check_first((INDEX, also)))
    if isinstance(found, StoreUnreachable):
        raise found
    if found is not None:
        return str(found)
    try:
        with _allow_single_process():
            reader = _VerifyingReader(checked)
            tensors = make_state(reader.optimizer_state())
            load(
                tensors,
                storage_reader=reader,
                planner=_SafeLoadPlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, DamagedFile):
                return str(cause)
            if isinstance(cause, StoreUnreachable):
                raise cause from None
        raise
    return tensors


_SAFE_TENSOR_TYPES: set[type] = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
"""Found to be loaded again. To find out takes a copy, so it is done once."""


class _SafeSavePlanner(DefaultSavePlanner):
    """Refuses values, other than tensors, that `_SafeLoadPlanner` would not load."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        transformed = super().transform_object(write_item, object)
        kind: type[Any] = object.__class__
        if kind in IMMUTABLE_TYPES or kind in _SAFE_TENSOR_TYPES:
            return transformed
        is_tensor = isinstance(object, torch.Tensor)
        written = safe_state.to_bytes(object.detach()) if is_tensor else transformed.getvalue()
        if found := safe_state.unsafe_types(written):
            raise UnsafeValue(write_item.index.fqn, found)
        if is_tensor:
            _SAFE_TENSOR_TYPES.add(kind)
        return transformed


class _SafeLoadPlanner(DefaultLoadPlanner):
    """Loads values, other than tensors, without running code that the file contains."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_loaded(self, read_item.dest_index.fqn, safe_state.load(value))


class _VerifiedSource:
    """A source whose files are checked against the manifest."""

    def __init__(self, source: ReadSource, expected: Mapping[str, FileChecksum]) -> None:
        self.source = source
        self._expected = expected

    def check_first(self, names: Collection[str]) -> DamagedFile | StoreUnreachable | None:
        """Check these files before anything is read; returns the problem, if any."""
        try:
            self.fetch(names)
        except StoreUnreachable as error:
            return error
        found = next(filter(None, map(self.find_damage, names)), None)
        return DamagedFile(found) if found else None

    def fetch(self, names: Iterable[str]) -> None:
        self.source.fetch(name for name in names if name in self._expected)

    def irregular(self, names: Iterable[str]) -> str | None:
        """The first of these that is not a regular file, and what it is."""
        for name in names:
            try:
                with suppress(FileNotFoundError):  # `find_damage` reports it
                    open_regular(self.source.folder / name).close()
            except UnexpectedFile as error:
                return f"{name}: {error}"
        return None

    def find_damage(self, name: str) -> str | None:
        expected = self._expected.get(name)
        return self.source.find_damage(name, expected) if expected else f"{name}: not in the manifest"


class _VerifyingReader(FileSystemReader):
    """Reads with several threads while others verify the same files, so that they share the page cache.

    Reads straight into the target tensor where possible. Torch reads each tensor into a new buffer and copies it,
    which takes three times the CPU time: most of it is the kernel allocating that buffer.
    """

    def __init__(self, checked: _VerifiedSource) -> None:
        super().__init__(checked.source.folder)
        self._checked = checked

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._index.storage_meta is not None:
            self._index.storage_meta.load_id = self.load_id
        return self._index

    @cached_property
    def _index(self) -> Metadata:
        """The index; torch would unpickle whatever it contains."""
        with open_regular(self._checked.source.folder / INDEX) as file:
            return RestrictedUnpickler(io.BytesIO(file.readall()), _index_globals()).load()

    def optimizer_state(self) -> set[str]:
        """Names of the parameters that were saved with optimizer state."""
        paths: Iterable[tuple[str | int, ...]] = self._index.planner_data.values()
        return {str(path[2]) for path in paths if path[:2] == ("optimizer", "state")}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Report damage rather than the read error that it may explain."""
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        self._checked.fetch(names)
        if (irregular := self._checked.irregular(names)) is not None:  # reading it might block forever
            raise DamagedFile(irregular)
        shares = [dataclasses.replace(plan, items=plan.items[first::READERS]) for first in range(READERS)]
        with ThreadPoolExecutor(READERS + len(names), initializer=bind_like_this_thread()) as pool:
            damages = [pool.submit(self._checked.find_damage, name) for name in sorted(names)]
            reads = [pool.submit(self._read, share, planner) for share in shares]
            wait(reads)
        for found in filter(None, (each.result() for each in damages)):
            raise DamagedFile(found)
        for each in reads:
            each.result()
        all_done: torch.futures.Future[None] = torch.futures.Future()
        all_done.set_result(None)
        return all_done

    def _read(self, share: LoadPlan, planner: LoadPlanner) -> None:
        others = [item for item in share.items if not self._read_in_place(item, planner)]
        super().read_data(dataclasses.replace(share, items=others), planner)

    def _read_in_place(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Whether it was read in place: not for non-tensors, GPU tensors, or a layout or dtype unlike the file's."""
        saved = self.storage_data[item.storage_index]
        if item.type is not LoadItemType.TENSOR or saved.transform_descriptors:
            return False
        with open(self._checked.source.folder / saved.relative_path, "rb") as file:
            # With "meta" only the tensor's metadata and the offset of its bytes in the file are read.
            whole = torch.load(self._slice_file(file, saved), map_location="meta", weights_only=True)
            # The bytes of a wrapper, such as a Float8 tensor, are those of the tensors inside it.
            begin = offset_in_file(whole) if type(whole) is torch.Tensor else None
            if begin is None:
                return False
            part = whole
            for dim, (first, count) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, first, count)
            target = planner.resolve_tensor(item).detach()
            plain = type(target) is torch.Tensor
            if not plain or _layout(part) != _layout(target) or target.is_cuda or not target.is_contiguous():
                return False
            if target.nbytes:
                file.seek(saved.offset + begin + part.storage_offset() * part.element_size())
                room: Any = target.view(-1).view(torch.uint8).numpy()
                if file.readinto(room) != target.nbytes:
                    return False
        planner.commit_tensor(item, target)
        return True


@cache
def _index_globals() -> dict[Global, object]:
    # The module of paths differs between versions of Python.
    paths = {(module, name): Path for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")}
    return globals_of(index_types()) | paths


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """What must be equal for two tensors to have interchangeable bytes."""
    return tensor.dtype, tensor.shape, tensor.stride()


@contextmanager
def _allow_single_process() -> Generator[None]:
    """Suppress torch's warning that it assumes a single process because there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
