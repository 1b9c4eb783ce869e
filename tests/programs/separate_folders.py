"""Runs a script whose ranks share no directory: `separate_folders.py SCRIPT`.

Each rank has a separate directory below HOLDFAST_CHECKPOINT_PATH.
"""

from __future__ import annotations

import os
import runpy
import sys

os.environ["HOLDFAST_CHECKPOINT_PATH"] += f"/{os.environ.get('RANK', '0')}"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
