"""The live page in a real browser: content, keyboard, sizes, colour schemes, accessibility, hostile words, loss."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from bench.web_page import large_run
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.report.test_report_page import HOSTILE
from tests.report.test_report_page import run as events_of_a_run
from tests.web.test_web_app import ACTIONS, RUN, TOKEN, machines, made_run

from holdfast import api
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    ControllerStarted,
    NodeRequested,
    RanksStarted,
    RankState,
    RunCreated,
    RunFinished,
    StepTimesCompared,
)
from holdfast.events.log import encode_line
from holdfast.findings import Finding
from holdfast.job.run_spec import RunSpec
from holdfast.launch.cluster_contact import LostContact
from holdfast.observe.metrics_server import listen
from holdfast.run_dir import RunDir
from holdfast.web.web_app import WebApp

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]


ACTION_TOKEN = "act"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium refuses to sandbox itself for root, which CI is.
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield started
        started.close()


def problems(run: RunDir) -> tuple[Finding, ...]:
    """Whether the cluster is in contact; no process supervises the runs of these tests."""
    found = api.staleness(run)
    return (found,) if found else ()


@contextmanager
def served(made: RunDir, port: int = 0, *, also: Sequence[RunDir] = ()) -> Generator[int]:
    """The page's server in a thread; yields its port."""
    with listen("127.0.0.1", port) as listener:
        app = WebApp(
            lambda: [made, *also],
            TOKEN,
            machines=machines,
            problems=problems,
            actions=ACTIONS,
            action_token=ACTION_TOKEN,
        ).app
        config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=0)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def opened(
    browser: Browser, port: int, *, width: int = 1280, scheme: str = "light", quiet: bool = True, actions: str = ""
) -> Generator[Page]:
    """The page of the run; no message may be in its console unless it is not `quiet`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"http://127.0.0.1:{port}/#token={TOKEN}&actions={actions}&run={RUN}")
    try:
        yield page
        assert not quiet or said == []
    finally:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_finished_run_is_shown_and_accessible(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    made = made_run(tmp_path, events_of_a_run(), "loss 1.0\nloss 2.0\n")
    with served(made) as port, opened(browser, port, width=width, scheme=scheme) as page:
        expect(page.locator("#phase")).to_have_text("succeeded")
        expect(page.locator("#connection")).to_have_text("the run is over")
        expect(page.locator("#figures")).to_contain_text("restarts")
        expect(page.locator("#curves canvas")).to_have_count(4)
        expect(page.locator("#failures article")).to_contain_text("What to do")
        assert "token" not in page.url
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        answer: Any = Axe().run(page)
        found: list[Any] = answer.response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_keyboard_chooses_a_rank_and_shows_its_output(browser: Browser, tmp_path: Path) -> None:
    made = made_run(tmp_path, large_run(), "first words\nlast words\n")
    with served(made) as port, opened(browser, port) as page:
        expect(page.locator("#grid-key")).to_contain_text("16,383 running")
        page.locator("#grid").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#rank-text")).to_contain_text("rank 1 on node 0: running")
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#rank-text")).to_have_text(re.compile("rank 8 on node 1: hung, no step for 100 s"))
        page.locator("#output-rank").fill("0")
        page.locator("#output-text").fill("LAST")
        page.keyboard.press("Enter")
        expect(page.locator("#output")).to_have_text("last words")


def test_slow_ranks_are_coloured_and_listed_with_the_phase_in_which_they_lose(browser: Browser, tmp_path: Path) -> None:
    with served(made_run(tmp_path, large_run())) as port, opened(browser, port, width=390) as page:
        expect(page.locator("#figures")).to_contain_text("step time p50 / p99 of ranks0.95 s / 0.96 s")
        expect(page.locator("#figures")).to_contain_text("own time p50 / p99 of ranks0.5 s / 0.57 s")
        rows = page.locator("#slowest-rows tr")
        expect(rows).to_have_count(32)
        assert rows.first.locator("td").all_inner_texts() == ["9", "1", "0.9 s", "80.0 %", "data", "0.35 s"]
        expect(page.locator("#slowest-told")).to_contain_text("communication 0.4 s")
        page.get_by_label("coloured by").select_option("lag")
        for words in ("1 50 % or more", "17 10 % or more", "12 3 % or more", "16,352 others, at most 2.0 %"):
            expect(page.locator("#grid-key")).to_contain_text(words)
        page.locator("#grid").focus()
        for _ in range(9):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#rank-text")).to_have_text(
            "rank 9 on node 1: running; 0.9 s a step by itself, 80.0 % more than the median, most in data"
        )
        page.keyboard.press("ArrowRight")
        expect(page.locator("#rank-text")).to_have_text("rank 10 on node 1: running; at most 2.0 % behind the median")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        answer: Any = Axe().run(page)
        assert answer.response["violations"] == []


def test_ranks_that_measure_no_steps_have_no_lag(browser: Browser, tmp_path: Path) -> None:
    events: list[AnyEvent] = [event for event in large_run() if not isinstance(event, StepTimesCompared)]
    with served(made_run(tmp_path, events)) as port, opened(browser, port) as page:
        page.get_by_label("coloured by").select_option("lag")
        expect(page.locator("#grid-key")).to_have_text("16,384 not measured")
        expect(page.locator("#slowest")).to_be_hidden()


def two_replicas() -> list[AnyEvent]:
    """A live run of two replicas of two ranks each."""
    found: list[AnyEvent] = [
        RunCreated(at=0.0, run=RUN, job={"name": "demo"}),
        ControllerStarted(at=0.1, pid=1, incarnation="c"),
    ]
    for replica in (0, 1):
        started = AttemptStarted(
            at=1.0, replica=replica, attempt=0, world_size=2, master_addr="a", master_port=1, nodes=(replica,)
        )
        ranks = tuple(RankState(rank=rank, pid=10 * replica + rank) for rank in (0, 1))
        found += [
            NodeRequested(at=0.2, node=replica, generation=0),
            started,
            RanksStarted(at=2.0, node=replica, replica=replica, attempt=0, ranks=ranks),
        ]
    return found


def test_output_form_names_the_replica_where_there_are_several(browser: Browser, tmp_path: Path) -> None:
    made = made_run(tmp_path, two_replicas())
    for replica in (0, 1):
        log = made.rank_log(0, 1, replica, 2)
        log.parent.mkdir(parents=True)
        log.write_text(f"words of replica {replica}\n")
    with served(made) as port, opened(browser, port) as page:
        expect(page.locator("#grid-key")).to_contain_text("4 running")
        page.locator("#grid").focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#rank-text")).to_have_text("rank 1 of replica 1 on node 1: running")
        page.keyboard.press("Enter")
        expect(page.get_by_label("replica")).to_have_value("1")
        expect(page.locator("#output")).to_have_text("words of replica 1")
        page.get_by_label("replica").fill("0")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#output")).to_have_text("words of replica 0")


def test_output_form_has_no_replica_where_there_is_one(browser: Browser, tmp_path: Path) -> None:
    with served(made_run(tmp_path, events_of_a_run())) as port, opened(browser, port) as page:
        expect(page.locator("#phase")).to_have_text("succeeded")
        expect(page.get_by_label("replica")).to_be_hidden()


def test_machines_of_a_target_are_opened_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run())
    silent = RunDir(tmp_path / "silent-k3m9tz")
    silent.path.mkdir()
    job = api.load_job(None, command=("true",))
    for run, target in ((made, "cluster"), (silent, "silent")):
        spec = RunSpec(job=job, fabric="tcp", target=target, created_at=0.0, base=str(tmp_path))
        run.job.write_text(spec.model_dump_json())
    with served(made, also=(silent,)) as port, opened(browser, port, width=390, quiet=False) as page:
        expect(page.locator("#runs")).to_contain_text("silent-k3m9tz")
        expect(page.get_by_label("target").locator("option")).to_have_text(["cluster", "silent"])
        page.locator("#machines summary").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#machines-told")).to_have_text("1 of 2 quarantined")
        expect(page.locator("#machine-rows tr").last).to_contain_text("gpu-failed, found by old-k3m9tz")
        expect(page.locator("#machine-rows tr").last).to_contain_text("Xid 79")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        answer: Any = Axe().run(page)
        assert answer.response["violations"] == []
        page.get_by_label("target").select_option("silent")
        expect(page.locator("#machines-told")).to_have_text("it does not answer")
        expect(page.locator("#machine-rows tr")).to_have_count(0)


def test_words_of_ranks_are_text(browser: Browser, tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run(words=HOSTILE), HOSTILE + "\n")
    with served(made) as port, opened(browser, port) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        expect(page.locator("#failures article").first).to_contain_text("<script>alert(1)</script>")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#output")).to_contain_text("<script>alert(1)</script>")
        assert page.locator("main script, main img").count() == 0


def test_action_is_confirmed_by_keyboard_and_refused_without_its_token(browser: Browser, tmp_path: Path) -> None:
    events = events_of_a_run()
    made = made_run(tmp_path, [event for event in events if not isinstance(event, RunFinished)])
    with ExitStack() as later:
        with served(made) as port:
            with opened(browser, port) as page:
                expect(page.locator("#connection")).to_have_text("live")
                expect(page.locator("#actions")).to_be_hidden()
            page = later.enter_context(opened(browser, port, width=390, actions=ACTION_TOKEN, quiet=False))
            button = page.get_by_role("button", name="Note it")
            expect(button).to_be_visible()
            assert "act" not in page.url
            button.focus()
            page.keyboard.press("Enter")
            expect(page.locator("#confirm-title")).to_have_text(f"Note it: {RUN}")
            expect(page.locator("#confirm-effect")).to_have_text("It is noted.")
            answer: Any = Axe().run(page)
            assert answer.response["violations"] == []
            page.keyboard.press("Escape")
            expect(page.locator("#confirm")).to_be_hidden()
            assert not (made.path / "note").exists()
            for text, told in (
                ("<b>now</b>", "noted <b>now</b>"),
                ("never", "it is not possible. Try something else."),
            ):
                button.click()
                page.get_by_label("Words").fill(text)
                page.keyboard.press("Enter")
                expect(page.locator("#action-told")).to_have_text(f"Note it, {RUN}: {told}")
                button.click()
                page.keyboard.press("Escape")
            expect(page.locator("#action-told")).to_have_text(
                f"Note it, {RUN}: it is not possible. Try something else."
            )
        button.click()
        page.get_by_label("Words").fill("later")
        page.get_by_role("button", name="Confirm").click()
        expect(page.locator("#action-told")).to_have_text(f"Note it, {RUN}: the server does not answer")
    assert (made.path / "note").read_text() == "<b>now</b>"


def test_actions_end_with_the_run(browser: Browser, tmp_path: Path) -> None:
    with served(made_run(tmp_path, events_of_a_run())) as port, opened(browser, port, actions=ACTION_TOKEN) as page:
        expect(page.get_by_role("button", name="Note it")).to_be_disabled()


def test_lost_contact_with_a_cluster_is_shown_until_it_is_back(browser: Browser, tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run()[:9])
    made.remote.write_text("{}")
    silent = LostContact(since=time.time() - 3600, reason="connect: refused", command="kubectl get pods")
    made.cluster_contact.write_bytes(msgspec.json.encode(silent))
    with served(made) as port, opened(browser, port) as page:
        expect(page.locator("#problems")).to_contain_text("is 1 h 00 min old")
        expect(page.locator("#problems")).to_contain_text("`kubectl get pods` queries the cluster directly")
        expect(page.locator("#figures")).to_contain_text("step")
        answer: Any = Axe().run(page)
        assert answer.response["violations"] == []
        made.cluster_contact.unlink()
        expect(page.locator("#problems")).not_to_contain_text("old")


def test_log_that_cannot_be_read_is_named_and_another_run_has_none_of_it(browser: Browser, tmp_path: Path) -> None:
    made = made_run(tmp_path, [RunCreated(at=0.0, run=RUN, job={}, format=99)])
    with served(made) as port, opened(browser, port) as page:
        expect(page.locator("#problems")).to_contain_text("format 99")
        expect(page.locator("#problems")).to_contain_text("Use the version of holdfast that started this run")
        expect(page.locator("#runs")).to_contain_text("unreadable")
        expect(page.locator("#figures")).to_be_empty()


def test_page_without_the_token_shows_nothing(browser: Browser, tmp_path: Path) -> None:
    with served(made_run(tmp_path, events_of_a_run())) as port, opened(browser, port, quiet=False) as page:
        expect(page.locator("#phase")).to_have_text("succeeded")
        page.evaluate("sessionStorage.clear()")
        page.goto("about:blank")
        page.goto(f"http://127.0.0.1:{port}/#{RUN}")
        expect(page.locator("#connection")).to_contain_text("no token")
        expect(page.locator("#run")).to_be_hidden()


def test_page_reconnects_and_misses_no_step(browser: Browser, tmp_path: Path) -> None:
    events = events_of_a_run()
    made = made_run(tmp_path, events[:20])
    with ExitStack() as later:
        with served(made) as port:
            page = later.enter_context(opened(browser, port, quiet=False))
            expect(page.locator("#connection")).to_have_text("live")
            page.evaluate("window.before = true")
        expect(page.locator("#connection")).to_contain_text("trying again")
        made.events.write_bytes(b"".join(map(encode_line, events)))
        later.enter_context(served(made, port))
        expect(page.locator("#phase")).to_have_text("succeeded", timeout=30_000)
        expect(page.locator("#figures")).to_contain_text("99")
        assert page.evaluate("window.before")
