"""What real ranks write, as `holdfast logs` shows it: nothing lost that is kept, whatever it is."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.programs.output_patterns import NUMBERED

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import FindingRaised
from holdfast.report.line_splitter import MAX_LINE_BYTES

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Terminal

OUTPUT_PATTERNS = [sys.executable, str(Path(__file__).parents[1] / "programs" / "output_patterns.py")]

pytestmark = pytest.mark.usefixtures("no_run_left")


@pytest.mark.slow
def test_log_past_its_limit_keeps_the_newest_and_counts_what_is_dropped(cli: Cli) -> None:
    count = 200_000
    ran = cli("run", "--set", "logs.max_bytes=1MiB", "--", *OUTPUT_PATTERNS, "lines", str(count))
    assert ran.code == 0, ran.out + ran.err
    run = api.find_run(None)
    raised = [event.finding for event in api.events(run) if isinstance(event, FindingRaised)]
    assert [(finding.code, finding.where) for finding in raised] == [("log-truncated", str(run.rank_log(0, 0)))]
    assert "[log-truncated]" in ran.out
    written = b"".join(NUMBERED % number for number in range(count))
    with run.rank_log(0, 0).open("rb") as file:
        dropped = os.lseek(file.fileno(), 0, os.SEEK_DATA)
        assert len(written) - dropped >= 1 << 20
        file.seek(dropped)
        assert file.read() == written[dropped:]
    said, *lines = cli("logs").out.splitlines()
    assert said == f" [rank 0] ({dropped:,} bytes that came before are dropped, by logs.max_bytes)"
    assert lines == [f" [rank 0] {line}" for line in written[dropped:].decode().splitlines()]
    told = [json.loads(line) for line in cli("logs", "-o", "json").out.splitlines()]
    assert told[0] == {"attempt": 0, "replica": 0, "rank": 0, "dropped_bytes": dropped}
    assert len(told) == len(lines) + 1
    assert cli("logs", "--tail", "2").out.splitlines() == lines[-2:]


@pytest.mark.slow
def test_log_is_kept_to_its_limit_while_the_rank_writes(cli: Cli, tmp_path: Path) -> None:
    done = tmp_path / "done"
    started = cli("run", "-d", "--set", "logs.max_bytes=1MiB", "--", *OUTPUT_PATTERNS, "bar", str(done))
    assert started.code == 0, started.err
    run = api.find_run(None)
    for event in api.follow(run):
        if isinstance(event, FindingRaised):
            done.touch()  # it would write on for ever
    assert done.exists()
    with run.rank_log(0, 0).open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) > 0


@pytest.mark.slow
def test_whatever_a_rank_writes_is_shown_safely_and_kept_to_the_byte(
    cli: Cli, terminal: Callable[..., Terminal]
) -> None:
    assert cli("run", "--", *OUTPUT_PATTERNS, "anything").code == 0
    shown = cli("logs").out.splitlines()
    assert [line.startswith(" [rank 0] ") for line in shown] == [True] * len(shown)
    first, long, binary, _, red, bar, umlaut, last = (line[10:] for line in shown)
    assert (first, red, bar, umlaut, last) == ("first", "red after", "100%", "ü", "no end")
    assert long.endswith("… (10,000,000 bytes in all)")
    assert len(long) < MAX_LINE_BYTES
    assert binary.startswith("\\x00\\x01")
    told = [json.loads(line)["text"] for line in cli("logs", "-o", "json").out.splitlines()]
    assert told == [line[10:] for line in shown]
    window = terminal("logs")
    assert window.end() == 0
    assert "\x1b[31mred\x1b[0m after" in window.raw
    assert "a title" not in window.raw
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", window.raw)


@pytest.mark.slow
def test_progress_bar_is_followed_without_a_line_for_each_state(
    cli: Cli, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    cli("run", "-d", "--", *OUTPUT_PATTERNS, "bar", str(done))
    window = terminal("logs", "-f")
    window.until("it |####    |")  # no line has ended until now
    done.touch()
    assert window.end() == 0
    drawn = int(re.search(r"drawn (\d+) times", window.text)[1])  # type: ignore[index]
    assert f"{drawn} it |####    |" in window.text
    assert window.text.count("it |") * 10 < drawn


@pytest.mark.slow
def test_sixty_four_ranks_are_followed_and_no_line_is_lost_or_torn(cli: Cli) -> None:
    ranks, count = 64, 300
    loop = f'n=0; while [ $n -lt {count} ]; do echo "rank $RANK says $n"; n=$((n+1)); done; printf "rank $RANK is done"'
    started = cli("run", "-d", "--set", f"ranks_per_node={ranks}", "--", "sh", "-c", loop)
    assert started.code == 0, started.err
    shown = cli("logs", "-f").out.splitlines()
    for rank in range(ranks):
        mark = f" [rank {rank}] "
        own = [line[len(mark) :] for line in shown if line.startswith(mark)]
        assert own == [*(f"rank {rank} says {n}" for n in range(count)), f"rank {rank} is done"]
    assert len(shown) == ranks * (count + 1)
    some = {line.split("]")[0] for line in cli("logs", "--rank", "3,60-62", "--tail", "1").out.splitlines()}
    assert some == {" [rank 3", " [rank 60", " [rank 61", " [rank 62"}


@pytest.mark.slow
def test_wrong_rank_numbers_are_an_error(cli: Cli) -> None:
    assert cli("run", "--nodes", "2", "--", "true").code == 0
    for ranks, code in (("2", ExitCode.NOT_FOUND), ("1-0", ExitCode.NOT_FOUND), ("x", ExitCode.USAGE)):
        answer = cli("logs", "--rank", ranks)
        assert answer.code == code
        assert answer.err.startswith("error: ")


@pytest.mark.slow
def test_attempt_in_which_nothing_was_written_names_the_one_that_wrote(cli: Cli) -> None:
    assert cli("run", "--", *OUTPUT_PATTERNS, "lines", "3").code == 0
    silent = api.find_run(None).rank_log(1, 0)
    silent.parent.mkdir()
    silent.touch()
    asked = cli("logs")
    assert (asked.code, asked.out) == (0, "")
    assert "nothing was written in this attempt; there is output of attempt 0: `--attempt 0`" in asked.err
    assert len(cli("logs", "--attempt", "0").out.splitlines()) == 3
