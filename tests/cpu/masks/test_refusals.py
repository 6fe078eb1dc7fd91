"""What makers of masks refuse is refused in a sentence that names the argument and what was got."""

from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as heedful
from heedful import BlockMask, masks
from support.golden.refusals import each_refusal

text: Any = "text"
ids = torch.zeros(2, 4, dtype=torch.int32)
MASK = torch.ones(1, 1, 40, 70, dtype=torch.bool)
COUNTS = torch.ones(1, 1, 2, dtype=torch.int32)
TILES = COUNTS[..., None]
Q, K = torch.zeros(1, 40, 2, 8), torch.zeros(1, 70, 2, 8)


def of(mask: Any = MASK, **more: Any):
    return lambda: BlockMask.of(mask, **{"side": 32, **more})


def shows(b, h, i, j):
    return i >= j


def function(mask: Any = shows, **more: Any):
    return of(mask, **{"seqlen_q": 40, "seqlen_k": 70, "like": ids, **more})


def lists(counts: Any = COUNTS, tiles: Any = TILES, **more: Any):
    sizes = {"seqlen_q": 40, "seqlen_k": 70, "side": 32}
    return lambda: BlockMask.of_lists(counts, tiles, **{**sizes, **more})


def called(q: Any = Q, k: Any = K, mask: Any = None):
    made = BlockMask.of(MASK, side=32) if mask is None else mask
    return lambda: heedful.flash_attn_func(q, k, k, block_mask=made)


def t5(*shape: int, **more: Any):
    return lambda: masks.t5_bias(torch.zeros(shape), **more)


def flash(array: Any, **more):
    return lambda: masks.from_flashmask(array, **more)


TYPES = [
    (lambda: masks.documents(ids * 1j), "ids must be ints, got torch.complex64"),
    (
        lambda: masks.documents(np.zeros((2, 4), int)),
        "ids must be a torch.Tensor or a jax.Array, got ndarray",
    ),
    (
        lambda: masks.documents(position_ids=ids * 0.5),
        "position_ids must be ints, got torch.float32",
    ),
    (
        lambda: masks.documents(position_ids=text),
        "position_ids must be a torch.Tensor or a jax.Array, got str",
    ),
    (lambda: masks.prefix(ids[0] * 0.5, 4), "lengths must be ints, got torch.float32"),
    (lambda: masks.prefix(text, 4), "lengths must be a torch.Tensor or a jax.Array, got str"),
    (lambda: masks.prefix(ids[0], text), "seqlen must be an int, got str"),
    (lambda: masks.prefix(ids[0], True), "seqlen must be an int, got bool"),
    (lambda: masks.chunks(text, 4, like=ids), "size must be an int, got str"),
    (lambda: masks.chunks(2, 4, like=text), "like must be a torch.Tensor or a jax.Array, got str"),
    (lambda: masks.padding(ids), "real must be bool, got torch.int32"),
    (lambda: masks.padding(text), "real must be a torch.Tensor or a jax.Array, got str"),
    (
        lambda: masks.local_global(0, 0, 4, like=text),
        "like must be a torch.Tensor or a jax.Array, got str",
    ),
    (flash(text), "startend_row_indices must be a torch.Tensor or a jax.Array, got str"),
    (flash(torch.zeros(1, 1, 4, 1)), "startend_row_indices must be ints, got torch.float32"),
    (t5(4, 2, max_distance=2.5), "max_distance must be an int, got float"),
    (lambda: masks.t5_bias(text), "weight must be a torch.Tensor or a jax.Array, got str"),
    (of(side="32"), "side must be an int, got str"),
    (of(capacity=1.5), "capacity must be an int, got float"),
    (function(seqlen_k=None), "seqlen_k must be an int, got NoneType"),
    (function(like=None), "like must be a torch.Tensor or a jax.Array, got NoneType"),
    (
        function(mask=lambda b, h, i, j: i - j),
        "mask must return a bool array of (b, h, i, j), got torch.int64",
    ),
    (function(mask=lambda b, h, i, j: 3), "mask must return a bool array of (b, h, i, j), got int"),
    (of(MASK.int()), "mask must be bool, got torch.int32"),
    (of(text), "mask must be a torch.Tensor or a jax.Array, got str"),
    (lists(scattered=2), "scattered must be a bool, got int (2)"),
    (lists(tiles=text), "tiles must be a torch.Tensor or a jax.Array, got str"),
    (lists(tiles=TILES * 0.5), "tiles must be ints, got torch.float32"),
    (lists(counts=COUNTS * 0.5), "counts must be ints, got torch.float32"),
    (
        called(mask=MASK),
        "block_mask must be a heedful.BlockMask, which BlockMask.of makes of other"
        " masks, got Tensor",
    ),
    (called(q=text), "q must be a torch.Tensor, got str ('text')"),
    (called(k=text), "k must be a torch.Tensor, got str ('text')"),
]

VALUES = [
    (lambda: masks.documents(ids[0]), "ids must be (batch, seqlen), got shape (4,)"),
    (
        lambda: masks.documents(position_ids=ids[None]),
        "position_ids must be (batch, seqlen), got shape (1, 2, 4)",
    ),
    (lambda: masks.prefix(ids, 4), "lengths must be (batch), got shape (2, 4)"),
    (lambda: masks.prefix(ids[0], -1), "seqlen must be >= 0, got -1"),
    (lambda: masks.chunks(0, 4, like=ids), "size must be >= 1, got 0"),
    (lambda: masks.chunks(2, -1, like=ids), "seqlen must be >= 0, got -1"),
    (lambda: masks.padding(ids[0] > 0), "real must be (batch, seqlen), got shape (4,)"),
    (lambda: masks.local_global(-1, 0, 4, like=ids), "left must be >= 0, got -1"),
    (lambda: masks.local_global(0, -1, 4, like=ids), "first must be >= 0, got -1"),
    (lambda: masks.local_global(0, 0, -1, like=ids), "seqlen must be >= 0, got -1"),
    (flash(ids), "startend_row_indices must be (batch, heads, seqlen, n), got shape (2, 4)"),
    (
        flash(torch.zeros(1, 1, 4, 3, dtype=torch.int32)),
        "startend_row_indices must have 1 or 2 numbers a key with causal=True, got 3",
    ),
    (
        flash(torch.zeros(1, 1, 4, 1, dtype=torch.int32), causal=False),
        "startend_row_indices must have 2 or 4 numbers a key with causal=False, got 1",
    ),
    (
        flash(torch.zeros(1, 1, 4, 4, dtype=torch.int32)),
        "startend_row_indices must have 1 or 2 numbers a key with causal=True, got 4",
    ),
    (t5(8), "weight must be (num_buckets, heads), got shape (8,)"),
    (t5(3, 2), "weight must have an even number of at least 4 buckets, got 3"),
    (t5(5, 2), "weight must have an even number of at least 4 buckets, got 5"),
    (t5(1, 2, bidirectional=False), "weight must have at least 2 buckets, got 1"),
    (
        t5(4, 2, max_distance=1),
        "max_distance must be > 1, as so many distances have a bucket each, got 1",
    ),
    (
        t5(2, 2, bidirectional=False, max_distance=1),
        "max_distance must be > 1, as so many distances have a bucket each, got 1",
    ),
    (t5(4, 2, max_distance=0), "max_distance must be >= 1, got 0"),
    (of(side=48), "side must be 32, 64, 128, got 48"),
    (of(side=0), "side must be >= 1, got 0"),
    (of(capacity=0), "capacity must be >= 1, got 0"),
    (function(seqlen_q=-1), "seqlen_q must be >= 0, got -1"),
    (function(batch=0), "batch must be >= 1, got 0"),
    (function(heads=0), "heads must be >= 1, got 0"),
    (of(seqlen_q=40), "seqlen_q must be None with an array, got 40"),
    (of(seqlen_k=70), "seqlen_k must be None with an array, got 70"),
    (of(batch=2), "batch must be 1 with an array, got 2"),
    (of(heads=2), "heads must be 1 with an array, got 2"),
    (
        of(MASK[0]),
        "mask must be (batch or 1, heads or 1, seqlen_q, seqlen_k), got shape (1, 40, 70)",
    ),
    (lists(side=16), "side must be 32, 64, 128, got 16"),
    (lists(seqlen_q=-1), "seqlen_q must be >= 0, got -1"),
    (lists(seqlen_k=-1), "seqlen_k must be >= 0, got -1"),
    (
        lists(tiles=COUNTS),
        "tiles must be (batch or 1, heads or 1, tiles of queries, n), got shape (1, 1, 2)",
    ),
    (
        lists(seqlen_q=33 * 3),
        "counts and tiles must have 4 tiles of queries, as 99 queries in tiles of 32"
        " are, and the same batch and heads, got shapes (1, 1, 2) and (1, 1, 2, 1)",
    ),
    (
        lists(counts=COUNTS[..., :1]),
        "counts and tiles must have 2 tiles of queries, as 40 queries in tiles of 32"
        " are, and the same batch and heads, got shapes (1, 1, 1) and (1, 1, 2, 1)",
    ),
    (
        lists(counts=COUNTS.expand(1, 2, 2)),
        "counts and tiles must have 2 tiles of queries, as 40 queries in tiles of 32"
        " are, and the same batch and heads, got shapes (1, 2, 2) and (1, 1, 2, 1)",
    ),
    (
        lists(counts=COUNTS * 2),
        "counts must be from 0 to 1, got 2 in row 0 of batch entry 0, head 0",
    ),
    (lists(counts=-COUNTS), "counts must be from 0 to 1, got -1 in row 0 of batch entry 0, head 0"),
    (
        lists(tiles=TILES * 3),
        "tiles must be from 0 to 2, got 3 in entry 0 of row 0 of batch entry 0, head 0",
    ),
    (
        lists(tiles=-TILES),
        "tiles must be from 0 to 2, got -1 in entry 0 of row 0 of batch entry 0, head 0",
    ),
    (
        called(q=Q[:, :39]),
        "block_mask must be of 39 queries and 70 keys, as q and k have, got one of 40 and 70",
    ),
    (
        called(k=K[:, 1:]),
        "block_mask must be of 40 queries and 69 keys, as q and k have, got one of 40 and 70",
    ),
    (
        called(q=torch.zeros(4)),
        "block_mask must be of 0 queries and 70 keys, as q and k have, got one of 40 and 70",
    ),
]


@each_refusal(TYPES, VALUES)
def test_what_is_refused_is_named_with_what_was_got(call, error, said):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == said
