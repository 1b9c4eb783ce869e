"""What the verbs answer where no run is started, and how they refuse."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.waiting import until

from holdfast import __version__, api
from holdfast.cli.app import COMMANDS
from holdfast.cli.error_report import wants_json
from holdfast.cli.output import working, working_after
from holdfast.errors import ExitCode
from holdfast.events import RunCreated
from holdfast.events.log import encode_line
from holdfast.job.run_spec import RunSpec
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.golden import Golden


def test_no_word_shows_the_verbs(cli: Cli) -> None:
    answer = cli()
    assert answer.code == ExitCode.OK
    for verbs in COMMANDS.values():
        for verb in verbs:
            assert f"  {verb.__name__.replace('_', ' ')} " in answer.out


def test_version_is_one_line_for_a_report_of_an_error(cli: Cli) -> None:
    answer = cli("--version")
    assert answer.code == ExitCode.OK
    torch = metadata.version("torch")
    assert answer.out == f"holdfast {__version__}, Python {platform.python_version()}, torch {torch}\n"


def test_version_is_printed_without_torch(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert cli("--version").out == f"holdfast {__version__}, Python {platform.python_version()}\n"


def test_help_of_each_verb_fits_its_line(cli: Cli) -> None:
    assert "..." not in cli("--help").out.partition("Describe:")[2]


def test_explain_takes_codes_as_they_are_seen(cli: Cli, golden: Golden) -> None:
    golden(cli.transcript(["explain", "-9"], ["explain", "Xid", "79"], ["explain", "ncclSytemError"]))
    assert json.loads(cli("explain", "ncclRemoteError", "-o", "json").out)["code"] == "ncclRemoteError"


def test_explain_without_a_code_lists_all(cli: Cli) -> None:
    told = cli("explain").out
    listed = [json.loads(line)["code"] for line in cli("explain", "-o", "json").out.splitlines()]
    assert len(listed) > 200
    assert [code for code in listed if code not in told] == []


WRONG = (
    ["rnu"],
    ["run", "--nodez", "2"],
    ["run", "--ranks-per-node", "two"],
    ["run", "--nodes", "2.5", "--", "true"],
    ["render", "--nodes", "two", "--", "python3"],
    ["logs", "--rank"],
    ["drill"],
    ["drill", "smash", "rank:1"],
    ["drill", "partion", "node:1"],
    ["drill", "kill", "nod:1"],
    ["drill", "stop", "rank:1", "--for", "soon"],
    ["drill", "kill", "rank"],
    ["drill", "kill", "rank:-1"],
    ["drill", "kill", "rank:1:2"],
    ["drill", "kill", "controller:0"],
    ["run", "job.yaml", "--", "true"],
    ["run", "--nodes", "2", "sh", "-c", "true"],
    ["run", "--show", "0-x", "--", "true"],
)


@pytest.mark.slow
def test_wrong_command_lines_are_findings(cli: Cli, golden: Golden) -> None:
    golden(cli.transcript(*WRONG))
    for words in WRONG:
        answer = cli(*words)
        assert answer.err.startswith("error: "), words
        refused = json.loads(cli(*[*words[:1], "-o", "json", *words[1:]]).err)
        assert refused["exit_code"] == answer.code, words


def test_command_line_job_that_cannot_start_is_refused_with_the_fix(cli: Cli, golden: Golden) -> None:
    Path("tool").write_text("#!/bin/sh\n")
    Path("tool").chmod(0o644)
    golden(cli.transcript(["run", "--", "./tool"]))


def test_render_of_a_python_script_is_what_its_command_renders_as_torchrun_takes_it(cli: Cli) -> None:
    Path("train.py").touch()
    rendered = cli("render", "--nodes", "2", "train.py", "--lr", "1e-3")
    assert rendered.out == cli("render", "--nodes", "2", "--", "python", "train.py", "--lr", "1e-3").out
    assert "$ python train.py --lr 1e-3" in rendered.out


def test_job_file_that_is_marked_executable_is_a_job_file(cli: Cli) -> None:
    Path("job.yaml").write_text("command: [true]\n")
    Path("job.yaml").chmod(0o755)
    assert cli("render", "./job.yaml").code == ExitCode.OK


def test_render_of_a_hundred_thousand_nodes_shows_the_first_and_the_last(cli: Cli) -> None:
    rendered = cli("render", "--nodes", "100000", "--", "true").out
    assert "\nRANK=7\n" in rendered
    assert "\nRANK=99999\n" in rendered
    assert "# nodes 8 to 99998 differ from these in their own numbers only" in rendered
    assert rendered.count("\nWORLD_SIZE=") == 9


@pytest.mark.parametrize(
    ("words", "json_wanted"),
    [
        (["ps", "-o", "json"], True),
        (["ps", "-ojson"], True),
        (["ps", "--output=json"], True),
        (["ps", "-o", "text"], False),
        (["run", "--", "x", "-o", "json"], False),
        (["run", "x.py", "-o", "json"], False),
        (["-o"], False),
    ],
)
def test_json_is_wanted_only_by_holdfasts_own_flag(words: list[str], *, json_wanted: bool) -> None:
    assert wants_json(words) is json_wanted


def test_init_writes_a_file_that_validates_and_never_overwrites(cli: Cli) -> None:
    assert cli("init").code == ExitCode.OK
    Path("train.py").touch()
    written = Path("job.yaml").read_text()
    again = cli("init")
    assert again.code == ExitCode.USAGE
    assert "[file-exists]" in again.err
    assert Path("job.yaml").read_text() == written
    assert cli("init", "nowhere/job.yaml").code == ExitCode.NOT_FOUND
    assert cli("init", "mine.yaml", "--image", "team/train:3").code == ExitCode.OK
    assert api.load_job(Path("mine.yaml")).image == "team/train:3"
    assert "[bad-usage]" in cli("init", "other.yaml", "--image", "a", "--from", "mine.yaml").err
    assert "job.yaml" in cli("validate").out


def test_validate_lists_every_problem_of_every_file(cli: Cli, golden: Golden) -> None:
    Path("good.yaml").write_text("command: [python3, -c, pass]\n")
    Path("bad.yaml").write_text("comand: x\nnodes: none\n")
    golden(cli.transcript(["validate", "good.yaml", "bad.yaml", "gone.yaml"]))
    told = cli("validate", "good.yaml", "bad.yaml", "-o", "json").data
    assert [(one["file"], one["valid"]) for one in told] == [("good.yaml", True), ("bad.yaml", False)]
    assert cli("validate", "good.yaml").code == ExitCode.OK


def test_validate_refuses_what_cannot_run_here(cli: Cli, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    Path("job.yaml").write_text("command: no-such-program-anywhere\n")
    golden(cli.transcript(["validate"]))


@pytest.mark.slow
def test_warnings_are_printed_with_their_lines_before_anything_starts(cli: Cli) -> None:
    Path("job.yaml").write_text("image: foo\ncommand: [echo, '&&']\nenv: {MY_TOKEN: x}\n")
    for verb in ("validate", "run"):
        answer = cli(verb)
        told = answer.out if verb == "validate" else answer.err
        assert answer.code == ExitCode.OK
        for line, code in ((1, "not-used-locally"), (2, "shell-syntax"), (3, "secret-in-env")):
            assert f"job.yaml:{line}" in told
            assert f"[{code}]" in told
    assert "[shell-syntax]" in cli("render").err
    told = json.loads(cli("run", "-o", "json", "--set", "image=foo", "--", "true").err)
    assert [(one["code"], one["where"]) for one in told["findings"]] == [("not-used-locally", "--set image")]


def test_targets_next_to_the_job_and_in_the_current_folder_are_found(cli: Cli) -> None:
    for folder, name in ((Path("jobs"), "near"), (Path(), "here")):
        (folder / ".holdfast" / "targets").mkdir(parents=True)
        (folder / ".holdfast" / "targets" / f"{name}.yaml").write_text("kind: local\n")
    Path("jobs/job.yaml").write_text("command: 'true'\n")
    for name in ("near", "here"):
        assert cli("validate", "jobs/job.yaml", "--on", name).code == ExitCode.OK
    assert cli("target").out == "here\nlocal\n"


def test_render_takes_a_command_and_shows_no_secret(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    words = ["render", "--nodes", "2", "--name", "shown", "--set", "secrets={TOKEN: {env: MY_TOKEN}}"]
    answer = cli(*words, "--", "python3", "-c", "pass", "--set", "theirs")
    assert answer.code == ExitCode.OK
    assert "WORLD_SIZE=2" in answer.out
    assert "--set theirs" in answer.out
    told = cli(*words, "-o", "json", "--", "python3")
    assert told.data["job"]["name"] == "shown"
    assert "hunter2" not in answer.out + told.out


def test_range_of_nodes_is_taken_and_rendered_at_its_full_size(cli: Cli) -> None:
    answer = cli("render", "--nodes", "2..3", "--", "python3", "-c", "pass")
    assert answer.code == ExitCode.OK
    assert answer.out.startswith("# on 3 nodes; on fewer, down to 2, ")
    assert "WORLD_SIZE=3" in answer.out
    assert "HOLDFAST_BATCH_WORLD_SIZE=3" in answer.out


def test_schema_is_json(cli: Cli) -> None:
    assert "command" in cli("schema").data["properties"]


def test_fabrics_and_targets_are_listed_and_shown(cli: Cli, golden: Golden) -> None:
    shown = (["fabric"], ["fabric", "infiniband"], ["fabric", "token-ring"], ["target"], ["target", "local"])
    golden(cli.transcript(*shown))
    assert [row["name"] for row in cli("fabric", "efa", "-o", "json").data] == ["efa"]
    assert cli("target", "local", "-o", "json").data["kind"] == "local"
    assert cli("target", "moon").code == ExitCode.NOT_FOUND


def test_target_may_have_the_name_of_a_command_of_two_words(cli: Cli) -> None:
    for word in ("init", "fetch"):
        assert "needs an argument" in cli("target", word).err
    folder = Path(".holdfast", "targets")
    folder.mkdir(parents=True)
    (folder / "fetch.yaml").write_text("fabric: tcp\n")
    assert "fabric: tcp" in cli("target", "fetch").out
    assert "[nothing-to-fetch]" in cli("target", "fetch", "fetch").err


def test_no_runs_is_a_plain_message(cli: Cli) -> None:
    assert cli("ps").out.startswith("no runs yet")
    assert cli("ps", "-o", "json").data == []
    for verb in ("status", "logs", "events", "attach", "cancel"):
        assert cli(verb).code == ExitCode.NOT_FOUND


def test_fault_of_our_own_keeps_its_details_in_a_file(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("impossible sum")

    monkeypatch.setattr(api, "runs", broken)
    answer = cli("ps")
    assert answer.code == ExitCode.INTERNAL
    assert "[internal]" in answer.err
    assert "Traceback" not in answer.err + answer.out
    (details,) = (home / "faults").iterdir()
    assert str(details) in answer.err
    assert "impossible sum" in details.read_text()
    assert stat.S_IMODE(details.stat().st_mode) == 0o600


def test_refusal_of_the_system_is_no_fault_of_ours(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "/full/disk")

    monkeypatch.setattr(api, "runs", full)
    answer = cli("ps")
    assert answer.code == ExitCode.CANNOT_RUN_HERE
    assert "No space left on device" in answer.err
    assert "/full/disk" in answer.err
    assert not (home / "faults").exists()


def test_interrupted_verb_ends_as_cancelled(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "runs", interrupted)
    assert cli("ps").code == ExitCode.CANCELLED


def make_run(name: str, *lines: bytes) -> RunDir:
    """A run without a supervisor, with this log."""
    run = RunDir.create(name)
    job = api.load_job(None, command=["true"])
    run.job.write_text(RunSpec(job=job, base="/", created_at=1.0, fabric="tcp").model_dump_json(exclude_defaults=True))
    run.events.write_bytes(b"".join(lines))
    return run


def test_run_that_cannot_be_read_is_listed_beside_the_others(cli: Cli) -> None:
    newer = make_run("newer", encode_line(RunCreated(at=1, run="newer", format=99, job={})))
    damaged = make_run("damaged", b"\xff{\n", b'{"type":"rank-exited"\n')
    whole = make_run("whole", encode_line(RunCreated(at=1, run="whole", job={})))
    told = {one["run"]: one["phase"] for one in cli("ps", "-o", "json").data}
    assert told == {newer.run_id: "unreadable", damaged.run_id: "unreadable", whole.run_id: "pending"}
    assert cli("ps").out.count("unreadable") == 2
    assert "[log-format-unsupported]" in cli("status", newer.run_id).err


def test_run_without_a_controller_is_reported_with_what_to_do(cli: Cli) -> None:
    run = make_run("lonely").run_id
    assert f"`holdfast attach {run}`" in cli("ps").out
    shown = cli("status").out
    assert f"{run}  no controller; last known: pending" in shown
    assert "[controller-dead]" in shown
    assert cli("status", "-o", "json").data["orphaned"] is True
    said = " ".join(cli("diagnose").out.split())
    assert said.startswith("nothing has failed so far, but the run has no controller")
    assert f"nothing restarts it. What to do: holdfast attach {run}" in said


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers for the last word of a command line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_HOLDFAST_COMPLETE": "complete_bash"}
    environ = {**os.environ, **words, "HOLDFAST_HOME": str(folder)}
    program = "import sys; sys.argv[0] = 'holdfast'; from holdfast.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_shell_completes_runs_codes_targets_and_fields(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo-k3m9tz"
    run.mkdir(parents=True)
    (run / "job.json").write_text("{}")
    assert completed("holdfast report de", tmp_path) == ["demo-k3m9tz"]
    assert "rank-hung" in completed("holdfast explain rank-h", tmp_path)
    assert completed("holdfast status --on loc", tmp_path) == ["local"]
    assert completed("holdfast run --set ranks", tmp_path) == ["ranks_per_node="]


def test_slow_command_shows_what_it_does_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with working("reading the event log"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with working("reading the event log"):
        pass
    answer = capsys.readouterr()
    assert (answer.out, "reading the event log" in answer.err) == ("", True)


def test_command_that_turns_out_to_be_slow_shows_what_it_does_and_a_quick_one_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with working_after(0.0, "packing"):  # no terminal
        pass
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with working_after(60.0, "packing"):
        pass
    assert capsys.readouterr() == ("", "")
    with working_after(0.0, "packing"):
        until(lambda: "packing" in capsys.readouterr().err)
    assert [each for each in threading.enumerate() if isinstance(each, threading.Timer)] == []
