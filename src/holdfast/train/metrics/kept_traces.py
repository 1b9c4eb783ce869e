"""Chooses the ranks that keep the trace of a profile, and writes the files of one rank."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.host.files import private_opener
from holdfast.protocol.rank_messages import ProfileStepsNow, TraceWritten, memory_path, trace_path

MAX_TRACE_BYTES = 64 << 20
"""Most bytes of a trace, compressed; run_dir.py has the same number."""
COMPRESSION = 3
"""Level at which 100 MB take 1 s."""


def kept_ranks(own_work_us: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """The ranks that keep a trace: the chosen ones, else rank 0, the slowest and the fastest.

    `own_work_us` is each rank's step without its waits for others; 0 for a rank without a profile.
    """
    profiled = [rank for rank, spent in enumerate(own_work_us) if spent]
    if not profiled:
        return ()
    by_work = sorted(profiled, key=own_work_us.__getitem__)
    wanted = chosen or (0, by_work[0], by_work[-1])
    return tuple(sorted(set(wanted) & set(profiled)))


def write_files(
    request: ProfileStepsNow,
    save: Callable[[str], None],
    memory: Callable[[str], None] | str,
    *,
    step: int,
    rank: int,
    kept: int,
) -> TraceWritten:
    """Write a rank's trace and, if that was requested, the snapshot of its GPU memory; `memory` may be why not."""
    failure = write_trace(save, Path(trace_path(request.traces, step, rank)))
    memory_failure = ""
    if request.memory:
        path = Path(memory_path(request.traces, step, rank))
        memory_failure = memory if isinstance(memory, str) else write_trace(memory, path)
    return TraceWritten(
        step=step,
        kept=kept,
        failure=failure,
        memory=request.memory and not memory_failure,
        memory_failure=memory_failure,
    )


def write_trace(save: Callable[[str], None], path: Path, *, max_bytes: int = MAX_TRACE_BYTES) -> str:
    """Write a trace, compressed and private; returns why that failed, or nothing.

    `save` writes it, uncompressed, to a path.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as private:
            plain, part = Path(private, "plain"), Path(private, "compressed")
            save(str(plain))
            with (
                open(plain, "rb") as source,
                open(part, "wb", opener=private_opener) as file,
                gzip.GzipFile(fileobj=file, mode="wb", compresslevel=COMPRESSION, filename="", mtime=0) as compressed,
            ):
                shutil.copyfileobj(source, compressed, 1 << 20)
            if (size := part.stat().st_size) > max_bytes:
                return f"the file has {size:,} bytes, and at most {max_bytes:,} are kept"
            part.rename(path)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
