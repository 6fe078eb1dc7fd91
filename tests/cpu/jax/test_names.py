"""Attention by the names and arguments of other JAX functions."""

import inspect
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402
from heedful.jax import compat  # noqa: E402
from support.problems.grids import in_turns  # noqa: E402


def inputs(seqlen_q: int = 11, seqlen_k: int = 17) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = [(3, seqlen_q, 4, 8), (3, seqlen_k, 2, 8), (3, seqlen_k, 2, 8)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def close(one, other) -> None:
    """Within what another order of float32 sums, of up to 64 terms, may change."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        most = 64 * np.finfo(np.float32).eps * max(1.0, float(jnp.abs(b).max()))
        assert float(jnp.abs(a - b).max()) <= most


OURS, THEIRS = hj.dot_product_attention, jax.nn.dot_product_attention
LENGTHS: dict[str, Any] = {
    "query_seq_lengths": jnp.array([11, 3, 7], jnp.int32),
    "key_value_seq_lengths": jnp.array([17, 9, 1], jnp.int32),
}
CALLS: dict[str, dict] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 3, "scale": 0.3},
    "windows": {"local_window_size": (4, 1)},
    "bias": {"bias": jnp.linspace(-1, 1, 11 * 17).reshape(1, 1, 11, 17)},
    "mask": {"mask": jnp.arange(17)[None, None, None] % 3 != 1, "is_causal": True},
    "keys": {"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"]},
}


@pytest.mark.parametrize("name", in_turns(CALLS, each=2))
def test_dot_product_attention_is_jax_nns(name):
    """And so are its gradients: aligned top left, unlike flash_attn's functions."""
    more = CALLS[name]

    def loss(function):
        return lambda q, k, v: (function(q, k, v, **more) ** 2).sum()

    for transform in (lambda f: f, lambda f: jax.grad(f, (0, 1, 2))):
        got, want = (
            transform(loss(f)) for f in (hj.dot_product_attention, jax.nn.dot_product_attention)
        )
        close(jax.jit(got)(*inputs()), jax.jit(want)(*inputs()))


def test_rows_behind_a_query_length_are_zero():
    q, k, v = inputs()
    out, lse = hj.dot_product_attention(q, k, v, **LENGTHS, return_residual=True)
    want = jax.nn.dot_product_attention(q, k, v, **LENGTHS)
    for b, n in enumerate(LENGTHS["query_seq_lengths"].tolist()):
        close(out[b, :n], want[b, :n])
        assert not out[b, n:].any() and (lse[b, n:] == -jnp.inf).all()
        seen = LENGTHS["key_value_seq_lengths"][b]
        scores = np.einsum("ihd,jhd->ihj", q[b, :n], np.repeat(k[b, :seen], 2, 1)) / np.sqrt(8)
        close(lse[b, :n], jnp.asarray(np.log(np.exp(scores).sum(-1))))


def test_dot_product_attention_takes_arrays_without_a_batch_and_its_arguments_by_name():
    q, k, v = inputs()
    one = hj.dot_product_attention(q[0], k[0], v[0], is_causal=True)
    close(one, hj.dot_product_attention(q, k, v, is_causal=True)[0])
    ours, theirs = (
        [p for p in inspect.signature(f).parameters]
        for f in (hj.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert set(ours) <= set(theirs) | {"return_residual"}
    assert ours[:5] == theirs[:5]


@pytest.mark.parametrize("bad", [{"mask": jnp.ones((1, 1, 11, 17))}, {"local_window_size": (1,)}])
def test_dot_product_attention_names_what_is_wrong(bad):
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        hj.dot_product_attention(*inputs(), **bad)


def test_the_implementation_is_a_backend_of_ours():
    """It says why it cannot run here."""
    with pytest.raises(ValueError, match="backend must be .*, got 'xla'"):
        hj.dot_product_attention(*inputs(), implementation="xla")
    with pytest.raises(ValueError, match="backend=.portable. cannot run"):
        hj.dot_product_attention(*inputs(), implementation="portable")


def test_compat_returns_tuples_in_the_ports_order():
    q, k, v = inputs()
    bias = jnp.ones((11, 17))
    got = compat.flash_attn_func(q, k, v, 0.0, None, True, (5, 0), bias, None, True, True)
    want = hj.flash_attn_func(q, k, v, causal=True, window_size=(5, 0), bias=bias, return_lse=True)
    close(got, want)
    assert len(compat.flash_attn_func(q, k, v)) == 1
    drops = {"dropout_p": 0.5, "dropout_seed": 3, "return_attn_probs": True}
    out, probs = compat.flash_attn_func(q, k, v, **drops)
    assert probs.shape == (3, 4, 11, 17)
    with pytest.raises(ValueError, match="dropout_seed must be given"):
        compat.flash_attn_func(q, k, v, 0.5)


def test_compat_differentiates_the_log_sum_exp():
    q, k, v = inputs()
    grad = jax.grad(lambda q: compat.flash_attn_func(q, k, v, return_lse=True)[1].sum())(q)
    want = jax.grad(lambda q: hj.flash_attn_func(q, k, v, return_lse=True)[1].sum())(q)
    close(grad, want)
    assert float(jnp.abs(grad).max()) > 0


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_compat_names_the_operand_that_is_wrong(name):
    bounds = {f"cu_seqlens_{side}": jnp.arange(4, dtype=jnp.int32) for side in ("q", "kv")}
    for wrong, error in (("text", TypeError), (jnp.ones((3, 4)), ValueError)):
        given: dict[str, Any] = dict(zip("qkv", inputs(), strict=True)) | bounds | {name: wrong}
        with pytest.raises(error, match=f"^{name} must be"):
            compat.flash_attn_func(**given)


def test_compat_takes_packed_and_padded_sequences():
    q, k, v = inputs()
    rows = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
    bounds = [jnp.arange(4, dtype=jnp.int32) * n for n in (11, 17)]
    out, lse = compat.flash_attn_varlen(*rows, *bounds, return_lse=True, causal=True)
    whole = hj.flash_attn_func(q, k, v, causal=True)
    close(out.reshape(whole.shape), whole)
    used_q, used_k = jnp.array([0, 11, 14, 21]), jnp.array([0, 17, 26, 27])
    used = used_q.astype(jnp.int32), used_k.astype(jnp.int32)
    out, lse = compat.flash_attn_func(
        q, k, v, return_lse=True, cu_seqlens_q=used[0], cu_seqlens_kv=used[1]
    )
    close(out[1, :3], hj.flash_attn_func(q[1:2, :3], k[1:2, :9], v[1:2, :9])[0])
    assert not out[1, 3:].any() and lse.shape == (3, 4, 11)
