"""What a launch is, before any compiler or driver: kernels with their arguments in order, and the
scratch they need. Running, compiling ahead of time, inspecting and emulating all start from the
same `Program`, so they all compile exactly the same thing. Framework-neutral, no triton imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heedful.core.numbers import truth, wholes

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
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


def item_bytes(dtype: str) -> int:
    """Bytes of one stored element."""
    return ITEM_BYTES.get(dtype, 1)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """An array that a kernel reads or writes: shape, strides in elements, dtype, and whether its
    address is a multiple of 16 bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    aligned: bool = True

    def __post_init__(self):
        # NumPy's numbers read like Python's, and make other keys and no JSON.
        for name in ("shape", "strides"):
            object.__setattr__(self, name, wholes(name, getattr(self, name)))
        if len(self.strides) != len(self.shape):
            raise ValueError(
                f"strides must be as many as dims, got {self.strides} for shape {self.shape}"
            )
        object.__setattr__(self, "aligned", truth("aligned", self.aligned))

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: str) -> "BufferSpec":
        """A dense row-major array, as scratch is."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(tuple(shape), tuple(reversed(strides)), dtype)

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, but 0 for a dim of one element, which is never stepped over."""
        return tuple(map(_step, self.shape, self.strides))

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * item_bytes(self.dtype)


def _step(size: int, stride: int) -> int:
    return stride if size > 1 else 0


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
    buffer: BufferSpec
    zeroed: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """Kernel launches in order, and their scratch."""

    calls: tuple[KernelCall, ...]
    workspaces: tuple[Workspace, ...] = ()
