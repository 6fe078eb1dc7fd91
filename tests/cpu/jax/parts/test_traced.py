"""The parts of a call in JAX, each by itself: tiles that are visited, labels of dims, entries of a
batch, plans, flags, sums of merged parts, and positions of queries without new keys."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec  # noqa: E402

import heedful.jax as hj  # noqa: E402
from heedful.core.base.device import by_name, lent  # noqa: E402
from heedful.core.call.arguments import WHOLE, CacheUpdate, Options  # noqa: E402
from heedful.core.call.mask import MaskSpec  # noqa: E402
from heedful.core.call.numerics import with_numerics  # noqa: E402
from heedful.core.call.operands import Operands  # noqa: E402
from heedful.core.call.problem import AttentionProblem  # noqa: E402
from heedful.core.registry.capability import JAX_ON_GPUS  # noqa: E402
from heedful.jax.api.merge import merged  # noqa: E402
from heedful.jax.base import device  # noqa: E402
from heedful.jax.operands import plain  # noqa: E402
from heedful.jax.tiled import scan, tiles  # noqa: E402
from heedful.jax.traced import (  # noqa: E402
    cache_update,
    call,
    local,
    primitives,
    registration,
    sharding,
    symbolic,
)
from heedful.jax.traced.primitives import Static  # noqa: E402
from heedful.jax.traced.sharding import BATCH, GROUPED, HEADS, Layout, Rule, shifted  # noqa: E402


def some(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture
def visits(monkeypatch):
    """[begin, end) of each loop over tiles; none of them is run."""
    seen: list[tuple[int, int]] = []

    def loop(begin, end, body, state):
        seen.append((int(begin), int(end)))
        return state

    monkeypatch.setattr(scan.lax, "fori_loop", loop)
    return seen


# Lengths, and how many tiles of 128 rows and 256 keys they fill.
FILLED = [((1, 1), (1, 1)), ((128, 256), (1, 1)), ((129, 257), (2, 2)), ((384, 511), (3, 2))]


@pytest.mark.parametrize("lengths, count", FILLED)
def test_each_tile_of_a_sequence_is_visited_and_none_behind_it(lengths, count, visits):
    """Of a sequence that uses a part of its room, too."""
    q, k = (jnp.zeros((1, n + 600, 1, 4)) for n in lengths)
    used = [jnp.array([n], jnp.int32) for n in lengths]
    facts: dict[str, Any] = {"dtype": "float32", "used_q": True, "used_k": True, "sink": True}
    problem = AttentionProblem.dense(1, q.shape[1], k.shape[1], 1, head_dim=4, **facts)
    x = Operands(q, k, k, sink=jnp.zeros(1), seqused_q=used[0], seqused_k=used[1])
    seq = tiles.Sequence(problem, x, jnp.int32(0))
    scan._forward_of(seq, None)
    scan._statistics_of(seq, None)
    scan._Backward(seq, None, None, None, None).of([0] * 4 + [jnp.zeros(1), 0])  # pyright: ignore
    assert visits == [(0, count[0]), (0, count[0]), (0, count[1]), (0, count[0])]


@pytest.mark.parametrize("splits, each", [(1, 5), (2, 3), (3, 2), (4, 2), (5, 1), (9, 1)])
def test_splits_share_the_tiles_that_a_row_sees(splits, each, monkeypatch):
    """Each but the last has equally many, and none is empty."""
    seen: list[tuple[int, int]] = []
    facts: dict[str, Any] = {"dtype": "float32", "num_splits": splits}
    problem = AttentionProblem.dense(1, 1, 5 * 256 - 3, 1, head_dim=4, **facts)
    k = jnp.zeros((1, 5 * 256 - 3, 1, 4))
    seq = tiles.Sequence(problem, Operands(k[:, :1], k, k), jnp.int32(0))

    def loop(begin, end, body, state):
        if getattr(body, "__name__", "") == "part":
            for index in range(int(begin), int(end)):
                state = body(index, state)
            return state
        seen.append((int(begin), int(end)))
        return state

    monkeypatch.setattr(scan.lax, "fori_loop", loop)
    scan._attend(seq, seq.rows(0, 1), 256)
    assert seen == [(n, min(n + each, 5)) for n in range(0, 5, each)]


@pytest.mark.parametrize("first, count, length, last", [(0, 200, 128, 1), (0, 128, 200, 1)])
@pytest.mark.parametrize("more, more_tiles", [(0, 0), (1, 1)])
def test_what_the_last_row_of_a_tile_sees_is_visited(first, count, length, last, more, more_tiles):
    """Be it the last of the sequence, or of the tile; and of keys the same."""
    for window, is_query in (((-1, more), True), ((more, -1), False)):
        mask = MaskSpec.of(window_size=window, bottom_right=False)
        lengths = (length, 900) if is_query else (900, length)
        problem = AttentionProblem.dense(1, *lengths, 1, head_dim=1, dtype="float32", mask=mask)
        q, k = (jnp.zeros((1, n, 1, 1)) for n in lengths)
        seq = tiles.Sequence(problem, Operands(q, k, k), jnp.int32(0))
        found = (seq.key_range if is_query else seq.query_range)(first, count, 128)
        assert [*map(int, found)] == [0, last + more_tiles]


DENSE, PACKED = Layout(True, False, 2, 3), Layout(False, True, 2, 3)
# Dims of an operand: batch entries, KV heads, query heads, and others. Packed: those it has then.
DIMS = {
    "q out dout dq rotated": ("b m h d", "m h d"),
    "k_new v_new": ("b m g d", None),
    "k v dk dv": ("b n g d", "n g d"),
    "lse dlse": ("b h m", "h m"),
    "bias probs dbias block_rows block_keys": ("b h m n", None),
    "key_ranges": ("b h m r", "m r"),
    "alibi_slopes": ("b h", None),
    "sink dsink head_index": ("h", "h"),
    "rel_bias drel_bias": ("h n", "h n"),
    "leftpad_k kv_batch_idx cache_seqlens seqused batch_index": ("b", None),
    "seqused_q seqused_k q_offsets": ("b", "x"),
    "q_descale k_descale v_descale k_shift v_shift": ("b g", "x g"),
    "tree_mask": ("b m m", None),
    "block_table": ("b x", "x x"),
    "origins": ("b x", "x x"),
    "block_bits": ("x m w", "x m w"),
    "cu_seqlens_q cu_seqlens_k": ("x", "x"),
    "seed origin rotary_cos": ("x", "x"),
}
SIZES = {"b": 5, "m": 7, "n": 9, "g": 2, "h": 6, "d": 8, "r": 4, "x": 5, "w": 3}
SPREAD = {"b": BATCH, "g": HEADS, "h": GROUPED}


@pytest.mark.parametrize("names", DIMS)
def test_batch_entries_and_heads_of_each_operand_may_be_spread_and_nothing_else(names):
    for name in names.split():
        for layout, dims in zip((DENSE, PACKED), DIMS[names], strict=True):
            if dims is None:
                continue
            shape = tuple(SIZES[letter] for letter in dims.split())
            wanted = [SPREAD.get(letter, "") for letter in dims.split()]
            assert layout.labels(name, shape) == wanted, name
            # A dim of 1 is for all.
            assert layout.labels(name, (1,) * len(shape)) == [""] * len(shape)


def test_scales_of_groups_lie_as_the_keys_do_and_one_query_head_a_kv_head_is_that():
    assert DENSE.labels("k_descale", (5, 9, 2, 4)) == [BATCH, "", HEADS, ""]
    assert DENSE.labels("k_descale", (9, 2, 4)) == ["", HEADS, ""]
    paged = Layout(True, True, 2, 3)
    assert paged.labels("v_shift", (5, 9, 2, 4)) == ["", "", HEADS, ""]
    assert paged.labels("k", (5, 9, 2, 4)) == ["", "", HEADS, ""]
    alike = Layout(True, False, 2, 1)
    assert alike.query_heads == HEADS and DENSE.query_heads == GROUPED
    assert alike.labels("q", (5, 7, 2, 8)) == alike.labels("k", (5, 7, 2, 8))
    assert DENSE.labels("alibi_slopes", (6,)) == [GROUPED]
    # Heads that are fewer than those of the call are no such dim.
    assert DENSE.labels("q", (5, 7, 3, 8)) == [BATCH, "", "", ""]


def rule(group: int, whole: tuple[str, ...] = ()) -> Rule:
    names, shapes = ("q", "k", "sink"), ((4, 7, 2 * group, 8), (4, 9, 2, 8), (2 * group,))
    results = (("out", shapes[0]), ("dsink", shapes[2]))
    return Rule(names, shapes, results, Layout(True, False, 2, group), lambda given: [], whole)


def test_a_rule_names_each_dim_that_stays_whole():
    text, sizes, alone = rule(3)._text()
    assert text == "b w0 (g r) w1, b w2 g w3, (g r) -> b w4 (g r) w5, (g r)"
    assert sizes == {"r": 3} and alone == ("w0", "r", "w1", "w2", "w3", "w4", "w5")
    text, sizes, alone = rule(1, (BATCH,))._text()
    assert text == "w0 w1 g w2, w3 w4 g w5, g -> w6 w7 g w8, g" and sizes == {}
    assert alone == tuple(f"w{n}" for n in range(9))


@pytest.mark.parametrize(
    "spec, batch, heads",
    [
        (("data", None, "model"), "data", "model"),
        ((("data", "model"),), ("data", "model"), None),
        ((None, "data", ("model",)), None, "model"),
        # Three devices have no whole number of two KV heads.
        (("model", None, "odd"), "model", None),
        ((), None, None),
    ],
    ids=str,
)
def test_a_call_lies_as_its_queries_do_where_devices_get_whole_kv_heads(spec, batch, heads):
    mesh = AbstractMesh((2, 2, 3), ("data", "model", "odd"))
    placed = SimpleNamespace(
        shape=(4, 7, 6, 8), sharding=SimpleNamespace(mesh=mesh, spec=PartitionSpec(*spec))
    )
    ours = rule(3)
    wanted = ours._infer(mesh, (placed, None, None), None)
    names = [n if isinstance(n, tuple) or n is None else (n,) for n in (batch, heads)]
    spread = [
        NamedSharding(mesh, PartitionSpec(names[0], None, names[1], None)),
        NamedSharding(mesh, PartitionSpec(names[1])),
    ]
    for got, want in zip(wanted, spread, strict=True):
        assert got.is_equivalent_to(want, len(got.spec)), (got, want)
    _, _, results, inputs = ours._partition(mesh, (placed, None, None), None)
    assert results == wanted
    assert inputs[1].is_equivalent_to(
        NamedSharding(mesh, PartitionSpec(names[0], None, names[1], None)), 4
    )
    told = rule(3, (BATCH,))._axes((placed, None, None))
    assert BATCH not in told and (HEADS in told) == (heads is not None)


def test_a_device_draws_from_the_place_of_its_first_entry_and_head():
    origin = jnp.array([1, 2, 3, 4], jnp.uint32)
    own = {"batch_index": jnp.array([5, 6], jnp.uint32), "head_index": jnp.array([7], jnp.uint32)}
    given = {**own, "origin": origin}
    assert shifted(given)["origin"].tolist() == [6, 9, 3, 4] and [*given] == ["origin"]
    given = {n: x[:0] for n, x in own.items()} | {"origin": origin}
    assert shifted(given)["origin"].tolist() == [1, 2, 3, 4]
    # Sequences have their own, in which the batch entry is.
    origins = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]], jnp.int32)
    moved = shifted({**own, "origins": origins})["origins"]
    assert moved.tolist() == [[1, 9, 3, 4], [5, 13, 7, 8]] and moved.dtype == jnp.int32


OF_ENTRY = {"q": (3, 5, 4, 8), "k": (3, 7, 2, 8), "v": (3, 7, 2, 6), "bias": (3, 1, 5, 7)}
OF_ENTRY |= {"alibi_slopes": (3, 4), "q_descale": (3, 2), "k_descale": (3, 2), "v_descale": (3, 2)}
OF_ENTRY |= {n: (3,) for n in ("seqused_q", "seqused_k", "leftpad_k", "q_offsets")}
OF_ALL = {"bias": (1, 1, 5, 7), "alibi_slopes": (4,), "k_descale": (), "sink": (4,)}
OF_ALL |= {"rel_bias": (4, 9), "key_ranges": (1, 1, 5, 2)}


@pytest.mark.parametrize("shared", [{}, OF_ALL], ids=["own", "shared"])
@pytest.mark.parametrize("has_origins", [False, True])
def test_each_entry_of_an_unknown_batch_has_its_own_operands_and_dropout(shared, has_origins):
    shapes = OF_ENTRY | shared | ({"origins": (3, 4)} if has_origins else {})
    given = {name: some(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    x = Operands(**given)
    of_entry = {n for n, s in shapes.items() if s[:1] == (3,) and n not in shared}
    origin = (10, 20, 30, 40)

    def run(whole, options, seed):
        assert seed == "seed"
        sums = []
        for name, array in whole._asdict().items():
            if array is None:
                continue
            wanted = (1, *shapes[name][1:]) if name in of_entry else shapes[name]
            assert array.shape == wanted, name
            sums.append(array.sum())
        assert len(sums) == len(shapes)
        first = jnp.asarray(options.dropout_origin[0])
        assert options.dropout_origin[1:] == origin[1:]
        return jnp.stack(sums)[None], first[None, None], jnp.zeros(0)

    options = Options("dense", dropout_p=0.5, dropout_origin=origin)
    sums, first, empty = symbolic.one_by_one(run, x, options, "seed")
    names = [name for name in Operands._fields if name in shapes]
    for column, name in enumerate(names):
        array = given[name]
        want = array.reshape(3, -1).sum(1) if name in of_entry else jnp.full(3, array.sum())
        np.testing.assert_allclose(sums[:, column], want, rtol=1e-5, atol=1e-5)
    assert first[:, 0].tolist() == ([10] * 3 if has_origins else [10, 11, 12])
    assert empty.shape == (0,)


def test_an_entrys_part_of_the_mask_begins_at_its_own_number_in_the_batch():
    index = jnp.uint32(2)
    options = Options("dense", dropout_p=0.5, dropout_origin=(10, 20, 30, 40))
    assert [int(n) for n in symbolic._at(options, index).dropout_origin] == [12, 20, 30, 40]
    for same in (options._replace(dropout_p=0.0), options._replace(dropout_origin=(1, 2, 3))):
        assert symbolic._at(same, index) is same
    seen = []

    def traced(origin):
        seen.append(symbolic._at(options._replace(dropout_origin=origin), index).dropout_origin)
        return seen[0]

    assert jax.jit(traced)(jnp.array([1, 2, 3, 4], jnp.uint32)).tolist() == [3, 2, 3, 4]


def test_a_plan_is_of_the_named_backend_and_of_what_is_lent_of_the_device(monkeypatch):
    """A name in the call comes before that of the setting."""
    monkeypatch.setenv("HEEDFUL_DEVICE", "H200")
    monkeypatch.delenv("HEEDFUL_BACKEND", raising=False)
    monkeypatch.setattr(device, "_jax_version", lambda: JAX_ON_GPUS)
    told: list[Any] = []
    monkeypatch.setattr(local, "decision", told.append)
    problem = AttentionProblem.dense(2, 96, 160, 4, 2, 64, causal=True)
    chosen = local.planned("cuda", problem, None)
    assert (chosen.backend, chosen.device) == ("hopper", by_name("H200")) and told == [chosen]
    lend = local.planned("cuda", problem, with_numerics(None, None, 8))
    assert lend.device == lent(by_name("H200"), 8) and lend.device != chosen.device
    monkeypatch.setenv("HEEDFUL_BACKEND", "portable")
    assert local.planned("cuda", problem, None).backend == "portable"
    assert local.planned("cuda", problem, "hopper").backend == "hopper"
    assert local.planned("cpu", AttentionProblem.dense(1, 8, 8, 2), "scan").backend == "scan"


@pytest.mark.parametrize("flag", ["jax_debug_infs", "jax_debug_nans", "jax_disable_jit"])
def test_flags_of_those_who_debug_are_read_when_a_call_runs(flag):
    assert registration._is_set(flag) is False
    with getattr(jax, flag.removeprefix("jax_"))(True):
        assert registration._is_set(flag) is True
        with registration.infinite_lse():
            assert getattr(jax.config, flag) == (flag != "jax_debug_infs")
        assert getattr(jax.config, flag)


@pytest.mark.parametrize("has_sink", [False, True])
def test_parts_far_from_0_are_merged_by_what_the_rounding_of_lse_left(has_sink):
    """By float64: lse and its rest are one number."""
    outs, noise = some(3, 2, 7, 4, 8), some(3, 2, 4, 7, seed=1)
    lses = jnp.float32(2.0**26) + 8 * jnp.round(noise / 4)
    lses = lses.at[1].set(lses[0]).at[0, ..., 2].set(-jnp.inf).at[:, ..., 3].set(-jnp.inf)
    rests = some(3, 2, 4, 7, seed=2) - 3.0
    sink = jnp.array([2.0**26, -jnp.inf, 2.0**26 + 8, 0.0]) if has_sink else None
    wide = np.asarray(lses, np.float64) + np.asarray(rests, np.float64)
    all_of = wide
    if sink is not None:
        logit = np.broadcast_to(np.asarray(sink, np.float64)[:, None], wide[:1].shape)
        all_of = np.concatenate([wide, logit])
    top = np.maximum(all_of.max(0), -1e300)
    total = np.exp(all_of - top).sum(0)
    with np.errstate(divide="ignore"):
        want_lse = np.where(total > 0, top + np.log(total), -np.inf)
    weights = np.exp(wide - top) / np.where(total > 0, total, 1)
    want = (np.swapaxes(weights, -1, -2)[..., None] * np.asarray(outs, np.float64)).sum(0)
    out, lse = merged(outs, lses, sink, rests)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=2.0**-23)


@pytest.mark.parametrize("interleaved, causal", [(True, True), (False, False)])
def test_queries_beside_no_new_keys_are_rotated_to_the_end_of_the_cache(interleaved, causal):
    """Each has its position where masks look at these, else all have one; padding is no key."""
    q, cache, none = some(2, 3, 2, 8), some(2, 9, 2, 8, seed=1), jnp.zeros((2, 0, 2, 8))
    angle = np.arange(20)[:, None] * np.array([1.0, 0.3])
    tables = {"rotary_cos": jnp.asarray(np.cos(angle), jnp.float32)}
    tables |= {"rotary_sin": jnp.asarray(np.sin(angle), jnp.float32)}
    lengths, padded = np.array([9, 5], np.int32), np.array([0, 2], np.int32)
    place = lengths[:, None] + np.arange(3) * causal
    c, s = np.cos(angle)[place][:, :, None], np.sin(angle)[place][:, :, None]
    first, second = (slice(0, 4, 2), slice(1, 4, 2)) if interleaved else (slice(2), slice(2, 4))
    turned = np.array(q, np.float64)
    a, b = turned[..., first].copy(), turned[..., second].copy()
    turned[..., first], turned[..., second] = a * c - b * s, a * s + b * c
    problem: Any = SimpleNamespace(page_size=0, mask=MaskSpec.of(causal))
    x, update = Operands(q, cache, cache), CacheUpdate(**tables, rotary_interleaved=interleaved)
    got = cache_update.rotated_only(x, update, jnp.asarray(lengths), problem)
    np.testing.assert_allclose(got, turned, rtol=1e-5, atol=1e-6)
    prefixed = update._replace(shared_prefix=(jnp.zeros((4, 2, 8)),) * 2)
    moved = cache_update.rotated_only(x, prefixed, jnp.asarray(lengths) - 4, problem)
    np.testing.assert_array_equal(moved, got)
    more: dict[str, Any] = {"cache_seqlens": lengths, "cache_leftpad": padded, "causal": causal}
    beside = {"k": none, "v": none, "rotary_interleaved": interleaved, **tables}
    out, k_cache, _ = hj.flash_attn_with_kvcache(q, cache, cache, **beside, **more)
    want = hj.flash_attn_with_kvcache(got, cache, cache, **more)[0]
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(k_cache, cache)


def test_probabilities_without_dropout_are_an_empty_array():
    q = jnp.zeros((1, 4, 2, 8), jnp.float16)
    out, lse, probs = hj.flash_attn_func(q, q, q, return_attn_probs=True)
    assert probs.shape == (0,) and probs.dtype == out.dtype == jnp.float16
    assert lse.shape == (1, 2, 4)


def test_a_call_whose_results_nobody_differentiates_has_no_backward():
    zero = jax.custom_derivatives.SymbolicZero(jax.core.ShapedArray((), jnp.float32))
    kept: Any = (Operands(None, None, None), None, None, None)
    asked = Static((), Options("dense", dropout_origin=WHOLE))
    for cotangents in ((zero,), (zero, zero), (zero, zero, zero)):
        assert call._backward(asked, kept, cotangents) == (None, None, None)


def test_a_number_on_another_device_is_not_waited_for(monkeypatch):
    class Elsewhere:
        def devices(self):
            return [SimpleNamespace(platform="cpu"), SimpleNamespace(platform="cuda")]

    monkeypatch.setattr(plain, "Array", Elsewhere)
    kinds = {"an int": plain.plain_int, "a float": plain.plain_float, "a bool": plain.plain_flag}
    for wanted, read in kinds.items():
        words = rf"n must be {wanted} \(an array elsewhere would have to be waited for\), got"
        with pytest.raises(TypeError, match=words):
            read("n", Elsewhere())
    side: Any = Elsewhere()
    with pytest.raises(TypeError, match="window_size must be .* elsewhere"):
        plain.plain_options(Options("dense", window_size=(1, side)))


def test_a_call_without_rows_has_the_log_sum_exp_that_it_has():
    q, k = jnp.zeros((2, 0, 2, 8)), jnp.zeros((2, 4, 2, 8))
    problem = AttentionProblem.dense(2, 0, 4, 2, head_dim=8, dtype="float32", return_lse=True)
    out, lse, probs = scan.forward(problem, Operands(q, k, k))
    assert out.shape == q.shape and lse.shape == (2, 2, 0) and probs is None
    one, total = scan.norms(problem, Operands(q, k, k), lse)
    assert one is lse and total.shape == lse.shape
    grads = scan.backward(problem, Operands(q, k, k), out, lse, out)
    assert not grads.dk.any() and grads.dv.shape == k.shape and grads.dq.shape == q.shape
    assert grads[3:] == (None, None, None)


@pytest.fixture
def ruled(monkeypatch):
    """The sharding rules that are made, of which none is run."""
    made: list[Rule] = []

    def rule(*facts, **more):
        made.append(Rule(*facts, **more))
        return made[-1]

    monkeypatch.setattr(sharding, "Rule", rule)
    return made


def context_of(arrays: dict[str, tuple], results: tuple = ()) -> Any:
    kinds = [jax.core.ShapedArray(shape, dtype) for shape, dtype in arrays.values()]
    return SimpleNamespace(
        avals_in=kinds, avals_out=[jax.core.ShapedArray(shape, jnp.float32) for shape in results]
    )


F32, I32 = jnp.float32, jnp.int32


@pytest.mark.parametrize("shared", ["", "block_table", "kv_batch_idx"])
@pytest.mark.parametrize("rotates", [False, True])
def test_a_cache_that_entries_share_is_written_by_every_device(shared, rotates, ruled):
    arrays: dict[str, tuple] = {n: ((2, 1, 3, 8), F32) for n in ("k_new", "v_new")}
    arrays |= {n: ((5, 16, 3, 8), F32) for n in "kv"} | {"cache_seqlens": ((2,), I32)}
    arrays |= {shared: ((2, 4) if shared == "block_table" else (2,), I32)} if shared else {}
    if rotates:
        arrays |= {n: ((64, 4), F32) for n in ("rotary_cos", "rotary_sin")}
        arrays |= {"q": ((2, 1, 6, 8), F32)}
    static = cache_update.Static(tuple(arrays), 16 if shared else 0, True, True, 0)
    cache_update._spread(static, context_of(arrays))
    (rule,) = ruled
    assert rule.names == tuple(arrays) and rule.shapes == tuple(s for s, _ in arrays.values())
    written = ["k", "v", "cache_seqlens", *(["q"] if rotates else [])]
    assert rule.results == tuple((name, arrays[name][0]) for name in written)
    assert rule.layout == Layout(True, bool(shared), 3, 2 if rotates else 1)
    assert rule.whole == ((BATCH,) if shared else ())


CALLS: dict[str, tuple[dict[str, tuple], Options, Layout]] = {
    "dense": ({}, Options("dense"), Layout(True, False, 2, 3)),
    "lengths": ({"seqused_k": (4,)}, Options("dense"), Layout(True, False, 2, 3)),
    "entries": (
        {"kv_batch_idx": (4,), "seqused_k": (4,)},
        Options("kvcache"),
        Layout(True, True, 2, 3),
    ),
    "packed": (
        {
            "q": (20, 6, 8),
            "k": (20, 2, 8),
            "v": (20, 2, 8),
            "cu_seqlens_q": (5,),
            "cu_seqlens_k": (5,),
        },
        Options("varlen", max_seqlen_q=9, max_seqlen_k=9),
        Layout(False, True, 2, 3),
    ),
    "dropout": (
        {"seed": (2,)},
        Options("dense", dropout_p=0.5, dropout_origin=(1, 2, 3, 4)),
        Layout(True, False, 2, 3),
    ),
    "traced": (
        {"seed": (2,), "origin": (4,)},
        Options("dense", dropout_p=0.5, dropout_origin=(0, 0, 0, 1)),
        Layout(True, False, 2, 3),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_spread_with_what_tells_a_device_its_part_of_the_dropout_mask(
    name, ruled, monkeypatch
):
    more, options, layout = CALLS[name]
    shapes = {"q": (4, 7, 6, 8), "k": (4, 9, 2, 8), "v": (4, 9, 2, 8), **more}
    words = {"seed": jnp.uint32, "origin": jnp.uint32}
    arrays = {n: (s, words.get(n, F32 if n in "qkv" else I32)) for n, s in shapes.items()}
    asked = Static(tuple(arrays), options._replace(return_lse=True))
    out, lse = (shapes["q"], (6, 20)) if name == "packed" else (shapes["q"], (4, 6, 7))
    places = {"batch_index": (4,), "head_index": (6,)} if options.dropout_p else {}
    if name == "dropout":
        places = {"origin": (4,), **places}
    given: list[Any] = []
    monkeypatch.setattr(Rule, "spread", lambda self: lambda *arrays: given.extend(arrays))
    primitives._spread(primitives.forward_p, asked, context_of(arrays, (out, lse)))(*shapes)
    (rule,) = ruled
    assert dict(zip(rule.names, rule.shapes, strict=True)) == shapes | places
    assert rule.results == (("out", out), ("lse", lse))
    assert rule.layout == layout and rule.whole == ()
    assert given[: len(shapes)] == [*shapes]
    told = [array.tolist() for array in given[len(shapes) :]]
    assert told == [[1, 2, 3, 4]] * (name == "dropout") + [[*range(4)], [*range(6)]] * bool(places)


def test_gradients_that_are_asked_for_are_spread_by_their_names(ruled):
    shapes = {"q": (4, 7, 6, 8), "k": (4, 9, 2, 8), "v": (4, 9, 2, 8), "bias": (4, 6, 7, 9)}
    shapes |= {"sink": (6,), "rel_bias": (6, 5), "out": (4, 7, 6, 8), "lse": (4, 6, 7)}
    arrays = {name: (shape, F32) for name, shape in (shapes | {"dout": (4, 7, 6, 8)}).items()}
    for asked in product((False, True), repeat=2):
        static = Static(tuple(arrays), Options("dense", return_lse=True), True, *asked)
        names = ["q", "k", "v", *["bias"] * asked[0], "sink", *["rel_bias"] * asked[1]]
        made = tuple(shapes[name] for name in names)
        primitives._spread(primitives.backward_p, static, context_of(arrays, made))
        assert ruled.pop().results == tuple((f"d{n}", shapes[n]) for n in names)
