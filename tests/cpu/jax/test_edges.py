"""JAX's tiles at their edges: lengths and windows that end at one, one before it, one behind it."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402
from heedful.core.call.mask import MaskSpec  # noqa: E402
from heedful.core.call.operands import Operands  # noqa: E402
from heedful.core.call.problem import AttentionProblem  # noqa: E402
from heedful.jax.api.merge import merged  # noqa: E402
from heedful.jax.gpu import pages, programs  # noqa: E402
from heedful.jax.operands.plain import origin_words  # noqa: E402
from heedful.jax.tiled import tiles  # noqa: E402
from heedful.jax.traced import cache_update  # noqa: E402
from heedful.jax.traced.call import adapted  # noqa: E402
from support.problems.budget import run  # noqa: E402
from support.problems.cases import Case  # noqa: E402
from support.problems.grids import in_turns, slow_but  # noqa: E402
from support.runs import jax_backend  # noqa: E402

LENGTHS = [(127, 255), (128, 256), (129, 257), (257, 129), (1, 513), (384, 511)]
MASKS = [(-1, 0), (0, 0), (127, 0), (128, 1), (255, -1), (256, 127), (1, 128), (-1, 255), (0, -1)]
MASKS += [(3, 0, 255), (3, 0, 256), (3, 1, 257)]


def visible(mask: MaskSpec, len_q: int, len_k: int) -> np.ndarray:
    i, j = np.arange(len_q)[:, None], np.arange(len_k)[None]
    distance = j - i - mask.offset(len_q, len_k)
    right = (distance <= mask.right) | (mask.right < 0)
    return right & ((distance >= -mask.left) | (mask.left < 0) | (j < mask.first))


def sequence(mask: MaskSpec, len_q: int, len_k: int) -> tiles.Sequence:
    problem = AttentionProblem.dense(1, len_q, len_k, 1, head_dim=1, dtype="float32", mask=mask)
    q, k = jnp.zeros((1, len_q, 1, 1)), jnp.zeros((1, len_k, 1, 1))
    return tiles.Sequence(problem, Operands(q, k, k), jnp.int32(0))


def tiles_of(seen: Any, tile: int) -> tuple[int, int]:
    """The first and the end of the tiles with any that is seen."""
    found = np.flatnonzero(seen)
    return (found[0] // tile, found[-1] // tile + 1) if found.size else (0, 0)


@pytest.mark.parametrize("lengths, bottom_right", in_turns(LENGTHS, (True, False)), ids=str)
def test_tiles_are_visited_where_they_are_seen_and_masked_where_they_are_not(lengths, bottom_right):
    len_q, len_k = lengths
    for window in MASKS:
        mask = MaskSpec.of(window_size=window, bottom_right=bottom_right)
        seq, seen = sequence(mask, *lengths), visible(mask, *lengths)
        shown = seq._seen(jnp.arange(len_q + 1), jnp.arange(len_k + 1))
        np.testing.assert_array_equal(shown, np.pad(seen, ((0, 1), (0, 1))))
        for row in range(0, len_q, tiles.ROWS):
            begin, end = map(int, seq.key_range(row, tiles.ROWS, tiles.KEYS))
            want = tiles_of(seen[row : row + tiles.ROWS].any(0), tiles.KEYS)
            _same(begin, end, want, bool(mask.first))
        for col in range(0, len_k, tiles.KEYS):
            begin, end = map(int, seq.query_range(col, tiles.KEYS, tiles.ROWS))
            want = tiles_of(seen[:, col : col + tiles.KEYS].any(1), tiles.ROWS)
            _same(begin, end, want, 0 < mask.first - col < tiles.KEYS)


def _same(begin: int, end: int, want: tuple[int, int], has_gap: bool) -> None:
    """No tile is left out, and none is visited for nothing, but between leading keys and others."""
    if want == (0, 0):
        assert end - begin <= 1
    elif has_gap:
        assert begin <= want[0] and want[1] <= end
    else:
        assert (begin, end) == want


ONE = Case(batch=1, heads_q=1, heads_k=1, head_dim=4, head_dim_v=4, seqlen_q=129, seqlen_k=257)
EDGES = [
    replace(ONE, causal=True),
    replace(ONE, window=(128, 0, 255)),
    replace(ONE, window=(256, 1), seqlen_q=257, seqlen_k=129, sink=True, bias="hqk"),
]
MORE = [
    replace(ONE, window=window, seqlen_q=n, seqlen_k=m, bottom_right=bottom_right)
    for (n, m), window, bottom_right in product(LENGTHS, MASKS[::3], (True, False))
]


@pytest.mark.parametrize(
    "case", [*EDGES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str
)
def test_lengths_and_windows_one_off_a_tile_are_within_the_budget(case):
    run(jax_backend, case)


def some(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


MAPPED = [(0, None), *(pytest.param(m, marks=pytest.mark.slow) for m in ((None, 0), (0, 0)))]


@pytest.mark.parametrize("mapped", MAPPED, ids=str)
def test_vmap_of_gradients_of_sinks_and_biases_is_a_loop_of_them(mapped):
    """Of each element its own, also where sink and bias are shared."""
    q, k, v = some(3, 2, 5, 4, 8), some(3, 2, 7, 2, 8, seed=1), some(3, 2, 7, 2, 8, seed=2)
    sink, bias = some(3, 4, seed=3), some(3, 4, 5, 7, seed=4)
    sink, bias = (t if dim == 0 else t[0] for t, dim in zip((sink, bias), mapped, strict=True))

    def loss(q, k, v, sink, bias):
        return (hj.flash_attn_func(q, k, v, sink=sink, bias=bias) ** 2).sum()

    grad = jax.grad(loss, (3, 4))
    got = jax.vmap(grad, (0, 0, 0, *mapped))(q, k, v, sink, bias)
    for i in range(3):
        own = (t[i] if dim == 0 else t for t, dim in zip((sink, bias), mapped, strict=True))
        want = grad(q[i], k[i], v[i], *own)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a[i], b)


# A head's index and a row's enter the mask as a batch row's does.
PLACES = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2)), 3]


@pytest.mark.parametrize("place", PLACES, ids=["batch", "head", "row", "column"])
def test_a_part_of_the_scores_draws_its_part_of_the_dropout_mask(place):
    """Also where its column is no multiple of 4, in a traced origin too."""
    sizes = {"batch": 3, "heads": 4, "rows": 9, "cols": 11}
    begin = [1, 2, 5, 6][place]
    origin = [begin if i == place else 0 for i in range(4)]
    part = [slice(begin if i == place else 0, None) for i in range(4)]

    def dropped(shape: tuple[int, ...], origin):
        batch, heads, rows, cols = shape
        q, k = jnp.zeros((batch, rows, heads, 4)), jnp.zeros((batch, cols, heads, 4))
        probs = hj.flash_attn_func(
            q, k, k, 0.5, dropout_seed=9, return_attn_probs=True, dropout_origin=origin
        )[2]
        return jnp.signbit(probs)

    whole = dropped(tuple(sizes.values()), (0, 0, 0, 0))[tuple(part)]
    np.testing.assert_array_equal(dropped(whole.shape, tuple(origin)), whole)
    words = jnp.array(origin, jnp.uint32)
    traced = jax.jit(lambda words: dropped(whole.shape, words))
    np.testing.assert_array_equal(traced(words), whole)


def test_a_column_of_quads_is_a_multiple_of_4_also_where_it_is_traced():
    """Kernels that draw words by four take those alone."""
    q, k = jnp.zeros((1, 5, 1, 4)), jnp.zeros((1, 9, 1, 4))

    def dropped(column):
        origin = (0, 0, 0, column)
        drawn = hj.flash_attn_func(
            q, k, k, 0.5, dropout_seed=9, return_attn_probs=True, dropout_origin=origin
        )
        return jnp.signbit(drawn[2])

    wanted = dropped(8)
    np.testing.assert_array_equal(dropped(hj.Quads(2)), wanted)
    np.testing.assert_array_equal(jax.jit(lambda n: dropped(hj.Quads(n)))(jnp.int32(2)), wanted)
    relied_on = []
    for column in (lambda n: hj.Quads(n), lambda n: n * 4):
        jax.jit(lambda n, c=column: relied_on.append(origin_words((0, 0, 0, c(n)))[0]))(2)
    assert relied_on == [(0, 0, 0, 0), (0, 0, 0, 1)]
    with pytest.raises(TypeError, match="dropout_origin"):
        dropped(hj.Quads(0.5))


@pytest.mark.parametrize("packed", slow_but({True}, (False, True)), ids=["dense", "packed"])
def test_merges_with_a_sink_are_the_attention_of_all_parts(packed):
    """By float64: the sink enters each head's sum once, and its lse."""
    lead = (7,) if packed else (2, 7)
    outs, lses = some(3, *lead, 4, 8), some(3, *lead[:-1], 4, 7, seed=1)
    lses = lses.at[0, ..., 1, 2].set(-jnp.inf).at[:, ..., 3, 5].set(-jnp.inf)
    sink = jnp.array([0.5, -2.0, 3.0, -jnp.inf])
    wide = np.asarray(lses, np.float64)
    logits = np.concatenate(
        [wide, np.broadcast_to(np.asarray(sink, np.float64)[:, None], wide[:1].shape)]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        want_lse = np.log(np.exp(logits).sum(0))
        weights = np.nan_to_num(np.exp(wide - want_lse))
    want = (np.swapaxes(weights, -1, -2)[..., None] * np.asarray(outs, np.float64)).sum(0)
    for function in (merged, hj.merge_attn_states):
        out, lse = function(outs, lses, sink)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)
    without, _ = hj.merge_attn_states(list(outs), list(lses))
    assert not np.allclose(without, want, atol=1e-2)


@pytest.mark.parametrize("packed", slow_but({False}, (False, True)), ids=["dense", "packed"])
def test_parts_of_unlike_lengths_are_merged_into_their_rows(packed):
    """Also where the first row is traced; a part out of bounds raises."""
    import torch

    from support.problems.merges import InPlace, assert_in_place

    lead = () if packed else (2,)

    def draw(seed: int) -> InPlace:
        values = torch.Generator().manual_seed(seed)
        out = torch.randn(*lead, 11, 3, 8, generator=values)
        parts = []
        for begin, count in ((0, 11), (3, 5), (10, 1)):
            part_lse = torch.randn(*lead, 3, count, generator=values)
            part_lse[..., 0] = -torch.inf
            part = torch.randn(*lead, count, 3, 8, generator=values)
            parts.append(
                (begin, part.masked_fill(part_lse.mT[..., None].isinf(), torch.nan), part_lse)
            )
        return InPlace(out, torch.randn(*lead, 3, 11, generator=values), parts)

    traced = jax.jit(lambda o, s, p, q, n: hj.merge_into(o, s, p, q, begin=n), donate_argnums=0)
    for merge in (lambda *arrays: hj.merge_into(*arrays[:4], begin=int(arrays[4])), traced):
        merges = draw(0)
        out, lse = jnp.asarray(merges.out.numpy()), jnp.asarray(merges.lse.numpy())
        for begin, part, part_lse in merges.parts:
            both = jnp.asarray(part.numpy()), jnp.asarray(part_lse.numpy())
            out, lse = merge(out, lse, *both, begin)
        assert_in_place(draw, *(torch.from_numpy(np.array(array)) for array in (out, lse)))
    part, part_lse = some(*lead, 1, 3, 8), some(*lead, 3, 1)
    with pytest.raises(ValueError, match="begin must be 0 to 10, as 1 rows come, got 11"):
        hj.merge_into(out, lse, part, part_lse, begin=11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_merged_part_alone_may_have_16_bits(dtype):
    arrays = {"out": some(1, 9, 3, 8), "lse": some(1, 3, 9)}
    arrays |= {"part": some(1, 9, 3, 8, seed=1), "part_lse": some(1, 3, 9, seed=1)}
    for name, array in arrays.items():
        given = arrays | {name: array.astype(dtype)}
        if name == "part":
            widened = arrays | {name: array.astype(dtype).astype(jnp.float32)}
            results = hj.merge_into(**given), hj.merge_into(**widened)
            jax.tree.map(np.testing.assert_array_equal, *results)
        else:
            with pytest.raises(TypeError, match=f"^{name} must be float32, got {dtype}"):
                hj.merge_into(**given)


def test_gradients_of_gathered_pages_are_added_up_in_the_pages():
    """A page that sequences share gets the sum of theirs; what no sequence has gets 0."""
    stored = some(5, 4, 2, 3)
    table = jnp.array([[3, 1, 0], [1, 4, 0]], jnp.int32)
    used = jnp.array([7, 5], jnp.int32)
    x = Operands(None, stored, stored, block_table=table, seqused_k=used)
    numbers = pages.page_numbers(x, 12)
    np.testing.assert_array_equal(numbers, [[3, 1, 0], [1, 4, 0]])
    rows = pages.gathered(stored, numbers)
    np.testing.assert_array_equal(rows[1, 4:8], stored[4])
    grad = some(2, 12, 2, 3, seed=1).at[0, 7:].set(0).at[1, 5:].set(0)
    found = pages.added_up(grad, numbers, stored)
    np.testing.assert_array_equal(found[3], grad[0, :4])
    np.testing.assert_allclose(found[1], grad[0, 4:8] + grad[1, :4], rtol=1e-6)
    np.testing.assert_array_equal(found[4], grad[1, 4:8])
    assert not found[0].any() and not found[2].any()


@pytest.mark.parametrize(
    ("made", "words"),
    [(list, "got list"), (lambda x: x[:1], "a tuple of 1"), (lambda x: (*x, x[0]), "a tuple of 3")],
)
def test_a_shared_prefix_that_is_no_pair_is_refused(made, words):
    prefix = made((some(4, 2, 8), some(4, 2, 8)))
    with pytest.raises(TypeError, match=rf"^shared_prefix must be a tuple \(k, v\), .*{words}$"):
        hj.flash_attn_with_kvcache(
            some(1, 1, 2, 8), *[some(1, 6, 2, 8)] * 2, cache_seqlens=6, shared_prefix=prefix
        )


def test_as_many_pages_are_numbered_as_keys_fill_and_each_of_them_exists():
    table = jnp.array([[3, 1, 2, 2], [1, 99, -5, 4]], jnp.int32)
    x = Operands(None, some(5, 4, 2, 3), None, block_table=table, seqused_k=jnp.array([7, 5]))
    padded = x._replace(leftpad_k=jnp.array([2, 4]))
    for longest, count in ((12, 3), (9, 3), (8, 2), (1, 1), (0, 0)):
        numbers = pages.page_numbers(x, longest)
        np.testing.assert_array_equal(numbers, np.array([[3, 1, 0], [1, 4, 0]])[:, :count])
        numbers = pages.page_numbers(padded, longest)
        np.testing.assert_array_equal(numbers, np.array([[3, 1, 2], [1, 4, 0]])[:, :count])


@pytest.mark.parametrize("pads", [(0, 0), (1, 3), (5, 6)], ids=str)
def test_keys_of_a_step_are_those_from_the_left_padding_to_the_last_new_token(pads):
    lengths, new = (5, 6), 2
    q, k, v = some(2, new, 4, 8), some(2, new, 2, 8), some(2, new, 2, 8)
    caches = some(2, 12, 2, 8), some(2, 12, 2, 8, seed=1)
    more: dict[str, Any] = {"cache_seqlens": jnp.array(lengths)}
    more |= {"cache_leftpad": jnp.array(pads), "k": k, "v": v}
    out, *_ = hj.flash_attn_with_kvcache(q, *caches, causal=True, **more)
    for b, (pad, length) in enumerate(zip(pads, lengths, strict=True)):
        keys, values = (
            jnp.concatenate([cache[b, pad:length], tokens[b]])[None]
            for cache, tokens in zip(caches, (k, v), strict=True)
        )
        want = hj.flash_attn_func(q[b : b + 1], keys, values, causal=True)
        np.testing.assert_allclose(out[b : b + 1], want, atol=2e-6)


def test_new_tokens_lie_in_their_pages_and_nowhere_else():
    """At the ends of pages, one before and one behind; of rows that are padded, none."""
    cache, new = jnp.zeros((6, 4, 1, 2)), some(4, 2, 1, 2)
    table = jnp.array([[5, 0], [1, 2], [3, 4], [4, 3]], jnp.int32)
    start = jnp.array([3, 6, -1, 7], jnp.int32)
    given = {"k": cache, "cache_seqlens": start, "block_table": table}
    where, kept = cache_update._places(given, 4, 2)
    got = np.asarray(cache_update._written(cache, new, where, kept))
    want = np.zeros(cache.shape, np.float32)
    want[5, 3], want[0, 0], want[2, 2], want[2, 3], want[3, 3] = (
        new[0, 0],
        new[0, 1],
        new[1, 0],
        new[1, 1],
        new[3, 0],
    )
    np.testing.assert_array_equal(got, want)


def test_invariant_numerics_are_refused_on_a_cpu_with_the_reason():
    q = jnp.zeros((1, 8, 2, 16), jnp.float16)
    assert hj.flash_attn_func(q, q, q, numerics="fast").shape == q.shape
    with pytest.raises(ValueError, match="scan: numerics='invariant': sizes of the call decide"):
        hj.flash_attn_func(q, q, q, numerics="invariant")
    with pytest.raises(ValueError, match="scan: numerics='invariant'"):
        hj.flash_attn_with_kvcache(q, q, q, cache_seqlens=8, numerics="invariant")
    with pytest.raises(ValueError, match="numerics must be one of fast, invariant or None"):
        hj.flash_attn_func(q, q, q, numerics="exact")


def test_packed_sequences_in_pages_are_as_long_as_their_bounds_say_or_as_is_used():
    bounds = jnp.array([0, 3, 8], jnp.int32)
    rows, table = jnp.zeros((8, 1, 4)), jnp.zeros((2, 1), jnp.int32)
    x = Operands(rows, rows, rows, cu_seqlens_k=bounds, block_table=table)
    found = adapted(x)
    assert found.cu_seqlens_k is None and found.seqused_k.tolist() == [3, 5]
    found = adapted(x._replace(seqused_k=jnp.array([2, 1], jnp.int32)))
    assert found.cu_seqlens_k is None and found.seqused_k.tolist() == [2, 1]
    assert adapted(x._replace(block_table=None)).cu_seqlens_k.tolist() == [0, 3, 8]


@pytest.mark.parametrize("kv_group", [0, 16])
def test_kernels_see_dims_of_1_as_whole_ones_that_repeat(kv_group):
    problem = AttentionProblem.dense(2, 5, 7, 6, 3, 16, key_ranges=1, kv_group=kv_group)
    whole = {
        "bias": (2, 6, 5, 7),
        "alibi_slopes": (2, 6),
        "tree_mask": (2, 5, 5),
        "key_ranges": (2, 6, 5, 2),
        "block_rows": (2, 6, 4),
        "block_keys": (2, 6, 4, 3),
    }
    scales = ("q_descale", "k_descale", "v_descale", "k_shift", "v_shift")
    whole |= dict.fromkeys(scales, (2, 3))
    # Axes that do not repeat: of lists, and of a row's ranges.
    kept = {"key_ranges": (3,), "block_rows": (2,), "block_keys": (2, 3)}
    given = {
        name: jnp.zeros([n if axis in kept.get(name, ()) else 1 for axis, n in enumerate(shape)])
        for name, shape in whole.items()
    }
    q, k = jnp.zeros((2, 5, 6, 16)), jnp.zeros((2, 7, 3, 16))
    arrays, specs = programs._operands(problem, Operands(q, k, k, **given), None)
    assert specs["q"].shape == q.shape and arrays["q"] is q
    for name, shape in whole.items():
        if name in scales and kv_group:
            shape = (1, 1)
        assert specs[name].shape == shape, name
        for axis, stride in enumerate(specs[name].strides):
            repeats = given[name].shape[axis] != shape[axis]
            assert (stride == 0) == repeats or given[name].shape[axis] == 1, (name, axis)
            assert not repeats or stride == 0, (name, axis)


def test_each_entry_of_a_batch_has_its_own_tree_and_one_is_for_all():
    rng = np.random.default_rng(0)
    shapes = [(2, 3, 2, 8), (2, 16, 2, 8), (2, 16, 2, 8), (2, 3, 2, 8), (2, 3, 2, 8)]
    given: list[Any] = [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]
    lengths = jnp.array([4, 9], jnp.int32)
    chain = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    trees = jnp.array([chain, [[1, 0, 0], [0, 1, 0], [1, 0, 1]]], bool)

    def call(tree, which=slice(None)):
        more: dict[str, Any] = {"cache_seqlens": lengths[which], "tree_mask": tree}
        return np.asarray(hj.flash_attn_with_kvcache(*(x[which] for x in given), **more)[0])

    for tree in (trees, trees[:1], trees[1:]):
        alone = [call(tree[-1 if b == 1 else 0][None], slice(b, b + 1)) for b in range(2)]
        assert np.array_equal(call(tree), np.concatenate(alone))
    assert not np.array_equal(call(trees), call(trees[:1]))
