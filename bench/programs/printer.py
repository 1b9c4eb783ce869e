"""Prints as fast as possible, round after round: `printer.py OUT WRITER LINES ROUNDS`.

OUT/took gets the seconds of each round, and the CPU seconds among them.

WRITER is `c` (coreutils' seq, which writes whole buffers) or `python` (a loop of print). Starts when OUT/go exists and
exits when OUT/leave does.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

out, writer, lines, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


def wait_for(name: str) -> None:
    """Wait until OUT contains a file of this name."""
    while not (out / name).exists():
        time.sleep(0.01)


wait_for("go")
took: list[tuple[float, float]] = []
for _ in range(rounds):
    before, began = os.times(), time.perf_counter()
    if writer == "c":
        subprocess.run(["seq", str(lines)], check=True)
    else:
        for line in range(lines):
            print(f"step {line:08d}: loss 2.3456, 12,206 tokens/s, and so on to the length of a usual line")
    ended, after = time.perf_counter(), os.times()
    took.append((ended - began, sum(after[:4]) - sum(before[:4])))
sys.stdout.flush()
(out / "partial").write_text(json.dumps(took))
os.replace(out / "partial", out / "took")
wait_for("leave")
