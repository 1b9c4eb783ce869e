"""JSON patches (RFC 6902), which `kubectl patch --type=json` takes for objects of every kind.

Strategic-merge patches would be shorter, but Kubernetes does not support them for custom resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from holdfast.job.yaml_source import Data, Path
from holdfast.launch.kubernetes.foreign.manifest_source import ManifestObject


class PatchOperation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation of a patch; `value` is unset for `remove`."""

    op: Literal["add", "replace", "remove"]
    path: str
    """JSON pointer (RFC 6901)."""
    value: Data | msgspec.UnsetType = msgspec.UNSET


class Patch(Struct, frozen=True, kw_only=True):
    """Operations on one object, with the paths they change."""

    steps: tuple[tuple[Path, PatchOperation], ...] = ()

    @property
    def operations(self) -> tuple[PatchOperation, ...]:
        return tuple(operation for _, operation in self.steps)

    def __add__(self, other: Patch) -> Patch:
        return Patch(steps=(*self.steps, *other.steps))


NO_PATCH = Patch()


def pointer(path: Path) -> str:
    """The JSON pointer of a path."""
    return "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in path)


def put(target: ManifestObject, path: Path, value: Data) -> Patch:
    """Set the value at a path, with the mappings around it that are missing."""
    for length in range(1, len(path)):
        if not isinstance(target.at(path[:length]), dict | list):
            for key in reversed(path[length:]):
                value = {str(key): value}
            return _step("add", path[:length], value)
    return _step("replace" if target.at(path) is not None else "add", path, value)


def append(target: ManifestObject, path: Path, items: Sequence[Data]) -> Patch:
    """Add items to the list at a path, which may be missing."""
    if not items:
        return Patch()
    if not isinstance(target.at(path), list):
        return put(target, path, list(items))
    steps = Patch()
    for item in items:
        steps += _step("add", (*path, "-"), item)
    return steps


def remove(paths: Iterable[Path]) -> Patch:
    """Remove the values at paths; later items of a list first, so that the indexes before them stay valid."""
    steps = Patch()
    for path in sorted(set(paths), key=lambda path: [(isinstance(key, str), key) for key in path], reverse=True):
        steps += Patch(steps=((path, PatchOperation(op="remove", path=pointer(path))),))
    return steps


def _step(op: Literal["add", "replace"], path: Path, value: Data) -> Patch:
    return Patch(steps=((path, PatchOperation(op=op, path=pointer(path), value=value)),))


def apply(patch: Patch, target: ManifestObject) -> ManifestObject:
    """The object after the patch; its locations are those of the fields before it."""
    data = {key: _expanded(value) for key, value in target.data.items()}
    for path, operation in patch.steps:
        *parents, last = path
        here: Data = data
        for key in parents:
            if isinstance(here, dict):
                here = here[str(key)]
            elif isinstance(here, list) and isinstance(key, int):
                here = here[key]
        new = None if isinstance(operation.value, msgspec.UnsetType) else _expanded(operation.value)
        match here:
            case dict() if operation.op == "remove":
                del here[str(last)]
            case dict():
                here[str(last)] = new
            case list() if last == "-":
                here.append(new)
            case list() if isinstance(last, int) and operation.op == "remove":
                del here[last]
            case list() if isinstance(last, int):
                here[last] = new
            case _:
                raise KeyError(operation.path)
    return ManifestObject(file=target.file, data=data, locations=target.locations)


def _expanded(value: Data) -> Data:
    """A copy in which no two places share a value, as aliases of YAML do."""
    match value:
        case dict():
            return {key: _expanded(each) for key, each in value.items()}
        case list():
            return [_expanded(each) for each in value]
        case _:
            return value
