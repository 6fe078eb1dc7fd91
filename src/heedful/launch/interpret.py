"""Runs a Program on torch CPU tensors through Triton's interpreter: no GPU and no compiler.

Set TRITON_INTERPRET=1 before anything imports a kernel module. The interpreter is right for
float32 and float16 only: its bfloat16 dot multiplies bit patterns.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from heedful.launch.spec import Pointer, Program, Scalar


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
        kernel = getattr(import_module(call.kernel.module), call.kernel.function)
        values: dict[str, Any] = dict(call.constants)
        for name, argument in call.arguments.items():
            match argument:
                case Pointer(buffer=buffer):
                    values[name] = arrays[buffer]
                case Scalar(value=value):
                    values[name] = value
                case _:
                    raise TypeError(f"{name}: the interpreter takes pointers and scalars only")
        kernel[call.grid](**values)
    return scratch
