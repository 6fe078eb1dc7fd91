"""Shared memory of the MLA decode over latent vectors of 8 bits with two consumers, beside the ring
of stored keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.mla.boxes import KEYS, WIDTH
from heedful.kernels.hopper.mla.conversion import GROUPS
from heedful.kernels.hopper.mla.shared import BLOCKS
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate
from heedful.kernels.hopper.sm90.mma import ROWS

HALF_BOX: gl.constexpr = gl.constexpr(32)  # columns of a left operand that 64 stored columns make
PARTS: gl.constexpr = gl.constexpr(2 * GROUPS.value)  # of 64 columns, of the values


@aggregate
class PairShared:
    """q: queries beside the values, in boxes of 32 columns, two for each 64. q_rest: the others:
    two such boxes beside columns of 8 bits, one of 64 columns beside those of 16. p: probabilities
    of each block. scales: those of each block's keys in float16, by groups; None without scales.

    Numbers of rows: top: references. shift: the same, or 0 where there is none. before: references
    before they last changed. scale: factors of scores. sums: of each consumer, at the end of a
    segment. tops: the greatest sizes in the queries that each consumer loads.

    flags: whether each block changed references; whether a row has none. p_full: barriers of the
    probabilities of each block.
    """

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor | gl.constexpr
    top: gl.shared_memory_descriptor
    shift: gl.shared_memory_descriptor
    before: gl.shared_memory_descriptor
    scale: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    flags: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(of_rest: gl.constexpr, SCALED: gl.constexpr):
        dtype: gl.constexpr = gl.float16
        REST: gl.constexpr = WIDTH if SCALED else HALF_BOX
        rest_dtype: gl.constexpr = of_rest if SCALED else dtype
        of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF_BOX], dtype)
        of_q_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], rest_dtype)
        of_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = None
        if SCALED:
            by_key: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            scales = gl.allocate_shared_memory(dtype, [BLOCKS * GROUPS, 1, KEYS], by_key)
        return PairShared(
            gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, HALF_BOX], of_q),
            gl.allocate_shared_memory(rest_dtype, [WIDTH // REST, ROWS, REST], of_q_rest),
            gl.allocate_shared_memory(dtype, [BLOCKS, KEYS, ROWS], of_p),
            scales,
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain),
            gl.allocate_shared_memory(gl.int32, [BLOCKS + 1, 1], plain),
            barriers(BLOCKS, 4),
        )
