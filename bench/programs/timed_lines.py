"""Prints LINES lines per second, in 100 writes, each with its time: `timed_lines.py OUT LINES`, until OUT/leave."""

import os
import sys
import time
from pathlib import Path

out, each = Path(sys.argv[1]), int(sys.argv[2]) // 100
rank = os.environ["RANK"]
(out / f"up-{rank}").touch()
count = 0
due = time.monotonic()
while not (out / "leave").exists():
    now = time.time()
    lines = [f"at={now:.6f} rank {rank} line {count + n}: loss 2.3456, 12,206 tokens/s\n" for n in range(each)]
    os.write(1, "".join(lines).encode())
    count += each
    due = max(due + 0.01, time.monotonic())
    time.sleep(max(0.0, due - time.monotonic()))
