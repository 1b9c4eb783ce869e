"""Faults of Monarch's processes, beside those of the run's: its client, and the processes that started agents."""

from __future__ import annotations

import random
import signal

from bench.paired_stats import say
from holdfast.host.processes import all_pids, by_env, command_line, send_signal
from holdfast.launch.monarch.client_process import FOLDER_NAME
from holdfast.run_dir import RunDir

EVERY = 4
"""Of so many faults of the run, one has a fault of Monarch's beside it."""
CLIENT_CHANCE = 0.4


def kill_beside(run: RunDir, seed: int, number: int) -> None:
    """Kill Monarch's client or one of its other processes, at every fourth number."""
    if number % EVERY != EVERY - 1:
        return
    chance = random.Random(f"monarch/{seed}/{number}")
    here = by_env(all_pids(), HOLDFAST_NODE=f"{run.run_id}/{FOLDER_NAME}")
    clients = [pid for pid in here if "monarch_client" in command_line(pid)]
    others = sorted({*here} - {*clients})
    chosen = clients if chance.random() < CLIENT_CHANCE or not others else [chance.choice(others)]
    for pid in chosen:
        send_signal(pid, signal.SIGKILL)
    say(f"        and kill {'the client' if chosen == clients else 'a process'} of Monarch: {chosen or 'none there'}")
