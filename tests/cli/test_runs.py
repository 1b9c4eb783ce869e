"""Runs as their user sees them: real ones, of a small program."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import RunFinished, StepCommitted
from holdfast.events.log import read_events

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Terminal

    from holdfast.run_dir import RunDir

DEADLINE_S = 200.0

pytestmark = pytest.mark.usefixtures("no_run_left")


def wait_for_line(words: str) -> None:
    """Until rank 0 has written this line."""
    log = api.find_run(None).rank_log(0, 0)
    deadline = time.monotonic() + DEADLINE_S
    while words not in log.read_text().splitlines():
        assert time.monotonic() < deadline, f"rank 0 has not written {words!r}"
        time.sleep(0.01)


def still_goes_on() -> None:
    """The run commits steps that it had not committed before, and can be cancelled."""
    run = api.find_run(None)
    before = api.status(run).leader.step or 0
    for event in api.follow(run):
        if isinstance(event, StepCommitted) and event.step > before:
            break
    assert run.alive()
    api.cancel(run, force=True)
    *_, last = api.follow(run)
    assert isinstance(last, RunFinished)
    assert last.exit_code == ExitCode.CANCELLED


@pytest.mark.slow
def test_run_shows_lines_then_a_summary_and_every_command_knows_it(cli: Cli, stepper: list[str]) -> None:
    ran = cli("run", "--nodes", "2", "--name", "mine", "--", *stepper, "20", "0.01")
    assert ran.code == 0, ran.out + ran.err
    for words in ("run mine-", "step 1 committed", "run succeeded", "where the time went", "ETTR", "logs  /"):
        assert words in ran.out
    run = api.find_run(None).run_id
    assert run in cli("ps").out
    (told,) = cli("ps", "-o", "json").data
    assert (told["run"], told["phase"], told["step"], told["exit_code"]) == (run, "succeeded", 20, 0)
    assert (told["nodes"], told["ranks"], told["took_s"] > 0) == (2, 2, True)
    assert cli("status").out.startswith(f"{run} succeeded")
    status = cli("status", "mine", "-o", "json").data
    account = status["summary"]["account"]
    assert (status["phase"], account["steps"]) == ("succeeded", 20)
    assert status["ettr"] == account["ettr"] > 0
    assert f"ETTR {100 * status['ettr']:.1f} %" in ran.out
    (replica,) = status["status"]["replicas"].values()
    assert replica["seconds_per_step"] > 0
    assert replica["tokens_per_s"] == status["tokens_per_s"] > 0
    logs = cli("logs").out.splitlines()
    assert " [rank 0] rank 0 is done" in logs
    assert " [rank 1] rank 1 is done" in logs
    assert {json.loads(line)["rank"] for line in cli("logs", "--rank", "1", "-o", "json").out.splitlines()} == {1}
    assert "[no-such-rank]" in cli("logs", "-f", "--rank", "2").err
    assert cli("logs", "-f").out.splitlines() == logs
    assert len(cli("events").out.splitlines()) == len(read_events(api.find_run(None).events))
    assert json.loads(cli("events", "-f", "-o", "json").out.splitlines()[-1])["type"] == "run-finished"
    assert cli("attach").code == 0
    assert cli("cancel").code != 0


@pytest.mark.slow
def test_piped_run_shows_what_rank_0_or_every_rank_writes_before_what_came_of_it(cli: Cli) -> None:
    script = "import os; print(f'hello from {os.environ[\"RANK\"]}', flush=True)"
    words = ("--nodes", "2", "--name", "twice", "--", "python", "-c", script)
    lines = [line.partition(" ")[2] if line[:1].isdigit() else line for line in cli("run", *words).out.splitlines()]
    assert lines.index("hello from 0") < lines.index("run succeeded (exit code 0)")
    assert not any("hello from 1" in line for line in lines)
    assert not any("where the time went" in line for line in lines)
    shown = cli("run", "--show", "all", *words).out.splitlines()
    assert {" [rank 0] hello from 0", " [rank 1] hello from 1"} <= {*shown}
    assert cli("status", "twice").out.startswith(api.find_run(None).run_id)


@pytest.mark.slow
def test_exit_code_is_the_jobs_and_the_first_failing_rank_is_marked(cli: Cli, stepper: list[str]) -> None:
    words = ["run", "--nodes", "2", "--set", "recovery.max_restarts=0", "--", *stepper, "20", "0.01", "exit@1@3"]
    ran = cli(*words)
    assert ran.code == 7, ran.out
    assert "what failed" in ran.out
    first = cli("logs").out.splitlines()[0]
    assert first.startswith("![rank 1]")


@pytest.mark.slow
def test_run_as_json_is_the_events_and_nothing_else(cli: Cli) -> None:
    ran = cli("run", "-o", "json", "--", "python3", "-c", "pass")
    kinds = [json.loads(line)["type"] for line in ran.out.splitlines()]
    assert (kinds[0], kinds[-1]) == ("run-created", "run-finished")


@pytest.mark.slow
def test_detached_run_is_attached_to_and_cancelled(cli: Cli, stepper: list[str]) -> None:
    started = cli("run", "-d", "-o", "json", "--", *stepper, "100000", "0.02").data
    assert cli("status").out.startswith(started["run"])
    drilled = cli("drill", "stop", "rank", "0", "--at-step", "99999", "-o", "json").data
    assert (drilled["target"], drilled["index"], drilled["at_step"]) == ("rank", 0, 99999)
    assert cli("cancel").code == 0
    attached = cli("attach")
    assert attached.code == ExitCode.CANCELLED
    assert f"{started['run']} cancelled" in attached.out


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["-d"]])
def test_ctrl_c_while_a_run_starts_cancels_it(
    cli: Cli, stepper: list[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    start = api.start

    def pressed(*given: Any, **named: Any) -> RunDir:
        os.kill(os.getpid(), signal.SIGINT)
        return start(*given, **named)

    monkeypatch.setattr(api, "start", pressed)
    ran = cli("run", *words, "--", *stepper, "100000", "0.02")
    assert ran.code == ExitCode.CANCELLED
    assert "stopping the run" in ran.out


@pytest.mark.slow
def test_ctrl_c_ends_the_run_gently_and_keeps_showing(terminal: Callable[..., Terminal], stepper: list[str]) -> None:
    window = terminal("run", "--", *stepper, "100000", "0.02")
    window.until("step ")
    window.press_ctrl_c()
    window.until("Ctrl-C again kills it")
    assert window.end() == ExitCode.CANCELLED
    assert "cancelled: cancelled on request" in window.text
    assert "where the time went" in window.text


@pytest.mark.slow
def test_second_ctrl_c_ends_what_would_not_end(terminal: Callable[..., Terminal]) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    window = terminal("run", "--set", "recovery.stop_grace_s=60", "--", "python3", "-c", stubborn)
    window.until("running")
    wait_for_line("up")  # from here on it ignores SIGTERM
    window.press_ctrl_c()
    window.until("Ctrl-C again kills it")
    window.press_ctrl_c()
    window.until("killing the run")
    assert window.end() == ExitCode.CANCELLED


@pytest.mark.slow
def test_closed_terminal_leaves_the_run_going(terminal: Callable[..., Terminal], stepper: list[str]) -> None:
    window = terminal("run", "--", *stepper, "100000", "0.02")
    window.until("step ")
    assert window.close() == -signal.SIGHUP
    still_goes_on()


@pytest.mark.slow
def test_ctrl_c_in_attach_leaves_the_run_going(cli: Cli, terminal: Callable[..., Terminal], stepper: list[str]) -> None:
    cli("run", "-d", "--", *stepper, "100000", "0.02")
    window = terminal("attach")
    window.until("step ")
    window.press_ctrl_c()
    assert window.end() == 0
    assert "detached from" in window.text
    still_goes_on()


@pytest.mark.slow
@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminal_that_wants_no_live_view_gets_lines(
    terminal: Callable[..., Terminal], environ: dict[str, str]
) -> None:
    window = terminal("run", "--", "python3", "-c", "pass", **environ)
    assert window.end() == 0
    assert "\x1b[" not in window.raw
    assert "run succeeded" in window.text
