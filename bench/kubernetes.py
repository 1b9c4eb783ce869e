"""On the lab: from submit to the first rank's first line, and from the kill of a rank to the next whole step.

.venv/bin/python -m bench.kubernetes [--quick | --rounds N] [--only start|recovery]

Start: `holdfast run --on`, which ships the code, compared with `kubectl apply` of the same rendered manifest, its
secrets filled in beforehand and its code in the image; and, for a cluster without holdfast, `kubectl apply` of the same
job with `agent: false`.

Recovery: the script of bench.recovery, which does not use holdfast, under holdfast on the lab, compared with the same
under the local target while the lab is running; and, for a cluster without holdfast, as a TrainJob that JobSet
restarts. Each round starts every side again and kills each of its ranks once.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

from bench import lab_cluster, load_gate
from bench.contenders import PROGRAMS, Running, holdfast
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, compare, headline, interleave, say, table
from bench.recovery import kill_each

START_GOAL, RECOVERY_GOAL = 1.15, 1.3
PARTS = ("start", "recovery")
ROUNDS, QUICK_ROUNDS = 8, 1
WITHIN_S = 120.0
RECOVERED_S = 300.0
BARE, TRAINJOB = "bare", "trainjob"


def main() -> None:
    """Measure, and print a line per round and tables."""
    parser = argparse.ArgumentParser(prog="bench.kubernetes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} round")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    headline("kubernetes: 2 nodes x 1 rank on the lab")
    with lab_cluster.site() as site:
        for program in ("first_line.py", "resumable_loop.py"):
            shutil.copy(PROGRAMS / program, site.folder)
        measures = {"start": _starts, "recovery": _recoveries}
        tables = [measures[part](site, rounds) for part in PARTS if options.only in (None, part)]
    for each in tables:
        say("")
        say(each)


def _starts(site: lab_cluster.LabSite, rounds: int) -> str:
    sides = {
        PEER: lambda: _first_line_s(site, "lab", applied=True),
        OURS: lambda: _first_line_s(site, "lab", applied=False),
        PEER_AGAIN: lambda: _first_line_s(site, "lab", applied=True),
        BARE: lambda: _first_line_s(site, "bare", applied=True),
    }
    for measure in sides.values():
        measure()  # the first run of each reads programs from the disk
    done = interleave(sides, rounds, unit="s")
    result = compare(done)
    return table(
        ("claim", "goal", "measured", "A/A floor", "holdfast", "kubectl", "bare", "met"),
        [
            (
                "submit to the first rank's first line",
                f"<= {START_GOAL}x",
                f"{result.ratio}x",
                str(result.floor),
                f"{_median(done, OURS):.2f} s",
                f"{_median(done, PEER, PEER_AGAIN):.2f} s",
                f"{_median(done, BARE):.2f} s",
                result.verdict(START_GOAL),
            )
        ],
    )


def _first_line_s(site: lab_cluster.LabSite, target: str, *, applied: bool) -> float:
    """Seconds from just before the command until the first rank reached its first line."""
    out = site.out()
    program = site.folder / "first_line.py" if applied else Path("first_line.py")
    job = site.job("python", str(program), str(out))
    words, given = (site.applied(), site.manifest(job, target)) if applied else (site.holdfast(job, target), None)
    load_gate.wait_until_idle()
    started = time.time()
    with site.command(*words, input=given):
        site.wait_for(lambda: any(out.glob("rank-?")), WITHIN_S)
        took = min(float(word.read_text()) for word in out.glob("rank-?")) - started
    site.clear()
    return took


def _recoveries(site: lab_cluster.LabSite, rounds: int) -> str:
    sides = {
        PEER: lambda: _recovery_s(lambda: holdfast("resumable_loop.py"), PEER),
        OURS: lambda: _recovery_s(lambda: _on_lab(site, "lab"), OURS),
        PEER_AGAIN: lambda: _recovery_s(lambda: holdfast("resumable_loop.py"), PEER_AGAIN),
        TRAINJOB: lambda: _recovery_s(lambda: _on_lab(site, "trainjob"), TRAINJOB),
    }
    done = interleave(sides, rounds, unit="s")
    result = compare(done)
    return table(
        ("claim", "goal", "measured", "A/A floor", "on the lab", "local", "TrainJob, JobSet restarts it", "met"),
        [
            (
                "rank killed to the next whole step, pods kept",
                f"<= {RECOVERY_GOAL}x",
                f"{result.ratio}x",
                str(result.floor),
                f"{_median(done, OURS):.2f} s",
                f"{_median(done, PEER, PEER_AGAIN):.2f} s",
                f"{_median(done, TRAINJOB):.2f} s",
                result.verdict(RECOVERY_GOAL),
            )
        ],
    )


def _recovery_s(side: Callable[[], AbstractContextManager[Running]], name: str) -> float:
    """Mean seconds from the kill of a rank to the end of the next step by all ranks, over one kill of each rank."""
    with side() as running:
        taken = [each.total_s for each in kill_each(running, name, within_s=RECOVERED_S)]
    return sum(taken) / len(taken)


@contextlib.contextmanager
def _on_lab(site: lab_cluster.LabSite, target: str) -> Generator[Running]:
    """The script on the lab, in a directory that its pods share with this machine."""
    folder = site.out()
    out = folder / "out"
    out.mkdir()
    job = site.job(
        "python", "resumable_loop.py" if target == "lab" else str(site.folder / "resumable_loop.py"), str(out)
    )
    words, given = (
        (site.holdfast(job, target), None) if target == "lab" else (site.applied(), site.manifest(job, target))
    )
    started = time.time()
    with site.command(*words, input=given) as command:
        if given:
            command.wait()  # kubectl has finished when it exits
        (folder / "commands.log").touch()
        commands = () if given else (command,)
        yield Running(commands=commands, started=started, folder=folder, mark=folder.name)
    site.clear()


def _median(rounds: Sequence[Round], *names: str) -> float:
    return median(each[name] for each in rounds for name in names)


if __name__ == "__main__":
    main()
