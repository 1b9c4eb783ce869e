"""What an acceptance measures and requires, agreed in a file before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.job.loader import read_text, validate_model
from holdfast.job.spec import Count, Model, NonEmpty, Number, Seconds
from holdfast.job.yaml_source import YamlSource, parse, printable


class CheckName(StrEnum):
    """The acceptance checks, in the order in which they run."""

    FABRIC = "fabric"
    SCALING = "scaling"
    GANG = "gang"
    FIRST_RUN = "first-run"
    RESTART = "restart"


EXIT_CODES: Mapping[CheckName, ExitCode] = {
    CheckName.FABRIC: ExitCode.FABRIC_NOT_ACCEPTED,
    CheckName.SCALING: ExitCode.SCALING_NOT_ACCEPTED,
    CheckName.GANG: ExitCode.GANG_NOT_ACCEPTED,
    CheckName.FIRST_RUN: ExitCode.FIRST_RUN_NOT_ACCEPTED,
    CheckName.RESTART: ExitCode.RESTART_NOT_ACCEPTED,
}

Share = Annotated[Number, Field(gt=0, le=1)]
Steps = Annotated[Count, Field(ge=20, le=1_000_000)]


class FabricTerms(Model):
    """The fabric is in use, and as fast as agreed."""

    min_gbit_s: Annotated[Number, Field(gt=0)] | None = None
    """Bus bandwidth of all-reduces over all nodes, in Gbit/s.

    None means half of the line rate of one port, where the fabric's row has one; else only the verdict counts.
    """
    steps: Steps = 100
    """Steps of the run whose traffic is observed."""
    deadline_s: Seconds = 300.0
    """Seconds in which that run must have ended, after the probes."""
    probe_s: Seconds = 120.0
    """Seconds that the probes of nodes and links may take."""


class ScalingTerms(Model):
    """The same training on more nodes is close to linear."""

    nodes: tuple[Annotated[Count, Field(ge=1)], ...] = (1, 2, 4, 8)
    """Numbers of nodes; those beyond the target's are left out."""
    min_efficiency: Share = 0.9
    """Throughput per node on the most nodes, as a share of that on the fewest."""
    steps: Steps = 150
    """Steps of each run."""
    step_s: Seconds = 0.25
    """Seconds of computing in a step on the fewest nodes: holdfast's program makes its batch so large.

    On more nodes each rank has the same batch. Your own program decides its batch itself.
    """
    deadline_s: Seconds = 900.0
    """Seconds in which each run must have ended."""


class GangTerms(Model):
    """Of two jobs that do not fit together, each gets all of its nodes or none."""

    rounds: Annotated[Count, Field(ge=1, le=1000)] = 20
    """Pairs of jobs, submitted with random delays."""
    hold_s: Seconds = 1.0
    """Seconds for which each job keeps its nodes."""
    max_partial_s: Seconds = 3.0
    """Seconds that a job may have some of its nodes and not all; where machines still pull images, more."""
    deadline_s: Seconds = 240.0
    """Seconds in which both jobs of a round must have ended."""
    priorities: tuple[NonEmpty, NonEmpty] | None = None
    """A lower and a higher `priority`: in a further round the higher one has to preempt the lower, which resumes.

    None means that preemption is not checked.
    """


class FirstRunTerms(Model):
    """A newcomer gets a run by the documented commands alone."""

    page: NonEmpty | None = None
    """Markdown file whose code blocks are executed, relative to the agreement; none means holdfast's own page."""
    deadline_s: Seconds = 300.0
    """Seconds in which all commands must have ended."""


class RestartTerms(Model):
    """A run that fails resumes by itself and computes what one without failures does."""

    faults: Annotated[Count, Field(ge=1, le=10)] = 10
    """Faults of as many kinds, at random steps of one run."""
    steps_per_fault: Annotated[Count, Field(ge=10, le=80)] = 40
    """Steps of the run, for each fault; of a run of more than 1,000 steps the log does not have each."""
    checkpoint_steps: Annotated[Count, Field(ge=1)] = 5
    """Steps between checkpoints."""
    max_redone_steps: Annotated[Count, Field(ge=1)] = 15
    """Steps that a failure may make the run do again."""
    max_recovery_s: Seconds = 90.0
    """Seconds from a failure to the next committed step."""
    hang_s: Seconds = 15.0
    """Seconds without a step after which a rank is hung."""
    deadline_s: Seconds = 1200.0
    """Seconds in which each of the two runs must have ended."""


class Agreement(Model):
    """What is measured, and what it must be."""

    nodes: Annotated[Count, Field(ge=1)] | None = None
    """Nodes of the target that checks use; none means all, or at most two on this machine."""
    job: dict[str, Any] = {}
    """Fields of every job that is started, such as `image`, `gpus_per_node`, or `fabric`.

    Not `nodes`, `name` and `command`, which each check decides.
    """
    shares_machine: bool = False
    """Whether all nodes are on one machine and share its CPUs, as in a lab; `scaling` measures accordingly."""
    seed: Count = 1
    """Decides what is random: the steps of faults, the delays between jobs."""
    program: tuple[NonEmpty, ...] = ()
    """Command of your own training with a Session, to which `--steps N` is added; none means holdfast's program."""
    fabric: FabricTerms = FabricTerms()
    scaling: ScalingTerms = ScalingTerms()
    gang: GangTerms = GangTerms()
    first_run: FirstRunTerms = FirstRunTerms()
    restart: RestartTerms = RestartTerms()


SMOKE: Mapping[str, Mapping[str, object]] = {
    "fabric": {"steps": 20, "probe_s": 90.0},
    "scaling": {"steps": 40, "nodes": (1, 2), "step_s": 0.1},
    "gang": {"rounds": 1},
    "restart": {"faults": 3, "steps_per_fault": 12},
}
"""What `--smoke` shortens: it shows that everything works, and proves less."""


def read_agreement(path: Path | None, *, smoke: bool = False) -> Agreement:
    """The agreement of a file, or the default one; raises HoldfastError with every problem of the file."""
    source = parse(read_text(path), printable(str(path))) if path else YamlSource(name="")
    agreed = validate_model(source, Agreement)
    if agreed is None:
        raise HoldfastError(tuple(source.all_findings()), ExitCode.INVALID_JOB)
    if own := sorted({"nodes", "name", "command"} & agreed.job.keys()):
        raise failure(
            "bad-agreement",
            f"`job.{own[0]}` is decided by each check",
            exit_code=ExitCode.INVALID_JOB,
            where=f"{path}: job.{own[0]}",
            remedy="Remove it. `nodes` and `program` of the agreement itself say how many nodes, and what runs.",
        )
    if path is not None and agreed.first_run.page is not None:
        page = str(path.parent / agreed.first_run.page)
        agreed = agreed.model_copy(update={"first_run": agreed.first_run.model_copy(update={"page": page})})
    if not smoke:
        return agreed
    shortened = {name: getattr(agreed, name).model_copy(update=dict(terms)) for name, terms in SMOKE.items()}
    return agreed.model_copy(update=shortened)
