"""Faults of Monarch's own processes, in addition to the run's: its client, and the processes that started agents."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

from bench.paired_stats import say
from holdfast.host.processes import all_pids, by_env, command_line, send_signal
from holdfast.launch.monarch.client_process import FOLDER_NAME
from holdfast.run_dir import RunDir

EVERY = 4
"""Of so many faults of the run, one comes with a fault of Monarch's."""
CLIENT_CHANCE = 0.4


def kill_beside(run: RunDir, seed: int, number: int, record: Path) -> None:
    """Kill Monarch's client or one of its other processes, at every fourth number, and record its kind."""
    if number % EVERY != EVERY - 1:
        return
    chance = random.Random(f"monarch/{seed}/{number}")
    here = by_env(all_pids(), HOLDFAST_NODE=f"{run.run_id}/{FOLDER_NAME}")
    clients = [pid for pid in here if "monarch_client" in command_line(pid)]
    others = sorted({*here} - {*clients})
    chosen = clients if chance.random() < CLIENT_CHANCE or not others else [chance.choice(others)]
    killed = [pid for pid in chosen if send_signal(pid, signal.SIGKILL)]
    kind = "client" if chosen == clients else "process"
    say(f"        and kill Monarch's {kind}: {killed or 'none there'}")
    if killed:
        with record.open("a") as file:
            file.write(f"kill monarch {kind}\n")


def killed_beside(record: Path) -> Counter[str]:
    """The recorded faults by kind, also those before an interruption of the soak."""
    return Counter(record.read_text().splitlines()) if record.exists() else Counter()
