"""Storage of few bits: what may name it, and what it holds where nothing varies."""

from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as heedful
from heedful.reference import quant

NAMES = ["int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]


@pytest.mark.parametrize("name", NAMES)
def test_storage_is_named_by_a_dtype_or_its_name(name):
    x = torch.randn(2, 3, 1, 8)
    by_name, by_dtype = (heedful.quantize_kv(x, how) for how in (name, getattr(torch, name)))
    assert by_name[0].dtype == by_dtype[0].dtype == getattr(torch, name)
    for one, other in zip(by_name[:2], by_dtype[:2], strict=True):
        assert torch.equal(one.float(), other.float())
    assert by_name[2] is by_dtype[2] is None


@pytest.mark.parametrize("wrong", ["int3", "torch.int16", torch.uint8, torch.int16, None], ids=str)
def test_storage_that_is_none_is_named_as_it_came(wrong: Any):
    with pytest.raises(ValueError, match=f"^dtype must be one of int4, .*, got {wrong}$"):
        heedful.quantize_kv(torch.ones(2, 4), wrong)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 3, 1, 8)], ids=str)
def test_groups_without_spread_are_stored_as_the_reference_stores_them(dtype, asymmetric, shape):
    x = torch.full(shape, 2.5) if asymmetric else torch.zeros(shape)
    packed, scale, shift = heedful.quantize_kv(x, dtype, 4, asymmetric)
    want, want_scale, want_shift = quant.quantize(x.numpy(), dtype, 4, asymmetric)
    assert np.array_equal(packed.numpy(), want) and np.array_equal(scale.numpy(), want_scale)
    assert scale.eq(1.0).all()
    if shift is not None and want_shift is not None:
        assert np.array_equal(shift.numpy(), want_shift)
    assert torch.equal(heedful.dequantize_kv(packed, scale, shift), x)


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (2, 5, 3, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_nibble_is_its_number_whatever_the_dims(shape, dtype):
    numbers = torch.arange(-7, 9).clamp(max=7).float().expand(shape)
    packed, scale, shift = heedful.quantize_kv(numbers.to(dtype), "int4")
    assert shift is None and packed.shape == (*shape[:-1], 8) and scale.eq(1).all()
    assert torch.equal(heedful.dequantize_kv(packed, scale, dtype=dtype), numbers.to(dtype))
    by_group = heedful.dequantize_kv(
        packed, scale.expand(*shape[:-1], 4), scale.new_ones(*shape[:-1], 4)
    )
    assert torch.equal(by_group, numbers + 1)
