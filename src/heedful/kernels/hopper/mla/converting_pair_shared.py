"""Shared memory of the MLA decode over latent vectors of 8 bits with two consumers, beside the ring
of stored keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.mla.boxes import KEYS, WIDTH
from heedful.kernels.hopper.mla.conversion import GROUPS
from heedful.kernels.hopper.mla.shared import BLOCKS
from heedful.kernels.hopper.sm90.barrier import FIRST_NAMED, barriers
from heedful.kernels.hopper.sm90.compat import aggregate, inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS

# Named barriers: of both consumers; of each one, whose warps vote.
BOTH_BARRIER: gl.constexpr = FIRST_NAMED
VOTE_BARRIER: gl.constexpr = gl.constexpr(FIRST_NAMED.value + 1)
# Flags: 0 and 1, whether a block changed references; whether a row has none.
OPEN: gl.constexpr = gl.constexpr(2)
HALF_BOX: gl.constexpr = gl.constexpr(32)  # columns of a left operand that 64 stored columns make
PARTS: gl.constexpr = gl.constexpr(2 * GROUPS.value)  # of 64 columns, of the values


@gluon.constexpr_function
def lanes_apart(rank):
    """The layout of float32 numbers (..., lanes, rows), in which eight lanes that each store eight
    bytes of their rows are in different banks."""
    return gl.SwizzledSharedLayout(8, 1, 8, list(reversed(range(rank))))


@aggregate
class PairShared:
    """q: queries beside columns of 8 bits, in boxes of 32 columns, two for each 64. q_rest: those
    beside columns of 16 bits, or None. p: probabilities of each block. scores: those of a step
    ahead, of the first consumer. lanes: its sums of lanes. Both are None with scales, where there
    is no room. scales: those of each block's keys in float16, by groups; None without.

    Numbers of rows: top: references. shift: the same, or 0 where there is none. before: references
    before they last changed. scale: factors of scores. tops: the greatest sizes in the queries that
    each consumer loads.

    flags: whether each block changed references; whether a row has none. p_full: barriers of the
    probabilities of each block. q_full: of the queries that each consumer fetches by their tensor
    map; None without.
    """

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor | gl.constexpr
    p: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor | gl.constexpr
    lanes: gl.shared_memory_descriptor | gl.constexpr
    scales: gl.shared_memory_descriptor | gl.constexpr
    top: gl.shared_memory_descriptor
    shift: gl.shared_memory_descriptor
    before: gl.shared_memory_descriptor
    scale: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    flags: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor | gl.constexpr

    @gluon.jit
    def allocate(of_rest: gl.constexpr, SCALED: gl.constexpr, FETCHES: gl.constexpr):
        dtype: gl.constexpr = gl.float16
        BOXES: gl.constexpr = 2 * PARTS if SCALED else 2 * PARTS + 2
        of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF_BOX], dtype)
        of_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        q_rest, scores, lanes, scales, q_full = None, None, None, None, None
        if FETCHES:
            q_full = barriers(BLOCKS, 1)
        if not SCALED:
            scores = gl.allocate_shared_memory(gl.float32, [1, KEYS, ROWS], lanes_apart(2))
            lanes = gl.allocate_shared_memory(gl.float32, [1, 4, 8, ROWS], lanes_apart(3))
        else:
            of_q_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], of_rest)
            q_rest = gl.allocate_shared_memory(of_rest, [1, ROWS, WIDTH], of_q_rest)
            by_key: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            scales = gl.allocate_shared_memory(dtype, [BLOCKS * GROUPS, 1, KEYS], by_key)
        return PairShared(
            gl.allocate_shared_memory(dtype, [BOXES, ROWS, HALF_BOX], of_q),
            q_rest,
            gl.allocate_shared_memory(dtype, [BLOCKS, KEYS, ROWS], of_p),
            scores,
            lanes,
            scales,
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [1, ROWS], plain),
            gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS], plain),
            gl.allocate_shared_memory(gl.int32, [BLOCKS + 1, 1], plain),
            barriers(BLOCKS, 4),
            q_full,
        )


@gluon.jit
def load_flag(flag):
    return inline_asm("ld.shared.b32 $0, [$1];", "=r,r,~{memory}", [flag], gl.int32)


@gluon.jit
def store_flag(flag, value):
    """One thread of a warpgroup stores a flag."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127;\n"
        "setp.eq.u32 first, t, 0; @first st.shared.b32 [$0], $1; }",
        "r,r,~{memory}",
        [flag, value],
    )
