"""The environment of a container: literals, expansions, fields of its pod, config maps and secrets."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lab.kubelet.api import KubeObject

_REFERENCE = re.compile(r"\$\$|\$\(([-._A-Za-z0-9]+)\)")
_ENTRY = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

Read = Callable[[str, str, bool], Awaitable[Mapping[str, str]]]
"""Reads `configmaps` or `secrets` by name; empty if the object is optional and missing."""


class MissingReference(Exception):
    """An object that a pod needs is missing (so far); the message goes to its status."""


async def container_env(
    container: KubeObject, pod: KubeObject, addresses: Mapping[str, str], read: Read
) -> dict[str, str]:
    """A container's own variables; later ones can refer to earlier ones."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for kind, key in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if reference := source.get(key):
                entries = await read(kind, reference["name"], reference.get("optional", False))
                found |= {source.get("prefix", "") + name: value for name, value in entries.items()}
    for variable in container.get("env", ()):
        value = await _value(variable, container, pod, addresses, read, found)
        if value is not None:
            found[variable["name"]] = value
    return found


async def _value(
    variable: KubeObject,
    container: KubeObject,
    pod: KubeObject,
    addresses: Mapping[str, str],
    read: Read,
    found: Mapping[str, str],
) -> str | None:
    match variable.get("valueFrom"):
        case None:
            return expand(variable.get("value", ""), found)
        case {"fieldRef": {"fieldPath": path}}:
            return field(path, pod, addresses)
        case {"resourceFieldRef": reference}:
            return resource(reference, container)
        case {"configMapKeyRef": reference}:
            kind = "configmaps"
        case {"secretKeyRef": reference}:
            kind = "secrets"
        case other:
            raise MissingReference(f"the variable {variable['name']} comes from something unknown: {other}")
    optional = reference.get("optional", False)
    entries = await read(kind, reference["name"], optional)
    if reference["key"] not in entries and not optional:
        raise MissingReference(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
    return entries.get(reference["key"])


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Text with `$(NAME)` replaced if that variable exists, and `$$` by one dollar."""
    return _REFERENCE.sub(
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        text,
    )


def field(path: str, pod: KubeObject, addresses: Mapping[str, str]) -> str:
    """A field of a pod by its path in the downward API."""
    metadata, spec = pod["metadata"], pod["spec"]
    if entry := _ENTRY.fullmatch(path):
        return metadata.get(entry[1], {}).get(entry[2], "")
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.partition(".")[2], {})
        return "".join(f'{key}="{value}"\n' for key, value in sorted(entries.items()))
    top, _, name = path.partition(".")
    if top == "status":
        return addresses.get(name.removesuffix("s"), "")
    return str({"metadata": metadata, "spec": spec}[top].get(name, ""))


def resource(reference: KubeObject, container: KubeObject) -> str:
    """A limit or request of a container, in units of the reference's divisor."""
    kind, _, name = reference["resource"].partition(".")
    quantity = container.get("resources", {}).get(kind, {}).get(name, "0")
    divisor = reference.get("divisor", "1")
    return str(-(-_milli(quantity) // (_milli(divisor) or 1000)))


def decoded(one: KubeObject) -> dict[str, bytes]:
    """The entries of a config map or a secret."""
    if one.get("kind") == "Secret":
        return {key: base64.b64decode(value) for key, value in one.get("data", {}).items()}
    texts = {key: value.encode() for key, value in one.get("data", {}).items()}
    return texts | {key: base64.b64decode(value) for key, value in one.get("binaryData", {}).items()}


def parse_quantity(quantity: Any) -> int:
    """A quantity of memory in bytes."""
    return _milli(str(quantity)) // 1000


def _milli(quantity: str) -> int:
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return int(float(number)) if unit == "m" else int(float(number) * 1000) * _UNITS[unit]
