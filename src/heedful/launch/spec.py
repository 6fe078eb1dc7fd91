"""A launch, before any compiler or driver: kernels with their arguments in order, and the scratch
they need. Running, compiling ahead of time, inspecting and emulating all start from the same
`Program`, so they all compile exactly the same thing. Framework-neutral, no triton imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cache, cached_property
from types import UnionType
from typing import Any, TypeVar, get_args

from heedful.core.base.frozen import dataclass
from heedful.core.planning.sizes import Workspace
from heedful.kernels.args.kinds import Kind

Group = TypeVar("Group")

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
    "fp8_ds_mla": "u8",
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
    """A TMA descriptor over the array named `buffer`, with this shape and these strides (in
    elements; the last is 1), in boxes of `block`. `layout` is the repr of the Gluon shared-memory
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
_ARGUMENTS = frozenset((Pointer, Scalar, TensorMap))
# Dotted name, leaf, and its declared kind.
Leaf = tuple[str, Any, Kind | None]


@dataclass(frozen=True, slots=True)
class KernelRef:
    """Where a kernel is defined. dialect: "triton" or "gluon"."""

    module: str
    function: str
    dialect: str = "triton"


@dataclass(frozen=True)
class KernelCall:
    """One kernel launch.

    parameters: the value of each parameter of the kernel: a group of `kernels.args`, an argument,
    or a constant, which for an absent operand is None. options: num_warps, num_stages and other
    compile options. cluster: programs that share their shared memory. programmatic: the launch may
    begin before the previous one has ended, and the kernel waits where it must (programmatic
    dependent launch). cooperative: all programs run at once, or the launch fails. Raises TypeError
    for a leaf that its field does not declare.
    """

    kernel: KernelRef
    grid: tuple[int, int, int]
    parameters: Mapping[str, Any]
    options: Mapping[str, object] = field(default_factory=dict)
    cluster: int = 1
    programmatic: bool = False
    cooperative: bool = False
    # The leaves by dotted names: those that are passed at run time, and constants.
    arguments: Mapping[str, Argument] = field(init=False)
    constants: Mapping[str, object] = field(init=False)

    def __post_init__(self):
        if self.cluster < 1:
            raise ValueError(f"cluster must be >= 1, got {self.cluster}")
        arguments: dict[str, Argument] = {}
        constants: dict[str, object] = {}
        for name, leaf, kind in self._leaves:
            if type(leaf) in _ARGUMENTS:
                _check_kind(name, leaf, kind)
                arguments[name] = leaf
            else:
                constants[name] = leaf
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "constants", constants)

    @cached_property
    def _leaves(self) -> list[Leaf]:
        return [leaf for name, value in self.parameters.items() for leaf in leaves(name, value)]

    @cached_property
    def specialization(self) -> tuple:
        """The facts that the compiled code depends on, besides target and toolchain: run-time
        values, the grid and how the launch is queued are not part of it."""
        arguments = tuple((name, a.type, promise(a)) for name, a in self.arguments.items())
        constants = tuple(sorted(self.constants.items()))
        options = tuple(sorted(self.options.items()))
        return self.kernel, arguments, constants, options, self.cluster

    @property
    def reads(self) -> frozenset[str]:
        """Names of the buffers whose contents before the launch the kernel reads."""
        return self._buffers({Kind.READ, Kind.READ_AND_WRITTEN})

    @property
    def writes(self) -> frozenset[str]:
        """Names of the buffers that the kernel writes."""
        return self._buffers({Kind.WRITTEN, Kind.READ_AND_WRITTEN})

    def _buffers(self, kinds: set[Kind]) -> frozenset[str]:
        names = set()
        for name, leaf, kind in self._leaves:
            if isinstance(leaf, Pointer | TensorMap):
                if kind is None:
                    raise TypeError(f"{name}: declared neither as read nor as written")
                if kind in kinds:
                    names.add(leaf.buffer)
        return frozenset(names)


def _check_kind(name: str, leaf: Argument, kind: Kind | None) -> None:
    """TypeError if a leaf is not of the kind that its field declares."""
    if kind is None:
        return
    if kind is Kind.CONSTANT or isinstance(leaf, Scalar) is not (kind is Kind.NUMBER):
        raise TypeError(f"{name} is declared as {kind.value}, got {leaf}")


@cache
def declared(group: type) -> tuple[tuple[str, Kind | None, tuple[type, ...]], ...]:
    """(name, kind, the classes that a nested group may have) for every field of a group."""
    made = []
    # typing.get_type_hints would go through the bases, too, and make each again.
    for name, hint in group.__annotations__.items():
        kind = next((x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Kind)), None)
        inner = get_args(hint)[0] if kind is not None else hint
        classes = get_args(inner) if isinstance(inner, UnionType) else (inner,)
        made.append((name, kind, tuple(c for c in classes if hasattr(c, "_fields"))))
    return tuple(made)


def leaves(name: str, value: Any, kind: Kind | None = None) -> list[Leaf]:
    """Every leaf of a parameter, in order. A leaf outside of a group has no declaration.

    Raises TypeError for a group of another class than its field's, or without a declaration that it
    is read or written.
    """
    if not is_group(value):
        return [(name, value, kind)]
    made: list[Leaf] = []
    for (field_name, field_kind, inner), item in zip(declared(type(value)), value, strict=True):
        path = f"{name}.{field_name}"
        if not inner and not isinstance(item, tuple):
            if field_kind is None and kind is None:
                raise TypeError(f"{path} must be declared as read, written or both")
            made.append((path, item, field_kind or kind))
        elif item is None:
            made.append((path, None, field_kind or kind))
        elif type(item) in inner:
            made += leaves(path, item, field_kind or kind)
        else:
            wanted = " or ".join(map(str, inner)) or None
            raise TypeError(f"{path} must be {wanted}, got {type(item)}")
    return made


def is_group(value: object) -> bool:
    """Whether a parameter is a group of others (a NamedTuple)."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def absent(group: type[Group]) -> Group:
    """A group for operands that a call lacks: each field is None. A kernel tests one of them."""
    return group(*(absent(inner[0]) if inner else None for _, _, inner in declared(group)))


def map_leaves(
    name: str,
    value: Any,
    make: Callable[[str, Any, tuple[int, ...]], Any],
    path: tuple[int, ...] = (),
) -> Any:
    """The parameter with make(dotted name, leaf, path) in place of each leaf."""
    if not is_group(value):
        return make(name, value, path)
    fields = enumerate(zip(value._fields, value, strict=True))
    return type(value)(
        *(map_leaves(f"{name}.{field}", leaf, make, (*path, i)) for i, (field, leaf) in fields)
    )


def promise(argument: Argument) -> int:
    """The number of which the compiler may assume that the argument is a multiple: in bytes for an
    address."""
    match argument:
        case Pointer(aligned=True):
            return 16
        case Scalar(divisor=divisor):
            return divisor
    return 1


@dataclass(frozen=True, slots=True)
class Program:
    """Kernel launches in order, and their scratch."""

    calls: tuple[KernelCall, ...]
    workspaces: tuple[Workspace, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> "Program":
        """The same launches on buffers with other names. names: old name to new name."""

        def rename(_name: str, leaf: Any, _path: tuple[int, ...]) -> Any:
            is_buffer = isinstance(leaf, Pointer | TensorMap)
            return replace(leaf, buffer=names.get(leaf.buffer, leaf.buffer)) if is_buffer else leaf

        return replace(self, calls=tuple(_with_leaves(call, rename) for call in self.calls))


def _with_leaves(call: KernelCall, make: Callable[[str, Any, tuple[int, ...]], Any]) -> KernelCall:
    """The launch with its leaves replaced: see `map_leaves`."""
    parameters = {name: map_leaves(name, x, make) for name, x in call.parameters.items()}
    return replace(call, parameters=parameters)
