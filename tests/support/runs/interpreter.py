"""Runs a Program on torch CPU tensors through Triton's interpreter: no GPU and no compiler.

Set TRITON_INTERPRET=1 before anything imports a kernel module. The interpreter is correct for
float32 and float16 only: its bfloat16 dot multiplies bit patterns.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any

from heedful.core.base.forks import new_lock
from heedful.launch.spec import KernelCall, Pointer, Program, Scalar, TensorMap, map_leaves

# The interpreter keeps a launch's place in its grid for the whole process.
_one_launch = new_lock()
# Addresses that launches have prefetched, since somebody emptied it.
prefetched: list[int] = []
# How the interpreter's builder loads, stores, and adds to what is stored.
_ACCESSES = "create_masked_load", "create_masked_store", "create_atomic_rmw"


def interpret(program: Program, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Executes every call of `program` in place on `tensors`; returns the scratch it made, by name.

    Raises RuntimeError where the interpreter is off.
    """
    import torch

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before importing any kernel")
    scratch = {}
    for workspace in program.workspaces:
        spec = workspace.buffer
        scratch[workspace.name] = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        if not workspace.zeroed:
            # Poison: a kernel that reads scratch before it writes it gives NaN.
            poison = float("nan") if scratch[workspace.name].is_floating_point() else -1
            scratch[workspace.name].fill_(poison)
    arrays = {**tensors, **scratch}
    for call in program.calls:
        if 0 in call.grid:
            continue
        run_call(call, arrays)
    return scratch


def run_call(call: KernelCall, arrays: Mapping[str, Any], are_whole: bool = True) -> None:
    """Interprets one launch on the arrays of its buffers. Launches are in order, so that how one is
    queued (cluster, programmatic, cooperative) does not matter.

    AssertionError where the kernel loads or stores outside of the arrays, whatever it makes of what
    is there. are_whole: whether each array says where it ends.
    """
    from triton.language import constexpr

    def value_of(name: str, leaf: object, path: tuple[int, ...]) -> Any:
        match leaf:
            case Pointer(buffer=buffer):
                return arrays[buffer]
            case Scalar(value=value):
                return value
            case TensorMap():
                raise TypeError(f"{name}: the interpreter takes pointers and scalars only")
        # The interpreter makes a tensor of every bare number within a group.
        return constexpr(leaf) if path and leaf is not None else leaf

    kernel = getattr(import_module(call.kernel.module), call.kernel.function)
    values = {name: map_leaves(name, x, value_of) for name, x in call.parameters.items()}
    bounds = _bounded(arrays) if are_whole else nullcontext()
    with _one_launch, _patched_once(), _types_made_once(), bounds:
        kernel[call.grid](**values)


@contextmanager
def _bounded(arrays: Mapping[str, Any]) -> Iterator[None]:
    """Within it, whatever is loaded or stored lies within one of the arrays."""
    from triton.runtime.interpreter import interpreter_builder as builder

    spans = [[0, 0]]
    for begin, end in sorted(_span(array) for array in arrays.values() if array.numel()):
        if begin < spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end])
    begins = [begin for begin, _ in spans]
    load, store, add = (getattr(builder, name) for name in _ACCESSES)

    def assert_inside(pointers: Any, mask: Any) -> None:
        places = pointers.data[mask.data]
        if not places.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first, end = int(places.min()), int(places.max()) + size
        span = spans[bisect_right(begins, first) - 1]
        if end <= span[1]:
            return
        for place in places.tolist():
            assert place + size <= spans[bisect_right(begins, place) - 1][1], (
                "an access outside of the arrays"
            )

    def load_inside(pointers: Any, mask: Any, *rest: Any) -> Any:
        assert_inside(pointers, mask)
        return load(pointers, mask, *rest)

    def store_inside(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        assert_inside(pointers, mask)
        return store(pointers, value, mask, *rest)

    def add_inside(kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        assert_inside(pointers, mask)
        return add(kind, pointers, value, mask, *rest)

    vars(builder).update(zip(_ACCESSES, (load_inside, store_inside, add_inside), strict=True))
    try:
        yield
    finally:
        for name in _ACCESSES:
            del vars(builder)[name]


def _span(array: Any) -> tuple[int, int]:
    """The addresses of a tensor: from its first element to behind the last."""
    sizes = zip(array.shape, array.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    begin = array.data_ptr()
    return begin, begin + (last + 1) * array.element_size()


@contextmanager
def _patched_once() -> Iterator[None]:
    """Within it, the language is patched once, conditions of assertions that are off are not
    computed, and waits (for the kernel ahead, or in assembly for stores) do nothing; what is
    prefetched is noted. Triton's interpreter patches the language for every call of a function
    within a kernel, which takes half of the time. It computes the condition that no sum of integers
    overflows even without debug, which takes a third of the rest; compiled kernels leave that out,
    too."""
    from triton.language import dtype
    from triton.language.extra import cuda
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()
    builder, numpy_dtype = interpreter.interpreter_builder, interpreter._get_np_dtype
    waits = cuda.gdc_wait, cuda.gdc_launch_dependents
    options, of_scalar = builder.options, cache(numpy_dtype)

    def patch_new(function: FunctionType) -> Any:
        """The state that the launch, whose own call is the first, restores at its end."""
        modules = _language_modules(function)
        if modules <= done:
            return None
        done.update(modules)
        return patch(function)

    def known_dtype(kind: Any) -> Any:
        """The dtype of a scalar. The interpreter makes a table of all dtypes each time."""
        return of_scalar(kind) if type(kind) is dtype else numpy_dtype(kind)

    def wait(asm: str, _constraints: str, values: list, *_rest: Any) -> Any:
        """Assembly that waits returns what it is given, and what is prefetched is noted; no other
        can be interpreted."""
        if "prefetch.global" in asm:
            places, asked = (value.data for value in values)
            prefetched.extend(places[asked != 0].tolist())
        elif not asm.startswith("s_waitcnt"):
            raise NotImplementedError(f"the interpreter knows no assembly: {asm}")
        return SimpleNamespace(get_result=values.__getitem__)

    interpreter._patch_lang = patch_new
    interpreter._get_np_dtype = known_dtype
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None
    builder.options = replace(options, sanitize_overflow=options.debug)
    vars(builder)["create_inline_asm"] = wait
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        interpreter._get_np_dtype = numpy_dtype
        cuda.gdc_wait, cuda.gdc_launch_dependents = waits
        builder.options = options
        del vars(builder)["create_inline_asm"]


@contextmanager
def _types_made_once() -> Iterator[None]:
    """The interpreter makes types and shapes anew for each operation, and compares them element by
    element, which takes half of a launch's time. Within this, block types of one element type and
    shape share their attributes, tensors of one shape share that, and operands of one type or shape
    are neither cast nor broadcast."""
    from triton.language import core, semantic

    block, tensor, dtype = core.block_type, core.tensor, core.dtype
    made_block, made_tensor, equal = block.__init__, tensor.__init__, dtype.__eq__
    of_semantic = semantic.TritonSemantic
    broadcast, cast = of_semantic.broadcast_impl_value, of_semantic.cast
    shapes: dict[tuple, Any] = {}
    blocks: dict[tuple, dict[str, Any]] = {}
    tensors: dict[int, tuple] = {}
    plain: list[Any] = []

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if type(s) is core.constexpr else s for s in shape])
        known = blocks.get((id(element_ty), sizes))
        if known is None:
            made_block(self, element_ty, shape)
            # The same object for all element types: a shape is recognised by `is`.
            self.shape = shapes.setdefault(sizes, self.shape)
            # It holds the element type, whose number stays its own.
            blocks[id(element_ty), sizes] = dict(vars(self))
        else:
            vars(self).update(known)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else plain
        known = tensors.get(id(shape))
        if known is None:
            made_tensor(self, handle, type)
            tensors[id(shape)] = (shape, self.numel, self.shape)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            _, self.numel, self.shape = known

    def is_equal(self: Any, other: Any) -> bool:
        return True if self is other else equal(self, other)

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block():
            if other.is_block() and one.shape is other.shape:
                return lhs, rhs
        elif not other.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_unlike(self: Any, input: Any, dst_ty: Any, *rounding: Any, **more: Any) -> Any:
        if input.dtype is dst_ty.scalar:
            return input
        return cast(self, input, dst_ty, *rounding, **more)

    block.__init__, tensor.__init__, dtype.__eq__ = make_block, make_tensor, is_equal
    of_semantic.broadcast_impl_value, of_semantic.cast = broadcast_unlike, cast_unlike
    try:
        yield
    finally:
        block.__init__, tensor.__init__, dtype.__eq__ = made_block, made_tensor, equal
        of_semantic.broadcast_impl_value, of_semantic.cast = broadcast, cast


@cache
def _language_modules(function: FunctionType) -> frozenset[str]:
    """Which of Triton's modules a function sees; those are patched for it."""
    from triton import language

    seen = (language, language.core)
    found = function.__globals__.values()
    return frozenset(m.__name__ for m in seen if any(value is m for value in found))
