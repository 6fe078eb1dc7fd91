"""What each device of a mesh axis gets of the others, without their kernels: heads for tokens, all
keys, and the arguments of a call on some tokens. `vmap` with a named axis stands for devices."""

from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from heedful.core.call.arguments import Quads
from heedful.core.call.spread import Mask
from heedful.jax.distributed import LAYOUTS, gather, heads, layouts, shard
from heedful.jax.distributed.calls import (
    FULL,
    LEADING,
    MASKED,
    OWN,
    Rest,
    Rows,
    Static,
    _column,
    arguments,
    by_device,
    sum_of,
    tree_cast,
)
from heedful.jax.distributed.heads import Share, _Exchange, shared

AXIS, DEVICES = "tokens", 4
OPTIONS = {"causal": True, "window_size": (-1, -1), "softcap": 0.0}


def told(strategy: str, layout: str = "zigzag", counts=(4, 2), longest=None, **options) -> Static:
    options = OPTIONS | options
    return Static(strategy, AXIS, None, layout, longest, counts, tuple(options.items()))


def on_devices(function, *arrays):
    """Of each device its own result, one behind the other."""
    return jax.jit(jax.vmap(function, axis_name=AXIS))(*arrays)


def parts(x, layout: str = "zigzag", axis: int = 1):
    """By device its tokens."""
    return jnp.stack(jnp.split(shard(x, DEVICES, layout, axis), DEVICES, axis))


def test_each_device_computes_whole_groups_and_no_more_than_the_fullest():
    """A last head comes again where others have one more; few KV heads are copied."""
    four = ((0,), (1,), (2,), (3,))
    assert shared(4, 4, 4) == Share(four, four, (1, 1, 1, 1), 1)
    assert shared(4, 1, 4) == Share(four, ((0,),) * 4, (1, 1, 1, 1), 4)
    two = ((0,), (0,), (1,), (1,))
    assert shared(8, 2, 4) == Share(((0, 1), (2, 3), (4, 5), (6, 7)), two, (2,) * 4, 2)
    keys = ((0, 0), (1, 1), (2, 2), (3, 4))
    queries = ((0, 1, 0, 1), (2, 3, 2, 3), (4, 5, 4, 5), (6, 7, 8, 9))
    assert shared(10, 5, 4) == Share(queries, keys, (2, 2, 2, 4), 1)


@pytest.mark.parametrize("layout, counts", [("zigzag", (8, 2)), ("contiguous", (10, 5))])
def test_tokens_are_exchanged_for_heads_and_back(layout, counts):
    """Of all tokens each device gets its heads; back, copies of a KV head are added in float32."""
    static, share = told("heads", layout, counts), shared(*counts, DEVICES)
    x = jnp.arange(2 * 16 * counts[0]).reshape(2, 16, counts[0], 1)
    lse = jnp.swapaxes(x[..., 0], 1, 2) + 0.5
    k = jnp.arange(2 * 16 * counts[1]).reshape(2, 16, counts[1], 1)
    gradient = (k % 256).astype(jnp.bfloat16)

    def moved(x, k, gradient, lse):
        by = _Exchange(static)
        mine = by.queries(x), by.keys(k), by.lse(lse)
        back = by.from_heads(mine[0], by.share.queries, 1, 2, 1)
        lse = by.from_heads(mine[2], by.share.queries, 1, 1, 2)
        grad = by.from_heads(by.keys(gradient), by.share.keys, by.share.copies, 2, 1)
        return mine, (back, lse, grad)

    given = parts(x, layout), parts(k, layout), parts(gradient, layout), parts(lse, layout, 2)
    mine, back = on_devices(moved, *given)
    for device in range(DEVICES):
        queries, keys = list(share.queries[device]), list(share.keys[device])
        np.testing.assert_array_equal(mine[0][device], x[:, :, queries])
        np.testing.assert_array_equal(mine[1][device], k[:, :, keys])
        np.testing.assert_array_equal(mine[2][device], lse[:, queries])
    np.testing.assert_array_equal(back[0], given[0])
    np.testing.assert_array_equal(back[1], given[3])
    assert back[2].dtype == jnp.bfloat16
    wide = np.asarray(given[2], np.float32) * share.copies
    np.testing.assert_array_equal(back[2], wide.astype(jnp.bfloat16))


def test_heads_of_an_axis_of_their_own_are_exchanged_in_the_order_of_its_devices():
    """Tokens of several devices are then a part of a ring's, which has the layout."""
    static = told("heads x ring", counts=(4, 4))._replace(axis_name="rings", heads_axis=AXIS)
    x, ranges = jnp.arange(8 * 4).reshape(1, 8, 4, 1), jnp.arange(16).reshape(1, 1, 8, 2)

    def moved(x, ranges):
        by = _Exchange(static)
        mine = by.queries(x)
        its_ranges = by.operands(None, Rest(key_ranges=ranges))[1].key_ranges
        return mine, its_ranges, by.from_heads(mine, by.share.queries, 1, 2, 1)

    given = jnp.stack(jnp.split(x, DEVICES, 1)), jnp.stack(jnp.split(ranges, DEVICES, 2))
    mine, its_ranges, back = on_devices(moved, *given)
    for device in range(DEVICES):
        np.testing.assert_array_equal(mine[device], x[:, :, device : device + 1])
        np.testing.assert_array_equal(its_ranges[device], ranges)
    np.testing.assert_array_equal(back, given[0])


def test_each_device_has_what_belongs_to_its_heads():
    """Sink, slopes, ranges of all rows in their order, and the place in the mask of dropout. A
    head that two devices have counts once in the gradient of a sink."""
    counts, share = (10, 5), shared(10, 5, DEVICES)
    static = told("heads", counts=counts)
    sink, slopes = jnp.arange(10.0), jnp.arange(20.0).reshape(2, 10)
    ranges = jnp.arange(2 * 10 * 16 * 2).reshape(2, 10, 16, 2)
    origin = jnp.array([5, 7], jnp.uint32)

    def moved(ranges, shared_ranges):
        by = _Exchange(static)
        rest = Rest(None, slopes, ranges, jnp.uint32(3), origin)
        mine, more = by.operands(sink, rest)
        one = by.operands(None, rest._replace(alibi_slopes=None, key_ranges=shared_ranges))[1]
        grad = lax.psum(by.of_all_heads(mine + 1), AXIS)
        return mine, more.alibi_slopes, more.key_ranges, more.origin, one.key_ranges, grad

    given = parts(ranges, axis=2), parts(ranges[:, :1], axis=2)
    found = on_devices(moved, *given)
    for device, queries in enumerate(share.queries):
        mine, its_slopes, its_ranges, its_origin, of_all, grad = (x[device] for x in found)
        assert mine.tolist() == [*queries]
        np.testing.assert_array_equal(its_slopes, slopes[:, queries])
        np.testing.assert_array_equal(its_ranges, ranges[:, queries])
        np.testing.assert_array_equal(of_all, ranges[:, :1])
        assert its_origin.tolist() == [5, 7 + queries[0]]
        np.testing.assert_array_equal(grad, sink + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_looks_at_its_chunks_where_they_lie_in_the_batch(layout):
    chunks = layouts.chunks_of(layout, DEVICES)
    each = 16 // len(layouts.order(layout, DEVICES))
    for longest, shape in ((None, (1, 16, 1, 1)), (9, (16, 1, 1))):
        static, axis = told("gather", layout, longest=longest), 1 if longest is None else 0

        def begins(q, static=static):
            rows = gather._chunks(static, q)
            assert [(type(r.first), r.count) for r in rows] == [(int, each)] * len(rows)
            assert [r.first for r in rows] == [n * each for n in range(len(rows))]
            return jnp.stack([r.begin for r in rows])

        found = on_devices(begins, parts(jnp.zeros(shape), layout, axis))
        assert found.tolist() == [[chunk * each for chunk in own] for own in chunks]
    assert heads._whole(told("heads"), jnp.zeros((2, 16, 1, 1))) == [Rows(0, 0, 16)]
    assert heads._whole(told("heads", longest=3), jnp.zeros((16, 1, 1))) == [Rows(0, 0, 16)]


def test_tokens_of_a_sum_over_devices_and_all_tokens_are_in_their_order():
    x = jnp.arange(2.0 * 16).reshape(2, 16)

    def moved(mine):
        every = layouts.gathered(mine, AXIS, "zigzag", 1)
        return every, layouts.scattered(every * (1.0 + lax.axis_index(AXIS)), AXIS, "zigzag", 1)

    every, summed = on_devices(moved, parts(x))
    np.testing.assert_array_equal(every, jnp.stack([x] * DEVICES))
    np.testing.assert_array_equal(summed, parts(x * (1 + 2 + 3 + 4)))


# Documents of the batch, one of them empty and tokens of none behind them; its tokens in chunks.
ENDS, EACH, CHUNKS = [0, 7, 8, 8, 19, 22], 6, 4
TOKENS = EACH * CHUNKS


def document_of(place: int) -> int:
    """The first token of a token's document; -1 of none."""
    found = [a for a, b in zip(ENDS, ENDS[1:], strict=False) if a <= place < b]
    return found[0] if found else -1


def seen_by_call(made: dict[str, Any], queries: int, keys: int, packed: bool) -> np.ndarray:
    """Which keys the queries of a call see, by the words of its arguments."""
    bounds = [np.array([0, n]) for n in (queries, keys)]
    if packed:
        bounds = [np.asarray(made[f"cu_seqlens_{side}"]) for side in "qk"]
        for side, ends in zip("qk", bounds, strict=True):
            assert made[f"max_seqlen_{side}"] >= np.diff(ends).max()
    (left, right, *first), seen = made["window_size"], np.zeros((queries, keys), bool)
    offsets = made.get("q_offset")
    for d in range(len(bounds[0]) - 1):
        (q0, q1), (k0, k1) = (b[d : d + 2] for b in bounds)
        offset = (k1 - k0) - (q1 - q0) if offsets is None else np.asarray(offsets).reshape(-1)[d]
        for i, j in product(range(q1 - q0), range(k1 - k0)):
            distance = j - i - int(offset)
            near = (left < 0 or distance >= -left) or (bool(first) and j < first[0])
            shown = near and (right < 0 or distance <= right)
            if "key_ranges" in made:
                ranges = np.asarray(made["key_ranges"]).reshape(queries, -1, 2)[q0 + i]
                shown = shown and any(a <= j < b for a, b in ranges)
            seen[q0 + i, k0 + j] = shown
    return seen


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_ranges", [False, True])
@pytest.mark.parametrize("window", [(3, 0, 2), (2, 1, 9)], ids=str)
def test_calls_on_some_tokens_show_what_the_whole_batch_shows(packed, has_ranges, window):
    """Near keys by one call, first keys left of the window by another, all keys at once by one."""
    static = told(
        "ring", longest=11 if packed else None, causal=False, window_size=window, counts=(2, 2)
    )
    place = np.arange(TOKENS)
    start = np.array([document_of(int(p)) for p in place]) if packed else np.zeros(TOKENS, int)
    rng = np.random.default_rng(0)
    pairs = rng.integers(-3, 16, (TOKENS, 2, 2)).astype(np.int32)
    pairs[5] = [[0, 2**31 - 1], [4, 2]]
    left, right, first = window
    own = (start[:, None] == start[None]) & (start[:, None] >= 0)
    distance, position = place[None] - place[:, None], place[None] - start[:, None]
    listed = np.ones_like(own)
    if has_ranges:
        low, high = pairs[..., 0], pairs[..., 1]
        inside = (low[:, :, None] <= position[:, None]) & (position[:, None] < high[:, :, None])
        listed = inside.any(1)
    near = own & listed & (distance >= -left) & (distance <= right)
    leading = own & listed & (distance < -left) & (position < first)
    rest = Rest()
    if packed:
        rest = rest._replace(cu_seqlens=jnp.asarray(ENDS))
    if has_ranges:
        ranges = jnp.asarray(pairs.reshape(TOKENS, 4))
        rest = rest._replace(key_ranges=ranges if packed else ranges[None, None])
    for n, m in product(range(CHUNKS), repeat=2):
        # Queries are sliced from a device's rows, of which these are the second chunk.
        mine = rest
        if has_ranges:
            of_chunk = ranges[n * EACH : (n + 1) * EACH]
            both = jnp.concatenate([of_chunk * 0, of_chunk])
            mine = rest._replace(key_ranges=both if packed else both[None, None])
        queries = Rows(EACH, jnp.int32(n * EACH), EACH)
        keys = Rows(0, jnp.int32(m * EACH), EACH)
        where = slice(n * EACH, (n + 1) * EACH), slice(m * EACH, (m + 1) * EACH)
        for kind, want in ((MASKED, near), (LEADING, leading)):
            made = arguments(static, mine, queries, keys, kind)
            got = seen_by_call(made, EACH, EACH, packed)
            np.testing.assert_array_equal(got, want[where], f"{n} {m} {kind}")
    made = arguments(static, rest, Rows(0, 0, TOKENS), Rows(0, 0, TOKENS), MASKED)
    np.testing.assert_array_equal(seen_by_call(made, TOKENS, TOKENS, packed), near | leading)


@pytest.mark.parametrize("kind", [OWN, MASKED, FULL, LEADING])
def test_a_diagonal_is_told_where_the_default_one_is_wrong(kind):
    """Also where all keys are seen, of slopes, which measure from it."""
    rows = Rows(0, jnp.int32(12), 6), Rows(0, jnp.int32(6), 6)
    static = told("ring", causal=False, window_size=(3, 0, 2))
    for slopes in (None, jnp.ones(4)):
        made = arguments(static, Rest(alibi_slopes=slopes), *rows, kind)
        is_told = kind == MASKED or (kind != OWN and slopes is not None)
        assert ("q_offset" in made) == is_told
        assert not is_told or int(made["q_offset"]) == 6
        assert made["alibi_slopes"] is slopes and made["causal"] is False
        assert "dropout_seed" not in made and "cu_seqlens_q" not in made


def test_documents_have_no_more_tokens_than_they_have_and_no_more_than_are_here():
    rest = Rest(cu_seqlens=jnp.asarray(ENDS))
    for longest, most in ((11, (4, 6)), (5, (4, 5)), (2, (2, 2))):
        made = arguments(told("ring", longest=longest), rest, Rows(0, 12, 4), Rows(0, 6, 6), MASKED)
        assert (made["max_seqlen_q"], made["max_seqlen_k"]) == most
        assert made["cu_seqlens_q"].tolist() == [0, 0, 0, 0, 4, 4]
        assert made["cu_seqlens_k"].tolist() == [0, 1, 2, 2, 6, 6]


def test_dropout_is_drawn_where_tokens_lie_in_the_whole_problem():
    origin, seed = jnp.array([5, 7], jnp.uint32), jnp.array([1, 2], jnp.uint32)
    rest = Rest(seed=seed, origin=origin)
    rows = Rows(0, jnp.int32(12), 4), Rows(0, jnp.int32(8), 4)
    made = arguments(told("ring"), rest, *rows, MASKED)
    batch, head, row, column = made["dropout_origin"]
    assert made["dropout_seed"] is seed and isinstance(column, Quads)
    assert [int(n) for n in (batch, head, row, column.count)] == [5, 7, 12, 2]


def test_a_column_is_known_to_be_a_multiple_of_4_where_each_number_of_keys_is():
    assert _column(Rows(0, 8, 4)) == 8
    assert int(_column(Rows(0, jnp.int32(9), 6))) == 9
    count = _column(Rows(0, jnp.int32(12), 4))
    assert isinstance(count, Quads) and int(count.count) == 3


def test_what_is_the_same_on_all_devices_is_no_array():
    assert by_device((3, 3, 3), None) == 3
    assert by_device((3, 1, 2), 1).tolist() == 1
    assert by_device((3, 1, 2), 1).dtype == jnp.int32
    assert sum_of([1, 20, 300]) == 321 and sum_of([7]) == 7
    made = tree_cast((jnp.ones(2), [jnp.ones(1)]), (jnp.ones(2, jnp.float16), [jnp.ones(1, int)]))
    assert [x.dtype for x in jax.tree.leaves(made)] == [jnp.float16, jnp.int32]


def test_a_mask_has_no_bound_where_a_window_has_none():
    for options, mask in (
        ((False, (-1, -1)), Mask(None, None)),
        ((True, (-1, -1)), Mask(None, 0)),
        ((False, (4, 2)), Mask(4, 2)),
        ((True, (4, 2, 3)), Mask(4, 0, 3)),
        ((False, (0, -1)), Mask(0, None)),
    ):
        causal, window = options
        assert told("ring", causal=causal, window_size=window).mask == mask
    assert told("ring").tokens == 1 and not told("ring").is_packed
    assert told("ring", longest=0).tokens == 0 and told("ring", longest=0).is_packed


def test_rows_are_cut_out_and_put_where_they_were():
    x, rows = jnp.arange(24.0).reshape(2, 6, 2), Rows(jnp.int32(2), 0, 3)
    np.testing.assert_array_equal(rows.of(x, 1), x[:, 2:5])
    put = rows.put(x, jnp.zeros((2, 3, 2), jnp.float16), 1)
    assert put.dtype == x.dtype
    np.testing.assert_array_equal(put, x.at[:, 2:5].set(0))
