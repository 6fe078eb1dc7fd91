"""The gradient of the sink, which is a sum over rows. Shapes: H query heads, M query rows."""

import triton
import triton.language as tl

from heedful.kernels.args.portable import SinkGradientsIO
from heedful.kernels.common.constants import LOG2E
from heedful.kernels.common.rows import wide
from heedful.kernels.common.statistics import load_references


@triton.jit
def sink_gradients(
    io: SinkGradientsIO, rows, batch, IS_ADJUSTED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Stores dsink (H,), one program for each head. The sink's value is zero, so the gradient of
    its score is -p_sink * delta. rows: of a sequence's storage. IS_ADJUSTED: references are in
    natural units, else in base 2."""
    h = tl.program_id(0)
    logit = tl.load(io.sink + h)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    tiles = tl.cdiv(rows, BLOCK_M)
    # Unrolled, the loads of several tiles wait at the same time.
    for visit in tl.range(0, batch * tiles, loop_unroll_factor=4):
        places = wide(visit // tiles) * io.lse.stride_b + wide(h) * io.lse.stride_h
        rows_M = visit % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        exists_M = rows_M < rows
        lse_M = tl.load(io.lse.ptr + places + rows_M, mask=exists_M, other=float("-inf"))
        delta_M = tl.load(io.delta + places + rows_M, mask=exists_M, other=0.0)
        # Rows that are not in use see neither keys nor the sink.
        seen_M = lse_M != float("-inf")
        lse_M = tl.where(seen_M, lse_M, 0.0)
        lse_M, factor_M = load_references(io.reference, io.factor, lse_M, places + rows_M, exists_M)
        if IS_ADJUSTED:
            p_M = tl.exp2((logit - lse_M) * LOG2E) * factor_M
        else:
            p_M = tl.exp2(tl.fma(logit, LOG2E, -lse_M)) * factor_M
        total_M += tl.where(seen_M, -p_M * delta_M, 0.0)
    tl.store(io.dsink + h, tl.sum(total_M, 0))
