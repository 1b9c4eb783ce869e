"""Which folders of the shared volume a node's pod mounts, and the init container that makes them.

The volume holds the folders of all runs, so no container of ranks mounts it whole: a program of one run must not read,
or change, what another run or a controller keeps there.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator

from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.names import HOME, RUNS
from holdfast.launch.kubernetes.submission import Submission

INIT = "folders"
"""The name of the init container."""


def inside(path: str) -> str | None:
    """A path relative to the volume, as the job or the profile writes it; None where it is not on the volume."""
    if "://" in path or path.startswith("~"):
        return None
    found = posixpath.relpath(posixpath.join(HOME, path), HOME)
    return None if path.startswith("/") and found.startswith("..") else found


def refused(folder: str) -> str | None:
    """Why a folder, relative to the volume, is not given to ranks; None where it is."""
    first, *rest = folder.split("/")
    if first == "..":
        return "it leads out of the volume"
    if first == ".":
        return "it is the whole volume, with the folders of all runs in it"
    if first == RUNS and rest[1:2] != ["checkpoints"]:
        return f"{HOME}/{RUNS} holds the folders of all runs"
    return None


def folders(asked: Submission) -> tuple[str, ...]:
    """Folders of the volume that ranks see, relative to it, none inside another; empty without a volume."""
    if asked.profile.volume is None:
        return ()
    found = {*_own(asked), *_shared(asked)}
    return tuple(sorted(each for each in found if not any(each.startswith(f"{other}/") for other in found)))


def seen(asked: Submission, path: str) -> bool:
    """Whether ranks see a path on the volume."""
    where = inside(path) or "."
    return any(where == folder or where.startswith(f"{folder}/") for folder in folders(asked))


def mounts(asked: Submission) -> list[Node]:
    """Where a node's container sees them; without a volume what stands in for it is the pod's own, and seen whole."""
    if asked.profile.volume is None:
        return [whole()]
    return [
        {"name": "home", "mountPath": f"{HOME}/{folder}", "subPath": folder if number else Because(folder, _WHY)}
        for number, folder in enumerate(folders(asked))
    ]


def whole() -> Node:
    """All of the volume, for the controller and the init container; ranks never see it."""
    return {"name": "home", "mountPath": HOME}


def init(asked: Submission, resources: Node, security: Node) -> Node:
    """The container that makes these folders before they are mounted; None where there is nothing to make."""
    if not folders(asked):
        return None
    # A file server that trusts no root lets the kubelet look a folder up only where anybody may: 0711, not 0700.
    own, shared = ([f"{HOME}/{folder}" for folder in some] for some in (_own(asked), _shared(asked)))
    command = ["python", "-c", _python(own, shared)] if asked.profile.agent else ["sh", "-c", _shell(own, shared)]
    return [
        {
            "name": INIT,
            "image": asked.job.image,
            "command": Because(
                [word.replace("$(", "$$(") for word in command],
                "The kubelet would make them as root, and on many volumes ranks could not write to them.",
            ),
            "resources": resources,
            "securityContext": security,
            "volumeMounts": [whole()],
        }
    ]


def _python(own: list[str], shared: list[str]) -> str:
    """For an image with an agent, which has Python and may have no shell."""
    private = f"old = os.umask(0o066); [os.makedirs(each, 0o700, exist_ok=True) for each in {own!r}]; os.umask(old)"
    public = f"[os.makedirs(each, exist_ok=True) for each in {shared!r}]"
    return "; ".join(("import os", *([private] if own else []), *([public] if shared else [])))


def _shell(own: list[str], shared: list[str]) -> str:
    private = f"(umask 066 && mkdir -p -m 0700 {shlex.join(own)})" if own else ""
    return " && ".join(filter(None, (private, f"mkdir -p {shlex.join(shared)}" if shared else "")))


_WHY = "Of the volume ranks see these folders alone, and no other run's."


def _own(asked: Submission) -> Iterator[str]:
    """Folders of this run."""
    run = f"{RUNS}/{asked.names.name}"
    if asked.profile.agent:
        yield f"{run}/logs"
    if asked.job.checkpoint.written is None:
        yield f"{run}/checkpoints"


def _shared(asked: Submission) -> Iterator[str]:
    """Folders that the job and the profile name, which other runs may name too."""
    job, volume = asked.job, asked.profile.volume
    absolute = [job.workdir] if job.workdir.startswith("/") else []
    named = (job.checkpoint.path, job.checkpoint.local, *absolute, *(volume.folders if volume else ()))
    found = dict.fromkeys(inside(path) for path in named if path)
    yield from (folder for folder in found if folder is not None and refused(folder) is None)
