"""Replicas end bit-equal however the program wraps its model, and as one process that trains the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.train.replica_matrix import CASES, CASES_OF, REPLICAS, STEPS, Case, loss_of, run, samples_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains all cases of a group, once; the folder with their ends."""

    @cache
    def train(group: str) -> Path:
        out = tmp_path_factory.mktemp("matrix")
        run(out, group)
        return out

    return train


@pytest.fixture
def ended(request: pytest.FixtureRequest, ends: Callable[[str], Path]) -> Path:
    """The folder with the end of every case of the group that the parameter names."""
    return ends(request.param)


def trained_alone(case: Case, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These weights after the same steps in one process."""
    model = case.net()
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        samples = samples_of(step)
        for sample in samples:
            (loss_of(lambda inputs: model(inputs) * case.scale, [sample]) / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("ended", "name"), [(group, name) for group, names in CASES_OF.items() for name in names], indirect=["ended"]
)
def test_replicas_end_bit_equal_and_as_one_process_would(ended: Path, name: str) -> None:
    case = CASES[name]
    failed = [each.read_text() for each in ended.glob(f"{name}.*.failed")]
    assert not failed, failed[0]
    ends = {
        (replica, rank): torch.load(ended / f"{name}.{replica}.{rank}.end")
        for replica in range(REPLICAS)
        for rank in range(case.ranks)
    }
    for rank in range(case.ranks):
        one, other = (ends[replica, rank][0] for replica in range(REPLICAS))
        assert len(one) == len(other) > len(ends[0, rank][2])
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    _, began, weights = ends[0, 0]
    for other in ends.values():
        assert all(torch.equal(each, other[2][key]) for key, each in weights.items())
    alone = trained_alone(case, began)
    for key, each in weights.items():
        torch.testing.assert_close(each, alone[key], rtol=1e-4, atol=1e-5)
        assert "unused" in key or not torch.equal(each, began[key])
