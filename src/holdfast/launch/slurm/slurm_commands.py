"""Slurm's commands, and what its states and reasons mean."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner

TIMEOUT_S = 30.0
DRAINED_BY = "holdfast:"
"""How the reason of a drained node begins, which tells it apart from one that somebody else has drained."""
_LIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "REQUEUED", "SIGNALING", "STOPPED"}
"""States of a job that has, or may get, nodes."""
_REASONS: Mapping[str, str] = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs of higher priority come first",
    "Resources": "it is next, and waits until enough nodes are free",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "it waits for its reservation to begin",
    "BeginTime": "it may not begin yet",
    "Licenses": "no licence that it needs is free",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition starts no jobs",
    "PartitionNodeLimit": "the partition allows fewer nodes for a job",
    "PartitionTimeLimit": "the partition allows a shorter time limit: set `slurm.time`",
    "PartitionConfig": "the partition does not allow this job",
    "AssocGrpNodeLimit": "the account's limit of nodes is reached",
    "AssocMaxJobsLimit": "the account's limit of running jobs is reached",
    "AssocGrpGRES": "the account's limit of GPUs is reached",
    "QOSMaxNodePerJobLimit": "the quality of service allows fewer nodes for a job",
    "QOSMaxNodePerUserLimit": "your limit of nodes in this quality of service is reached",
    "QOSMaxJobsPerUserLimit": "your limit of running jobs in this quality of service is reached",
    "QOSGrpNodeLimit": "the quality of service has all its nodes in use",
    "QOSMaxGRESPerUser": "your limit of GPUs in this quality of service is reached",
    "BadConstraints": "no node has these features: see `slurm.constraint`",
    "InvalidAccount": "the account does not exist",
    "InvalidQOS": "the quality of service does not exist",
    "JobHeldUser": "you hold it: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "Cleaning": "what an earlier attempt left is being removed",
    "TopologyLimit": "no switch has enough free nodes",
}


_FIELDS = ("JobState", "Reason", "NumNodes", "NodeList", "BatchHost", "ExitCode", "PreemptTime", "Restarts")
"""What is read of a job."""


class SlurmJob(Struct, frozen=True, kw_only=True):
    """What Slurm says of a job."""

    state: str
    reason: str
    nodes: int
    """Nodes that it has, or asks for."""
    node_list: str = ""
    """Those that it has, as Slurm writes them."""
    batch_host: str = ""
    """The node of its batch script."""
    exit_status: int = 0
    """Exit status of its batch script, if that has ended."""
    preempted: bool = False
    """Whether another job has taken its nodes."""
    restarts: int = 0
    """How often Slurm has started it again."""

    @property
    def is_live(self) -> bool:
        """Whether it has nodes, or may get some."""
        return self.state in _LIVE

    @property
    def is_cut_short(self) -> bool:
        """Whether it runs, or Slurm itself ended it: at its time limit, or for another job."""
        return self.state == "RUNNING" or self.reason.startswith("TimeLimit") or self.preempted

    def explain(self) -> str:
        """Why it has no nodes."""
        meaning = _REASONS.get(self.reason.partition(",")[0], "see `squeue --start`")
        return f"{self.state.lower()}, {self.reason}: {meaning}"


def submit(script: str) -> str:
    """Submit a batch script and return the job's number; raises HoldfastError with what Slurm says."""
    return run_command(("sbatch", "--parsable"), script, what="Slurm does not accept the run").strip().partition(";")[0]


def refusal(script: str) -> tuple[Finding, ...]:
    """Why Slurm would not accept a batch script; nothing if it would. Submits nothing."""
    try:
        run_command(("sbatch", "--test-only"), script, what="Slurm would not accept the run")
    except HoldfastError as error:
        return error.findings
    return ()


def show(number: str) -> SlurmJob | None:
    """What Slurm says of a job; None if it no longer knows it. Raises HoldfastError if Slurm does not answer."""
    try:
        text = run_command(("scontrol", "show", "job", "-o", number), what="Slurm does not answer")
    except HoldfastError as error:
        if "Invalid job id" in "".join(error.findings[0].evidence):
            return None
        raise
    return parse_job(text)


def parse_job(text: str) -> SlurmJob:
    """A line of `scontrol show job -o`."""
    found = dict(re.findall(rf"(?:^|\s)({'|'.join(_FIELDS)})=(\S+)", text))
    nodes, status, restarts = (re.match(r"\d+", found.get(name, "")) for name in ("NumNodes", "ExitCode", "Restarts"))
    return SlurmJob(
        state=found.get("JobState", "UNKNOWN"),
        reason=found.get("Reason", "None"),
        nodes=int(nodes[0]) if nodes else 0,
        node_list=found.get("NodeList", ""),
        batch_host=found.get("BatchHost", ""),
        exit_status=int(status[0]) if status else 0,
        preempted=found.get("PreemptTime", "None") != "None",
        restarts=int(restarts[0]) if restarts else 0,
    )


def cancel(number: str) -> None:
    """End a job with all its processes; nothing if it has ended. Raises HoldfastError if Slurm does not answer."""
    run_command(("scancel", "--quiet", number), what="Slurm does not answer")


def requeue(number: str) -> None:
    """End a job, and have Slurm start its batch script again; raises HoldfastError if Slurm does not."""
    run_command(("scontrol", "requeue", number), what=f"Slurm job {number} is not started again")


def expand(node_list: str) -> tuple[str, ...]:
    """The names in a list of nodes; raises HoldfastError if Slurm does not answer."""
    return tuple(run_command(("scontrol", "show", "hostnames", node_list), what="Slurm does not answer").split())


def node_address(node: str) -> str:
    """Where Slurm reaches a node: an address or a host name. Raises HoldfastError if Slurm does not say."""
    text = run_command(("scontrol", "show", "node", "-o", node), what=f"Slurm does not know the node {node}")
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", text)
    return found[1] if found else node


def node_names() -> tuple[str, ...]:
    """The cluster's nodes; raises HoldfastError if Slurm does not answer."""
    text = run_command(("sinfo", "--noheader", "--Node", "--format=%N"), what="Slurm does not answer")
    return tuple(dict.fromkeys(text.split()))  # a node of several partitions is listed once for each


def drain(node: str, why: str) -> None:
    """Have Slurm start no further job on a node; raises HoldfastError if this user may not."""
    run_command(_change(node, "drain", f"reason={DRAINED_BY} {why}"), what=f"{node} cannot be drained")


def undrain(node: str) -> None:
    """Undo what `drain` did; a node that somebody else has drained stays so. Raises HoldfastError if refused."""
    what = f"{node} cannot be resumed"
    reasons = run_command(("sinfo", "--noheader", f"--nodes={node}", "--format=%E"), what=what).splitlines()
    if any(reason.startswith(f"{DRAINED_BY} ") for reason in reasons):
        run_command(_change(node, "resume"), what=what)


def _change(node: str, state: str, *more: str) -> tuple[str, ...]:
    return ("scontrol", "update", f"nodename={node}", f"state={state}", *more)


def run_command(
    argv: Sequence[str],
    stdin: str = "",
    *,
    what: str,
    timeout_s: float = TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> str:
    """The output of one of Slurm's commands; raises HoldfastError, which `what` begins, with what Slurm says."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=environ,
        )
    except FileNotFoundError as error:
        raise failure(
            "no-slurm",
            f"{argv[0]} is not installed here",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            evidence=(str(error),),
            remedy="Start the run on a login node of the Slurm cluster.",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise _refused(what, argv, f"no answer within {timeout_s:g} s", ExitCode.UNAVAILABLE) from error
    if done.returncode:
        raise _refused(what, argv, done.stderr.strip() or done.stdout.strip(), ExitCode.CANNOT_RUN_HERE)
    return done.stdout


def _refused(what: str, argv: Sequence[str], said: str, code: ExitCode) -> HoldfastError:
    return failure(
        "slurm-refused",
        what,
        exit_code=code,
        where=argv[0],
        evidence=tuple(said.splitlines()[-3:]),
        remedy="Correct `slurm` in the target, or ask the cluster's administrators.",
        owner=Owner.CLUSTER,
    )
