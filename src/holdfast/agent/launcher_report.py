"""Parses a launcher's report on the rank that ended first; one pattern per launcher, with real log lines above it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from msgspec import Struct

from holdfast.agent.error_line import errors_of_ranks

TAIL_BYTES = 64 * 1024


class LauncherReport(Struct, frozen=True, kw_only=True):
    """Rank that a launcher names, and how it ended: an exit code, or a negative signal number."""

    code: int
    rank: int = -1
    """-1 if the launcher does not name it."""


_PATTERNS: tuple[re.Pattern[bytes], ...] = (
    # mpirun noticed that process rank 3 with PID 17792 on node node1 exited on signal 9 (Killed).
    re.compile(rb"^mpi\w+ noticed that process rank (?P<rank>\d+) .* exited on signal (?P<signal>\d+)\b", re.MULTILINE),
    # mpirun detected that one or more processes exited with non-zero status, thus causing
    # the job to be terminated. The first process to do so was:
    #
    #   Process name: [[6475,1],3]
    #   Exit code:    7
    re.compile(rb"^  Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\n  Exit code: +(?P<code>\d+)$", re.MULTILINE),
    # Failures:
    # [1]:
    #   time      : 2026-11-21_10:20:12
    #   host      : vm
    #   rank      : 3 (local_rank: 1)
    #   exitcode  : -9 (pid: 31337)
    #   ...
    # Root Cause (first observed failure):
    # [0]:
    #   ...
    re.compile(rb"^  rank +: (?P<rank>\d+) \(local_rank.*\n  exitcode +: (?P<code>-?\d+) ", re.MULTILINE),
    # [2026-11-23 07:52:39,755] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 22547
    # [2026-11-23 07:52:39,756] [ERROR] [launch.py:259:sigkill_handler] ['/usr/bin/python', '-u', 'train.py',
    #     '--local_rank=0'] exits with return code = -9
    # The command is that of the last local rank, whichever ended. deepspeed itself exits with 256 - 9.
    re.compile(rb"^\[.*\[launch\.py:\d+:sigkill_handler\] .* exits with return code = (?P<code>-\d+)$", re.MULTILINE),
)


def read_launcher_report(log: Path) -> LauncherReport | None:
    """The last report in a launcher's log; None if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except OSError:
        return None
    reports = [_parse(match) for row in _PATTERNS for match in row.finditer(tail)]
    # torchrun polls ten times a second and orders the ranks that ended between two polls by number. Ranks that lose a
    # peer exit with a code, or by torchrun's SIGTERM. Of the rest, the last one that torchrun names is its root cause.
    killed = [report for report in reports if report.code < 0 and report.code != -signal.SIGTERM]
    return next(iter(killed or reports[-1:]), None)


def error_of_first_rank(log: Path, named: int) -> tuple[int, str, str] | None:
    """The error line of the rank that a launcher names; if that one lost its peer, of the first rank that did not."""
    from holdfast.diagnose.peer_symptoms import peer_symptom  # imported here: few failures need it
    from holdfast.diagnose.precedence import PeerSymptom

    errors = errors_of_ranks(log)
    if named not in errors:
        return None
    causes = [rank for rank, (line, _) in errors.items() if peer_symptom(line) is PeerSymptom.NONE]
    is_symptom = peer_symptom(errors[named][0]) is PeerSymptom.PEER
    rank = causes[0] if is_symptom and causes else named
    return rank, *errors[rank]


def _parse(match: re.Match[bytes]) -> LauncherReport:
    groups = match.groupdict()
    code = -int(groups["signal"]) if "signal" in groups else int(groups["code"])
    return LauncherReport(code=code, rank=int(groups.get("rank", -1)))
