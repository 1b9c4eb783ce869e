"""The jobs under examples/ are rendered whole, also those that ask for more than is here."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from holdfast import api
from holdfast.cli import main
from holdfast.errors import ExitCode

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


def test_llama_3_8b_through_torchtitan_can_run_on_a_cluster_as_it_stands(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (path,) = (job for job in JOBS if job.parent.name == "torchtitan")
    (tmp_path / ".holdfast" / "targets").mkdir(parents=True)
    target, job = tmp_path / ".holdfast" / "targets" / "cluster.yaml", str(tmp_path / "job.yaml")
    target.write_text("kind: kubernetes\nvolume: {claim: shared}\n")
    shutil.copy(path, tmp_path)
    assert main(["validate", job, "--on", "cluster"]) == ExitCode.CANNOT_RUN_HERE
    assert "folders: [assets]" in capsys.readouterr().out
    target.write_text("kind: kubernetes\nvolume: {claim: shared, folders: [llama3-8b-c4, assets]}\n")
    assert main(["validate", job, "--on", "cluster"]) == ExitCode.OK
    assert "can run" in capsys.readouterr().out
    assert main(["render", job, "--on", "cluster"]) == ExitCode.OK
    text = capsys.readouterr().out
    (jobs,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "JobSet")
    (node,) = (each for each in jobs["spec"]["replicatedJobs"] if each["name"] == "node")
    assert node["replicas"] == 2
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    seen = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/holdfast/llama3-8b-c4", "/holdfast/assets"} < seen
    assert "/holdfast" not in seen
    assert "torchtitan.train" in text
