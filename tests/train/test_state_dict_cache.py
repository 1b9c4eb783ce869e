"""A tree that is kept from one save to the next holds what torch would give, whatever was changed between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import BatchNorm1d, Linear, Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from holdfast.train.checkpoint.staging import StagingBuffer
from holdfast.train.checkpoint.train_state import TrainState

WIDTH = 4


class Net(Module):
    """`beside` holds what no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH, bias=False)
        self.norm = BatchNorm1d(WIDTH)
        self.other, self.wrapped, self.beside = Module(), Module(), Linear(WIDTH, WIDTH)
        self.wrapped._orig_mod = Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(batch)))


class Asked(TrainState):
    """Counts the calls of torch."""

    def tensors(self) -> dict[str, Any]:
        object.__setattr__(self, "times", getattr(self, "times", 0) + 1)
        return super().tensors()


def training(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Asked:
    net = Net()
    own = [*net.first.parameters(), *net.second.parameters(), *net.norm.parameters()]
    optimizer = kind([{"params": own[:2]}, {"params": own[2:], "lr": 0.2}], **{"lr": 0.1, **options})
    return Asked(model=net, optimizer=optimizer)


def train(loop: TrainState) -> None:
    loop.optimizer.zero_grad()
    loop.model(torch.randn(8, WIDTH)).square().sum().backward()
    loop.optimizer.step()


def told(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """All that is in a tree, in order."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from told(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for at, value in enumerate(tree):
            yield from told(value, f"{path}/{at}")
    elif isinstance(tree, DTensor):
        yield path, (tree.dtype, str(tree._spec), tree._local_tensor.tolist())
    elif isinstance(tree, torch.Tensor):
        yield path, (tree.dtype, tree.tolist())
    else:
        yield path, tree


def saved(staging: StagingBuffer) -> list[tuple[str, object]]:
    tree = staging.start_copy()
    assert staging.finish_copy()
    return sorted(told(tree), key=lambda each: each[0])


def true(loop: TrainState) -> list[tuple[str, object]]:
    return sorted(told(TrainState.tensors(loop)), key=lambda each: each[0])


def swap_a_module(loop: TrainState) -> None:
    loop.model.beside = Linear(WIDTH, WIDTH)


def rename_a_module(loop: TrainState) -> None:
    loop.model.renamed = loop.model.beside
    del loop.model.beside


def move_a_parameter_to_another_module(loop: TrainState) -> None:
    moved = loop.model.beside.bias
    del loop.model.beside.bias
    loop.model.other.bias = moved


def swap_two_parameters_of_one_shape(loop: TrainState) -> None:
    first, second = loop.model.first, loop.model.second
    first.weight, second.weight = second.weight, first.weight


def swap_two_of_a_group(loop: TrainState) -> None:
    of_all = loop.optimizer.param_groups[1]["params"]
    of_all[1], of_all[2] = of_all[2], of_all[1]


def have_a_part_compiled(loop: TrainState) -> None:
    """Torch calls what is within it otherwise then."""
    loop.model.wrapped = torch.compile(loop.model.wrapped._orig_mod)


def replace_a_parameter(loop: TrainState) -> None:
    loop.model.beside.weight = Parameter(torch.full((WIDTH, WIDTH), 7.0))


def replace_what_a_parameter_holds(loop: TrainState) -> None:
    loop.model.first.weight.data = torch.full((WIDTH, WIDTH), 7.0)


def make_a_parameter_larger(loop: TrainState) -> None:
    loop.model.beside.weight.data = torch.full((WIDTH, 3 * WIDTH), 7.0)


def have_other_numbers(loop: TrainState) -> None:
    loop.model.beside.half()


def tie_two_parameters(loop: TrainState) -> None:
    loop.model.beside.weight = loop.model.first.weight


def have_a_parameter_no_more(loop: TrainState) -> None:
    loop.model.beside.bias = None


def register_a_buffer_anew(loop: TrainState) -> None:
    loop.model.register_buffer("seen", torch.ones(2))


def have_a_buffer_saved_no_more(loop: TrainState) -> None:
    loop.model.register_buffer("seen", torch.ones(2), persistent=False)


def have_another_buffer_saved(loop: TrainState) -> None:
    loop.model.register_buffer("passing", torch.ones(2))


def fill_a_buffer(loop: TrainState) -> None:
    loop.model.seen += 1


def add_a_hook(loop: TrainState) -> None:
    def hook(_: Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}seen"] = state[f"{prefix}seen"] + 1

    loop.model.register_state_dict_post_hook(hook)


def add_a_hook_before(loop: TrainState) -> None:
    loop.model.register_state_dict_pre_hook(lambda module, *_: module.seen.fill_(5.0))


def have_a_module_say_its_state_itself(loop: TrainState) -> None:
    loop.model.beside.state_dict = lambda destination, prefix, **_: destination.update({f"{prefix}bias": torch.ones(1)})


def have_a_class_say_its_state_itself(loop: TrainState) -> None:
    class Own(Linear):
        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}bias"] = self.bias * 2

    loop.model.beside.__class__ = Own


def have_extra_state(loop: TrainState) -> None:
    class Extra(Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"extra": 1}

    loop.model.beside.__class__ = Extra


def load_the_optimizer(loop: TrainState) -> None:
    state = loop.optimizer.state_dict()
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"] + 3
    loop.optimizer.load_state_dict(state)


def replace_what_the_optimizer_has(loop: TrainState) -> None:
    for values in loop.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] * 2


def have_the_optimizer_count_otherwise(loop: TrainState) -> None:
    for values in loop.optimizer.state.values():
        values["step"] = 41


def have_the_optimizer_keep_more(loop: TrainState) -> None:
    loop.optimizer.state[loop.model.first.weight]["more"] = torch.ones(1)


def have_the_optimizer_call_it_otherwise(loop: TrainState) -> None:
    values = loop.optimizer.state[loop.model.first.weight]
    first, second = values.pop("exp_avg"), values.pop("exp_avg_sq")
    values.update(exp_avg_sq=first, exp_avg=second)


def have_the_optimizer_forget(loop: TrainState) -> None:
    del loop.optimizer.state[loop.model.first.weight]


def add_a_group(loop: TrainState) -> None:
    loop.optimizer.add_param_group({"params": [*loop.model.beside.parameters()], "lr": 0.3})


def put_a_parameter_into_another_group(loop: TrainState) -> None:
    one, other = loop.optimizer.param_groups
    other["params"].insert(0, one["params"].pop())


def change_options(loop: TrainState) -> None:
    loop.optimizer.param_groups[1].update(lr=0.05, betas=(0.5, 0.6))
    loop.optimizer.param_groups[0]["initial_lr"] = 1.0


def have_an_option_that_is_a_tensor(loop: TrainState) -> None:
    loop.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def have_the_optimizer_say_its_state_otherwise(loop: TrainState) -> None:
    def hook(_: object, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "hooked": 1} for group in state["param_groups"]]}

    loop.optimizer.register_state_dict_post_hook(hook)


SEEN_THROUGH = (
    train,
    swap_a_module,
    replace_a_parameter,
    replace_what_a_parameter_holds,
    register_a_buffer_anew,
    fill_a_buffer,
    load_the_optimizer,
    replace_what_the_optimizer_has,
    change_options,
)
"""What leaves every name where it was."""
ASKED_ABOUT = (
    rename_a_module,
    move_a_parameter_to_another_module,
    have_a_part_compiled,
    swap_two_parameters_of_one_shape,
    swap_two_of_a_group,
    make_a_parameter_larger,
    have_other_numbers,
    tie_two_parameters,
    have_a_parameter_no_more,
    have_a_buffer_saved_no_more,
    have_another_buffer_saved,
    add_a_hook,
    add_a_hook_before,
    have_a_module_say_its_state_itself,
    have_a_class_say_its_state_itself,
    have_extra_state,
    have_the_optimizer_count_otherwise,
    have_the_optimizer_keep_more,
    have_the_optimizer_call_it_otherwise,
    have_the_optimizer_forget,
    add_a_group,
    put_a_parameter_into_another_group,
    have_an_option_that_is_a_tensor,
    have_the_optimizer_say_its_state_otherwise,
)


@pytest.mark.slow
@pytest.mark.parametrize("change", [*SEEN_THROUGH, *ASKED_ABOUT])
def test_save_after_a_change_holds_what_torch_would_give_then(change):
    loop = training()
    staging = StagingBuffer(loop)
    train(loop)
    assert saved(staging) == true(loop)
    change(loop)
    assert saved(staging) == true(loop)
    assert loop.times == (1 if change in SEEN_THROUGH else 2)
    assert saved(staging) == true(loop)


class Counting(Linear):
    count = 0

    def get_extra_state(self) -> dict[str, int]:
        self.count += 1
        return {"count": self.count}


def test_state_of_a_module_that_says_more_than_its_tensors_is_asked_for_at_each_save():
    loop = training()
    loop.model.beside = Counting(WIDTH, WIDTH)
    train(loop)
    staging = StagingBuffer(loop)
    for times in (1, 2, 3):
        saved(staging)
        assert loop.times == times


def numbered() -> Asked:
    """As optimizers did that count in Python."""
    loop = training()
    train(loop)
    have_the_optimizer_count_otherwise(loop)
    return loop


def test_numbers_of_the_optimizer_are_those_of_each_save():
    loop = numbered()
    staging = StagingBuffer(loop)
    for count in (1, 2, 3):
        for values in loop.optimizer.state.values():
            values["step"] = count
        assert saved(staging) == true(loop)
    assert loop.times == 1


def test_buffer_that_anybody_may_change_is_copied_before_the_loop_continues():
    loop = training()
    train(loop)
    staging = StagingBuffer(loop)
    for _ in range(2):
        was = true(loop)
        tree = staging.start_copy()
        loop.model(torch.randn(8, WIDTH))  # changes the running averages
        assert staging.finish_copy()
        assert sorted(told(tree), key=lambda each: each[0]) == was
    assert loop.times == 1


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [pytest.param(torch.compile, marks=pytest.mark.slow), DistributedDataParallel])
@pytest.mark.usefixtures("alone")
def test_tree_of_a_wrapped_model_is_kept_under_the_names_that_torch_gives_it(wrap):
    loop = training()
    train(loop)
    loop = Asked(model=wrap(loop.model), optimizer=loop.optimizer)
    staging = StagingBuffer(loop)
    for _ in range(2):
        train_bare(loop)
        assert saved(staging) == true(loop)
    assert loop.times == 1


def sharded() -> Asked:
    """As FSDP2 shards it, among so many ranks as there are; a part of it is sharded on its own."""
    net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net.second, mesh=mesh)
    fully_shard(net, mesh=mesh)
    own = [*net.first.parameters(), *net.second.parameters(), *net.norm.parameters()]
    return Asked(model=net, optimizer=torch.optim.AdamW([{"params": own[:2]}, {"params": own[2:]}]))


@pytest.mark.usefixtures("alone")
def test_tree_of_sharded_parameters_is_kept():
    loop = sharded()
    train(loop)
    staging = StagingBuffer(loop)
    for _ in range(3):
        train(loop)
        assert saved(staging) == true(loop)
    assert loop.times == 1
    assert any(isinstance(value, tuple) and "S(0)" in str(value) for _, value in true(loop))


@pytest.mark.usefixtures("alone")
def test_change_of_a_sharded_parameter_while_it_is_copied_is_noticed():
    loop = sharded()
    train(loop)
    staging = StagingBuffer(loop)
    for _ in range(2):
        saved(staging)
        staging.start_copy()
        with torch.no_grad():
            loop.model.first.weight.mul_(2)
        assert not staging.finish_copy()
        staging = StagingBuffer(loop)


@pytest.mark.usefixtures("alone")
def test_parameters_that_an_evaluation_has_left_gathered_are_asked_about():
    loop = sharded()
    train(loop)
    staging = StagingBuffer(loop)
    saved(staging)
    with torch.no_grad():
        loop.model(torch.randn(8, WIDTH))
    assert not isinstance(loop.model.first.weight, DTensor)
    found = saved(staging)
    assert loop.times == 2
    assert isinstance(loop.model.first.weight, DTensor)
    assert found == true(loop)
    train(loop)
    assert saved(staging) == true(loop)
    assert loop.times == 2


@pytest.mark.usefixtures("alone")
def test_parameter_that_is_sharded_otherwise_is_asked_about():
    loop = sharded()
    train(loop)
    staging = StagingBuffer(loop)
    saved(staging)
    beside = loop.model.other
    mesh = loop.model.first.weight.device_mesh
    for way in ([Replicate()], [Shard(0)], [Shard(1)]):
        beside.weight = Parameter(distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, way))
        assert saved(staging) == true(loop)
    assert loop.times == 4


@pytest.mark.usefixtures("alone")
def test_sharded_parameters_beside_another_hook_are_asked_about_at_each_save():
    loop = sharded()
    train(loop)
    loop.model.second.register_state_dict_pre_hook(lambda *_: loop.model.seen.add_(1))
    staging = StagingBuffer(loop)
    for times in (1, 2):
        saved(staging)
        assert loop.times == times


def train_bare(loop: TrainState) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {}), (torch.optim.AdamW, {"lr": torch.tensor(0.1)}), (torch.optim.SGD, {"momentum": 0.9})],
    ids=["no state", "a rate that is a tensor", "momentum"],
)
def test_every_save_holds_what_torch_gives_for_other_optimizers(kind, options):
    loop = training(kind, **options)
    staging = StagingBuffer(loop)
    for _ in range(3):
        train(loop)
        assert saved(staging) == true(loop)
    assert loop.times == (3 if "lr" in options else 1)


def test_nothing_of_the_training_is_held_by_what_is_kept():
    """What a loop lets go of is gone, and not only after the next save."""
    import gc
    import weakref

    loop = training()
    staging = StagingBuffer(loop)
    train(loop)
    saved(staging)
    gone = [weakref.ref(loop.model.beside), weakref.ref(loop.optimizer.state[loop.model.first.weight]["exp_avg"])]
    swap_a_module(loop)
    replace_what_the_optimizer_has(loop)
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_state_of_another_kind_of_dict_is_what_torch_gives():
    loop = training()
    train(loop)
    loop.optimizer.state = OrderedDict(loop.optimizer.state)
    staging = StagingBuffer(loop)
    for _ in range(2):
        train(loop)
        assert saved(staging) == true(loop)
