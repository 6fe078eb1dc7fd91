"""Tiled forward: online softmax over key tiles (Milakov & Gimelshein 2018; FlashAttention-2, Dao
2023), each step one batched matmul or one pass over a tile.

Dimension key as in blocks.py.
"""

import threading

import torch

from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.cpu import whole
from heedful.cpu.blocks import UNIT, Block, blocks, key_tiles, query_tiles, worth_threads
from heedful.cpu.scores import Tiles, exp_, slack
from heedful.cpu.workers import for_each
from heedful.reference.philox import keep_scale

# The largest sum of exponentials for which a reference may be below the row's maximum. Results are
# as exact, and far from overflow: values may reach 2^95.
MOST = 2.0**32


def forward(
    problem: AttentionProblem, x: Operands, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention of one call on the CPU.

    x: tensors as Operands says. out: where to write, (B, Sq, H, E) or (Tq, H, E) in
    problem.out_dtype, any strides; made if None.

    Returns out; lse, float32 (B, H, Sq) or (H, Tq), natural, with the sink and without the dropout;
    probs (B, H, Sq, Sk) in out's dtype or the largest scores, as in `reference.oracle.forward`,
    if the problem asks, else None. Tokens that no sequence uses get 0 and -inf.

    Raises ValueError where block_table meets kv_batch_idx.
    """
    if out is None:
        shape = (*x.q.shape[:-1], problem.head_dim_v)
        out = torch.empty(shape, dtype=getattr(torch, problem.out_dtype), device="cpu")
    lse = torch.full(problem.lse_shape, -torch.inf, dtype=torch.float32, device="cpu")
    if whole.takes(problem, x):
        whole.forward(problem, x, out, lse)
        return out, lse, _largest_scores(problem, x)
    if problem.varlen_q or problem.used_q:
        out.zero_()
    probs = None
    if problem.return_probs:
        shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        probs = torch.zeros(shape, dtype=out.dtype, device="cpu")

    def work(tiles: Tiles, item: tuple[_Split, int]) -> None:
        split, part = item
        if not split.attend(tiles, part, out, lse):
            return
        if probs is not None:
            _write_probs(tiles, split.block, split.rows, lse, probs)

    # Under a causal mask the last rows see most keys: they go first, so that threads end together.
    order = reversed if problem.mask.right >= 0 else iter
    groups = [
        [
            (split, part)
            for split in (_Split(block, rows) for rows in order(list(query_tiles(block))))
            for part in range(len(split.parts))
        ]
        for block in blocks(problem, x, apart=True)
    ]
    for_each(groups, work, lambda: Tiles(problem, x), worth_threads(problem))
    return out, lse, _largest_scores(problem, x) if probs is None else probs


def _largest_scores(problem: AttentionProblem, x: Operands) -> torch.Tensor | None:
    """The largest score of each row, without the sink, if the problem asks."""
    return statistics(problem, x._replace(sink=None))[0] if problem.max_scores else None


KeyTiles = list[tuple[range, bool]]


class _Split:
    """A query tile and its keys, in at most `num_splits` splits, none of which is empty. Each split
    has a separate online softmax; the thread that finishes the last one merges all, in order.
    Splits depend on the sequence's own length alone, so that no neighbour changes a bit.
    """

    def __init__(self, block: Block, rows: range):
        self.block, self.rows = block, rows
        tiles = list(key_tiles(block, rows))
        self.parts = parts_of_keys(tiles, block.problem.num_splits)
        self._lock = threading.Lock()
        self._done: dict[int, tuple[torch.Tensor, ...]] = {}

    def attend(self, tiles: Tiles, part: int, out: torch.Tensor, lse: torch.Tensor) -> bool:
        """Computes one split; returns whether the tile's rows of out and lse are now written."""
        state = _attend(tiles, self.block, self.rows, self.parts[part], has_sink=part == 0)
        if len(self.parts) > 1:
            # The next split will overwrite scratch.
            kept = tuple(x.clone() for x in state)
            with self._lock:
                self._done[part] = kept
                if len(self._done) < len(self.parts):
                    return False
            state = _merged(tiles, [self._done[index] for index in range(len(self.parts))])
        _store(tiles, self.block, self.rows, *state, out, lse)
        return True


def parts_of_keys(tiles: KeyTiles, num_splits: int) -> list[KeyTiles]:
    """Key tiles in runs of about as many UNITs each, cut within a tile where they must be; at least
    one run, which may be empty, and at most `num_splits`."""
    units = sum(-(-len(cols) // UNIT) for cols, _ in tiles)
    share = -(-units // max(1, num_splits))
    parts: list[KeyTiles] = [[]]
    room = share
    for cols, masked in tiles:
        while cols:
            if not room:
                parts.append([])
                room = share
            head = cols[: room * UNIT]
            parts[-1].append((head, masked))
            cols, room = cols[len(head) :], room - -(-len(head) // UNIT)
    return parts


def _attend(
    tiles: Tiles, block: Block, rows: range, keys: KeyTiles, has_sink: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """These keys of one query tile: (m, l, acc) in scratch, where acc / l is the output and
    m + log(l) the lse."""
    problem, scratch = tiles.problem, tiles.scratch
    tiles.hold_keys(block)
    q = tiles.load_q(block, rows)
    acc = scratch.take("acc", *q.shape[:2], problem.head_dim_v)
    sink = _sink_of_rows(tiles, block, rows) if has_sink else None
    state = q, acc, sink
    ordered = _with_a_key_first(block, rows, keys)
    if ordered:
        m, l_sum = _by_first_maximum(tiles, block, rows, ordered, *state)
        # Written so, a row with a NaN counts as too large; the other way gives NaN, too.
        if not l_sum.max().item() <= MOST:
            kept = [x.clone() for x in (m, l_sum, acc)]
            fits = kept[1] <= MOST
            m, l_sum = _by_running_maximum(tiles, block, rows, keys, *state)
            # Row by row: otherwise a row's bits would depend on the others of its tile.
            for x, old in zip((m, l_sum, acc), kept, strict=True):
                torch.where(fits, old, x, out=x)
    else:
        m, l_sum = _by_running_maximum(tiles, block, rows, keys, *state)
    return m, l_sum, acc


def _sink_of_rows(tiles: Tiles, block: Block, rows: range) -> torch.Tensor | None:
    """The sink's score in each row of a query tile, (B G, R M, 1), if there is a sink."""
    if tiles.x.sink is None:
        return None
    per_head = block.split(tiles.x.sink[None].expand(tiles.problem.batch, -1))
    sink = per_head[..., None].repeat_interleave(len(rows), -1).to(tiles.scratch.dtype)
    return sink.reshape(block.heads, -1, 1)


def _merged(
    tiles: Tiles, parts: list[tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, l, acc) of all splits, in the first's tensors. Products and sums are rounded one by one,
    so that bits do not depend on a row's place in a tile."""
    m, l_sum, acc = parts[0]
    top = m.clone()
    for other, *_ in parts[1:]:
        torch.maximum(top, other, out=top)
    weight = tiles.scratch.take("largest", *m.shape)
    for index, (m_part, l_part, acc_part) in enumerate(parts):
        torch.sub(m_part, top, out=weight)
        exp_(weight)
        l_part.mul_(weight)
        acc_part.mul_(weight)
        if index:
            l_sum.add_(l_part)
            acc.add_(acc_part)
    return top, l_sum, acc


def _store(tiles: Tiles, block: Block, rows: range, m, l_sum, acc, out, lse) -> None:
    """A query tile's rows of out and lse, from all its keys."""
    lse_rows = block.rows(lse)[..., rows.start : rows.stop]
    # In a row without keys l is 0, its logarithm -inf, and acc 0.
    lse_rows.copy_((m.double() + l_sum.double().log()).view(lse_rows.shape))
    acc.div_(l_sum.clamp_(min=torch.finfo(l_sum.dtype).tiny))
    if tiles.problem.dropout_p > 0:
        acc.mul_(keep_scale(tiles.problem.dropout_p))
    block.store_queries(out, rows, acc)


def _by_first_maximum(
    tiles: Tiles, block: Block, rows: range, all_keys: KeyTiles, q, acc, sink
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums probabilities and their products with values by the largest scores of the first of
    `all_keys`: no later tile needs a pass over its scores to find theirs, nor a rescaling.

    Returns (m, l), both (B G, R M, 1), and sets acc. Exact enough for rows with l <= MOST: others
    see a score far above those of the first tile.
    """
    (cols, masked), *others = all_keys
    m = tiles.scratch.take("m", *q.shape[:2], 1)
    s = tiles.scores(block, rows, cols, masked, q, tiles.load_k(block, cols))
    p = exp_(s.sub_(_largest(s, out=m)))
    tiles.refer(q, m)
    l_sum, total = tiles.scratch.take("l", *m.shape), tiles.scratch.take("total", *m.shape)
    torch.sum(p, -1, keepdim=True, out=l_sum)
    _add_values(tiles, block, rows, cols, p, acc, begin=True)
    for cols, masked in others:
        part = block.rows_that_see(rows, cols) if masked else rows
        q_part, m_part, l_part, acc_part, total_part = (
            x if part == rows else x[:, part.start - rows.start : part.stop - rows.start]
            for x in (q, m, l_sum, acc, total)
        )
        k = tiles.load_k(block, cols)
        p, _ = tiles.probabilities(block, part, cols, masked, q_part, k, m_part)
        l_part.add_(torch.sum(p, -1, keepdim=True, out=total_part))
        _add_values(tiles, block, part, cols, p, acc_part)
    if sink is not None:
        l_sum.add_(sink.sub(m).exp_())
    return m, l_sum


def _with_a_key_first(block: Block, rows: range, tiles: KeyTiles) -> KeyTiles:
    """These key tiles of queries `rows`, beginning with one in which each row sees a key by
    position; empty if there is none, or if key_ranges or lists may hide the key."""
    mask = block.mask
    if block.problem.key_ranges or block.problem.block_mask:
        return []
    off = mask.offset(block.len_q, block.len_k)
    for number, (cols, _) in enumerate(tiles):
        first_row = mask.right < 0 or rows.start + off + mask.right >= cols.start
        last_row = mask.left < 0 or rows.stop - 1 + off - mask.left < cols.stop
        if first_row and last_row:
            return [tiles[number], *tiles[:number], *tiles[number + 1 :]]
    return []


def _by_running_maximum(
    tiles: Tiles, block: Block, rows: range, keys: KeyTiles, q, acc, sink
) -> tuple[torch.Tensor, torch.Tensor]:
    """The online softmax as published: returns (m, l), both (B G, R M, 1), and sets acc. Without
    acc, which is None then, values are left out."""
    m, l_sum, total, largest = (
        tiles.scratch.take(name, *q.shape[:2], 1) for name in ("m", "l", "total", "largest")
    )
    m.fill_(torch.finfo(m.dtype).min)
    l_sum.zero_()
    if acc is not None:
        acc.zero_()
    if sink is not None:
        # The sink is a key whose value is zero.
        torch.gt(sink, -torch.inf, out=l_sum)
        torch.maximum(m, sink, out=m)
    for cols, masked in keys:
        s = tiles.scores(block, rows, cols, masked, q, tiles.load_k(block, cols))
        torch.maximum(m, _largest(s, out=largest), out=largest)
        p = exp_(s.sub_(largest))
        rescale = exp_(m.sub_(largest))
        l_sum.mul_(rescale).add_(torch.sum(p, -1, keepdim=True, out=total))
        if acc is not None:
            acc.mul_(rescale)
            _add_values(tiles, block, rows, cols, p, acc)
        m.copy_(largest)  # last: rescale lived in m
    return m, l_sum


def _largest(s: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The largest score of each row. At least the lowest finite number, not -inf: exp(-inf - m) is
    then 0 in a row without keys, not NaN, and l tells such a row by staying 0."""
    return torch.amax(s, -1, keepdim=True, out=out).clamp_(min=torch.finfo(s.dtype).min)


def _add_values(
    tiles: Tiles, block: Block, rows: range, cols: range, p, acc, begin: bool = False
) -> None:
    """acc += p V, with p after dropout. begin: what acc holds is ignored."""
    if tiles.problem.dropout_p > 0:
        p.masked_fill_(tiles.dropped(block, rows, cols), 0.0)
    v = tiles.load_v(block, cols, tiles.low)
    tiles.add_product(acc, tiles.rounded(p, "p_low"), v, begin=begin)


def _write_probs(tiles: Tiles, block: Block, rows: range, lse, probs) -> None:
    """The sign-coded probabilities of one query tile, from its finished lse."""
    reference, weight = row_references(tiles, block, rows, lse)
    q = tiles.load_q(block, rows)
    tiles.refer(q, reference)
    target = block.split(probs)[..., rows.start : rows.stop, :]
    for cols, masked in key_tiles(block, rows):
        k = tiles.load_k(block, cols)
        p, _ = tiles.probabilities(block, rows, cols, masked, q, k, reference)
        if weight is not None:
            p.mul_(weight)
        if tiles.problem.dropout_p > 0:
            p = torch.where(tiles.dropped(block, rows, cols), -p, p)
        target[..., cols.start : cols.stop] = tiles.by_head(block, p, rows)


def row_references(
    tiles: Tiles, block: Block, rows: range, lse: torch.Tensor, near: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The two vectors from which a query tile's probabilities are computed again, both (B G, R M,
    1): probabilities are e^(scores - reference) times a weight, which is None if it is 1 in all
    rows.

    The reference is the lse; +inf for rows without keys, whose probabilities are then exp(-inf) =
    0. A float32 lse far from 0 has lost the logarithm of the sum: such rows get their maximum, and
    one over their sum, both from their scores, and times the share of these keys where lse is of
    more. near: whether `all_near(lse)` is known.
    """
    tile = block.rows(lse)[..., rows.start : rows.stop].reshape(block.heads, -1, 1)
    reference = tile.to(tiles.scratch.dtype).masked_fill(tile == -torch.inf, torch.inf)
    if near:
        return reference, None
    is_far = (reference.abs() >= tiles.far_lse) & reference.isfinite()
    if not is_far.any():
        return reference, None
    keys, sink = list(key_tiles(block, rows)), _sink_of_rows(tiles, block, rows)
    m, l_sum = _by_running_maximum(
        tiles, block, rows, keys, tiles.load_q(block, rows), acc=None, sink=sink
    )
    lse_here = m + l_sum.log()
    is_all = (lse_here - reference).abs() <= slack(reference)
    weight = torch.where(is_all, 1.0, torch.exp(lse_here - reference)) / l_sum
    # Rows may see no key here, and keys elsewhere.
    is_far &= l_sum > 0
    return torch.where(is_far, m, reference), torch.where(is_far, weight, 1.0)


def statistics(problem: AttentionProblem, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of every row, float32, with the shape of lse. (An lse far from 0 is not exact
    enough to give both.) Rows without keys, and tokens of no sequence, have -inf and 0."""
    made = torch.full(problem.lse_shape, -torch.inf, dtype=torch.float32, device="cpu")
    vectors = made, torch.zeros_like(made)

    def work(tiles: Tiles, item: tuple[Block, range]) -> None:
        block, rows = item
        keys, sink = list(key_tiles(block, rows)), _sink_of_rows(tiles, block, rows)
        q = tiles.load_q(block, rows)
        m, l_sum = _by_running_maximum(tiles, block, rows, keys, q, acc=None, sink=sink)
        m.masked_fill_(l_sum == 0, -torch.inf)
        for vector, values in zip(vectors, (m, l_sum), strict=True):
            target = block.rows(vector)[..., rows.start : rows.stop]
            target.copy_(values.view(target.shape))

    tiles_of = blocks(problem, x, apart=True)
    groups = [[(block, rows) for rows in query_tiles(block)] for block in tiles_of]
    for_each(groups, work, lambda: Tiles(problem, x), worth_threads(problem))
    return vectors


def all_near(lse: torch.Tensor, far: float) -> bool:
    """Whether every lse is nearer to 0 than `far`, so that float32 keeps the logarithm of a row's
    sum in it. False says nothing: an lse may be -inf or NaN."""
    if not lse.numel():
        return True
    low, high = lse.aminmax()
    return low.item() > -far and high.item() < far
