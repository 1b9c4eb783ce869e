"""The last error line of a rank's log, and where it stands."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.error_line import MAX_ERROR_CHARS, TAIL_BYTES, errors_of_ranks, last_error_line


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: bad shape",
        "KeyError",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "KeyboardInterrupt",
        "terminate called after throwing an instance of 'std::runtime_error'",
        "Fatal Python error: Segmentation fault",
        "python: can't open file '/x/train.py': [Errno 2] No such file or directory",
        "/usr/bin/python3.11: can't open file '/x/train.py': [Errno 2] No such file or directory",
    ],
)
def test_error_line_is_found_with_its_number(tmp_path: Path, line: str) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"step 1\n  File x, line 2\n{line}\nbye\n")
    assert last_error_line(log) == (line, f"{log}:3")


HEARTBEAT = (
    "[F513 12:46:14.495035780 ProcessGroupNCCL.cpp:1614] [PG ID 0 PG GUID 0(default_pg) Rank 1] [PG ID 0 PG GUID "
    "0(default_pg) Rank 1] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL "
    "watchdog hang."
)
FAULT_HANDLER = "Fatal Python error: Aborted\n\nCurrent thread 0x00007fbdbbc4bb80 (most recent call first):\n  File x\n"


@pytest.mark.parametrize("mark", ["", "[rank1]:"])
@pytest.mark.parametrize(
    "line",
    [
        "terminate called after throwing an instance of 'int'",
        "python3: /opt/ttmlir-toolchain/include/llvm/ADT/ArrayRef.h:253: const T &llvm::ArrayRef<long>::operator[]"
        '(size_t) const [T = long]: Assertion `Index < Length && "Invalid index!"\' failed.',
        "double free or corruption (out)",
        "corrupted size vs. prev_size while consolidating",
        "free(): double free detected in tcache 2",
        "munmap_chunk(): invalid pointer",
        "malloc_consolidate(): invalid chunk size",
        "*** stack smashing detected ***: terminated",
        "F1022 19:11:21.141865 516 516 reference_count.cc:154] Check failed: object_id_refs_.count(object_id) == 0",
        "F20260910 23:10:00.123456 1234 torch_tpu.cc:42] Check failed: tensor.is_valid()",
        HEARTBEAT,
        "[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 0] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600 "
        "seconds without making progress in monitoring enqueued collectives.",
    ],
)
def test_why_a_program_aborts_itself_is_the_error_and_not_the_fault_handlers_line(
    tmp_path: Path, line: str, mark: str
) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"step 1\n{mark}{line}\n{FAULT_HANDLER}")
    assert last_error_line(log) == (line, f"{log}:2")


def test_assertion_of_a_real_program_is_the_error(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    program = "import ctypes; ctypes.CDLL(None).__assert_fail(b'n > 0', b'x.cpp', 12, b'int main(int)')"
    with log.open("wb") as output:
        ended = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], stderr=output, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert b"\nFatal Python error: Aborted\n" in log.read_bytes()
    assert last_error_line(log)[0].endswith(": x.cpp:12: int main(int): Assertion `n > 0' failed.")


@pytest.mark.parametrize(
    "line",
    [
        "F1 score: 0.9",
        "[F] x.cpp:1] no",
        "free() is called in data.cc:12: why",
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [0,0,0], thread: [0,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed.",
    ],
)
def test_line_that_only_looks_like_an_abort_is_none(tmp_path: Path, line: str) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"{line}\n")
    assert last_error_line(log) == ("", "")
    log.write_text(f"ValueError: caught long ago\n{FAULT_HANDLER}")
    assert last_error_line(log)[0] == "Fatal Python error: Aborted"


def test_own_error_that_ends_a_rank_includes_the_remedy(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(
        "step 1\nholdfast: error [disk-full]: the checkpoint step-00000005 could not be written\n"
        "  where: /x\n  evidence: rank 0: OSError: [Errno 28] No space left on device\n  what to do: Free some.\n"
    )
    assert last_error_line(log) == (
        "holdfast: error [disk-full]: the checkpoint step-00000005 could not be written "
        "where: /x what to do: Free some.",
        f"{log}:2",
    )


def test_finding_that_a_session_only_reports_is_no_last_error(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("holdfast: error [disk-full]: the checkpoint could not be written; where: /x; Free some.\nstep 2\n")
    assert last_error_line(log) == ("", "")


@pytest.mark.parametrize(
    "line", ["Error rate: 0.3", "loss 0.1 after ValueError: no", "  ValueError: quoted", "no Errors at all", ""]
)
def test_line_that_only_speaks_of_errors_is_none(tmp_path: Path, line: str) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"{line}\n")
    assert last_error_line(log) == ("", "")


def test_message_of_a_native_exception_belongs_to_its_line(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("terminate called after throwing an instance of 'c10::Error'\n  what():  bad shape\nFrame #0\n")
    error = "terminate called after throwing an instance of 'c10::Error' what():  bad shape"
    assert last_error_line(log) == (error, f"{log}:1")


@pytest.mark.parametrize("mark", ["", "[rank3]: "])
def test_whatever_a_traceback_ends_in_is_the_error(tmp_path: Path, mark: str) -> None:
    log = tmp_path / "rank-0.log"
    trace = ["Traceback (most recent call last):", '  File "x", line 2, in <module>', "    f()", "_queue.Empty: no"]
    log.write_text("ValueError: earlier\n" + "".join(f"{mark}{line}\n" for line in trace) + "bye\n")
    assert last_error_line(log) == ("_queue.Empty: no", f"{log}:5")


def test_last_of_several_errors_counts_without_its_ranks_mark(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("ValueError: first\n\nDuring handling ...\n\n[rank3]: RuntimeError: second\r\n")
    assert last_error_line(log) == ("RuntimeError: second", f"{log}:5")


def test_error_in_the_tail_of_a_large_log_has_its_true_number(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"x" * 99 + b"\n" + b"step\n" * (2 * TAIL_BYTES // 5) + b"ValueError: late\n")
    error, where = last_error_line(log)
    assert error == "ValueError: late"
    assert int(where.rpartition(":")[2]) == log.read_bytes().count(b"\n")


def test_one_endless_line_of_binary_is_gone_through_quickly(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"\xff\x00pythonError" * 100_000 + b"\nTraceback (most recent call last):\n" + b" x\n" * 100_000)
    assert last_error_line(log) == ("", "")


@pytest.mark.parametrize("ending", [b"", b"\n", b"\nbye\n"])
def test_error_that_is_a_line_of_ten_megabytes_is_found_where_it_begins(tmp_path: Path, ending: bytes) -> None:
    log = tmp_path / "rank-0.log"
    trace = b'Traceback (most recent call last):\n  File "x", line 2, in <module>\n'
    log.write_bytes(b"step\n" * 9 + trace + b"mine.Odd: " + b"0.1234 " * 1_500_000 + ending)
    error, where = last_error_line(log)
    assert error.startswith("mine.Odd: 0.1234")
    assert len(error) <= MAX_ERROR_CHARS
    assert where == f"{log}:12"


def test_sparse_log_of_gigabytes_is_no_more_work_than_its_end(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"\nValueError: after a terabyte\n")
    assert last_error_line(log) == ("ValueError: after a terabyte", str(log))


def test_middle_of_a_long_line_is_not_taken_for_a_line(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"x " * 50 + b"ValueError: quoted" + b"y" * (TAIL_BYTES - len(b"ValueError: quoted")))
    assert last_error_line(log) == ("", "")


def test_long_error_is_cut_and_broken_text_fixed(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"ValueError: \xff" + b"y" * 1000 + b"\n")
    error, _ = last_error_line(log)
    assert error.startswith("ValueError: \ufffdyyy")
    assert len(error) == MAX_ERROR_CHARS


def test_log_that_does_not_exist_has_no_error(tmp_path: Path) -> None:
    assert last_error_line(tmp_path / "none.log") == ("", "")


def test_error_of_a_rank_wins_over_torchruns_own(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    own = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    log.write_text(f"ValueError: bad shape\nTraceback (most recent call last):\n  File x\n{own}\n=====\n")
    assert last_error_line(log) == ("ValueError: bad shape", f"{log}:1")
    log.write_text(f"Traceback (most recent call last):\n  File x\n{own}\n=====\n")
    assert last_error_line(log) == (own.rstrip(), f"{log}:3")


@pytest.mark.parametrize(
    "later",
    [
        f"[rank1]:{HEARTBEAT}",
        "F0929 17:42:48.594200 1044529 client.h:77] Terminating process because the JAX distributed service detected "
        "fatal errors. This most likely indicates that another task died; see the other task logs for more details.",
    ],
    ids=["torch", "JAX"],
)
def test_error_of_a_rank_wins_over_the_line_with_which_its_framework_ends_it_later(tmp_path: Path, later: str) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"ValueError: bad shape\n{later}\n{FAULT_HANDLER}")
    assert last_error_line(log) == ("ValueError: bad shape", f"{log}:1")


def test_each_rank_of_a_launcher_has_its_last_error_that_is_no_consequence(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"[rank3]: KeyError: 1\n[rank1]: KeyError: 2\n[rank3]: KeyError: 3\n[rank1]:{HEARTBEAT}\nOSError\n")
    assert errors_of_ranks(log) == {1: ("KeyError: 2", f"{log}:2"), 3: ("KeyError: 3", f"{log}:3")}
    assert errors_of_ranks(tmp_path / "none.log") == {}
