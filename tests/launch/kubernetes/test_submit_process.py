"""Runs that one process starts in several threads have a submit worker each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.launch.kubernetes.submit.submit_process import SubmitProcess, connect, prestart, take_process


@pytest.mark.slow
def test_threads_do_not_take_each_others_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    both_connect = threading.Barrier(2)

    def start(namespace: str) -> SubmitProcess:
        prestart()
        both_connect.wait()
        connect(None, namespace)
        both_connect.wait()
        return take_process()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(start, ("one", "other"))
    assert first.process.pid != second.process.pid
    for each in (first, second):
        each.roll_back()
        assert each.process.returncode is not None
