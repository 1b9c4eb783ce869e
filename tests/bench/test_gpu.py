"""The GPU bench runs here with tiny sizes; its sections fail alone; its page shows what never ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from bench.gpu import promises
from bench.gpu.anonymous import hide
from bench.gpu.promises import NEVER, PROMISES
from bench.gpu.section import HOST, NotLookedAt, Place, Section, measured, run
from bench.result_file import Figure, Result, ResultFile

from bench import result_file
from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.structured import flight_recorder
from holdfast.host.processes import identify

ROOT = Path(__file__).parents[2]
CLAIMS = [claim for promise in PROMISES for claim in promise.claims]
RECORDED = result_file.RESULTS / "recorded"
GPU = "NVIDIA H100 80GB HBM3"
ON_A_GPU_ONLY = {promises.NCCL_LOG, promises.NCCL_REFUSAL, promises.RESUME["float8"]}
COLD_STARTS = {promises.LAUNCH, promises.KILL_COLD}
"""Each imports torch twice more; the prewarmed start takes the same path."""


@pytest.mark.slow
def test_every_section_runs_with_tiny_sizes_on_the_cpu(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench.gpu", "--tiny", "--json", tmp_path / "gpu.json", "--folder", tmp_path)
    records = tmp_path / "records"
    done = subprocess.run((*command, "--records", records), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (tmp_path / "gpu.json").exists(), done.stdout + done.stderr
    file = msgspec.json.decode((tmp_path / "gpu.json").read_bytes(), type=ResultFile)
    assert [result for result in file.results if result.failed] == [], done.stdout
    assert sorted(result.claim for result in file.results) == sorted(CLAIMS)
    assert {result.claim for result in file.results if result.skipped} == ON_A_GPU_ONLY | COLD_STARTS
    exact = [result for result in file.results if result.claim in promises.RESUME.values() and not result.skipped]
    assert [result.claim for result in exact if result.met != "yes"] == []
    assert {tuple(result.command.split()[:3]) for result in file.results} == {("python", "-m", "bench.gpu")}
    assert file.gpu == ""
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "records"}
    dumps = [path for folder in (records, RECORDED) for path in folder.glob("*/flight-recorder-rank-*")]
    assert len(dumps) >= 2
    for path in dumps:
        read = flight_recorder.read(LogSource(name=path.name), path.read_bytes())
        assert read is not None, path
        assert read.rank == 0
        assert str(ROOT).encode() not in path.read_bytes()


def raising(place: Place) -> Iterator[Result]:
    (place.folder / "large").write_text("left behind")
    yield measured("first", Figure(value=1, unit="s"))
    raise RuntimeError("CUDA error: out of memory")


def killed(place: Place) -> Iterator[Result]:
    yield measured("first", Figure(value=1, unit="s"))
    os.kill(os.getpid(), signal.SIGKILL)


def hung(place: Place) -> Iterator[Result]:
    yield measured("first", Figure(value=1, unit="s"))
    (place.records / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(600)


def not_here(place: Place) -> Iterator[Result]:
    yield measured("first", Figure(value=1, unit="s"))
    raise NotLookedAt("3 GB of disk space are free")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "records").mkdir()
    return Place(device=HOST, tiny=True, folder=tmp_path, records=tmp_path / "records")


@pytest.mark.parametrize(
    ("measure", "failed", "skipped"),
    [
        (raising, "RuntimeError: CUDA error: out of memory", ""),
        (killed, "killed by SIGKILL", ""),
        (hung, "not done within 1 s", ""),
        (not_here, "", "3 GB of disk space are free"),
    ],
)
def test_section_that_fails_keeps_what_it_measured_and_says_why_of_the_rest(
    place: Place, measure: Callable[[Place], Iterator[Result]], failed: str, skipped: str
) -> None:
    section = Section(name="any", measure=measure, deadline_s=60, claims=("first", "second"))
    first, second = run(section, place, within_s=1.0 if measure is hung else 60.0)
    assert (str(first.figure), first.failed, first.command) == ("1 s", "", "python -m bench.gpu --only any --tiny")
    assert second.claim == "second"
    assert second.failed.rstrip().endswith(failed)
    assert bool(second.failed) is bool(failed)
    assert second.skipped == skipped
    assert str(ROOT) not in second.failed
    assert not (place.folder / "any").exists()


def test_section_at_its_deadline_leaves_no_process(place: Place) -> None:
    run(Section(name="any", measure=hung, deadline_s=1, claims=()), place, within_s=1.0)
    assert identify(int((place.records / "child").read_text())) is None


def test_page_is_that_of_the_results() -> None:
    files = result_file.read_all()
    assert promises.PAGE.read_text() == promises.page(files), "run `python -m bench.result_file`"


def test_page_without_results_says_of_every_promise_that_it_never_ran() -> None:
    rows = [line for line in promises.page([]).splitlines() if line.startswith("| ")][2:]
    assert len(rows) == sum(max(1, len(promise.claims)) for promise in PROMISES)
    assert [row for row in rows if NEVER not in row] == []


def on_a_gpu(*results: Result) -> ResultFile:
    return ResultFile(bench="gpu-x", title="One", machine="16 cores", versions="torch", gpu=GPU, results=[*results])


def test_page_names_the_gpu_that_a_promise_ran_on() -> None:
    exact, save = promises.RESUME["fp32"], promises.STALL[2]
    shown = promises.page(
        [
            on_a_gpu(
                Result(claim=exact, command="", date="", figure=Figure(value=0, unit="differ"), met="yes"),
                Result(claim=exact, command="", date="", failed="an earlier one", superseded=True),
                Result(claim=save, command="", date="", failed="Traceback\n  line\nRuntimeError: no | memory\n"),
                Result(claim=promises.RESUME["float8"], command="", date="", skipped="torchao is not installed"),
            )
        ]
    )
    rows = {line.split(" | ")[1]: line for line in shown.partition(f"## {GPU}")[0].splitlines() if line[:2] == "| "}
    assert rows[exact].endswith(f"| {GPU} |")
    assert rows[save].endswith(f"| {GPU} (**failed**) |")
    assert rows[promises.RESUME["float8"]].endswith(f"| {NEVER} |")
    figures = shown.partition(f"## {GPU}")[2]
    assert f"| {save} | **failed**: RuntimeError: no \\| memory |" in figures
    assert "not looked at: torchao is not installed" in figures


def test_results_of_a_gpu_are_not_headlines_of_the_benchmarks() -> None:
    missed = Result(claim="missed on a GPU", command="", date="", met="no", headline=True)
    page = result_file.page_with_table(result_file.PAGE.read_text(), [on_a_gpu(missed)])
    assert "missed on a GPU" not in page


def test_every_claim_is_of_one_promise() -> None:
    assert len(set(CLAIMS)) == len(CLAIMS)
    assert [promise.what for promise in PROMISES if bool(promise.claims) is bool(promise.needs)] == []


def test_records_name_no_host_address_or_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7.example")
    log = (
        f"gpu7:4:4 [0] NCCL INFO Bootstrap: Using eth0:10.2.3.4<0> {ROOT}/x 127.0.0.1 fe80::1ff:fe23:4567:890a%eth0<0>"
    )
    assert hide({"frames": [log]}) == {
        "frames": [
            "node0:4:4 [0] NCCL INFO Bootstrap: Using eth0:192.0.2.1<0> /holdfast/x 127.0.0.1 2001:db8::1%eth0<0>"
        ]
    }
    assert hide("NCCL version 2.28.9+cuda13.0 at 12:30:45") == "NCCL version 2.28.9+cuda13.0 at 12:30:45"
