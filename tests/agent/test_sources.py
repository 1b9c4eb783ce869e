"""Files of a program that were edited between two attempts are reported, and no others."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.agent.sources import Sources
from holdfast.agent.zygote import RankCommand
from holdfast.findings import Finding


def wanted(cwd: Path, *argv: str, environ: Mapping[str, str] | None = None, rank: int = 0) -> RankCommand:
    return RankCommand(rank=rank, argv=argv, cwd=cwd, environ=environ or {})


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def compare(sources: Sources, attempt: int, *programs: RankCommand, replica: int = 0) -> Finding | None:
    return asyncio.run(sources.compare(replica, attempt, programs))


def test_script_edited_between_two_attempts_is_named_with_the_time_and_the_attempt(tmp_path: Path) -> None:
    script, sources = tmp_path / "train.py", Sources()
    put(script, "rate = 1\n")
    ranks = [wanted(tmp_path, "python", "train.py", rank=rank) for rank in range(2)]
    assert compare(sources, 0, *ranks) is None
    assert compare(sources, 1, *ranks) is None
    put(tmp_path / "new.py", "rate = 10\n")
    os.utime(tmp_path / "new.py", (1, 1))
    (tmp_path / "new.py").rename(script)
    found = compare(sources, 2, *ranks, replica=1)
    assert found is not None
    assert found.code == "code-edited"
    assert found.where == str(script)
    words = (
        r"train\.py was edited at \d\d:\d\d:\d\d, after attempt 1 of replica 1 started; attempt 2 runs the edited file"
    )
    assert re.fullmatch(words, found.what)
    (line,) = found.evidence
    assert re.fullmatch(r"train\.py: 9 -> 10 bytes, changed at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", line)
    assert compare(sources, 3, *ranks) is None


def test_touched_script_with_the_same_content_is_not_reported(tmp_path: Path) -> None:
    script, sources = tmp_path / "train.py", Sources()
    put(script, "rate = 1\n")
    compare(sources, 0, wanted(tmp_path, "python", "train.py"))
    script.unlink()
    assert compare(sources, 1, wanted(tmp_path, "python", "train.py")) is None
    put(script, "rate = 1\n")
    os.utime(script, (1, 1))
    assert compare(sources, 2, wanted(tmp_path, "python", "train.py")) is None
    put(script, "rate = 2\n")
    found = compare(sources, 3, wanted(tmp_path, "python", "train.py"))
    assert found is not None
    assert "after attempt 2 started" in found.what


@pytest.mark.parametrize(
    ("command", "edited"),
    [
        (["python", "-u", "run/train.py"], "run/model.py"),
        (["python", "-u", "run/train.py"], "run/parts/__init__.py"),
        (["python", "-u", "run/train.py"], "run/parts/head.py"),
        (["python", "-u", "run/train.py"], "run/parts/norm.py"),
        (["python", "-u", "run/train.py"], "lib/shared.py"),
        (["python", "-u", "run/train.py", "--config=conf/small.yaml"], "conf/small.yaml"),
        (["python", "-m", "run.train"], "run/train.py"),
        (["python", "-c", "import run.train"], "run/train.py"),
        (["torchrun", "--nproc_per_node", "2", "run/train.py"], "run/model.py"),
        (["bash", "start.sh"], "run/model.py"),
        (["./start"], "start"),
        (["./start"], "run/model.py"),
        (["sh", "-c", "exec python run/train.py > log"], "run/train.py"),
    ],
    ids=" ".join,
)
def test_files_that_a_command_leads_to_are_compared(tmp_path: Path, command: list[str], edited: str) -> None:
    put(
        tmp_path / "run" / "train.py",
        "import os, model\nfrom parts import (  # (\n    head,\n)\nimport \\\n    shared\nfrom here on\n",
    )
    put(tmp_path / "run" / "model.py", "")
    put(tmp_path / "run" / "parts" / "__init__.py", "")
    put(tmp_path / "run" / "parts" / "head.py", "def build():\n    from . import norm")
    put(tmp_path / "run" / "parts" / "norm.py", "from ....... import nothing")
    put(tmp_path / "lib" / "shared.py", "")
    put(tmp_path / "conf" / "small.yaml", "")
    for name in ("start.sh", "start"):
        put(tmp_path / name, "#!/bin/bash\ncd . && python run/train.py --rate 1\n")
    program = wanted(tmp_path, *command, environ={"PYTHONPATH": "lib"})
    sources = Sources()
    assert compare(sources, 0, program) is None
    with (tmp_path / edited).open("a") as file:
        file.write("# another\n")
    found = compare(sources, 1, program)
    assert found is not None
    assert found.where == str(tmp_path / edited)


def test_files_that_a_program_does_not_load_are_not_compared(tmp_path: Path) -> None:
    elsewhere = ("evaluate.py", "out/metrics.json", "lib/site-packages/torch/__init__.py", "large.py", "FIFO.py")
    for name in elsewhere:
        put(tmp_path / name, "")
    (tmp_path / "FIFO.py").unlink()
    os.mkfifo(tmp_path / "FIFO.py")
    put(tmp_path / "large.py", "#" * (2 << 20))
    put(tmp_path / "train.py", "import torch, large, FIFO, train\n")
    program = wanted(
        tmp_path, "python", "train.py", "out/metrics.json", "gone.yaml", environ={"PYTHONPATH": "lib/site-packages"}
    )
    sources = Sources()
    compare(sources, 0, program)
    for name in elsewhere[:-1]:
        with (tmp_path / name).open("a") as file:
            file.write("# another\n")
    assert compare(sources, 1, program) is None


def test_many_edited_files_are_one_finding(tmp_path: Path) -> None:
    modules = [f"part{number}" for number in range(10)]
    put(tmp_path / "train.py", f"import {', '.join(modules)}\n")
    for module in modules:
        put(tmp_path / f"{module}.py", "")
    sources, program = Sources(), wanted(tmp_path, "python", "train.py")
    compare(sources, 0, program)
    for module in modules:
        put(tmp_path / f"{module}.py", "pass\n")
    found = compare(sources, 1, program)
    assert found is not None
    assert re.match(r"part\d\.py and 9 other files were edited, the last time at .* runs the edited files$", found.what)
    assert len(found.evidence) == 9
    assert found.evidence[-1] == "and 2 more"
