"""Errors that users see, and the table of exit codes.

An error means that holdfast cannot do what the user requested. Failures of a running job are `Finding`s (findings.py);
an error carries several findings if it reports several problems together.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from importlib.util import find_spec

from holdfast.findings import Finding, Owner, Severity


class ExitCode(IntEnum):
    """Exit status of the `holdfast` command; a job's own code (1 to 125, 128 + signal) passes through."""

    OK = 0
    USAGE = 2
    INVALID_JOB = 64
    CANNOT_RUN_HERE = 65
    NOT_FOUND = 66
    UNAVAILABLE = 69
    INTERNAL = 70
    OUTPUT_LOST = 73
    STORAGE_FAILED = 74
    CHECKPOINTED_AND_EXITED = 75
    NOT_PERMITTED = 77
    NODES_LOST = 79
    HUNG = 80
    SUPERSEDED = 81
    FABRIC_NOT_ACCEPTED = 91
    SCALING_NOT_ACCEPTED = 92
    GANG_NOT_ACCEPTED = 93
    FIRST_RUN_NOT_ACCEPTED = 94
    RESTART_NOT_ACCEPTED = 95
    LADDER_NOT_ACCEPTED = 96
    NOT_EXECUTABLE = 126
    PROGRAM_NOT_FOUND = 127
    CANCELLED = 130


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "The command did what was requested; for a job, every rank finished.",
    ExitCode.USAGE: "The command line itself is wrong: unknown verb, flag or argument.",
    ExitCode.INVALID_JOB: "A job file, manifest or target is not valid; every problem is listed.",
    ExitCode.CANNOT_RUN_HERE: "A valid job cannot run here: missing program, too few devices, unwritable folder.",
    ExitCode.NOT_FOUND: "No such file, run, rank or node.",
    ExitCode.UNAVAILABLE: "The run's controller, or a target, cannot be reached.",
    ExitCode.INTERNAL: "A fault of holdfast's own; the message says where the details are.",
    ExitCode.OUTPUT_LOST: "The command's own output could not be written: it is full, or was closed. A run continues.",
    ExitCode.STORAGE_FAILED: "The run ended because a disk failed it: full, read-only or damaged where it matters.",
    ExitCode.CHECKPOINTED_AND_EXITED: "On a stop request a rank took a checkpoint and exited before its last step.",
    ExitCode.NOT_PERMITTED: "Not permitted: missing or wrong token, or a folder of another user.",
    ExitCode.NODES_LOST: "The run ended because nodes kept failing or being lost, or one never joined, too often.",
    ExitCode.HUNG: "The run ended because it hung again and the restart budget was spent.",
    ExitCode.SUPERSEDED: "Of a controller or its supervisor: another controller has the run, so it changes nothing.",
    ExitCode.FABRIC_NOT_ACCEPTED: "`holdfast accept`: the check `fabric` failed, and no check before it.",
    ExitCode.SCALING_NOT_ACCEPTED: "`holdfast accept`: the check `scaling` failed, and no check before it.",
    ExitCode.GANG_NOT_ACCEPTED: "`holdfast accept`: the check `gang` failed, and no check before it.",
    ExitCode.FIRST_RUN_NOT_ACCEPTED: "`holdfast accept`: the check `first-run` failed, and no check before it.",
    ExitCode.RESTART_NOT_ACCEPTED: "`holdfast accept`: the check `restart` failed, and no other check.",
    ExitCode.LADDER_NOT_ACCEPTED: "`holdfast accept ladder`: a rung failed.",
    ExitCode.NOT_EXECUTABLE: "The run ended because the job's program exists but could not be executed.",
    ExitCode.PROGRAM_NOT_FOUND: "The run ended because the job's program, or its working directory, does not exist.",
    ExitCode.CANCELLED: "The run was cancelled by `holdfast cancel` or Ctrl-C.",
}
"""What each says. `holdfast explain N` shows it with EXIT_CODES of diagnose/knowledge/signals.py, and the page of exit
codes lists it. A failed run's code is chosen in `_KINDS` of control/policy.py, 126 and 127 in agent/rank_process.py.
"""


class HoldfastError(Exception):
    """holdfast cannot do what the user requested: one or more findings and an exit code."""

    def __init__(self, findings: tuple[Finding, ...], exit_code: ExitCode) -> None:
        super().__init__("; ".join(finding.what for finding in findings))
        self.findings = findings
        self.exit_code = exit_code


def failure(
    code: str,
    what: str,
    *,
    exit_code: ExitCode,
    where: str = "",
    evidence: tuple[str, ...] = (),
    remedy: str,
    owner: Owner = Owner.USER,
) -> HoldfastError:
    """An error with one finding; `code` is stable, documented kebab-case."""
    finding = Finding(
        code=code, severity=Severity.ERROR, what=what, where=where, evidence=evidence, remedy=remedy, owner=owner
    )
    return HoldfastError((finding,), exit_code)


def missing_extra(extra: str, module: str, needed_by: str) -> Finding | None:
    """The finding if an optional module is not installed; `needed_by` ends with a verb, such as "replicas need"."""
    if find_spec(module) is not None:
        return None
    return Finding(
        code="missing-extra",
        what=f"there is no Python module `{module}`, which {needed_by}",
        where=sys.executable,
        remedy=f"Run `{sys.executable} -m pip install 'holdfast[{extra}]'`.",
    )


def require_extra(extra: str, module: str, needed_by: str) -> None:
    """Raise `missing_extra`'s finding, if there is one."""
    if lacking := missing_extra(extra, module, needed_by):
        raise HoldfastError((lacking,), ExitCode.CANNOT_RUN_HERE)
