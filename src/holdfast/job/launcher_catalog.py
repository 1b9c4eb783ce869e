"""The catalogue of launchers (programs that start ranks themselves), one row each.

A row says how to recognise the launcher in a command, which `launch` configures it, and which of its options holdfast
sets. launch/launch_plan.py computes their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath

from msgspec import Struct

from holdfast.job.interpreter import is_python
from holdfast.job.spec import Job, Launch

Option = Callable[[Job], tuple[str, ...]]
"""The option values that agree with the job; any other value contradicts it."""


class Launcher(Struct, frozen=True, kw_only=True):
    """A program that starts ranks itself."""

    name: str
    heads: tuple[tuple[str, ...], ...] = ()
    """First words of a command, with the program's base name, such as `accelerate launch`."""
    modules: tuple[str, ...] = ()
    """Its module names for `python -m`."""
    launch: Launch | None = None
    """The `launch` that configures it; none means that holdfast starts ranks without it."""
    options: Mapping[str, Option]
    """Options that holdfast sets, without leading hyphens, words joined by underscores."""


class LauncherCommand(Struct, frozen=True, kw_only=True):
    """A command that starts a launcher."""

    launcher: Launcher
    command: tuple[str, ...]
    head: int
    """How many of its words belong to the launcher itself."""

    def with_options(self, *words: str) -> tuple[str, ...]:
        """The command with these options before the user's own."""
        return (*self.command[: self.head], *words, *self.command[self.head :])

    def options(self) -> Iterator[tuple[str, str]]:
        """The launcher's own options with their values, as far as they can be distinguished from the program's.

        Which options take a value is unknown, so a word after an option counts as its value unless it looks like a
        program: missing an option is better than treating one of the program's as the launcher's.
        """
        may_be_value = False
        words = self.command[self.head :]
        for word, following in zip(words, (*words[1:], ""), strict=True):
            if word.startswith("-"):
                name, equals, value = word.lstrip("-").partition("=")
                yield name.replace("-", "_"), value if equals else following
                may_be_value = not equals
                if name in ("m", "module"):
                    return
            elif may_be_value and not _is_program(word):
                may_be_value = False
            else:
                return


def find_launcher(command: tuple[str, ...]) -> LauncherCommand | None:
    """The launcher in a command, by its first words or by `python -m`; None if there is none."""
    program = PurePath(command[0]).name
    module = _module_at(command) if program.startswith("python") else None
    for launcher in LAUNCHER_CATALOG:
        if module is not None and command[module] in launcher.modules:
            return LauncherCommand(launcher=launcher, command=command, head=module + 1)
        for head in launcher.heads:
            if (program, *command[1 : len(head)]) == head:
                return LauncherCommand(launcher=launcher, command=command, head=len(head))
    return None


def _module_at(command: tuple[str, ...]) -> int | None:
    """Index of MODULE in `python -m MODULE`."""
    at = command.index("-m") + 1 if "-m" in command else len(command)
    return at if at < len(command) else None


def _is_program(word: str) -> bool:
    return word.endswith((".py", ".sh")) or word.startswith("./") or PurePath(word).name.startswith("python")


def _nodes(job: Job) -> tuple[str, ...]:
    return (str(job.nodes.max),) if job.nodes.min == job.nodes.max else ()


def _ranks_per_node(job: Job) -> tuple[str, ...]:
    return (str(job.local_world_size), "auto", "gpu")


def _ranks(job: Job) -> tuple[str, ...]:
    return (str(job.world_size),) if job.nodes.min == job.nodes.max else ()


def _never(job: Job) -> tuple[str, ...]:
    """No value agrees: it differs between nodes or attempts."""
    return ()


LAUNCHER_CATALOG: tuple[Launcher, ...] = (
    Launcher(
        name="torchrun",
        heads=(("torchrun",),),
        modules=("torch.distributed.run", "torch.distributed.launch"),
        launch=Launch.PER_NODE,
        options={
            "nnodes": _nodes,
            "nproc_per_node": _ranks_per_node,
            "node_rank": _never,
            "master_addr": _never,
            "master_port": _never,
            "rdzv_endpoint": _never,
            "standalone": _never,
        },
    ),
    Launcher(
        name="accelerate",
        heads=(("accelerate", "launch"), ("accelerate-launch",)),
        modules=("accelerate.commands.launch",),
        launch=Launch.ACCELERATE,
        options={
            "num_machines": _nodes,
            "num_processes": _ranks,
            "machine_rank": _never,
            "main_process_ip": _never,
            "main_process_port": _never,
        },
    ),
    Launcher(
        name="deepspeed",
        heads=(("deepspeed",), ("ds",)),
        modules=("deepspeed.launcher.runner",),
        launch=Launch.DEEPSPEED,
        options={
            "num_nodes": _nodes,
            "num_gpus": _ranks_per_node,
            "num_accelerators": _ranks_per_node,
            "H": _never,
            "hostfile": _never,
            "i": _never,
            "include": _never,
            "e": _never,
            "exclude": _never,
            "node_rank": _never,
            "master_addr": _never,
            "master_port": _never,
        },
    ),
    Launcher(
        name="mpirun",
        heads=(("mpirun",), ("mpiexec",), ("orterun",), ("mpirun.openmpi",), ("mpiexec.openmpi",)),
        launch=Launch.MPI,
        options={
            "np": _ranks,
            "n": _ranks,
            "c": _ranks,
            "N": _ranks_per_node,
            "npernode": _ranks_per_node,
            "H": _never,
            "host": _never,
            "hostfile": _never,
            "machinefile": _never,
            "default_hostfile": _never,
        },
    ),
    Launcher(name="deepspeed.launcher.launch", modules=("deepspeed.launcher.launch",), options={}),
    *(Launcher(name=name, heads=((name,),), options={}) for name in ("colossalai", "horovodrun", "srun")),
)


def runs_python(job: Job) -> bool:
    """Whether the job's command is `python ...`."""
    return is_python(job.command[0])
