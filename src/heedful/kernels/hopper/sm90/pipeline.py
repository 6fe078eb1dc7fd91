"""Rings of tiles in shared memory, each stage with a full and an empty barrier."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import aggregate, reinterpret, tma_load


@aggregate
class PipelineState:
    """Which stage of a ring is next, and the phase of the pass through it."""

    index: gl.tensor
    phase: gl.tensor
    stages: gl.constexpr

    @gluon.jit
    def start(stages: gl.constexpr):
        return PipelineState(gl.to_tensor(0), gl.to_tensor(0), stages)

    @gluon.jit
    def next(self):
        index = self.index + 1
        wraps = index == self.stages
        return PipelineState(
            gl.where(wraps, 0, index), self.phase ^ gl.where(wraps, 1, 0), self.stages
        )

    @gluon.jit
    def ahead(self, count: gl.constexpr):
        """The stage `count` further on, at most once around."""
        index = self.index + count
        wraps = index >= self.stages
        index = gl.where(wraps, index - self.stages, index)
        return PipelineState(index, self.phase ^ gl.where(wraps, 1, 0), self.stages)


@gluon.jit
def stage_of(count, stages: gl.constexpr):
    """Where a ring is once it has advanced so often."""
    # ptxas: one number takes less registers than a state for each of rings that advance together.
    return PipelineState(count % stages, (count // stages) & 1, stages)


@gluon.constexpr_function
def box_rows(shape):
    """Rows of a box, whatever dims they are spread over."""
    return math.prod(shape[:-1])


@gluon.jit
def allocate_boxes(desc, boxes: gl.constexpr):
    """Memory for that many boxes."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [boxes] + shape, desc.layout)


@gluon.jit
def matrix(box, rows: gl.constexpr, dim: gl.constexpr):
    """A box as (rows, dim)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, dim], box.dtype)
    return reinterpret(box, box.dtype, [rows, dim], layout)


@gluon.jit
def pair_of_boxes(boxes, index, rows: gl.constexpr, dim: gl.constexpr):
    """Boxes 2 index and 2 index + 1 as (rows, dim)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, dim], boxes.dtype)
    pairs: gl.constexpr = boxes.shape[0] // 2
    return reinterpret(boxes, boxes.dtype, [pairs, rows, dim], layout).index(index)


@gluon.constexpr_function
def full_barriers(stages, consumers):
    """How many full barriers there are in a ring whose tiles go round robin to `consumers`.

    One bit tells a phase of a barrier from the one before it, and no further. So who waits at a
    barrier must see each of its phases. Of a multiple of `consumers` each barrier has one consumer.
    """
    return -(-stages // consumers) * consumers


@aggregate
class Pipeline:
    """`stages` tiles of `rows` x `dim` filled by TMA and read by `readers` warpgroups.

    A tile is written as a (1, ..., 1, rows, dim) box, or one whose rows are spread over dims, and
    read as (rows, dim). One of 192 columns is three boxes of 64: two beside each other in `boxes`,
    read as one, and a third in `tails`, else None. full: as many as there are stages; or more,
    where tiles go round robin to several consumers, see `full_barriers`, which then have a state of
    their own.
    """

    boxes: gl.shared_memory_descriptor
    tails: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    rows: gl.constexpr
    dim: gl.constexpr

    @gluon.jit
    def allocate(
        desc,
        stages: gl.constexpr,
        readers: gl.constexpr,
        HAS_TAIL: gl.constexpr = False,
        consumers: gl.constexpr = 1,
    ):
        shape: gl.constexpr = desc.block_type.shape
        each: gl.constexpr = 2 if HAS_TAIL else 1
        boxes = allocate_boxes(desc, each * stages)
        tails = None
        if HAS_TAIL:
            tails = allocate_boxes(desc, stages)
        dim: gl.constexpr = shape[-1] * each
        return Pipeline.over(boxes, stages, readers, box_rows(shape), dim, tails, consumers)

    @gluon.jit
    def beside(desc, other):
        """Tiles that share the stages of another ring, and its barriers."""
        shape: gl.constexpr = desc.block_type.shape
        boxes = allocate_boxes(desc, other.full.shape[0])
        return Pipeline(boxes, None, other.full, other.empty, box_rows(shape), shape[-1])

    @gluon.jit
    def of_tiles(
        dtype: gl.constexpr,
        rows: gl.constexpr,
        dim: gl.constexpr,
        stages: gl.constexpr,
        readers: gl.constexpr,
    ):
        """Tiles that several boxes fill, see `sequences.load_pages`."""
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, dim], dtype)
        boxes = gl.allocate_shared_memory(dtype, [stages, rows, dim], layout)
        return Pipeline.over(boxes, stages, readers, rows, dim)

    @gluon.jit
    def over(
        boxes,
        stages: gl.constexpr,
        readers: gl.constexpr,
        rows: gl.constexpr,
        dim: gl.constexpr,
        tails=None,
        consumers: gl.constexpr = 1,
    ):
        """The ring of these boxes, its barriers ready."""
        fulls: gl.constexpr = full_barriers(stages, consumers)
        full = gl.allocate_shared_memory(gl.int64, [fulls, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        for index in gl.static_range(fulls):
            mbarrier.init(full.index(index), count=1)
            if index < stages:
                mbarrier.init(empty.index(index), count=readers)
        return Pipeline(boxes, tails, full, empty, rows, dim)

    @gluon.jit
    def barrier_state(self, state, full_state):
        """Where the full barrier of the tile at `state` is."""
        if self.full.shape[0] == self.empty.shape[0]:
            return state
        else:
            return full_state

    @gluon.jit
    def producer_acquire(self, state, full_state):
        """Waits until stage `state` is free, and returns its full barrier."""
        full = self.full.index(full_state.index)
        mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)
        return full

    @gluon.jit
    def load(self, desc, coordinates, state, full_state=None):
        """Waits until stage `state` is free and starts filling it."""
        full = self.producer_acquire(state, self.barrier_state(state, full_state))
        if self.tails is None:
            mbarrier.expect(full, desc.block_type.nbytes)
            tma_load(desc, coordinates, full, self.boxes.index(state.index))
        else:
            WIDTH: gl.constexpr = desc.block_type.shape[-1]
            mbarrier.expect(full, 3 * desc.block_type.nbytes)
            tma_load(desc, coordinates, full, self.boxes.index(2 * state.index))
            columns = coordinates[:-1] + [WIDTH]
            tma_load(desc, columns, full, self.boxes.index(2 * state.index + 1))
            columns = coordinates[:-1] + [2 * WIDTH]
            tma_load(desc, columns, full, self.tails.index(state.index))

    @gluon.jit
    def consumer_wait(self, state, pred=True):
        barrier.wait(self.full.index(state.index), state.phase, pred)

    @gluon.jit
    def tile(self, state):
        """A tile, or of three boxes the first two."""
        if self.tails is None:
            return matrix(self.boxes.index(state.index), self.rows, self.dim)
        else:
            return pair_of_boxes(self.boxes, state.index, self.rows, self.dim)

    @gluon.jit
    def tail(self, state):
        """The third box of a tile."""
        return matrix(self.tails.index(state.index), self.rows, self.dim // 2)

    @gluon.jit
    def consumer_release_after_mma(self, state):
        """Frees a stage that only finished matrix products of this warpgroup have read."""
        barrier.arrive_after_mma(self.empty.index(state.index))

    @gluon.jit
    def consumer_release(self, state):
        mbarrier.arrive(self.empty.index(state.index), count=1)
