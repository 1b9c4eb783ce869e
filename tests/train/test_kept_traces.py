"""Which ranks keep a trace, and what becomes of it."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

from holdfast.run_dir import MAX_TRACE_BYTES as RUN_DIR_MAX_TRACE_BYTES
from holdfast.train.metrics.kept_traces import MAX_TRACE_BYTES, kept_ranks, write_trace


def test_rank_0_the_slowest_and_the_fastest_keep_a_trace() -> None:
    assert kept_ranks([50, 90, 40, 60], ()) == (0, 1, 2)
    assert kept_ranks([40, 40], ()) == (0, 1)
    assert kept_ranks([50], ()) == (0,)
    assert kept_ranks([50, 90, 0, 60], (2, 3, 9)) == (3,)
    assert kept_ranks([0, 90, 0], ()) == (1,)
    assert kept_ranks([0, 0], ()) == ()


def test_trace_is_compressed_private_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace-step-5-rank-0.json.gz"

    def save(to: str) -> None:
        Path(to).write_bytes(b'{"traceEvents": []}')

    assert write_trace(save, path) == ""
    assert gzip.decompress(path.read_bytes()) == b'{"traceEvents": []}'
    assert path.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other.json.gz"
    assert write_trace(save, other, max_bytes=10).startswith("the file has ")
    assert [*tmp_path.iterdir()] == [path]
    assert "No such file" in write_trace(save, tmp_path / "absent" / "x.json.gz")
    assert MAX_TRACE_BYTES == RUN_DIR_MAX_TRACE_BYTES


def test_run_without_a_profile_loads_none_of_the_reader(tmp_path: Path) -> None:
    """A rank pays nothing for traces: what reads, merges and summarises them is the client's."""
    program = (
        "import sys, holdfast.train; "
        "print([each for each in sys.modules if each.startswith('holdfast.metrics.') and 'trace' in each])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
