"""`python -m lab.supervisor FOLDER`: restarts the programs of the lab in FOLDER until the lab is removed."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.lab import Lab

if __name__ == "__main__":
    Lab(Path(sys.argv[1])).supervise()
