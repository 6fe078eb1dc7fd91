"""How one consumer's rows leave the chip: normalised through TMA, or as one part of several.

M query rows, E v dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from heedful.kernels.hopper.compat import aggregate, optional, tma_store
from heedful.kernels.hopper.schedule import ROWS, stored_rows_at
from heedful.kernels.hopper.softmax import scale_rows

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


@aggregate
class Outputs:
    """Where results go, and the sink logits that enter them; lse and sink may be None.

    parts: where the keys are split, float32 results of each split (split, batch, row, head, dim),
    dense, and lse has a leading split too; else None.
    """

    desc: tma.tensor_descriptor
    boxes: gl.shared_memory_descriptor | gl.constexpr
    lse: gl.tensor | gl.constexpr
    sink: gl.tensor | gl.constexpr
    parts: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, desc, boxes, lse, sink, parts):
        self.desc = desc
        self.boxes = optional(boxes)
        self.lse = optional(lse)
        self.sink = optional(sink)
        self.parts = optional(parts)


@gluon.jit
def first_token(shape, tile):
    """The place of a sequence's first query among the tokens of all."""
    if shape.cu_q is not None:
        return tile.start_q.to(gl.int64)
    else:
        return tile.batch.to(gl.int64) * shape.seqlen_q


@gluon.jit
def store_lse(outputs, lse_M, tile, row, split, shape):
    """Writes the log-sum-exp of rows from `row` on."""
    rows_M = row + gl.arange(0, ROWS, layout=lse_M.type.layout)
    if shape.cu_q is not None:
        base = tile.head.to(gl.int64) * shape.total_q + tile.start_q
    else:
        base = (tile.batch * shape.heads + tile.head).to(gl.int64) * shape.seqlen_q
    if outputs.parts is not None:
        base += split.to(gl.int64) * shape.total_q * shape.heads
    if shape.storage.used_q is not None:
        lse_M = gl.where(rows_M < tile.len_q, lse_M, float("-inf"))
    gl.store(outputs.lse + base + rows_M, lse_M, mask=rows_M < tile.stored_q)


@gluon.jit
def store_part(outputs, acc_ME, tile, row, split, shape):
    """Writes one split's normalised rows in float32."""
    layout: gl.constexpr = acc_ME.type.layout
    rows_M = gl.arange(0, acc_ME.shape[0], layout=gl.SliceLayout(1, layout))
    dims_E = gl.arange(0, acc_ME.shape[1], layout=gl.SliceLayout(0, layout))
    token = split.to(gl.int64) * shape.total_q + first_token(shape, tile) + row
    base = outputs.parts + (token * shape.heads + tile.head) * shape.dim_v
    step = shape.heads * shape.dim_v
    mask_ME = (rows_M < tile.len_q - row)[:, None] & (dims_E < shape.dim_v)[None, :]
    gl.store(base + (rows_M * step)[:, None] + dims_E[None, :], acc_ME, mask=mask_ME)


@gluon.jit
def store_rows(outputs, o_smem, acc_ME, m_M, l_M, tile, row, split, shape):
    """Normalises one consumer's rows and writes them and their log-sum-exp."""
    factor_M = gl.full(l_M.shape, 1.0, gl.float32, l_M.type.layout)
    if outputs.sink is not None:
        sink = gl.load(outputs.sink + tile.head) * LOG2E
        if outputs.parts is not None:
            # It enters once.
            sink = gl.where(split == 0, sink, float("-inf"))
        top_M = gl.maximum(m_M, sink)
        shift_M = gl.where(top_M == float("-inf"), 0.0, top_M)
        factor_M = gl.exp2(m_M - shift_M)
        l_M = l_M * factor_M + gl.exp2(sink - shift_M)
        m_M = top_M
    seen_M = l_M > 0.0
    inverse_M = gl.where(seen_M, factor_M / l_M, 0.0)
    if shape.dropout.seed is not None:
        inverse_M *= shape.dropout.scale
    if outputs.parts is not None:
        store_part(outputs, scale_rows(acc_ME, inverse_M), tile, row, split, shape)
    else:
        tma.store_wait(0)
        out_ME = scale_rows(acc_ME, inverse_M)
        if shape.storage.used_q is not None:
            # Rows in storage that are not in use may hold anything, NaN too.
            rows_M = row + gl.arange(0, ROWS, layout=l_M.type.layout)
            out_ME = gl.where((rows_M < tile.len_q)[:, None], out_ME, 0.0)
        o_smem.store(out_ME.to(outputs.desc.dtype).reshape(o_smem.shape))
        fence_async_shared()
        tma_store(outputs.desc, stored_rows_at(shape, tile, row), o_smem)
    if outputs.lse is not None:
        lse_M = gl.where(seen_M, (m_M + gl.log2(l_M)) * LN2, float("-inf"))
        store_lse(outputs, lse_M, tile, row, split, shape)


@gluon.jit
def store_nothing(outputs, o_smem, tile, row, split, shape, E: gl.constexpr):
    """Writes what rows that saw no key have: zeros, and a log-sum-exp of -inf or the sink."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    none_M = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    if outputs.parts is not None and outputs.sink is None:
        # The merge gives such a part no weight, whatever it holds.
        store_lse(outputs, none_M, tile, row, split, shape)
    else:
        zero_M = gl.zeros([ROWS], gl.float32, row_layout)
        zero_ME = gl.zeros([ROWS, E], gl.float32, o_layout)
        store_rows(outputs, o_smem, zero_ME, none_M, zero_M, tile, row, split, shape)
