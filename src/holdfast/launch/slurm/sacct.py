"""Asks Slurm's accounting for the jobs of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from holdfast.errors import HoldfastError
from holdfast.job.scheduler_account import AccountedJob, SchedulerAccount
from holdfast.launch.slurm.batch_script import slurm_job_name
from holdfast.launch.slurm.slurm_commands import run_command

TIMEOUT_S = 10.0
"""A report waits for no more than this."""
BEFORE_S = 60.0
"""How much earlier than a run's start its first job may be, by another clock."""
FIELDS = (
    *("JobIDRaw", "State", "ExitCode", "Submit", "Start", "End", "ElapsedRaw"),
    *("AllocNodes", "NodeList", "AllocTRES", "ConsumedEnergyRaw"),
)
"""Releases from 22.05 on have all of them."""
_SEPARATOR = "|"
_NO_NODES = "None assigned"


def accounted(run: str, created_at: float) -> SchedulerAccount:
    """What Slurm has accounted for a run since it was created (Unix seconds); why it has not, if it fails."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(created_at - BEFORE_S))
    what = "Slurm's accounting does not answer"
    argv = (
        *("sacct", "--allocations", "--duplicates", "--noheader", f"--delimiter={_SEPARATOR}", "--parsable2"),
        *(f"--name={slurm_job_name(run)}", f"--starttime={since}", f"--format={','.join(FIELDS)}"),
    )
    try:
        # Unix seconds; else times are in the cluster's time zone and format.
        text = run_command(argv, what=what, timeout_s=TIMEOUT_S, environ={**os.environ, "SLURM_TIME_FORMAT": "%s"})
    except HoldfastError as error:
        said = error.findings[0]
        return SchedulerAccount(missing=": ".join((said.what, *said.evidence)))
    return SchedulerAccount(jobs=parse_jobs(text))


def parse_jobs(text: str) -> tuple[AccountedJob, ...]:
    """The lines of sacct, one for each stretch, oldest first; others are left out."""
    lines = (dict(zip(FIELDS, line.split(_SEPARATOR), strict=False)) for line in text.splitlines())
    jobs = (_job(values) for values in lines if len(values) == len(FIELDS) and values["JobIDRaw"].isdecimal())
    return tuple(sorted(jobs, key=lambda job: job.submitted_at or 0.0))


def _job(values: dict[str, str]) -> AccountedJob:
    names = values["NodeList"] if values["NodeList"] != _NO_NODES else ""
    energy_j = _number(values["ConsumedEnergyRaw"])
    return AccountedJob(
        job=values["JobIDRaw"],
        state=values["State"],
        exit_code=values["ExitCode"],
        submitted_at=_number(values["Submit"]),
        started_at=_number(values["Start"]),
        ended_at=_number(values["End"]),
        elapsed_s=_number(values["ElapsedRaw"]) or 0,
        nodes=(_number(values["AllocNodes"]) or 0) if names else 0,  # of a requeued job, sacct has the former number
        node_names=names,
        resources=dict(_resources(values["AllocTRES"])),
        energy_j=energy_j or None,  # without a plugin it is 0 or empty
    )


def _resources(text: str) -> Iterator[tuple[str, str]]:
    """Of `billing=2,cpu=2,gres/gpu=2,node=2`, without what only prices the rest, and what has its own field."""
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        if equals and name not in ("billing", "node", "energy"):
            yield name, amount


def _number(text: str) -> int | None:
    """A number; None for `Unknown` and such."""
    return int(text) if text.isdecimal() else None
