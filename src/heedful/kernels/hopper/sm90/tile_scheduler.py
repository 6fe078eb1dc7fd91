"""How programs come by their work tiles: a static stride, or one by one from a counter.

Work tiles of unlike length want the dynamic scheduler: which program is free next, only the device
knows. The producer advances while consumers are still at work, and commits to shared memory the
tile's number and what it found out about it, so that it is not found out again by each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.common.sequences import Seqlens
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.sequences import WorkTile, sequence, trim

SCHEDULER_STAGES: gl.constexpr = gl.constexpr(2)
# Room for a work tile's number and what else is committed.
WORK_TILE_WORDS: gl.constexpr = gl.constexpr(12)


@gluon.jit
def l2_swizzle(index, blocks, heads, width, l2_groups):
    """Head and block of work tile `index` of heads that have `blocks` each: groups of `width`
    heads, whose K and V share the L2 cache, and block by block the group's heads innermost.
    `l2_groups` come before the last, which takes the heads that remain."""
    per_group = width * blocks
    group = gl.minimum(index // per_group, l2_groups)
    within = index - group * per_group
    first = group * width
    width = gl.where(group < l2_groups, width, heads - first)
    block = within // width
    return first + within - block * width, block


@gluon.jit
def decode(params, index):
    """Tile `index`: groups of heads, in each of them row blocks from the longest to the shortest.
    Of packed sequences one after the other, in the order of varlen_scheduler.py."""
    row_blocks = params.order.row_blocks
    heads = params.gqa.heads
    batch = gl.to_tensor(0)
    if params.order.varlen_tiles is None:
        heads = params.order.tiles // row_blocks
    else:
        entry = params.order.varlen_tiles + 1 + 2 * (index // heads)
        batch = gl.load(entry)
        index -= gl.load(entry + 1) * heads
        row_blocks = gl.cdiv(
            sequence(params.seqs.cu_q, batch, params.seqs.seqlen_q)[1], ROWS * params.tile.CONSUMERS
        )
    head, block = l2_swizzle(
        index, row_blocks, heads, params.order.l2_heads, params.order.l2_groups
    )
    if params.mask.HAS_RIGHT:
        block = row_blocks - 1 - block
    if params.order.varlen_tiles is None:
        batch = head // params.gqa.heads
        head -= batch * params.gqa.heads
    token_q, len_q = sequence(params.seqs.cu_q, batch, params.seqs.seqlen_q)
    token_k, len_k = sequence(params.seqs.cu_k, batch, params.seqs.seqlen_k)
    off = params.mask.shift + params.mask.bottom_right * (len_k - len_q)
    return WorkTile(
        batch=batch,
        head=head,
        kv_head=head // params.gqa.group,
        row=block * (ROWS * params.tile.CONSUMERS),
        seq=Seqlens(
            token_q=token_q,
            len_q=len_q,
            stored_q=len_q,
            token_k=token_k,
            len_k=len_k,
            stored_k=len_k,
            off=off,
        ),
        kv_batch=batch,
    )


@aggregate
class TileScheduler:
    """Work tiles [0, count), `tiles` of each split. tile_counter: address of how many
    were taken beyond each program's first; None with a static schedule, and with it the ring of
    committed tiles."""

    tiles: gl.tensor
    count: gl.tensor
    tile_counter: gl.tensor | gl.constexpr = None
    ring: gl.shared_memory_descriptor | gl.constexpr = None
    full: gl.shared_memory_descriptor | gl.constexpr = None
    empty: gl.shared_memory_descriptor | gl.constexpr = None

    @gluon.jit
    def of(params):
        """Static if there is no tile counter."""
        tiles = params.order.tiles
        if params.order.varlen_tiles is not None:
            tiles = gl.load(params.order.varlen_tiles) * params.gqa.heads
        count = tiles
        if params.split.splits is not None:
            count = tiles * params.split.splits
        if params.order.tile_counter is None:
            return TileScheduler(tiles, count)
        else:
            counter = params.order.tile_counter
            return TileScheduler.dynamic(tiles, count, counter, params.tile.CONSUMERS)

    @gluon.jit
    def dynamic(tiles, count, tile_counter, consumers: gl.constexpr):
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ring = gl.allocate_shared_memory(gl.int32, [SCHEDULER_STAGES * WORK_TILE_WORDS, 1], layout)
        full = gl.allocate_shared_memory(gl.int64, [SCHEDULER_STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(
            gl.int64, [SCHEDULER_STAGES, 1], mbarrier.MBarrierLayout()
        )
        for stage in gl.static_range(SCHEDULER_STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=consumers)
        return TileScheduler(tiles, count, tile_counter, ring, full, empty)

    @gluon.jit
    def advance(self, index):
        """The producer's next work tile after `index`."""
        if self.tile_counter is None:
            return index + gl.num_programs(0)
        else:
            return gl.num_programs(0) + gl.atomic_add(self.tile_counter, 1, sem="relaxed")

    @gluon.jit
    def fetch_next_work(self, index):
        """As `advance`, with a counter that counts from the first tile on, so that tiles begin in
        the order of their numbers whatever the order of programs. index: at first one stride before
        a program's number."""
        if self.tile_counter is None:
            return index + gl.num_programs(0)
        else:
            return gl.atomic_add(self.tile_counter, 1, sem="relaxed")

    @gluon.jit
    def producer_commit(self, words, state):
        """What the consumers get: a work tile's number and more; behind the last, no more."""
        if self.tile_counter is not None:
            mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            for i in gl.static_range(len(words)):
                word = gl.full([1], words[i], gl.int32, layout)
                self.ring.index(state.index * WORK_TILE_WORDS + i).store(word)
            mbarrier.arrive(self.full.index(state.index), count=1)

    @gluon.jit
    def get_current_work(self, index, state):
        """A consumer's next work tile after `index`: the one that the producer committed."""
        if self.tile_counter is None:
            return index + gl.num_programs(0)
        else:
            mbarrier.wait(self.full.index(state.index), state.phase)
            return self.words(0, 1, state)[0]

    @gluon.jit
    def words(self, FIRST: gl.constexpr, END: gl.constexpr, state):
        """Words [FIRST, END) of what was committed."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        words = ()
        for i in gl.static_range(FIRST, END):
            word = self.ring.index(state.index * WORK_TILE_WORDS + i).load(layout)
            words = words + (gl.sum(word, 0),)
        return words

    @gluon.jit
    def consumer_release(self, state):
        """Lets the producer commit another work tile in this stage."""
        mbarrier.arrive(self.empty.index(state.index), count=1)


@gluon.jit
def work_tile_at(params, scheduler, index):
    """Work tile `index`, and which split of its keys it is. Tiles of one split are
    neighbours, so that those of a head share its keys."""
    if params.split.splits is None:
        return trim(params, decode(params, index)), gl.to_tensor(0)
    else:
        split = index // scheduler.tiles
        return trim(params, decode(params, index - split * scheduler.tiles)), split


@gluon.jit
def commit_work_tile(params, scheduler, index, tile, split, state):
    """Commits what `current_work_tile` needs of work tile `index`. Sizes of dense sequences are the
    same in all."""
    if params.order.varlen_tiles is None:
        scheduler.producer_commit((index, split, tile.batch, tile.head, tile.row), state)
    else:
        seq = tile.seq
        sizes = (seq.token_q, seq.len_q, seq.len_k, seq.off, seq.stored_q)
        scheduler.producer_commit((index, split, tile.batch, tile.head, tile.row) + sizes, state)


@gluon.jit
def current_work_tile(params, scheduler, index, state):
    """A consumer's work tile `index`, as `work_tile_at` gives it but for where keys lie."""
    if scheduler.tile_counter is None:
        return work_tile_at(params, scheduler, index)
    else:
        split, batch, head, row = scheduler.words(1, 5, state)
        # ptxas: here, since behind the lengths it is another order of registers.
        kv_head = head // params.gqa.group
        token_q, len_q, len_k = gl.to_tensor(0), params.seqs.seqlen_q, params.seqs.seqlen_k
        off = params.mask.shift + params.mask.bottom_right * (len_k - len_q)
        stored_q = len_q
        if params.order.varlen_tiles is not None:
            token_q, len_q, len_k, off, stored_q = scheduler.words(5, 10, state)
        scheduler.consumer_release(state)
        # Where keys lie consumers do not need to know, and have no registers for.
        unknown = gl.to_tensor(0)
        tile = WorkTile(
            batch=batch,
            head=head,
            kv_head=kv_head,
            row=row,
            seq=Seqlens(
                token_q=token_q,
                len_q=len_q,
                stored_q=stored_q,
                token_k=unknown,
                len_k=len_k,
                stored_k=unknown,
                off=off,
            ),
            kv_batch=batch,
        )
        return tile, split


@gluon.jit
def next_work_tile(params, scheduler, index, state):
    """The number of a consumer's next work tile after `index`, and the tile; behind the last one a
    tile that means nothing."""
    index = scheduler.get_current_work(index, state)
    tile, _ = current_work_tile(params, scheduler, gl.minimum(index, scheduler.count - 1), state)
    return index, tile
