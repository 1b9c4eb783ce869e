"""Node-local tier of a run's checkpoints, with one folder per rank: ranks of a node need no coordination.

LOCAL/CRC OF THE STORE'S URL/
    rank-00003/
        writing/           files that this rank is writing
        step-00000042/     its files, and the manifest of all; complete once every rank has renamed its own
        reading/           files of a checkpoint being loaded: links to this node's files, and downloaded ones
    rank-00003.1/          the same for replica 1
"""

from __future__ import annotations

import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from holdfast.train.checkpoint import manifest_file
from holdfast.train.checkpoint.manifest_file import FileChecksum, Manifest
from holdfast.train.checkpoint.regular_file import is_damage, open_regular
from holdfast.train.checkpoint.storage import STEP_FOLDER, list_steps


class LocalTier:
    """The disk as one rank uses it: it writes to its own folder, and reads from those of all ranks of its node."""

    def __init__(self, local: Path, url: str, rank: int, replica: int = 0) -> None:
        """Ranks of several replicas may share a node, and all of them load at the start."""
        self._node_folder = local / f"{zlib.crc32(url.encode()):08x}"
        self._rank_folder = self._node_folder / (f"rank-{rank:05d}.{replica}" if replica else f"rank-{rank:05d}")

    def partial(self, step: int) -> Path:
        """Folder where this rank writes its part."""
        return self._rank_folder / "writing" / f"step-{step:08d}"

    def folder(self, step: int) -> Path:
        """Folder of this rank's complete part."""
        return self._rank_folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of which this rank has its part, oldest first."""
        return list_steps(self._rank_folder)

    def commit(self, whole: Manifest) -> None:
        """Make this rank's part complete; raises OSError."""
        partial, final = self.partial(whole.step), self.folder(whole.step)
        manifest_file.write(partial, whole)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        manifest_file.sync_folder(self._rank_folder)

    def clear(self) -> None:
        """Remove incomplete files."""
        for left in ("writing", "reading"):
            shutil.rmtree(self._rank_folder / left, ignore_errors=True)

    def keep_only(self, steps: set[int]) -> None:
        """Remove this node's other checkpoints older than the newest of these: all ranks keep the same.

        This includes files of ranks that have moved to other nodes.
        """
        for folder in self._node_folder.glob("rank-*"):
            for old in filter(lambda each: each not in steps and each < max(steps, default=0), list_steps(folder)):
                shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)

    def checkpoints(self) -> list[tuple[Manifest, set[str]]]:
        """Checkpoints with files on this node, and the names of these files."""
        found: dict[bytes, tuple[Manifest, set[str]]] = {}
        for step, folder in self._step_folders():
            manifest = manifest_file.read(folder, step)
            if isinstance(manifest, Manifest):
                _, names = found.setdefault(manifest_file.encode(manifest), (manifest, set()))
                names |= {name for name, file in manifest.files.items() if _has_file(folder / name, file)}
        return list(found.values())

    def damaged_manifests(self) -> dict[int, str]:
        """Steps for which this node has a folder with a damaged manifest, and the damage."""
        read = ((step, folder, manifest_file.read(folder, step)) for step, folder in self._step_folders())
        return {step: f"{folder}: {found}" for step, folder, found in read if _is_damaged(folder, found)}

    def remove_damaged(self, step: int) -> None:
        """Remove this node's folders of a step whose manifest is damaged."""
        for at, folder in self._step_folders():
            if at == step and _is_damaged(folder, manifest_file.read(folder, step)):
                shutil.rmtree(folder, ignore_errors=True)

    def _step_folders(self) -> Iterator[tuple[int, Path]]:
        """Committed folders of all ranks of this node."""
        for folder in self._node_folder.glob("rank-*/step-*"):
            if match := STEP_FOLDER.fullmatch(folder.name):
                yield int(match[1]), folder

    def find_file(self, step: int, name: str, expected: FileChecksum) -> Path | None:
        """This node's copy of a file."""
        copies = (folder / f"step-{step:08d}" / name for folder in sorted(self._node_folder.glob("rank-*")))
        return next((copy for copy in copies if _has_file(copy, expected)), None)

    def remove(self, step: int) -> None:
        """Remove this node's copies of a checkpoint."""
        for folder in self._node_folder.glob(f"rank-*/step-{step:08d}"):
            shutil.rmtree(folder, ignore_errors=True)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints after a step; all ranks of the node may do so concurrently."""
        for folder in self._node_folder.glob("rank-*"):
            for later in filter(lambda each: each > step, list_steps(folder)):
                shutil.rmtree(folder / f"step-{later:08d}", ignore_errors=True)

    def new_read_folder(self, name: str) -> Path:
        """Create a folder to download files to."""
        folder = self._rank_folder / "reading" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def _has_file(file: Path, expected: FileChecksum) -> bool:
    """Whether a file of that size exists; its content is checked when it is read."""
    try:
        found = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == expected.size


def _is_damaged(folder: Path, found: Manifest | str) -> bool:
    """Whether the manifest read from a folder is damaged; a missing one in a folder being removed is not."""
    if isinstance(found, Manifest):
        return False
    try:
        open_regular(folder / manifest_file.NAME).close()
    except FileNotFoundError:
        return False
    except OSError as error:
        return is_damage(error)
    return True
