"""The actions of the live page do to a live run what they say, and refuse what the command line refuses."""

from __future__ import annotations

import asyncio

import httpx
from tests.runs.conftest import Runs, WatchedRun
from tests.runs.test_code_update import Project, project

from holdfast.cli.page_actions import page_actions
from holdfast.events import (
    CancelRequested,
    CheckpointCommitted,
    FaultInjected,
    Outcome,
    RecoveryDecided,
    StepCommitted,
    UpdateEnded,
    UpdateOutcome,
)
from holdfast.web.web_app import WebApp

__all__ = ["project"]  # a fixture
TOKEN = "act"


def act(watched: WatchedRun, name: str, text: str = "") -> httpx.Response:
    """Request an action as the page does."""

    async def ask() -> httpx.Response:
        app = WebApp(lambda: [watched.folder], "read", actions=page_actions(), action_token=TOKEN).app
        headers = {"Authorization": f"Bearer {TOKEN}"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://page", headers=headers) as client:
            return await client.post(f"/api/runs/{watched.folder.run_id}/actions/{name}", content=text, timeout=None)

    return asyncio.run(ask())


def done(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["done"]


def test_checkpoint_drill_update_and_cancel_of_a_live_run(runs: Runs, project: Project) -> None:
    watched = project.run(1_000_000)
    watched.wait_for(StepCommitted)

    words = done(act(watched, "checkpoint"))
    saved = watched.first(CheckpointCommitted)
    assert words == f"step {saved.step} is saved: {saved.path}"

    assert done(act(watched, "drill", "kill rank:1")) == "kill rank:1 is injected"
    watched.wait_for(FaultInjected)
    assert watched.wait_for(RecoveryDecided).finding.where.startswith("rank 1 ")
    watched.wait_for(StepCommitted, lambda event: event.attempt == 1)

    project.change()
    assert done(act(watched, "update")) == "the run uses the code in place"
    assert watched.first(UpdateEnded).outcome is UpdateOutcome.APPLIED
    assert project.steps(0)[-1].word == "second"

    for wrong in ("kill moon", "", "kill rank:99"):
        refused = act(watched, "drill", wrong)
        assert refused.status_code == 409
        assert refused.json()["error"]

    assert done(act(watched, "cancel")) == "the run is stopping"
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert watched.all(CancelRequested)[0].requested_by == "live page"
    over = act(watched, "checkpoint")
    assert (over.status_code, over.json()["error"]) == (409, f"{watched.folder.run_id} is over. holdfast ps")
