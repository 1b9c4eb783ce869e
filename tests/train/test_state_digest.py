"""Any bit of the weights or the optimizer's state changes the digest; how they lie in memory does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.train.ft.state_digest import SMALL_BYTES, SUMS, Digest, StateDigest


class Tensors(torch.nn.Module):
    """Parameters of these values."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.nn.Parameter(each, requires_grad=False) for each in tensors)


def digest(*tensors: torch.Tensor) -> Digest:
    model = Tensors(*tensors)
    return StateDigest(model, torch.optim.SGD(model.parameters())).compute()


def test_each_bit_of_each_number_counts():
    model = Tensors(torch.arange(1.0, 12.0))
    state = StateDigest(model, torch.optim.SGD(model.parameters()))
    words = model.tensors[0].detach().view(torch.int32)
    seen = {state.compute()}
    for at in range(len(words)):
        for bit in range(32):
            flip = -(2**31) if bit == 31 else 1 << bit
            words[at] ^= flip
            seen.add(state.compute())
            words[at] ^= flip
    assert len(seen) == 1 + 32 * len(words)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, SMALL_BYTES + 3, 3 * SUMS * 8 + 5])
def test_last_and_first_number_of_any_dtype_and_size_count(dtype: torch.dtype, size: int):
    content = torch.zeros(size * dtype.itemsize, dtype=torch.uint8)
    whole = digest(content.view(dtype))
    for at in (0, -1):
        flipped = content.clone()
        flipped[at] = 1
        assert digest(flipped.view(dtype)) != whole


def test_order_of_numbers_tensors_and_pages_counts():
    one, other = torch.arange(4096.0), torch.arange(4096.0, 8192.0)
    page = torch.cat([one[1024:2048], one[:1024], one[2048:]])  # two memory pages of 4 KiB
    assert len({digest(one, other), digest(other, one), digest(one.flip(0), other), digest(page, other)}) == 4
    big, large = torch.arange(20000.0), torch.arange(1.0, 20001.0)
    assert digest(big, large) != digest(large, big)


def test_layout_in_memory_does_not_count():
    numbers = torch.arange(6000.0).view(60, 100)
    assert digest(numbers) == digest(numbers.t().contiguous().t())
    shifted = torch.cat([torch.zeros(1), numbers.view(-1)])[1:].view(60, 100)
    assert digest(numbers) == digest(shifted)


def test_every_tensor_of_the_optimizer_counts_unless_only_weights_do():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = StateDigest(model, optimizer)
    before = state.compute(), state.compute(weights_only=True)
    seen = {before[0]}
    for of in optimizer.state.values():
        for tensor in of.values():
            tensor.view(-1).view(torch.int32)[0] ^= 1
            seen.add(state.compute())
            tensor.view(-1).view(torch.int32)[0] ^= 1
    assert len(seen) == 1 + 6
    assert (state.compute(), state.compute(weights_only=True)) == before
    assert before[1] == (before[0].weights, 0)


def test_shards_are_those_of_the_start_even_while_fsdp2_has_gathered_them(tmp_path: Path):
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", None, 1, 0)
    try:
        model = fully_shard(torch.nn.Linear(8, 4), mesh=init_device_mesh("cpu", (1,)))
        state = StateDigest(model, torch.optim.SGD(model.parameters()))
        before = state.compute()
        model.unshard()
        assert state.compute() == before
    finally:
        dist.destroy_process_group()
