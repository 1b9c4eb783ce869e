"""Rules between the fields of a valid job, one function per rule.

Target capabilities are checked in launch/local/local_preflight.py and launch/kubernetes/preflight/job_checks.py, field
types in validation_messages.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import PurePath

from msgspec.structs import replace

from holdfast.findings import Finding, Severity
from holdfast.job.launcher_catalog import LAUNCHER_CATALOG, Launcher, find_launcher
from holdfast.job.spec import GlobalBatch, Job, Launch, LearningRate
from holdfast.job.validation_messages import suggest
from holdfast.job.virtual_nodes import replicas_per_node
from holdfast.job.yaml_source import printable

RESERVED_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"}
    | {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"}
    | {"JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"}
)
RESERVED_PREFIXES = ("HOLDFAST_", "PET_")
RESERVED_WITH_REPLICAS = frozenset({"TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"})
"""Variables that holdfast sets with several replicas; a single-replica job may set them for an external group."""

MAX_ARGUMENT_BYTES = 32 * os.sysconf("SC_PAGE_SIZE")
"""Maximum size in bytes of an argument, or of a variable with its name."""

_SHELL_OPERATORS = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "2>&1", "&"})
_VARIABLE = re.compile(r"\$(\{?[A-Za-z_][A-Za-z0-9_]*\}?|\()")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SHELLS = frozenset({"sh", "bash", "zsh", "dash", "ksh", "fish"})
SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|SECRET_?KEY|PRIVATE_?KEY)$", re.IGNORECASE)


def check_job(job: Job, fabrics: Collection[str]) -> tuple[Finding, ...]:
    """Check all rules; returns errors and warnings, with the field as `where`.

    `fabrics` are the names of the fabric catalogue.
    """
    return (*unknown_fabric(job, fabrics), *(finding for rule in RULES for finding in rule(job)))


def unknown_fabric(job: Job, fabrics: Collection[str]) -> Iterator[Finding]:
    """The fabric's name must be in the catalogue, if there is one."""
    name = job.fabric.name
    if fabrics and name not in fabrics:
        remedy = suggest(name, fabrics) or f"Use one of {', '.join(sorted(fabrics))}."
        yield _error("unknown-fabric", "fabric.name", f"there is no fabric `{name}`", remedy)


def learning_rate_without_scaling(job: Job) -> Iterator[Finding]:
    """The learning rate follows the global batch, which is kept by default."""
    recovery = job.recovery
    if recovery.learning_rate is LearningRate.KEEP:
        return
    if recovery.replicas > 1:
        what = f"`learning_rate: {recovery.learning_rate}` changes nothing with several replicas"
        yield _warning(
            "learning-rate-not-scaled", "recovery.learning_rate", what, "Remove it: it is for a range of nodes."
        )
    elif recovery.global_batch is GlobalBatch.KEEP:
        what = f"`learning_rate: {recovery.learning_rate}` changes nothing while the global batch is kept"
        yield _warning(
            "learning-rate-not-scaled", "recovery.learning_rate", what, "Add `global_batch: scale`, or remove it."
        )


def reserved_names(job: Job) -> Iterator[Finding]:
    """A job cannot set variables that holdfast sets for every rank."""
    reserved = RESERVED_NAMES | RESERVED_WITH_REPLICAS if job.recovery.replicas > 1 else RESERVED_NAMES
    for field, name in _variables(job):
        if name in reserved or name.startswith(RESERVED_PREFIXES):
            yield _error(
                "reserved-name", f"{field}.{name}", f"`{name}` is set by holdfast for every rank", "Remove it."
            )


def name_clashes(job: Job) -> Iterator[Finding]:
    """A variable has one source."""
    first: dict[str, str] = {}
    for field, name in _variables(job):
        home = first.setdefault(name, field)
        if home != field:
            what = f"`{name}` is set under both `{home}` and `{field}`"
            yield _error("name-clash", f"{field}.{name}", what, "Keep one of the two.")


def argument_list_too_long(job: Job) -> Iterator[Finding]:
    """Linux starts no program with an argument or variable of more than 32 pages (MAX_ARG_STRLEN)."""
    variables = [("env", job.env), ("fabric.env", job.fabric.env)]
    sizes = {
        f"{field}.{name}": len(f"{name}={value}\0".encode(errors="surrogateescape"))
        for field, values in variables
        for name, value in values.items()
    }
    sizes |= {
        f"command[{at}]": len(f"{word}\0".encode(errors="surrogateescape")) for at, word in enumerate(job.command)
    }
    for where, size in sizes.items():
        if size > MAX_ARGUMENT_BYTES:
            what = f"it takes {size:,} bytes, and Linux starts no program with more than {MAX_ARGUMENT_BYTES:,} in one"
            yield _error("argument-list-too-long", where, what, "Write it to a file, and name that file here.")


def secrets_in_env(job: Job) -> Iterator[Finding]:
    """A value under `env` is written into the run's folder and shown by `render`."""
    for name, value in job.env.items():
        if value and SECRET_NAME.search(name):
            remedy = f"Write `secrets: {{{name}: {{env: {name}}}}}` instead, and set it where you start the run."
            what = f"`{name}` looks like a secret, and values under `env` are stored and shown"
            yield _warning("secret-in-env", f"env.{name}", what, remedy)


def launcher_for_every_rank(job: Job) -> Iterator[Finding]:
    """A launcher started once per rank starts too many processes."""
    found = find_launcher(job.command)
    if found is None or job.launch is not Launch.PER_RANK:
        return
    yield launcher_per_rank(found.launcher, alone=job.world_size == 1)


def launcher_per_rank(
    launcher: Launcher, *, where: str = "command", evidence: tuple[str, ...] = (), alone: bool = False
) -> Finding:
    """The finding that a launcher is started once per rank; harmless with one rank (`alone`)."""
    instead = (
        f"Write `launch: {launcher.launch}`, or leave" if launcher.launch else "Let holdfast start the ranks: leave"
    )
    what = f"`{launcher.name}` starts its own ranks, and with `launch: per-rank` it is started once for every rank"
    consequence = "" if alone else ", so that each would train its own model"
    finding = _finding(
        Severity.WARNING if alone else Severity.ERROR,
        "launcher-per-rank",
        where,
        what + consequence,
        f"{instead} the launcher and its flags out of the command.",
    )
    return replace(finding, evidence=evidence)


def launcher_unaware_of_nodes(job: Job) -> Iterator[Finding]:
    """Only torchrun reads its node rank from the environment."""
    found = find_launcher(job.command)
    kind = found.launcher.launch if found else None
    if found and kind and job.launch is Launch.PER_NODE is not kind and job.nodes.max > 1:
        what = (
            f"`{found.launcher.name}` reads no node variables, so with `launch: per-node` every node trains by itself"
        )
        yield _warning("launcher-unaware-of-nodes", "launch", what, f"Write `launch: {kind}`.")


def launcher_mismatch(job: Job) -> Iterator[Finding]:
    """Options for a named launcher are valid only for that launcher."""
    wired = next((one for one in LAUNCHER_CATALOG if one.launch is job.launch), None)
    if wired is None or job.launch is Launch.PER_NODE:
        return
    found = find_launcher(job.command)
    if found is None or found.launcher is not wired:
        line = " ".join(wired.heads[0])
        what = f"`launch: {job.launch}` gives the command options of `{line}`, and the command is `{job.command[0]}`"
        remedy = f"Begin the command with `{line}`, or write `launch: per-rank` to have holdfast start the ranks."
        yield _error("launcher-mismatch", "command", what, remedy)


def launcher_options(job: Job) -> Iterator[Finding]:
    """The command cannot set an option that holdfast sets to another value."""
    found = find_launcher(job.command)
    if found is None or found.launcher.launch is not job.launch:
        return
    for option, value in found.options():
        allowed = found.launcher.options.get(option)
        if allowed is not None and value not in allowed(job):
            what = f"`{option}` of `{found.launcher.name}` is set by holdfast, from the job and anew for each attempt"
            yield _error("launcher-option", "command", what, "Leave it out of the command.")


def accelerate_without_gpus(job: Job) -> Iterator[Finding]:
    """Without GPUs, accelerate starts one process unless its launcher type is set."""
    found = find_launcher(job.command)
    if found is None or job.launch is not Launch.ACCELERATE or job.gpus_per_node or job.local_world_size == 1:
        return
    telling = {"multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "config_file", "tpu"}
    if not telling & {option for option, _ in found.options()}:
        what = f"without GPUs `accelerate launch` starts one process on each node, not {job.local_world_size}"
        remedy = "Add `--multi_gpu` to it, which starts processes on CPUs as well, or write `ranks_per_node: 1`."
        yield _warning("accelerate-one-process", "ranks_per_node", what, remedy)


def shell_syntax(job: Job) -> Iterator[Finding]:
    """The command runs without a shell, so the program receives shell syntax as an argument."""
    program = PurePath(job.command[0]).name
    if program in _SHELLS:
        return
    remedy = 'Write `command: [bash, -c, "..."]` to have a shell read it.'
    if _ASSIGNMENT.match(job.command[0]):
        name = job.command[0].partition("=")[0]
        yield _warning(
            "shell-syntax", "command", f"`{name}=...` is treated as the program", f"Set `{name}` under `env`."
        )
    for word in job.command:
        if word in _SHELL_OPERATORS:
            yield _warning("shell-syntax", "command", f"no shell is run, so `{word}` is passed on as it is", remedy)
            return
        variable = _VARIABLE.search(word)
        if variable:
            what = f"no shell is run, so `{variable[0]}` is not replaced by its value"
            yield _warning("shell-syntax", "command", what, remedy)
            return


def shared_gpus(job: Job) -> Iterator[Finding]:
    """NCCL refuses two ranks on one GPU."""
    ranks, gpus = job.local_world_size, job.gpus_per_node
    if job.launch is Launch.PER_RANK and 0 < gpus < ranks:
        what = f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)} on each node, which NCCL refuses"
        yield _warning("shared-gpus", "ranks_per_node", what, f"Write `ranks_per_node: {gpus}`, or remove it.")


def restart_window_too_short(job: Job) -> Iterator[Finding]:
    """A hang is detected only after its timeout, so a shorter window never counts two restarts."""
    recovery = job.recovery
    deadline_s = recovery.step_timeout_s
    if isinstance(deadline_s, float) and deadline_s >= recovery.restart_window_s:
        what = (
            f"a hang is noticed after {deadline_s:g} s, longer than the {recovery.restart_window_s:g} s in which "
            "restarts are counted, so a job that always hangs is restarted for ever"
        )
        remedy = f"Write a `restart_window_s` of at least {deadline_s * (recovery.max_restarts + 1):g}."
        yield _warning("restart-window-too-short", "recovery.step_timeout_s", what, remedy)


def invalid_replicas(job: Job) -> Iterator[Finding]:
    """Replicas are equal: each has whole nodes or an equal part of one."""
    replicas, nodes, least = job.recovery.replicas, job.nodes, job.recovery.min_replicas
    if least > replicas:
        what = f"at least {least} replicas must run, and there are {replicas}"
        yield _error("bad-replicas", "recovery.min_replicas", what, f"Write {replicas} at most.")
    if replicas == 1:
        if job.recovery.outer_sync is not None:
            what = "`outer_sync` needs several replicas, and there is one"
            yield _error(
                "bad-replicas", "recovery.outer_sync", what, "Write `recovery.replicas: 2` or more, or leave it out."
            )
        return
    if nodes.is_elastic:
        what = f"a range of nodes, {nodes.min} to {nodes.max}, cannot be divided into replicas yet"
        remedy = f"Write `nodes: {nodes.max}`: a replica whose node is lost comes back with the next one."
        yield _error("not-supported", "nodes", what, remedy)
    if job.launch is not Launch.PER_RANK:
        what = f"`launch: {job.launch}` cannot be divided into replicas yet"
        yield _error(
            "not-supported", "launch", what, "Write `launch: per-rank`, with the program itself as the command."
        )
    if nodes.max % replicas and replicas % nodes.max:
        what = f"{nodes.max} nodes cannot be divided evenly into {replicas} replicas"
        remedy = f"Ask for a number of nodes that {replicas} divides, or for as many replicas on each node."
        yield _error("bad-replicas", "recovery.replicas", what, remedy)
        return
    for count, things in ((job.local_world_size, "ranks"), (job.gpus_per_node, "GPUs")):
        if count % replicas_per_node(job):
            what = f"the {count} {things} of a node cannot be divided evenly into {replicas_per_node(job)} replicas"
            remedy = f"Have {replicas_per_node(job)} divide them, or give each replica whole nodes."
            yield _error("bad-replicas", "recovery.replicas", what, remedy)


def invalid_peer_checkpoints(job: Job) -> Iterator[Finding]:
    """Replicas already hold copies; ranks started by a launcher have no memory that outlives them."""
    if not job.recovery.peer_checkpoints:
        return
    if job.recovery.replicas > 1:
        what = "each replica holds what the others do, and one that is lost catches up from another's memory"
        yield _error(
            "peer-checkpoints-unsupported", "recovery.peer_checkpoints", what, "Leave it out, or write `replicas: 1`."
        )
    if job.launch is not Launch.PER_RANK:
        what = f"`launch: {job.launch}` leaves ranks without memory that outlives them"
        remedy = "Write `launch: per-rank`, with the program itself as the command, or leave it out."
        yield _error("peer-checkpoints-unsupported", "recovery.peer_checkpoints", what, remedy)
    if job.nodes.max == 1:
        what = "there is one node, so copies outlive its ranks and not itself"
        yield _warning(
            "peer-checkpoints-single-node",
            "recovery.peer_checkpoints",
            what,
            "Write `nodes: 2` or more, or leave it out.",
        )


def invalid_parallel(job: Job) -> Iterator[Finding]:
    """The parallel groups divide the ranks of a replica, whatever its number of nodes."""
    parallel = job.parallel
    if parallel is None:
        return
    fixed = parallel.tp * parallel.cp * parallel.pp
    if parallel.dp is not None and job.nodes.is_elastic:
        what = f"`dp` is {parallel.dp}, and it varies with the number of nodes, {job.nodes.min} to {job.nodes.max}"
        yield _error("bad-parallel", "parallel.dp", what, "Leave it out: it follows from the others.")
        return
    counts = (job.nodes.min, job.nodes.max) if job.nodes.is_elastic else (job.nodes.max,)
    for ranks in (nodes * job.local_world_size // job.recovery.replicas for nodes in counts):
        dp = ranks // fixed if parallel.dp is None else parallel.dp
        if dp * fixed != ranks:
            what = (
                f"tp x cp x pp is {fixed:,}, which does not divide {ranks:,} ranks"
                if parallel.dp is None
                else f"tp x cp x dp x pp is {fixed * dp:,}, and there are {ranks:,} ranks"
            )
            yield _error("bad-parallel", "parallel", what, "Write the sizes with which the program makes its groups.")
            return
        if (dp * parallel.cp) % parallel.ep:
            what = f"`ep` is {parallel.ep}, which does not divide cp x dp, {dp * parallel.cp:,}"
            yield _error("bad-parallel", "parallel.ep", what, "Write a size that divides it.")
            return


def invalid_slices(job: Job) -> Iterator[Finding]:
    """Slices of a placement are equal."""
    slices = job.placement.slices if job.placement else None
    if slices is not None and job.nodes.max % slices.nodes:
        what = f"{job.nodes.max} nodes cannot be divided evenly into slices of {slices.nodes}"
        yield _error("bad-placement", "placement.slices.nodes", what, "Write a number that divides `nodes`.")


RULES: tuple[Callable[[Job], Iterator[Finding]], ...] = (
    learning_rate_without_scaling,
    reserved_names,
    name_clashes,
    argument_list_too_long,
    secrets_in_env,
    launcher_for_every_rank,
    launcher_unaware_of_nodes,
    launcher_mismatch,
    launcher_options,
    accelerate_without_gpus,
    shell_syntax,
    shared_gpus,
    restart_window_too_short,
    invalid_replicas,
    invalid_peer_checkpoints,
    invalid_parallel,
    invalid_slices,
)


def _variables(job: Job) -> Iterator[tuple[str, str]]:
    """Every environment variable the job sets, with the field that sets it."""
    for field, names in (("env", job.env), ("secrets", job.secrets), ("fabric.env", job.fabric.env)):
        for name in names:
            yield field, name


def _error(code: str, where: str, what: str, remedy: str) -> Finding:
    return _finding(Severity.ERROR, code, where, what, remedy)


def _warning(code: str, where: str, what: str, remedy: str) -> Finding:
    return _finding(Severity.WARNING, code, where, what, remedy)


def _finding(severity: Severity, code: str, where: str, what: str, remedy: str) -> Finding:
    """Text of the job may contain anything, so it is made printable."""
    return Finding(
        code=code, severity=severity, what=printable(what, 300), where=printable(where), remedy=printable(remedy, 300)
    )
