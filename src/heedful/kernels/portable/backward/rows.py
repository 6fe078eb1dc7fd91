"""What the backward needs per query row, and the gradient of the sink, which is a sum of rows.

delta = rowsum(out * dout) - dlse: an LSE that is an output itself enters the softmax's gradient
exactly as the row sum does. Shapes: H query heads, M query rows, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import RowArray
from heedful.kernels.args.portable import SinkGradientsIO
from heedful.kernels.portable.shared.scores import LOG2E
from heedful.kernels.portable.shared.sequences import wide
from heedful.kernels.portable.shared.statistics import load_references


@triton.jit
def row_deltas(o_ME, do_ME, lse_M, dlse: RowArray, place, rows_M, exists_M):
    """delta (M,) of query rows; 0 in rows that saw nothing, whatever they hold. dlse may be
    absent."""
    delta_M = tl.sum(o_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
    if dlse.ptr is not None:
        base = dlse.ptr + (
            place.b * dlse.stride_b + place.h * dlse.stride_h + place.token_q * dlse.stride_m
        )
        delta_M -= tl.load(base + wide(rows_M) * dlse.stride_m, mask=exists_M, other=0.0)
    return tl.where(lse_M == float("-inf"), 0.0, delta_M)


@triton.jit
def sink_gradients(
    io: SinkGradientsIO, rows, batch, IS_ADJUSTED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """dsink (H,): the sink's value is zero, so its score's gradient is -p_sink * delta.
    IS_ADJUSTED: references are in natural units, else in base 2."""
    h = tl.program_id(0)
    logit = tl.load(io.sink + h)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    for b in range(batch):
        places = wide(b) * io.lse.stride_b + wide(h) * io.lse.stride_h
        for row0 in range(0, rows, BLOCK_M):
            rows_M = row0 + tl.arange(0, BLOCK_M)
            exists_M = rows_M < rows
            lse_M = tl.load(io.lse.ptr + places + rows_M, mask=exists_M, other=float("-inf"))
            delta_M = tl.load(io.delta + places + rows_M, mask=exists_M, other=0.0)
            # Rows that are not used have neither keys nor the sink.
            seen_M = lse_M != float("-inf")
            lse_M = tl.where(seen_M, lse_M, 0.0)
            lse_M, factor_M = load_references(
                io.reference, io.factor, lse_M, places + rows_M, seen_M
            )
            if IS_ADJUSTED:
                p_M = tl.exp2((logit - lse_M) * LOG2E) * factor_M
            else:
                p_M = tl.exp2(tl.fma(logit, LOG2E, -lse_M)) * factor_M
            total_M += tl.where(seen_M, -p_M * delta_M, 0.0)
    tl.store(io.dsink + h, tl.sum(total_M, 0))
