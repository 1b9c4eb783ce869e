"""Looks for the checkpoint that a run resumes, where the run will be."""

from __future__ import annotations

import os

from holdfast.findings import Finding, Owner
from holdfast.job.run_spec import ResumedRun
from holdfast.launch.target import Submission


def checkpoint_paths(resumed: ResumedRun | None) -> tuple[str, ...]:
    """The path of the checkpoint; empty without one, and if a store has it."""
    return () if resumed is None or "://" in resumed.checkpoint else (resumed.checkpoint,)


def checkpoint_here(wanted: Submission) -> tuple[Finding, ...]:
    """The finding if this machine does not have the checkpoint."""
    found = all(os.access(path, os.R_OK) for path in checkpoint_paths(wanted.resumed))
    return () if found else (checkpoint_missing(wanted.resumed, "this machine"),)


def checkpoint_missing(resumed: ResumedRun | None, machine: str) -> Finding:
    """The finding for a machine that does not have the checkpoint."""
    assert resumed is not None, "only a resumed checkpoint is looked for"
    return Finding(
        code="resumed-checkpoint-missing",
        what=f"{machine} does not have the checkpoint of step {resumed.step} of {resumed.run}",
        where=resumed.checkpoint,
        remedy="Mount that folder there, or copy it to one that all nodes share: `--set checkpoint.path=FOLDER`.",
        owner=Owner.CLUSTER,
    )
