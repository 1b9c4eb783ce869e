"""Every alert in a drill: real runs, a real Prometheus and a real Alertmanager, whose webhook this bench is.

.venv/bin/python -m bench.alert_drills [--only NAMES] [--json FILE]

Each drill starts a run, causes what the alert is about, waits for the message that it fires, ends the cause, and waits
for the message that it is resolved. Rules are those that `holdfast observe render` writes, with all times divided by
60, so that half an hour is half a minute. It needs prometheus and prometheus-alertmanager, and root for a small disk.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import yaml

from bench import result_file
from bench.drill_diagnosis import end_run, wait_until
from bench.nccl_log_generator import Job, Version
from bench.paired_stats import headline, say, table
from bench.replica_program import free_port
from holdfast import api
from holdfast.control.policy import PROGRESS_STEPS
from holdfast.errors import HoldfastError
from holdfast.events import AnyEvent, CheckpointCommitted, FaultAction, FaultTarget, StepCommitted
from holdfast.observe.alert_catalog import ALERTS
from holdfast.observe.monitoring_files import RULES_FILE
from holdfast.run_dir import RunDir

FASTER = 60
"""By what the rules' times are divided."""
WITHIN_S = 240.0
"""Longest wait for a message: the machine may be busy."""
AT_ONCE = 2
PROGRAMS = Path(__file__).parent / "programs"
STEPS, STEP_S = 100_000, 0.05
LOOP = shlex.join((sys.executable, str(PROGRAMS / "watched_loop.py"), str(STEPS), str(STEP_S)))
TORCH_FREE = Path(__file__).parents[1] / "tests" / "programs" / "torch_free_trainer.py"
NCCL_ON_SOCKETS = Job(version=Version.of("2.27.7"), nodes=2, gpus=1, channels=2, nics=2, network="Socket", gdr=False)
SMALL_DISK_BYTES = 32 << 20
_SECONDS = re.compile(r"(?<=[<>] )\d{3,}\b|(?<=\[)\d+(?=s\])")
"""Times in the expressions: what is compared with 100 or more, and ranges."""


class Place:
    """A folder for runs, and what Alertmanager has said of them."""

    def __init__(self, base: Path, messages: Messages) -> None:
        self.base, self.messages = base, messages

    def start(self, command: str, *overrides: str, nodes: int | str = 2, target: str = "local") -> RunDir:
        """Start a shell command as a run."""
        settings = ("recovery.prewarm=false", "env.OMP_NUM_THREADS=1", f"nodes={nodes}", *overrides)
        job = api.load_job(None, command=("sh", "-c", command), nodes=None, name="drilled", overrides=settings)
        return api.start(job, target, base=self.base)

    def fault(self, run: RunDir, action: FaultAction, target: FaultTarget, **more: Any) -> None:
        """Drill a run that has made some steps, on its rank or node 1."""
        wait_until(run, lambda event: isinstance(event, StepCommitted) and event.step >= 20)
        index = 0 if target in (FaultTarget.CHECKPOINTS, FaultTarget.RUN_DIR) else 1
        api.inject_fault(run, target=target, index=index, action=action, **more)


@dataclass
class Messages:
    """What Alertmanager has told its webhook."""

    at: dict[tuple[str, str, str], float] = field(default_factory=dict[tuple[str, str, str], float])
    """Time of the first message by alert, run and status."""
    new: threading.Condition = field(default_factory=threading.Condition)

    def add(self, document: Mapping[str, Any]) -> None:
        """Keep what a message says."""
        with self.new:
            for alert in document["alerts"]:
                labels = alert["labels"]
                self.at.setdefault((labels["alertname"], labels.get("run", ""), alert["status"]), time.time())
            self.new.notify_all()

    def wait(self, alert: str, run: str, status: str) -> float:
        """When a message came; raises TimeoutError."""
        with self.new:
            if not self.new.wait_for(lambda: (alert, run, status) in self.at, WITHIN_S):
                raise TimeoutError(f"{alert} was not {status} within {WITHIN_S:g} s")
            return self.at[alert, run, status]


@dataclass(frozen=True, kw_only=True)
class Drill:
    """How a run comes to have alerts, and to lose them."""

    alerts: tuple[str, ...]
    cause: str
    start: Callable[[Place], RunDir]
    """Start the run and cause what the alerts are about."""
    end: Callable[[RunDir], object] = lambda _: None
    """End the cause, once all alerts have fired; if nothing, time or the run does it."""
    cancels: bool = False
    """Whether the end of the run ends the alerts."""


def _drilled(action: FaultAction, target: FaultTarget, *overrides: str, **more: Any) -> Callable[[Place], RunDir]:
    def start(place: Place) -> RunDir:
        run = place.start(f"exec {LOOP}", *overrides, target="many")
        place.fault(run, action, target, **more)
        return run

    return start


def _fails(place: Place) -> RunDir:
    return place.start("exit 3", "recovery.max_restarts=0")


def _starts_late(place: Place) -> RunDir:
    return place.start(f"sleep 60; exec {LOOP}", "checkpoint.every_steps=1000000")


def _restarts_late(place: Place) -> RunDir:
    run = place.start(f'[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] || sleep 30; exec {LOOP}')
    place.fault(run, FaultAction.KILL, FaultTarget.RANK)
    return run


def _loops(place: Place) -> RunDir:
    train = shlex.join((sys.executable, str(TORCH_FREE), str(STEPS), str(STEP_S)))
    run = place.start(f"exec {train}", "recovery.max_restarts=20")
    for attempt in range(5):
        wait_until(run, _has_made_progress(attempt))  # else it is a crash loop, which ends the run
        api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
    return run


def _has_made_progress(attempt: int) -> Callable[[AnyEvent], bool]:
    made = 0

    def made_progress(event: AnyEvent) -> bool:
        nonlocal made
        made += isinstance(event, StepCommitted) and event.attempt == attempt
        return made > PROGRESS_STEPS

    return made_progress


def _on_sockets(place: Place) -> RunDir:
    folder = Path(tempfile.mkdtemp(dir=place.base))
    for rank in range(NCCL_ON_SOCKETS.ranks):
        (folder / f"nccl-{rank}.log").write_bytes(b"".join(NCCL_ON_SOCKETS.log(rank)))
    train = shlex.join((sys.executable, str(TORCH_FREE), str(STEPS), str(STEP_S)))
    log = f'cat {folder}/nccl-$RANK.log >> "$(echo "$NCCL_DEBUG_FILE" | sed s/%p/$$/)"'
    return place.start(f"{log}; exec {train}", "fabric=infiniband", "fabric.on_fallback=warn")


def _lacks_a_machine(place: Place) -> RunDir:
    return place.start(f"exec {LOOP}", "nodes.min_nodes_wait_s=45", nodes="1..2", target="one")


def _loses_a_machine(place: Place) -> RunDir:
    run = place.start(f"exec {LOOP}", "nodes.min_nodes_wait_s=1", nodes="1..2", target="two")
    place.fault(run, FaultAction.REMOVE, FaultTarget.NODE)
    return run


def _returns(run: RunDir) -> None:
    api.inject_fault(run, target=FaultTarget.NODE, index=1, action=FaultAction.RESTORE)


def _fills_its_disk(place: Place) -> RunDir:
    disk = place.base / "disk"
    run = place.start(f"exec {LOOP}", f"checkpoint.path={disk}", "checkpoint.every_steps=20")
    wait_until(run, lambda event: isinstance(event, CheckpointCommitted))
    place.fault(run, FaultAction.FILL, FaultTarget.CHECKPOINTS, for_s=5.0)
    return run


_F, _T = FaultAction, FaultTarget
DRILLS = (
    Drill(
        alerts=("HoldfastEttrLow", "HoldfastCheckpointOld"),
        cause="its ranks sleep for a minute, then save no checkpoint",
        start=_starts_late,
        end=lambda run: api.checkpoint(run, timeout_s=60),
        cancels=True,
    ),
    Drill(alerts=("HoldfastRunFailed",), cause="its command fails", start=_fails),
    Drill(
        alerts=("HoldfastRunStalled",),
        cause="`stop rank:1 --for 60`",
        start=_drilled(_F.STOP, _T.RANK, "recovery.step_timeout_s=off", for_s=60.0),
    ),
    Drill(alerts=("HoldfastRunRecovering",), cause="`kill rank:1`; ranks sleep after it", start=_restarts_late),
    Drill(alerts=("HoldfastRestartsLooping",), cause="`kill rank:1`, five times", start=_loops),
    Drill(
        alerts=("HoldfastFabricFallback",),
        cause="NCCL's log says sockets, the job InfiniBand",
        start=_on_sockets,
        cancels=True,
    ),
    Drill(
        alerts=("HoldfastRunNotStarting", "HoldfastDegraded"),
        cause="`nodes: 1..2` on one machine",
        start=_lacks_a_machine,
        cancels=True,
    ),
    Drill(
        alerts=("HoldfastNodeDown",),
        cause="`remove node:1` of `nodes: 1..2`, then `restore node:1`",
        start=_loses_a_machine,
        end=_returns,
    ),
    Drill(alerts=("HoldfastStraggler",), cause="`slow forward:1`", start=_drilled(_F.SLOW, _T.FORWARD, amount=2.0)),
    Drill(alerts=("HoldfastRunSlow",), cause="`throttle gpu:1`", start=_drilled(_F.THROTTLE, _T.GPU)),
    Drill(
        alerts=("HoldfastGpuFault", "HoldfastMachineQuarantined"),
        cause="`fail gpu:1`",
        start=_drilled(_F.FAIL, _T.GPU),
    ),
    Drill(alerts=("HoldfastNetworkFault",), cause="`link-errors nic:1`", start=_drilled(_F.LINK_ERRORS, _T.NIC)),
    Drill(alerts=("HoldfastNotFinite",), cause="`nan loss:1`", start=_drilled(_F.NAN, _T.LOSS)),
    Drill(
        alerts=("HoldfastSilentCorruption",),
        cause="`bitflip weights:1`",
        start=_drilled(_F.BITFLIP, _T.WEIGHTS, "recovery.verify_every_steps=10"),
    ),
    Drill(
        alerts=("HoldfastMemoryGrowing",),
        cause="`leak rank:1`",
        start=_drilled(_F.LEAK, _T.RANK, "resources.memory=700MiB", amount=1.0),
    ),
    Drill(alerts=("HoldfastDisk",), cause="`fill checkpoints --for 5`", start=_fills_its_disk),
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of one alert."""

    alert: str
    cause: str
    fired_s: float = -1.0
    """Seconds from the start of the run to the message."""
    resolved_s: float = -1.0
    """Seconds from there to the second message."""
    failed: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        if self.failed:
            return self.alert, self.cause, self.failed, ""
        return self.alert, self.cause, f"{self.fired_s:.0f} s", f"{self.resolved_s:.0f} s"


def measure(drill: Drill, place: Place) -> list[Seen]:
    """Run one drill."""
    began = time.time()
    seen = {alert: Seen(alert=alert, cause=drill.cause) for alert in drill.alerts}
    run: RunDir | None = None
    try:
        run = drill.start(place)
        fired = {alert: place.messages.wait(alert, run.run_id, "firing") for alert in drill.alerts}
        drill.end(run)
        if drill.cancels:
            end_run(run)
        for alert in drill.alerts:
            resolved = place.messages.wait(alert, run.run_id, "resolved")
            seen[alert] = replace(seen[alert], fired_s=fired[alert] - began, resolved_s=resolved - fired[alert])
    except (HoldfastError, TimeoutError, OSError) as error:
        for alert in drill.alerts:
            if seen[alert].fired_s < 0:
                seen[alert] = replace(seen[alert], failed=f"{type(error).__name__}: {error}")
    finally:
        if run is not None and not drill.cancels:
            with contextlib.suppress(HoldfastError, TimeoutError):
                end_run(run)
    for each in seen.values():
        say("  ".join(each.row))
    return list(seen.values())


def faster(rules: str) -> str:
    """The rules file with every time divided by FASTER."""
    document: dict[str, Any] = yaml.safe_load(rules)
    for rule in (rule for group in document["groups"] for rule in group["rules"]):
        rule["expr"] = _SECONDS.sub(lambda found: str(int(found[0]) // FASTER), rule["expr"])
        if "for" in rule:
            rule["for"] = f"{int(rule['for'].removesuffix('s')) // FASTER}s"
    return yaml.safe_dump(document)


@contextlib.contextmanager
def monitoring(base: Path) -> Generator[Messages]:
    """Prometheus, Alertmanager and `holdfast metrics serve`, for the runs of HOLDFAST_HOME."""
    messages, folder = Messages(), base / "monitoring"
    api.write_monitoring_files(folder)
    (folder / RULES_FILE).write_text(faster((folder / RULES_FILE).read_text()))
    prometheus, alertmanager, metrics = free_port(), free_port(), free_port()
    with contextlib.ExitStack() as stack:
        webhook = stack.enter_context(_webhook(messages))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / RULES_FILE)],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
            "scrape_configs": [
                {"job_name": "holdfast", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]},
            ],
        }
        route = {
            "receiver": "bench",
            "group_by": ["alertname", "run"],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        }
        hook = {"url": f"http://127.0.0.1:{webhook}/", "send_resolved": True}
        receivers = [{"name": "bench", "webhook_configs": [hook]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "alertmanager.yml").write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
        for words in (
            (sys.executable, "-m", "holdfast", "metrics", "serve", "--port", str(metrics)),
            (
                "prometheus-alertmanager",
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/alertmanager",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            ),
            (
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/tsdb",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            ),
        ):
            stack.enter_context(_program(words, folder / f"{Path(words[0]).name}.log"))
        yield messages


@contextlib.contextmanager
def _program(words: tuple[str, ...], log: Path) -> Generator[None]:
    with log.open("wb") as file, subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT) as running:
        try:
            yield
        finally:
            running.terminate()


@contextlib.contextmanager
def _webhook(messages: Messages) -> Generator[int]:
    class Webhook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.add(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextlib.contextmanager
def _small_disk(folder: Path) -> Generator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> int:
    """Run the drills, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.alert_drills", description=__doc__)
    parser.add_argument("--only", help="alerts, separated by commas")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    drills = [drill for drill in DRILLS if not options.only or set(drill.alerts) & set(options.only.split(","))]
    left_out = {alert.name for alert in ALERTS} - {alert for drill in DRILLS for alert in drill.alerts}
    headline(f"{sum(len(drill.alerts) for drill in drills)} of {len(ALERTS)} alerts in a drill")
    with (
        tempfile.TemporaryDirectory(prefix="alerts-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as stack,
    ):
        base = Path(name)
        os.environ["HOLDFAST_HOME"] = str(base / "home")
        targets = base / ".holdfast" / "targets"
        targets.mkdir(parents=True)
        for target, capacity in (("one", 1), ("two", 2), ("many", 20)):
            (targets / f"{target}.yaml").write_text(f"kind: local\ncapacity: {capacity}\n")
        stack.enter_context(_small_disk(base / "disk"))
        place = Place(base, stack.enter_context(monitoring(base)))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            seen = [each for result in pool.map(measure, drills, repeat(place)) for each in result]
    say("")
    say(table(("alert", "cause", "fires after", "resolved after"), [each.row for each in seen]))
    good = sum(not each.failed for each in seen)
    say(f"\n{good} of {len(seen)} fired and resolved" + (f"; no drill: {', '.join(left_out)}" if left_out else ""))
    result_file.save(options.json, "Alerts in drills", [_result(seen, good)])
    return 0 if good == len(ALERTS) else 1


def _result(seen: list[Seen], good: int) -> result_file.Result:
    return result_file.Result(
        claim="alerts that fire and resolve in a drill, through a real Prometheus and Alertmanager",
        command=result_file.command(),
        date=result_file.today(),
        figure=result_file.Figure(value=good, unit=f"of {len(ALERTS)} alerts"),
        goal="all",
        met="yes" if good == len(ALERTS) else "no",
        conditions=f"real runs of 2 nodes on CPU; all times of the rules divided by {FASTER}",
        details={each.alert: " · ".join(each.row[1:]) for each in seen},
        headline=True,
    )


if __name__ == "__main__":
    sys.exit(main())
