"""Divides a call into blocks of heads, and reads and writes tiles of a block.

B batch rows and G kv heads of the block, R query heads per kv head, M query rows of a tile, N keys
of a tile, D qk dim, E v dim. A tile of queries is kept as (B G, R M, D): the group is folded into
rows, so that keys and values are never expanded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.cpu.block_lists import is_listed
from heedful.reference.sequences import Sequence, sequences


def inner_cache() -> int:
    """Bytes of a core's second-level cache as Linux reports them, else 0."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 0


# Measured on 2 cores each, torch 2.13:
# AMD EPYC (Zen 5, 1 MiB; 20 November 2026): half as many take 5 to 20 % longer on two threads.
# Intel Xeon (2 MiB; 21 November 2026): half as many up to 20 % longer, a quarter up to 30 %.
def scores_per_tile(cache: int) -> int:
    """Scores of one tile, by the bytes of a core's second-level cache."""
    return (1024 if cache >= 2 << 20 else 256) * 1024


SCORES_PER_TILE = scores_per_tile(inner_cache())
# Its sides. On either, fewer keys take longer; more take longer under a causal mask.
ROWS, KEYS = 512, 256
# Calls with fewer scores end before threads of our own would have started, see `worth_threads`.
SHORT = 4 * 1024 * 1024
# Granularity at which the mask cuts key tiles and query tiles off.
UNIT = 64


# A multiple of the elements that torch's kernels process at a time, on any machine.
VECTOR = 64


def whole_vectors(count: int) -> int:
    """count, rounded up to a multiple of VECTOR."""
    return -(-count // VECTOR) * VECTOR


class Scratch:
    """Named float buffers that grow to the largest requested tile and are used again."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        # The last tensor taken of each: most tiles are as large as the one before.
        self._taken: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised contiguous tensor, valid until the name is taken again. Its storage has
        room for whole VECTORs."""
        key = name, dtype or self.dtype
        taken = self._taken.get(key)
        if taken is not None and taken.shape == shape:
            return taken
        size, buffer = math.prod(shape), self._buffers.get(key)
        if buffer is None or buffer.numel() < whole_vectors(size):
            # Not as a tensor of inference mode, to which a later call outside of it could not
            # write.
            with torch.inference_mode(False):
                buffer = self._buffers[key] = torch.empty(
                    whole_vectors(size), dtype=key[1], device="cpu"
                )
        with torch.inference_mode(False):
            taken = self._taken[key] = buffer[:size].view(shape)
        return taken

    @property
    def bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def trim(self, limit: int) -> None:
        """Frees buffers, the largest first, until at most `limit` bytes are left."""
        by_size = sorted(self._buffers, key=lambda key: self._buffers[key].nbytes)
        while by_size and self.bytes > limit:
            largest = by_size.pop()
            del self._buffers[largest], self._taken[largest]

    def clear(self) -> None:
        """Frees all buffers."""
        self._buffers.clear()
        self._taken.clear()


@dataclass
class Block:
    """Some kv heads of one sequence, or of several sequences with equal lengths and masks in plain
    storage.

    batches, kv_heads: which. len_q, len_k: lengths of each of its sequences. seq: the sequence's
    place in storage; None where storage is (B, S, ...) and used whole.
    """

    problem: AttentionProblem
    x: Operands
    batches: range
    kv_heads: range
    len_q: int
    len_k: int
    seq: Sequence | None = None
    _tokens: torch.Tensor | None = field(default=None, repr=False)

    @property
    def mask(self) -> MaskSpec:
        """That of its sequences, with the offset of their diagonal."""
        return self.problem.mask if self.seq is None else self.seq.mask

    @property
    def heads(self) -> int:
        """Independent matrices: batch rows times kv heads."""
        return len(self.batches) * len(self.kv_heads)

    @property
    def query_heads(self) -> range:
        group = self.problem.group
        return range(self.kv_heads.start * group, self.kv_heads.stop * group)

    def seen(self) -> range:
        """The keys from the first to the last that any of the block's queries sees by position."""
        key_range = self.mask.key_range(0, self.len_q, UNIT, self.len_q, self.len_k)
        begin = 0 if key_range.first_end else key_range.begin * UNIT
        return range(begin, max(begin, min(key_range.end * UNIT, self.len_k)))

    def rows_that_see(self, rows: range, cols: range) -> range:
        """The queries of `rows` that see any of keys `cols` by position. With grouped heads it
        returns all rows: those of several heads are interleaved, so that some positions are not a
        slice."""
        mask, off = self.mask, self.mask.offset(self.len_q, self.len_k)
        if self.problem.group > 1:
            return rows
        start, stop = rows.start, rows.stop
        if mask.right >= 0:
            start = max(start, cols.start - off - mask.right)
        if mask.left >= 0 and cols.start >= mask.first:
            stop = min(stop, cols.stop - off + mask.left)
        return range(start, stop)

    def with_one_key(self, rows: range) -> list[int]:
        """Which of queries `rows` see a single key by position, counted from the first of them."""
        mask, off = self.mask, self.mask.offset(self.len_q, self.len_k)
        if not mask.bounded:
            return list(range(len(rows))) if self.len_k == 1 else []
        i = torch.arange(rows.start, rows.stop, dtype=torch.int64, device="cpu") + off
        end = (i + mask.right + 1 if mask.right >= 0 else i * 0 + self.len_k).clamp_(0, self.len_k)
        begin = (i - mask.left if mask.left >= 0 else i * 0).clamp_(min=0)
        leading = torch.minimum(begin, end).clamp_(max=mask.first)
        return ((end - begin).clamp_(min=0) + leading == 1).nonzero().flatten().tolist()

    def ranges(self, rows: range) -> torch.Tensor:
        """The key_ranges of queries `rows`, as pairs: (B, G, R, M, pairs, 2); of packed sequences
        (1, 1, 1, M, pairs, 2)."""
        ranges = self.x.key_ranges
        assert ranges is not None
        if ranges.ndim == 2:
            assert self.seq is not None
            begin = self.seq.q_token
            ranges = ranges[begin + rows.start : begin + rows.stop][None, None, None]
        else:
            ranges = self.split(ranges[:, :, rows.start : rows.stop])
        return ranges.unflatten(-1, (-1, 2))

    def sees(self, rows: range, cols: range) -> bool:
        """Whether key_ranges and lists show any of keys `cols` to any of queries `rows`."""
        if self.x.block_rows is not None and not is_listed(self, rows, cols):
            return False
        if self.x.key_ranges is None:
            return True
        begin, end = self.ranges(rows).unbind(-1)
        begin, end = begin.clamp(min=cols.start), end.clamp(max=cols.stop)
        return bool((begin < end).any())

    def split(self, per_head) -> torch.Tensor:
        """A per-head tensor (batch, H, ...) cut down to (B, G, R, ...)."""
        b, h = self.batches, self.query_heads
        part = per_head[b.start : b.stop, h.start : h.stop]
        return part.unflatten(1, (len(self.kv_heads), self.problem.group))

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor laid out as q, as a view (B, len_q, G, R, dim) of the block."""
        h = self.query_heads
        if tensor.ndim == 3:
            assert self.seq is not None
            part = tensor[None, self.seq.q_token : self.seq.q_token + self.len_q]
        else:
            part = tensor[self.batches.start : self.batches.stop, : self.len_q]
        part = part[:, :, h.start : h.stop]
        return part.unflatten(2, (len(self.kv_heads), self.problem.group))

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor laid out as lse, as a view (B, G, R, len_q) of the block."""
        h = self.query_heads
        if tensor.ndim == 2:
            assert self.seq is not None
            part = tensor[None, h.start : h.stop, self.seq.q_token : self.seq.q_token + self.len_q]
        else:
            part = tensor[self.batches.start : self.batches.stop, h.start : h.stop, : self.len_q]
        return part.unflatten(1, (len(self.kv_heads), self.problem.group))

    def load_queries(
        self,
        tensor: torch.Tensor,
        rows: range,
        scratch: Scratch,
        name: str,
        dtype: torch.dtype | None = None,
        column: bool = False,
    ) -> torch.Tensor:
        """Rows of a tensor laid out as q, in scratch precision or `dtype`: (B G, R M, dim); with
        `column`, one more that is not set, (B G, R M, dim + 1)."""
        tile = self.queries(tensor)[:, rows.start : rows.stop].permute(0, 2, 3, 1, 4)
        *sizes, dim = tile.shape
        copy = scratch.take(name, *sizes, dim + column, dtype=dtype)
        copy[..., :dim].copy_(tile)
        return copy.view(self.heads, -1, dim + column)

    def store_queries(self, tensor: torch.Tensor, rows: range, tile: torch.Tensor) -> None:
        """The reverse of load_queries."""
        target = self.queries(tensor)[:, rows.start : rows.stop]
        b, m, g, r, dim = target.shape
        target.copy_(tile.view(b, g, r, m, dim).permute(0, 3, 1, 2, 4))

    def keys(self, storage: torch.Tensor, cols: range) -> torch.Tensor:
        """Keys `cols` of a storage as (B, N, G, dim): a view, except for pages, which are
        gathered."""
        g = self.kv_heads
        if self.seq is None:
            part = storage[self.batches.start : self.batches.stop, cols.start : cols.stop]
        elif len(self.seq.k_spans) == 1:
            part = _token_run(storage, self.seq.k_spans[0][0] + cols.start, len(cols))[None]
        else:
            part = storage[self._index(storage, cols)][None]
        return part[:, :, g.start : g.stop]

    def add_keys(self, storage: torch.Tensor, cols: range, tile: torch.Tensor) -> None:
        """Adds a tile (B G, N, dim) to keys `cols` of a gradient laid out as k; sets them if no
        other block has them."""
        b, g = len(self.batches), self.kv_heads
        grad = tile.view(b, len(g), len(cols), -1).transpose(1, 2)
        if self.seq is None:
            self.keys(storage, cols).copy_(grad)
        elif len(self.seq.k_spans) == 1:
            self.keys(storage, cols).add_(grad.to(storage.dtype))
        else:
            heads = storage[..., g.start : g.stop, :]
            index = self._index(storage, cols)
            heads.index_put_(index, grad[0].to(storage.dtype), accumulate=True)

    def _index(self, storage: torch.Tensor, cols: range) -> tuple[torch.Tensor, ...]:
        """Where keys `cols` of a scattered sequence are: (page, slot) of each."""
        if self._tokens is None:
            assert self.seq is not None
            runs = [
                torch.arange(token, token + n, dtype=torch.int64, device="cpu")
                for token, n in self.seq.k_spans
            ]
            self._tokens = torch.cat(runs)
        tokens, page_size = self._tokens[cols.start : cols.stop], storage.shape[1]
        return tokens // page_size, tokens % page_size


def _token_run(storage: torch.Tensor, token: int, count: int) -> torch.Tensor:
    """`count` consecutive tokens of one storage row, or of packed storage: (N, G, dim)."""
    if storage.ndim == 3:
        return storage[token : token + count]
    row, begin = divmod(token, storage.shape[1])
    return storage[row, begin : begin + count]


def is_scattered(x: Operands) -> bool:
    """Whether any sequence is not a whole row of (B, S, ...) storage, shares one, or has a diagonal
    or a place in the mask of dropout of its own."""
    places = (x.cu_seqlens_q, x.cu_seqlens_k, x.seqused_q, x.seqused_k)
    places += (x.block_table, x.kv_batch_idx, x.leftpad_k, x.q_offsets, x.origins)
    return any(place is not None for place in places)


def blocks(problem: AttentionProblem, x: Operands, apart: bool) -> Iterator[Block]:
    """The call's blocks; each has at most about SCORES_PER_TILE scores a tile.

    apart: whether several threads may share a block's query tiles; else each gets whole blocks.
    Tile sizes depend on a sequence's own lengths, never on what else is in the batch.
    """
    if is_scattered(x):
        for seq in sequences(problem, x):
            batches = range(seq.batch, seq.batch + 1)
            for kv_heads in parts(problem.heads_k, _matrices(problem, seq.len_q, seq.len_k, apart)):
                yield Block(problem, x, batches, kv_heads, seq.len_q, seq.len_k, seq)
        return
    len_q, len_k = problem.seqlen_q, problem.seqlen_k
    matrices = _matrices(problem, len_q, len_k, apart)
    for batches in parts(problem.batch, max(1, matrices // problem.heads_k)):
        for kv_heads in parts(problem.heads_k, matrices):
            yield Block(problem, x, batches, kv_heads, len_q, len_k)


def _matrices(problem: AttentionProblem, len_q: int, len_k: int, apart: bool) -> int:
    """How many kv heads share a tile. Each of our threads should have several tiles; torch's
    threads share a tile."""
    rows = min(len_q, query_rows(problem))
    scores = rows * problem.group * min(len_k, KEYS)
    heads, threads = problem.batch * problem.heads_k, torch.get_num_threads()
    if worth_threads(problem):
        tiles = len_q // max(1, rows) if apart else 2
        share, most = heads * tiles // (2 * threads), SCORES_PER_TILE
    else:
        share, most = heads, SCORES_PER_TILE * threads
    return max(1, min(most // max(1, scores), share))


def worth_threads(problem: AttentionProblem) -> bool:
    """Whether there are enough scores for threads of our own (see workers.py). Shorter calls end
    before the threads of torch's last operation stop spinning on the cores that ours would have.

    A backward of 8 heads of 512 x 512 takes 1.6 times as long by threads of our own as by torch's
    (measurements/cpu.md).
    """
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return pairs > SHORT


def query_rows(problem: AttentionProblem) -> int:
    """Query positions of a tile: times the group's heads they are about ROWS rows."""
    return max(1, ROWS // problem.group)


def parts(count: int, size: int) -> Iterator[range]:
    """range(count) in pieces of at most `size`."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def query_tiles(block: Block) -> Iterator[range]:
    """The block's query tiles in order."""
    return parts(block.len_q, query_rows(block.problem))


def key_tiles(block: Block, rows: range) -> Iterator[tuple[range, bool]]:
    """Keys that queries `rows` touch, in tiles of KEYS, each with whether any of its scores may be
    masked by position; a tile ends where that changes. Tiles that key_ranges or lists hide are left
    out.
    """
    key_range = block.mask.key_range(rows.start, len(rows), UNIT, block.len_q, block.len_k)
    bounds = (key_range.begin, key_range.full_begin, key_range.full_end, key_range.end)
    begin, full_begin, full_end, end = (min(unit * UNIT, block.len_k) for unit in bounds)
    if not block.mask.bounded:
        # The last keys, fewer than a UNIT, are all visible.
        full_end = end
    parts = (
        (0, min(key_range.first_end * UNIT, block.len_k), True),
        (begin, full_begin, True),
        (full_begin, full_end, False),
        (full_end, end, True),
    )
    for begin, stop, masked in parts:
        for start in range(begin, stop, KEYS):
            cols = range(start, min(start + KEYS, stop))
            if block.sees(rows, cols):
                yield cols, masked
