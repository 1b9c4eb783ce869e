"""On PYTHONPATH of a bench's run: its controller places nodes like a scheduler without gangs (../partial_gangs.py)."""

import os
import sys

if sys.orig_argv[1:3] == ["-m", "holdfast.controller_main"] or "holdfast.controller_main" in " ".join(sys.orig_argv):
    from bench.planted.partial_gangs import place_one_by_one

    place_one_by_one(reverse=os.environ["HOLDFAST_BENCH_GANGS"] == "deadlock")
