"""What holdfast can do on which target, why not where it cannot, and what no test has shown there."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

TARGETS: Mapping[str, str] = {
    "local": "local",
    "netns": "local, `netns`",
    "monarch": "local, Monarch",
    "hosts": "hosts",
    "hosts_monarch": "hosts, Monarch",
    "slurm": "Slurm",
    "slurm_monarch": "Slurm, Monarch",
    "kubernetes": "Kubernetes",
}
"""The targets, with their names in a table."""


class Feature(StrEnum):
    """What a run survives, or a user can do with it."""

    RANK_KILLED = "a rank is killed: all ranks restart from the last checkpoint"
    RANK_RAISES = "a rank raises: the same, and its error is reported"
    HANG = "a rank hangs: it is named, and all ranks restart"
    AGENT_KILLED = "an agent is killed: its node starts again"
    NODE_LOST = "a machine is lost: its node starts on a spare"
    CONTROLLER_KILLED = "the controller is killed: ranks continue, and it is restarted"
    CODE_SHIPPED = "the code changes during the run: every attempt runs the code of the start"
    CANCEL = "cancel: ranks receive SIGTERM, and nothing is left"
    SHAPE_CHANGE = "an elastic job loses a machine: it continues on fewer"
    SHAPE_GROWTH = "the machine returns: the job continues on more"
    RESUME = "`run --resume` continues a run of another target"
    REPLICAS = "`recovery.replicas`: a lost replica does not stop the others"
    SUBMITTER_LEAVES = "the machine that started the run is switched off: the run continues"


HERE = "the controller is on that machine"
NODES_LEAVE = "a node that an allocation has lost does not return to it"

REASONS: Mapping[tuple[Feature, str], str] = {
    (Feature.SHAPE_GROWTH, "slurm"): NODES_LEAVE,
    (Feature.SHAPE_GROWTH, "slurm_monarch"): NODES_LEAVE,
    (Feature.SUBMITTER_LEAVES, "local"): HERE,
    (Feature.SUBMITTER_LEAVES, "netns"): HERE,
    (Feature.SUBMITTER_LEAVES, "monarch"): HERE,
    (Feature.SUBMITTER_LEAVES, "hosts"): HERE,
    (Feature.SUBMITTER_LEAVES, "hosts_monarch"): HERE,
}
"""Why a target cannot do something."""

IN_ALLOCATION = "with `slurm: {controller: allocation}` in the target"
CONDITIONS: Mapping[tuple[Feature, str], str] = {
    (Feature.SUBMITTER_LEAVES, "slurm"): IN_ALLOCATION,
    (Feature.SUBMITTER_LEAVES, "slurm_monarch"): IN_ALLOCATION,
}
"""What a target can do something with, where that is not the default."""


def reason_against(feature: Feature, target: str) -> str:
    """Why a target cannot do it; empty if it can."""
    return REASONS.get((feature, target), "")
