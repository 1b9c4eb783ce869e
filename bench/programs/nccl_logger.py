"""Writes prepared lines as NCCL does in the ranks of a node: `nccl_logger.py PREPARED PRIVATE`.

PREPARED has a folder for each communicator with a file for each rank. Prints the time at which all ranks have written
the last line of a communicator's set-up.
"""

import random
import sys
import time
from pathlib import Path

LINES, PAUSE_S, GAP_S = 200, 0.01, 3.0
prepared, private = Path(sys.argv[1]), Path(sys.argv[2])
dice = random.Random(str(prepared))
for communicator in sorted(prepared.iterdir(), key=lambda path: int(path.name)):
    time.sleep(dice.uniform(0.5, GAP_S))
    waiting = {path.name: path.read_bytes().splitlines(True) for path in communicator.iterdir()}
    while any(waiting.values()):
        for name, lines in waiting.items():
            with open(private / f"{name}.1.log", "ab") as file:
                file.write(b"".join(lines[:LINES]))
            del lines[:LINES]
        time.sleep(PAUSE_S)
    print(time.time(), flush=True)
