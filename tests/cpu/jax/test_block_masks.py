"""Block masks in JAX: made under jit, taken by transforms, equal to the mask that they were made
of."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import heedful.jax
from heedful import BlockMask
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.jax.tiled.tiles import Sequence
from heedful.masks.block_mask import block_operands, is_checked
from support.problems.grids import slow_but

SIDE, ROWS, KEYS = 32, 70, 100


def inputs() -> tuple:
    draw = np.random.default_rng(0).standard_normal
    q = jnp.asarray(draw((2, ROWS, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(draw((2, KEYS, 2, 16)), jnp.float32) for _ in "kv")
    return q, k, v


def drawn(heads: int = 1, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 4, (2, heads, 3, 4)).repeat(SIDE, 2).repeat(SIDE, 3)[..., :ROWS, :KEYS]
    return jnp.asarray(
        np.select([kind == 0, kind == 1], [False, True], rng.random(kind.shape) < 0.4)
    )


def loss(q, k, v, **mask):
    return (heedful.jax.flash_attn_func(q, k, v, **mask) ** 2).sum()


@pytest.mark.parametrize("heads", slow_but({4}, (1, 4)))
def test_a_block_mask_and_its_gradients_are_those_of_the_mask_that_it_was_made_of(heads):
    mask = drawn(heads)
    block_mask = BlockMask.of(mask, side=SIDE)
    assert (block_mask.to_dense() == mask).all()
    by_tiles = jax.jit(
        jax.value_and_grad(lambda q, k, v, m: loss(q, k, v, block_mask=m), (0, 1, 2))
    )
    got = by_tiles(*inputs(), block_mask)
    want = jax.value_and_grad(partial(loss, bias=mask), (0, 1, 2))(*inputs())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


def test_a_block_mask_over_no_keys_shows_none_and_gradients_are_0():
    q, k, v = inputs()
    block_mask = BlockMask.of(drawn()[..., :0], side=SIDE)
    call = partial(heedful.jax.flash_attn_func, block_mask=block_mask, return_lse=True)
    out, lse = call(q, k[:, :0], v[:, :0])
    assert out.shape == q.shape and not out.any() and jnp.isneginf(lse).all()
    grads = jax.grad(partial(loss, block_mask=block_mask), (0, 1, 2))(q, k[:, :0], v[:, :0])
    assert [g.shape for g in grads] == [q.shape, k[:, :0].shape, v[:, :0].shape]
    assert not grads[0].any()


def test_makers_with_a_capacity_run_under_jit_and_say_where_it_was_too_small():
    mask = drawn()
    make = jax.jit(lambda m, count: BlockMask.of(m, side=SIDE, capacity=count), static_argnums=1)
    enough, few = make(mask, 20), make(mask, 2)
    assert (enough.to_dense() == mask).all() and not enough.overflow
    assert few.overflow and not (few.to_dense() & ~mask).any()
    with pytest.raises(ValueError, match="capacity must be at least"):
        few.check()
    sizes = {"seqlen_q": ROWS, "seqlen_k": KEYS, "batch": 2, "side": SIDE, "like": mask}
    of_function = BlockMask.of(lambda b, h, i, j: mask[b, h, i, j], **sizes)
    assert (of_function.to_dense() == mask).all()


def test_vmap_maps_the_mask_alone():
    q, k, v = inputs()
    masks = [BlockMask.of(drawn(seed=seed), side=SIDE, capacity=20) for seed in (0, 1)]
    both = jax.tree.map(lambda *a: jnp.stack(a), *masks)
    got = jax.vmap(lambda m: heedful.jax.flash_attn_func(q, k, v, block_mask=m))(both)
    for one, mask in zip(got, masks, strict=True):
        want = heedful.jax.flash_attn_func(q, k, v, block_mask=mask)
        np.testing.assert_allclose(one, want, atol=1e-6)


def test_lists_by_hand_run_under_jit():
    counts = jnp.array([[[2, 0, 1]]], jnp.int32)
    tiles = jnp.array([[[[3, 1], [9, -9], [0, 7]]]], jnp.int32)
    make = jax.jit(partial(BlockMask.of_lists, seqlen_q=ROWS, seqlen_k=KEYS, side=SIDE))
    want = np.zeros((1, 1, ROWS, KEYS), bool)
    want[..., :32, 96:] = want[..., :32, 32:64] = want[..., 64:, :32] = True
    np.testing.assert_array_equal(make(counts, tiles).to_dense(), want)


def test_packed_sequences_and_their_gradients_are_those_of_the_sequences_apart():
    q, k, v = inputs()
    mask = drawn(4)
    mask = mask.at[1, ..., 75:].set(False)
    bounds = [jnp.array(b, jnp.int32) for b in ([0, ROWS, 2 * ROWS], [0, KEYS, KEYS + 75])]
    block_mask = BlockMask.of(mask, side=SIDE)

    def packed(q, k, v):
        q, k, v = (t.reshape(-1, *t.shape[2:])[:175] for t in (q, k, v))
        call = partial(heedful.jax.flash_attn_varlen_func, q, k, v, *bounds)
        return (call(ROWS, KEYS, block_mask=block_mask) ** 2).sum()

    got = jax.jit(jax.value_and_grad(packed, (0, 1, 2)))(*inputs())
    want = jax.value_and_grad(partial(loss, bias=mask), (0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("appends", [False, True])
def test_a_cache_of_pages_takes_a_mask(appends):
    q, k, v = inputs()
    mask = drawn()
    pages = [t.reshape(10, 20, *t.shape[2:]) for t in (k, v)]
    table = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    lengths = jnp.array([KEYS, 60], jnp.int32)
    new = [t[:, -2:] for t in (k, v)] if appends else [None, None]
    call = heedful.jax.flash_attn_with_kvcache
    used = lengths - 2 if appends else lengths
    more = {"cache_seqlens": used, "block_table": table}
    step = jax.jit(lambda q, pages, m: call(q, *pages, *new, **more, block_mask=m))
    got, *caches = step(q, pages, BlockMask.of(mask, side=SIDE))
    whole = [t.reshape(2, KEYS, *t.shape[2:]) for t in caches]
    want = heedful.jax.flash_attn_func(q, *whole, bias=mask, seqused_k=lengths)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_mask_of_other_lengths_is_refused():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="block_mask must be of 70 queries and 99 keys"):
        heedful.jax.flash_attn_func(
            q, k[:, 1:], v[:, 1:], block_mask=BlockMask.of(drawn(), side=SIDE)
        )


def as_jax(mask: np.ndarray, **more: Any) -> BlockMask:
    """By PyTorch, which makes it without compiling."""
    torch = pytest.importorskip("torch")
    made = BlockMask.of(torch.from_numpy(np.array(mask)), side=SIDE, **more)
    return jax.tree.map(lambda t: jnp.asarray(t.numpy()), made, is_leaf=torch.is_tensor)


@pytest.mark.parametrize("batch, heads", [(2, 4), (1, 1)])
def test_a_tile_of_scores_reads_its_own_part_of_the_lists(batch, heads):
    mask = np.asarray(drawn(heads))[:batch]
    q, k, v = inputs()
    problem = AttentionProblem.dense(
        2, ROWS, KEYS, 4, 2, head_dim=16, head_dim_v=16, dtype="float32", block_mask=SIDE
    )
    x = Operands(q, k, v, **as_jax(mask).operands(ROWS, KEYS, ""))
    listed = jax.jit(lambda b, *places: Sequence(problem, x, b)._listed(*places))
    for b in range(2):
        for row, col in ((0, 0), (40, 17)):
            got = listed(jnp.int32(b), row + jnp.arange(30), col + jnp.arange(83))
            want = mask[min(b, batch - 1), :, row : row + 30, col : col + 83]
            np.testing.assert_array_equal(got, want)


def test_lists_are_looked_at_where_the_setting_asks_and_nothing_traces(monkeypatch):
    counts, tiles = np.array([[[1, 1, 1]]]), jnp.array([[[[3], [4], [0]]]])
    more = [0, 0, 1]
    make = partial(BlockMask.of_lists, seqlen_q=ROWS, seqlen_k=KEYS, side=SIDE)
    few = as_jax(np.asarray(drawn()), capacity=2)
    q, k, v = inputs()
    monkeypatch.delenv("HEEDFUL_CHECK_PAGES", raising=False)
    assert not is_checked(tiles)
    assert block_operands(few, q, k).keys() == {"block_rows", "block_keys", "block_bits"}
    monkeypatch.setenv("HEEDFUL_CHECK_PAGES", "1")
    assert is_checked(tiles)
    with pytest.raises(ValueError, match="tiles must be from 0 to 3, got 4 in entry 0 of row 1 "):
        make(jnp.asarray(counts), tiles)
    with pytest.raises(ValueError, match="counts must be from 0 to 1, got 2 in row 2 of .* 0$"):
        make(jnp.asarray(counts + more), tiles)
    with pytest.raises(ValueError, match="capacity must be at least"):
        block_operands(few, q, k)
    assert block_operands(few, q, k, lambda array: False)
    jax.make_jaxpr(make)(jnp.asarray(counts), tiles)
    jax.make_jaxpr(lambda mask: block_operands(mask, q, k))(few)
    assert block_operands(None, q, k) == {} == block_operands(few, None, k)
