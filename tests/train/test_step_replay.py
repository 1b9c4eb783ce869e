"""A pass that cannot be sent to another rank is not repeated, and training continues."""

from __future__ import annotations

import torch

from holdfast.train.checkpoint import rng
from holdfast.train.ft.rank_verifier import _packed
from holdfast.train.ft.step_replay import RecordedPass


def recorded(*args: object) -> RecordedPass:
    return RecordedPass(args, {}, rng.capture()(), [], ("cpu", False, torch.bfloat16, True), [torch.ones(2), None])


def test_pass_arrives_as_it_was_sent() -> None:
    given = recorded(torch.arange(3.0), {"mask": None})
    (taken, digest), packed = _packed((given, 7))
    received = RecordedPass.unpack(packed, torch.device("cpu"))
    assert (taken, digest) == (given, 7)
    assert torch.equal(received.args[0], given.args[0])
    assert received.args[1] == {"mask": None}
    assert torch.equal(received.random["torch"], given.random["torch"])
    assert received.output_gradients[1] is None


def test_arguments_that_no_bytes_can_hold_are_a_reason_and_no_error() -> None:
    reason, packed = _packed((recorded(lambda: 0), 7))
    assert isinstance(reason, str)
    assert "cannot be sent" in reason
    assert packed == b""
    assert _packed("no pass") == ("no pass", b"")
