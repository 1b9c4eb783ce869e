"""How a rank's process exited, with the fault of a device that its output or the kernel's log shows."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from tests.agent.test_launcher_report import TORCHRUN_CODES

from holdfast.agent import rank_process
from holdfast.agent.rank_process import ProcessExit, RankProcess
from holdfast.clock import Clock
from holdfast.events import DeviceFault, ExitReason
from holdfast.protocol.orders import RankLaunch

LAUNCH_FAILURE = "CUDA error: unspecified launch failure"
RAISES = f"raise RuntimeError('{LAUNCH_FAILURE}')"
ABORTS = f"import os, sys; sys.stderr.write('terminate called\\n  what():  {LAUNCH_FAILURE}\\n'); os.abort()"
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
FAR_FUTURE_US = 10**15

LOST_PEER = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer "
    "[127.0.0.1]:63104. This is typically caused by a remote worker exiting or crashing."
)
OWN = "ValueError: bad shape"
RAISED = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/x/train.py", line 9, in <module>
[rank{rank}]:     step()
[rank{rank}]: {error}
"""


def ended(folder: Path, program: str, *, kernel: str = "") -> ProcessExit:
    """Run a program as rank 0 to its end."""
    kernel_log = folder / "kmsg"
    kernel_log.write_text(kernel)
    launch = RankLaunch(
        rank=0, argv=(sys.executable, "-S", "-c", program), env={}, cwd=".", log=str(folder / "rank-0.log")
    )

    async def run() -> ProcessExit:
        process, over = RankProcess(launch, folder / "socket", Clock(), kernel_log), asyncio.Event()
        await process.start(lambda _: over.set(), process.command(folder, {}, {}))
        await over.wait()
        assert process.exit is not None
        return process.exit

    return asyncio.run(run())


@pytest.mark.parametrize(("program", "reason"), [(RAISES, ExitReason.CODE), (ABORTS, ExitReason.SIGNAL)])
def test_rank_that_reports_a_fault_of_a_device_exits_by_that(tmp_path: Path, program: str, reason: ExitReason) -> None:
    end = ended(tmp_path, program)
    assert (end.reason, end.device_fault) == (reason, DeviceFault.UNCLEAR)
    assert LAUNCH_FAILURE in end.error + end.evidence


def test_kernels_log_shows_what_the_rank_could_not_know(tmp_path: Path) -> None:
    end = ended(
        tmp_path, RAISES, kernel=f"4,1,{FAR_FUTURE_US},-;{XID}\n4,2,1,-;NVRM: Xid (PCI:0000:1c:00): 48, earlier\n"
    )
    assert (end.device_fault, end.evidence) == (DeviceFault.GPU, XID)
    assert end.error == f"RuntimeError: {LAUNCH_FAILURE}"


def test_old_records_of_the_kernel_explain_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic_ns()
    monkeypatch.setattr(rank_process, "KERNEL_LOG_WINDOW_US", -(10**9))  # recent is what comes in 1,000 s
    end = ended(tmp_path, RAISES, kernel=f"4,1,{began // 1000 + 5 * 10**8},-;{XID}\n")
    assert end.device_fault is DeviceFault.UNCLEAR


@pytest.mark.parametrize(
    "program", ["raise ValueError('bad shape')", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "pass"]
)
def test_rank_that_ends_otherwise_has_no_fault_of_a_device(tmp_path: Path, program: str) -> None:
    assert ended(tmp_path, program, kernel=f"4,1,{FAR_FUTURE_US},-;{XID}\n").device_fault is None


@pytest.mark.parametrize("named", [0, 1])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("errors", "first"),
    [((LOST_PEER, OWN), 1), ((OWN, LOST_PEER), 0), ((LOST_PEER, LOST_PEER), -1), ((OWN, "KeyError: 3"), -1)],
)
def test_rank_that_lost_its_peer_is_not_the_first_however_the_launcher_saw_both_end(
    tmp_path: Path, errors: tuple[str, str], first: int, order: tuple[int, int], named: int
) -> None:
    """A launcher such as torchrun looks ten times a second, and sorts the ranks that have ended since by number."""
    output = "".join(RAISED.format(rank=rank, error=errors[rank]) for rank in order)
    report = TORCHRUN_CODES.replace("rank      : 2", f"rank      : {1 - named}")
    report = report.replace("rank      : 3", f"rank      : {named}").replace("exitcode  : 2", "exitcode  : 1")
    end = ended(tmp_path, f"import sys; sys.stderr.write({output + report!r}); sys.exit(1)")
    first = named if first < 0 else first
    assert (end.first_failed_rank, end.error) == (first, errors[first])
    assert end.error_location == f"{tmp_path / 'rank-0.log'}:{4 * (order.index(first) + 1)}"
    assert ("only lost its peer" in end.evidence) == (named != first)
    assert f"rank {named}" in end.evidence
