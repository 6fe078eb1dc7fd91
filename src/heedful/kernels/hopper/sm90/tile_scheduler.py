"""How programs get their work tiles: by a static stride, or one by one from a counter.

The dynamic scheduler is for work tiles of different lengths, since only the device knows which
program is free next. The producer advances while consumers are still at work. It commits the tile's
number and sizes to a ring in shared memory, so that consumers need not compute them again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.common.sequences import Seqlens, diagonal_offset
from heedful.kernels.hopper.sm90.block_range import hull_words, runs_in_words, words_of_runs
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.sequences import WorkTile, sequence, trim

SCHEDULER_STAGES: gl.constexpr = gl.constexpr(2)
# Words for a work tile's number, and for all else that is committed.
WORK_TILE_WORDS: gl.constexpr = gl.constexpr(12)


@gluon.jit
def l2_swizzle(index, blocks, heads, width, l2_groups):
    """(head, block) of work tile `index`, where each head has `blocks` tiles. Heads form groups of
    `width`, whose K and V share the L2 cache. Within a group, tiles go block by block, heads
    innermost. `l2_groups` such groups come before the last one, which has all remaining heads."""
    per_group = width * blocks
    group = gl.minimum(index // per_group, l2_groups)
    within = index - group * per_group
    first = group * width
    width = gl.where(group < l2_groups, width, heads - first)
    block = within // width
    return first + within - block * width, block


@gluon.jit
def decode(params, index):
    """The `WorkTile` of number `index`. Tiles go by groups of heads, and in each group row blocks
    go from the longest to the shortest. Packed sequences come one after the other, in the order of
    varlen_scheduler.py."""
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
    if params.mask.HAS_RIGHT or params.mask.RANGES or params.mask.blocks.SIDE:
        block = row_blocks - 1 - block
    if params.order.varlen_tiles is None:
        batch = head // params.gqa.heads
        head -= batch * params.gqa.heads
    token_q, len_q = sequence(params.seqs.cu_q, batch, params.seqs.seqlen_q)
    token_k, len_k = sequence(params.seqs.cu_k, batch, params.seqs.seqlen_k)
    off = diagonal_offset(batch, len_q, len_k, params.mask)
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
    """Work tiles [0, count), `tiles` of each split. tile_counter: address of the count of tiles
    that were taken beyond each program's first. It is None with a static schedule, and so is the
    ring of committed tiles with its barriers."""

    tiles: gl.tensor
    count: gl.tensor
    tile_counter: gl.tensor | gl.constexpr = None
    ring: gl.shared_memory_descriptor | gl.constexpr = None
    full: gl.shared_memory_descriptor | gl.constexpr = None
    empty: gl.shared_memory_descriptor | gl.constexpr = None
    WORDS: gl.constexpr = WORK_TILE_WORDS

    @gluon.jit
    def of(params, readers: gl.constexpr):
        """The scheduler of a forward; static if there is no tile counter. readers: roles that take
        the producer's work tiles."""
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
            WORDS: gl.constexpr = WORK_TILE_WORDS + hull_words(
                params.mask.RANGES, params.tile.CONSUMERS
            )
            return TileScheduler.dynamic(tiles, count, counter, readers, WORDS)

    @gluon.jit
    def dynamic(
        tiles, count, tile_counter, consumers: gl.constexpr, WORDS: gl.constexpr = WORK_TILE_WORDS
    ):
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ring = gl.allocate_shared_memory(gl.int32, [SCHEDULER_STAGES * WORDS, 1], layout)
        full = gl.allocate_shared_memory(gl.int64, [SCHEDULER_STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(
            gl.int64, [SCHEDULER_STAGES, 1], mbarrier.MBarrierLayout()
        )
        for stage in gl.static_range(SCHEDULER_STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=consumers)
        return TileScheduler(tiles, count, tile_counter, ring, full, empty, WORDS)

    @gluon.jit
    def advance(self, index):
        """The producer's next work tile after `index`."""
        if self.tile_counter is None:
            return index + gl.num_programs(0)
        else:
            return gl.num_programs(0) + gl.atomic_add(self.tile_counter, 1, sem="relaxed")

    @gluon.jit
    def fetch_next_work(self, index):
        """As `advance`, but the counter counts from the first tile on: tiles begin in the order of
        their numbers, whatever the order of programs. index: initially one stride below a program's
        number."""
        if self.tile_counter is None:
            return index + gl.num_programs(0)
        else:
            return gl.atomic_add(self.tile_counter, 1, sem="relaxed")

    @gluon.jit
    def producer_commit(self, words, state, hulls):
        """Commits words for the consumers: a work tile's number and more, or the end's number
        alone. hulls: those of `words_of_runs`."""
        if self.tile_counter is not None:
            mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            for i in gl.static_range(len(words)):
                word = gl.full([1], words[i], gl.int32, layout)
                self.ring.index(state.index * self.WORDS + i).store(word)
            for i in gl.static_range(len(hulls)):
                word = gl.full([1], hulls[i], gl.int32, layout)
                self.ring.index(state.index * self.WORDS + (WORK_TILE_WORDS + i)).store(word)
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
        """Words [FIRST, END) of the committed ones."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        words = ()
        for i in gl.static_range(FIRST, END):
            word = self.ring.index(state.index * self.WORDS + i).load(layout)
            words = words + (gl.sum(word, 0),)
        return words

    @gluon.jit
    def consumer_release(self, state):
        """Lets the producer commit another work tile in this stage."""
        mbarrier.arrive(self.empty.index(state.index), count=1)


@gluon.jit
def work_tile_at(params, scheduler, index):
    """(work tile `index`, its split of the keys). Tiles of one split are neighbours, so that the
    tiles of a head share its keys."""
    if params.split.splits is None:
        return trim(params, decode(params, index)), gl.to_tensor(0)
    else:
        split = index // scheduler.tiles
        return trim(params, decode(params, index - split * scheduler.tiles)), split


@gluon.jit
def next_part(params, scheduler, index):
    """The number of the producer's first work tile from `index` on that has keys, where splits are
    parts that end at fixed positions: a short sequence has fewer than the longest. No consumer
    takes the others, and no merge looks for them."""
    if params.split.splits is not None and params.split.PART_TILES is not None:
        PART_KEYS: gl.constexpr = params.split.PART_TILES * params.tile.BLOCK_N
        is_absent = index < scheduler.count
        while is_absent:
            at = gl.minimum(index, scheduler.count - 1)
            tile, split = work_tile_at(params, scheduler, at)
            is_absent = (split > 0) & (split * PART_KEYS >= tile.seq.len_k)
            if is_absent:
                index = scheduler.advance(index)
            is_absent = is_absent & (index < scheduler.count)
        return index
    else:
        return index


@gluon.constexpr_function
def have_one_size(*pointers):
    """Whether all sequences have the same queries, keys and diagonal: a call has none of the
    pointers to those of each. Triton 3.6 hands a function of constants no group that has an absent
    pointer, and takes what a compiled function returns for a value of the run."""
    return all(pointer is None for pointer in pointers)


@gluon.jit
def commit_work_tile(params, scheduler, index, tile, split, state):
    """Commits the facts of work tile `index` that `current_work_tile` needs, without sizes that all
    sequences have."""
    words = (index, split, tile.batch, tile.head, tile.row)
    ONE_SIZE: gl.constexpr = have_one_size(
        params.order.varlen_tiles,
        params.seqs.cu_k,
        params.seqs.used_q,
        params.seqs.used_k,
        params.seqs.leftpad_k,
        params.mask.offsets,
    )
    if not ONE_SIZE:
        seq = tile.seq
        words = words + (seq.token_q, seq.len_q, seq.len_k, seq.off, seq.stored_q)
    if params.mask.RANGES == 2 and scheduler.tile_counter is not None:
        scheduler.producer_commit(words, state, words_of_runs(params, tile))
    else:
        scheduler.producer_commit(words, state, ())


@gluon.jit
def current_hulls(params, scheduler, state, CONSUMER: gl.constexpr):
    """(the `NBlockRange` of the program, one with the whole tiles of this consumer) of the current
    work tile, if the producer committed them. To be called before `current_work_tile`, which lets
    the producer go on."""
    if params.mask.RANGES == 2 and scheduler.tile_counter is not None:
        PROGRAM: gl.constexpr = WORK_TILE_WORDS + hull_words(2, 0)
        MINE: gl.constexpr = WORK_TILE_WORDS + hull_words(2, CONSUMER)
        program = scheduler.words(WORK_TILE_WORDS, PROGRAM, state)
        return runs_in_words(program, scheduler.words(MINE, MINE + 2, state))
    else:
        return ()


@gluon.jit
def current_work_tile(params, scheduler, index, state):
    """A consumer's work tile `index`, as `work_tile_at` gives it, but without the places
    of keys."""
    if scheduler.tile_counter is None:
        return work_tile_at(params, scheduler, index)
    else:
        split, batch, head, row = scheduler.words(1, 5, state)
        # ptxas: after the lengths, this line would change the order of registers.
        kv_head = head // params.gqa.group
        token_q, len_q, len_k = gl.to_tensor(0), params.seqs.seqlen_q, params.seqs.seqlen_k
        off = params.mask.shift + params.mask.bottom_right * (len_k - len_q)
        stored_q = len_q
        ONE_SIZE: gl.constexpr = have_one_size(
            params.order.varlen_tiles,
            params.seqs.cu_k,
            params.seqs.used_q,
            params.seqs.used_k,
            params.seqs.leftpad_k,
            params.mask.offsets,
        )
        if not ONE_SIZE:
            token_q, len_q, len_k, off, stored_q = scheduler.words(5, 10, state)
        scheduler.consumer_release(state)
        # Consumers do not need to know where keys lie, and have no registers for it.
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
    """(number of a consumer's next work tile after `index`, the tile). After the last one the tile
    is meaningless."""
    index = scheduler.get_current_work(index, state)
    tile, _ = current_work_tile(params, scheduler, gl.minimum(index, scheduler.count - 1), state)
    return index, tile
