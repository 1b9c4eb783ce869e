"""`python -m lab`: the command line of the lab."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from holdfast.cli.error_report import report_error
from holdfast.errors import HoldfastError
from lab.kubelet.nodes import NodeState
from lab.lab import Lab, build_all, nodes
from lab.slurm_conf import SlurmRelease
from lab.slurm_root import slurm_impossible_reason, slurm_root
from lab.toolchain import ARGO_CD, FLUX, HELM, TRAEFIK, VOLCANO, Module, build_impossible_reason, program_folder

app = typer.Typer(
    help="A Kubernetes control plane without containers, for trial runs of cluster jobs and for tests.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Option(help="The lab's name; several can run at the same time.")]


class Component(StrEnum):
    """A part of the lab that is built by itself."""

    KUBERNETES = "kubernetes"
    SLURM = "slurm"
    VOLCANO = "volcano"
    TRAEFIK = "traefik"
    FLUX = "flux"
    HELM = "helm"
    ARGO_CD = "argocd"
    NEXT_SLURM = "slurm-26.05"
    """From a Debian that changes: tests use it where it could be built."""


SLURM, NEXT_SLURM = SlurmRelease.V24_11, SlurmRelease.V26_05

_Build = tuple[Callable[[], str | None], Callable[[], Iterable[Path]]]


def _module(module: Module) -> _Build:
    return lambda: build_impossible_reason(module), lambda: (program_folder(module),)


_BUILDS: Mapping[Component, _Build] = {
    Component.KUBERNETES: (build_impossible_reason, build_all),
    Component.VOLCANO: _module(VOLCANO),
    Component.TRAEFIK: _module(TRAEFIK),
    Component.FLUX: _module(FLUX),
    Component.HELM: _module(HELM),
    Component.ARGO_CD: _module(ARGO_CD),
    Component.SLURM: (lambda: slurm_impossible_reason(SLURM), lambda: (slurm_root(SLURM),)),
    Component.NEXT_SLURM: (lambda: slurm_impossible_reason(NEXT_SLURM), lambda: (slurm_root(NEXT_SLURM),)),
}
"""Why a component cannot be built here, None if it can; and what builds it."""


@app.command("build")
def build_(
    components: Annotated[list[Component] | None, typer.Argument(help="By default kubernetes.")] = None,
    *,
    where_possible: Annotated[
        bool, typer.Option("--where-possible", help="If it is not possible, print why and exit with code 0.")
    ] = False,
) -> None:
    """Build the programs that the lab runs, if they are missing: minutes, once per version."""
    for component in components or [Component.KUBERNETES]:
        impossible_reason, build = _BUILDS[component]
        if where_possible and (reason := impossible_reason()):
            print(f"{component} is not built: {reason}")
            continue
        try:
            for folder in build():
                print(folder)
        except HoldfastError as error:
            if not where_possible or component is not Component.NEXT_SLURM:
                raise
            print(f"{component} is not built, and no test uses it: {error}")


@app.command()
def up(
    name: Name = "lab",
    count: Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes.")] = 4,
    gpus: Annotated[int, typer.Option(min=0, help="Number of GPUs that each node advertises.")] = 8,
) -> None:
    """Start a lab, and return when all programs are ready."""
    lab = _lab(name)
    lab.up(nodes=nodes(count, gpus=gpus))
    print(f"export KUBECONFIG={lab.kubeconfig}")


@app.command()
def down(name: Name = "lab") -> None:
    """Stop a lab and remove everything that it created."""
    _lab(name).down()


@app.command()
def node(which: Annotated[str, typer.Argument(metavar="NODE")], state: NodeState, name: Name = "lab") -> None:
    """Have a node imitate a fault, until it is `on` again; at `off` its pods end immediately, without a message."""
    _lab(name).set_state(which, state)


@app.command()
def status(name: Name = "lab") -> None:
    """Print a lab's programs, whether they run, and how often each has crashed; fail if one crash-loops."""
    lab = _lab(name)
    programs, endings = lab.status(), lab.crashes()
    for program, alive in programs.items():
        again = f", crashed {_times(endings[program])}" if program in endings else ""
        print(f"{program:<24} {'up' if alive else 'down'}{again}")
    if programs:
        lab.check()
    raise typer.Exit(0 if programs and all(programs.values()) else 1)


@app.command()
def kubeconfig(name: Name = "lab") -> None:
    """Print the path of a lab's kubeconfig."""
    print(_lab(name).kubeconfig)


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
def kubectl(words: Annotated[list[str], typer.Argument()], name: Name = "lab") -> None:
    """Run the lab's own version of kubectl against a lab."""
    command = _lab(name).kubectl_command(*words)
    os.execv(command[0], command)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _lab(name: str) -> Lab:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Lab(Path(base) / "holdfast" / "labs" / name)


def _interrupted(*_: object) -> NoReturn:
    """Clean up a start that receives SIGTERM, as on Ctrl-C."""
    raise KeyboardInterrupt


def main() -> int:
    """Run a command; print a failure as a finding."""
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        app(prog_name="python -m lab")
    except Exception as error:
        return report_error(error, sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
