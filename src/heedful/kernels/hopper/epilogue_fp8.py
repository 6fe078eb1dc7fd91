"""How one fp8 consumer's rows leave the chip: epilogue.py, with a factor, through memory of sums.

M query rows, E v dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from heedful.kernels.hopper.compat import aggregate, tma_store
from heedful.kernels.hopper.epilogue import LN2, LOG2E
from heedful.kernels.hopper.mma import ROWS
from heedful.kernels.hopper.sequences import packed_rows_at
from heedful.kernels.hopper.softmax import scale_rows


@aggregate
class Outputs:
    """Where results go, and the sink logits that enter them; lse and sink may be None."""

    desc: tma.tensor_descriptor
    lse: gl.tensor | gl.constexpr


@gluon.jit
def store_rows(outputs, o_smem, acc_ME, m_M, l_M, tile, row, params, v_scale):
    """Normalises one consumer's rows and writes them and their log-sum-exp."""
    factor_M = gl.full(l_M.shape, 1.0, gl.float32, l_M.type.layout)
    if params.mods.sink is not None:
        sink = gl.load(params.mods.sink + tile.head) * LOG2E
        top_M = gl.maximum(m_M, sink)
        shift_M = gl.where(top_M == float("-inf"), 0.0, top_M)
        factor_M = gl.exp2(m_M - shift_M)
        l_M = l_M * factor_M + gl.exp2(sink - shift_M)
        m_M = top_M
    # A sum that is NaN is seen, whatever the maximum made of it: the result is NaN, not 0.
    seen_M = ((l_M > 0.0) & (m_M > float("-inf"))) | (l_M != l_M)
    inverse_M = gl.where(seen_M, factor_M / l_M, 0.0) * v_scale
    # The output takes the place of sums, which other threads may still be reading.
    tma.store_wait(0)
    gl.barrier()
    o_smem.store(scale_rows(acc_ME, inverse_M).to(outputs.desc.dtype).reshape(o_smem.shape))
    fence_async_shared()
    tma_store(outputs.desc, packed_rows_at(params, tile, row), o_smem)
    if outputs.lse is not None:
        lse_M = gl.where(seen_M, (m_M + gl.log2(l_M)) * LN2, float("-inf"))
        rows_M = row + gl.arange(0, ROWS, layout=lse_M.type.layout)
        if params.seqs.cu_q is not None:
            base = tile.head.to(gl.int64) * params.seqs.seqlen_q + tile.start_q
        else:
            base = (tile.batch * params.gqa.heads + tile.head).to(gl.int64) * params.seqs.seqlen_q
        gl.store(outputs.lse + base + rows_M, lse_M, mask=rows_M < tile.len_q)
