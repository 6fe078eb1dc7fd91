"""What JAX's functions refuse is named, with what is wanted and what came; and what few calls ask
for is right."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import heedful.jax as hj
from heedful.core.call.arguments import ORIGIN
from heedful.jax import compat
from heedful.jax.api.dot_product import _window
from heedful.jax.api.merge import merge_into, merged
from heedful.jax.distributed.layouts import axes_of
from heedful.jax.operands.plain import origin_words

Q = jnp.zeros((2, 5, 4, 8))
LSE = jnp.zeros((2, 4, 5))
ROWS = jnp.zeros((5, 4, 8))
THREE: Any = (1, 2, 3)
ENDS = jnp.array([0, 2, 5], jnp.int32)


def traced(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    return lambda: jax.jit(function)(*arrays)


def merge_parts(**more: Any) -> Callable[[], Any]:
    part = {"out": Q, "lse": LSE, "part": Q[:, :2], "part_lse": LSE[..., :2], "begin": 0}
    return lambda: merge_into(**(part | more))


def origin(*parts: Any) -> Callable[[], Any]:
    return traced(lambda x: origin_words(tuple(x if p is ... else p for p in parts)), jnp.int32(1))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dims of dot products": (
        lambda: hj.dot_product_attention(Q, Q[0], Q),
        "query, key and value must all have 3 dims or 4, got (2, 5, 4, 8), (5, 4, 8), (2, 5, 4, 8)",
    ),
    "dims of no dot product": (
        lambda: hj.dot_product_attention(Q[0, 0], Q[0, 0], Q[0, 0]),
        "query, key and value must all have 3 dims or 4, got (4, 8), (4, 8), (4, 8)",
    ),
    "window of three sides": (
        lambda: hj.dot_product_attention(Q, Q, Q, local_window_size=THREE),
        "local_window_size must be an int or two, got (1, 2, 3)",
    ),
    "dims of parts": (
        lambda: hj.merge_attn_states(jnp.zeros((2, 3, 8)), jnp.zeros((2, 3))),
        "outs must be (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads,"
        " head_dim), got shape (2, 3, 8)",
    ),
    "a stack of no part": (
        lambda: hj.merge_attn_states(jnp.zeros((0, 5, 4, 8)), jnp.zeros((0, 4, 5))),
        "outs must hold at least one part, got 0",
    ),
    "a list of no part": (
        lambda: hj.merge_attn_states([], []),
        "outs must hold at least one part, got none",
    ),
    "unlike parts": (
        lambda: hj.merge_attn_states([ROWS, ROWS[1:]], [LSE[0], LSE[0]]),
        "outs must hold parts of one shape and dtype, (5, 4, 8) float32, got (4, 4, 8) float32",
    ),
    "parts of unlike dtypes": (
        lambda: hj.merge_attn_states([ROWS, ROWS.astype(jnp.bfloat16)], [LSE[0], LSE[0]]),
        "outs must hold parts of one shape and dtype, (5, 4, 8) float32, got (5, 4, 8) bfloat16",
    ),
    "rows that end behind the whole": (
        merge_parts(begin=4),
        "begin must be 0 to 3, as 2 rows come, got 4",
    ),
    "dims of a whole": (
        merge_parts(out=Q[0, 0]),
        "out must be (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), got shape"
        " (4, 8)",
    ),
    "a part of another width": (
        merge_parts(part=Q[:, :2, :, :7]),
        "part must have shape (batch, rows, heads, head_dim) of out = (2, 2, 4, 8), got (2, 2, 4,"
        " 7)",
    ),
    "a log-sum-exp of other rows": (
        merge_parts(part_lse=LSE[..., :3]),
        "part_lse must have shape (batch, heads, rows) = (2, 4, 2), got (2, 4, 3)",
    ),
    "a whole of bfloat16": (
        merge_parts(out=Q.astype(jnp.bfloat16)),
        "out must be float32, got bfloat16",
    ),
    "probabilities of packed sequences": (
        lambda: compat.flash_attn_func(
            Q, Q, Q, return_attn_probs=True, cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS
        ),
        "cu_seqlens_q must be None with return_attn_probs, got an array",
    ),
    "one axis of two": (
        lambda: axes_of(("a", "b", "c"), "heads x ring", ("heads x ring",)),
        "axis_name must be the axes of the ring and of heads, got ('a', 'b', 'c')",
    ),
    "a traced origin of another shape": (
        origin(0, 0, ...),
        f"dropout_origin must be {ORIGIN}, got a traced uint32 (3,)",
    ),
    "an origin with a part below 0": (
        origin(0, -1, ..., 0),
        f"dropout_origin must be {ORIGIN}, got -1",
    ),
    "an origin with a part above 32 bits": (
        origin(0, 2**32, ..., 0),
        f"dropout_origin must be {ORIGIN}, got 4294967296",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_full(name):
    call, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        call()


@pytest.mark.parametrize(
    ("size", "window"), [(None, (-1, -1)), (3, (3, 3)), ((4, 2), (4, 2)), ([0, 7], (0, 7))]
)
def test_a_local_window_has_one_side_or_two(size, window):
    assert _window(size) == window


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)])
@pytest.mark.parametrize("has_sink", [False, True])
def test_parts_with_rests_are_merged_by_the_sums_of_both(shape, has_sink):
    """One float32 holds no log-sum-exp near 1e6 as well as its rest; and an empty part has none."""
    rng = np.random.default_rng(0)
    lse = 1e6 + rng.integers(-3, 3, (3, *shape)).astype(np.float32)
    rest = rng.uniform(-0.03, 0.03, (3, *shape)).astype(np.float32)
    lse[1, ..., 2], lse[:, ..., 4] = -np.inf, -np.inf
    outs = rng.standard_normal((3, *shape[:-2], shape[-1], shape[-2], 8)).astype(np.float32)
    sink = np.array([1e6 + 1, 1e6 - 2, 0.0], np.float32) if has_sink else None
    given: Any = outs, lse, sink, rest
    arrays: list[Any] = [None if x is None else jnp.asarray(x) for x in given]
    out, found = merged(arrays[0], arrays[1], arrays[2], arrays[3])
    exact = lse.astype(np.float64) + rest
    exact[np.isneginf(lse)] = -np.inf
    beside = exact.max(0)
    if sink is not None:
        beside = np.maximum(beside, sink[:, None])
    beside = np.where(np.isneginf(beside), 0.0, beside)
    weights = np.exp(exact - beside)
    total = weights.sum(0) + (0.0 if sink is None else np.exp(sink[:, None] - beside))
    with np.errstate(divide="ignore"):
        want = np.where(total == 0, -np.inf, beside + np.log(total))
    share = weights / np.where(total == 0, 1.0, total)
    wanted = (np.swapaxes(share, -1, -2)[..., None] * outs).sum(0)
    eps = 2.0**-23
    assert np.abs(np.asarray(out) - wanted).max() <= 8 * eps * np.abs(outs).max()
    assert (np.isneginf(want) == np.isneginf(found)).all()
    finite = np.isfinite(want)
    apart = np.asarray(found, np.float64)[finite] - want[finite]
    assert np.abs(apart).max() <= eps * 1e6


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_are_rotated_at_their_positions_where_no_token_is_appended(interleaved, causal):
    """As beside an append of the same tokens, which the cache then holds; under a causal mask each
    query has a position of its own."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, 2, 8)), jnp.float32) for _ in range(3))
    caches: Any = [jnp.asarray(rng.standard_normal((2, 20, 2, 8)), jnp.float32) for _ in "kv"]
    angles = np.arange(20)[:, None] / 10.0 ** np.arange(4)
    tables = {"rotary_cos": jnp.asarray(np.cos(angles), jnp.float32)}
    tables |= {"rotary_sin": jnp.asarray(np.sin(angles), jnp.float32)}
    more: Any = {"causal": causal, "rotary_interleaved": interleaved, **tables}
    held = jnp.array([4, 9], jnp.int32)
    empty = k[:, :0]
    found, *_ = hj.flash_attn_with_kvcache(
        q, caches[0], caches[1], empty, empty, cache_seqlens=held, **more
    )
    places = np.asarray(held)[:, None] + (np.arange(3) if causal else np.zeros(3, int))
    cos, sin = (np.asarray(tables[name])[places][:, :, None] for name in sorted(tables))
    x = np.asarray(q)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :4], x[..., 4:])
    turned = first * cos - second * sin, first * sin + second * cos
    whole = np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)
    want, *_ = hj.flash_attn_with_kvcache(
        jnp.asarray(whole), caches[0], caches[1], cache_seqlens=held, causal=causal
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=16 * 2.0**-23)
