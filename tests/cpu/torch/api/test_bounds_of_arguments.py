"""What lies just within the bounds of an argument is taken, and computed as it should be. What lies
just outside is in test_bad_input.py.
"""

import math
from typing import Any

import pytest
import torch

import heedful.torch as typed
from heedful.core.call.operands import Operands
from heedful.torch.eager.cache_update import append_kv, rotate
from heedful.torch.operands.values import check_pages, check_range, check_room
from support.problems.grids import slow_but
from support.runs.api import assert_agrees, dense_problem

heedful: Any = typed


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(dim=16, dim_v=8, heads=4, **keywords):
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, heads, dim), torch.randn(2, 7, 2, dim)
    v = torch.randn(2, 7, 2, dim_v)
    return heedful.flash_attn_func(q, k, v, **keywords)


def same(a, b) -> None:
    assert torch.equal(a, b)


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (576, 512), (1, 512), (576, 1)])
def test_heads_of_any_size_up_to_the_largest(dim, dim_v):
    torch.manual_seed(0)
    tensors = torch.randn(1, 2, 2, dim), torch.randn(1, 3, 1, dim), torch.randn(1, 3, 1, dim_v)
    assert_agrees(heedful.flash_attn_func(*tensors), dense_problem(*tensors), Operands(*tensors))


def test_an_output_may_have_any_strides_that_do_not_repeat_but_the_last():
    want = dense(dim_v=1)
    for out in (
        torch.zeros(2, 5, 1, 4).mT,
        torch.zeros(2, 5, 4, 2)[..., :1],
        torch.zeros(2, 4, 5, 1).transpose(1, 2),
    ):
        assert dense(dim_v=1, out=out) is out
        same(out, want)
    q = torch.randn(1, 5, 4, 16)
    out = torch.zeros(1, 5, 4, 16)
    repeated = out.as_strided(out.shape, (0, 64, 16, 1))
    same(heedful.flash_attn_func(q, q, q, out=repeated), heedful.flash_attn_func(q, q, q))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1), (4, 1, 1), (2, 1, 1, 1), (1, 4, 5, 7)])
def test_a_bias_broadcasts_as_in_torch(shape):
    bias = torch.randn(shape)
    same(dense(bias=bias), dense(bias=bias.expand(2, 4, 5, 7)))


def test_slopes_are_of_heads_or_of_heads_of_each_batch_entry():
    slopes = torch.rand(4)
    same(dense(alibi_slopes=slopes), dense(alibi_slopes=slopes.expand(2, 4)))
    assert not torch.equal(dense(alibi_slopes=slopes), dense())


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_is_taken(seed):
    signed = seed - 2**64 if seed >= 2**63 else seed
    by_tensor = dense(dropout_p=0.5, dropout_seed=torch.tensor([signed]))
    same(dense(dropout_p=0.5, dropout_seed=seed), by_tensor)


def test_seeds_that_a_default_draws_are_of_63_bits():
    drawn = []
    for seed in range(64):
        torch.manual_seed(seed)
        drawn.append(torch.randint(2**63 - 1, (1,)))
        torch.manual_seed(seed)
        q = torch.ones(1, 3, 1, 8)
        by_default = heedful.flash_attn_func(q, q, q, 0.5)
        same(by_default, heedful.flash_attn_func(q, q, q, 0.5, dropout_seed=drawn[-1]))
    assert max(drawn) > 2**61


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)], ids=str)
def test_scales_of_eight_bits_are_one_or_one_a_head(shape):
    eight = [
        t.to(torch.float8_e4m3fn) for t in (torch.ones(2, 3, 4, 16), *torch.ones(2, 2, 5, 2, 16))
    ]
    want = heedful.flash_attn_func(*eight)
    for name in ("q_descale", "k_descale", "v_descale"):
        got = heedful.flash_attn_func(*eight, **{name: torch.full(shape, 2.0)})
        # Equal keys weigh alike whatever the scale of their scores.
        same(got, want * 2 if name == "v_descale" else want)


def cache(capacity=12, **more) -> dict[str, Any]:
    torch.manual_seed(0)
    given = {"q": torch.randn(2, 2, 4, 16), "k": torch.randn(2, 2, 2, 16)}
    given |= {"v": torch.randn(2, 2, 2, 8), "k_cache": torch.randn(2, capacity, 2, 16)}
    return given | {"v_cache": torch.randn(2, capacity, 2, 8)} | more


def decode(**keywords):
    return heedful.flash_attn_with_kvcache(**keywords)


def test_new_tokens_may_fill_the_cache_to_its_end():
    for length in (0, 10):
        by_int, by_tensor = cache(cache_seqlens=length), cache(cache_seqlens=ints(length, length))
        same(decode(**by_int), decode(**by_tensor))
        for given in (by_int, by_tensor):
            same(given["k_cache"][:, length : length + 2], given["k"])
            same(given["v_cache"][:, length : length + 2], given["v"])
    whole = cache(capacity=2, cache_seqlens=0)
    decode(**whole)
    same(whole["k_cache"], whole["k"])


def test_a_length_may_be_the_capacity_where_nothing_is_new():
    given = cache(k=None, v=None)
    want = decode(**given, cache_seqlens=ints(12, 12))
    same(decode(**given, cache_seqlens=12), want)
    tensors = given["q"], given["k_cache"], given["v_cache"]
    assert_agrees(want, dense_problem(*tensors), Operands(*tensors))


def test_indices_may_be_the_first_and_the_last():
    given = cache(k=None, v=None, cache_seqlens=ints(12, 12))
    swapped = decode(**given, cache_batch_idx=ints(1, 0))
    given["q"] = given["q"].flip(0)
    same(swapped.flip(0), decode(**given))
    empty = decode(**given, cache_leftpad=ints(12, 0))
    assert not empty[0].any() and empty[1].any()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("queries", "causal", "rows"), [(2, True, 12), (3, True, 13), (3, False, 12)]
)
def test_rotary_tables_may_be_as_short_as_the_positions_and_as_wide_as_the_heads(
    interleaved, queries, causal, rows
):
    """Queries beyond the new keys stand past the end of the cache."""
    given: dict[str, Any] = cache(cache_seqlens=10, causal=causal)
    given["rotary_interleaved"] = interleaved
    given["q"] = torch.randn(2, queries, 4, 16)
    angle = torch.rand(rows + 8, 8)
    results = []
    for length in (rows, rows + 8):
        tables = {"rotary_cos": angle[:length].cos(), "rotary_sin": angle[:length].sin()}
        given |= {n: given[n].clone() for n in ("k_cache", "v_cache")}
        results.append(decode(**given, **tables))
    same(*results)
    with pytest.raises(ValueError, match=f"{rows} positions, got {rows - 1}"):
        decode(**given, rotary_cos=angle[: rows - 1].cos(), rotary_sin=angle[: rows - 1].sin())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotary_tables_may_be_float32_beside_fewer_bits(dtype):
    given: dict[str, Any] = {n: t.to(dtype) for n, t in cache().items()} | {"cache_seqlens": 3}
    angle = torch.randint(0, 2, (12, 4)).float()
    results = []
    for kind in (dtype, torch.float32):
        given |= {n: given[n].clone() for n in ("k_cache", "v_cache")}
        tables = {"rotary_cos": angle.to(kind), "rotary_sin": (1 - angle).to(kind)}
        results.append(decode(**given, **tables))
    same(*results)
    with pytest.raises(
        TypeError, match=f"rotary_cos must be {str(dtype)[6:]} or float32, got float64"
    ):
        decode(**given, rotary_cos=angle.double(), rotary_sin=angle.double())


def test_rotary_tables_may_turn_a_single_pair():
    given = cache(cache_seqlens=3)
    tables = {"rotary_cos": torch.zeros(12, 1), "rotary_sin": torch.ones(12, 1)}
    decode(**given, **tables)
    turned = torch.stack([-given["k"][..., 1], given["k"][..., 0]], -1)
    same(given["k_cache"][:, 3:5, :, :2], turned)
    same(given["k_cache"][:, 3:5, :, 2:], given["k"][..., 2:])


def test_a_tree_may_be_one_for_all_or_one_for_each():
    tree = torch.ones(1, 2, 2).tril().bool()
    given = cache(cache_seqlens=4)
    one = decode(**given, tree_mask=tree)
    same(one, decode(**given, tree_mask=tree.expand(2, 2, 2)))


def test_a_prefix_may_have_a_leading_one_or_none():
    prefix = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    given = cache(cache_seqlens=4)
    want = decode(**given, shared_prefix=prefix)
    for leading in ((0,), (1,), (0, 1)):
        parts = tuple(t[None] if i in leading else t for i, t in enumerate(prefix))
        same(decode(**given, shared_prefix=parts), want)


def test_packed_sequences_may_be_none_at_all():
    for bounds, total in ((ints(0), 0), (ints(0, 0), 0), (ints(0), 3)):
        q = torch.randn(total, 2, 8)
        out, lse = heedful.flash_attn_varlen_func(q, q, q, bounds, bounds, 0, 0, return_lse=True)
        assert out.shape == q.shape and not out.any()
        assert lse.shape == (2, total) and (lse == -math.inf).all()


def test_ranges_hold_their_ends():
    check_range("x", ints(0, 5), 0, 5)
    check_range("x", ints(), 0, -1)
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"^x must hold values from 0 to 5, got {wrong}$"):
            check_range("x", ints(3, wrong, 7), 0, 5)
    check_room("x", ints(5, -3), 5)
    check_room("x", ints(), -1)
    with pytest.raises(ValueError, match="^x must be at most the 5 tokens .*, got 6$"):
        check_room("x", ints(6, 2), 5)


@pytest.mark.parametrize("page", [-1, 2])
def test_pages_in_use_are_those_that_hold_a_key_of_the_sequence(page):
    """Pages of 4 keys: [begin, end) touches those that it shares a key with."""
    for begin in range(9):
        for end in range(9):
            for entry in range(2):
                table = ints(0, 1).view(1, 2)
                table[0, entry] = page
                used = begin < end and begin < 4 * entry + 4 and end > 4 * entry
                if used:
                    with pytest.raises(ValueError, match=f"0 to 1 .* row 0, entry {entry}$"):
                        check_pages(table, 4, 2, begin, end)
                else:
                    check_pages(table, 4, 2, begin, end)


@pytest.mark.parametrize("sees_values", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_tokens_without_a_place_are_dropped_and_no_other(paged, sees_values):
    """Row by row, against a loop."""
    lengths = ints(-1, 0, 6, 7, 8, 9)
    batch, new, capacity = len(lengths), 3, 8
    k = torch.arange(1.0, 1 + batch * new).view(batch, new, 1, 1)
    shape = (batch * 2, 4, 1, 1) if paged else (batch, capacity, 1, 1)
    cache_k, cache_v = torch.zeros(shape), torch.zeros(shape)
    table, rows = torch.randperm(batch * 2).view(batch, 2).int(), torch.randperm(batch).int()
    table[1, 0], rows[1] = -1, batch
    given = (None, table) if paged else (rows, None)
    want_k = cache_k.clone()
    for b, start in enumerate(lengths.tolist()):
        for i in range(new):
            position = start + i
            if start < 0 or position >= capacity:
                continue
            if not paged:
                row, place = int(rows[b]), position
            else:
                row, place = int(table[b, position // 4]), position % 4
            if 0 <= row < shape[0]:
                want_k[row, place] = k[b, i]
    append_kv(cache_k, cache_v, k, -k, lengths, *given, sees_values)
    same(cache_k, want_k)
    same(cache_v, -want_k)


def test_nothing_is_appended_where_every_token_is_dropped():
    stored = torch.randn(2, 4, 1, 8)
    before = stored.clone()
    new = torch.ones(2, 1, 1, 8)
    for sees_values in (False, True):
        append_kv(stored, stored, new, new, ints(-1, 4), None, None, sees_values)
        same(stored, before)
    append_kv(stored, stored, new[:, :0], new[:, :0], ints(0, 0), None, None, False)
    same(stored, before)


def test_positions_outside_of_the_tables_are_the_nearest():
    x = torch.randn(3, 2, 1, 8)
    cos, sin = torch.randn(4, 2), torch.randn(4, 2)
    for interleaved in (False, True):
        got = rotate(x, cos, sin, ints(-3, 3, 9), interleaved)
        for b, positions in enumerate(((0, 0), (3, 3), (3, 3))):
            for i, position in enumerate(positions):
                want = rotate(x[b : b + 1, i : i + 1], cos, sin, ints(position), interleaved)
                same(got[b, i], want[0, 0])
        same(got[..., 4:], x[..., 4:])


UNBOUNDED = {(-1, 2**31 - 1): (-1, -1), (2**31 - 1, -1): (-1, -1), (2**31, 3): (-1, 3)}
UNBOUNDED |= {(2**64, 2**64): (-1, -1), (3, -1, 2**40): (-1, -1), (2**70, 0, 2): (-1, 0)}
UNBOUNDED |= {(2**29, 2**29): (-1, -1), (2, 2**63, 1): (2, -1, 1)}


@pytest.mark.parametrize("window", UNBOUNDED, ids=str)
def test_a_side_of_a_window_that_no_length_reaches_is_no_bound(window):
    same(dense(window_size=window), dense(window_size=UNBOUNDED[window]))


@pytest.mark.parametrize("dynamic", slow_but({True}, (False, True)))
def test_bounds_that_no_length_reaches_are_none_to_a_compiled_call_either(dynamic):
    """Also where it takes plain numbers for symbols."""
    torch._dynamo.reset()
    called = torch.compile(heedful.flash_attn_func, backend="eager", dynamic=dynamic)
    q = torch.randn(1, 5, 2, 8)
    for far in ((2**31 - 1, 2**70), (2**30, 2**30)):
        same(called(q, q, q, window_size=far), heedful.flash_attn_func(q, q, q))
    for many in (2**40, 2**70):
        same(called(q, q, q, num_splits=many), heedful.flash_attn_func(q, q, q, num_splits=many))


def test_a_window_that_no_length_reaches_is_none_to_a_cache_either():
    far: Any = (2**31 - 1, 2**70)
    given = cache(cache_seqlens=5, rotary_cos=torch.rand(12, 4), rotary_sin=torch.rand(12, 4))
    same(decode(**given, window_size=far), decode(**given))


def test_a_window_beyond_2_29_beside_longer_sequences_is_refused_by_name():
    q, k = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16), torch.empty(1, 1, 1, 1).bfloat16()
    keys = k.expand(1, 2**29 + 1, 1, 1).to("meta")
    with pytest.raises(ValueError, match="window_size must be below 536870912"):
        heedful.flash_attn_func(q.to("meta"), keys, keys, window_size=(2**29, 0))


def test_more_parts_than_keys_are_as_many_as_there_are_keys():
    want = dense(num_splits=7)
    for many in (8, 10**9, 2**31, 2**64):
        same(dense(num_splits=many), want)


def test_a_length_beyond_int32_in_a_tensor_is_not_cut_to_its_low_bits():
    given = cache(k=None, v=None, cache_seqlens=torch.tensor(2**40 + 3))
    with pytest.raises(ValueError, match="cache_seqlens must be at most the 12 tokens"):
        decode(**given)


@pytest.mark.parametrize("size", [2.0**100, 2.0**-100])
def test_factors_are_taken_up_to_the_bounds_of_float32(size):
    if size > 1:
        assert torch.allclose(dense(softcap=size), dense(), rtol=1e-5, atol=1e-6)
    else:
        same(dense(softmax_scale=size), dense(softmax_scale=1e-25))
    assert dense(softcap=size).isfinite().all()
