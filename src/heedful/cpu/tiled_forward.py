"""Tiled forward: online softmax over key tiles (Milakov & Gimelshein 2018; FlashAttention-2, Dao
2023), each step one batched matmul or one pass over a tile.

Dimension key as in blocks.py.
"""

import torch

from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem
from heedful.cpu.blocks import Block, blocks, key_tiles, query_tiles, worth_threads
from heedful.cpu.scores import Tiles, exp_
from heedful.cpu.workers import for_each
from heedful.reference.philox import keep_scale


def forward(
    problem: AttentionProblem, x: Operands, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of one call on the CPU.

    x: tensors as Operands says. out: where to write, (B, Sq, H, E) or (Tq, H, E) in
    problem.out_dtype, any strides; made if None.

    Returns out; lse, float32 (B, H, Sq) or (H, Tq), natural, with the sink and without the dropout;
    probs (B, H, Sq, Sk) in out's dtype if problem.return_probs, as in `reference.oracle.forward`,
    else None. Tokens that no sequence uses get 0 and -inf.

    Raises ValueError where block_table meets kv_batch_idx.
    """
    if out is None:
        shape = (*x.q.shape[:-1], problem.head_dim_v)
        out = torch.empty(shape, dtype=getattr(torch, problem.out_dtype))
    lse = torch.full(problem.lse_shape, -torch.inf)
    if problem.varlen_q or problem.used_q:
        out.zero_()
    probs = None
    if problem.return_probs:
        shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        probs = torch.zeros(shape, dtype=out.dtype)

    def work(tiles: Tiles, item: tuple[Block, range]) -> None:
        _attend(tiles, *item, out, lse)
        if probs is not None:
            _write_probs(tiles, *item, lse, probs)

    items = [(block, rows) for block in blocks(problem, x) for rows in query_tiles(block)]
    if problem.mask.right >= 0:
        # The last rows see most keys: first, so that threads end together.
        items.sort(key=lambda item: -item[1].start)
    for_each(items, work, lambda: Tiles(problem, x), worth_threads(problem))
    return out, lse, probs


def _attend(tiles: Tiles, block: Block, rows: range, out: torch.Tensor, lse: torch.Tensor) -> None:
    """All keys of one query tile: writes its rows of out and lse."""
    problem, scratch = tiles.problem, tiles.scratch
    q = tiles.load_q(block, rows)
    column = (block.heads, q.shape[1], 1)
    m, l_sum = scratch.take("m", *column), scratch.take("l", *column)
    acc = scratch.take("acc", *column[:2], problem.head_dim_v)
    # Whether m, l_sum and acc hold something yet.
    begun = tiles.x.sink is not None
    if tiles.x.sink is not None:
        # The sink is a key whose value is zero.
        sink = block.split(tiles.x.sink[None].expand(problem.batch, -1))[..., None, None]
        tiles.by_head(block, m, rows).copy_(sink)
        torch.gt(m, -torch.inf, out=l_sum)
        m.clamp_(min=torch.finfo(m.dtype).min)
        acc.zero_()
    for cols, masked in key_tiles(block, rows):
        _accumulate(tiles, block, rows, cols, masked, q, m, l_sum, acc, begun)
        begun = True
    if not begun:
        m.fill_(torch.finfo(m.dtype).min)
        l_sum.zero_()
        acc.zero_()
    empty = l_sum == 0
    l_safe = l_sum.masked_fill(empty, 1.0)
    acc *= (keep_scale(problem.dropout_p) if problem.dropout_p > 0 else 1.0) / l_safe
    block.store_queries(out, rows, acc)
    lse_tile = (m.double() + l_safe.double().log()).masked_fill_(empty, -torch.inf)
    lse_rows = block.rows(lse)[..., rows.start : rows.stop]
    lse_rows.copy_(lse_tile.view(lse_rows.shape))


def _accumulate(
    tiles: Tiles,
    block: Block,
    rows: range,
    cols: range,
    masked: bool,
    q,
    m,
    l_sum,
    acc,
    begun: bool,
) -> None:
    """One step of the online softmax: m, l_sum and acc take in keys `cols`, or begin with them."""
    s, _ = tiles.scores(block, rows, cols, masked, q, tiles.load_k(block, cols))
    largest = tiles.scratch.take("largest", *m.shape)
    torch.amax(s, -1, keepdim=True, out=largest)
    # The lowest finite number, not -inf: exp(-inf - m) is then 0 in a row without keys, not NaN,
    # and l tells such a row by staying 0.
    if begun:
        torch.maximum(m, largest, out=largest)
    else:
        largest.clamp_(min=torch.finfo(m.dtype).min)
    p = exp_(s.sub_(largest))
    total = p.sum(-1, keepdim=True)
    if begun:
        rescale = exp_(m.sub_(largest))
        l_sum.mul_(rescale).add_(total)
        acc.mul_(rescale)
    else:
        l_sum.copy_(total)
    m.copy_(largest)  # last: rescale lived in m
    if tiles.problem.dropout_p > 0:
        p.masked_fill_(tiles.dropped(block, rows, cols), 0.0)
    v = tiles.load_v(block, cols, tiles.low)
    tiles.add_product(acc, tiles.rounded(p, "p_low"), v, begin=not begun)


def _write_probs(tiles: Tiles, block: Block, rows: range, lse, probs) -> None:
    """The sign-coded probabilities of one query tile, from its finished lse."""
    q = tiles.load_q(block, rows)
    lse_tile = row_lse(tiles, block, rows, lse)
    target = block.split(probs)[..., rows.start : rows.stop, :]
    for cols, masked in key_tiles(block, rows):
        s, _ = tiles.scores(block, rows, cols, masked, q, tiles.load_k(block, cols))
        p = exp_(s.sub_(lse_tile))
        if tiles.problem.dropout_p > 0:
            p = torch.where(tiles.dropped(block, rows, cols), -p, p)
        target[..., cols.start : cols.stop] = tiles.by_head(block, p, rows)


def row_lse(tiles: Tiles, block: Block, rows: range, lse: torch.Tensor) -> torch.Tensor:
    """The lse of a query tile, (B G, R M, 1); +inf for rows without keys, whose
    probabilities are then exp(-inf) = 0."""
    tile = block.rows(lse)[..., rows.start : rows.stop].reshape(block.heads, -1, 1)
    return tile.to(tiles.scratch.dtype).masked_fill(tile == -torch.inf, torch.inf)
