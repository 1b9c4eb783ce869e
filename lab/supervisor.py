"""`python -m lab.supervisor FOLDER`: starts again what ends of the lab there, until the lab is gone."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.lab import Lab

if __name__ == "__main__":
    Lab(Path(sys.argv[1])).supervise()
