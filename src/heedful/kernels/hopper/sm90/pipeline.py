"""Rings of tiles in shared memory. Each stage of a ring has a full and an empty barrier: the
producer waits for the empty one and fills the stage, consumers wait for the full one and release
the stage."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.sm90 import barrier
from heedful.kernels.hopper.sm90.compat import aggregate, reinterpret, tma_load


@aggregate
class PipelineState:
    """The next stage of a ring (index), and the parity of the current pass through the ring
    (phase)."""

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
        """The state `count` stages later; `count` is at most once around."""
        index = self.index + count
        wraps = index >= self.stages
        index = gl.where(wraps, index - self.stages, index)
        return PipelineState(index, self.phase ^ gl.where(wraps, 1, 0), self.stages)


@gluon.jit
def stage_of(count, stages: gl.constexpr):
    """The state of a ring that has advanced `count` times."""
    # ptxas: one number takes fewer registers than a state for each of several rings that advance
    # together.
    return PipelineState(count % stages, (count // stages) & 1, stages)


@gluon.constexpr_function
def box_rows(shape):
    """Rows of a TMA box: the product of all dims but the last."""
    return math.prod(shape[:-1])


@gluon.jit
def allocate_boxes(desc, boxes: gl.constexpr):
    """Shared memory for `boxes` boxes of a tensor map."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [boxes] + shape, desc.layout)


@gluon.jit
def matrix(box, rows: gl.constexpr, dim: gl.constexpr):
    """A box as (rows, dim)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, dim], box.dtype)
    return reinterpret(box, box.dtype, [rows, dim], layout)


@gluon.jit
def pair_of_boxes(boxes, index, rows: gl.constexpr, dim: gl.constexpr):
    """Boxes 2 index and 2 index + 1 as one tile (rows, dim)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, dim], boxes.dtype)
    pairs: gl.constexpr = boxes.shape[0] // 2
    return reinterpret(boxes, boxes.dtype, [pairs, rows, dim], layout).index(index)


@gluon.constexpr_function
def full_barriers(stages, consumers):
    """How many full barriers a ring has whose tiles go round robin to `consumers`.

    A parity distinguishes a phase of a barrier only from the phase before it. So whoever waits at a
    barrier must see each of its phases. With a multiple of `consumers` barriers, each barrier has
    only one consumer.
    """
    return -(-stages // consumers) * consumers


@aggregate
class Pipeline:
    """A ring of `stages` tiles of `rows` x `dim`, filled by TMA and read by `readers` warpgroups.

    A tile is written as a (1, ..., 1, rows, dim) box, or as one whose rows are spread over several
    dims, and read as (rows, dim). A tile of 192 columns is three boxes of 64: two adjacent ones in
    `boxes`, which are read as one, and a third in `tails`. For other widths `tails` is None. full:
    one barrier for each stage. If tiles go round robin to several consumers, there may be more
    (`full_barriers`); then they have a pipeline state of their own.
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
        """A ring that shares the stages of another ring, and its barriers."""
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
        """A ring whose tiles are each filled by several boxes, see `sequences.load_pages`."""
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
        """The ring of these boxes, with initialised barriers."""
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
        """The state of the full barriers: `state`, or `full_state` if there are more barriers than
        stages."""
        if self.full.shape[0] == self.empty.shape[0]:
            return state
        else:
            return full_state

    @gluon.jit
    def producer_acquire(self, state, full_state):
        """Waits until stage `state` is empty, and returns its full barrier."""
        full = self.full.index(full_state.index)
        mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)
        return full

    @gluon.jit
    def load(self, desc, coordinates, state, full_state=None):
        """Waits until stage `state` is empty and starts filling it."""
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
        """A tile; the first two boxes of a tile that has three."""
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
        """Frees a stage which only finished matrix products of this warpgroup have read."""
        barrier.arrive_after_mma(self.empty.index(state.index))

    @gluon.jit
    def consumer_release(self, state):
        mbarrier.arrive(self.empty.index(state.index), count=1)
