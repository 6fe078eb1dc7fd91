"""A compiled kernel as plain data, for our launcher or another."""

from dataclasses import dataclass, field
from errno import EACCES, EAGAIN, ENOMEM, EPERM

# Bytes and alignment of kernel parameters by Triton type.
_SIZES = {"i1": 1, "i8": 1, "u8": 1, "i32": 4, "fp32": 4, "i64": 8}
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN = 128, 64
# Where parameters begin in the constant bank, by target: the alignment of tensor maps depends on
# it. `cuobjdump -elf` shows it beside KPARAM_INFO.
PARAMETER_BASE = {"cuda:90": 0x210}


MEMORY_HELPS = (
    "where memory is short, give this machine or container more, or let fewer kernels compile at"
    " once (HEEDFUL_WORKERS)"
)
PACKS_HELP = "a pack of `heedful prebuild` (HEEDFUL_PACK) needs no compiler"
_PROCESSES_HELP = (
    "the compiler runs an assembler: where a filter of system calls or a limit of processes denies"
    f" it that, allow more; {PACKS_HELP}"
)


class CompileError(RuntimeError):
    """A kernel did not compile; the text has the compiler's message."""


def remedy(error: BaseException | None, files: str = "") -> str:
    """Advice for a fault of the machine that stopped a compiler; "" for other faults. files: the
    advice if a file is at fault."""
    if isinstance(error, MemoryError):
        return f": {MEMORY_HELPS}"
    if not isinstance(error, OSError):
        return ""
    if error.errno == ENOMEM:
        return f": {MEMORY_HELPS}"
    if error.filename is None and error.errno in (EPERM, EACCES, EAGAIN):
        return f": {_PROCESSES_HELP}"
    return files and f": {files}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the compiled kernel, in order.

    name: of the kernel argument; a tensor map is followed by its shape and strides, named
        `name.shape[i]` and `name.strides[i]`; scratch that the compiler asks for is `scratch[i]`.
    type: Triton's ("*bf16", "i32", "fp32", "tensormap"). offset: in the argument buffer, bytes.
    """

    name: str
    type: str
    offset: int


@dataclass(frozen=True)
class Artifact:
    """Machine code and how to launch it.

    code: cubin or hsaco. text: PTX or AMD assembly, for foreign launchers and inspection. symbol:
    the entry's name. target: such as "cuda:90" or "hip:gfx950". num_warps: of all partitions
    together. cluster: blocks of a cluster. tensor_maps: for each descriptor argument, the facts for
    its encoding (swizzle, element type, box). scratch_bytes: device memory per block that the
    compiler asks for, usually 0. toolchain: the Triton and the assembler that made it.
    """

    code: bytes
    text: str
    symbol: str
    target: str
    num_warps: int
    warp_size: int
    shared_bytes: int
    cluster: int
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    scratch_bytes: int = 0
    tensor_maps: dict[str, dict] = field(default_factory=dict)
    toolchain: str = ""


def lay_out(
    types: list[tuple[str, str]], ranks: dict[str, int], base: int = 0
) -> tuple[list[Parameter], int]:
    """Parameters with their offsets for (name, type) pairs, and the buffer's size in bytes.

    ranks: rank of each tensor-map argument. Parameters follow one another, each aligned by its
    size in the memory that the kernel sees, where the first lies at `base`.
    """
    flat: list[tuple[str, str]] = []
    for name, kind in types:
        if kind.startswith("tensordesc"):
            flat.append((name, "tensormap"))
            flat += [(f"{name}.shape[{i}]", "i32") for i in range(ranks[name])]
            flat += [(f"{name}.strides[{i}]", "i64") for i in range(ranks[name])]
        else:
            flat.append((name, kind))
    # Every Triton kernel ends with two pointers: global scratch and profiler scratch.
    flat += [("scratch[0]", "*i8"), ("scratch[1]", "*i8")]
    parameters, offset = [], 0
    for name, kind in flat:
        size, align = size_of(kind)
        offset = -(-(base + offset) // align) * align - base
        parameters.append(Parameter(name, kind, offset))
        offset += size
    return parameters, offset


def map_words(artifact: Artifact) -> tuple[dict[str, int], int]:
    """Where in a launch's buffer, after the parameters, the words of each tensor map begin, and
    where they all end. A map is encoded from words of 8 bytes: the address, the sizes, innermost
    first, and the strides in bytes without the first."""
    end, places = -(-artifact.parameter_bytes // 8) * 8, {}
    for name, meta in artifact.tensor_maps.items():
        places[name] = end
        end += 8 * 2 * len(meta["block_size"])
    return places, end


def size_of(kind: str) -> tuple[int, int]:
    """Bytes and alignment of a parameter of this Triton type."""
    if kind == "tensormap":
        return TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN
    size = 8 if kind.startswith("*") else _SIZES[kind]
    return size, size
