"""What a launch is, before any compiler or driver: kernels with their arguments in order, and the
scratch they need. Running, compiling ahead of time, inspecting and emulating all start from the
same `Program`, so they all compile exactly the same thing. Framework-neutral, no triton imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heedful.core.arrays import ArraySpec

# Names of element types: ours (as torch and NumPy have them) -> Triton's.
TRITON_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
    "int4": "u8",
    "bool": "i1",
}


@dataclass(frozen=True, slots=True)
class Pointer:
    """A parameter that takes the address of the array named `buffer`."""

    buffer: str
    dtype: str
    aligned: bool = True

    @property
    def type(self) -> str:
        return "*" + TRITON_TYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number given at run time. `divisor` promises the compiler that the value is a multiple of
    it (strides only; lengths stay unspecialised, so that a new length compiles nothing)."""

    value: int | float
    type: str = "i32"
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A TMA descriptor over the array named `buffer`, seen with this shape and these strides
    (elements; last stride 1), in boxes of `block`. `layout` is the repr of the Gluon shared-memory
    layout that a box is written in."""

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: str

    @property
    def type(self) -> str:
        dims = ", ".join(map(str, self.block))
        return f"tensordesc<{TRITON_TYPES[self.dtype]}[{dims}],{self.layout}>"


Argument = Pointer | Scalar | TensorMap


@dataclass(frozen=True, slots=True)
class KernelRef:
    """Where a kernel is defined. dialect: "triton" or "gluon"."""

    module: str
    function: str
    dialect: str = "triton"


@dataclass(frozen=True)
class KernelCall:
    """One kernel launch. `arguments` and `constants` together name every parameter of the kernel;
    an absent operand is a constant None. options: num_warps, num_stages and other compile options.
    """

    kernel: KernelRef
    grid: tuple[int, int, int]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def variant(self) -> tuple:
        """What the compiled code depends on, besides target and toolchain: run-time values and
        the grid are not part of it."""
        arguments = tuple((name, a.type, promise(a)) for name, a in self.arguments.items())
        constants = tuple(sorted(self.constants.items(), key=lambda item: item[0]))
        return self.kernel, arguments, constants, tuple(sorted(self.options.items()))


def promise(argument: Argument) -> int:
    """The multiple that the compiler may take this argument's value to be: bytes of an address, or
    the value of a scalar."""
    match argument:
        case Pointer(aligned=True):
            return 16
        case Scalar(divisor=divisor):
            return divisor
    return 1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch that a program needs for its own duration; `zeroed` if it must start as zeros."""

    name: str
    buffer: ArraySpec
    zeroed: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """Kernel launches in order, and their scratch."""

    calls: tuple[KernelCall, ...]
    workspaces: tuple[Workspace, ...] = ()
