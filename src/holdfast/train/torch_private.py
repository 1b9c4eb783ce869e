"""The private names of torch that holdfast uses, each behind a name of our own.

tests/train/test_torch_private.py checks each name, and says what an upgrade of torch breaks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from operator import attrgetter, itemgetter
from threading import Lock
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from torch.utils.data._utils import worker

# Profiles

profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
enable_record_function: Callable[[bool], None] = torch.autograd._enable_record_function


def memory_is_recorded() -> bool:
    """Whether allocations of GPU memory are recorded; needs an initialised GPU."""
    return cast("Any", torch._C)._cuda_isHistoryEnabled()


def record_memory(*, max_entries: int) -> None:
    """Record allocations of GPU memory from now on, with the Python code that makes them."""
    cast("Any", torch.cuda.memory)._record_memory_history("all", stacks="python", max_entries=max_entries)


def stop_recording_memory() -> None:
    """Record no more; what was recorded is dropped."""
    cast("Any", torch.cuda.memory)._record_memory_history(None)


def memory_snapshot() -> Any:
    """The segments of GPU memory and what was recorded of them, as https://pytorch.org/memory_viz reads it pickled."""
    return cast("Any", torch.cuda.memory)._snapshot()


# Tensors

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Rises with each change in place."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, detached."""
    # Not `to_local`, which returns a parameter for a parameter, and an autograd node.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def local_type(tensor: DTensor) -> type[torch.Tensor]:
    """The type of this rank's shard."""
    return type(tensor._local_tensor)


def inner_names(tensor: torch.Tensor) -> list[str]:
    """Attributes with the tensors that a wrapper such as a Float8 tensor consists of; empty for any other type."""
    return cast("Any", tensor).__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else []


def rebuilt(tensor: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor:
    """A wrapper of the same type around other tensors of the same shapes."""
    kind: Any = type(tensor)
    context = cast("Any", tensor).__tensor_flatten__()[1]
    return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def sharding(tensor: DTensor) -> Any:
    """How a tensor is sharded; shardings can be compared."""
    return tensor._spec


def sharded(local: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor of this local part, sharded as another one."""
    return DTensor(local, like._spec, requires_grad=False)


def offset_in_file(tensor: torch.Tensor) -> int | None:
    """Where the bytes of a tensor begin that was loaded to "meta"; None from torch 2.10, which does not record it."""
    return cast("Any", tensor.untyped_storage())._checkpoint_offset


def on_cpu(state: Any) -> Any:
    """The state with its tensors on the CPU; those that are there are not copied."""
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, state)


def save_to_stream(state: Any, stream: Any) -> None:
    """Write a state to an object that has `write`, and hold no second copy of it."""
    _streaming_save(state, stream)


def load_from_stream(stream: Any) -> Any:
    """Load what `save_to_stream` wrote from an object that has `read` and `readline`; unpickles anything."""
    return _streaming_load(stream, weights_only=False)


def index_types() -> list[Any]:
    """Types and functions that the index of a checkpoint is pickled with."""
    from torch.distributed.checkpoint import filesystem, metadata  # imported here: that takes time

    types = [each for each in vars(metadata).values() if getattr(each, "__module__", "") == metadata.__name__]
    return [*types, filesystem._StorageInfo, torch.Size, cast("Any", torch.serialization)._get_layout]


def set_loaded(planner: Any, name: str, value: object) -> None:
    """Put a loaded value, which is no tensor, in its place in the state of a DefaultLoadPlanner."""
    from torch.distributed.checkpoint import _nested_dict  # imported here: that takes time

    cast("Any", _nested_dict).set_element(planner.original_state_dict, planner.mappings[name], value)


def after_backward(call: Callable[[], None]) -> None:
    """Queue a callback for the end of the current backward pass, after those already queued."""
    cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(call)


# Modules and optimizers

COMPILED_MODULE = "_orig_mod"
"""Attribute of the module that `torch.compile` wraps."""
static_graph_recorded: Callable[[Module], bool] = attrgetter("_static_graph_delay_allreduce_enqueued")
"""Whether a DDP module with a static graph has recorded it, in its first backward pass."""
COMPOSED_SCHEDULERS, MILESTONES = "_schedulers", "_milestones"
"""Fields of a scheduler composed of others."""

STATE_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_buffers",
    "named_children",
    "named_modules",
)
FQN_MODIFIERS = "_fqn_modifiers"
"""Attribute for custom parameter names; none of torch's own modules has it."""
STATE_OVERRIDES = frozenset((*STATE_METHODS, FQN_MODIFIERS))
"""Overrides that change a module's state dict or its names."""
FSDP_RESHARD_HOOK = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook",
)
"""FSDP2's hook that reshards parameters before torch returns a module's state. Gathered parameters have another type or
sharding, so they are never mistaken for those of the tree."""
module_parts: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks"
)
"""Of a module's `vars`: parameters, buffers, names of those not saved, children, and hooks of its state dict."""
_optimizer_hooks = itemgetter("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_state_methods_of = attrgetter(*STATE_METHODS)
_TORCH_METHODS = _state_methods_of(Module)


def has_default_state_methods(kind: type[Module]) -> bool:
    """Whether a class leaves its state dict and names to torch."""
    return _state_methods_of(kind) == _TORCH_METHODS and not hasattr(kind, FQN_MODIFIERS)


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks change an optimizer's state dict."""
    return any(_optimizer_hooks(vars(optimizer)))


def set_last_lr(scheduler: LRScheduler, rates: list[Any]) -> None:
    """Replace what `get_last_lr` returns."""
    scheduler._last_lr = rates


# Process groups and worker processes


def created_groups() -> set[frozenset[int]]:
    """The ranks of each process group that this process is in."""
    return {frozenset(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()}


def gloo_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A Gloo group outside of torch's default group."""
    group, cpu = dist.ProcessGroup(store, rank, world_size), torch.device("cpu")
    gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device in (cpu, torch.device("cuda")) if torch.cuda.is_available() else (cpu,):
        group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


NCCL_ABORTS_SINCE = (2, 26)
"""NCCL version from which an abort releases kernels that wait for a dead peer (TorchFT's ProcessGroupNCCL)."""
NCCL_SHRINKS_SINCE = (2, 27)
NCCL_CONNECTED_POLL_S = 0.001


def nccl_problem(*, shrinks: bool) -> str:
    """Why this torch cannot abort, or shrink, an NCCL communicator that waits for a dead peer; empty if it can."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if not hasattr(dist.ProcessGroupNCCL, "abort"):
        return f"torch {torch.__version__} has no ProcessGroupNCCL.abort"
    if shrinks and not hasattr(dist.ProcessGroupNCCL, "shrink"):
        return f"torch {torch.__version__} has no ProcessGroupNCCL.shrink"
    needed = NCCL_SHRINKS_SINCE if shrinks else NCCL_ABORTS_SINCE
    if (version := cast("tuple[int, ...]", nccl.version())) < needed:
        return f"NCCL {'.'.join(map(str, version))} is older than {'.'.join(map(str, needed))}"
    return ""


NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable read by each NCCL group at its creation; with 1 it starts no watchdog."""
NCCL_CONNECT_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Environment variable with the whole seconds that a call may wait for a communicator that connects; torch reads it
once per process, and waits for 30 minutes without it."""


class _NoWatchdog:
    """While entered, in any number of threads, this process creates NCCL groups without a watchdog.

    The variable exists already (replica_group.py), so that libc replaces its value and moves nothing that another
    thread may read.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entered = 0
        self._before = "0"

    def __enter__(self) -> None:
        with self._lock:
            if self._entered == 0:
                self._before = os.environ.get(NCCL_BLOCKING_WAIT, "0")
                os.environ[NCCL_BLOCKING_WAIT] = "1"
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                os.environ[NCCL_BLOCKING_WAIT] = self._before


no_watchdog = _NoWatchdog()


def nccl_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, connect_s: float
) -> dist.ProcessGroup:
    """An NCCL group outside of torch's default group, which only its owner aborts; blocks until it is connected.

    It has no watchdog thread. Torch's watchdog ends the process a minute after a peer's death, whatever the owner has
    done meanwhile, and holds the lock of the group's operations until then. Its work is complete when the kernel has
    ended (`is_completed`), and only then may it be waited for. No GPU has run it with a peer that dies meanwhile.
    """
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # A call that connects to a dead peer then ends after NCCL_CONNECT_TIMEOUT; until then nothing can abort it.
    options.config.blocking = 0
    with no_watchdog:
        backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    backend.eager_connect_single_device(device)
    return _connected(dist.ProcessGroup(store, rank, world_size), backend, device, connect_s)


def nccl_shrunk(
    group: dist.ProcessGroup, excluded: list[int], device: torch.device, connect_s: float
) -> dist.ProcessGroup:
    """A group without these ranks, after an abort of the given group's operations; blocks until it is connected."""
    torch.cuda.set_device(device)  # of this thread
    with no_watchdog:
        backend = group._get_backend(torch.device("cuda")).shrink(excluded, dist.distributed_c10d.SHRINK_ABORT)
    return _connected(dist.ProcessGroup(backend.rank(), backend.size()), backend, device, connect_s)


def _connected(group: dist.ProcessGroup, backend: Any, device: torch.device, connect_s: float) -> dist.ProcessGroup:
    """The group, once its members have completed an operation: NCCL connects them in the first, and else in a step."""
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    deadline = time.monotonic() + connect_s
    try:
        work = group.allreduce([torch.zeros(1, device=device)])  # returns once NCCL has connected
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise ConnectionError(f"NCCL has not connected all replicas within {connect_s:g} s")
            time.sleep(NCCL_CONNECTED_POLL_S)
        work.wait()  # raises its error
    except Exception:
        backend.abort()
        raise
    return group


def unmark_worker() -> None:
    """Make `get_worker_info` return None in a worker process; torch has no public way."""
    worker._worker_info = None  # pyright: ignore[reportPrivateUsage] - see above


# Flight recorders

_DUMPS_BY_ITSELF = ("nccl", "xccl")
"""Backends whose recorder torch dumps on request, and their variants."""
_NOT_RECORDED = ("fake", "undefined")
_dump_flight_recorder: Callable[..., bytes] = attrgetter("_C._distributed_c10d._dump_fr_trace")(torch)


def flight_recorders() -> list[str]:
    """Flight recorders of this process that only it can dump: those of its groups' backends; Gloo's is the last."""
    configs: Iterable[object] = dist.distributed_c10d._world.pg_backend_config.values()
    backends = {part.rpartition(":")[2] for config in configs for part in str(config).split(",")}
    others = {name for name in backends if not name.startswith((*_DUMPS_BY_ITSELF, *_NOT_RECORDED))}
    return [*sorted(others - {"gloo"}), "gloo"]


def flight_recorder_dump(backend: str) -> bytes:
    """A flight recorder's dump, a pickle, without stacks: for the first stack torch imports its compiler, for seconds.

    Torch 2.10 records Gloo only, and takes no `backend`.
    """
    named = {} if backend == "gloo" else {"backend": backend}
    return _dump_flight_recorder(includeStackTraces=False, **named)
