"""A program for a launcher of another framework: compiled text, sizes, parameters.

No framework is imported. Made for jaxlib's Triton kernel calls; any launcher that takes PTX or a
code object and an ordered parameter list can use it.
"""

from heedful.core.base.frozen import dataclass
from heedful.core.planning.sizes import Workspace
from heedful.launch.code.artifact import Artifact
from heedful.launch.compiler import artifact
from heedful.launch.spec import Pointer, Program, Scalar, TensorMap


@dataclass(frozen=True, slots=True)
class TensorMapParameter:
    """A TMA descriptor to encode over the array `buffer`: element type and swizzle as
    CUtensorMap's numbers, shape and strides in elements (outermost first), box."""

    buffer: str
    element_type: int
    element_bytes: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


# In the kernel's order. A tensor map is followed by its shape (i32) and strides (i64) as scalars.
ForeignParameter = Pointer | Scalar | TensorMapParameter


@dataclass(frozen=True, slots=True)
class ForeignLaunch:
    """One kernel launch. The compiler's two trailing scratch pointers are not in `parameters`:
    a launcher passes them null (`artifact.scratch_bytes` is 0).

    reads, writes: names of the buffers whose contents before the launch matter, and of those that
    the kernel writes. programmatic, cooperative: as KernelCall's; the cluster is the artifact's."""

    artifact: Artifact
    grid: tuple[int, int, int]
    parameters: tuple[ForeignParameter, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    programmatic: bool
    cooperative: bool

    @property
    def text(self) -> str:
        """PTX or AMD assembly, for a launcher that assembles it. Raises RuntimeError where the
        kernel has machine code alone."""
        if not self.artifact.text:
            raise RuntimeError(
                f"{self.artifact.symbol}, made by {self.artifact.toolchain}, has no text: a wheel"
                " of kernels holds machine code alone. Launch artifact.code, or compile it where"
                " no such wheel is installed"
            )
        return self.artifact.text


@dataclass(frozen=True, slots=True)
class ForeignProgram:
    """Launches in order, and the scratch arrays that they share."""

    launches: tuple[ForeignLaunch, ...]
    workspaces: tuple[Workspace, ...]


def describe(program: Program, arch: str) -> ForeignProgram:
    """The launches of a program compiled for an architecture (sm_90, gfx950, ...)."""
    launches = []
    for call in program.calls:
        compiled = artifact(call, arch)
        parameters: list[ForeignParameter] = []
        for name, argument in _in_order(call, compiled):
            if isinstance(argument, TensorMap):
                parameters += _tensor_map(argument, compiled.tensor_maps[name])
            else:
                parameters.append(argument)
        access, queued = (call.reads, call.writes), (call.programmatic, call.cooperative)
        launches.append(ForeignLaunch(compiled, call.grid, tuple(parameters), *access, *queued))
    return ForeignProgram(tuple(launches), program.workspaces)


def _in_order(call, compiled: Artifact):
    """The call's arguments in the compiled kernel's order."""
    return [
        (p.name, call.arguments[p.name]) for p in compiled.parameters if p.name in call.arguments
    ]


def _tensor_map(argument: TensorMap, meta: dict) -> list[ForeignParameter]:
    described = TensorMapParameter(
        argument.buffer,
        meta["elem_type"],
        meta["elem_size"],
        meta["swizzle"],
        argument.shape,
        argument.strides,
        tuple(meta["block_size"]),
    )
    sizes = [Scalar(size, "i32") for size in argument.shape]
    return [described, *sizes, *(Scalar(stride, "i64") for stride in argument.strides)]
