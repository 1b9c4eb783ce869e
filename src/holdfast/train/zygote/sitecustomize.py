"""Python imports a module of this name before it runs a program; with HOLDFAST_ZYGOTE set, this one holds the program.

Its folder comes first on PYTHONPATH for that. In the process that becomes a rank `hold` returns, and Python goes on to
the program as if nothing had been; any other end of it must be the end of the process, or the program would run.
"""

import os
import sys

if word := os.environ.pop("HOLDFAST_ZYGOTE", ""):
    try:
        from zygote_main import run

        run(word)
    except BaseException as error:
        print(f"holdfast: the program could not be held: {error!r}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(70)
