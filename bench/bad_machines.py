"""A machine whose GPU failed, on the lab: whether a run that must avoid it gets a node there all the same.

.venv/bin/python -m bench.bad_machines [--times 50 | --quick] [--json FILE]

Each time a GPU of a node of a running job fails (a drill), which quarantines the node's machine. All other machines
have a taint that makes the scheduler prefer the bad one. Two choices follow: of the machine for the node's replacement,
although the pods of a running job cannot be given another node affinity; and of the machines for a later job of two
nodes. Then the machine is released. The scheduler's own choices that the run refused are counted too: without the
refusal they would have been nodes on a bad machine.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import lab_cluster, result_file
from bench.paired_stats import headline, say, table
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.errors import HoldfastError
from holdfast.events import (
    CheckpointCommitted,
    FaultAction,
    FaultTarget,
    FindingRaised,
    NodeCreated,
    NodeUnavailable,
    RanksStarted,
    StepCommitted,
)
from holdfast.run_dir import RunDir

TIMES, QUICK_TIMES = 50, 2
TRAINER = Path(__file__).parents[1] / "tests" / "programs" / "torch_free_trainer.py"
NODES = 2
WITHIN_S = 180.0
SHOWN = 40
"""Log lines that are shown for a run that does not get its nodes."""
LESS = "example.com/less"
REPLACEMENT, LATER = "replacement in the same run", "later run"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The machines that a run got when one was bad."""

    kind: str
    bad: str
    machines: tuple[str, ...]
    refused: int = 0
    """Pods that the scheduler placed on the bad machine, and the run did not take."""


def main() -> int:
    """Choose, and print how often a bad machine was chosen."""
    parser = argparse.ArgumentParser(
        prog="bench.bad_machines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=TIMES, help="number of choices")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_TIMES} choices")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    times = QUICK_TIMES if options.quick else options.times
    headline(f"{times} choices of machines while one of four is bad, on the lab")
    choices = list[Choice]()
    with lab_cluster.site() as site:
        shutil.copy(TRAINER, site.folder)
        while len(choices) < times:
            choices += _choices(site)
            for each in choices[-2:]:
                chosen = "CHOSEN" if each.bad in each.machines else "avoided"
                say(f"  {each.kind}: {each.bad} {chosen}, refused {each.refused} times")
    return _tell(choices, options.json)


def _choices(site: lab_cluster.LabSite) -> list[Choice]:
    """One failure, and the two choices after it."""
    run = _start(site, "failing")
    (bad,) = (each.machine for each in _created(run) if each.node == 1)
    _prefer(site, bad)
    api.inject_fault(run, target=FaultTarget.GPU, index=1, action=FaultAction.FAIL)
    _until(run, lambda: len([each for each in _created(run) if each.node == 1]) > 1 and _ranks_started(run) > NODES)
    replacement = Choice(
        kind=REPLACEMENT,
        bad=bad,
        machines=tuple(each.machine for each in _created(run)[NODES:]),
        refused=sum(isinstance(each, NodeUnavailable) and bad in each.reason for each in api.events(run)),
    )
    if "machine-quarantined" not in {each.finding.code for each in api.events(run) if isinstance(each, FindingRaised)}:
        raise RuntimeError(f"{bad} was not quarantined\n{_story(run)}")
    _end(site, run)  # its machines are free again, so that there is more than one choice
    later = _start(site, "later")
    choices = [replacement, Choice(kind=LATER, bad=bad, machines=tuple(each.machine for each in _created(later)))]
    _end(site, later)
    api.release_machine(bad, "lab", base=site.folder)
    return choices


def _prefer(site: lab_cluster.LabSite, machine: str) -> None:
    """Have the scheduler prefer a machine."""
    for name in site.lab.kubectl("get", "nodes", "-o", "name").split():
        taint = f"{LESS}-" if name == f"node/{machine}" else f"{LESS}:PreferNoSchedule"
        with contextlib.suppress(HoldfastError):  # it has none to remove
            site.lab.kubectl("taint", "node", name.removeprefix("node/"), taint, "--overwrite")


def _end(site: lab_cluster.LabSite, run: RunDir) -> None:
    api.cancel(run)
    for _ in api.follow(run):
        pass
    site.clear()


def _start(site: lab_cluster.LabSite, name: str) -> RunDir:
    """A job of two nodes whose ranks run, each on a whole machine, as with GPUs."""
    fields = {"name": name, "checkpoint": name, "resources.cpu": 100}
    run = api.start(site.job("python", TRAINER.name, "100000", "0.1", **fields), "lab", base=site.folder)
    _until(run, lambda: _ranks_started(run) >= NODES)
    return run


def _created(run: RunDir) -> list[NodeCreated]:
    return [event for event in api.events(run) if isinstance(event, NodeCreated)]


def _ranks_started(run: RunDir) -> int:
    return sum(isinstance(event, RanksStarted) for event in api.events(run))


def _until(run: RunDir, reached: Callable[[], bool]) -> None:
    lab_cluster.until(reached, WITHIN_S, lambda: _story(run))


def _story(run: RunDir) -> str:
    told = [event for event in api.events(run) if not isinstance(event, StepCommitted | CheckpointCommitted)]
    return "\n".join(map(event_line, told[-SHOWN:]))


def _tell(choices: Sequence[Choice], path: Path | None) -> int:
    rows = [
        (
            kind,
            str(len(those := [each for each in choices if each.kind == kind])),
            str(sum(each.bad in each.machines for each in those)),
            str(sum(each.refused for each in those)),
        )
        for kind in (REPLACEMENT, LATER)
    ]
    say("")
    say(table(("choice", "times", "bad machine chosen", "placed there and refused"), rows))
    chosen = sum(each.bad in each.machines for each in choices)
    claim = f"a bad machine chosen again within its quarantine, of {len(choices)} choices"
    result = result_file.absolute(claim, chosen, "times", goal=0, decimals=0)
    result_file.save(path, "Bad machines on Kubernetes", [result])
    return 1 if chosen else 0


if __name__ == "__main__":
    sys.exit(main())
