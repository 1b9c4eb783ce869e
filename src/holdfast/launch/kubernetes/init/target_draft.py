"""Writes a target file from what a cluster shows; each line has its reason as a comment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import require_extra
from holdfast.job.targets import Workload
from holdfast.job.yaml_source import as_yaml, printable
from holdfast.launch.kubernetes.client.api_paths import object_name
from holdfast.launch.kubernetes.init.fabric_guess import FabricGuess, guess_fabrics
from holdfast.launch.kubernetes.init.run_machines import (
    GPU,
    RunMachines,
    each_amount,
    extended_resources,
    machines_for_runs,
)
from holdfast.launch.kubernetes.storage_catalog import shared_driver

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.init.cluster_survey import ClusterSurvey, Listed

Line = tuple[str, str]
"""A line of the file and its comment."""

_MAX_WIDTH = 44
"""Longer lines do not shift the comments of the others."""
_TITLE = "# Where `--on {name}` runs jobs. `holdfast target init` wrote what the cluster shows; edit it freely.\n"
_HOST = "kubernetes.io/hostname"
_NO_QUEUE = "runs start without Kueue; from Kubernetes 1.37 on, `pod_group: true` places all nodes or none"


def draft_target(name: str, *, context: str | None, namespace: str | None) -> str:
    """The text of a target file for a cluster; raises HoldfastError if it does not answer."""
    require_extra("kubernetes", "kr8s", "a Kubernetes target needs")
    from holdfast.launch.kubernetes.client.api_errors import as_holdfast_error
    from holdfast.launch.kubernetes.init.cluster_survey import survey_cluster

    with as_holdfast_error():
        survey = survey_cluster(context, namespace)
    return target_text(name, survey)


def target_text(name: str, survey: ClusterSurvey) -> str:
    """The target file for a survey."""
    machines = machines_for_runs(survey.nodes or ())
    lines = [
        ("kind: kubernetes", "a cluster"),
        *_context(survey),
        (f"namespace: {as_yaml(survey.namespace)}", "where runs, the queue and the volume are"),
        *_workload(survey.workloads),
        *_queue(survey.local_queues),
        *_volume(survey.claims, survey.storage_classes),
        *_gpu_resource(survey.nodes, machines),
        *_tolerations(machines),
        *_fabric(survey, machines),
        *_topology(survey),
    ]
    width = max(len(text) for text, _ in lines if len(text) <= _MAX_WIDTH)
    body = "".join(f"{text:<{width}}  # {printable(reason, 300)}\n" for text, reason in lines)
    return _TITLE.format(name=name) + body


def _context(survey: ClusterSurvey) -> Iterator[Line]:
    if survey.context is not None:
        yield (
            f"context: {as_yaml(survey.context)}",
            "of the kubeconfig; without this line, its current one",
        )


def _workload(served: Sequence[Workload]) -> Iterator[Line]:
    if served:
        more = f"; also installed: {', '.join(served[1:])}" if served[1:] else ""
        yield f"workload: {served[0]}", f"its operator is installed{more}"
    else:
        yield "# workload: jobset", "no operator is installed that holdfast knows: JobSet is the default"


def _queue(queues: Listed) -> Iterator[Line]:
    names = _names(queues)
    if len(names) == 1:
        yield f"queue: {as_yaml(names[0])}", "the only LocalQueue here"
    else:
        yield "# queue: NAME", _none_of_several("LocalQueues", queues, _NO_QUEUE)


def _volume(claims: Listed, classes: Listed) -> Iterator[Line]:
    shared = [each for each in claims or () if "ReadWriteMany" in each["spec"].get("accessModes", ())]
    if len(shared) == 1:
        size = shared[0]["spec"].get("resources", {}).get("requests", {}).get("storage", "unknown size")
        yield (
            f"volume: {{claim: {as_yaml(object_name(shared[0]))}}}",
            f"the only ReadWriteMany claim here, {size}",
        )
    else:
        listed = None if claims is None else shared
        fit = [f"{object_name(each)} ({driver.name})" for each in classes or () if (driver := shared_driver(each))]
        by = f", with `storage_class` {' or '.join(fit)}" if fit else ""
        made = f"`size: 1TiB` creates one{by}"
        yield "# volume: {claim: NAME}", _none_of_several("ReadWriteMany claims", listed, made)


def _gpu_resource(nodes: Listed, machines: RunMachines) -> Iterator[Line]:
    if machines.gpu is None:
        seen = "this user may not list machines" if nodes is None else "no machine offers GPUs"
        yield "# gpu_resource: nvidia.com/gpu", f"{seen}; this is the default"
        return
    seen = {
        name: f"{len(amounts)} of {len(nodes or ())} machines have {each_amount(amounts)}"
        for name, amounts in extended_resources(nodes or ()).items()
        if GPU.fullmatch(name)
    }
    others = "".join(f"; {text} of {name}" for name, text in seen.items() if name != machines.gpu)
    choice = f"; chosen, as no other GPU is on more machines{others}" if others else ""
    yield f"gpu_resource: {machines.gpu}", f"{seen[machines.gpu]}{choice}"


def _tolerations(machines: RunMachines) -> Iterator[Line]:
    if keys := machines.common_taints():
        tolerated = ", ".join(f"{{key: {as_yaml(key)}}}" for key in keys)
        yield (
            f"tolerations: [{tolerated}]",
            f"all {machines.name} have {'this taint' if len(keys) == 1 else 'these taints'}",
        )


def _fabric(survey: ClusterSurvey, machines: RunMachines) -> Iterator[Line]:
    guesses = guess_fabrics(survey, machines)
    if len(guesses) == 1:
        (guess,) = guesses
        yield f"fabric: {guess.fabric.name}", guess.reason
        yield from _fabric_device(guess, survey)
    elif guesses:
        yield "# fabric: NAME", "; ".join(f"{each.fabric.name}: {each.reason}" for each in guesses)
    else:
        offered = _devices(survey, machines)
        yield "# fabric: NAME", f"the default is tcp: {offered}; `holdfast fabric` lists the names"


def _fabric_device(guess: FabricGuess, survey: ClusterSurvey) -> Iterator[Line]:
    networks = _names(survey.networks) if guess.fabric.pod.multus_attached else []
    fields = [
        *([f"resource: {as_yaml(guess.resource)}"] if guess.resource else []),
        *([f"per_node: {guess.per_node}"] if guess.per_node else []),
        *([f"network: {as_yaml(networks[0])}"] if len(networks) == 1 else []),
    ]
    if fields:
        yield f"fabric_device: {{{', '.join(fields)}}}", "what this cluster calls its devices"
    if guess.needs_number:
        yield "# fabric_device: {per_node: NUMBER}", f"{guess.reason}; name one number, and select its machines"
    if guess.fabric.pod.multus_attached and len(networks) != 1:
        reason = _none_of_several("Multus networks", survey.networks, "the fabric needs one")
        yield "# fabric_device: {network: NAME}", reason


def _devices(survey: ClusterSurvey, machines: RunMachines) -> str:
    """What machines offer besides GPUs, which may be the devices of a fabric."""
    if survey.nodes is None:
        return "this user may not list machines"
    others = [name for name in machines.resources if not GPU.fullmatch(name)]
    classes = _names(survey.device_classes)
    seen = [*others, *(f"DeviceClass {name}" for name in classes)]
    return f"{machines.name} offer {', '.join(seen)}" if seen else f"{machines.name} offer no device of a fabric"


def _topology(survey: ClusterSurvey) -> Iterator[Line]:
    """The levels of all Topology objects of Kueue, under the last word of their label."""
    labels = {
        level["nodeLabel"]: object_name(topology)
        for topology in survey.topologies or ()
        for level in topology["spec"]["levels"]
    }
    if not labels:
        seen = "this user may not list Topologies" if survey.topologies is None else "Kueue has no Topology here"
        yield "# topology_levels: {rack: LABEL}", f"{seen}; with one, a job can say `placement: rack`"
        return
    yield "topology_levels:", "names for `placement` in jobs, and the label of each"
    for name, label in _level_names(labels).items():
        domains = {value for node in survey.nodes or () if (value := node["metadata"].get("labels", {}).get(label))}
        count = f", {len(domains)} on {len(survey.nodes)} machines" if survey.nodes else ""
        yield f"  {as_yaml(name)}: {as_yaml(label)}", f"a level of Topology {labels[label]}{count}"


def _level_names(labels: Mapping[str, str]) -> dict[str, str]:
    """A name for each label: cloud.provider.com/topology-rack is `rack`; two with the same name keep the label's."""
    short = {
        label: "host" if label == _HOST else label.rpartition("/")[2].removeprefix("topology-") for label in labels
    }
    again = Counter(short.values())
    return {name if again[name] == 1 else label: label for label, name in short.items()}


def _none_of_several(what: str, listed: Listed, otherwise: str) -> str:
    """Why no object was chosen."""
    if listed is None:
        return f"this user may not list {what}; {otherwise}"
    names = _names(listed)
    return f"{what} here: {', '.join(names)}; name one" if names else f"no {what} here; {otherwise}"


def _names(listed: Listed) -> list[str]:
    return sorted(object_name(each) for each in listed or ())
