"""Launchers' reports of the first failed rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.launcher_report import TAIL_BYTES, LauncherReport, read_launcher_report

MPIRUN_SIGNAL = """\
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun noticed that process rank 3 with PID 17792 on node node1 exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""

MPIRUN_CODE = """\
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[6475,1],2]
  Exit code:    7
--------------------------------------------------------------------------
"""

TORCHRUN = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_10:20:12
  host      : vm
  rank      : 2 (local_rank: 0)
  exitcode  : 1 (pid: 31336)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_10:20:11
  host      : vm
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 31337)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 31337
============================================================
"""

TORCHRUN_MISTAKEN = (
    TORCHRUN.replace("rank      : 2 (local_rank: 0)\n  exitcode  : 1 ", "SWAP")
    .replace("rank      : 3 (local_rank: 1)\n  exitcode  : -9 ", "rank      : 2 (local_rank: 0)\n  exitcode  : 1 ")
    .replace("SWAP", "rank      : 3 (local_rank: 1)\n  exitcode  : -9 ")
)
"""Rank 2, which lost a peer, was found to have ended in the same look as rank 3, which was killed."""

TORCHRUN_CODES = TORCHRUN.replace("exitcode  : -9", "exitcode  : 2").replace("exitcode  : 1 ", "exitcode  : -15 ")

DEEPSPEED = """\
[2026-11-23 07:52:39,755] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 22547
[2026-11-23 07:52:39,756] [ERROR] [launch.py:259:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', \
'--local_rank=0'] exits with return code = -9
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MPIRUN_SIGNAL, LauncherReport(rank=3, code=-9)),
        (MPIRUN_CODE, LauncherReport(rank=2, code=7)),
        (TORCHRUN, LauncherReport(rank=3, code=-9)),
        (TORCHRUN_MISTAKEN, LauncherReport(rank=3, code=-9)),
        (TORCHRUN_CODES, LauncherReport(rank=3, code=2)),
        (DEEPSPEED, LauncherReport(code=-9)),
        (DEEPSPEED.replace("-9", "1"), None),
        ("ValueError: bad shape\n", None),
        ("", None),
    ],
)
def test_rank_that_a_launcher_names_last(tmp_path: Path, text: str, expected: LauncherReport | None) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("x" * TAIL_BYTES + "\n" + text)
    assert read_launcher_report(log) == expected


def test_missing_log_has_no_report(tmp_path: Path) -> None:
    assert read_launcher_report(tmp_path / "none.log") is None
