"""From the command to the first step with changed code: `holdfast update`, compared with cancelling and running again.

.venv/bin/python -m bench.code_update [--quick | --rounds N]

All sides run the same loop (bench/programs/update_loop.py: DDP and AdamW over two nodes of one rank, a Session), with
its next start prewarmed. Its code is shipped, and then changed. Ours: `holdfast update`. The peer: `holdfast cancel`,
which takes a checkpoint, and, once the run is over, `holdfast run` with the same checkpoints. Both times end when every
rank has finished its first step after the command. Each turn has a separate run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import load_gate, result_file
from bench.contenders import BIN, PROGRAMS
from bench.paired_stats import OURS, PEER, PEER_AGAIN, compare, headline, interleave, say, table
from holdfast.events import RanksPrewarmed
from holdfast.events.log import read_events

GOAL = 0.3
ROUNDS, QUICK_ROUNDS = 6, 1
RANKS = 2
SETTLED_STEPS = 20
LONGEST_S = 240.0
BEAT_S = 0.01
PROGRAM = "update_loop.py"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Directories of one turn: its runs, and its ranks' output."""

    folder: Path

    def holdfast(self, *words: str) -> None:
        """Run a command; raise when it fails, except with the exit code of a cancelled run."""
        environ = os.environ | {"HOLDFAST_HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1"}
        argv = [str(BIN / "holdfast"), *words]
        subprocess.run(
            argv, env=environ, cwd=self.folder / "project", stdout=subprocess.DEVNULL, check=words[0] != "attach"
        )

    def run(self) -> None:
        """Start the loop from the newest of its checkpoints."""
        settings = (f"checkpoint.path={self.folder / 'checkpoints'}", "checkpoint.every_steps=1000000")
        options = [word for setting in settings for word in ("--set", setting)]
        command = (sys.executable, PROGRAM, str(self.folder))
        self.holdfast("run", "-d", "--on", "shipped", "--nodes", "2", *options, "--", *command)

    def edit(self) -> None:
        """Change the program."""
        with (self.folder / "project" / PROGRAM).open("a") as program:
            program.write("# changed\n")

    def firsts(self, excluded: frozenset[int] = frozenset()) -> dict[int, float]:
        """When each process other than these has finished its first step."""
        firsts: dict[int, float] = {}
        for pid, at in self.steps():
            if pid not in excluded:
                firsts.setdefault(pid, at)
        return firsts

    def steps(self) -> list[tuple[int, float]]:
        """Each step that a rank has finished: its process, and when."""
        texts = (path.read_text() for path in self.folder.glob("rank-*"))
        lines = (line.split() for text in texts for line in text[: text.rfind("\n") + 1].splitlines())
        return [(int(pid), float(at)) for pid, at in lines]

    def at_work(self) -> bool:
        """Whether some steps are done and every rank's next start is prewarmed."""
        logs = list(self.folder.glob("home/runs/*/events.jsonl"))
        warm = [event for log in logs for event in read_events(log) if isinstance(event, RanksPrewarmed)]
        return len(warm) >= RANKS and len(self.steps()) >= SETTLED_STEPS


def main() -> None:
    """Measure, and print a line per round and a table."""
    parser = argparse.ArgumentParser(prog="bench.code_update", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("update: command to the first step of all ranks with other code, 2 nodes x 1 rank, Gloo, DDP, AdamW")
    again, ours = partial(_turn, _run_again), partial(_turn, _update)
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    done = interleave({PEER: again, OURS: ours, PEER_AGAIN: again}, rounds, unit="s")
    claim = "`holdfast update` → next step"
    found = result_file.from_rounds(claim, done, goal=GOAL, unit="s", peer="cancel and run")
    result_file.save(options.json, "Hot code update", [found])
    result = compare(done)
    row = ("update, command to next step", f"<= {GOAL}x", f"{result.ratio}x", str(result.floor), result.verdict(GOAL))
    say("")
    say(table(("claim", "goal", "measured", "A/A floor", "met"), [row]))


def _update(place: Place) -> None:
    place.holdfast("update")


def _run_again(place: Place) -> None:
    place.holdfast("cancel")
    place.holdfast("attach")  # returns when the run is over
    place.run()


def _turn(change: Callable[[Place], None]) -> float:
    """Seconds that one code change of a running job takes."""
    with _place() as place:
        _wait(place.at_work)
        old = frozenset(place.firsts())
        load_gate.wait_until_idle()
        place.edit()
        began = time.time()
        change(place)
        _wait(lambda: len(place.firsts(old)) == RANKS)
        return max(place.firsts(old).values()) - began


@contextlib.contextmanager
def _place() -> Generator[Place]:
    with tempfile.TemporaryDirectory(prefix="hfbench-") as folder:
        place = Place(folder=Path(folder))
        targets = place.folder / "project" / ".holdfast" / "targets"
        targets.mkdir(parents=True)
        (targets / "shipped.yaml").write_text("code: shipped\n")
        shutil.copy(PROGRAMS / PROGRAM, place.folder / "project")
        place.run()
        try:
            yield place
        finally:
            place.holdfast("cancel", "--force")
            place.holdfast("attach")


def _wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LONGEST_S:g} s")
        time.sleep(BEAT_S)


if __name__ == "__main__":
    main()
