"""Each private part of TorchFT that holdfast uses has the shape that it relies on: an upgrade fails here first."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib.metadata import version

import pytest
import torch
from tests.train.private_names import missing, require, takes
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import ExceptionWithTraceback, Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper, create_store_client

from holdfast.train.ft import torchft_private


def check(holds: bool, name: str, feature: str) -> None:
    require(holds, f"torchft {version('torchft')}", name, feature)


def attributes(of: type) -> set[str]:
    """Attributes of `self` that a class's own code uses."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(of)))
    found = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute))
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id == "self"}


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("_client", "commits of a replica of one rank"),
        ("_executor", "exits of a process that waits for a quorum"),
        ("_connect_timeout", "recovery from a donor that has died"),
        ("_quorum_id", "the check of whether all ranks have connected"),
        ("_quorum_future", "waiting for a quorum"),
        ("_healing", "the check of whether all ranks have received a state"),
    ],
)
def test_manager_has_the_attribute(name: str, feature: str) -> None:
    check(name in attributes(Manager), f"Manager.{name}", feature)


def test_manager_waits_and_reduces_in_methods_that_are_replaced() -> None:
    check(not missing(Manager, "wait_quorum", "allreduce", "errored", "report_error"), "Manager", "loss of a replica")
    check(
        ExceptionWithTraceback(OSError("lost")).original_exception.args == ("lost",), "ExceptionWithTraceback", "errors"
    )
    check(takes(Manager.allreduce, "self", "tensor"), "Manager.allreduce", "LocalSGD and DiLoCo")
    source = inspect.getsource(Manager.start_quorum)
    check("self.wait_quorum()" in source, "Manager.start_quorum", "waiting for a quorum")
    check("self._executor.submit(" in source, "Manager.start_quorum", "exits of a process that waits for a quorum")
    waited, reset = source.find("self.wait_quorum()"), source.rfind("self._healing = False")
    check(waited < reset, "Manager.start_quorum", "the check of whether all ranks have received a state")


def test_commit_client_is_asked_by_position() -> None:
    source = inspect.getsource(Manager.should_commit)
    check("self._client.should_commit(" in source, "Manager.should_commit", "commits of a replica of one rank")


def test_groups_are_configured_with_the_replicas_ranks() -> None:
    expected = ("self", "store_addr", "replica_id", "rank", "world_size", "quorum_id", "group_rank")
    expected += ("group_world_size", "global_ranks")
    check(takes(ProcessGroupWrapper.configure, *expected), "ProcessGroupWrapper.configure", "loss of a replica")
    check(takes(create_store_client, "store_addr", "timeout"), "create_store_client", "connections between replicas")


def test_group_can_be_replaced() -> None:
    wrapper = ProcessGroupGloo()
    check(torchft_private.replace_group(wrapper, "one") is None, "ProcessGroupWrapper._pg", "loss of a replica")
    check(wrapper.parent == "one", "ProcessGroupWrapper._pg", "loss of a replica")
    check(torchft_private.current_group(wrapper) == "one", "ProcessGroupWrapper._pg", "loss of a replica")
    check("errored" in inspect.signature(ProcessGroupWrapper.abort).parameters, "abort", "loss of a replica")


def test_periodic_synchronisation() -> None:
    check("_fragments" in attributes(DiLoCo), "DiLoCo._fragments", "recovery.outer_sync: diloco")
    check(not missing(LocalSGD, "_perform_sync"), "LocalSGD._perform_sync", "recovery.outer_sync: local_sgd")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    torchft_private.local_sgd_sync(object(), model, optimizer, 2)
