"""The steps of a ring that all devices run as one program, and how its parts are merged."""

from itertools import product

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from heedful.core.call.arguments import Quads
from heedful.core.call.spread import CAUSAL, Mask
from heedful.jax.distributed.calls import (
    FULL,
    LEADING,
    MASKED,
    OWN,
    Rest,
    Rows,
    Static,
    _column,
    _ranges,
    arguments,
)
from heedful.jax.distributed.heads import shared
from heedful.jax.distributed.layouts import LAYOUTS, chunks_of, shard
from heedful.jax.distributed.ring import _Ring, merge
from heedful.jax.distributed.rings import Step, Turn, steps

EACH = 12
MASKS = [CAUSAL, Mask(None, None), Mask(5, 0), Mask(17, 0, 15), Mask(3, 30), Mask(None, 4)]
MASKS += [Mask(9, 2, 3), Mask(40, 0, 1)]


@pytest.mark.parametrize("devices", [1, 2, 4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_query_meets_each_key_that_it_sees_once(devices, layout):
    chunks = chunks_of(layout, devices)
    tokens = EACH * sum(map(len, chunks))
    distance = np.arange(tokens) - np.arange(tokens)[:, None]
    for mask, is_packed in product(MASKS, (False, True)):
        met = np.zeros((tokens, tokens), int)
        for step in steps(chunks, EACH, mask, is_packed):
            for turn, device in product(step.turns, range(devices)):
                meet(met, distance, mask, chunks, step, turn, device)
        visible = (mask.left is None) | (distance >= -(mask.left or 0))
        visible |= np.arange(tokens) < mask.first
        assert (met == (visible & ((mask.right is None) | (distance <= (mask.right or 0))))).all()


def meet(met, distance, mask: Mask, chunks, step: Step, turn: Turn, device: int) -> None:
    """Counts the pairs of a device's call, as `calls.arguments` masks them."""
    source = (device - step.distance) % len(chunks)
    query, key = chunks[device][turn.queries[device]], chunks[source][turn.keys[device]]
    rows = slice(query * EACH + turn.rows[0], query * EACH + turn.rows[1])
    columns = slice(key * EACH + step.rows[0], key * EACH + step.rows[1])
    near = distance[rows, columns]
    positions = np.arange(columns.start, columns.stop)
    if turn.kind == LEADING:
        seen = (positions < mask.first) & (near < -(mask.left or 0))
    elif turn.kind == FULL:
        seen = np.ones_like(near, bool)
    else:
        assert turn.kind in (OWN, MASKED) and (turn.kind == MASKED or query == key)
        seen = (mask.left is None) | (near >= -(mask.left or 0))
        seen &= (mask.right is None) | (near <= (mask.right or 0))
    met[rows, columns] += seen


def test_a_zigzag_computes_two_unmasked_calls_a_step_and_a_window_sends_few_keys():
    first, *others = steps(chunks_of("zigzag", 4), 128, CAUSAL, False)
    assert [turn.kind for turn in first.turns] == [OWN, OWN, FULL]
    assert [[turn.kind for turn in step.turns] for step in others] == [[FULL, FULL]] * 3
    own, before = steps(chunks_of("contiguous", 4), 128, Mask(10, 0), False)
    assert own.rows == (0, 128) and before.rows == (116, 128)
    assert [turn.rows for turn in before.turns] == [(0, 10)]


def beyond_one_rounding(rounds: bool) -> float:
    """By how much an error of sixteen merged parts, as bfloat16, exceeds half a unit in the last
    place, at most, over the largest value."""
    parts, keys = 16, 16
    q, k, v = (jax.random.normal(jax.random.key(n), (keys * parts, 2, 16)) for n in range(3))
    scores = jnp.einsum("ihd,jhd->hij", q, k) / 4
    want = np.einsum("hij,jhd->ihd", np.asarray(jax.nn.softmax(scores)), np.asarray(v))
    out, lse = jnp.zeros(q.shape), jnp.full(scores.shape[:2], -jnp.inf)
    for n in range(parts):
        some = slice(n * keys, (n + 1) * keys)
        part_lse = jax.nn.logsumexp(scores[..., some], -1)
        part = jnp.einsum("hij,jhd->ihd", jax.nn.softmax(scores[..., some]), v[some])
        out, lse = merge(out, lse, part, part_lse)
        out = out.astype(jnp.bfloat16).astype(jnp.float32) if rounds else out
    got = np.asarray(out.astype(jnp.bfloat16), np.float64)
    half = 2.0 ** (np.frexp(want)[1].astype(np.float64) - 9)
    return float((np.abs(got - want) - half).max() / np.abs(want).max())


def test_merged_parts_are_rounded_once_and_a_merge_that_rounds_each_step_is_seen():
    # Roundings of float32 for each part, of scores among them.
    assert beyond_one_rounding(False) < 64 * 2.0**-24
    assert beyond_one_rounding(True) > 2.0**-9


def test_a_row_without_keys_in_a_part_or_in_all_stays_as_it_is():
    out, lse = jnp.ones((2, 1, 4)).at[1].set(0), jnp.array([[0.5, -jnp.inf]])
    out, lse = merge(out, lse, jnp.zeros((2, 1, 4)), jnp.full((1, 2), -jnp.inf))
    assert out[:, 0, 0].tolist() == [1.0, 0.0] and lse.tolist() == [[0.5, -jnp.inf]]


@pytest.mark.parametrize("kind", [OWN, MASKED, FULL, LEADING])
def test_first_keys_are_told_to_calls_whose_keys_begin_where_documents_do(kind):
    """Others see theirs by calls of their own."""
    options = (("causal", True), ("window_size", (9, 0, 3)))
    static = Static("ring", "x", None, "zigzag", None, (2, 2), options)
    told = {}
    for begin in (0, 8, jnp.int32(0)):
        keys = Rows(0, begin, 8)
        made = arguments(static, Rest(), Rows(8, 16, 8), keys, kind)
        told[str(begin), type(begin) is int] = made["window_size"]
    near = (-1, -1) if kind in (FULL, LEADING) else (9, 0)
    whole = (9, 0, 3) if kind == MASKED else near
    assert told == {("0", True): whole, ("8", True): near, ("0", False): near}


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (12, 4), (10, 5), (16, 1), (24, 6)], ids=str)
def test_each_head_is_computed_once_beside_its_keys_and_all_devices_have_as_many(heads, devices):
    """What a device computes twice lies behind what counts."""
    heads_q, heads_k = heads
    group = heads_q // heads_k
    if heads_k < devices and (devices % heads_k or heads_q % devices):
        with pytest.raises(ValueError, match="cannot spread"):
            shared(*heads, devices)
        return
    share = shared(*heads, devices)
    assert len(share.queries) == len(share.keys) == len(share.counts) == devices
    assert len({*map(len, share.queries)}) == len({*map(len, share.keys)}) == 1
    own = [theirs[:count] for theirs, count in zip(share.queries, share.counts, strict=True)]
    assert [head for theirs in own for head in theirs] == [*range(heads_q)]
    assert share.copies == max(1, devices // heads_k)
    # No device waits for another by more than a KV head's queries.
    assert max(share.counts) - min(share.counts) <= group
    for queries, keys in zip(share.queries, share.keys, strict=True):
        assert [*dict.fromkeys(head // group for head in queries)] == [*dict.fromkeys(keys)]
        each = len(queries) // len(keys)
        assert all(head // group == keys[n // each] for n, head in enumerate(queries))


@pytest.mark.parametrize("kind", [MASKED, FULL, LEADING])
@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("begin", [0, 6, 12])
def test_ranges_count_from_the_first_key_of_the_document_that_is_here(
    begin, is_packed, has_ranges, kind
):
    """By each row and key, from their places in the batch. First keys end where the window of a
    row begins."""
    count, left, first = 8, 3, 5
    ends = [0, 7, 7, 18, 26] if is_packed else [0, 26]
    queries = Rows(2, 10, 9)
    options = (("causal", True), ("window_size", (left, 0, first)))
    static = Static("ring", "x", None, "zigzag", 11 if is_packed else None, (2, 2), options)
    rng = np.random.default_rng(begin)
    lead = () if is_packed else (2, 1)
    told = rng.integers(-2, 15, (*lead, 12, 4)) if has_ranges else None
    rest = Rest(
        cu_seqlens=jnp.asarray(ends, jnp.int32) if is_packed else None,
        key_ranges=None if told is None else jnp.asarray(told, jnp.int32),
    )
    found = _ranges(static, rest, queries, Rows(0, jnp.int32(begin), count), kind)
    if kind != LEADING and told is None:
        assert found is None
        return
    assert found is not None
    rows = np.asarray(found).reshape(-1, queries.count, found.shape[-1] // 2, 2)
    given = None if told is None else told.reshape(-1, 12, 2, 2)[:, 2:11]
    for row in range(queries.count):
        place = queries.begin + row
        start = max(end for end in ends[:-1] if end <= place)
        before = max(begin - start, 0)
        for number, ranges in enumerate(rows[:, row]):
            for key in range(count):
                at = key + before
                wanted = given is None or any(a <= at < b for a, b in given[number, row])
                if kind == LEADING:
                    wanted = wanted and at < min(first, place - start - left)
                assert any(a <= key < b for a, b in ranges) == wanted


@pytest.mark.parametrize(("begin", "count", "column"), [(8, 8, 8), ("8", 8, "quads"), ("7", 7, 7)])
def test_columns_of_a_dropout_mask_are_known_to_be_multiples_of_4_where_they_are(
    begin, count, column
):
    keys = Rows(0, begin if type(begin) is int else jnp.int32(int(begin)), count)
    found = _column(keys)
    if column == "quads":
        assert isinstance(found, Quads) and found.count == 2
    else:
        assert found == column and not isinstance(found, Quads)


AXIS, DEVICES = "ring", 4
# Of each chunk of 8 tokens these are sent from the device before.
SOME = Step(1, (4, 7), (Turn((0, 1, 0, 1), (2, 6), (1, 1, 0, 0), MASKED),))


def static_of(layout: str, longest=None) -> Static:
    options = (("causal", True), ("window_size", (3, 0)))
    return Static("ring", AXIS, None, layout, longest, (2, 2), options)


def on_devices(function, *arrays):
    return jax.jit(jax.vmap(function, axis_name=AXIS))(*arrays)


@pytest.mark.parametrize("longest", [None, 9], ids=["dense", "packed"])
@pytest.mark.parametrize("rows", [SOME.rows, (0, 8)], ids=str)
def test_rows_of_each_chunk_travel_to_the_device_behind_and_back(rows, longest):
    step, axis = SOME._replace(rows=rows), 1 if longest is None else 0
    batch = 1.0 + np.arange(3 * DEVICES * 16).reshape(3, DEVICES, 2, 8)
    # (devices, batch, tokens), or packed (devices, tokens, batch).
    own = np.moveaxis(batch, 1, 0)
    cut = own[..., slice(*rows)]
    kept = np.zeros_like(own)
    kept[..., slice(*rows)] = cut
    placed = [x.reshape(DEVICES, 3, -1) for x in (own, cut, kept)]
    own, cut, kept = placed if longest is None else (x.swapaxes(1, 2) for x in placed)

    def moved(x):
        ring = _Ring(static_of("zigzag", longest), x)
        sent = ring.sent(x, step)
        back = ring.returned(sent, step)
        return sent, back, ring.add(x, back, step)

    x = jnp.asarray(own, jnp.float32)
    assert x.shape[axis + 1] == 16
    sent, back, added = on_devices(moved, x)
    np.testing.assert_array_equal(sent, np.roll(cut, 1, 0))
    np.testing.assert_array_equal(back, cut)
    np.testing.assert_array_equal(added, own + kept)


def test_a_turn_is_of_rows_where_they_lie_on_a_device_and_in_the_batch():
    def places(x):
        queries, keys = _Ring(static_of("zigzag"), x).rows(SOME, SOME.turns[0])
        assert (queries.count, keys.count) == (4, 3)
        return jnp.stack([queries.first, queries.begin, keys.first, keys.begin])

    found = on_devices(places, jnp.zeros((DEVICES, 1, 16, 1, 1)))
    chunks = chunks_of("zigzag", DEVICES)
    for device, got in enumerate(found.tolist()):
        i, j = SOME.turns[0].queries[device], SOME.turns[0].keys[device]
        query, key = chunks[device][i], chunks[device - 1][j]
        assert got == [8 * i + 2, 8 * query + 2, 3 * j, 8 * key + 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_its_rows_of_the_keys_of_its_source(layout):
    """In the order of steps; what a step made is there behind it."""
    tokens = jnp.arange(64.0)[None, :, None, None]
    parts = jnp.stack(jnp.split(shard(tokens, DEVICES, layout), DEVICES, 1))
    seen = []

    def walked(x):
        ring, carried = _Ring(static_of(layout), x), [x * 0]
        for step, keys, values in ring.walk(x, -x, carried):
            seen.append(step)
            carried[0] = carried[0] + 1
            yield keys, values
        yield carried[0]

    *steps_, total = on_devices(lambda x: [*walked(x)], parts)
    assert len(seen) == len(steps_) >= 2 and (total == len(seen)).all()
    each = 64 // DEVICES // len(chunks_of(layout, DEVICES)[0])
    own = np.asarray(parts).reshape(DEVICES, -1, each)
    for step, (keys, values) in zip(seen, steps_, strict=True):
        want = np.roll(own, step.distance, 0)[:, :, slice(*step.rows)].reshape(DEVICES, -1)
        np.testing.assert_array_equal(keys[:, 0, :, 0, 0], want)
        np.testing.assert_array_equal(values, -keys)
