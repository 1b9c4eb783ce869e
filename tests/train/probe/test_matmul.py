"""Matrix products with a result known in advance, on the CPU; on a GPU the same code has not run."""

from __future__ import annotations

import pytest
import torch

from holdfast.train.probe.matmul import DTYPES, LARGEST, PERIOD, PERIODS, burn_in, copy_rate, operands

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("periods", [1, 8])
def test_product_known_in_advance_is_that_of_integers(dtype: torch.dtype, periods: int) -> None:
    given = operands(dtype, periods, CPU)
    exact = given.left.long() @ given.right.long()
    assert torch.equal(given.product.long(), exact), "the type does not hold the product"
    product = torch.mm(given.left.float(), given.right.float())  # not in bfloat16: see DTYPES
    assert torch.equal(product.to(dtype), given.product)
    assert len(given.product.unique()) > PERIOD // 4


def test_float32_sums_fit_on_a_gpu_in_any_order() -> None:
    assert LARGEST[torch.float32] ** 2 * PERIOD * PERIODS["cuda"] < 1 << 24


def test_float32_operands_fit_tf32() -> None:
    assert LARGEST[torch.float32] < 1 << 10


def test_healthy_device_makes_no_wrong_product() -> None:
    rates = burn_in(CPU, 0.0)
    assert [(each.wrong, each.products) for each in rates] == [(0, 2)] * len(DTYPES["cpu"])
    assert all(each.tflop_s > 0 for each in rates)


def test_one_wrong_bit_is_counted() -> None:
    def flips_a_bit(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.mm(left, right, out=out)
        out.view(torch.int16)[-1, -1] ^= 1
        return out

    assert [each.wrong for each in burn_in(CPU, 0.0, multiply=flips_a_bit)] == [2]


def test_copy_is_exact_and_has_a_rate() -> None:
    rate, wrong = copy_rate(CPU, 0.0, size_bytes=1 << 20)
    assert rate > 0
    assert wrong == 0


def test_wrong_copy_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, _: target)
    assert copy_rate(CPU, 0.0, size_bytes=1 << 10)[1] == 2
