"""One pass over a log finds what each pattern finds alone, with Hyperscan and without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.diagnose.pattern_scan import compile_scan
from holdfast.diagnose.redact import Redactor
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.scanner import RuleMatcher
from holdfast.diagnose.secret_patterns import patterns
from holdfast.errors import ExitCode, HoldfastError

INCIDENTS = Path(__file__).parents[1] / "incidents"
EXTRA = ("hyperscan", "detect_secrets")
"""What the extra `diagnose` installs."""


@pytest.fixture(params=["hyperscan", "re2"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "re2":
        monkeypatch.setitem(sys.modules, "hyperscan", None)


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_one_pass_for_all_rules_finds_in_every_line_what_each_finds_alone() -> None:
    # Hyperscan 5.4 loses matches of patterns that begin alike: `\[\d+\] is setting up` beside `\[-?\d+\] \S{1,60}`.
    known = RuleMatcher(RULES.values(), is_large=True)
    said = [line for rule in known.rules for line in rule.matches.values()]
    for path in INCIDENTS.glob("*.jsonl"):
        said += [text for row in path.read_text().splitlines() for text in json.loads(row)["evidence"]]
    lines = {line.encode() for text in said for line in text.splitlines() if line.strip()}
    data = b"\n".join(lines) + b"\n"
    found = {data[start:end].rstrip(b"\n"): set(which) for start, end, which in known.candidate_lines(data)[0]}
    for line in lines:
        alone = {index for index in range(len(known.rules)) if known.search(index, line)}
        assert alone <= found.get(line, set()), [known.rules[index].code for index in alone - found.get(line, set())]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("data", [b"a1\n\nb2", b"a1\n\nb2\n"])
def test_matches_are_reported_with_their_ends(data: bytes) -> None:
    found: list[tuple[int, int]] = []
    scan = compile_scan([rb"^b\d$", rb"a\d$"])
    scan(data, lambda which, _begin, end, _flags, _context: found.append((which, end)))
    assert sorted(found) == [(0, 6), (1, 2)]


@pytest.mark.parametrize("module", ["holdfast.agent.agent", "holdfast.controller_main", "holdfast.train"])
def test_a_run_loads_nothing_of_the_extra(module: str) -> None:
    script = f"import sys, {module}; print(sorted(set({EXTRA}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_log_is_diagnosed_alike_without_the_extra(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("NCCL version 2.27.7+cuda12.9\nn1:8:9 [0] NCCL WARN Accept failed: Too many open files\n")
    block = f"import sys; sys.modules.update(dict.fromkeys({EXTRA})); "
    main = f"from holdfast.cli import main; sys.exit(main(['diagnose', {str(log)!r}]))"
    with_it, without = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True).stdout
        for script in (f"import sys; {main}", block + main)
    )
    assert "too many open files" in with_it.lower()
    assert without == with_it


def test_redaction_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns.cache_clear()
    monkeypatch.setitem(sys.modules, "detect_secrets", None)
    with pytest.raises(HoldfastError) as raised:
        Redactor()
    assert raised.value.exit_code == ExitCode.CANNOT_RUN_HERE
    assert "holdfast[diagnose]" in raised.value.findings[0].remedy
