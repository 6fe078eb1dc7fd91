"""A bias by relative position in JAX: equal to PyTorch's to the budget, taken by transforms and by
shard_map."""

from functools import partial

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import heedful.jax
from heedful.masks import t5_bias

ROWS, KEYS, COUNT = 37, 53, 17
_RNG = np.random.default_rng(0)
Q, K, V, REL = (
    jnp.asarray(_RNG.standard_normal(shape), jnp.float32)
    for shape in ((4, ROWS, 4, 16), (4, KEYS, 2, 16), (4, KEYS, 2, 16), (4, COUNT))
)


def gathered(rel_bias: jax.Array) -> jax.Array:
    entry = jnp.arange(ROWS)[:, None] + (KEYS - ROWS) - jnp.arange(KEYS)[None] + COUNT // 2
    return rel_bias[:, jnp.clip(entry, 0, COUNT - 1)]


def loss(rel_bias, q, k=K, v=V):
    return (heedful.jax.flash_attn_func(q, k, v, causal=True, rel_bias=rel_bias) ** 2).sum()


def of_bias(rel_bias, q):
    bias = gathered(rel_bias)[None]
    return (heedful.jax.flash_attn_func(q, K, V, causal=True, bias=bias) ** 2).sum()


def test_a_call_and_its_gradients_are_those_of_the_dense_bias():
    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(REL, Q)
    want = jax.jit(jax.value_and_grad(of_bias, (0, 1)))(REL, Q)
    # The same scores; float32 sums of the gradient's terms come in another order.
    assert got[0] == want[0] and (got[1][1] == want[1][1]).all()
    terms = 4 * ROWS * np.finfo(np.float32).eps
    sizes = jnp.abs(want[1][0]).max()
    assert (jnp.abs(got[1][0] - want[1][0]) <= terms * sizes).all()


def results_of_backward(function, *given) -> list[int]:
    """How many arrays each backward in a traced function gives."""
    equations = jax.make_jaxpr(function)(*given).jaxpr.eqns
    return [len(e.outvars) for e in equations if e.primitive.name.endswith("attention_backward")]


def test_its_gradient_is_a_result_only_where_it_is_asked_for():
    assert results_of_backward(jax.grad(loss, 1), REL, Q) == [3]
    assert results_of_backward(jax.grad(loss, (0, 1)), REL, Q) == [4]
    out, lse = heedful.jax.flash_attn_func(Q, K, V, rel_bias=REL, return_lse=True)
    given = (out, Q, K, V, out, lse)
    without = heedful.jax.attention_backward(*given, rel_bias=REL, rel_bias_grad=False)
    asked = heedful.jax.attention_backward(*given, rel_bias=REL)
    assert without.drel_bias is None and asked.drel_bias.shape == REL.shape
    assert (without.dq == asked.dq).all()


def test_vmap_over_queries_and_over_biases_gives_each_elements_own():
    several = jnp.stack([REL, REL + 1.0, -REL])
    each = jax.vmap(jax.grad(loss), (0, None))(several, Q)
    assert (each == jnp.stack([jax.grad(loss)(one, Q) for one in several])).all()
    queries = jnp.stack([Q, 2 * Q])
    each = jax.vmap(jax.grad(loss), (None, 0))(REL, queries)
    assert (each == jnp.stack([jax.grad(loss)(REL, q) for q in queries])).all()


@pytest.mark.skipif(len(jax.devices()) < 4, reason="takes four devices")
def test_shard_map_over_batch_and_heads_gives_the_whole_call():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("b", "h"))
    rows, heads = PartitionSpec("b", None, "h"), PartitionSpec("h")

    @partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, heads), out_specs=rows)
    def call(q, k, v, rel_bias):
        return heedful.jax.flash_attn_func(q, k, v, causal=True, rel_bias=rel_bias)

    want = heedful.jax.flash_attn_func(Q, K, V, causal=True, rel_bias=REL)
    # XLA adds up the terms of fewer heads in another order.
    most = float(KEYS * np.finfo(np.float32).eps * jnp.abs(V).max())
    np.testing.assert_allclose(jax.jit(call)(Q, K, V, REL), want, rtol=0, atol=most)
    got = jax.grad(lambda rel: (call(Q, K, V, rel) ** 2).sum())(REL)
    terms = 4 * ROWS * np.finfo(np.float32).eps
    want = jax.grad(loss)(REL, Q)
    assert (jnp.abs(got - want) <= terms * jnp.abs(want).max()).all()


def test_the_buckets_of_t5_are_those_of_pytorch():
    weight = _RNG.standard_normal((32, 4)).astype(np.float32)
    want = t5_bias(torch.from_numpy(weight)).numpy()
    np.testing.assert_array_equal(jax.jit(t5_bias)(jnp.asarray(weight)), want)
