"""JAX's calls at the bounds of their arguments: what is just within is computed, what is outside is
refused by name, before anything is traced with it."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as typed  # noqa: E402

# What is passed here is more than the signatures say.
hj: Any = typed


def inputs(batch=2, seqlen=9, heads=4, heads_k=2) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = [(batch, seqlen, n, 8) for n in (heads, heads_k, heads_k)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def equal(one, other) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), one, other)


def with_gradients(*given, **options):
    def loss(*given):
        out = hj.flash_attn_func(*given, **options)
        return (out**2).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*given)


UNBOUNDED = {(-1, 2**31 - 1): (-1, -1), (2**31 - 1, -1): (-1, -1), (2**31, 3): (-1, 3)}
UNBOUNDED |= {(2**64, 2**64): (-1, -1), (3, -1, 2**40): (-1, -1), (2, 2**63, 1): (2, -1, 1)}


@pytest.mark.parametrize("window", UNBOUNDED, ids=str)
def test_a_side_of_a_window_that_no_length_reaches_is_no_bound(window):
    want = with_gradients(*inputs(), window_size=UNBOUNDED[window])
    equal(with_gradients(*inputs(), window_size=window), want)


def test_the_farthest_bound_and_no_bound_are_one():
    near = with_gradients(*inputs(), window_size=(2**29 - 1, 2**29 - 1, 2**29 - 1))
    equal(near, with_gradients(*inputs()))


def test_a_local_window_of_jax_nn_may_be_as_far():
    q, k, v = inputs()
    want = hj.dot_product_attention(q, k, v)
    equal(hj.dot_product_attention(q, k, v, local_window_size=2**40), want)


def packed(**options):
    bounds = jnp.array([0, 4, 9], jnp.int32)
    given = {"max_seqlen_q": 9, "max_seqlen_k": 9} | options
    return hj.flash_attn_varlen_func(*(t[0] for t in inputs()), bounds, bounds, **given)


FAR: list[tuple[Any, dict[str, Any]]] = [
    (packed, {"max_seqlen_q": 2**31}),
    (packed, {"max_seqlen_k": 2**64}),
    *(
        (lambda **o: hj.flash_attn_func(*inputs(), **o), {n: x})
        for n in ("softmax_scale", "softcap")
        for x in (1e39, 1e300, 10**400)
    ),
    (lambda **o: hj.flash_attn_func(*inputs(), **o), {"softcap": 1e-40}),
    (lambda **o: hj.flash_attn_func(*inputs(), **o), {"dropout_origin": (0, 0, 2**32, 0)}),
    (
        lambda **o: hj.flash_attn_with_kvcache(*inputs(), **o),
        {"cache_seqlens": 2**40},
    ),
]


@pytest.mark.parametrize(("function", "options"), FAR, ids=str)
def test_numbers_that_no_kernel_can_hold_are_refused_by_name(function, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} must .*, got "):
        function(**options)


def test_a_traced_origin_with_a_word_too_large_is_refused():
    def run(row):
        return hj.flash_attn_func(
            *inputs(), dropout_p=0.5, dropout_seed=1, dropout_origin=(2**32, 0, row, 0)
        )

    with pytest.raises(ValueError, match="dropout_origin must be .* got 4294967296"):
        jax.jit(run)(jnp.uint32(0))


def test_a_length_beyond_int32_in_an_array_is_that_of_a_full_cache():
    """Not that of its low bits."""
    q, k, v = inputs()
    want = hj.flash_attn_with_kvcache(q[:, :1], k, v)
    equal(hj.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=np.array(2**40 + 3)), want)
    with jax.enable_x64():
        length = jnp.array(2**40 + 3)
        equal(hj.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=length), want)


def test_pages_that_reach_past_int32_are_refused():
    q, pages = inputs()[0], jnp.zeros((1, 2**16, 1, 8), jnp.float32)
    table = jnp.zeros((2, 2**15), jnp.int32)
    with pytest.raises(ValueError, match="block_table must reach at most 2147483647 keys"):
        hj.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=1, block_table=table)
