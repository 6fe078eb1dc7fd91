"""Queries of the MLA decodes: nine boxes of 64 columns in shared memory. Eight of them form two
halves.

M query rows, D columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.mla.boxes import BOXES, HALF, VALUE_BOXES, WIDTH, boxes_of
from heedful.kernels.hopper.sm90.compat import reinterpret, tma_load


@gluon.jit
def allocate_queries(dtype: gl.constexpr, ROWS: gl.constexpr):
    """(memory of both halves, memory of the ninth box) for ROWS rows."""
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    q = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], wide)
    return q, gl.allocate_shared_memory(dtype, [1, ROWS, WIDTH], narrow)


@gluon.jit
def query_box(shared, BOX: gl.constexpr, zero=0):
    """A box of queries: (rows, 64). zero: a 0 that the compiler does not know to be 0, so that it
    keeps no address in a register over the loop."""
    if BOX == VALUE_BOXES:
        return shared.q_rest.index(zero)
    else:
        return boxes_of(shared.q).index(BOX + zero)


@gluon.jit
def kept_boxes(shared, COUNT: gl.constexpr, layout: gl.constexpr):
    """COUNT boxes of queries in registers, the last box first."""
    kept = ()
    for i in gl.static_range(COUNT):
        kept = kept + (query_box(shared, BOXES - 1 - i).load(layout),)
    return kept


@gluon.constexpr_function
def query_layout(columns):
    """The register layout of queries while they are loaded: a thread has eight of a row."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def fetch_box(io, memory, full, params, segment, box):
    """Starts loading 64 columns of a tile's queries by their tensor map: no thread computes
    addresses. Rows past the last token and columns past the last one are zero."""
    group = params.shape.heads_q // params.shape.heads_k
    at = [segment.b, segment.g, segment.row0 // group, segment.row0 % group, box * WIDTH]
    shape: gl.constexpr = io.q_map.block_type.shape
    tma_load(io.q_map, at, full, reinterpret(memory, io.q_map.dtype, shape, io.q_map.layout))


@gluon.jit
def load_columns(io, params, segment, first: gl.constexpr, COLUMNS: gl.constexpr):
    """Queries of a tile from column `first` on."""
    layout: gl.constexpr = query_layout(COLUMNS)
    dims_D = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return load_dims(io, params, segment, dims_D, layout)


@gluon.jit
def load_dims(io, params, segment, dims_D, layout: gl.constexpr):
    """These columns of a tile's queries. Rows that are not in use and columns past the last one are
    zero."""
    group = params.shape.heads_q // params.shape.heads_k
    ROWS_OF: gl.constexpr = params.tile.BLOCK_M
    rows_M = segment.row0 + gl.arange(0, ROWS_OF, layout=gl.SliceLayout(1, layout))
    pos_M = rows_M // group
    head_M = segment.g * group + rows_M % group
    at_M = pos_M.to(gl.int64) * io.q.stride_n + head_M * io.q.stride_h
    base = io.q.ptr + segment.b.to(gl.int64) * io.q.stride_b
    ok_MD = (pos_M < segment.seq.len_q)[:, None] & (dims_D < params.tile.HEAD_DIM)[None, :]
    return gl.load(base + at_M[:, None] + dims_D[None, :], mask=ok_MD, other=0.0)
