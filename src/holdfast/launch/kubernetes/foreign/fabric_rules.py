"""Rules on the network between a workload's pods: interfaces, RDMA devices, and the variables that choose them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath

from msgspec import Struct

from holdfast.fabric.catalog import CATALOG
from holdfast.findings import Owner, Severity
from holdfast.job.yaml_source import Data, Path, printable
from holdfast.launch.kubernetes.foreign.json_patch import Patch, append, put, remove
from holdfast.launch.kubernetes.foreign.mistake import Mistake, named
from holdfast.launch.kubernetes.foreign.training_workload import (
    NodeGroup,
    PodContainer,
    PodForm,
    TrainingWorkload,
    Word,
)
from holdfast.preflight.interfaces import Interface, chosen_by_nccl, named_exactly

_MPIRUN_NAMES = frozenset({"mpirun", "mpiexec", "orterun"})
_MULTUS = "k8s.v1.cni.cncf.io/networks"
_GKE_INTERFACES = "networking.gke.io/interfaces"
_INFINIBAND_FOLDER = "/dev/infiniband"


class RdmaDevice(Struct, frozen=True, kw_only=True):
    """A kind of device by which pods reach an RDMA fabric."""

    resource: re.Pattern[str]
    fabric: str
    """Name in the fabric catalogue; empty if it has none."""
    net: str
    """The value of NCCL_NET with which NCCL uses nothing else."""
    locks_memory: bool = True
    """Whether the container itself must be allowed to lock memory."""


DEVICES: tuple[RdmaDevice, ...] = (
    # EKS's machine images let every container lock memory.
    RdmaDevice(resource=re.compile(r"vpc\.amazonaws\.com/efa"), fabric="efa", net="AWS Libfabric", locks_memory=False),
    # GKE's gIB plugin; https://cloud.google.com/ai-hypercomputer/docs/nccl/overview
    RdmaDevice(resource=re.compile(r"networking\.gke\.io\.networks/rdma-.*"), fabric="", net="gIB"),
    RdmaDevice(
        resource=re.compile(r"rdma/.+|[\w.-]+/.*(rdma|hostdev|infiniband|roce|mlnx|hca|sriov.*ib).*"),
        fabric="infiniband",
        net="IB",
    ),
)
"""Devices by resource name; the first that matches."""


def rdma_device(pod: PodForm) -> tuple[RdmaDevice, str] | None:
    """The RDMA device that a pod's ranks can reach, and the field that shows it; None without one."""
    for name in pod.main.amounts:
        for device in DEVICES:
            if device.resource.fullmatch(name):
                return device, name
    if pod.main.mount_of(_INFINIBAND_FOLDER):
        return DEVICES[-1], _INFINIBAND_FOLDER
    return None


def socket_interface(workload: TrainingWorkload) -> Iterator[Mistake]:
    """A pod has the interfaces lo and eth0, and those that annotations attach; not those of its machine."""
    if not workload.is_distributed:
        return
    for group in workload.groups:
        for container in group.pod.containers:
            yield from _interfaces_of(workload, group, container)


_IFNAME: dict[str, Callable[[str, Iterable[Interface]], Iterator[tuple[str, tuple[Interface, ...]]]]] = {
    "NCCL_SOCKET_IFNAME": chosen_by_nccl,
    "GLOO_SOCKET_IFNAME": named_exactly,
}


def _interfaces_of(workload: TrainingWorkload, group: NodeGroup, container: PodContainer) -> Iterator[Mistake]:
    pod = group.pod
    interfaces = [Interface(name=name) for name in ("lo", *_pod_interfaces(pod))]
    for name, choose in _IFNAME.items():
        for value, path, replaced in _assignments(container, name):
            if "$" in value or not pod.complete:
                continue
            names = {each.name for _, chosen in choose(value, interfaces) for each in chosen} - {"lo"}
            if names or (pod.host_network and value.strip("=") != "lo"):
                continue
            right = "^lo,docker" if pod.host_network and name.startswith("NCCL") else "eth0"
            has = "the machine's interfaces" if pod.host_network else ", ".join(_pod_interfaces(pod))
            yield Mistake(
                code="manifest-socket-interface",
                what=f"`{name}={printable(value)}` names no interface of the pod by which others can reach it: the "
                "ranks of different pods cannot connect",
                path=path,
                remedy=f"Write `{right}`: the pods of `{group.name}` have {has} besides lo.",
                patch=put(workload.target, path, replaced(right)),
                severity=Severity.ERROR,
                evidence=(f"{name}={printable(value)}",),
            )


def _pod_interfaces(pod: PodForm) -> tuple[str, ...]:
    annotations = {key: value for key, value in pod.annotations.items() if isinstance(value, str)}
    attached = annotations.get(_MULTUS, "")
    names = re.findall(r"@([\w.-]+)|\"interface\"\s*:\s*\"([\w.-]+)\"", attached)
    numbered = [f"net{number}" for number in range(1, 17)] if attached else []
    gke = re.findall(r"\"interfaceName\"\s*:\s*\"([\w.-]+)\"", annotations.get(_GKE_INTERFACES, ""))
    return ("eth0", *(first or second for first, second in names), *numbered, *(each for each in gke if each != "eth0"))


def _assignments(container: PodContainer, name: str) -> Iterator[tuple[str, Path, Callable[[str], Data]]]:
    """Each value that a container gives to a variable: the value, its field, and that field with another value."""
    for each in container.env:
        if each.name == name and isinstance(each.value, str):
            yield each.value, (*each.path, "value"), lambda right: right
    pattern = re.compile(rf"(?<![\w])({name}=[\"']?)([^\s\"';]+)")
    for word in container.words:
        found = pattern.search(word.text)
        if found:
            yield found[2], word.path, _in_word(pattern, word)


def _in_word(pattern: re.Pattern[str], word: Word) -> Callable[[str], Data]:
    return lambda right: pattern.sub(lambda found: f"{found[1]}{right}", word.text)


def tcp_fallback(workload: TrainingWorkload) -> Iterator[Mistake]:
    """NCCL uses TCP if it finds no RDMA device, unless NCCL_NET names the only network that it may use."""
    if not (workload.has_gpus and workload.is_distributed) or workload.variable("NCCL_NET") is not None:
        return
    if workload.variable("NCCL_IB_DISABLE") == "1":
        return  # TCP is what its author wants, or `rdma_disabled` reports it
    group = workload.trainers[0]
    found = rdma_device(group.pod)
    if found is None:
        if group.pod.spec.get("resourceClaims") or not group.pod.complete:
            return
        yield Mistake(
            code="manifest-tcp-only",
            what=f"the pods of {named(workload.trainers)} request no RDMA device, so collectives use TCP",
            path=group.pod.main.resources_path,
            remedy="Request the cluster's device, such as `rdma/ib: 1` or `vpc.amazonaws.com/efa: 32`. If TCP is "
            "meant, write NCCL_NET=Socket, as the patch does.",
            patch=_set_variable(workload, "NCCL_NET", "Socket"),
            severity=Severity.INFO,
            owner=Owner.CLUSTER,
        )
        return
    device, shown = found
    yield Mistake(
        code="manifest-tcp-fallback",
        what=f"the pods request `{printable(shown)}`, but nothing keeps NCCL from TCP: if the device or its library "
        "does not work, the run continues several times slower",
        path=group.pod.main.resources_path,
        remedy=f"Set NCCL_NET={device.net}: NCCL then fails instead, with the reason in its log.",
        patch=_set_variable(workload, "NCCL_NET", device.net),
        evidence=(printable(shown),),
    )


def _set_variable(workload: TrainingWorkload, name: str, value: str) -> Patch:
    """Set a variable for the ranks: in the pods, or where `mpirun` starts them, on its command line."""
    if workload.mpirun is not None:
        return _with_mpirun_options(workload, workload.mpirun, ["-x", f"{name}={value}"])
    patch = Patch()
    for group in workload.trainers:
        patch += append(workload.target, (*group.pod.main.path, "env"), [{"name": name, "value": value}])
    return patch


def _with_mpirun_options(workload: TrainingWorkload, container: PodContainer, options: list[str]) -> Patch:
    """Add options after the word `mpirun`, in a list of words or in a script."""
    quoted = " ".join(f"'{each}'" if " " in each else each for each in options)
    for word in container.words:
        *folder, index = word.path
        if PurePath(word.text).name in _MPIRUN_NAMES and isinstance(index, int):
            words = workload.target.at(tuple(folder))
            if isinstance(words, list):
                return put(workload.target, tuple(folder), [*words[: index + 1], *options, *words[index + 1 :]])
        script = re.sub(
            r"(?<![\w.-])(mpirun|mpiexec|orterun)(?=\s)", lambda found: f"{found[0]} {quoted}", word.text, count=1
        )
        if script != word.text:
            return put(workload.target, word.path, script)
    return Patch()


def rdma_rights(workload: TrainingWorkload) -> Iterator[Mistake]:
    """RDMA locks memory, and a folder of devices is of no use without the right to open them."""
    for group in workload.trainers:
        pod, container = group.pod, group.pod.main
        found = rdma_device(pod)
        if found is None or container.privileged or not pod.complete:
            continue
        device, shown = found
        security: Path = (*container.path, "securityContext")
        if shown == _INFINIBAND_FOLDER:
            yield Mistake(
                code="manifest-rdma-rights",
                what=f"`{group.name}` mounts {_INFINIBAND_FOLDER}, whose devices a container may open only if it is "
                "privileged or a device plugin gave them to it",
                path=container.path,
                remedy="Request the device plugin's resource instead of the folder, or write `privileged: true`.",
                patch=put(workload.target, (*security, "privileged"), True),
                severity=Severity.ERROR,
                evidence=(f"mountPath: {_INFINIBAND_FOLDER}",),
            )
        elif device.locks_memory and not container.capabilities & {"IPC_LOCK", "ALL", "CAP_IPC_LOCK"}:
            yield Mistake(
                code="manifest-rdma-rights",
                what=f"`{group.name}` requests `{printable(shown)}` without the capability IPC_LOCK: where the "
                "container runtime limits locked memory, NCCL fails with `ibv_reg_mr failed` or uses TCP",
                path=(*container.resources_path, "limits", shown),
                remedy="Add IPC_LOCK. It takes effect for root; other users need LimitMEMLOCK=infinity of the runtime.",
                patch=append(workload.target, (*security, "capabilities", "add"), ["IPC_LOCK"]),
            )


def rdma_disabled(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Some variables turn off the fabric that the pods request."""
    found = next((each for group in workload.trainers if (each := rdma_device(group.pod))), None)
    if found is None:
        return
    device, shown = found
    for container in workload.containers():
        for name, off in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")):
            if name == "NCCL_IB_DISABLE" and device.fabric != "infiniband":
                continue
            for value, path, replaced in _assignments(container, name):
                if value.strip("\"'") != off:
                    continue
                right = "0" if name == "NCCL_IB_DISABLE" else device.net
                in_env = path[-1] == "value"
                yield Mistake(
                    code="manifest-rdma-disabled",
                    what=f"`{name}={off}` makes NCCL use TCP, and the pods request `{printable(shown)}`",
                    path=path,
                    remedy="Remove it, or do not request the device.",
                    patch=remove([path[:-1]]) if in_env else put(workload.target, path, replaced(right)),
                    evidence=(f"{name}={off}",),
                )


_NOT_FOR_RANKS = re.compile(
    r"(OMPI|PMIX|PRTE|PMI|MPI|MPIRUN|HYDRA|I_MPI|KUBERNETES|SSH)_.*|PATH|HOME|USER|PWD|SHELL|PS1"
)


def mpi_environment(workload: TrainingWorkload) -> Iterator[Mistake]:
    """Open MPI starts ranks by ssh, which passes no variables; `mpirun` passes those that `-x` names."""
    launcher = workload.mpirun
    implementation = workload.target.at(("spec", "mpiImplementation"))
    if launcher is None or implementation not in {None, "OpenMPI"} or "horovodrun" in launcher.text:
        return
    passed = set(re.findall(r"(?:^|\s)(?:-x|--x)\s+[\"']?([A-Za-z_]\w*)", launcher.text))
    listed = next((each.value for each in launcher.env if each.name == "OMPI_MCA_mca_base_env_list"), None)
    passed |= {each.partition("=")[0] for each in str(listed or "").split(";")}
    options: list[str] = []
    names: list[str] = []
    of_launcher = {each.name for each in launcher.env}
    variables = [*launcher.env, *(each for group in workload.trainers for each in group.pod.main.env)]
    for each in variables:
        used_here = re.search(rf"\$[({{]?{re.escape(each.name)}\b", launcher.text) and each in launcher.env
        if not each.name or each.name in {*passed, *names} or _NOT_FOR_RANKS.fullmatch(each.name) or used_here:
            continue
        if each.name not in of_launcher and not isinstance(each.value, str):
            continue  # a value that only the worker's pod knows
        names.append(each.name)
        options += ["-x", each.name if each.name in of_launcher else f"{each.name}={each.value}"]
    if names:
        shown = ", ".join(f"`{printable(name)}`" for name in names[:6]) + (", ..." if len(names) > 6 else "")
        yield Mistake(
            code="manifest-mpi-environment",
            what=f"{shown} {'is' if len(names) == 1 else 'are'} set in a pod but not passed to the ranks: `mpirun` "
            "starts them by ssh, which passes no variables",
            path=launcher.path,
            remedy="Name each in `mpirun -x NAME`.",
            patch=_with_mpirun_options(workload, launcher, options),
            severity=Severity.ERROR if any(name.startswith(("NCCL_", "FI_")) for name in names) else Severity.WARNING,
            evidence=(f"passed: {', '.join(sorted(passed - {''})) or 'none'}",),
        )


def fabric_of(workload: TrainingWorkload) -> str:
    """The catalogue's name of the fabric that a workload requests; empty if it requests none that holdfast knows."""
    found = next((each for group in workload.trainers if (each := rdma_device(group.pod))), None)
    return found[0].fabric if found and found[0].fabric in CATALOG else ""
