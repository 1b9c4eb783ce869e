"""Rules on what the operator does with a workload: placement, queueing, restarts, and the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from msgspec import Struct

from holdfast.findings import Severity
from holdfast.job.yaml_source import Data, Path, printable
from holdfast.launch.kubernetes.foreign.foreign_kinds import kind_of
from holdfast.launch.kubernetes.foreign.json_patch import Patch, append, put, remove
from holdfast.launch.kubernetes.foreign.manifest_source import as_count, as_list, as_mapping, as_text
from holdfast.launch.kubernetes.foreign.mistake import Mistake, named
from holdfast.launch.kubernetes.foreign.training_workload import QUEUE_LABEL, NodeGroup, PodForm, TrainingWorkload

RESTARTS = 10
"""The budget that patches write, as in a job file by default."""
_HOSTNAME = "kubernetes.io/hostname"
_PLACE = re.compile(r"zone|rack|block|spine|leaf|topology|clique|placement|capacityreservation|nodepool", re.IGNORECASE)


def no_topology(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Without a constraint, the scheduler spreads pods over the whole cluster."""
    target, kind = workload.target, kind_of(workload.target)
    groups = [group for group in workload.trainers if group.pod.complete]
    if not (workload.has_gpus and workload.is_distributed and groups) or kind is None or "Runtime" in target.kind:
        return
    object_level = str(as_mapping(target.at(("metadata", "annotations"))))
    inner = str([target.at((*group.path, "template", "metadata", "annotations")) for group in groups])
    if "topology" in object_level + inner or target.at(("spec", "networkTopology")):
        return
    if any(_is_placed(group.pod) for group in groups):
        return
    patch = Patch()
    for group in groups:
        patch += _place(workload, group, kind.job_label)
    yield Mistake(
        code="manifest-no-topology",
        what=f"nothing keeps the pods of {named(groups)} near each other: collectives between distant racks or zones "
        "are as slow as the slowest link between them",
        path=groups[0].pod.path,
        remedy="Ask for pods within one rack or block, by the label that the cluster's machines have for it. The patch "
        "prefers one zone.",
        patch=patch,
        evidence=(),
    )


def _is_placed(pod: PodForm) -> bool:
    affinity = as_mapping(pod.spec.get("affinity"))
    between_pods = str(affinity.get("podAffinity") or "") + str(pod.spec.get("topologySpreadConstraints") or "")
    keys = re.findall(r"'topologyKey': '([^']*)'", between_pods)
    machines = str(pod.spec.get("nodeSelector") or "") + str(affinity.get("nodeAffinity") or "")
    annotated = any("topology" in key for key in pod.annotations)
    return annotated or any(key != _HOSTNAME for key in keys) or _PLACE.search(machines) is not None


def _place(workload: TrainingWorkload, group: NodeGroup, job_label: str) -> Patch:
    target, pod = workload.target, group.pod
    if target.api_group == "batch.volcano.sh":
        return put(target, ("spec", "networkTopology"), {"mode": "soft", "highestTierAllowed": 2})
    if workload.queue:
        key = "kueue.x-k8s.io/podset-preferred-topology"
        return put(target, (*pod.path, "metadata", "annotations", key), "topology.kubernetes.io/zone")
    labels: dict[str, Data] = {job_label: target.name} if job_label else dict(pod.labels)
    term: dict[str, Data] = {
        "weight": 100,
        "podAffinityTerm": {"labelSelector": {"matchLabels": labels}, "topologyKey": "topology.kubernetes.io/zone"},
    }
    path: Path = (*pod.spec_path, "affinity", "podAffinity", "preferredDuringSchedulingIgnoredDuringExecution")
    return append(target, path, [term])


def no_gang(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Without a queue or a gang scheduler, pods are placed one by one."""
    target = workload.target
    if not (workload.has_gpus and workload.is_distributed) or "Runtime" in target.kind:
        return
    if target.api_group == "batch.volcano.sh":
        yield from _partial_gang(workload)
        return
    pods = [group.pod for group in workload.groups]
    scheduled = any(pod.spec.get("schedulerName") not in {None, "default-scheduler"} for pod in pods)
    grouped = any("pod-group" in key or "podgroup" in key or "gang" in key for pod in pods for key in pod.labels)
    grouped |= any("schedulingGroup" in pod.spec for pod in pods)
    if workload.queue or scheduled or grouped or target.at(("spec", "runPolicy", "schedulingPolicy")):
        return
    yield Mistake(
        code="manifest-no-gang",
        what="no queue or gang scheduler admits all pods together: two jobs can each hold half of the GPUs and "
        "wait for each other forever",
        path=("metadata",),
        remedy="Name a Kueue LocalQueue in the label `kueue.x-k8s.io/queue-name` (the patch: `user-queue`), the "
        "cluster's gang scheduler in `schedulerName`, or a PodGroup in `schedulingGroup`.",
        patch=put(target, ("metadata", "labels", QUEUE_LABEL), "user-queue"),
        evidence=(),
    )


def _partial_gang(workload: TrainingWorkload) -> Iterator[Mistake]:
    counts = [group.replicas for group in workload.groups]
    least = as_count(workload.target.at(("spec", "minAvailable")))
    if least is None or None in counts:
        return
    total = sum(count for count in counts if count is not None)
    if least < total:
        yield Mistake(
            code="manifest-no-gang",
            what=f"Volcano starts {least} of {total} pods as soon as there is room for these: the ranks on them "
            "wait for the others, and hold their GPUs",
            path=("spec", "minAvailable"),
            remedy=f"Write `minAvailable: {total}`.",
            patch=put(workload.target, ("spec", "minAvailable"), total),
        )


def restart_budget(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Restarts are neither forbidden nor unlimited."""
    check = _BUDGETS.get((workload.target.api_group, workload.target.kind))
    if check is not None:
        yield from check(workload)


def _pytorchjob_budget(workload: TrainingWorkload) -> Iterator[Mistake]:
    target = workload.target
    if target.at(("spec", "runPolicy", "backoffLimit")) is None and not target.at(
        ("spec", "elasticPolicy", "maxRestarts")
    ):
        yield Mistake(
            code="manifest-restart-budget",
            what="`runPolicy.backoffLimit` is not set: a program that always fails is restarted without end",
            path=("spec",),
            remedy=f"Write `runPolicy: {{backoffLimit: {RESTARTS}}}`.",
            patch=put(target, ("spec", "runPolicy", "backoffLimit"), RESTARTS),
            evidence=(),
        )


def _mpijob_budget(workload: TrainingWorkload) -> Iterator[Mistake]:
    target = workload.target
    if target.at(("spec", "runPolicy", "backoffLimit")) == 0:
        yield _no_restart(workload, ("spec", "runPolicy", "backoffLimit"), "`runPolicy.backoffLimit` is 0")


def _jobset_budget(workload: TrainingWorkload) -> Iterator[Mistake]:
    kind = kind_of(workload.target)
    path: Path = (*(kind.jobset if kind else ()), "failurePolicy", "maxRestarts")
    if workload.is_distributed and not as_count(workload.target.at(path)):
        yield _no_restart(workload, path, "`failurePolicy.maxRestarts` is 0, the default")


def _volcano_budget(workload: TrainingWorkload) -> Iterator[Mistake]:
    target = workload.target
    policies = [*as_list(target.at(("spec", "policies")))]
    policies += [each for group in workload.groups for each in as_list(target.at((*group.path, "policies")))]
    if not any(as_text(as_mapping(each).get("action")).startswith("Restart") for each in policies):
        events: list[Data] = [{"event": event, "action": "RestartJob"} for event in ("PodFailed", "PodEvicted")]
        yield Mistake(
            code="manifest-restart-budget",
            what="no policy restarts the job: one failed or evicted pod ends it, or leaves the others waiting",
            path=("spec", "policies"),
            remedy="Add the action RestartJob for the events PodFailed and PodEvicted; `maxRetry` limits it.",
            patch=append(target, ("spec", "policies"), events),
            evidence=(),
        )


def _no_restart(workload: TrainingWorkload, path: Path, why: str) -> Mistake:
    return Mistake(
        code="manifest-restart-budget",
        what=f"{why}: the first failed pod or machine ends the job",
        path=path,
        remedy=f"Write `{path[-1]}: {RESTARTS}`.",
        patch=put(workload.target, path, RESTARTS),
        evidence=(),
    )


_BUDGETS: dict[tuple[str, str], Callable[[TrainingWorkload], Iterator[Mistake]]] = {
    ("kubeflow.org", "PyTorchJob"): _pytorchjob_budget,
    ("kubeflow.org", "MPIJob"): _mpijob_budget,
    ("jobset.x-k8s.io", "JobSet"): _jobset_budget,
    ("trainer.kubeflow.org", "TrainingRuntime"): _jobset_budget,
    ("trainer.kubeflow.org", "ClusterTrainingRuntime"): _jobset_budget,
    ("batch.volcano.sh", "Job"): _volcano_budget,
}


def lone_restart(workload: TrainingWorkload) -> Iterator[Mistake]:
    """A JobSet restarts all pods together, but only after its Jobs have stopped restarting single ones."""
    kind = kind_of(workload.target)
    if kind is None or not kind.jobset or not workload.is_distributed:
        return
    for group in workload.trainers:
        job: Path = (*group.path, "template", "spec")
        limit, policy = workload.target.at((*job, "backoffLimit")), group.pod.spec.get("restartPolicy")
        if as_count(limit) == 0 and policy == "Never":
            continue
        shown = "6, the default" if limit is None else printable(str(limit))
        yield Mistake(
            code="manifest-lone-restart",
            what=f"a failed pod of `{group.name}` is restarted alone (backoffLimit: {shown}; restartPolicy: "
            f"{printable(str(policy))}): its ranks cannot rejoin, and the others wait until their collective times out",
            path=(*job, "backoffLimit"),
            remedy="Write `backoffLimit: 0` and `restartPolicy: Never`: the JobSet then restarts all pods together.",
            patch=put(workload.target, (*job, "backoffLimit"), 0)
            + put(workload.target, (*group.pod.spec_path, "restartPolicy"), "Never"),
            evidence=(),
        )


def never_ends(workload: TrainingWorkload) -> Iterator[Mistake]:
    """A StatefulSet keeps its pods running: it restarts a program that has finished."""
    target = workload.target
    if target.kind != "StatefulSet":
        return
    replicas = target.at(("spec", "replicas")) or 1
    gone = ("serviceName", "podManagementPolicy", "updateStrategy", "revisionHistoryLimit", "selector", "replicas")
    patch = Patch()
    if not target.at(("spec", "volumeClaimTemplates")):
        pod = workload.groups[0].pod
        service = target.at(("spec", "serviceName"))
        values: list[tuple[Path, Data]] = [
            (("apiVersion",), "batch/v1"),
            (("kind",), "Job"),
            (("spec", "completionMode"), "Indexed"),
            (("spec", "completions"), replicas),
            (("spec", "parallelism"), replicas),
            (("spec", "backoffLimit"), RESTARTS),
            ((*pod.spec_path, "restartPolicy"), "Never"),
            *((((*pod.spec_path, "subdomain"), service),) if service else ()),
        ]
        for path, value in values:
            patch += put(target, path, value)
        patch += remove([("spec", field) for field in gone if target.at(("spec", field)) is not None])
    yield Mistake(
        code="manifest-never-ends",
        what="a StatefulSet restarts its pods also after the program has finished, and without a limit when it fails",
        path=("kind",),
        remedy="Make it an indexed Job, whose pods have the same host names; the patch is for the file, not for an "
        "object in the cluster."
        if patch.steps
        else "Make it an indexed Job, whose pods have the same host names; its volumeClaimTemplates become claims.",
        patch=patch,
    )


def ordered_start(workload: TrainingWorkload) -> Iterator[Mistake]:
    """By default a StatefulSet creates a pod only when the one before it is ready."""
    target = workload.target
    if target.kind == "StatefulSet" and workload.is_distributed:
        if target.at(("spec", "podManagementPolicy")) == "Parallel":
            return
        yield Mistake(
            code="manifest-ordered-start",
            what="pods are created one after the other, each when the one before it is ready: a readiness probe that "
            "waits for the rendezvous never succeeds",
            path=("spec",),
            remedy="Write `podManagementPolicy: Parallel`.",
            patch=put(target, ("spec", "podManagementPolicy"), "Parallel"),
            evidence=(),
        )


class _LauncherNumber(Struct, frozen=True, kw_only=True):
    """An option of a launcher that repeats a number of the manifest."""

    option: str
    pattern: str
    limit: int | None
    """The manifest's number; None if it is unknown."""
    unit: str
    must_equal: bool = False

    def contradicts(self, value: int) -> bool:
        """Whether the launcher waits or fails with this value."""
        return self.limit is not None and (value != self.limit if self.must_equal else value > self.limit)


def rank_count(workload: TrainingWorkload) -> Iterator[Mistake]:
    """The launcher's own numbers agree with the pods and GPUs."""
    for group in workload.groups:
        for number in _launcher_numbers(workload, group):
            for path, value, replaced in _options(group, number.pattern):
                if number.limit is None or not number.contradicts(value):
                    continue
                yield Mistake(
                    code="manifest-rank-count",
                    what=f"`{number.option}` is {value}, and the manifest has {number.limit} {number.unit}: the "
                    "launcher waits or fails",
                    path=path,
                    remedy=f"Write `{number.option} {number.limit}`, or change the manifest's number.",
                    patch=put(workload.target, path, replaced(number.limit)),
                    severity=Severity.ERROR,
                    evidence=(f"{number.option} {value}",),
                )


def _launcher_numbers(workload: TrainingWorkload, group: NodeGroup) -> tuple[_LauncherNumber, ...]:
    nodes = workload.nodes
    if group.launches:
        slots = as_count(workload.target.at(("spec", "slotsPerWorker"))) or 1
        ranks = nodes * slots if nodes is not None and workload.target.kind == "MPIJob" else None
        return (_LauncherNumber(option="-np", pattern=r"--?np?", limit=ranks, unit="slots"),)
    return (
        _LauncherNumber(option="--nnodes", pattern="--nnodes", limit=nodes, unit="pods with ranks", must_equal=True),
        _LauncherNumber(
            option="--nproc_per_node",
            pattern="--nproc[-_]per[-_]node",
            limit=group.pod.main.gpus or None,
            unit="GPUs in each pod",
        ),
    )


def _options(group: NodeGroup, option: str) -> Iterator[tuple[Path, int, Callable[[int], Data]]]:
    """The whole numbers of an option: its field, its value, and that field with another value."""
    inline = re.compile(rf"(?<!\S)({option}(?:=|\s+))([0-9]{{1,6}})(?![:\w.])")
    for container in group.pod.containers:
        before = ""
        for word in container.words:
            found = inline.search(word.text)
            if found:
                text = word.text
                start, end = found.span(2)
                yield (
                    word.path,
                    int(found[2]),
                    lambda most, text=text, start=start, end=end: f"{text[:start]}{most}{text[end:]}",
                )
            elif re.fullmatch(option, before) and re.fullmatch("[0-9]{1,6}", word.text):
                yield word.path, int(word.text), str
            before = word.text
