"""Where pods or volumes may be, by the labels of machines: the part of Kubernetes' node affinity that is required."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.launch.kubernetes.client.api_paths import KubeObject

Terms = Sequence[Sequence[Mapping[str, Any]]]
"""Alternatives, of each all expressions hold; empty if every machine is right."""


def of_patch(patch: Mapping[str, Any]) -> Terms:
    """The machines that a target's `pod.patch` requires."""
    affinity = patch.get("spec", {}).get("affinity", {}).get("nodeAffinity", {})
    return _of_selector(affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}))


def of_volume(volume: KubeObject) -> Terms:
    """The machines that can mount a PersistentVolume."""
    return _of_selector(volume.get("spec", {}).get("nodeAffinity", {}).get("required", {}))


def of_class(storage_class: KubeObject) -> Terms:
    """The machines that can mount the volumes that a StorageClass makes."""
    return [
        [{"operator": "In", **each} for each in term.get("matchLabelExpressions", ())]
        for term in storage_class.get("allowedTopologies", ())
    ]


def admits(terms: Terms, node: KubeObject) -> bool:
    """Whether a machine is one of these."""
    labels = node["metadata"].get("labels", {})
    return not terms or any(all(_holds(each, labels) for each in term) for term in terms)


def text(terms: Terms) -> str:
    """`topology.kubernetes.io/zone a`, in words."""
    return " or ".join(" and ".join(_words(each) for each in term) for term in terms)


def places(terms: Terms, nodes: Sequence[KubeObject]) -> Iterator[str]:
    """Where machines are instead: for each label of these terms, its values and how many machines have each."""
    for key in dict.fromkeys(each["key"] for term in terms for each in term):
        values = Counter(node["metadata"].get("labels", {}).get(key, "no value") for node in nodes)
        yield f"machines with {key}: {', '.join(f'{value} ({count})' for value, count in sorted(values.items()))}"


def _of_selector(selector: Mapping[str, Any]) -> Terms:
    return [term.get("matchExpressions", ()) for term in selector.get("nodeSelectorTerms", ())]


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether labels satisfy an expression; true for the operators Gt and Lt, which no driver uses."""
    value, values = labels.get(expression["key"]), expression.get("values", ())
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return True


def _words(expression: Mapping[str, Any]) -> str:
    values = ", ".join(expression.get("values", ()))
    operator = "" if expression["operator"] == "In" else f" {expression['operator']}"
    return f"{expression['key']}{operator} {values}".rstrip()
