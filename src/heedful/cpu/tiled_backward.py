"""Tiled backward (FlashAttention-2, Dao 2023, section 3.1.2): probabilities are computed again from
lse, or from maximum and sum where lse is far from 0. The outer loop is over key tiles, the inner
one over query tiles: dK and dV of a tile stay in scratch until they are complete, and only dQ has a
float32 buffer over the sequence. Dimension key as in blocks.py.
"""

from collections.abc import Iterator

import torch

from heedful.core.base.far import far_lse
from heedful.core.call.operands import Gradients, Operands, own_shape
from heedful.core.call.problem import AttentionProblem
from heedful.cpu import whole
from heedful.cpu.blocks import (
    KEYS,
    UNIT,
    Block,
    blocks,
    is_scattered,
    query_rows,
    query_tiles,
    worth_threads,
)
from heedful.cpu.scores import HELD, Tiles, multiply, slack
from heedful.cpu.tiled_forward import all_near, row_references
from heedful.cpu.workers import for_each
from heedful.reference.philox import keep_scale


def backward(
    problem: AttentionProblem,
    x: Operands,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """Gradients of one call on the CPU, from what its forward returned.

    out, lse: the forward's. dout: as out. dlse: as lse, or None for zeros.

    Returns dq, dk, dv in the dtypes of q, k and v; dbias in the bias's dtype, of size 1 where its
    stride is 0 or its size 1, if problem.bias_grad; dsink, float32 (H,), if there is a sink;
    drel_bias as rel_bias, if problem.rel_bias_grad. Key tokens that several sequences share get the
    sum.

    Raises ValueError for inputs with descales, which have no gradient.
    """
    if x.q_descale is not None or x.k_descale is not None or x.v_descale is not None:
        raise ValueError("gradients need q, k and v without descales")
    if whole.takes(problem, x):
        return whole.backward(problem, x, out, lse, dout, dlse)
    # Where sequences are whole rows of storage, every element is written, and once.
    begin = torch.zeros_like if is_scattered(x) else torch.empty_like
    dq, dk, dv = (begin(a, memory_format=torch.contiguous_format) for a in (x.q, x.k, x.v))
    dbias = None
    if problem.bias_grad:
        bias_shape = own_shape(tuple(x.bias.shape), x.bias.stride())
        dbias = torch.zeros(
            bias_shape, dtype=torch.promote_types(x.q.dtype, torch.float32), device="cpu"
        )
    near = all_near(lse, far_lse(x.q.element_size()))
    # By block, parts of gradients that are sums over sequences.
    sink_parts: dict[int, tuple[range, torch.Tensor]] = {}
    relative_parts: dict[int, tuple[range, torch.Tensor]] = {}

    def work(tiles: Tiles, item: tuple[int, Block]) -> None:
        number, block = item
        pass_ = _BlockBackward(tiles, block, dout, dbias)
        pass_.prepare(out, lse, dlse, near)
        for cols in _parts(block.len_k):
            pass_.add_key_tile(cols, dk, dv)
        pass_.store_dq(dq)
        if x.sink is not None:
            sink_parts[number] = block.query_heads, pass_.dsink
        if pass_.drel_bias is not None:
            relative_parts[number] = block.query_heads, pass_.drel_bias

    # Blocks that add to the same bias or keys take turns, in order: the sum then always has the
    # same bits.
    apart = not problem.bias_grad and x.block_table is None and x.kv_batch_idx is None
    parallel = apart and worth_threads(problem)
    groups = [[item] for item in enumerate(blocks(problem, x, apart=False))]
    for_each(groups, work, lambda: Tiles(problem, x), parallel)
    dsink = drel_bias = None
    if x.sink is not None:
        dsink = _summed(sink_parts, x.sink).float()
    if problem.rel_bias_grad:
        drel_bias = _summed(relative_parts, x.rel_bias).to(x.rel_bias.dtype)
    if dbias is not None:
        dbias = dbias.to(x.bias.dtype)
    return Gradients(dq, dk, dv, dbias, dsink, drel_bias)


def _summed(parts: dict[int, tuple[range, torch.Tensor]], operand: torch.Tensor) -> torch.Tensor:
    """The sum of parts of some heads each, in the order of blocks, in float64."""
    total = torch.zeros(operand.shape, dtype=torch.float64, device="cpu")
    for number in sorted(parts):
        heads, part = parts[number]
        total[heads.start : heads.stop] += part
    return total


def _parts(len_k: int) -> Iterator[range]:
    return (range(start, min(start + KEYS, len_k)) for start in range(0, len_k, KEYS))


class _BlockBackward:
    """The backward of one block: delta of every query tile and what gives its probabilities (see
    `row_references`), dQ so far, and the tiles of q and dO themselves if they are not too many."""

    def __init__(self, tiles: Tiles, block: Block, dout, dbias: torch.Tensor | None):
        self.tiles, self.block, self.dout, self.dbias = tiles, block, dout, dbias
        self.rows = list(query_tiles(block))
        self.keep_scale = keep_scale(tiles.problem.dropout_p)
        self.reference: list[torch.Tensor] = []
        self.weight: list[torch.Tensor | None] = []
        self.delta: list[torch.Tensor] = []
        # By query tile, which of its queries see one key, and the value of dS there if not 0.
        self.single: list[list[int]] = []
        self.dlse: list[torch.Tensor] = []
        self.dq: list[torch.Tensor] = []
        dims = tiles.problem.head_dim + tiles.problem.head_dim_v
        size = block.heads * tiles.problem.group * block.len_q * dims * tiles.scratch.dtype.itemsize
        self.holds = size <= HELD
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.dsink = torch.zeros(len(block.query_heads), dtype=torch.float64, device="cpu")
        self.drel_bias: torch.Tensor | None = None
        if tiles.problem.rel_bias_grad:
            shape = len(block.query_heads), tiles.x.rel_bias.shape[1]
            self.drel_bias = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def prepare(self, out, lse, dlse, near: bool = False) -> None:
        """delta = rowsum(dO * O) - dlse of every query tile, its references, the tiles themselves
        if they are held, and the sink's gradient. near: whether every lse is known to be near 0."""
        tiles, block = self.tiles, self.block
        group, dim = tiles.problem.group, tiles.problem.head_dim
        for index, rows in enumerate(self.rows):
            o = block.load_queries(out, rows, tiles.scratch, "o")
            do = self._load_do(index)
            delta = o.mul_(do[..., :-1]).sum(-1, keepdim=True)
            if dlse is not None:
                dlse_rows = block.rows(dlse)[..., rows.start : rows.stop]
                delta -= dlse_rows.reshape(delta.shape)
                self.dlse.append(dlse_rows[..., None])
            # With a sink a row has more than its key.
            self.single.append([] if tiles.x.sink is not None else block.with_one_key(rows))
            reference, weight = row_references(tiles, block, rows, lse, near)
            self.reference.append(reference)
            self.weight.append(weight)
            self.delta.append(delta)
            if self.holds:
                self.held.append(self._pair(index, do))
            size = (block.heads, group * len(rows), dim)
            self.dq.append(torch.zeros(size, dtype=tiles.scratch.dtype, device="cpu"))
            if tiles.x.sink is not None:
                self._add_sink(rows, delta, reference, weight)

    def _add_sink(self, rows: range, delta, reference, weight) -> None:
        """Adds to the sink's gradient what the rows of a query tile give."""
        tiles, block = self.tiles, self.block
        h, heads = block.query_heads, len(block.kv_heads)
        sink = tiles.x.sink[h.start : h.stop].view(1, heads, tiles.problem.group, 1)
        # In a row without keys the reference is +inf, and this 0.
        p_sink = torch.exp(sink - tiles.by_head(block, reference, rows)[..., 0])
        if weight is not None:
            p_sink *= tiles.by_head(block, weight, rows)[..., 0]
        of_row = p_sink.double() * delta.view(p_sink.shape)
        self.dsink -= of_row.sum((0, 3)).flatten()

    def add_key_tile(self, cols: range, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Computes all that keys `cols` contribute: their dK and dV, and their part of dQ."""
        tiles, block = self.tiles, self.block
        k, v = tiles.load_k(block, cols), tiles.load_v(block, cols, ones=True)
        self.k_low = tiles.rounded(k[..., :-1], "k_low")
        dk_tile = tiles.scratch.take("dk", *k[..., :-1].shape).zero_()
        dv_tile = tiles.scratch.take("dv", *v[..., :-1].shape).zero_()
        for index, masked in self._query_tiles(cols):
            self._add_pair(index, cols, masked, k, v, dk_tile, dv_tile)
        block.add_keys(dk, cols, dk_tile)
        block.add_keys(dv, cols, dv_tile)

    def _query_tiles(self, cols: range) -> Iterator[tuple[int, bool]]:
        """Query tiles that see any of keys `cols`: index, and whether position may hide any."""
        mask, block = self.block.mask, self.block
        step = query_rows(self.tiles.problem)
        begin, end = mask.query_range(cols.start, len(cols), step, block.len_q, block.len_k)
        for index in range(begin, end):
            if not block.sees(self.rows[index], cols):
                continue
            full = True
            if mask.bounded:
                rows = self.rows[index]
                key_range = mask.key_range(rows.start, len(rows), UNIT, block.len_q, block.len_k)
                full = (
                    key_range.full_begin * UNIT <= cols.start
                    and cols.stop <= key_range.full_end * UNIT
                )
            yield index, not full

    def _load_do(self, index: int) -> torch.Tensor:
        """A tile of dO with room for a column, (B G, R M, E + 1)."""
        name, scratch = self._name("do", index), self.tiles.scratch
        return self.block.load_queries(self.dout, self.rows[index], scratch, name, column=True)

    def _pair(self, index: int, do: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A tile of q beside one of dO; their last columns become minus the reference and minus
        delta."""
        q = self.tiles.load_q(self.block, self.rows[index], self._name("q", index))
        self.tiles.refer(q, self.reference[index])
        self.tiles.refer(do, self.delta[index])
        return q, do

    def _name(self, name: str, index: int) -> str:
        """The name of the scratch buffer of a tile."""
        return f"{name}{index}" if self.holds else name

    def _add_pair(self, index: int, cols: range, masked: bool, k, v, dk_tile, dv_tile) -> None:
        """One query tile against one key tile: five matmuls."""
        tiles, block, rows = self.tiles, self.block, self.rows[index]
        problem = tiles.problem
        part = block.rows_that_see(rows, cols) if masked else rows
        pair = self.held[index] if self.holds else self._pair(index, self._load_do(index))

        def seen(tile: torch.Tensor) -> torch.Tensor:
            if part == rows:
                return tile
            return tile[:, part.start - rows.start : part.stop - rows.start]

        q, do, reference, delta, dq = map(
            seen, (*pair, self.reference[index], self.delta[index], self.dq[index])
        )
        p, tanh = tiles.probabilities(block, part, cols, masked, q, k, reference)
        weight = self.weight[index]
        if weight is not None:
            p.mul_(seen(weight))
        do_low = tiles.rounded(do[..., :-1], "do_low")
        dropped = None
        if problem.dropout_p > 0:
            dropped = tiles.dropped(block, part, cols)
            p_low = tiles.rounded(p.masked_fill(dropped, 0.0), "p_low")
        else:
            p_low = tiles.rounded(p, "p_low")
        tiles.add_product(dv_tile, p_low.mT, do_low, alpha=self.keep_scale)
        ds = self._dp_less_delta(do, v, delta, dropped).mul_(p)
        if self.single[index]:
            self._settle(index, part, tiles.by_head(block, p, part), tiles.by_head(block, ds, part))
        if self.dbias is not None:
            self._add_bias(part, cols, tiles.by_head(block, ds, part))
        if self.drel_bias is not None:
            self._add_relative(part, cols, tiles.by_head(block, ds, part))
        if tanh is not None:
            ds.mul_(tanh.square_().neg_().add_(1.0))
        ds_low = tiles.rounded(ds, "ds_low")
        tiles.add_product(dq, ds_low, self.k_low, alpha=problem.scale)
        if tiles.low is None:
            q_low, alpha = q[..., :-1], problem.scale / tiles.q_scale
        else:
            # As stored: multiplied by q_scale they would be rounded.
            q_low = block.load_queries(tiles.x.q, part, tiles.scratch, "q_low", tiles.low)
            alpha = problem.scale
        tiles.add_product(dk_tile, ds_low.mT, q_low, alpha=alpha)

    def _dp_less_delta(self, do, v, delta, dropped: torch.Tensor | None) -> torch.Tensor:
        """dO V^T after dropout, minus delta: (B G, R M, N)."""
        dp = self.tiles.scratch.take("dp", *do.shape[:2], v.shape[1])
        if dropped is None and self.tiles.is_folded(do, v):
            multiply(dp, do, v.mT)
            return dp
        multiply(dp, do[..., :-1], v[..., :-1].mT)
        if dropped is not None:
            dp.mul_(self.keep_scale).masked_fill_(dropped, 0.0)
        return dp.sub_(delta)

    def _settle(self, index: int, part: range, p, ds) -> None:
        """Sets dS of queries that see one key, in tiles (B, G, R, M, N), to dlse: their probability
        is 1 whatever the score. dP and delta are sums of the same terms in another order, whose
        difference is only rounding. One that is not 1 has more keys in another call."""
        rows = self.rows[index]
        single = [i for i in self.single[index] if rows.start + i in part]
        places = [i - (part.start - rows.start) for i in single]
        settled = ds[..., places, :] * 0.0  # a NaN stays one
        if self.dlse:
            settled += p[..., places, :] * self.dlse[index][..., single, :]
        tiles, of_rows = self.tiles, self.rows[index]
        reference = tiles.by_head(self.block, self.reference[index], of_rows)[..., single, :]
        is_one = (p[..., places, :] - 1.0).abs() <= slack(reference)
        ds[..., places, :] = torch.where(is_one, settled, ds[..., places, :])

    def _add_bias(self, rows: range, cols: range, ds: torch.Tensor) -> None:
        """Adds ds (B, G, R, M, N) to the bias's gradient, summed over the dims that it repeats."""
        assert self.dbias is not None
        b, h = self.block.batches, self.block.query_heads
        ds, index = ds.flatten(1, 2), []
        for dim, part in enumerate((b, h, rows, cols)):
            if self.dbias.shape[dim] == 1:
                ds = ds.sum(dim, keepdim=True)
                part = range(1)
            index.append(slice(part.start, part.stop))
        self.dbias[tuple(index)] += ds

    def _add_relative(self, rows: range, cols: range, ds: torch.Tensor) -> None:
        """Adds ds (B, G, R, M, N) along its diagonals to the gradient of rel_bias."""
        assert self.drel_bias is not None
        of_heads = ds.sum(0).flatten(0, 1).flip(-1)
        heads, m, n = of_heads.shape
        # A row of n + m elements begins one further than the row before, in rows of one less.
        padded = torch.nn.functional.pad(of_heads, (0, m)).view(heads, m * (n + m))
        sums = padded[:, : m * (n + m - 1)].view(heads, m, n + m - 1).sum(1)
        least, count = self.tiles.least_entry(self.block, rows, cols), self.drel_bias.shape[1]
        begin = min(max(-least, 0), n + m - 1)
        end = min(max(count - least, begin), n + m - 1)
        self.drel_bias[:, 0] += sums[:, :begin].sum(1)
        self.drel_bias[:, least + begin : least + end] += sums[:, begin:end]
        self.drel_bias[:, -1] += sums[:, end:].sum(1)

    def store_dq(self, dq: torch.Tensor) -> None:
        for rows, tile in zip(self.rows, self.dq, strict=True):
            self.block.store_queries(dq, rows, tile)
