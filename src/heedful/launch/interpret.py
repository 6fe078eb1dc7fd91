"""Runs a Program on torch CPU tensors through Triton's interpreter: no GPU and no compiler.

Set TRITON_INTERPRET=1 before anything imports a kernel module. The interpreter is right for
float32 and float16 only: its bfloat16 dot multiplies bit patterns.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from heedful.launch.spec import KernelCall, Pointer, Program, Scalar, TensorMap, map_leaves


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
            # Poison: what a kernel reads before writing shows.
            scratch[workspace.name].fill_(float("nan"))
    arrays = {**tensors, **scratch}
    for call in program.calls:
        if 0 in call.grid:
            continue
        run_call(call, arrays)
    return scratch


def run_call(call: KernelCall, arrays: Mapping[str, Any]) -> None:
    """Interprets one launch on the arrays of its buffers. Launches are in order, so that how one is
    queued (cluster, programmatic) does not matter."""
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
    kernel[call.grid](**values)
