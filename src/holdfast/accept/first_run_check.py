"""Checks that a newcomer gets a run by the documented commands alone: it executes a page's code blocks literally."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from msgspec import Struct

from holdfast import api
from holdfast.accept.agreement import CheckName, FirstRunTerms
from holdfast.accept.check_report import CheckReport, Figure, Verdict
from holdfast.accept.site import Site
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import Outcome, RunFinished, StepCommitted
from holdfast.findings import Finding
from holdfast.report.formatting import sanitize

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELLS = ("bash", "sh")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE_NAME = re.compile(r"# ([\w.-]{1,64})\n")
_VERB = re.compile(r"^\s*holdfast ([a-z]+)", re.MULTILINE)
_OPTION = re.compile(r"(?<= )(--[a-z-]+)")
MAX_LINES = 12


class Block(Struct, frozen=True, kw_only=True):
    """One code block of the page."""

    section: str
    kind: str
    text: str

    @property
    def file_name(self) -> str:
        """The file that a Python block is saved as, by its first line; empty for none."""
        named = _FILE_NAME.match(self.text)
        return named[1] if named and self.kind not in _SHELLS else ""


class Executed(Struct, frozen=True, kw_only=True):
    """What became of a page's blocks."""

    blocks: tuple[Block, ...]
    took_s: float
    failed: Block | None = None
    how: str = ""
    output: str = ""
    run: str = ""
    """Id of the run that it started."""
    succeeded: bool = False
    """Whether that run did."""
    steps: int = 0


def first_run_page(terms: FirstRunTerms, base: Path) -> str:
    """The agreed page, or holdfast's own."""
    if terms.page is not None:
        try:
            return (base / terms.page).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise failure(
                "page-unreadable",
                f"the page {terms.page} cannot be read: {error}",
                exit_code=ExitCode.NOT_FOUND,
                where=terms.page,
                remedy="Correct `first_run.page` in the agreement; it is relative to that file.",
            ) from None
    return files("holdfast.accept").joinpath("first_run.md").read_text(encoding="utf-8")


def blocks_of(page: str) -> tuple[Block, ...]:
    """The commands and files of a page, in order."""
    headings = [(found.start(), found[1]) for found in _HEADING.finditer(_without_code(page))]
    return tuple(
        Block(
            section=next((title for at, title in reversed(headings) if at < found.start()), "the page"),
            kind=found[1],
            text=found[2],
        )
        for found in _BLOCK.finditer(page)
    )


def _without_code(page: str) -> str:
    """The page with its code blanked, where a comment looks like a heading."""
    return _BLOCK.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), page)


def check_first_run(site: Site) -> CheckReport:
    """Execute the page in an empty folder, and look at the run that it started."""
    terms = site.agreement.first_run
    site.log("executing the commands of the first-run page in an empty folder")
    folder = site.folder / "first-run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    return judge_first_run(_execute(site, blocks_of(first_run_page(terms, site.base)), folder, terms.deadline_s), terms)


def _execute(site: Site, blocks: Sequence[Block], folder: Path, deadline_s: float) -> Executed:
    known = {run.run_id for run in api.runs()}
    began, output = time.monotonic(), ""
    for block in blocks:
        if block.file_name:
            (folder / block.file_name).write_text(block.text)
            continue
        if block.kind not in _SHELLS:
            how = f"a block of kind `{block.kind}` is neither commands (`bash`) nor a file that its first line names"
            return Executed(blocks=tuple(blocks), took_s=time.monotonic() - began, failed=block, how=how)
        left_s = deadline_s - (time.monotonic() - began)
        how, said = _run_block(block, folder, _environment(site), max(1.0, left_s))
        output += said
        if how:
            took_s = time.monotonic() - began
            _end_new_runs(known)
            return Executed(blocks=tuple(blocks), took_s=took_s, failed=block, how=how, output=said)
    fresh = next((run for run in api.runs() if run.run_id not in known), None)
    events = api.events(fresh) if fresh else []
    ended = next((event for event in events if isinstance(event, RunFinished)), None)
    return Executed(
        blocks=tuple(blocks),
        took_s=time.monotonic() - began,
        output=output,
        run=fresh.run_id if fresh else "",
        succeeded=ended is not None and ended.outcome is Outcome.SUCCEEDED,
        steps=max((event.step for event in events if isinstance(event, StepCommitted)), default=0),
    )


def _end_new_runs(known: set[str]) -> None:
    """End what the page started before it failed."""
    for run in api.runs():
        if run.run_id not in known and not api.is_finished(run):
            with contextlib.suppress(HoldfastError, OSError):
                api.cancel(run, force=True, requested_by="holdfast accept")


def _environment(site: Site) -> dict[str, str]:
    """The user's own, with this Python first in the path and the job's image."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    image = {"IMAGE": str(site.agreement.job["image"])} if "image" in site.agreement.job else {}
    return {**os.environ, "PATH": path, "TARGET": site.target, **image}


def _run_block(block: Block, folder: Path, environ: dict[str, str], left_s: float) -> tuple[str, str]:
    """How it failed, empty if it did not, and what it printed."""
    running = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = running.communicate(timeout=left_s)
    except BaseException as error:
        os.killpg(running.pid, signal.SIGKILL)
        said, _ = running.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"it had not ended after {left_s:.0f} s", said.decode(errors="replace")
    how = f"it ended with exit code {running.returncode}" if running.returncode else ""
    return how, said.decode(errors="replace")


def judge_first_run(done: Executed, terms: FirstRunTerms) -> CheckReport:
    """Every command succeeded, and the run that they started made steps and ended well."""
    commands = [line for block in done.blocks if block.kind in _SHELLS for line in _commands(block)]
    concepts = {*(verb for line in commands for verb in _VERB.findall(line))}
    concepts |= {option for line in commands for option in _OPTION.findall(line)}
    finding = _problem(done)
    saved = sum(bool(block.file_name) for block in done.blocks)
    return CheckReport(
        check=CheckName.FIRST_RUN,
        verdict=Verdict.FAILED if finding else Verdict.PASSED,
        finding=finding,
        figures=(
            Figure(name="commands", value=str(len(commands))),
            Figure(name="verbs and options to know", value=str(len(concepts))),
            Figure(name="files to write", value=str(saved)),
            Figure(
                name="time of all commands",
                value=f"{done.took_s:.1f} s",
                agreed=f"at most {terms.deadline_s:g} s",
                met=done.took_s <= terms.deadline_s,
            ),
        ),
        evidence=tuple(f"$ {sanitize(line)}" for line in commands),
        runs=(done.run,) if done.run else (),
    )


def _commands(block: Block) -> Iterator[str]:
    """The commands of a block, a line each."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def _problem(done: Executed) -> Finding | None:
    said = tuple(sanitize(line) for line in done.output.splitlines()[-MAX_LINES:])
    if done.failed is not None:
        what = f"a command in section `{done.failed.section}` of the page failed: {done.how}"
        return _finding(what, done.failed.section, (*(f"$ {line}" for line in _commands(done.failed)), *said))
    if not done.run:
        return _finding("the page's commands start no run", "the page", said)
    if not done.succeeded:
        return _finding(f"the run that the page starts, {done.run}, did not succeed", done.run, said)
    if not done.steps:
        return _finding(f"the run that the page starts, {done.run}, committed no step", done.run, said)
    return None


def _finding(what: str, where: str, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        code="first-run-failed",
        what=what,
        where=where,
        evidence=evidence,
        remedy="Correct the page, or what the command says is missing: a newcomer has nothing else.",
    )
