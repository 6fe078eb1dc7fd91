"""Hiding scores whose keys a row does not see. M query rows, N keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import HAS_INLINE_ASM, inline_asm


@gluon.constexpr_function
def _outside(keys, tests):
    """Assembly: -inf for the keys that pass one of these tests, le against the first key to hide,
    gt against the first to show, of a thread's two rows.

    The columns are immediates: as a tensor they are a register each, which LLVM computes ahead of
    all loops and keeps.
    """
    count = keys // 2
    given = [(2 * (count + i) + row, test) for i, test in enumerate(tests) for row in range(2)]
    bounds = [(f"${operand}", test) for operand, test in given]
    lines = [
        "{ .reg .pred p; .reg .b32 t, b<4>; mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1;"
    ]
    lines += [f"sub.s32 b{i}, {bound}, t;" for i, (bound, _) in enumerate(bounds)]
    for i in range(count):
        row, column = i // 2 % 2, i // 4 * 8 + i % 2
        source = f"${count + i}"
        for b in range(row, len(bounds), 2):
            lines.append(f"setp.{bounds[b][1]}.s32 p, b{b}, {column};")
            lines.append(f"selp.f32 ${i}, 0fFF800000, {source}, p;")
            source = f"${i}"
    return " ".join(lines) + " }"


@gluon.jit
def hide_outside(s_MN, start_M, stop_M):
    """Scores of a warpgroup's accumulator with keys outside [start, stop) at -inf; one of the two
    may be None."""
    N: gl.constexpr = s_MN.shape[1]
    if HAS_INLINE_ASM:
        if start_M is None:
            text: gl.constexpr = _outside(N, ("le",))
            return inline_asm(text, ("=&f", "f", "r"), [s_MN, stop_M], s_MN.type, is_pure=True)
        elif stop_M is None:
            text: gl.constexpr = _outside(N, ("gt",))
            return inline_asm(text, ("=&f", "f", "r"), [s_MN, start_M], s_MN.type, is_pure=True)
        else:
            text: gl.constexpr = _outside(N, ("le", "gt"))
            bounds = [s_MN, stop_M, start_M]
            return inline_asm(text, ("=&f", "f", "r", "r"), bounds, s_MN.type, is_pure=True)
    else:
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, s_MN.type.layout))
        if stop_M is not None:
            s_MN = gl.where(key_N[None, :] < stop_M[:, None], s_MN, float("-inf"))
        if start_M is not None:
            s_MN = gl.where(key_N[None, :] >= start_M[:, None], s_MN, float("-inf"))
        return s_MN
