"""Steps on their way to the controller: no message of theirs is one that the controller refuses."""

from __future__ import annotations

import asyncio

from holdfast.agent.step_aggregator import MAX_AWAITED_STEPS, StepAggregator
from holdfast.protocol.orders import Progress, RankLaunch, StartRanks, agent_message_decoder, encode
from holdfast.protocol.rank_messages import RankStep, RankStepMetrics
from holdfast.protocol.validation import MAX_METRIC_NAME, MAX_METRICS
from holdfast.security.api_limits import LIMITS

STEPS = 300


def progress_of(*ranks: dict[str, float]) -> list[bytes]:
    """What is sent of steps in which each rank has these metrics."""
    sent: list[bytes] = []

    async def pass_steps() -> None:
        launches = tuple(RankLaunch(rank=rank, argv=("x",), env={}, cwd="", log="") for rank in range(len(ranks)))
        aggregator = StepAggregator(
            StartRanks(replica=0, attempt=0, ranks=launches), node=0, send=lambda said: _keep(sent, said)
        )
        for rank in range(len(ranks)):
            aggregator.add_rank(rank)
        for step in range(STEPS):
            for rank, metrics in enumerate(ranks):
                aggregator.add(rank, RankStep(step=step, started=1.0, ended=2.0, metrics=metrics))
        aggregator.flush()

    asyncio.run(pass_steps())
    return sent


def _keep(sent: list[bytes], progress: Progress) -> int:
    sent.append(encode(progress))
    return len(sent)


def test_steps_with_all_the_metrics_they_can_have_fit_into_messages_that_the_controller_takes() -> None:
    longest = {f"{number:03}{chr(0x1F600) * (MAX_METRIC_NAME - 3)}": -1.7e308 for number in range(MAX_METRICS - 1)}
    controls = {f"{number:03}{chr(1) * (MAX_METRIC_NAME - 3)}": 0.1 for number in range(MAX_METRICS)}
    for own in (longest, controls):
        shared = {"loss": 1.7e308, "data_wait_s": 1.0, "memory_peak_bytes": 1.0, "step-time-other": 0.0}
        sent = progress_of(own, shared, shared)
        assert max(map(len, sent)) < LIMITS.message_bytes
        messages = [agent_message_decoder.decode(text) for text in sent]
        passed = [step for message in messages if isinstance(message, Progress) for step in message.steps]
        assert [step.step for step in passed] == list(range(STEPS))
        assert all(len(step.metrics) <= MAX_METRICS for step in passed)


def test_memory_for_a_rank_that_runs_ahead_of_the_others_is_bounded() -> None:
    async def run_ahead() -> int:
        launches = tuple(RankLaunch(rank=rank, argv=("x",), env={}, cwd="", log="") for rank in range(2))
        aggregator = StepAggregator(StartRanks(replica=0, attempt=0, ranks=launches), node=0, send=lambda said: 0)
        for rank in range(2):
            aggregator.add_rank(rank)
        for step in range(30_000):
            aggregator.add(0, RankStep(step=step, started=1.0, ended=2.0))
        return len(aggregator._ranks[0].pending)

    assert asyncio.run(run_ahead()) == 20_000


def test_steps_wait_for_their_metrics_and_keep_their_order() -> None:
    async def pass_steps() -> list[tuple[int, dict[str, float]]]:
        sent: list[Progress] = []
        launches = (RankLaunch(rank=0, argv=("x",), env={}, cwd="", log=""),)
        aggregator = StepAggregator(
            StartRanks(replica=0, attempt=0, ranks=launches), node=0, send=lambda said: sent.append(said) or 0
        )
        aggregator.add_rank(0)
        for step in (1, 2, 3):
            aggregator.add(0, RankStep(step=step, started=1.0, ended=2.0, metrics_follow=True))
        aggregator.flush()
        assert sent == []
        aggregator.add_metrics(0, RankStepMetrics(step=9, metrics={"loss": 9.0}))
        aggregator.add_metrics(0, RankStepMetrics(step=2, metrics={"loss": 2.0}))
        aggregator.add(0, RankStep(step=4, started=1.0, ended=2.0, metrics_follow=True))
        aggregator.add_metrics(0, RankStepMetrics(step=3, metrics={"loss": 3.0}))
        aggregator.complete(0)  # the rank is gone
        aggregator.complete(1)
        aggregator.flush()
        return [(step.step, step.metrics) for progress in sent for step in progress.steps]

    assert asyncio.run(pass_steps()) == [(1, {}), (2, {"loss": 2.0}), (3, {"loss": 3.0}), (4, {})]


def test_memory_for_steps_whose_metrics_never_come_is_bounded() -> None:
    async def run_on() -> tuple[int, int]:
        launches = (RankLaunch(rank=0, argv=("x",), env={}, cwd="", log=""),)
        aggregator = StepAggregator(StartRanks(replica=0, attempt=0, ranks=launches), node=0, send=lambda said: 0)
        aggregator.add_rank(0)
        for step in range(1000):
            aggregator.add(0, RankStep(step=step, started=1.0, ended=2.0, metrics_follow=True))
        return len(aggregator._ranks[0].awaited), aggregator._ranks[0].last_step

    assert asyncio.run(run_on()) == (MAX_AWAITED_STEPS, 999 - MAX_AWAITED_STEPS)


def test_what_was_measured_of_the_node_goes_with_the_last_step_of_a_message() -> None:
    measured = iter([{"tcp_sent_bytes@net1": 5.0}, {}])

    async def pass_steps() -> list[dict[str, float]]:
        sent: list[Progress] = []
        launches = (RankLaunch(rank=0, argv=("x",), env={}, cwd="", log=""),)
        aggregator = StepAggregator(
            StartRanks(replica=0, attempt=0, ranks=launches),
            node=0,
            send=lambda said: sent.append(said) or 0,
            node_metrics=lambda: next(measured),
        )
        aggregator.add_rank(0)
        for step in range(1, 5):
            aggregator.add(0, RankStep(step=step, started=1.0, ended=2.0, metrics={"mine": 1.0}))
            if step % 2 == 0:
                aggregator.flush()
        assert aggregator.step_count == 4
        return [step.metrics for progress in sent for step in progress.steps]

    mine = {"mine": 1.0}
    assert asyncio.run(pass_steps()) == [mine, mine | {"tcp_sent_bytes@net1": 5.0}, mine, mine]
