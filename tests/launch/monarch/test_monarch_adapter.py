"""The version of Monarch that is installed is one that the adapter is written for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from holdfast.launch.monarch.monarch_checks import SUPPORTED
from holdfast.launch.monarch.monarch_messages import AgentPlacement, FromClient, PlaceAgent, decode_to_client, encode

ROOT = Path(__file__).parents[3]


def test_installed_version_is_the_one_that_the_adapter_knows() -> None:
    """After an upgrade: run tests/launch/monarch and tests/runs/test_targets.py with it, then raise SUPPORTED."""
    assert version("torchmonarch").startswith(f"{SUPPORTED}.")


def test_bounds_of_the_extra_are_those_of_the_check() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor = map(int, SUPPORTED.split("."))
    assert extras["monarch"][0].startswith(f"torchmonarch>={SUPPORTED},<{major}.{minor + 1};")


def test_what_the_adapter_uses_of_monarch_is_there() -> None:
    """In a process of its own: importing Monarch sets variables and starts threads."""
    program = """
import inspect, monarch.actor as monarch
from monarch._src.actor import supervision
def names(function):
    return list(inspect.signature(function).parameters)
assert "name" in names(monarch.HostMesh.spawn_procs)
assert names(monarch.ProcMesh.spawn)[1:3] == ["name", "Class"], names(monarch.ProcMesh.spawn)
assert names(monarch.ProcMesh.stop) == ["self", "reason"], names(monarch.ProcMesh.stop)
assert monarch.unhandled_fault_hook is supervision.unhandled_fault_hook
assert names(supervision.unhandled_fault_hook) == ["failure"]
monarch.Actor, monarch.MeshFailure, monarch.endpoint, monarch.this_host
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_one_file_imports_monarch() -> None:
    sources = ROOT.joinpath("src/holdfast").rglob("*.py")
    importing = re.compile(r"^\s*(from|import) monarch\b", re.MULTILINE)
    assert [path.name for path in sources if importing.search(path.read_text())] == ["monarch_adapter.py"]


def test_message_arrives_as_it_was_sent() -> None:
    sent = PlaceAgent(node=3, generation=2, where=AgentPlacement(order="/run/agent-start.json"))
    assert decode_to_client(encode(sent)) == sent
    assert FromClient is not PlaceAgent
