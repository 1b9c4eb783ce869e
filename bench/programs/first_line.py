"""Records when this rank reached its first line, and waits: `first_line.py OUT`; OUT/rank-R gets Unix seconds."""

import time

BORN = time.time()

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

word = Path(sys.argv[1]) / f"rank-{os.environ['RANK']}"
word.with_suffix(".new").write_text(repr(BORN))
word.with_suffix(".new").rename(word)
time.sleep(3600)
