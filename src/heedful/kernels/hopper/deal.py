"""How programs come by their pieces of work: in strides, or drawn one by one from a counter.

Pieces of unlike length want drawing: which program is free next, only the device knows. The
producer draws ahead, while consumers are still at work, and tells them through shared memory: the
piece's number, and what it found out about it, so that it is not found out again by each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.compat import aggregate, optional

DEAL_SLOTS: gl.constexpr = gl.constexpr(2)
# Room for a piece's number and what else is told of it.
WORDS: gl.constexpr = gl.constexpr(12)


@aggregate
class Deal:
    """Pieces [0, count). drawn: address of how many were drawn beyond each program's first; None
    where programs go in strides, and with it the ring of what producers tell."""

    count: gl.tensor
    drawn: gl.tensor | gl.constexpr
    ring: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor | gl.constexpr
    empty: gl.shared_memory_descriptor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, count, drawn=None, ring=None, full=None, empty=None):
        self.count = count
        self.drawn = optional(drawn)
        self.ring = optional(ring)
        self.full = optional(full)
        self.empty = optional(empty)

    @gluon.jit
    def of(count, drawn, consumers: gl.constexpr):
        """In strides if `drawn` is None."""
        if drawn is None:
            return Deal(count)
        else:
            return Deal.by_drawing(count, drawn, consumers)

    @gluon.jit
    def by_drawing(count, drawn, consumers: gl.constexpr):
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        ring = gl.allocate_shared_memory(gl.int32, [DEAL_SLOTS * WORDS, 1], layout)
        full = gl.allocate_shared_memory(gl.int64, [DEAL_SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [DEAL_SLOTS, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(DEAL_SLOTS):
            mbarrier.init(full.index(slot), count=1)
            mbarrier.init(empty.index(slot), count=consumers)
        return Deal(count, drawn, ring, full, empty)

    @gluon.jit
    def draw(self, index):
        """The producer's next piece after `index`."""
        if self.drawn is None:
            return index + gl.num_programs(0)
        else:
            return gl.num_programs(0) + gl.atomic_add(self.drawn, 1, sem="relaxed")

    @gluon.jit
    def tell(self, words, at):
        """What the consumers are told: a piece's number and more; behind the last, no more."""
        if self.drawn is not None:
            mbarrier.wait(self.empty.index(at.slot), at.parity ^ 1)
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            for i in gl.static_range(len(words)):
                word = gl.full([1], words[i], gl.int32, layout)
                self.ring.index(at.slot * WORDS + i).store(word)
            mbarrier.arrive(self.full.index(at.slot), count=1)

    @gluon.jit
    def follow(self, index, at):
        """A consumer's next piece after `index`, which is the one that the producer tells of."""
        if self.drawn is None:
            return index + gl.num_programs(0)
        else:
            mbarrier.wait(self.full.index(at.slot), at.parity)
            return self.word(0, at)

    @gluon.jit
    def word(self, i: gl.constexpr, at):
        """Word i of what was told."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.ring.index(at.slot * WORDS + i).load(layout), 0)

    @gluon.jit
    def heard(self, at):
        """Lets the producer tell of another piece in this slot."""
        mbarrier.arrive(self.empty.index(at.slot), count=1)
