"""Gluon names that differ between Triton 3.6 and 3.9."""

import triton.language.core as tl_core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_aggregate = getattr(gluon, "aggregate", None) or tl_core._aggregate
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def aggregate(cls):
    """Makes a class a Gluon aggregate, built from its fields by order or by name. A field that may
    be a constexpr takes None and other compile-time values. Triton 3.6 generates no constructor, so
    this one is used for both versions."""
    names = tuple(cls.__annotations__)
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}

    def fill(self, *args, **named):
        in_order = dict(zip(names, args, strict=False))
        values = {**defaults, **in_order, **named}
        is_twice = len(args) > len(names) or in_order.keys() & named.keys()
        if is_twice or values.keys() != set(names):
            raise TypeError(f"{cls.__name__} has the fields {names}, got {len(args)} and {named}")
        for name in names:
            value = values[name]
            is_known = not isinstance(value, tl_core.base_value)
            setattr(self, name, gl.constexpr(value) if is_known else value)

    fill.__triton_builtin__ = True
    cls.__init__ = fill
    return _aggregate(cls)


_HAS_REINTERPRET: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with another shape and layout."""
    if _HAS_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


# gl.inline_asm came with 3.9. It takes the registers of one thread and returns scalars.
HAS_INLINE_ASM: gl.constexpr = gl.constexpr(hasattr(gl, "inline_asm"))
inline_asm = getattr(gl, "inline_asm", None)


@gluon.jit
def opaque(number):
    """The same number, hidden from the compiler's analysis."""
    return inline_asm("mov.b32 $0, $1;", "=r,r", [number], gl.int32)
