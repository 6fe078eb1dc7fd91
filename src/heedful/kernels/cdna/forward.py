"""Attention forward for CDNA3 and CDNA4: everything but the main loop of each generation.

The kernel is `forward`, launched by `launch/bind/cdna.py`. A program has two groups of four waves,
which work on one tile of queries; one group is a stage behind the other. The grid is (row tiles of
all heads, splits of the keys).

Shapes: M query rows, N key rows, D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.args.shared import Descales, ForwardIO, Mask, Sequences, Shape, Tile, TileOrder
from heedful.kernels.cdna import mainloop_cdna3 as cdna3
from heedful.kernels.cdna import mainloop_cdna4 as cdna4
from heedful.kernels.cdna.fp8 import split_sign
from heedful.kernels.cdna.tile import last_keys, load_query_tile, store_results
from heedful.kernels.cdna.work_tile import work_tile


@gluon.constexpr_function
def mfma_layout(generation, dtype, warps):
    """The layout of scores and results: 32 rows for each wave, with keys or dims across
    registers."""
    products = cdna3.products(dtype) if generation == 3 else cdna4.products(dtype)
    return gl.amd.AMDMFMALayout(
        version=generation,
        instr_shape=[32, 32, products],
        transposed=True,
        warps_per_cta=[warps, 1],
    )


@gluon.jit
def forward(
    io: ForwardIO,
    sequences: Sequences,
    shape: Shape,
    mask: Mask,
    descales: Descales,
    order: TileOrder,
    tile: Tile,
    scale_log2,
    GENERATION: gl.constexpr,
):
    """Stores out (.., M, H, D) and, if wanted, lse (B, H, M) of BLOCK_M queries of one head; with
    several splits of the keys, partial results with a leading split.

    scale_log2: converts raw scores to logits in base 2. descales: float32 (B, G), with fp8.
    GENERATION: 3 or 4, of CDNA.
    """
    DTYPE: gl.constexpr = io.k.ptr.dtype.element_ty
    MFMA: gl.constexpr = mfma_layout(GENERATION, DTYPE, gl.num_warps())
    work = work_tile(sequences, shape, mask, order, tile.BLOCK_M, tile.BLOCK_N)
    if work.row0 >= work.seq.len_q:
        return
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MFMA, 128 // DTYPE.primitive_bitwidth)
    q_MD = load_query_tile(work, io.q, tile.BLOCK_M, tile.HEAD_DIM, Q_OPERAND)
    if DTYPE.is_fp8():
        factor = work.factor(descales.q) * work.factor(descales.k)
        scale_log2, q_MD = split_sign(scale_log2 * factor, q_MD)
    rows_M = work.row0 + gl.arange(0, tile.BLOCK_M, gl.SliceLayout(1, MFMA))
    last_M = last_keys(rows_M, work.seq.len_k, work.seq.off, mask)
    mainloop: gl.constexpr = cdna3.mainloop if GENERATION == 3 else cdna4.mainloop
    base_M, l_M, acc_MD = mainloop(work, io.k, io.v, q_MD, last_M, scale_log2, MFMA, tile.BLOCK_N)
    scale = work.factor(descales.v)
    if GENERATION == 3:
        scale *= 1 + cdna3.mean_loss(DTYPE)
    store_results(work, io.out, io.lse, io.rest, base_M, l_M, acc_MD, scale)
