"""Converts a manifest to a job file, with comments on what could not be carried over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePath

from holdfast.errors import ExitCode, failure
from holdfast.job.launcher_catalog import LauncherCommand, find_launcher
from holdfast.job.rules import RESERVED_NAMES, RESERVED_PREFIXES, SECRET_NAME
from holdfast.job.spec import ENV_NAME_PATTERN, MAX_NODES, SIZE_PATTERN, Launch
from holdfast.job.yaml_source import printable
from holdfast.launch.kubernetes.foreign.fabric_rules import fabric_of, rdma_device
from holdfast.launch.kubernetes.foreign.foreign_kinds import read_workload
from holdfast.launch.kubernetes.foreign.manifest_source import as_count, parse_manifest
from holdfast.launch.kubernetes.foreign.training_workload import SHM, PodContainer, TrainingWorkload
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue, to_yaml

_LAUNCHERS = (
    (re.compile(r"(?<![\w.-])(torchrun|torch\.distributed\.(run|launch))(?![\w-])"), Launch.PER_NODE),
    (re.compile(r"(?<![\w.-])(accelerate\s+launch|deepspeed|mpirun|mpiexec)(?![\w-])"), Launch.PER_NODE),
)
"""What a shell script starts; holdfast then starts the script once per node."""
_SET_BY_HOLDFAST = re.compile(r"rdzv_\w+|local_rank|local_addr")
"""Options of torchrun that the launcher catalogue does not list, because they do no harm in a job."""
_SHELL = re.compile(r"[\n;|&<>`]|\$[({\w]")


def job_from_manifest(text: str, file: str) -> str:
    """The text of a job file for the first training job of a manifest; raises HoldfastError if there is none."""
    source = parse_manifest(text, file)
    workloads = [each for target in source.objects if (each := read_workload(target)) and each.is_training]
    jobs = [each for each in workloads if "Runtime" not in each.target.kind] or workloads
    if not jobs:
        raise failure(
            "manifest-not-checked",
            f"{printable(file)} has no training job that holdfast can read",
            exit_code=ExitCode.INVALID_JOB,
            where=printable(file),
            evidence=tuple(finding.what for finding in source.findings),
            remedy=f"`holdfast validate {printable(file)}` lists what it has.",
        )
    workload = jobs[0]
    others = [f"Not converted: {printable(each.title)}." for each in jobs[1:]]
    head = [f"Made from {printable(workload.title)} of {printable(file)} by `holdfast init --from`.", *others]
    return to_yaml([_job(workload)], head=[*head, *_target_lines(workload)]).replace("---\n", "", 1)


def _job(workload: TrainingWorkload) -> dict[str, YamlValue]:
    container = workload.mpirun or workload.trainers[0].pod.main
    ranks = workload.trainers[0].pod.main
    launch, command, why = _command(container)
    gpus = ranks.gpus
    nodes = workload.nodes
    slots = as_count(workload.target.at(("spec", "slotsPerWorker")))
    of_operator = workload.target.at(("spec", "nprocPerNode")) or workload.target.at(
        ("spec", "trainer", "numProcPerNode")
    )
    processes = as_count(of_operator) if launch is Launch.PER_NODE and not gpus else None
    # Without a launcher, an operator starts one process in each pod, whatever its GPUs.
    per_node = slots if launch is Launch.MPI else 1 if launch is Launch.PER_RANK and gpus != 1 else processes
    env, secrets = _variables(workload)
    fabric = fabric_of(workload)
    known_nodes = nodes is not None and 0 < nodes <= MAX_NODES
    known_gpus = gpus is not None and gpus <= 64
    return {
        "version": 1,
        "name": _name(workload.target.name),
        "image": ranks.image or container.image or None,
        "command": Commented(command, why) if why else command,
        "launch": launch.value if launch is not Launch.PER_RANK else None,
        "nodes": nodes if known_nodes else Commented(1, "The manifest does not have the number of nodes."),
        "gpus_per_node": (gpus or None)
        if known_gpus
        else Commented(1, "The manifest does not have the number of GPUs."),
        "ranks_per_node": per_node if per_node and per_node <= 1024 else None,
        "env": env or None,
        "secrets": Commented(secrets, "Read from your environment when the run starts.") if secrets else None,
        "resources": _resources(workload, ranks) or None,
        "fabric": Commented(fabric, "From the devices that the pods request.") if fabric else None,
        "queue": workload.queue or None,
        "checkpoint": {"path": "checkpoints"},
        "recovery": {"max_restarts": 10},
    }


def _name(name: str) -> str:
    """A job's name: lower case, a letter first, at most 40."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:40].rstrip("-") or "job"


def _command(container: PodContainer) -> tuple[Launch, tuple[str, ...], str]:
    """Who starts the ranks, the command, and what the user must know about it."""
    words = tuple(_expanded(word.text, container) for word in container.words if word.text)
    if not words:
        return Launch.PER_RANK, ("python", "train.py"), "The manifest has no command: the image or a runtime has it."
    script = words[-1] if len(words) > 2 and PurePath(words[0]).name in {"sh", "bash"} and "c" in words[-2] else ""
    if script and not _SHELL.search(script.strip().replace("\\\n", " ")):
        plain = shlex.split(script.strip().replace("\\\n", " "), comments=True)
        words = tuple(plain[1:] if plain[:1] == ["exec"] else plain) or words
        script = ""
    if script:
        launch = next((launch for pattern, launch in _LAUNCHERS if pattern.search(script)), Launch.PER_RANK)
        why = "The script is unchanged: leave the launcher's numbers of nodes and its addresses out of it."
        return launch, words, why if launch is not Launch.PER_RANK else ""
    found = find_launcher(words)
    if found is not None and found.launcher.launch is not None:
        return found.launcher.launch, _without_options(found), ""
    if not container.has_command:
        return Launch.PER_RANK, words, "The manifest has arguments only: put the image's ENTRYPOINT before them."
    return Launch.PER_RANK, words, ""


def _expanded(text: str, container: PodContainer) -> str:
    """The text with `$(NAME)` replaced as the kubelet does."""
    values = {each.name: each.value for each in container.env if isinstance(each.value, str)}
    return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)


def _without_options(found: LauncherCommand) -> tuple[str, ...]:
    """The launcher's command without the options that holdfast sets."""
    ours = [name for name, _ in found.options() if name in found.launcher.options or _SET_BY_HOLDFAST.fullmatch(name)]
    kept: list[str] = list(found.command[: found.head])
    words = iter(found.command[found.head :])
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=")
        if word.startswith("-") and name.replace("-", "_") in ours:
            if not equals and name != "standalone":
                next(words, None)
            continue
        kept.append(word)
        if not word.startswith("-") and word.endswith((".py", ".sh")):
            break
    return (*kept, *words)


def _variables(workload: TrainingWorkload) -> tuple[dict[str, YamlValue], dict[str, YamlValue]]:
    """Variables of the ranks, and those whose values must not be in a file."""
    env: dict[str, YamlValue] = {}
    secrets: dict[str, YamlValue] = {}
    containers = [workload.trainers[0].pod.main, *((workload.mpirun,) if workload.mpirun else ())]
    for each in (variable for container in containers for variable in container.env):
        reserved = each.name in RESERVED_NAMES or each.name.startswith((*RESERVED_PREFIXES, "OMPI_MCA_plm"))
        if reserved or not re.fullmatch(ENV_NAME_PATTERN, each.name):
            continue
        if each.secret or (each.value and SECRET_NAME.search(each.name)):
            secrets[each.name] = {"env": each.name}
        elif isinstance(each.value, str | int | float):
            env[each.name] = str(each.value).lower() if isinstance(each.value, bool) else str(each.value)
    return {name: value for name, value in env.items() if name not in secrets}, secrets


def _resources(workload: TrainingWorkload, container: PodContainer) -> dict[str, YamlValue]:
    pod = workload.trainers[0].pod
    mount = container.mount_of(SHM)
    volume = pod.volume(mount.volume) if mount else None
    cpu = str(container.amounts.get("cpu", ""))
    amounts: dict[str, YamlValue] = {}
    if re.fullmatch(r"[1-9][0-9]{0,4}", cpu):
        amounts["cpu"] = int(cpu)
    elif re.fullmatch(r"[1-9][0-9]{0,6}m", cpu):
        amounts["cpu"] = int(cpu[:-1]) / 1000
    sizes = {"memory": container.amounts.get("memory"), "shm": volume.settings.get("sizeLimit") if volume else None}
    for name, size in sizes.items():
        if isinstance(size, str) and re.fullmatch(SIZE_PATTERN, size) and size[0] != "0":
            amounts[name] = size
    return amounts


def _target_lines(workload: TrainingWorkload) -> Iterator[str]:
    """What belongs to the place instead of the job, and what has no place in holdfast, one comment each."""
    pod = workload.trainers[0].pod
    claims = [str(volume.settings.get("claimName")) for volume in pod.volumes if volume.kind == "persistentVolumeClaim"]
    fields = {
        "priorityClassName": "priority_class",
        "imagePullSecrets": "image_pull_secrets",
        "nodeSelector": "node_selector",
        "tolerations": "tolerations",
    }
    present = [ours for theirs, ours in fields.items() if pod.spec.get(theirs)]
    if claims:
        yield f"Target: `volume: {{claim: {printable(claims[0])}}}`, mounted at /holdfast; ranks see its `folders`."
        shown = [f"{each.folder} ({each.volume})" for each in pod.main.mounts if each.folder != SHM]
        yield f"Paths in the job may be on the manifest's mounts: {printable(', '.join(shown), 300)}."
    found = rdma_device(pod)
    if found and found[1] in pod.main.amounts:
        count = as_count(pod.main.amounts[found[1]])
        per_node = f", per_node: {count}" if count else ""
        yield f"Target: `fabric_device: {{resource: {printable(found[1])}{per_node}}}`."
    if present:
        yield f"Target: {', '.join(present)} are fields of the target file."
    lost = [each.name for each in pod.containers if each is not pod.main]
    lost += [str(name) for name in ("initContainers", "affinity", "serviceAccountName") if pod.spec.get(name)]
    if lost:
        yield f"Not carried over: {printable(', '.join(lost), 300)}."
    if pod.main.working_dir:
        folder = printable(pod.main.working_dir)
        yield f"The manifest's working directory is {folder}; holdfast ships the folder of this file."
    unset = [each.name for each in pod.main.env if each.value is None and not each.secret]
    unset += [each.name for each in pod.main.env if each.name in RESERVED_NAMES or each.name.startswith("PET_")]
    if unset:
        yield f"Variables not carried over: {printable(', '.join(unset), 300)}."
