"""Masks probabilities of queries that do not see a key. M query rows, N keys (64)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS

FAR: gl.constexpr = gl.constexpr(1 << 30)


@gluon.constexpr_function
def _hidden(queries, tests):
    """Assembly: 0 for the probabilities of a thread's two keys that pass one of these tests. "gt"
    compares with the first query to show, "le" with the first query to mask."""
    # ptxas: columns are immediates as in sm90/mask.py. Numbers change in place: no registers are
    # left.
    count = queries // 2
    operands = [(2 * (count + i) + row, test) for i, test in enumerate(tests) for row in range(2)]
    lines = [
        "{ .reg .pred p; .reg .b32 t, b<4>; mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1;"
    ]
    lines += [f"sub.s32 b{i}, ${operand}, t;" for i, (operand, _) in enumerate(operands)]
    for i in range(count):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        for b in range(row, len(operands), 2):
            lines.append(f"setp.{operands[b][1]}.s32 p, b{b}, {column};")
            lines.append(f"selp.f32 ${i}, 0f00000000, ${i}, p;")
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _in_place(queries, bounds):
    """Constraints: probabilities stay in their registers, and each bound has two numbers."""
    count = queries // 2
    ties = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + ties + ["r"] * (2 * bounds))


@gluon.jit
def hide_queries(p_NM, params, tile, row, CONSUMER: gl.constexpr):
    """Probabilities of queries from `row` on, with 0 where a query does not see a key or the key
    does not exist."""
    M: gl.constexpr = p_NM.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, p_NM.type.layout)
    key_N = tile.col + CONSUMER * ROWS + gl.arange(0, ROWS, layout=layout)
    start_N = gl.full([ROWS], 0, gl.int32, layout)
    if params.mask.HAS_RIGHT:
        start_N = key_N - (tile.seq.off + params.mask.right + row)
    start_N = gl.where(key_N < tile.seq.len_k, start_N, FAR)
    if not params.mask.HAS_LEFT:
        text: gl.constexpr = _hidden(M, ("gt",))
        operands: gl.constexpr = _in_place(M, 1)
        return inline_asm(text, operands, [p_NM, start_N], p_NM.type, is_pure=True)
    else:
        stop_N = key_N - (tile.seq.off - params.mask.left + row) + 1
        text: gl.constexpr = _hidden(M, ("gt", "le"))
        operands: gl.constexpr = _in_place(M, 2)
        return inline_asm(text, operands, [p_NM, start_N, stop_N], p_NM.type, is_pure=True)
