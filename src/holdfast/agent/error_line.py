"""Finds the last error line in a rank's log, and its position."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

TAIL_BYTES = 256 * 1024
LONG_LINE_BYTES = 64 * 1024 * 1024
"""Search limit for a last line longer than the tail, such as an error that prints a whole tensor."""
CONTEXT_BYTES = 16 * 1024
"""Bytes read before such a line and from its start."""
BLOCK_BYTES = 1024 * 1024
MAX_COUNTED_BYTES = 64 * 1024 * 1024
"""The error's line number is reported only for logs up to this size, because all lines must be counted."""
MAX_ERROR_CHARS = 500

# ValueError: bad shape
# torch.distributed.DistNetworkError: The client socket has timed out ...
# [rank1]: RuntimeError: [..] Connection closed by peer [127.0.0.1]:4242
# python: can't open file '/x/train.py': [Errno 2] No such file or directory
#
# Traceback (most recent call last):
#   File "/x/train.py", line 3, in <module>
# subprocess.TimeoutExpired: Command 'x' timed out after 3 seconds
#
# holdfast: error [optimizer-changed]: the checkpoint of step 20 is of another optimizer, or of other groups ...
#   evidence: optimizer: was AdamW, is SGD
# (an error that ends a rank; holdfast prints other findings on one line)
#
# What a program says before it aborts itself:
# terminate called after throwing an instance of 'std::runtime_error'
#   what():  bad shape
# python3: /opt/ttmlir-toolchain/include/llvm/ADT/ArrayRef.h:253: const T &llvm::ArrayRef<long>::operator[](size_t) ...
#   ... const [T = long]: Assertion `Index < Length && "Invalid index!"' failed.  (one line)
# double free or corruption (out)
# free(): double free detected in tcache 2
# *** stack smashing detected ***: terminated
# F1022 19:11:21.141865 516 516 reference_count.cc:154] Check failed: object_id_refs_.count(object_id) == 0 Tried ...
# [rank1]:[F513 12:46:14.495035780 ProcessGroupNCCL.cpp:1614] [PG ID 0 PG GUID 0(default_pg) Rank 1] ...
# [rank0]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 0] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600 ...
_ERROR = re.compile(
    rb"^(?:\[rank(?P<rank>\d+)\]:\s*)?"
    rb"(?:Traceback \(most recent call last\):\r?\n"
    rb"(?:(?:\[rank\d+\]: )?[ \t].*\n)*(?:\[rank\d+\]: )?(?P<raised>[^\s\[].*)"
    rb"|(?P<line>(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Iteration)\b.*)"
    rb"|(?:Fatal Python error: .*)"
    rb"|(?:\S*python[\w.]*: can't open file .*)"
    rb"|(?:holdfast: error \[[a-z\d-]+\]: .*(?:\n  (?:where|evidence|what to do|owner): .*)+))"
    rb"|(?P<abort>(?:terminate called .*(?:\r?\n *what\(\): .*)?)"
    rb"|(?:(?:\S+: )?[^\s:]+:\d+: .*Assertion [`'].*' failed\.)"
    rb"|(?:double free or corruption|corrupted (?:size vs\. prev_size|double-linked list)"
    rb"|(?:free|\w*alloc|malloc_\w+|\w+_chunk|tcache_\w+)\(\): |\*\*\* [\w ]+ detected \*\*\*).*"
    rb"|(?:F\d{4,8} [\d:.]+(?: +\d+)+ |\[F(?:\d{3,4} [\d:.]+)? )\S+:\d+\] .*))$",
    re.MULTILINE,
)

_LINE_END = re.compile(r"\s*\n\s*")
_EVIDENCE = re.compile(r"\n  evidence: .*")
"""The log keeps the evidence; here it could leave no space for the remedy."""

# torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
# [rank1]:[F513 12:46:14.4 ProcessGroupNCCL.cpp:1614] [..] Terminating the process after attempting to dump debug ...
# F0929 17:42:48.594200 1044529 client.h:77] Terminating process because the JAX distributed service detected ...
_CONSEQUENCE = re.compile(
    rb"torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError:"
    rb"|\[?F.*\] Terminating (?:the process after attempting to dump|process because the JAX distributed service)"
)
"""torchrun, torch's heartbeat monitor or JAX write this after a rank has failed; its own error stands before it."""

# Fatal Python error: Aborted
_ABORTED = b"Fatal Python error: Aborted"
"""Python's faulthandler writes this for SIGABRT, after the program has said why it aborts."""


def last_error_line(log: Path) -> tuple[str, str]:
    """The last error line of a log and its position as `file:line`; two empty strings if there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            tail = max(0, size - TAIL_BYTES)
            found = _last_match(file, tail, size)
            if found is None and tail > 0:
                begin = _line_start(file, tail)
                found = _last_match(file, max(0, begin - CONTEXT_BYTES), begin + CONTEXT_BYTES)
            if found is None:
                return "", ""
            return _shown(found), _place(log, file, found, size)
    except OSError:
        return "", ""


def errors_of_ranks(log: Path) -> dict[int, tuple[str, str]]:
    """The last error line of each rank that torch names in a launcher's log, and its position; in the log's order."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            found = _matches(file, max(0, size - TAIL_BYTES), size)
            ranks = {each.rank for each in found if each.rank >= 0}
            last = [_last_of([each for each in found if each.rank == rank]) for rank in ranks]
            last.sort(key=lambda each: each.at)
            return {each.rank: (_shown(each), _place(log, file, each, size)) for each in last}
    except OSError:
        return {}


class _Match(NamedTuple):
    """An error line, with its offset and the rank that torch has put before it, or -1."""

    at: int
    text: bytes
    rank: int
    is_abort: bool


def _shown(found: _Match) -> str:
    words = _EVIDENCE.sub("", found.text.decode(errors="replace").strip())
    return _LINE_END.sub(" ", words)[:MAX_ERROR_CHARS]


def _place(log: Path, file: BinaryIO, found: _Match, size: int) -> str:
    return f"{log}:{_newlines(file, found.at) + 1}" if size <= MAX_COUNTED_BYTES else str(log)


def _last_match(file: BinaryIO, begin: int, end: int) -> _Match | None:
    """The last error line in this part of the file."""
    found = _matches(file, begin, end)
    return _last_of(found) if found else None


def _last_of(found: Sequence[_Match]) -> _Match:
    """The last of these that says why the process ended."""
    if len(found) > 1 and found[-1].text == _ABORTED and found[-2].is_abort:
        found = found[:-1]
    ranks_own = [each for each in found if not _CONSEQUENCE.match(each.text)]
    return (ranks_own or found)[-1]


def _matches(file: BinaryIO, begin: int, end: int) -> list[_Match]:
    """All error lines in this part of the file."""
    file.seek(begin)
    text = file.read(end - begin)
    whole = text.find(b"\n") + 1 if begin else 0
    if begin and not whole:
        return []  # all of it is one line
    matches = ((each.lastgroup or "", each) for each in _ERROR.finditer(text, whole))
    return [
        _Match(begin + each.start(group), each[group], int(each["rank"] or -1), group == "abort")
        for group, each in matches
    ]


def _line_start(file: BinaryIO, at: int) -> int:
    """Offset at which the line containing `at` starts, searched at most `LONG_LINE_BYTES` back."""
    furthest = max(0, at - LONG_LINE_BYTES)
    while at > furthest:
        begin = max(furthest, at - BLOCK_BYTES)
        file.seek(begin)
        newline = file.read(at - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        at = begin
    return furthest


def _newlines(file: BinaryIO, before: int) -> int:
    """Count the newlines before an offset."""
    file.seek(0)
    return sum(file.read(min(BLOCK_BYTES, before - at)).count(b"\n") for at in range(0, before, BLOCK_BYTES))
