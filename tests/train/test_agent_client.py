from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.findings import Finding
from holdfast.protocol.clipping import MAX_EVIDENCE_LINES, MAX_WHAT
from holdfast.protocol.rank_messages import CheckpointAndExitNow, FindingReported, Hello, RankStep, TakeCheckpointNow
from holdfast.train.session.agent_client import BACKLOG_BYTES, AgentClient

DEADLINE_S = 30.0


def test_messages_sent_to_an_agent_arrive_in_order(agent):
    channel = AgentClient.connect(agent.path, rank=3)
    sent = [Hello(rank=3, pid=1), RankStep(step=1, started=1.0, ended=2.0, metrics={"loss": 3.5})]
    for message in sent:
        channel.send(message)
    line = agent.accept()
    assert [line.next(), line.next()] == sent


def test_requests_are_picked_up_in_order_and_unknown_kinds_passed_over(agent):
    channel = AgentClient.connect(agent.path, rank=0)
    line = agent.accept()
    assert channel.requests() == []
    line.ask(TakeCheckpointNow())
    line.link.sendall(b'{"type":"swap","code":"sha256:0"}\nnot json\n{"type":"checkpoint-and-exit-now",')
    assert channel.requests() == [TakeCheckpointNow()]
    line.link.sendall(b'"reason":"cancelled"}\n')
    assert channel.requests() == [CheckpointAndExitNow(reason="cancelled")]


def test_an_agent_that_does_not_read_delays_nobody_and_is_told_once(agent, capsys):
    channel = AgentClient.connect(agent.path, rank=0)
    line = agent.accept()
    step = RankStep(step=1, started=1.0, ended=2.0, metrics={"x" * 1000: 1.0})
    for _ in range(2 * BACKLOG_BYTES // 1000):
        channel.send(step)
    assert capsys.readouterr().err.count("does not read") == 1
    line.link.setblocking(False)
    assert len(line.link.recv(1 << 24)) > 0
    channel.send(step)


def test_what_an_agent_had_no_time_to_read_arrives_before_the_process_ends(agent):
    channel = AgentClient.connect(agent.path, rank=0)
    line = agent.accept()
    sent = [RankStep(step=step, started=1.0, ended=2.0, metrics={"loss": 1.0}) for step in range(5000)]
    for step in sent:
        channel.send(step)
    finishing = threading.Thread(target=channel.flush)
    finishing.start()
    assert [line.next() for _ in sent] == sent
    finishing.join()


def test_an_agent_that_never_reads_keeps_no_process_from_its_end(agent, monkeypatch):
    monkeypatch.setattr("holdfast.train.session.agent_client.FLUSH_TIMEOUT_S", 0.01)
    channel = AgentClient.connect(agent.path, rank=0)
    line = agent.accept()
    for _ in range(700):
        channel.send(RankStep(step=1, started=1.0, ended=2.0, metrics={"x" * 1000: 1.0}))
    channel.flush()
    assert len(line.link.recv(1 << 24)) > 0


class SlowToSend(socket.socket):
    """Its first message has to wait; the next one is on its way until it is `released`."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__(fileno=link.detach())
        self.tried, self.sending, self.released = (threading.Event() for _ in range(3))

    def send(self, data, *_):
        if not self.tried.is_set():
            self.tried.set()
            raise BlockingIOError
        with memoryview(data):
            self.sending.set()
            assert self.released.wait(DEADLINE_S)
            return super().send(data)


def test_messages_may_be_sent_while_another_thread_flushes():
    ours, theirs = socket.socketpair()
    link = SlowToSend(ours)
    channel = AgentClient(link)
    channel.send(Hello(rank=0, pid=1))
    with theirs, ThreadPoolExecutor(2) as pool:
        flushing = pool.submit(channel.flush)
        assert link.sending.wait(DEADLINE_S)
        sending = pool.submit(channel.send, Hello(rank=0, pid=2))
        try:
            with pytest.raises(TimeoutError):
                sending.result(0.1)
        finally:
            link.released.set()
        flushing.result(DEADLINE_S)
        sending.result(DEADLINE_S)
        assert theirs.recv(1000).count(b"\n") == 2


@pytest.mark.parametrize("use", [lambda c: c.requests(), lambda c: c.send(Hello(rank=0, pid=1))])
def test_an_agent_that_is_gone_is_told_once_and_training_continues(agent, capsys, use):
    channel = AgentClient.connect(agent.path, rank=0)
    agent.accept().close()
    for _ in range(3):
        use(channel)
    assert capsys.readouterr().err.count("the session runs alone") == 1


def test_no_socket_is_said_by_rank_0_only(capsys):
    for rank in range(3):
        AgentClient.connect(None, rank=rank).send(Hello(rank=rank, pid=1))
    assert capsys.readouterr().err == "holdfast: no HOLDFAST_RANK_SOCKET: the session runs alone\n"


def test_a_socket_nobody_listens_on_is_said_and_training_continues(tmp_path: Path, capsys):
    channel = AgentClient.connect(tmp_path / "missing.sock", rank=1)
    channel.report_finding(Finding(code="x", what="something"))
    assert channel.requests() == []
    assert "cannot reach the agent" in capsys.readouterr().err


def test_a_finding_that_names_no_unicode_or_is_far_too_long_is_sent_cut(agent):
    channel = AgentClient.connect(agent.path, rank=0)
    channel.report_finding(Finding(code="x", what="w" * 5_000_000, where="/data/\udcff", evidence=("line",) * 100_000))
    found = agent.accept().await_(FindingReported).finding
    assert (len(found.what), len(found.evidence)) == (MAX_WHAT, MAX_EVIDENCE_LINES)
    assert found.where == r"/data/\udcff"
