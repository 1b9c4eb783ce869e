"""Owns what of a run's checkpoints lies on a node's own disk, in a folder for each rank: nothing is agreed on a node.

LOCAL/CRC OF THE STORE'S URL/
    rank-00003/
        writing/           what this rank is writing
        step-00000042/     its files, and the seal of all; complete once every rank has renamed its own
        reading/           files of a checkpoint that is being loaded: links to this node's, and fetched ones
    rank-00003.1/          the same of replica 1
"""

from __future__ import annotations

import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from holdfast.train import seal
from holdfast.train.depot import COMPLETE, steps_in
from holdfast.train.regular import is_damage, open_regular
from holdfast.train.seal import FileSum, Seal


class Disk:
    """The disk as one rank uses it: it writes to its own folder, and reads from those of all ranks of its node."""

    def __init__(self, local: Path, url: str, rank: int, replica: int = 0) -> None:
        """Ranks of several replicas may share a node, and all of them load when all begin."""
        self._node = local / f"{zlib.crc32(url.encode()):08x}"
        self._own = self._node / (f"rank-{rank:05d}.{replica}" if replica else f"rank-{rank:05d}")

    def partial(self, step: int) -> Path:
        """Where this rank writes its part."""
        return self._own / "writing" / f"step-{step:08d}"

    def folder(self, step: int) -> Path:
        """Where its part is once it is complete."""
        return self._own / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Those of which this rank has its part, oldest first."""
        return steps_in(self._own)

    def commit(self, whole: Seal) -> None:
        """Make this rank's part complete; raises OSError."""
        partial, final = self.partial(whole.step), self.folder(whole.step)
        seal.write(partial, whole)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        seal.sync_folder(self._own)

    def clear(self) -> None:
        """Remove what was left half done."""
        for left in ("writing", "reading"):
            shutil.rmtree(self._own / left, ignore_errors=True)

    def keep(self, steps: set[int]) -> None:
        """Remove what this node has of others that are older than the newest of these: all ranks keep the same.

        Also what ranks have left that are on other nodes now.
        """
        for folder in self._node.glob("rank-*"):
            for old in filter(lambda each: each not in steps and each < max(steps, default=0), steps_in(folder)):
                shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)

    def held(self) -> list[tuple[Seal, set[str]]]:
        """Checkpoints of which this node has files, and which."""
        found: dict[bytes, tuple[Seal, set[str]]] = {}
        for step, folder in self._complete():
            sealed = seal.read(folder, step)
            if isinstance(sealed, Seal):
                _, names = found.setdefault(seal.encoded(sealed), (sealed, set()))
                names |= {name for name, file in sealed.files.items() if _has(folder / name, file)}
        return list(found.values())

    def damaged_seals(self) -> dict[int, str]:
        """Steps of which this node has a folder with a seal that cannot be believed, and why."""
        read = ((step, folder, seal.read(folder, step)) for step, folder in self._complete())
        return {step: f"{folder}: {found}" for step, folder, found in read if _is_damaged(folder, found)}

    def forget_damaged(self, step: int) -> None:
        """Remove this node's folders of a step with such a seal."""
        for at, folder in self._complete():
            if at == step and _is_damaged(folder, seal.read(folder, step)):
                shutil.rmtree(folder, ignore_errors=True)

    def _complete(self) -> Iterator[tuple[int, Path]]:
        """Folders of a final name, of all ranks of this node."""
        for folder in self._node.glob("rank-*/step-*"):
            if match := COMPLETE.fullmatch(folder.name):
                yield int(match[1]), folder

    def find(self, step: int, name: str, expected: FileSum) -> Path | None:
        """This node's copy of a file."""
        copies = (folder / f"step-{step:08d}" / name for folder in sorted(self._node.glob("rank-*")))
        return next((copy for copy in copies if _has(copy, expected)), None)

    def forget(self, step: int) -> None:
        """Remove this node's copies of a checkpoint."""
        for folder in self._node.glob(f"rank-*/step-{step:08d}"):
            shutil.rmtree(folder, ignore_errors=True)

    def forget_after(self, step: int) -> None:
        """Remove what came after a step; all ranks of the node may do so at once."""
        for folder in self._node.glob("rank-*"):
            for later in filter(lambda each: each > step, steps_in(folder)):
                shutil.rmtree(folder / f"step-{later:08d}", ignore_errors=True)

    def reading(self, name: str) -> Path:
        """A new folder to have files in."""
        folder = self._own / "reading" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def _has(file: Path, expected: FileSum) -> bool:
    """Whether there is a file of that size; what is in it is checked when it is read."""
    try:
        found = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == expected.size


def _is_damaged(folder: Path, found: Seal | str) -> bool:
    """Whether what was read of a folder's seal is damage: none is there while a folder is being removed."""
    if isinstance(found, Seal):
        return False
    try:
        open_regular(folder / seal.NAME).close()
    except FileNotFoundError:
        return False
    except OSError as error:
        return is_damage(error)
    return True
