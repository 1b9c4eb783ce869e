"""Recognises lines that report a fault of a device, with the rules and numbers by which logs are diagnosed.

An agent uses it on the output of a rank that failed. RE2 alone searches the lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from holdfast.diagnose.knowledge import cuda, nccl, xid
from holdfast.diagnose.pattern_scan import compile_re2
from holdfast.diagnose.rules import RULES
from holdfast.events import DeviceFault

FAULT_OF_RULE: Mapping[str, DeviceFault] = {
    "xid-hardware": DeviceFault.RESET,
    "sxid-fatal": DeviceFault.NVLINK,
    "gpu-lost": DeviceFault.GPU,
    "gpu-reset-required": DeviceFault.RESET,
    "gsp-timeout": DeviceFault.RESET,
    "gpu-ecc": DeviceFault.MEMORY,
    "gpu-error-contained": DeviceFault.CONTAINED,
    "fabric-manager": DeviceFault.NOT_READY,
    "adapter-failed": DeviceFault.NIC,
    "rdma-async": DeviceFault.NIC_LINK_DOWN,
}
"""What a line of a rule says of a device, unless a number or an error's name in it says more."""

LINE_BYTES = 4000
"""Longest part of a line that is searched."""

_XID_RULES = (
    "xid-hardware",
    "xid-program",
    "xid-recorded",
    "xid-consequence",
    "sxid-fatal",
    "sxid-consequence",
    "sxid",
)
_STRENGTH = {fault: order for order, fault in enumerate(DeviceFault)}
_GROUP = re.compile(r"\(\?P<\w+>")
_Search = Callable[[bytes], Any]
_Answer = tuple[DeviceFault | None, ...]
"""What a reader says of a line: empty if it does not know it, else the fault, or None."""


def strongest_fault(lines: Iterable[str]) -> tuple[str, DeviceFault] | None:
    """The line that reports the strongest fault, and the fault; of equal ones the first."""
    found = ((line, fault) for line in lines if (fault := device_fault(line)) is not None)
    return min(found, key=lambda one: _STRENGTH[one[1]], default=None)


def device_fault(line: str) -> DeviceFault | None:
    """What a line says of a device; None for one that reports a fault of the program, or none."""
    data = line.encode("utf-8", "replace")[:LINE_BYTES]
    if _any_of_them()(data) is None:
        return None
    for read in (_numbered_by_driver, _named_by_cuda, _matched_by_rule, _named_by_nccl):
        if answer := read(data):
            return answer[0]
    return None


def _numbered_by_driver(line: bytes) -> _Answer:
    for code in _XID_RULES:
        if (found := _search(code)(line)) is not None:
            number = found.groupdict().get(b"xid")
            by_rule = FAULT_OF_RULE.get(code)
            return (by_rule if number is None else _xid_faults().get(int(number), by_rule),)
    return ()


def _named_by_cuda(line: bytes) -> _Answer:
    found = _cuda_search()(line)
    return () if found is None else (_cuda_faults()[next(name for name in found.groups() if name).decode()],)


def _matched_by_rule(line: bytes) -> _Answer:
    faults = (
        fault
        for code, fault in FAULT_OF_RULE.items()
        if code not in _XID_RULES and _search(code)(line) is not None and not _is_excluded(code, line)
    )
    return tuple(sorted(faults, key=_STRENGTH.__getitem__))


def _named_by_nccl(line: bytes) -> _Answer:
    found = _nccl_search()(line)
    return () if found is None else (_nccl_faults()[found[0].decode()],)


def _is_excluded(code: str, line: bytes) -> bool:
    return bool(RULES[code].exclude) and _compiled(RULES[code].exclude)(line) is not None


def _search(code: str) -> _Search:
    return _compiled(RULES[code].pattern)


@cache
def _compiled(pattern: str) -> _Search:
    return compile_re2(pattern).search


@cache
def _any_of_them() -> _Search:
    """One search for all the patterns, because most lines match none."""
    rules = (RULES[code].pattern for code in dict.fromkeys((*_XID_RULES, *FAULT_OF_RULE)))
    return _compiled("|".join(_GROUP.sub("(?:", each) for each in (*rules, _cuda_pattern(), _nccl_pattern())))


@cache
def _xid_faults() -> Mapping[int, DeviceFault | None]:
    return {row.number: row.fault for row in xid.XIDS}


@cache
def _cuda_faults() -> Mapping[str, DeviceFault | None]:
    """By text, runtime name and driver name."""
    return {name: row.fault for row in cuda.ERRORS for name in (row.text, row.runtime, row.name) if name}


def _cuda_pattern() -> str:
    """How torch, NCCL and the libraries of CUDA write an error."""
    texts, runtime, driver = (
        "|".join(re.escape(each) for each in names if each)
        for names in zip(*((row.text, row.runtime, row.name) for row in cuda.ERRORS), strict=True)
    )
    return (
        r"(?:CUDA error(?: \d{1,3})?: |C(?:uda|UDA) failure (?:\d{1,3} |\S{1,60} )?'|cuda runtime error \(\d{1,3}\) : )"
        rf"({texts})|\bcudaError({runtime})\b|\bCUDA_ERROR_({driver})\b"
    )


def _cuda_search() -> _Search:
    return _compiled(_cuda_pattern())


@cache
def _nccl_faults() -> Mapping[str, DeviceFault | None]:
    return {name: row.fault for row in nccl.RESULTS if row.fault for name in (row.name, row.text)}


def _nccl_pattern() -> str:
    return "|".join(re.escape(name) for name in _nccl_faults())


def _nccl_search() -> _Search:
    return _compiled(_nccl_pattern())
