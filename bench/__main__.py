"""`python -m bench`: runs every bench in turn, in about half an hour; `--quick` only shows that they work."""

from __future__ import annotations

import subprocess
import sys

BENCHES = ("help", "launch", "recovery", "step_time", "scale", "event_log", "data", "checkpoint")


def main() -> int:
    """Run each bench as a separate command, with the given options; return the number that failed."""
    failed = 0
    for name in BENCHES:
        failed += subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
