"""Finds the machines that runs of a target would use, and what their device plugins offer. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from holdfast.launch.kubernetes.client.api_paths import KubeObject

GPU = re.compile(
    r"nvidia\.com/(gpu(\.shared)?|mig-.+)|amd\.com/gpu|habana\.ai/gaudi|gpu\.intel\.com/(i915|xe)"
    r"|huawei\.com/(Ascend\w+|npu)"
)
"""Resource names of GPUs and NPUs, and of parts of them."""


class RunMachines(Struct, frozen=True, kw_only=True, dict=True):
    """Machines with the GPUs of a target, or all machines if none has GPUs."""

    nodes: Sequence[KubeObject]
    gpu: str | None
    """Resource name of the target's GPUs; None if no machine has GPUs."""

    @property
    def name(self) -> str:
        """`machines with nvidia.com/gpu`."""
        return f"machines with {self.gpu}" if self.gpu else "machines"

    @cached_property
    def resources(self) -> Mapping[str, list[int]]:
        """Resources of device plugins, such as `nvidia.com/gpu`: the amount of each machine that has any."""
        return extended_resources(self.nodes)

    def seen(self, resource: str) -> str:
        """`4 of 5 machines with nvidia.com/gpu have 32 each of vpc.amazonaws.com/efa`."""
        amounts = self.resources[resource]
        return f"{len(amounts)} of {len(self.nodes)} {self.name} have {each_amount(amounts)} of {resource}"

    def common_taints(self) -> list[str]:
        """Keys of the taints that all these machines have and that keep pods away."""
        counts = Counter(key for node in self.nodes for key in dict.fromkeys(_taints(node)))
        return [key for key, count in counts.items() if count == len(self.nodes)]


def machines_for_runs(nodes: Sequence[KubeObject]) -> RunMachines:
    """The machines with the kind of GPU that most machines have, or all machines if none has GPUs."""
    found = {name: len(amounts) for name, amounts in extended_resources(nodes).items() if GPU.fullmatch(name)}
    if not found:
        return RunMachines(nodes=nodes, gpu=None)
    gpu = max(found, key=found.__getitem__)
    return RunMachines(nodes=[node for node in nodes if gpu in extended_resources([node])], gpu=gpu)


def extended_resources(nodes: Sequence[KubeObject]) -> dict[str, list[int]]:
    """Resources of device plugins, such as `nvidia.com/gpu`: the amount of each machine that has any."""
    amounts: dict[str, list[int]] = {}
    for node in nodes:
        for name, amount in node.get("status", {}).get("allocatable", {}).items():
            if "/" in name and str(amount).isdecimal() and int(amount):
                amounts.setdefault(name, []).append(int(amount))
    return amounts


def each_amount(amounts: Sequence[int]) -> str:
    """`8 each`, or `4 or 8 each`."""
    different = [str(amount) for amount in sorted(set(amounts))]
    return f"{', '.join(different[:-1])} or {different[-1]} each" if different[1:] else f"{different[0]} each"


def _taints(node: KubeObject) -> Iterator[str]:
    """Keys of a machine's taints that are not its state, such as `node.kubernetes.io/unschedulable`."""
    for taint in node.get("spec", {}).get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and not taint["key"].startswith("node.kubernetes.io/"):
            yield taint["key"]
