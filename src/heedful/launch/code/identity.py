"""Keys of compiled kernels, computed without a compiler."""

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import heedful.kernels
from heedful.core.base import installed
from heedful.launch.spec import KernelCall, KernelRef

_KERNELS = Path(heedful.kernels.__file__).parent
# The modules that hand a kernel to the compiler and read an artifact's parameters.
_HOST = tuple(Path(__file__).with_name(name) for name in ("artifact.py", "triton_compat.py"))

# Prefixes of environment variables that change what Triton, LLVM and ptxas make. An unknown
# variable is assumed to matter: a wrong guess costs a compilation, and the other way a wrong
# kernel.
_TOLD = ("TRITON_", "AMDGCN_", "NVPTX_", "PTXAS_", "LLVM_", "MLIR_", "USE_IR_LOC", "ALLOW_LHS_")
_TOLD += ("DISABLE_LLVM_", "DISABLE_PTXAS_", "DISABLE_MMA_", "DISABLE_FAST_")
# Exceptions: they only say where Triton stores or finds files, or how it runs kernels.
_PLACES = ("TRITON_HOME", "TRITON_CACHE_", "TRITON_REDIS_", "TRITON_REMOTE_CACHE_", "TRITON_PRINT_")
_PLACES += ("TRITON_DUMP_DIR", "TRITON_LIBCUDA_", "TRITON_LIBHIP_", "TRITON_INTERPRET")
_PLACES += ("TRITON_DEFAULT_BACKEND", "TRITON_CUDACRT_", "TRITON_CUDART_", "TRITON_PROTON_")


# An import of a kernel's source: the module, and the names, which may be modules of a package.
# Kernels import heedful's modules in this form alone, and no others than kernels. It begins with
# the end of the line before: plain text at the start of a pattern is looked for far faster.
_IMPORT = re.compile(rb"\nfrom heedful\.kernels([\w.]*) import (\([^)]*\)|[^\n]*)")


@cache
def source_digest(module: str) -> str:
    """SHA-256 over the sources that a kernel module may use: its file and those that it imports of
    heedful's kernels, directly or not; or a module's file if it is elsewhere."""
    if module.startswith("heedful.kernels."):
        files = reached(_KERNELS.joinpath(*module.split(".")[2:]))
        return _together((file, _kept(str(file))[0]) for file in files)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module {module}")
    return files_digest([Path(spec.origin)])


@cache
def all_kernels_digest() -> str:
    """SHA-256 over the sources of all kernels."""
    return files_digest(sorted(_KERNELS.rglob("*.py")))


def reached(module: Path) -> list[Path]:
    """The files of a kernel module and of all that it imports, by name. module: without ".py"."""
    files: set[str] = set()
    rest = {f"{module}.py"}
    while rest:
        files |= rest
        rest = {path for file in rest for path in _kept(file)[1]} - files
    return sorted(map(Path, files))


def _source(file: str) -> tuple[str, frozenset[str]]:
    """The SHA-256 of a file, and the files of the kernels' modules that it imports. Paths are text:
    a first call reads some forty files, and as many objects of pathlib would take longer."""
    with open(file, "rb") as opened:
        content = opened.read()
    files = [_imported(*names) for names in _IMPORT.findall(b"\n" + content)]
    return hashlib.sha256(content).hexdigest(), frozenset().union(*files)


@cache
def _imported(package: bytes, names: bytes) -> frozenset[str]:
    """The files of an import: of its module, or else of those of its names that are modules."""
    module = os.path.join(_KERNELS, *package.decode().split(".")[1:])
    if os.path.isfile(f"{module}.py"):
        return frozenset((f"{module}.py",))
    files = [os.path.join(module, f"{name}.py") for name in re.findall(r"\w+", names.decode())]
    return frozenset(filter(os.path.isfile, files))


# Kernels share most of their sources.
_kept = cache(_source)


@cache
def _host_digest() -> str:
    return files_digest(_HOST)


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files."""
    return _together((file, _source(str(file))[0]) for file in files)


def _together(files: Iterable[tuple[Path, str]]) -> str:
    digest = hashlib.sha256()
    for file, content in files:
        digest.update(f"{file.parent.name}/{file.name} {content}\n".encode())
    return digest.hexdigest()


def toolchain(of: installed.Compiler | None = None) -> str:
    """A compiler, by default the one that would compile here, with the environment variables for
    it, as part of a key; empty without Triton."""
    compiler = of or installed.compiler()
    if compiler is None:
        return ""
    return " ".join((f"triton {compiler.version}", *_assemblers(compiler.root), *_environment()))


@cache
def _assemblers(root: Path) -> list[str]:
    """The sizes of the assemblers, in which builds of one version of Triton differ."""
    tools = installed.Compiler("", root).assemblers
    return [f"{name}@{path.stat().st_size}" for name, path in tools.items()]


def told() -> dict[str, str]:
    """The variables of the environment that change what the compiler makes."""
    variables = sorted(os.environ.items())
    return {n: value for n, value in variables if n.startswith(_TOLD) and not n.startswith(_PLACES)}


def _environment() -> Iterator[str]:
    """The environment variables of the compiler as part of a key. A file that a variable names,
    such as another assembler, may be replaced under its name, so its size and date belong to the
    key."""
    for name, value in told().items():
        try:
            status = os.stat(value) if os.path.isfile(value) else None
        except (OSError, ValueError):
            status = None
        yield f"{name}={value}" + (f"@{status.st_size},{status.st_mtime_ns}" if status else "")


def kernel_key(call: KernelCall, arch: str) -> str:
    """The key of a specialization of a kernel's source on an architecture, whatever compiles it."""
    ref: KernelRef = call.kernel
    text = repr((source_digest(ref.module), _host_digest(), arch, call.specialization))
    return hashlib.sha256(text.encode()).hexdigest()


def cache_key(call: KernelCall, arch: str) -> str:
    """The key of what this toolchain makes of the specialization."""
    return hashlib.sha256(f"{kernel_key(call, arch)} {toolchain()}".encode()).hexdigest()
