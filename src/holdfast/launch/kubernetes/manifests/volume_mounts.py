"""Which folders of the shared volume a node's pod mounts, and the init container that makes them.

The volume holds the folders of all runs, so no container of ranks mounts it whole: a program of one run must not read,
or change, what another run or a controller keeps there.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator

from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import RUNS, VOLUME_ROOT

INIT_CONTAINER = "folders"
"""The name of the init container."""


def relative_to_volume(path: str) -> str | None:
    """A path relative to the volume, as the job or the target writes it; None where it is not on the volume."""
    if "://" in path or path.startswith("~"):
        return None
    found = posixpath.relpath(posixpath.join(VOLUME_ROOT, path), VOLUME_ROOT)
    return None if path.startswith("/") and found.startswith("..") else found


def refusal_reason(folder: str) -> str | None:
    """Why a folder, relative to the volume, is not given to ranks; None where it is."""
    first, *rest = folder.split("/")
    if first == "..":
        return "it leads out of the volume"
    if first == ".":
        return "it is the whole volume, with the folders of all runs in it"
    if first == RUNS and rest[1:2] != ["checkpoints"]:
        return f"{VOLUME_ROOT}/{RUNS} holds the folders of all runs"
    return None


def visible_dirs(ctx: RenderContext) -> tuple[str, ...]:
    """Folders of the volume that ranks see, relative to it, none inside another; empty without a volume."""
    if ctx.target.volume is None:
        return ()
    found = {*_run_dirs(ctx), *_shared_dirs(ctx)}
    return tuple(sorted(each for each in found if not any(each.startswith(f"{other}/") for other in found)))


def is_visible(ctx: RenderContext, path: str) -> bool:
    """Whether ranks see a path on the volume."""
    where = relative_to_volume(path) or "."
    return any(where == folder or where.startswith(f"{folder}/") for folder in visible_dirs(ctx))


def mounts(ctx: RenderContext) -> list[YamlValue]:
    """Where a node's container sees them; without a volume what stands in for it is the pod's own, and seen whole."""
    if ctx.target.volume is None:
        return [whole_volume()]
    return [
        {
            "name": "home",
            "mountPath": f"{VOLUME_ROOT}/{folder}",
            "subPath": folder if number else Commented(folder, _WHY),
        }
        for number, folder in enumerate(visible_dirs(ctx))
    ]


def whole_volume() -> YamlValue:
    """All of the volume, for the controller and the init container; ranks never see it."""
    return {"name": "home", "mountPath": VOLUME_ROOT}


def init_containers(ctx: RenderContext, resources: YamlValue, security: YamlValue) -> YamlValue:
    """The container that makes these folders before they are mounted; None where there is nothing to make."""
    if not visible_dirs(ctx):
        return None
    # A file server that trusts no root lets the kubelet look a folder up only where anybody may: 0711, not 0700.
    own, shared = ([f"{VOLUME_ROOT}/{folder}" for folder in some] for some in (_run_dirs(ctx), _shared_dirs(ctx)))
    command = (
        ["python", "-c", _mkdir_python(own, shared)] if ctx.target.agent else ["sh", "-c", _mkdir_shell(own, shared)]
    )
    return [
        {
            "name": INIT_CONTAINER,
            "image": ctx.job.image,
            "command": Commented(
                [word.replace("$(", "$$(") for word in command],
                "The kubelet would make them as root, and on many volumes ranks could not write to them.",
            ),
            "resources": resources,
            "securityContext": security,
            "volumeMounts": [whole_volume()],
        }
    ]


def _mkdir_python(own: list[str], shared: list[str]) -> str:
    """For an image with an agent, which has Python and may have no shell."""
    private = f"old = os.umask(0o066); [os.makedirs(each, 0o700, exist_ok=True) for each in {own!r}]; os.umask(old)"
    public = f"[os.makedirs(each, exist_ok=True) for each in {shared!r}]"
    return "; ".join(("import os", *([private] if own else []), *([public] if shared else [])))


def _mkdir_shell(own: list[str], shared: list[str]) -> str:
    private = f"(umask 066 && mkdir -p -m 0700 {shlex.join(own)})" if own else ""
    return " && ".join(filter(None, (private, f"mkdir -p {shlex.join(shared)}" if shared else "")))


_WHY = "Of the volume ranks see these folders alone, and no other run's."


def _run_dirs(ctx: RenderContext) -> Iterator[str]:
    """Folders of this run."""
    run = f"{RUNS}/{ctx.names.name}"
    if ctx.target.agent:
        yield f"{run}/logs"
    if ctx.job.checkpoint.write_path is None:
        yield f"{run}/checkpoints"


def _shared_dirs(ctx: RenderContext) -> Iterator[str]:
    """Folders that the job and the target name, which other runs may name too."""
    job, volume = ctx.job, ctx.target.volume
    absolute = [job.workdir] if job.workdir.startswith("/") else []
    named = (job.checkpoint.path, job.checkpoint.local, *absolute, *(volume.folders if volume else ()))
    found = dict.fromkeys(relative_to_volume(path) for path in named if path)
    yield from (folder for folder in found if folder is not None and refusal_reason(folder) is None)
