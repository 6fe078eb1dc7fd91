"""Attention over four devices that each have some of the tokens gives what one device gives."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import heedful.jax
from heedful.jax.distributed import LAYOUTS, STRATEGIES, attention, positions, shard, unshard
from support.jax_context import AXES, AXIS, DEVICES, mesh_of, results
from support.problems.budget import check
from support.problems.cases import Case, build

BASE = Case(seqlen_q=64, seqlen_k=64, heads_q=4, heads_k=2, head_dim=16, lse_grad=True)
SPREAD = PartitionSpec(None, AXIS)
DOCUMENTS = replace(BASE, varlen="qk", batch=5, lens_q=(37, 1, 0, 20, 9), lens_k=(37, 1, 0, 20, 9))
CASES = {
    "causal": replace(BASE, causal=True),
    "full": BASE,
    "window": replace(BASE, window=(19, 5)),
    "causal window and first keys": replace(BASE, causal=True, window=(9, 0, 3)),
    "GQA 8/2": replace(BASE, causal=True, heads_q=8),
    "sink and softcap": replace(BASE, causal=True, sink=True, softcap=3.0),
    "ALiBi": replace(BASE, alibi="h"),
    "dropout": replace(BASE, causal=True, dropout_p=0.3),
    "bfloat16": replace(BASE, causal=True, dtype="bfloat16", sink=True),
    "key ranges": replace(BASE, key_ranges=2, causal=True),
    "documents": replace(DOCUMENTS, causal=True),
    "documents and a window": replace(DOCUMENTS, window=(7, 0), sink=True, alibi="h"),
    "documents, full, bfloat16": replace(DOCUMENTS, dtype="bfloat16", softcap=4.0),
    "uneven heads": replace(
        BASE, causal=True, heads_q=10, heads_k=5, sink=True, alibi="h", key_ranges=2
    ),
    "first keys of documents": replace(DOCUMENTS, window=(4, 0, 3), causal=True),
    "first keys and dropout": replace(BASE, causal=True, window=(9, 0, 3), dropout_p=0.2),
}


# By default "gather" in its first layout, then each other strategy, and each way in which heads are
# spread. What is elsewhere has another layout or strategy.
ELSEWHERE = {"window", "sink and softcap", "ALiBi", "documents, full, bfloat16", "bfloat16"}
# Others are causal or full, too, and hold documents.
ELSEWHERE |= {"causal", "full", "documents", "GQA 8/2"}
# First keys have a test below, and documents a ring.
ELSEWHERE |= {"causal window and first keys", "documents and a window"}
SHORT = [
    *(("gather", "zigzag", name) for name in [*CASES][:13] if name not in ELSEWHERE),
    ("gather", "contiguous", "window"),
    ("gather", "contiguous", "documents, full, bfloat16"),
    ("ring", "contiguous", "documents and a window"),
    ("heads", "zigzag", "uneven heads"),
    # Two devices have the same KV head.
    ("heads", "contiguous", "GQA 8/2"),
    ("heads x ring", "zigzag", "sink and softcap"),
]
GRID = [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in product(STRATEGIES, LAYOUTS, CASES)
    if each not in SHORT
]


@pytest.mark.parametrize(("strategy", "layout", "name"), [*SHORT, *GRID])
def test_it_gives_what_one_device_gives(strategy, layout, name):
    built = build(CASES[name])
    # Both ways in which shard_map may be told what devices share.
    check(built, results(built, layout, check_vma=layout == "zigzag", strategy=strategy))


def test_gradients_of_keys_are_summed_in_float32():
    """The derivative of a gather would sum them in bfloat16."""
    text = str(jax.make_jaxpr(_gradient_of_keys())(*_some()))
    sums = re.findall(r"(\w+)\[[\d,]*\]\S* = reduce_scatter", text)
    assert sums == ["f32", "f32"]


def _some():
    shape = (1, 64, 2, 16)
    return tuple(jnp.ones(shape, jnp.bfloat16) for _ in range(3))


def _mapped(function, count: int, out: Any = SPREAD):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,))
    return jax.shard_map(function, mesh=mesh, in_specs=(SPREAD,) * count, out_specs=out)


def _gradient_of_keys():
    def loss(q, k, v):
        return attention(q, k, v, AXIS, causal=True).astype(jnp.float32).sum()

    return _mapped(jax.grad(loss, (1, 2)), 3, (SPREAD,) * 2)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_tokens_come_back_in_their_order(layout):
    tokens = jnp.arange(3 * 48).reshape(3, 48)
    spread = shard(tokens, DEVICES, layout)
    assert (unshard(spread, DEVICES, layout) == tokens).all()

    def where(x):
        return x, jnp.broadcast_to(positions(x.shape[1], AXIS, layout), x.shape)

    own, places = _mapped(where, 1, (SPREAD,) * 2)(spread)
    assert (own % 48 == places).all()


def test_over_two_axes_each_token_has_its_place():
    mesh, axes, devices = mesh_of("heads x ring")
    spec = PartitionSpec(None, AXES)

    def where(x):
        return jnp.broadcast_to(positions(x.shape[1], axes), x.shape)

    tokens = jnp.arange(64)[None]
    found = jax.shard_map(where, mesh=mesh, in_specs=spec, out_specs=spec)(shard(tokens, devices))
    assert (unshard(found, devices) == tokens).all()


def test_each_device_of_a_zigzag_has_as_many_visible_pairs():
    spread = np.asarray(shard(jnp.arange(64)[None], DEVICES)).reshape(DEVICES, -1)
    assert len({int((part + 1).sum()) for part in spread}) == 1


DOCUMENT: dict[str, Any] = {"cu_seqlens": jnp.array([0, 64]), "max_seqlen": 64}


def test_a_wrong_argument_is_named():
    q, k, v = _some()
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ((q, k, v), {"layout": "ring"}, "layout must be 'zigzag' or 'contiguous', got 'ring'"),
        ((q[:, :60], k[:, :60], v[:, :60]), {}, "q must have a multiple of 8 tokens"),
        ((q, k, v), {"max_seqlen": 3}, "max_seqlen must be given with cu_seqlens"),
        ((q, k[:, :32], v[:, :32]), {}, "k must have q's tokens"),
        ((q, k, v), {"strategy": "rings"}, "strategy must be one of"),
        ((q, k[:, :, 0], v), {}, r"k must be \(batch, tokens, heads, head_dim\), got shape"),
        ((q, k, v), DOCUMENT, r"q must be \(tokens, heads, head_dim\), got shape \(1, 16, 2, 16\)"),
        ((q, k, v), {"strategy": "heads x ring"}, "axis_name must be the axes of the ring"),
        ((q, k, v), {"strategy": "heads"}, "cannot spread 2 query heads"),
        ((q, k, v), {"strategy": "ring", "numerics": "invariant"}, "numerics must be 'fast'"),
    )
    for arguments, more, message in wrong:

        def call(q, k, v, more=more):
            return attention(q, k, v, AXIS, **more)

        with pytest.raises(ValueError, match=message):
            _mapped(call, 3)(*arguments)


def test_documents_take_no_dropout():
    q = jnp.ones((64, 2, 16))
    some: Any = {**DOCUMENT, "dropout_p": 0.5}
    with pytest.raises(ValueError, match="^dropout_p must be 0 with cu_seqlens, got 0.5$"):
        attention(q, q, q, AXIS, **some)


def test_inside_of_jit_and_checkpoint_it_is_the_same():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 32, 2, 8)) for i in range(3))
    whole = jax.grad(
        lambda *xs: (heedful.jax.flash_attn_func(*xs, causal=True) ** 2).sum(), (0, 1, 2)
    )(q, k, v)

    def loss(*xs):
        out = jax.checkpoint(lambda q, k, v: attention(q, k, v, AXIS, causal=True))(*xs)
        return jax.lax.psum((out**2).sum(), AXIS)

    mapped = _mapped(loss, 3, PartitionSpec())
    spread = [shard(x, DEVICES) for x in (q, k, v)]
    for grad, want in zip(jax.jit(jax.grad(mapped, (0, 1, 2)))(*spread), whole, strict=True):
        np.testing.assert_allclose(unshard(grad, DEVICES), want, atol=2e-6)
