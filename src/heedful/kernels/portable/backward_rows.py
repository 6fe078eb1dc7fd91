"""What the backward needs per query row, and the gradient of the sink, which is a sum of rows.

delta = rowsum(out * dout) - dlse: an LSE that is an output itself enters the softmax's gradient
exactly as the row sum does. Shapes: B batch, H query heads, M query rows, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.portable.scores import LOG2E
from heedful.kernels.portable.sequences import load_rows, wide


@triton.jit(do_not_specialize=["rows", "heads", "tiles"])
def row_deltas(
    out,
    dout,
    lse,
    dlse,
    delta,
    stride_ob,
    stride_om,
    stride_oh,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_dlb,
    stride_dlm,
    stride_dlh,
    stride_lb,
    stride_lh,
    rows,
    heads,
    tiles,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """delta (B, H, M), laid out as lse; 0 in rows that saw nothing, whatever they hold."""
    row0 = (tl.program_id(0) % tiles) * BLOCK_M
    b = wide(tl.program_id(0) // tiles // heads)
    h = wide(tl.program_id(0) // tiles % heads)
    o_ME = load_rows(
        out + b * stride_ob + h * stride_oh,
        stride_om,
        row0,
        rows,
        HEAD_DIM_V,
        BLOCK_M,
        BLOCK_E,
        True,
    )
    do_ME = load_rows(
        dout + b * stride_dob + h * stride_doh,
        stride_dom,
        row0,
        rows,
        HEAD_DIM_V,
        BLOCK_M,
        BLOCK_E,
        True,
    )
    rows_M = row0 + tl.arange(0, BLOCK_M)
    places_M = b * stride_lb + h * stride_lh + rows_M
    delta_M = tl.sum(o_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
    if dlse is not None:
        dlse += b * stride_dlb + h * stride_dlh
        delta_M -= tl.load(dlse + wide(rows_M) * stride_dlm, mask=rows_M < rows, other=0.0)
    lse_M = tl.load(lse + places_M, mask=rows_M < rows, other=0.0)
    delta_M = tl.where(lse_M == float("-inf"), 0.0, delta_M)
    tl.store(delta + places_M, delta_M, mask=rows_M < rows)


@triton.jit(do_not_specialize=["rows", "batch"])
def sink_gradients(
    sink,
    lse,
    delta,
    dsink,
    stride_lb,
    stride_lh,
    rows,
    batch,
    BLOCK_M: tl.constexpr,
):
    """dsink (H,): the sink's value is zero, so its score's gradient is -p_sink * delta."""
    h = tl.program_id(0)
    logit = tl.load(sink + h)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    for b in range(batch):
        places = wide(b) * stride_lb + wide(h) * stride_lh
        for row0 in range(0, rows, BLOCK_M):
            rows_M = row0 + tl.arange(0, BLOCK_M)
            exists_M = rows_M < rows
            lse_M = tl.load(lse + places + rows_M, mask=exists_M, other=float("-inf"))
            delta_M = tl.load(delta + places + rows_M, mask=exists_M, other=0.0)
            # Rows that are not used have neither keys nor the sink.
            seen_M = lse_M != float("-inf")
            p_M = tl.exp2((logit - tl.where(seen_M, lse_M, 0.0)) * LOG2E)
            total_M += tl.where(seen_M, -p_M * delta_M, 0.0)
    tl.store(dsink + h, tl.sum(total_M, 0))
