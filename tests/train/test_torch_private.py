"""Each private name of torch that holdfast uses has the shape that it relies on: an upgrade fails here first."""

from __future__ import annotations

import inspect
import io
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.train.private_names import missing, require
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

from holdfast.agent.step_clock import STEP_CLOCK_DIR
from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.structured import flight_recorder
from holdfast.protocol import flight_recorder_files
from holdfast.train import torch_private
from holdfast.train.checkpoint import dcp_io, manifest_file
from holdfast.train.session.control_group import ControlGroup

DEADLINE_S = 200.0


@pytest.fixture
def mesh() -> DeviceMesh:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


class Folder(dcp_io.ReadSource):
    """Files that are there already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fetch(self, names: Iterable[str]) -> None:
        pass


def check(holds: bool, name: str, feature: str) -> None:
    require(holds, f"torch {torch.__version__}", name, feature)


def test_memory_recorder_has_the_parameters_that_snapshots_give() -> None:
    """Without a GPU it cannot be called."""
    memory: Any = torch.cuda.memory
    given = inspect.signature(memory._record_memory_history).parameters
    feature = "snapshots of GPU memory"
    check({"enabled", "stacks", "max_entries"} <= given.keys(), "torch.cuda.memory._record_memory_history", feature)
    check(callable(memory._snapshot), "torch.cuda.memory._snapshot", feature)
    if torch.version.cuda:
        check(hasattr(torch._C, "_cuda_isHistoryEnabled"), "torch._C._cuda_isHistoryEnabled", feature)


def test_profiler_switches() -> None:
    name, feature = "torch.autograd._profiler_enabled, _enable_record_function", "step profiles"
    check(torch_private.profiler_enabled() is False, name, feature)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        check(torch_private.profiler_enabled() is True, name, feature)
        torch_private.enable_record_function(False)
        torch.ones(1).add(1)
        torch_private.enable_record_function(True)
    check("aten::add" not in {each.key for each in recorded.key_averages()}, name, feature)


def test_version_rises_with_each_change() -> None:
    tensor = torch.zeros(1)
    before = torch_private.version_of(tensor)
    tensor.view(1).add_(1)
    check(torch_private.version_of(tensor) > before, "Tensor._version", "the check of a save's copy for later changes")


def test_sharded_tensor(mesh: DeviceMesh) -> None:
    whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    name, feature = "DTensor._local_tensor, _spec, DTensor(local, spec)", "checkpoints of sharded tensors"
    check(not missing(whole, "_local_tensor", "_spec"), name, feature)
    made = torch_private.sharded(torch.ones(4), whole)
    check(type(made) is DTensor and torch_private.sharding(made) == torch_private.sharding(whole), name, feature)
    check(torch.equal(torch_private.local_part(made), torch.ones(4)), name, feature)


def test_offset_of_a_tensor_in_a_file(tmp_path: Path) -> None:
    torch.save(torch.arange(4.0), tmp_path / "one")
    at = torch_private.offset_in_file(torch.load(tmp_path / "one", map_location="meta"))
    if at is None:
        is_lowest = torch.__version__.startswith("2.10.")
        check(is_lowest, "UntypedStorage._checkpoint_offset", "reading checkpoints in place")
        return
    found = torch.frombuffer(bytearray((tmp_path / "one").read_bytes()[at : at + 16]), dtype=torch.float32)
    check(torch.equal(found, torch.arange(4.0)), "UntypedStorage._checkpoint_offset", "reading checkpoints in place")


def test_index_of_a_checkpoint_and_values_that_are_no_tensors(tmp_path: Path) -> None:
    made = {"weight": torch.ones(2, 2).to(torch.bfloat16).t(), "group": {"lr": 0.5}}
    dcp_io.write(made, tmp_path, ControlGroup())
    name, feature = "metadata, _StorageInfo, _get_layout, _nested_dict.set_element", "loading checkpoints safely"
    found = {"weight": torch.zeros(2, 2, dtype=torch.bfloat16), "group": {"lr": 0.0}}
    try:
        checksums = manifest_file.checksums(tmp_path.iterdir())
        dcp_io.read(lambda _: found, Folder(tmp_path), checksums, ControlGroup(), also=".metadata")
    except (CheckpointException, UnpicklingError) as error:
        check(False, f"{name}: {error}", feature)
    check(torch.equal(found["weight"], made["weight"]) and found["group"] == {"lr": 0.5}, name, feature)


def test_state_in_a_stream() -> None:
    name, feature = "torch.distributed._serialization", "transfer of state to a replica"
    state = {"full": torch.arange(3), "empty": torch.empty(0, 2), "name": "", "steps": (1, None)}
    stream = io.BytesIO()
    torch_private.save_to_stream(state, stream)
    stream.seek(0)
    loaded = torch_private.load_from_stream(stream)
    check(loaded["name"] == "" and loaded["steps"] == (1, None), name, feature)
    check(torch.equal(loaded["full"], state["full"]), name, feature)
    check(loaded["empty"].shape == (0, 2), name, feature)
    check(stream.read() == b"", name, feature)
    moved = torch_private.on_cpu({"of": [(state["full"], "text")]})
    check(moved["of"][0][0] is state["full"] and moved["of"][0][1] == "text", "torch.utils._pytree", feature)


def test_wrapper_is_taken_apart_and_made_again() -> None:
    name, feature = (
        "is_traceable_wrapper_subclass, __tensor_flatten__",
        "checkpoints of Float8 and other wrapped tensors",
    )
    wrapper = TwoTensor(torch.ones(2), torch.zeros(2))
    check(
        torch_private.inner_names(wrapper) == ["a", "b"] and not torch_private.inner_names(torch.ones(1)), name, feature
    )
    made = torch_private.rebuilt(wrapper, {"a": torch.zeros(2), "b": torch.ones(2)})
    check(type(made) is TwoTensor and torch.equal(made.b, torch.ones(2)), name, feature)


def test_writer_copies_nothing_ahead_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    feature = "writing a checkpoint without a wait for what trains on the GPU"
    try:
        dcp_io.write({"weight": torch.ones(2)}, tmp_path, ControlGroup())
    except CheckpointException as error:  # from the loader that copies ahead, which finds no GPU here
        check(False, f"FileSystemWriter(per_thread_copy_ahead=0): {error}", feature)
    with pytest.raises(CheckpointException):
        save({"weight": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "ahead"), no_dist=True)


def test_callback_runs_after_backward() -> None:
    came: list[str] = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: torch_private.after_backward(lambda: came.append("end")))
    other = torch.ones(1, requires_grad=True)
    other.register_post_accumulate_grad_hook(lambda _: came.append("gradient"))
    (weight * other).sum().backward()
    check(came == ["gradient", "end"], "Variable._execution_engine.queue_callback", "gradient averaging over replicas")


def test_rendezvous_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    name, feature = "rendezvous._rendezvous_handlers['env']", "ranks that connect as soon as the store listens"
    rendezvous = import_module("torch.distributed.rendezvous")  # its package has a function of the same name
    imported = list(sys.modules)
    check(imported.index(rendezvous.__name__) < imported.index("torch.optim"), "the order of torch's imports", feature)
    check(not missing(rendezvous, "_rendezvous_handlers") and "env" in rendezvous._rendezvous_handlers, name, feature)
    handlers = dict(rendezvous._rendezvous_handlers)
    monkeypatch.setattr(rendezvous, "_rendezvous_handlers", handlers)
    runpy.run_path(str(STEP_CLOCK_DIR / "holdfast_rendezvous.py"))["start"](rendezvous)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    for variable, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    _, rank, world_size = next(
        rendezvous.rendezvous("env://", rank=0, world_size=1, timeout=timedelta(seconds=DEADLINE_S))
    )
    check((rank, world_size) == (0, 1) and handlers["env"] is not rendezvous._env_rendezvous_handler, name, feature)


def test_state_of_modules_and_optimizers() -> None:
    name, feature = "attributes of Module and Optimizer that hold their state", "the cache of state dicts"
    model = torch.nn.BatchNorm1d(2)
    parameters, buffers, unsaved, children, hooks, pre_hooks = torch_private.module_parts(vars(model))
    check(set(parameters) == {"weight", "bias"} and set(children) | set(unsaved) == set(), name, feature)
    check(set(buffers) == {"running_mean", "running_var", "num_batches_tracked"}, name, feature)
    check(not hooks and not pre_hooks, name, feature)
    model.register_state_dict_post_hook(lambda *_: None)
    model.register_state_dict_pre_hook(lambda *_: None)
    *_, hooks, pre_hooks = torch_private.module_parts(vars(model))
    check(len(hooks) == len(pre_hooks) == 1, name, feature)
    check(not missing(torch.nn.Module, *torch_private.STATE_METHODS), name, feature)
    check(torch_private.has_default_state_methods(torch.nn.Linear), name, feature)


@pytest.mark.parametrize("register", ["register_state_dict_pre_hook", "register_state_dict_post_hook"])
def test_hooks_of_an_optimizer(register: str) -> None:
    name, feature = "Optimizer._optimizer_state_dict_*_hooks", "the cache of state dicts"
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    check(not torch_private.has_state_dict_hooks(optimizer), name, feature)
    add: Callable[..., object] = getattr(optimizer, register)
    add(lambda *_: None)
    check(torch_private.has_state_dict_hooks(optimizer), name, feature)


def test_hook_of_fsdp(mesh: DeviceMesh) -> None:
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 2))
    *_, pre_hooks = torch_private.module_parts(vars(model))
    found = {(hook.__module__, hook.__qualname__) for hook in pre_hooks.values()}
    check(found == {torch_private.FSDP_RESHARD_HOOK}, "FSDP2's hook of a state dict", "the cache of state dicts")


@pytest.mark.slow
def test_compiled_module() -> None:
    inner = torch.nn.Linear(1, 1)
    found = getattr(torch.compile(inner), torch_private.COMPILED_MODULE, None)
    check(found is inner, "OptimizedModule._orig_mod", "the search for DDP and for the model's config")


def test_static_graph_is_recorded_in_the_first_backward_pass(mesh: DeviceMesh) -> None:
    wrapper = DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=True)
    name = "DistributedDataParallel.static_graph, _static_graph_delay_allreduce_enqueued"
    recorded = [torch_private.static_graph_recorded(wrapper)]
    wrapper(torch.ones(1, 1)).sum().backward()
    recorded.append(torch_private.static_graph_recorded(wrapper))
    check(wrapper.static_graph and recorded == [False, True], name, "micro-batches of DDP with a static graph")


def test_state_of_schedulers() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    both = SequentialLR(optimizer, [ConstantLR(optimizer), LambdaLR(optimizer, lambda _: 1.0)], [2])
    fields = {torch_private.COMPOSED_SCHEDULERS, torch_private.MILESTONES}
    check(fields <= both.state_dict().keys(), "SequentialLR._schedulers, _milestones", "changed hyper-parameters")
    torch_private.set_last_lr(both, [0.5])
    check(both.get_last_lr() == [0.5], "LRScheduler._last_lr", "changed learning rates under Trainer")


def test_process_groups(mesh: DeviceMesh) -> None:
    name, feature = "distributed_c10d._world.pg_group_ranks", "the assignment of peer checkpoints"
    check(torch_private.created_groups() == {frozenset({0})}, name, feature)
    group = torch_private.gloo_group(dist.HashStore(), 0, 1, timedelta(seconds=10))
    tensor = torch.ones(1)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    check(group.size() == 1, "ProcessGroup._set_default_backend, _register_backend", "connections between replicas")


def test_worker_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_info", object())
    check(get_worker_info() is not None, "torch.utils.data._utils.worker._worker_info", "streams read by one worker")
    torch_private.unmark_worker()
    check(get_worker_info() is None, "torch.utils.data._utils.worker._worker_info", "streams read by one worker")


def recorded() -> tuple[list[str], bytes, list[str]]:
    """The recorders and Gloo's dump after one operation, and the recorders with groups of other backends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(37))
    found, dump = torch_private.flight_recorders(), torch_private.flight_recorder_dump("gloo")
    for config in ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:other", "fake"):
        dist.distributed_c10d._world.pg_backend_config[config] = config  # type: ignore[index]
    return found, dump, torch_private.flight_recorders()


@pytest.mark.slow
def test_flight_recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    name, feature = "_dump_fr_trace, _world.pg_backend_config", "who holds up the others in a hang"
    # Another process: torch reads it once, and 2.10 records the first operation of each group without a lock, so that
    # tests whose ranks are threads may crash with it.
    monkeypatch.setenv(flight_recorder_files.ENTRIES, "1000")
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        found, raw, with_others = other.submit(recorded).result(DEADLINE_S)
    check(found == ["gloo"], name, feature)
    dump = flight_recorder.read(LogSource(name="dump", rank=0), raw)
    check(dump is not None and bool(dump.groups), name, feature)
    assert dump is not None
    calls = {f"{call.op} {call.sizes}" for position in dump.groups.values() for call in position.calls.values()}
    check(any("all_reduce" in call and "37" in call for call in calls), name, feature)
    check(with_others == ["other", "gloo"], name, feature)


def test_nccl_groups_have_what_survivors_need() -> None:
    feature = "recovery.replicas on GPUs"
    check(torch_private.nccl_problem(shrinks=True) == "", "torch.distributed.ProcessGroupNCCL.abort", feature)
    names = ("Options", "abort", "eager_connect_single_device")
    check(not missing(dist.ProcessGroupNCCL, *names), "ProcessGroupNCCL", feature)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout, options.config.blocking = timedelta(seconds=5), 0
    check(options._timeout == timedelta(seconds=5), "ProcessGroupNCCL.Options", feature)
    check(not missing(dist.Work, "is_completed", "wait"), "Work", feature)
    check(dist.distributed_c10d.SHRINK_ABORT == 1, "SHRINK_ABORT", "HOLDFAST_NCCL_SHRINK")
    header = (
        Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d" / "ProcessGroupNCCL.hpp"
    )
    check(torch_private.NCCL_BLOCKING_WAIT in header.read_text(), torch_private.NCCL_BLOCKING_WAIT, feature)


def test_nccl_groups_are_made_without_a_watchdog_while_any_thread_makes_one(monkeypatch) -> None:
    monkeypatch.setenv(torch_private.NCCL_BLOCKING_WAIT, "0")
    with torch_private.no_watchdog:
        with torch_private.no_watchdog:
            pass
        assert os.environ[torch_private.NCCL_BLOCKING_WAIT] == "1"
    assert os.environ[torch_private.NCCL_BLOCKING_WAIT] == "0"


class Unconnected:
    """A group and its backend, whose first operation raises NCCL's timeout."""

    aborted = False

    def _set_default_backend(self, _: object) -> None:
        pass

    def _register_backend(self, *_: object) -> None:
        pass

    def allreduce(self, _: object) -> None:
        raise dist.DistBackendError("NCCL timeout when waiting for nonblocking call to become successful")

    def abort(self) -> None:
        self.aborted = True


def test_nccl_group_that_does_not_connect_is_aborted() -> None:
    group: Any = Unconnected()
    with pytest.raises(dist.DistBackendError, match="NCCL timeout"):
        torch_private._connected(group, group, torch.device("cpu"), 30.0)
    assert group.aborted


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("torch.cuda.nccl.version", lambda: (2, 21, 5), "NCCL 2.21.5 is older than 2.26"),
        ("torch.distributed.ProcessGroupNCCL", object, "has no ProcessGroupNCCL.abort"),
        ("torch.distributed.is_nccl_available", lambda: False, "built without NCCL"),
    ],
)
def test_nccl_that_cannot_be_aborted_is_named(monkeypatch, name: str, value: object, problem: str) -> None:
    monkeypatch.setattr(name, value)
    assert problem in torch_private.nccl_problem(shrinks=False)
