from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.protocol.rank_messages import FindingReported
from holdfast.train import Data, RankConfig, Session

LENGTH = 23


def session(folder: Path, socket: Path | None = None) -> Session:
    model = torch.nn.Linear(1, 1)
    told = RankConfig(checkpoint_path=folder, checkpoint_every_steps=3, rank_socket=socket)
    return Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=told)


def train(made: Session, data: Data, steps: int) -> list[int]:
    """Steps until there are so many in all; what those took that were not taken back."""
    taken: list[int] = []
    for _ in range(steps - made.step):
        parts = [part.data.tolist() for part in made.batches(data)]
        made.commit()
        taken += [item for part in parts for item in part]
    return taken


@pytest.mark.slow
def test_items_are_taken_once_an_epoch_over_restarts_in_a_step_and_changed_batches_which_are_told(
    tmp_path: Path, agent
):
    taken: list[int] = []
    for steps, batch in ((5, 4), (7, 4), (10, 3)):  # saved after every third step
        made = session(tmp_path / "saved", agent.path)
        at_resume = made.step
        now = train(made, Data(range(LENGTH), batch_size=batch, micro_batch_size=2), steps)
        made._checkpoints.wait_saved()
        taken += now[: (steps // 3 * 3 - at_resume) * batch]
        line = agent.accept()
    assert len(taken) == 3 * 4 + 3 * 4 + 3 * 3
    assert sorted(taken[:LENGTH]) == list(range(LENGTH))
    found = line.await_(FindingReported).finding
    assert (found.code, "took 4 samples, and takes 3 from sample 24 on" in found.what) == ("global-batch-changed", True)
    line.close()


def test_batch_that_changed_is_told_also_of_a_loop_that_reads_its_own_data(tmp_path: Path, agent):
    for batch in (4, 5):
        made = session(tmp_path / "saved", agent.path)
        for _ in range(3):
            assert list(made.micro_batches(batch))
            made.commit()
        made._checkpoints.wait_saved()
        line = agent.accept()
    found = line.await_(FindingReported).finding
    assert (found.code, "from sample 12 on" in found.what) == ("global-batch-changed", True)
    line.close()


def test_seed_that_changed_is_refused_before_a_step_is_taken_and_the_checkpoint_stays(tmp_path: Path):
    first = session(tmp_path)
    train(first, Data(range(LENGTH), batch_size=4), 3)
    first._checkpoints.wait_saved()
    again = session(tmp_path)
    with pytest.raises(HoldfastError) as refused:
        train(again, Data(range(LENGTH), batch_size=4, seed=1), 4)
    (finding,) = refused.value.findings
    assert (finding.code, finding.evidence) == ("data-changed", ("order: was 1, seed 0, is 1, seed 1",))
    assert "Data(..., start_sample=12)" in finding.remedy
    assert session(tmp_path).step == 3
