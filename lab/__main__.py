"""`python -m lab`: the lab from the command line."""

from __future__ import annotations

import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from holdfast.cli.error_report import report_error
from lab.lab import Lab, build_all, nodes
from lab.toolchain import build_impossible_reason

app = typer.Typer(
    help="A Kubernetes control plane without containers, for rehearsing cluster jobs and for tests.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Option(help="Which lab; several run side by side.")]


@app.command("build")
def build_(
    where_possible: Annotated[
        bool, typer.Option("--where-possible", help="Where it is not, say why, and end well.")
    ] = False,
) -> None:
    """Build what the lab runs, if it is not built yet: minutes, once for each version."""
    if where_possible and (reason := build_impossible_reason()):
        print(f"the lab is not built: {reason}")
        return
    for folder in build_all():
        print(folder)


@app.command()
def up(
    name: Name = "lab",
    count: Annotated[int, typer.Option("--nodes", min=1, help="How many nodes it has.")] = 4,
    gpus: Annotated[int, typer.Option(min=0, help="How many GPUs each node says it has.")] = 8,
) -> None:
    """Start a lab, and return when all of it is ready."""
    lab = _lab(name)
    lab.up(nodes=nodes(count, gpus=gpus))
    print(f"export KUBECONFIG={lab.kubeconfig}")


@app.command()
def down(name: Name = "lab") -> None:
    """End a lab; nothing of it is left."""
    _lab(name).down()


class Power(StrEnum):
    """What a node can be."""

    ON = "on"
    OFF = "off"


@app.command()
def node(which: Annotated[str, typer.Argument(metavar="NODE")], power: Power, name: Name = "lab") -> None:
    """Pull a node's plug, or put it back: off, its pods end at once and nobody is told."""
    _lab(name).set_power(which, on=power is Power.ON)


@app.command()
def status(name: Name = "lab") -> None:
    """Say which programs of a lab live, and how often each has ended by itself; one that does not go on is an error."""
    lab = _lab(name)
    programs, endings = lab.status(), lab.crashes()
    for program, alive in programs.items():
        again = f", has ended by itself {_positive_int(endings[program])}" if program in endings else ""
        print(f"{program:<24} {'up' if alive else 'down'}{again}")
    if programs:
        lab.check()
    raise typer.Exit(0 if programs and all(programs.values()) else 1)


@app.command()
def kubeconfig(name: Name = "lab") -> None:
    """Say where a lab's kubeconfig is."""
    print(_lab(name).kubeconfig)


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
def kubectl(words: Annotated[list[str], typer.Argument()], name: Name = "lab") -> None:
    """Run kubectl, of the lab's own version, against a lab."""
    command = _lab(name).kubectl_command(*words)
    os.execv(command[0], command)


def _positive_int(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _lab(name: str) -> Lab:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Lab(Path(base) / "holdfast" / "labs" / name)


def _interrupted(*_: object) -> NoReturn:
    """A start that is told to end cleans up, as one that is interrupted does."""
    raise KeyboardInterrupt


def main() -> int:
    """Carry a command out; what goes wrong is said as a finding."""
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        app(prog_name="python -m lab")
    except Exception as error:
        return report_error(error, sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
