"""The GPUs of a node as `nvidia-smi -q -x` and `nvidia-smi nvlink -s` describe them.

The forms are those of `nvsmi_device_v11.dtd` to v13, drivers 515 to 590; some names of fields differ between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.preflight.node_view import NodeView, NotLookedAt

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

UNLISTED_MEMORY_MIB = 1024
"""Memory in use by no listed process that is reported; the driver itself uses less."""

SMI_TIMEOUT_S = 6.0
"""Longest nvidia-smi may take: less than the 10 s that all checks before a start have together, since one that
initialises a GPU ends only after that. For eight GPUs it takes 2 s, and 30 s without persistence mode (Azure/aks-gpu,
pull request 105)."""

_QUERY = ("nvidia-smi", "-q", "-x")
_NVLINK_QUERY = ("nvidia-smi", "nvlink", "-s")

_END = "</nvidia_smi_log>"
_CLOCK_LISTS = re.compile(r"<supported_clocks>.*?</supported_clocks>", re.DOTALL)
"""Nine tenths of the text, which nothing here needs."""
_NO_VALUE = frozenset(
    ("N/A", "Not Supported", "Not Available", "Insufficient Permissions", "Requested functionality has been deprecated")
)
_UNREADABLE = frozenset(("ERR!", "Unknown Error", "GPU is lost", "GPU requires reset"))
_SLOWDOWN_PREFIX = re.compile(r"clocks_(?:event|throttle)_reason_")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")

_LIMITS: Mapping[str, tuple[str, ...]] = {
    "max SM clock, MHz": ("max_clocks/sm_clock",),
    "max memory clock, MHz": ("max_clocks/mem_clock",),
    "application graphics clock, MHz": ("applications_clocks/graphics_clock",),
    "application memory clock, MHz": ("applications_clocks/mem_clock",),
    "power limit, W": ("gpu_power_readings/current_power_limit", "power_readings/power_limit"),
}
"""What bounds a GPU's speed, with the fields of newer and older drivers."""

_REPAIR_FLAGS = (
    "retired_pages/pending_retirement",
    "remapped_rows/remapped_row_pending",
    "remapped_rows/remapped_row_failure",
    "ecc_errors/channel_repair_pending",
    "ecc_errors/tpc_repair_pending",
    "ecc_errors/unrepairable_memory",
    "ecc_errors/aggregate/sram_threshold_exceeded",
)

# GPU 3: Tesla V100-SXM2-32GB (UUID: GPU-4f1c2a66-8b1e-2f0d-9d0c-5f6d3a7c1b2e)
#          Link 2: 25.781 GB/s
#          Link 3: <inactive>
_LINKS_OF = re.compile(r"GPU \d+: .*\(UUID: (GPU-[0-9a-f-]+)\)")
_LINK = re.compile(r"\s+Link (\d+): (<inactive>|[\d.]+ GB/s)")


class BrokenReport(NotLookedAt):
    """nvidia-smi has printed XML that cannot be read."""


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A process that nvidia-smi lists under a GPU, with its pid on the machine, outside of containers."""

    pid: int
    kind: str
    """`C` for compute, `G` for graphics, `C+G`."""
    name: str
    used_mib: int | None


class Gpu(Struct, frozen=True, kw_only=True, eq=False):
    """A GPU; a field is empty, or None, where the driver gives no value."""

    index: int
    bus_id: str
    uuid: str
    minor: int | None
    """Its device file is /dev/nvidia followed by this number."""
    model: str
    mig_mode: str
    mig_devices: int
    persistence: str
    ecc: str
    uncorrectable: Mapping[str, int]
    """Counts of uncorrectable errors since the driver loaded, those above 0."""
    repairs: frozenset[str]
    """Names of the memory's repair flags that are set, such as `remapped_row_pending`."""
    recovery: str
    """What the driver requests, such as `Reset`; empty if nothing."""
    slowdowns: frozenset[str]
    """Active reasons for low clocks, such as `hw_thermal_slowdown`."""
    limits: Mapping[str, float]
    fabric: Mapping[str, str]
    """`state`, `status` and fields of health, such as `bandwidth`."""
    pcie_lanes: int | None
    used_mib: int | None
    processes: tuple[GpuProcess, ...]
    unreadable: tuple[str, ...]
    """Fields that the driver fails to read, with what it prints instead."""

    @property
    def divided(self) -> bool:
        """Whether MIG divides it into instances, which have no NVLink."""
        return self.mig_mode == "Enabled"


class SmiReport(Struct, frozen=True, kw_only=True):
    """An answer of `nvidia-smi -q -x`; one without GPUs holds only notes."""

    notes: tuple[str, ...]
    """Lines outside the XML: errors and warnings."""
    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


class GpuLinks(Struct, frozen=True, kw_only=True):
    """NVLinks of a GPU, by their numbers."""

    active: frozenset[int]
    inactive: frozenset[int]


def read_report(view: NodeView) -> SmiReport:
    """The node's GPUs. Call it by `view.once`: nvidia-smi takes up to a second."""
    return parse_report(view.run(_QUERY, SMI_TIMEOUT_S))


def read_links(view: NodeView) -> Mapping[str, GpuLinks]:
    """NVLinks by UUID of the GPU. Call it by `view.once`."""
    return parse_links(view.run(_NVLINK_QUERY, SMI_TIMEOUT_S))


def is_visible(index: int, uuid: str, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, if it is set, selects a GPU by index or by UUID prefix."""
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",")]
    return str(index) in names or any(name[:4] == "GPU-" and uuid.startswith(name) for name in names)


def parse_report(text: str) -> SmiReport:
    """Parse the XML; text without any becomes notes. Raises BrokenReport, also if it declares entities."""
    from xml.etree import ElementTree

    start, end = text.find("<?xml"), text.find(_END)
    if not 0 <= start < end:
        return SmiReport(notes=_lines(text))
    document = text[start : end + len(_END)]
    if "<!ENTITY" in document:  # nvidia-smi declares none; expanding nested ones can fill the memory
        raise BrokenReport("the XML of nvidia-smi declares entities")
    try:
        log = ElementTree.fromstring(_CLOCK_LISTS.sub("", document))
    except ElementTree.ParseError as error:
        raise BrokenReport(f"the XML of nvidia-smi is broken: {error}") from error
    return SmiReport(
        notes=_lines(text[:start] + "\n" + text[end + len(_END) :]),
        driver=_text(log, "driver_version"),
        cuda=_text(log, "cuda_version"),
        gpus=tuple(_gpu(index, element) for index, element in enumerate(log.iterfind("gpu"))),
    )


def parse_links(text: str) -> Mapping[str, GpuLinks]:
    """A GPU whose links are all inactive may have no lines of links, but a message."""
    found: dict[str, dict[int, bool]] = {}
    links: dict[int, bool] = {}
    for line in text.splitlines():
        if gpu := _LINKS_OF.match(line):
            links = found.setdefault(gpu[1], {})
        elif link := _LINK.match(line):
            links[int(link[1])] = link[2] != "<inactive>"
    return {
        uuid: GpuLinks(
            active=frozenset(link for link, active in links.items() if active),
            inactive=frozenset(link for link, active in links.items() if not active),
        )
        for uuid, links in found.items()
    }


def by_model(gpus: Iterable[Gpu]) -> Mapping[str, tuple[Gpu, ...]]:
    """Siblings: GPUs of one model on a node, which should not differ."""
    found: dict[str, tuple[Gpu, ...]] = {}
    for gpu in gpus:
        found[gpu.model] = (*found.get(gpu.model, ()), gpu)
    return found


def _gpu(index: int, element: Element) -> Gpu:
    return Gpu(
        index=index,
        bus_id=element.get("id", ""),
        uuid=_text(element, "uuid"),
        minor=_whole(_text(element, "minor_number")),
        model=_text(element, "product_name"),
        mig_mode=_text(element, "mig_mode/current_mig"),
        mig_devices=len(element.findall("mig_devices/mig_device")),
        persistence=_text(element, "persistence_mode"),
        ecc=_text(element, "ecc_mode/current_ecc"),
        uncorrectable=dict(_uncorrectable(element)),
        repairs=frozenset(path.rpartition("/")[2] for path in _REPAIR_FLAGS if _text(element, path) == "Yes"),
        recovery=_recovery(element),
        slowdowns=frozenset(_slowdowns(element)),
        limits=dict(_limits(element)),
        fabric=dict(_fabric(element)),
        pcie_lanes=_whole(_text(element, "pci/pci_gpu_link_info/link_widths/current_link_width").removesuffix("x")),
        used_mib=_whole(_text(element, "fb_memory_usage/used").removesuffix(" MiB")),
        processes=tuple(_processes(element)),
        unreadable=tuple(_fields_unreadable(element)),
    )


def _uncorrectable(element: Element) -> Iterator[tuple[str, int]]:
    """Newer drivers count by kind of memory, older ones (GPUs before Turing) by single and double bits."""
    counts = [(each.tag, _value(each)) for each in element.iterfind("ecc_errors/volatile/*") if "uncorr" in each.tag]
    for name, value in [*counts, ("double_bit", _text(element, "ecc_errors/volatile/double_bit/total"))]:
        if count := _whole(value):
            yield name, count


def _recovery(element: Element) -> str:
    """Newer drivers name one action, older ones have a flag for each of two."""
    action = _text(element, "gpu_recovery_action")
    if not action and _text(element, "gpu_reset_status/reset_required") == "Yes":
        return "Reset"
    if not action and _text(element, "gpu_reset_status/drain_and_reset_recommended") == "Yes":
        return "Drain and Reset"
    return "" if action == "None" else action


def _slowdowns(element: Element) -> Iterator[str]:
    """Drivers before 535 call the reasons those of throttling."""
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in element.iterfind(f"{group}/*"):
            if _value(reason) == "Active":
                yield _SLOWDOWN_PREFIX.sub("", reason.tag)


def _limits(element: Element) -> Iterator[tuple[str, float]]:
    for name, paths in _LIMITS.items():
        for path in paths:
            if number := _DIGITS.match(_text(element, path)):
                yield name, float(number[0])


def _fabric(element: Element) -> Iterator[tuple[str, str]]:
    """A status of `Unknown Error` is a state of the fabric, not a failure to read it."""
    for pattern in ("fabric/*", "fabric/health/*"):
        for each in element.iterfind(pattern):
            if (value := (each.text or "").strip()) and value not in _NO_VALUE:
                yield each.tag, value


def _processes(element: Element) -> Iterator[GpuProcess]:
    for each in element.iterfind("processes/process_info"):
        if (pid := _whole(_text(each, "pid"))) is not None:
            yield GpuProcess(
                pid=pid,
                kind=_text(each, "type"),
                name=_text(each, "process_name"),
                used_mib=_whole(_text(each, "used_memory").removesuffix(" MiB")),
            )


def _fields_unreadable(element: Element) -> Iterator[str]:
    of_fabric = {*element.iterfind("fabric//")}
    for each in element.iter():
        if (value := (each.text or "").strip().strip("[]")) in _UNREADABLE and each not in of_fabric:
            yield f"{each.tag}: {value}"


def _text(element: Element, path: str) -> str:
    found = element.find(path)
    return "" if found is None else _value(found)


def _value(element: Element) -> str:
    text = (element.text or "").strip()
    return "" if text.strip("[]") in _NO_VALUE | _UNREADABLE else text


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())
