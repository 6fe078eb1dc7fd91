"""The time that the emulator's clock predicts for a call: each of its launches, from one or several
workgroups that run on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from heedful.core.base.arrays import ArraySpec, item_bytes
from heedful.core.planning.plan import Plan
from heedful.emulator import At, predict_time
from heedful.emulator.clock.grid import Prediction
from heedful.launch import compiler
from heedful.launch.program import buffers
from heedful.launch.program.programs import program
from heedful.launch.spec import KernelCall, Pointer, Program, Scalar

# Normal values, repeated: whether a row's maximum rises does not depend on more of them.
_VALUES = 2**16


@dataclass(frozen=True)
class Predicted:
    """All launches of a call, one after the other, without what lies between them.

    seconds: at the fitted clock. low, high: at the highest clock that is assumed, and at the
    lowest. launches: by order, the kernel's name and its prediction.
    """

    seconds: float
    low: float
    high: float
    launches: tuple[tuple[str, Prediction], ...]


def predicted(
    plan: Plan,
    direction: str,
    contents: Mapping[str, np.ndarray] | None = None,
    workgroups: int = 1,
    window: float = 0.0,
) -> Predicted:
    """The time of one direction of a plan, for a device that has a clock.

    contents: arrays by buffer whose values matter (lengths, pages), C-contiguous. Other floats are
    normal values, other numbers 0. workgroups: of each launch that run; several for masks, which
    make them unequal. window: clocks for which `timing.events` keeps what every wave issued.
    """
    specs = getattr(buffers, direction)(plan.problem)
    made = program(plan, direction, specs)
    arrays = {name: _values(spec) for name, spec in specs.items()}
    arrays |= {w.name: np.zeros(_bytes(w.buffer), np.uint8) for w in made.workspaces}
    for name, array in (contents or {}).items():
        if array.nbytes != arrays[name].nbytes:
            raise ValueError(
                f"contents[{name!r}] must have {arrays[name].nbytes} bytes, got {array.nbytes}"
            )
        arrays[name] = array.reshape(-1).view(np.uint8)
    return of_program(made, plan.device.arch, arrays, workgroups, window)


def of_program(
    made: Program,
    arch: str,
    arrays: Mapping[str, np.ndarray],
    workgroups: int = 1,
    window: float = 0.0,
) -> Predicted:
    """The same for launches and arrays of bytes by buffer."""
    launches = [
        (call.kernel.function, _launch(call, arch, arrays, workgroups, window))
        for call in made.calls
    ]
    all_of = [prediction for _, prediction in launches]
    low, high = (sum(p.range[i] for p in all_of) for i in range(2))
    return Predicted(sum(p.seconds for p in all_of), low, high, tuple(launches))


def _launch(
    call: KernelCall,
    arch: str,
    arrays: Mapping[str, np.ndarray],
    workgroups: int,
    window: float,
) -> Prediction:
    artifact = compiler.artifact(call, arch)
    args: list[object] = []
    for parameter in artifact.parameters:
        match call.arguments.get(parameter.name):
            case Pointer(buffer=name):
                args.append(At(arrays[name]))
            case Scalar(value=value):
                args.append(float(value) if parameter.type == "fp32" else int(value))
            case _:
                args.append(None)
    # Once each: reads of what is there, writes of what is not.
    moved = sum(arrays[name].nbytes for name in call.reads | call.writes)
    count = min(workgroups, call.grid[0] * call.grid[1] * call.grid[2])
    options = {"memory_bytes": moved, "checks": (), "window": window}
    return predict_time(artifact, call.grid, args, workgroups=count, **options)[0]


def _bytes(spec: ArraySpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * item_bytes(spec.dtype)


def _values(spec: ArraySpec) -> np.ndarray:
    """The bytes of an array: normal values of its dtype, or zeros."""
    count = max(_bytes(spec), 1)
    normal = np.random.default_rng(0).standard_normal(_VALUES).astype(np.float32)
    match spec.dtype:
        case "float32":
            some = normal.view(np.uint8)
        case "float16":
            some = normal.astype(np.float16).view(np.uint8)
        case "bfloat16":
            some = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        case name if name.startswith("float8"):
            # Values of 8 bits: a sign, and any digits below it.
            some = (normal.view(np.uint32) >> 24 & 0x80 | normal.view(np.uint32) & 0x3F).astype(
                np.uint8
            )
        case _:
            return np.zeros(count, np.uint8)
    return np.resize(some, count)  # again and again
