"""Which JAX programs have their coordinator listen at one address only: those that leave the address to us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.agent.jax_coordinator import bind_address_env

HERE = {"JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:29500"}


@pytest.mark.parametrize(
    ("call", "alone"),
    [
        ("jax.distributed.initialize()", True),
        ("jax.distributed.initialize(num_processes=2, process_id=int(os.environ['RANK']))", True),
        ("jax.distributed.initialize(f'{host}:{port}', 2, 0)", False),
        ("jax.distributed.initialize(coordinator_address=host)", False),
        ("jax.distributed.initialize(**options)", False),
        ("jax.distributed.initialize()\njax.distributed.initialize(coordinator_address=host)", False),
        ("from jax.distributed import initialize\ninitialize(coordinator_address=host)", False),
        ("from hydra import initialize\ninitialize(config_path='.')", False),
        ("from trainer import main\nmain()", False),
        ("jax.distributed.initialize(", False),
    ],
)
def test_address_is_given_where_every_call_leaves_it_open(tmp_path: Path, call: str, alone: bool) -> None:
    (tmp_path / "train.py").write_text(f"import jax\n{call}\n")
    expected = HERE if alone else {}
    assert bind_address_env(["python", "-u", "train.py"], tmp_path, "10.0.0.1:29500") == expected
    assert bind_address_env(["python", "-c", f"import jax\n{call}"], tmp_path, "10.0.0.1:29500") == expected


def test_what_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    for command in (["python", "pipe.py"], ["python", "missing.py"], ["python", "-m", "train"], ["sh", "-c", "x"]):
        assert bind_address_env(command, tmp_path, "10.0.0.1:29500") == {}
