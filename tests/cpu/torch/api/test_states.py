"""Partial results, quantised storage and explanations."""

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import heedful.torch as heedful
from heedful.core.call.operands import Operands
from heedful.reference import quant
from heedful.torch.api.merge import merged
from support.problems.merges import InPlace, assert_in_place
from support.runs.api import assert_agrees, dense_problem


def parts(q, k, v, cuts: list[int]):
    """Attention over runs of keys, each on its own."""
    ends = [*cuts, k.shape[1]]
    spans = [slice(a, b) for a, b in zip([0, *cuts], ends, strict=True)]
    found = [heedful.flash_attn_func(q, k[:, s], v[:, s], return_lse=True) for s in spans]
    outs, lses = zip(*found, strict=True)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("cuts", [[], [4], [0, 3, 3, 9]], ids=str)
def test_merged_parts_are_the_attention_over_all_keys(cuts, sink):
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 11, 2, 16), torch.randn(2, 11, 2, 8)
    sinks = torch.randn(4) if sink else None
    outs, lses = parts(q, k, v, cuts)
    out, lse = heedful.merge_attn_states(outs, lses, sinks)
    problem = dense_problem(q, k, v, sink=sink)
    assert_agrees(out, problem, Operands(q, k, v, sink=sinks), lse)


def ranges(packed: bool, dtype: torch.dtype, seed: int = 0):
    """Running sums, and parts of some of their rows: (first row, out, lse). Some rows saw no key,
    and hold NaN."""
    values = torch.Generator().manual_seed(seed)
    lead, rows = (() if packed else (2,)), 11

    def part(count, of=torch.float32):
        out = torch.randn(*lead, count, 3, 8, generator=values).to(of)
        lse = 6 * torch.randn(*lead, 3, count, generator=values)
        lse[..., 1::4] = -torch.inf
        return out.masked_fill((lse == -torch.inf).transpose(-1, -2)[..., None], torch.nan), lse

    return part(rows), [(begin, *part(n, dtype)) for begin, n in ((0, 11), (3, 5), (10, 1), (4, 0))]


def drawn_ranges(packed: bool, dtype: torch.dtype, seed: int) -> InPlace:
    whole, parts = ranges(packed, dtype, seed)
    empty = (whole[1] == -torch.inf).mT[..., None]
    return InPlace(whole[0].masked_fill(empty, 0.0), whole[1], parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_parts_of_unlike_lengths_are_merged_into_their_rows(packed, dtype):
    whole, parts = ranges(packed, dtype)
    # Rows and columns of larger tensors, which stay as they are.
    room = torch.full((*whole[0].shape[:-1], 11), 7.0)
    out, lse = room[..., :8], torch.full((*whole[1].shape[:-1], 14), 7.0)[..., 2:-1]
    out.copy_(whole[0])
    lse.copy_(whole[1])
    for begin, part, part_lse in parts:
        kept = part.clone(), part_lse.clone()
        heedful.merge_into(out, lse, part, part_lse, begin=begin)
        for passed, before in zip((part, part_lse), kept, strict=True):
            torch.testing.assert_close(passed, before, rtol=0, atol=0, equal_nan=True)
    assert_in_place(lambda seed: drawn_ranges(packed, dtype, seed), out, lse)
    assert (room[..., 8:] == 7.0).all()


@pytest.mark.parametrize("rounds", [False, True], ids=["", "planted"])
def test_sixteen_merges_of_16_bit_parts_round_nothing_to_16_bits(rounds):
    """Planted: a merge that does so in each step."""

    def draw(seed: int) -> InPlace:
        values = torch.Generator().manual_seed(seed)
        outs = torch.randn(16, 40, 2, 8, generator=values).bfloat16()
        lses = 5 * torch.randn(16, 2, 40, generator=values)
        parts = [(0, out, lse) for out, lse in zip(outs, lses, strict=True)]
        return InPlace(torch.zeros(40, 2, 8), torch.full((2, 40), -torch.inf), parts)

    merges = draw(0)
    for _, part, part_lse in merges.parts:
        heedful.merge_into(merges.out, merges.lse, part, part_lse)
        if rounds:
            merges.out.copy_(merges.out.bfloat16())
    expected = pytest.raises(AssertionError, match="^out: ") if rounds else nullcontext()
    with expected:
        assert_in_place(draw, merges.out, merges.lse)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"out": torch.zeros(9, 2, 8).bfloat16()}, "out must be float32"),
        ({"lse": torch.zeros(9, 2)}, r"lse must have shape \(heads, seqlen\)"),
        ({"part": torch.zeros(4, 2, 7)}, r"part must have shape \(rows, heads, head_dim\) of out"),
        ({"part_lse": torch.zeros(2, 3)}, "part_lse must have shape"),
        ({"begin": 6}, "begin must be 0 to 5, as 4 rows come, got 6"),
        ({"begin": -1}, "begin must be 0 to 5"),
        ({"out": torch.zeros(1, 2, 8).expand(9, 2, 8)}, "out must not be expanded"),
        ({"part": torch.zeros(4, 2, 8, requires_grad=True)}, "part must not require a gradient"),
    ],
)
def test_a_merge_in_place_names_what_is_wrong_and_writes_nothing(change, words):
    arguments: dict[str, Any] = {"out": torch.zeros(9, 2, 8), "lse": torch.zeros(2, 9)}
    arguments |= {"part": torch.ones(4, 2, 8), "part_lse": torch.zeros(2, 4), **change}
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        heedful.merge_into(**arguments)
    assert not arguments["out"].any() and not arguments["lse"].any()


@pytest.mark.parametrize("name", ["lse", "part", "part_lse"])
def test_a_merge_in_place_refuses_to_read_what_it_writes(name):
    """Other rows of what it writes may be read."""
    room = torch.zeros(200)
    given: dict[str, Any] = {"out": room[:144].view(9, 2, 8), "lse": torch.zeros(2, 9)}
    given |= {"part": torch.ones(4, 2, 8), "part_lse": torch.zeros(2, 4)}
    shape = given[name].shape
    given[name] = room[40 : 40 + shape.numel()].view(shape)
    with pytest.raises(ValueError, match=f"^out must have memory of its own.*{name}$"):
        heedful.merge_into(**given)
    assert not room.any()
    if name == "part":
        # The last rows of out.
        given[name] = room[80:144].view(shape)
        heedful.merge_into(**given)


def test_packed_parts_merge_as_batched_ones_do():
    outs, lses, sink = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 4, 5), torch.randn(4)
    out, lse = heedful.merge_attn_states(outs, lses, sink)
    for b in range(2):
        one, one_lse = heedful.merge_attn_states(outs[:, b], lses[:, b], sink)
        assert torch.equal(one, out[b]) and torch.equal(one_lse, lse[b])


def test_a_list_of_parts_is_a_stack_of_parts():
    outs, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 4, 5)
    stacked, listed = (
        heedful.merge_attn_states(*given) for given in ((outs, lses), (list(outs), list(lses)))
    )
    assert torch.equal(stacked[0], listed[0]) and torch.equal(stacked[1], listed[1])


def test_merging_does_not_depend_on_how_the_parts_are_nested():
    """In exact arithmetic, which weights of powers of two are: ((a b) c) = (a (b c)) = (a b c)."""
    outs = torch.randint(-8, 8, (4, 1, 3, 2, 4)).float()
    lses = torch.tensor([0.0, 0.0, math.log(2), math.log(4)]).view(4, 1, 1, 1).expand(4, 1, 2, 3)
    merge = heedful.merge_attn_states
    want = (outs[0] + outs[1] + 2 * outs[2] + 4 * outs[3]) / 8
    pair = merge(outs[:2], lses[:2])
    nested = merge([pair[0], outs[2], outs[3]], [pair[1], lses[2], lses[3]])
    # log(2) and log(4) are rounded once, and exp and log round once each.
    eps = torch.finfo(torch.float32).eps
    for out, _ in (merge(outs, lses), nested):
        assert (out - want).abs().max() <= 8 * eps * outs.abs().max()


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_gradients_of_a_merge_are_right_and_never_nan(sink):
    """gradcheck computes in float64; parts without keys weigh nothing."""
    outs = torch.randn(3, 2, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True) if sink else None
    given = (outs, lses) if sinks is None else (outs, lses, sinks)
    assert torch.autograd.gradcheck(lambda *args: merged(*args), given)
    empty = torch.full((3, 1, 2, 2), -torch.inf, requires_grad=True)
    parts = torch.zeros(3, 1, 2, 2, 4, requires_grad=True)
    out, lse = heedful.merge_attn_states(parts, empty)
    assert not out.any() and (lse == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum() + lse.nan_to_num().sum(), (parts, empty)):
        assert not grad.any()


def test_a_merge_keeps_dtype_and_rounds_once():
    outs = torch.randn(2, 1, 3, 2, 4).bfloat16()
    lses = torch.randn(2, 1, 2, 3)
    out, lse = heedful.merge_attn_states(outs, lses)
    exact, _ = heedful.merge_attn_states(outs.float(), lses)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, exact.bfloat16())


STORAGE = ["int4", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_quantised_values_are_the_nearest_storable_ones(dtype, group, asymmetric):
    x = torch.randn(3, 5, 2, 32) * 3
    packed, scale, shift = heedful.quantize_kv(x, dtype, group, asymmetric)
    assert packed.shape[-1] == (16 if dtype == "int4" else 32)
    assert scale.shape == (3, 5, 2, 32 // (group or 32))
    assert (shift is not None) == asymmetric
    real = heedful.dequantize_kv(packed, scale, shift)
    spread = scale.repeat_interleave(group or 32, -1)
    if dtype.startswith("int"):
        step = spread
    else:
        # Spacing of the format around the stored value, or of its subnormals.
        info = torch.finfo(getattr(torch, dtype))
        stored = packed.float().abs()
        step = spread * torch.maximum(stored * info.eps, torch.tensor(info.smallest_normal))
    # Half a step, and the roundings of float32 on the way.
    slack = 4 * torch.finfo(torch.float32).eps * x.abs().amax(-1, keepdim=True)
    assert ((real - x).abs() <= step / 2 + slack).all()


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_quantisation_is_the_references(dtype, asymmetric):
    """On values that scale to integers exactly: nothing is left to the rounding of ties."""
    top = 7 if dtype == "int4" else 127
    x = torch.randint(-top, top + 1, (4, 3, 2, 16)).float()
    x[..., 0::8], x[..., 1::8] = top, -top
    x = x / 16 + (5 if asymmetric else 0)
    packed, scale, shift = heedful.quantize_kv(x, dtype, 8, asymmetric)
    want, want_scale, want_shift = quant.quantize(x.numpy(), dtype, 8, asymmetric)
    assert np.array_equal(packed.numpy(), want) and np.array_equal(scale.numpy(), want_scale)
    assert (shift is None) == (want_shift is None)
    if shift is not None and want_shift is not None:
        assert np.array_equal(shift.numpy(), want_shift)


def test_a_constant_group_survives_quantisation():
    x = torch.full((1, 2, 1, 8), 3.25)
    for dtype in STORAGE:
        assert torch.equal(heedful.dequantize_kv(*heedful.quantize_kv(x, dtype, 4, True)), x)
    zeros = torch.zeros(1, 2, 1, 8)
    assert torch.equal(heedful.dequantize_kv(*heedful.quantize_kv(zeros, "int4")), zeros)


def test_explain_names_the_kernel_and_every_rejected_one():
    q = torch.randn(1, 5, 2, 8)
    text = heedful.explain(heedful.flash_attn_func, q, q, q, causal=True, return_lse=True)
    assert "forward   sdpa [run]" in text
    for line in ("cdna, portable forward: no kernel for cpu", "rejected  cpu forward"):
        assert line in text


def test_explain_says_which_tensors_are_copied():
    q = torch.randn(1, 5, 8, 2).transpose(-1, -2)
    text = heedful.explain(heedful.flash_attn_func, q, q.contiguous(), q.contiguous())
    assert "note      q is copied: its last dim has stride 2" in text


def test_explain_says_that_a_mask_is_written_as_numbers():
    q = torch.randn(1, 4, 2, 8)
    said = heedful.explain(heedful.flash_attn_func, q, q, q, bias=torch.ones(4, 4).bool())
    assert "bias is written as bfloat16 by a launch of its own: it is bool" in said


@pytest.mark.parametrize(("gap", "stays"), [(0, False), (32, False), (8, True)])
def test_explain_says_which_caches_begin_between_two_rows(gap, stays):
    """Rows of 16 elements, 6 of them in a batch entry, and a gap behind each entry."""
    storage = torch.zeros(2 * (6 * 16 + gap))
    cache = storage.as_strided((2, 6, 2, 8), (6 * 16 + gap, 16, 8, 1))
    q = torch.zeros(2, 1, 2, 8)
    text = heedful.explain(heedful.flash_attn_with_kvcache, q, cache, cache, cache_seqlens=2)
    assert ("even_rows=False" in text) == stays


def test_explain_runs_nothing_and_writes_nothing():
    cache = torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8)
    new = torch.ones(1, 1, 1, 8)
    text = heedful.explain(
        heedful.flash_attn_with_kvcache, new, *cache, new, new, cache_seqlens=2, backend="cpu"
    )
    assert "forward   cpu" in text and not cache[0].any()
    with pytest.raises(ValueError, match="softcap"):
        heedful.explain(heedful.flash_attn_func, new, new, new, softcap=-1.0)
    with pytest.raises(TypeError, match="function must be an attention function"):
        heedful.explain(lambda *args, backend: None, new)


@pytest.mark.parametrize(
    "arguments, argument, kind",
    [
        (("x", "int8"), "x", TypeError),
        ((torch.ones(2, 3, dtype=torch.int8), "int8"), "x", TypeError),
        ((torch.ones(2, 3), "int3"), "dtype", ValueError),
        ((torch.ones(2, 3), "int4"), "x", ValueError),
        ((torch.ones(2, 4), "int8", 3), "group_size", ValueError),
        ((torch.ones(2, 4), "int8", 2.0), "group_size", TypeError),
        ((torch.ones(2, 4), "int8", 2, 1), "asymmetric", TypeError),
        ((torch.ones(2, 4), "int8", 0), "group_size", ValueError),
        ((torch.ones(2, 4), "int8", -2), "group_size", ValueError),
        ((torch.ones(2, 4), "int8", 8), "group_size", ValueError),
        ((torch.ones(2, 0), "int8"), "x", ValueError),
        ((torch.ones(()), "int8"), "x", ValueError),
        ((torch.ones(2, 4).double(), "int8"), "x", TypeError),
        ((torch.ones(2, 4), torch.uint8), "dtype", ValueError),
    ],
)
def test_bad_quantisation_names_the_argument(arguments, argument, kind):
    with pytest.raises(kind, match=f"^{argument} "):
        heedful.quantize_kv(*arguments)


EIGHTS = torch.ones(2, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    "arguments, argument, kind",
    [
        ((torch.ones(2, 4), torch.ones(2, 1)), "packed", TypeError),
        ((EIGHTS[0, 0], torch.ones(1)), "packed", ValueError),
        ((EIGHTS, torch.ones(2, 1).half()), "scale", TypeError),
        ((EIGHTS, torch.ones(2, 3)), "scale", ValueError),
        ((EIGHTS, torch.ones(3, 1)), "scale", ValueError),
        ((EIGHTS, torch.ones(2, 1), torch.ones(2, 2)), "shift", ValueError),
        ((EIGHTS, torch.ones(2, 1), None, torch.int8), "dtype", TypeError),
        (([1], torch.ones(2, 1)), "packed", TypeError),
        ((EIGHTS, 1.0), "scale", TypeError),
        ((EIGHTS, torch.ones(2, 0)), "scale", ValueError),
        ((EIGHTS, torch.ones(2)), "scale", ValueError),
        ((EIGHTS, torch.ones(2, 1), 1.0), "shift", TypeError),
        ((EIGHTS, torch.ones(2, 1), torch.ones(2, 1).half()), "shift", TypeError),
        ((EIGHTS, torch.ones(2, 1), torch.ones(2, 4)), "shift", ValueError),
    ],
)
def test_bad_dequantisation_names_the_argument(arguments, argument, kind):
    with pytest.raises(kind, match=f"^{argument} "):
        heedful.dequantize_kv(*arguments)


def _packed(q, k, v, **more):
    ends = torch.tensor([0, 9, 20], dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return heedful.flash_attn_varlen_func(q, k, v, ends, ends, 11, 11, **more)


@pytest.mark.parametrize(
    "function", [heedful.flash_attn_func, heedful.flash_attn_with_kvcache, _packed]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_part_of_sixteen_bit_inputs_may_be_written_in_float32(function, dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 10, 2, 16, dtype=dtype).unbind()
    rounded = function(q, k, v, causal=True, backend="cpu")
    out = torch.full(rounded.shape, torch.nan)
    assert function(q, k, v, causal=True, out=out) is out  # torch's kernels leave it to ours
    assert torch.equal(out.to(dtype), rounded) and not torch.equal(out, rounded.float())
    with pytest.raises(TypeError, match="out must"):
        function(q, k, v, out=out.double())


def test_a_traced_call_says_that_it_cannot_write_float32_of_sixteen_bits():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 10, 2, 16, dtype=torch.bfloat16) for _ in range(3))
        with pytest.raises(ValueError, match="out must be torch.bfloat16 in a traced call"):
            heedful.flash_attn_func(q, k, v, out=torch.empty(2, 10, 2, 16))
