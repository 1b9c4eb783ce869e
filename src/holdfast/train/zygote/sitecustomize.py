"""Turns the interpreter into a zygote if HOLDFAST_ZYGOTE is set; Python imports this module before the program.

For that, its folder is first on PYTHONPATH. In a process that becomes a rank `run` returns, and Python continues with
the program as usual; every other exit from `run` must end the process, or the program would start.
"""

import os
import sys

if message := os.environ.pop("HOLDFAST_ZYGOTE", ""):
    try:
        from zygote_main import run

        run(message)
    except BaseException:
        import traceback

        traceback.print_exc()  # its last line is what the agent reports
        sys.stderr.flush()
        os._exit(70)
