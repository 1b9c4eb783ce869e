"""A program that ends by a holdfast error prints it and exits with its code; all others end as usual."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.errors import ExitCode

FAILS = """
import holdfast.train
from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
{before}
raise failure("no-such-thing", "it is not there", exit_code=ExitCode.STORAGE_FAILED, where="here", evidence=("a", "b"),
              remedy="look for it", owner=Owner.CLUSTER)
"""
WORDS = """holdfast: error [no-such-thing]: it is not there
  where: here
  evidence: a
  evidence: b
  what to do: look for it
  fixable by: the machines or the cluster
"""
LOSES = """
import math, torch
from holdfast.train import Session
model = torch.nn.Linear(2, 2)
session = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for _ in session.steps(1000):
    session.commit(loss=math.nan)
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize(
    "before", ["", pytest.param(GROUP, marks=pytest.mark.slow)], ids=["alone", "in a process group"]
)
def test_error_of_holdfast_ends_a_program_in_words_and_with_its_code(before: str):
    ended = run(FAILS.format(before=before))
    assert ended.stderr.endswith(WORDS)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == ExitCode.STORAGE_FAILED


@pytest.mark.slow
def test_finding_that_ends_a_bare_program_is_said_once():
    ended = run(LOSES)
    assert ended.stderr.count("error [loss-not-finite]") == 1
    assert ended.stderr.count("warning [loss-not-finite]") == 1
    assert "\n  what to do: " in ended.stderr
    assert ended.returncode == ExitCode.CANNOT_RUN_HERE


def test_other_error_ends_a_program_as_it_always_did():
    ended = run("import holdfast.train\nraise ValueError('mine')")
    assert "Traceback" in ended.stderr
    assert ended.stderr.endswith("ValueError: mine\n")
    assert ended.returncode == 1
