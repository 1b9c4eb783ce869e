"""Parses line prefixes for the process that wrote a line.

A line carries the prefixes of all the programs it passed through: kubectl, a launcher, torch, NCCL. Each gives a part;
none is required. timestamps.py parses the time.
"""

from __future__ import annotations

import re

from holdfast.diagnose.fact import ProcessRef
from holdfast.diagnose.log_chunk import LogSource

HEAD_CHARS = 400
"""How many bytes at the start of a line can be prefix."""

# n1:811:990 [3] NCCL INFO ...                                        NCCL, all versions
_NCCL = re.compile(r"(?P<host>[A-Za-z0-9][\w.-]*):(?P<pid>\d+):\d+ \[-?\d+\] ")
# n1:811 NCCL DIAG ...                                                 NCCL 2.31 and later
_NCCL_DIAG = re.compile(r"(?P<host>[A-Za-z0-9][\w.-]*):(?P<pid>\d+) NCCL DIAG")
# [rank3]:[E1120 ...   [Rank 2] ...   [PG ID 0 PG GUID 0(default_pg) Rank 1]   [1,3]<stderr>: (Open MPI)   rank=3
_RANKS = (
    re.compile(r"\[[Rr]ank ?(?P<rank>\d{1,7})\]"),
    re.compile(r"\[PG [^\]]{1,80}? Rank (?P<rank>\d{1,7})\]"),
    re.compile(r"^\[\d+,(?P<rank>\d{1,7})\]<std(?:out|err|diag)>"),
    re.compile(r"\b[Rr]ank[ =:]+(?P<rank>\d{1,7})\b"),
)
# [rank3]: message                                 torch and its launcher, for all that one rank writes
_OWN_RANK = re.compile(r"^(?:\d\S{9,39} )?(?:\[[a-z]+\d+\]:)?\[rank(?P<rank>\d{1,7})\]:")
# 3: message                                                           srun -l
_SRUN = re.compile(r"^ ?(?P<rank>\d{1,6}): ")
# [pod/worker-3/main] message                                          kubectl logs --prefix
_POD = re.compile(r"^\[pod/(?P<node>[\w.-]+)/[\w.-]+\] ")
# (RayWorker pid=811, ip=10.0.0.3) message                             Ray
_RAY = re.compile(r"\(\w[\w.:]* pid=(?P<pid>\d+)(?:, ip=(?P<host>[\d.:a-f]+))?\)")
# worker-1: message                                                    pdsh, DeepSpeed
_PDSH = re.compile(r"^(?P<host>[A-Za-z][\w-]*[\w.-]*\d): (?=\S)")
# Nov 20 10:00:00 n1 kernel: message                                   syslog
_SYSLOG = re.compile(r"^\w{3} [ \d]\d \d\d:\d\d:\d\d (?P<host>[\w.-]+) [\w./-]+(?:\[(?P<pid>\d+)\])?: ")
# 2026-11-20T10:00:00.123456+00:00 n1 kernel: message                  rsyslog, journalctl -o short-iso
_RSYSLOG = re.compile(
    r"^20\d\d-\d\d-\d\dT[\d:.,]{8,16}\S{0,6} (?P<host>[A-Za-z][\w.-]*) (?:kernel|[\w./-]+\[(?P<pid>\d+)\]): "
)
_HOSTS = (_NCCL, _NCCL_DIAG, _RAY, _SYSLOG, _RSYSLOG)


def parse_process(line: str, source: LogSource) -> ProcessRef:
    """The process that a line's prefixes name; its source supplies the rest."""
    head = line[:HEAD_CHARS]
    own = _OWN_RANK.match(head)  # more certain than a file's name, whose number may be that of a node
    rank, node, host, pid = int(own["rank"]) if own else source.rank, source.node, None, None
    for pattern in _HOSTS:
        if found := pattern.search(head):
            host, pid = found["host"], int(found["pid"]) if found["pid"] else None
            break
    else:
        if found := _PDSH.match(head):
            host = found["host"]
    if found := _POD.match(head):
        node = found["node"]
    if rank is None:
        rank = next((int(found["rank"]) for pattern in _RANKS if (found := pattern.search(head))), None)
        if rank is None and (found := _SRUN.match(head)):
            rank = int(found["rank"])
    return ProcessRef(host=host, pid=pid, rank=rank, node=node)


# torchrun's summary of each rank that failed; the lines of one that matter stand below these
#   host      : n1
#   rank      : 1 (local_rank: 1)
#   exitcode  : -9 (pid: 18942)  (SIGKILL)
#   error_file: <N/A>
_SUMMARY = re.compile(
    rb"host +: (?P<host>[\w.-]{1,255})[ \t]*\n[^\n]{0,200}?rank +: (?P<rank>\d{1,7}) \(local_rank: \d+\)[ \t]*\n"
    rb"(?:[^\n]{0,200}?exitcode +: -?\d+ \(pid: (?P<pid>\d{1,10})\)[^\n]{0,200}\n)?"
    rb"(?:[^\n]{0,80}error_file: [^\n]{0,300}\n)?\Z"
)
_SUMMARY_BYTES = 1500


_ROOT_CAUSE = re.compile(
    rb"\n[^\n]{0,80}\[0\]:[ \t]*\n(?:[^\n]{0,200}\n){0,2}?[^\n]{0,80}host +: (?P<host>[\w.-]{1,255})[ \t]*\n"
    rb"[^\n]{0,80}rank +: (?P<rank>\d{1,7}) \(local_rank: \d+\)[ \t]*\n"
    rb"[^\n]{0,80}exitcode +: (?P<code>-?\d{1,4}) \(pid: (?P<pid>\d{1,10})\)"
)


def torchrun_root_cause(data: bytes, start: int) -> tuple[ProcessRef, str] | None:
    """The rank that torchrun names below `Root Cause`, and its exit code."""
    found = _ROOT_CAUSE.search(data, start, start + _SUMMARY_BYTES)
    if found is None:
        return None
    who = ProcessRef(host=found["host"].decode(), pid=int(found["pid"]), rank=int(found["rank"]))
    return who, f"exit code {found['code'].decode()}"


def process_of_summary(data: bytes, start: int) -> ProcessRef | None:
    """The rank that a launcher's summary describes on the line at `start`; None for a line outside a summary."""
    found = _SUMMARY.search(data, max(0, start - _SUMMARY_BYTES), start)
    if found is None:
        return None
    pid = int(found["pid"]) if found["pid"] else None
    return ProcessRef(host=found["host"].decode(), pid=pid, rank=int(found["rank"]))
