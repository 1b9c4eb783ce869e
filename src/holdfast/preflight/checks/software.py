"""Checks of the job's interpreter and its torch, without an import of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from msgspec import Struct, field

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt

START_TIMEOUT_S = 5.0
"""An interpreter on a cold network file system takes a second or two."""

_QUESTION = """
import sys
sys.path = [folder for folder in sys.path if folder]
import os
print("python", "%d.%d.%d" % sys.version_info[:3])
seen = False
for folder in sys.path:
    try:
        names = os.listdir(folder)
    except OSError:
        continue
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            print("package", name)
    version = os.path.join(folder, "torch", "version.py")
    if not seen and os.path.isfile(version):
        seen = True
        for line in open(version, encoding="utf-8"):
            print("torch", line.rstrip())
"""
"""Prints versions within 50 ms: importlib.metadata takes three times as long, torch forty times. It does not look into
the folder in which the agent runs, which is not the job's."""

# __version__ = '2.15.0+cu132'
# cuda: Optional[str] = '13.2'
# hip: Optional[str] = None
_ASSIGNED = re.compile(r"^(__version__|cuda|hip|xpu)\b[^=]*= *['\"]([^'\"]+)['\"]")
# nvidia_nccl_cu12-2.27.3.dist-info
_PACKAGE = re.compile(r"^(.+?)-([^-]+?)(?:-py[\d.]+)?\.(?:dist|egg)-info$")
_OTHER_GPU_LIBRARIES = ("jax_cuda", "jax_rocm", "tensorflow", "cupy", "paddlepaddle_gpu", "mxnet")
"""A job of these may use a torch without CUDA on the side, for its data."""


class Software(Struct, frozen=True, kw_only=True):
    """What an interpreter has, as far as it matters to training."""

    python: str = ""
    """Its version; empty if it did not start."""
    torch: Mapping[str, str] = field(default_factory=dict[str, str])
    """`__version__`, `cuda`, `hip` and `xpu` of torch/version.py, as far as they are set; empty without torch."""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions by name, with underscores."""

    @property
    def nccl(self) -> str:
        """Version of NCCL's package; empty if torch brings no package of it."""
        found = {version for name, version in self.packages.items() if name.startswith("nvidia_nccl_cu")}
        return ", ".join(sorted(found))


def software_of(answer: str) -> Software:
    """Parse what an interpreter printed."""
    lines = [line.partition(" ")[::2] for line in answer.splitlines()]
    packages: dict[str, str] = {}
    for kind, words in lines:
        if kind == "package" and (match := _PACKAGE.match(words)):
            packages.setdefault(match[1].lower().replace("-", "_").replace(".", "_"), match[2])
    torch = [_ASSIGNED.match(words) for kind, words in lines if kind == "torch"]
    return Software(
        python=next((words for kind, words in lines if kind == "python"), ""),
        torch={match[1]: match[2] for match in torch if match},
        packages=packages,
    )


def python(view: NodeView) -> Iterator[Finding]:
    """The interpreter of the job's command starts on this node."""
    name = view.wanted.python
    if not name:
        return
    try:
        answer = view.once(_ask)
    except TimeoutError as error:
        yield _finding("python-slow", f"{name} takes long to start", str(error), Severity.WARNING)
        return
    except _NoProgram as error:
        # A bare name may be found by the PATH that the job sets.
        severity = Severity.ERROR if PurePath(name).is_absolute() else Severity.WARNING
        yield _finding("python-missing", f"the job's interpreter {name} cannot be started here", str(error), severity)
        return
    if not software_of(answer).python:
        what = f"the job's interpreter {name} starts, and runs no program"
        yield _finding("python-broken", what, f"output: {answer[:200]!r}", Severity.ERROR)


def accelerator_build(view: NodeView) -> Iterator[Finding]:
    """A job that wants GPUs has a torch that can use some."""
    if not view.wanted.gpus or not view.wanted.python:
        return
    found = _software(view)
    version = found.torch.get("__version__")
    if version is None or {"cuda", "hip", "xpu"} & found.torch.keys():
        return
    if any(name.startswith(_OTHER_GPU_LIBRARIES) for name in found.packages):
        return
    yield Finding(
        code="torch-without-gpu",
        what=f"torch {version} of {view.wanted.python} is a build for CPUs, and the job wants {view.wanted.gpus} GPUs",
        where=view.wanted.python,
        evidence=(f"torch/version.py: __version__ = '{version}', cuda = None",),
        remedy=f"Install a build for GPUs, the same on all nodes: `{view.wanted.python} -m pip install "
        "--force-reinstall torch --index-url https://download.pytorch.org/whl/cuNNN` with a CUDA of the driver.",
        owner=Owner.USER,
    )


def software_facts(view: NodeView) -> Mapping[str, str]:
    """Versions of the interpreter, torch, CUDA and NCCL of the job's interpreter."""
    if not view.wanted.python:
        return {}
    try:
        found = _software(view)
    except NotLookedAt:
        return {}
    facts = {
        "Python": found.python,
        "torch": found.torch.get("__version__", ""),
        "CUDA": found.torch.get("cuda", ""),
        "NCCL": found.nccl,
    }
    return {label: value for label, value in facts.items() if value}


def _software(view: NodeView) -> Software:
    """What the interpreter has; raises NotLookedAt if it does not start, which is the finding of another check."""
    try:
        found = software_of(view.once(_ask))
    except (_NoProgram, TimeoutError) as error:
        raise NotLookedAt(str(error)) from error
    if not found.python:
        raise NotLookedAt(f"{view.wanted.python} runs no program")
    return found


class _NoProgram(Exception):
    """The interpreter cannot be started."""


def _ask(view: NodeView) -> str:
    program = PurePath(view.wanted.python)
    if not program.is_absolute() and len(program.parts) > 1:
        if not view.wanted.workdir:
            raise NotLookedAt(f"{program} is in the job's code, which is not on this node yet")
        program = view.wanted.workdir / program
    try:
        return view.run((str(program), "-c", _QUESTION), START_TIMEOUT_S)
    except NotLookedAt as error:
        raise _NoProgram(str(error)) from error


def _finding(code: str, what: str, evidence: str, severity: Severity) -> Finding:
    return Finding(
        code=code,
        severity=severity,
        what=what,
        where="command",
        evidence=(evidence,),
        remedy="Start it by hand on this node: the path of the job's command must be the same on all nodes, with its "
        "environment mounted or in the image.",
        owner=Owner.CLUSTER,
    )
