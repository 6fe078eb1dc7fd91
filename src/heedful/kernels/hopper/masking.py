"""Hiding scores whose keys a row does not see. M query rows, N keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import HAS_INLINE_ASM, inline_asm


@gluon.constexpr_function
def _outside(keys, has_start):
    """Assembly: -inf for the keys from `stop` on, and those before `start`, of a thread's two rows.

    The columns are immediates: as a tensor they are a register each, which LLVM computes ahead of
    all loops and keeps.
    """
    count = keys // 2
    bounds = [(f"${2 * count + row}", "le") for row in range(2)]
    if has_start:
        bounds += [(f"${2 * count + 2 + row}", "gt") for row in range(2)]
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
    """Scores of a warpgroup's accumulator with keys outside [start, stop) at -inf; start may be
    None."""
    N: gl.constexpr = s_MN.shape[1]
    if HAS_INLINE_ASM:
        if start_M is None:
            text: gl.constexpr = _outside(N, False)
            return inline_asm(text, ("=&f", "f", "r"), [s_MN, stop_M], s_MN.type, is_pure=True)
        else:
            text: gl.constexpr = _outside(N, True)
            bounds = [s_MN, stop_M, start_M]
            return inline_asm(text, ("=&f", "f", "r", "r"), bounds, s_MN.type, is_pure=True)
    else:
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, s_MN.type.layout))
        visible_MN = key_N[None, :] < stop_M[:, None]
        if start_M is not None:
            visible_MN = visible_MN & (key_N[None, :] >= start_M[:, None])
        return gl.where(visible_MN, s_MN, float("-inf"))
