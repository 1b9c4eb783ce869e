"""The jobs under examples/ are rendered whole, also those that ask for more than is here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import api

JOBS = sorted((Path(__file__).parents[2] / "examples").glob("*/job.yaml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.parent.name)
def test_job_of_an_example_is_rendered_for_each_rank_with_its_command(path: Path, home: Path):
    job = api.load_job(path)
    text = api.render(job, "local", base=path.parent).text
    ranks = job.nodes.max * job.local_world_size
    assert re.findall(r"^RANK=(\d+)$", text, re.MULTILINE) == [str(rank) for rank in range(ranks)]
    assert len(set(re.findall(r"^\$ (.+)$", text, re.MULTILINE))) == 1


def test_llama_3_8b_through_torchtitan_is_two_nodes_of_eight_gpus(home: Path):
    (path,) = (job for job in JOBS if job.parent.name == "torchtitan")
    job = api.load_job(path)
    assert (job.nodes.max, job.gpus_per_node, job.local_world_size) == (2, 8, 8)
    text = api.render(job, "local", base=path.parent).text
    assert "$ python -m torchtitan.train --module llama3 --config llama3_8b " in text
    assert text.count("\nWORLD_SIZE=16\n") == 16
