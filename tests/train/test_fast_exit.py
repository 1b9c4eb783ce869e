from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ExitCode

PROGRAM = """
import atexit, gzip, sys, threading
from holdfast.train.session import fast_exit

class Thing:
    def __del__(self):
        print("taken apart", flush=True)

thing = Thing()
atexit.register(print, "given to atexit")
text, packed = open(sys.argv[1], "w"), open(sys.argv[1] + ".bytes", "wb")
text.write("words")
packed.write(b"bytes")
threading.Thread(target=sys.stdout.write, args=("a thread of its own\\n",)).start()
fast_exit.enable()
try:
    raise SystemExit(75)
finally:
    sys.stdout.write("on its way out\\n")  # whole, which print's line and its end are not beside a thread
    {more}
"""


def ended(out: Path, more: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("{more}", more)
    return subprocess.run(
        [sys.executable, "-c", program, str(out)], capture_output=True, text=True, check=False, timeout=100
    )


def test_program_that_is_hastened_ends_as_it_would_but_is_not_taken_apart(tmp_path: Path):
    process = ended(tmp_path / "file", "pass")
    assert process.returncode == ExitCode.CHECKPOINTED_AND_EXITED, process.stderr
    assert sorted(process.stdout.splitlines()) == ["a thread of its own", "given to atexit", "on its way out"]
    assert (tmp_path / "file").read_text() == "words"
    assert (tmp_path / "file.bytes").read_bytes() == b"bytes"


@pytest.mark.parametrize("more", ["1 / 0", "atexit.register(lambda: 1 / 0)"])
def test_what_fails_on_the_way_out_is_said(tmp_path: Path, more: str):
    process = ended(tmp_path / "file", more)
    assert "ZeroDivisionError" in process.stderr
    assert process.returncode == (1 if more == "1 / 0" else ExitCode.CHECKPOINTED_AND_EXITED)
    assert (tmp_path / "file").read_text() == "words"
