"""The results in bench/results are complete, and the page shows exactly them."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import msgspec
import pytest
from bench.paired_stats import OURS, PEER, PEER_AGAIN

from bench import result_file

FILES = {file.bench: file for file in result_file.read_all()}


def test_page_shows_the_headlines_of_the_results() -> None:
    page = result_file.PAGE.read_text()
    assert page == result_file.page_with_table(page, FILES.values()), "run `python -m bench.result_file`"
    assert len(page.split()) <= 1500


@pytest.mark.parametrize("name", FILES)
def test_every_command_names_a_module_that_exists(name: str) -> None:
    for result in FILES[name].results:
        python, option, module, *_ = shlex.split(result.command)
        assert (python, option) == ("python", "-m")
        assert importlib.util.find_spec(module) is not None, result.command


@pytest.mark.parametrize("name", FILES)
def test_every_missed_goal_is_a_headline_or_part_of_one(name: str) -> None:
    missed = [one.claim for one in FILES[name].results if one.met == "no" and not one.superseded and not one.headline]
    assert name == "diagnosis_score" or missed == []


def test_file_has_the_name_of_its_bench() -> None:
    assert {path.stem for path in result_file.RESULTS.glob("*.json")} == set(FILES)


def test_bench_with_json_writes_a_result_file(tmp_path: Path) -> None:
    path = tmp_path / "help.json"
    rounds = [{PEER: 4.0, OURS: 1.0, PEER_AGAIN: 4.0}, {PEER: 2.0, OURS: 1.0, PEER_AGAIN: 2.0}]
    result_file.save(path, "Title", [result_file.from_rounds("claim", rounds, goal=0.5, unit="s", peer="peer")])
    (found,) = msgspec.json.decode(path.read_bytes(), type=result_file.ResultFile).results
    assert (str(found.ratio), str(found.figure), str(found.peer), found.met) == (
        "0.375× [0.250, 0.500]",
        "1.00 s",
        "peer 3.00 s",
        "yes",
    )


def test_new_result_supersedes_the_earlier_one_of_its_claim_and_keeps_its_place_on_the_page() -> None:
    old = result_file.Result(claim="claim", command="python -m bench.help", date="2026-01-01", headline=True)
    other = result_file.Result(claim="other", command="python -m bench.help", date="2026-01-01")
    file = result_file.ResultFile(bench="help", title="Title", machine="one", versions="1", results=[old, other])
    new = msgspec.structs.replace(file, machine="two", results=[msgspec.structs.replace(old, date="2026-02-02")])
    merged = result_file.merged(file, new)
    shown = [(one.claim, one.date, one.superseded, one.headline) for one in merged.results]
    assert shown == [
        ("claim", "2026-02-02", False, True),
        ("claim", "2026-01-01", True, False),
        ("other", "2026-01-01", False, False),
    ]
