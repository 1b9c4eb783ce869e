"""Renders the command that starts a job's ranks under Nsight Systems. Pure."""

from __future__ import annotations

from msgspec import Struct

from holdfast.errors import ExitCode, failure
from holdfast.job.spec import Job, Launch

PROGRAM = "nsys"
DELAY_S, DURATION_S = 120, 30
"""Imports and the first steps are not recorded; of later steps a report of 30 s can still be opened."""
OPTIONS = (
    "--trace=cuda,nvtx,osrt,cudnn,cublas",
    "--sample=none",
    f"--delay={DELAY_S}",
    f"--duration={DURATION_S}",
    "--kill=none",  # by default the program ends with the recording
)
_NAMES = {
    Launch.PER_RANK: "rank-%q{RANK}",
    Launch.PER_NODE: "node-%q{GROUP_RANK}",
}
"""By who starts the ranks, how a report is named: nsys puts the value of a variable for `%q{NAME}`."""


class NsysCommand(Struct, frozen=True, kw_only=True):
    """A job's command under `nsys profile`."""

    argv: tuple[str, ...]
    output: str
    """Path of a report, with variables that differ between ranks."""


def nsys_command(job: Job, folder: str) -> NsysCommand:
    """The job's command under nsys, with one report in `folder` for each rank, or each node of a launcher."""
    if (name := _NAMES.get(job.launch)) is None:
        raise failure(
            "nsys-not-rendered",
            f"holdfast adds options to the command of `launch: {job.launch}`, which cannot follow `nsys profile`",
            exit_code=ExitCode.USAGE,
            where="launch",
            remedy="Write `nsys profile` into the launcher's own command, before the training program.",
        )
    replica = "" if job.recovery.replicas == 1 else "replica-%q{HOLDFAST_REPLICA}-"
    output = f"{folder}/{replica}attempt-%q{{HOLDFAST_ATTEMPT}}-{name}"
    return NsysCommand(argv=(PROGRAM, "profile", *OPTIONS, f"--output={output}", *job.command), output=output)
