"""Lengths and tables of int64 are those of int32, in JAX too."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402

Q, K, V = (jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 2, 16))) for _ in range(3))


def packed(dtype: Any, own: Any) -> Any:
    q, k, v = (t.astype(jnp.float32).reshape(16, 2, 16) for t in (Q, K, V))
    cu = own.asarray([0, 5, 16], dtype)

    def loss(q):
        return (hj.flash_attn_varlen_func(q, k, v, cu, cu, 11, 11, causal=True) ** 2).sum()

    return jax.value_and_grad(loss)(q)


def step(dtype: Any, own: Any) -> Any:
    q, k, v = (t.astype(jnp.float32) for t in (Q, K, V))
    rows = {
        "cache_batch_idx": own.asarray([1, 0], dtype),
        "cache_leftpad": own.asarray([1, 2], dtype),
    }
    lengths = own.asarray([5, 6], dtype)
    return hj.flash_attn_with_kvcache(
        q[:, :1], k, v, k[:, :1], v[:, :1], cache_seqlens=lengths, **rows
    )


def lengths(dtype: Any, own: Any) -> Any:
    q, k, v = (t.astype(jnp.float32) for t in (Q, K, V))
    return hj.dot_product_attention(q, k, v, key_value_seq_lengths=own.asarray([5, 6], dtype))


@pytest.mark.parametrize("own", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("function", [packed, step, lengths])
def test_results_are_those_of_int32_to_the_bit(function, own):
    with jax.enable_x64(True):
        got, want = function("int64", own), function("int32", own)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one == other).all()
