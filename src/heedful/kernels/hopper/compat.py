"""Gluon names that differ between Triton 3.6 and 3.9."""

import triton.language.core as tl_core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

aggregate = getattr(gluon, "aggregate", None) or tl_core._aggregate
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def optional(value):
    """A field of an aggregate that may be None or a number known to the compiler."""
    return gl.constexpr(value) if value is None or isinstance(value, int) else value


_HAS_REINTERPRET: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory under another shape and layout."""
    if _HAS_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


# gl.inline_asm came with 3.9: it sees a thread's registers and returns scalars.
HAS_INLINE_ASM: gl.constexpr = gl.constexpr(hasattr(gl, "inline_asm"))
inline_asm = getattr(gl, "inline_asm", None)
