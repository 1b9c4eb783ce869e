"""Which folders of the shared volume a node's pod mounts, and the init container that makes them.

The volume holds the folders of all runs, so no rank's container mounts all of it: a program of one run must not read or
change the files of another run or a controller.
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
    """A path of the job or the target, relative to the volume; None if it is not on the volume."""
    if "://" in path or path.startswith("~"):
        return None
    found = posixpath.relpath(posixpath.join(VOLUME_ROOT, path), VOLUME_ROOT)
    return None if path.startswith("/") and found.startswith("..") else found


def refusal_reason(folder: str) -> str | None:
    """Why ranks may not mount a folder (relative to the volume); None if they may."""
    first, *rest = folder.split("/")
    if first == "..":
        return "it leads out of the volume"
    if first == ".":
        return "it is the whole volume, with the folders of all runs in it"
    if first == RUNS and rest[1:2] != ["checkpoints"]:
        return f"{VOLUME_ROOT}/{RUNS} holds the folders of all runs"
    return None


def visible_dirs(ctx: RenderContext) -> tuple[str, ...]:
    """Folders that ranks see, relative to the volume, none inside another; empty without a volume."""
    if ctx.target.volume is None:
        return ()
    found = {*_run_dirs(ctx), *_shared_dirs(ctx)}
    return tuple(sorted(each for each in found if not any(each.startswith(f"{other}/") for other in found)))


def is_visible(ctx: RenderContext, path: str) -> bool:
    """Whether ranks see a path on the volume."""
    where = relative_to_volume(path) or "."
    return any(where == folder or where.startswith(f"{folder}/") for folder in visible_dirs(ctx))


def mounts(ctx: RenderContext) -> list[YamlValue]:
    """Mounts of a node's container; without a volume the pod's emptyDir is mounted as a whole."""
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
    """The mount of the whole volume, for the controller and the init container; ranks never see it."""
    return {"name": "home", "mountPath": VOLUME_ROOT}


def init_containers(ctx: RenderContext, resources: YamlValue, security: YamlValue) -> list[YamlValue]:
    """The container that creates the folders before they are mounted; empty if there are none."""
    if not visible_dirs(ctx):
        return []
    # With root squash the kubelet can traverse a folder only if everybody may: 0711, not 0700.
    own, shared = ([f"{VOLUME_ROOT}/{folder}" for folder in some] for some in (_run_dirs(ctx), _shared_dirs(ctx)))
    command = (
        ["python", "-c", _mkdir_python(own, shared)] if ctx.target.agent else ["sh", "-c", _mkdir_shell(own, shared)]
    )
    return [
        {
            "name": INIT_CONTAINER,
            "image": ctx.job.image,
            "imagePullPolicy": ctx.target.pod.pull_policy,
            "command": Commented(
                [word.replace("$(", "$$(") for word in command],
                "The kubelet would create them as root; on many volumes ranks could not write to them.",
            ),
            "resources": resources,
            "securityContext": security,
            "volumeMounts": [whole_volume()],
        }
    ]


def _mkdir_python(own: list[str], shared: list[str]) -> str:
    """For an image with an agent: it has Python, but maybe no shell."""
    private = f"old = os.umask(0o066); [os.makedirs(each, 0o700, exist_ok=True) for each in {own!r}]; os.umask(old)"
    public = f"[os.makedirs(each, exist_ok=True) for each in {shared!r}]"
    return "; ".join(("import os", *([private] if own else []), *([public] if shared else [])))


def _mkdir_shell(own: list[str], shared: list[str]) -> str:
    private = f"(umask 066 && mkdir -p -m 0700 {shlex.join(own)})" if own else ""
    return " && ".join(filter(None, (private, f"mkdir -p {shlex.join(shared)}" if shared else "")))


_WHY = "Ranks see only these folders of the volume, none of another run."


def _run_dirs(ctx: RenderContext) -> Iterator[str]:
    """Folders of this run."""
    run = f"{RUNS}/{ctx.names.name}"
    if ctx.target.agent:
        yield f"{run}/logs"
    if ctx.job.checkpoint.write_path is None:
        yield f"{run}/checkpoints"


def _shared_dirs(ctx: RenderContext) -> Iterator[str]:
    """Folders that the job and the target name; other runs may name them too."""
    job, volume = ctx.job, ctx.target.volume
    absolute = [job.workdir] if job.workdir.startswith("/") else []
    named = (job.checkpoint.path, job.checkpoint.local, *absolute, *(volume.folders if volume else ()))
    found = dict.fromkeys(relative_to_volume(path) for path in named if path)
    yield from (folder for folder in found if folder is not None and refusal_reason(folder) is None)
