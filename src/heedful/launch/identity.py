"""What a compiled kernel is the compilation of: names for it that need no compiler to work out."""

import hashlib
import importlib.metadata
import importlib.util
import os
from functools import cache
from pathlib import Path

import heedful.kernels
from heedful.launch.spec import KernelCall, KernelRef

_KERNELS = Path(heedful.kernels.__file__).parent


@cache
def source_digest(module: str) -> str:
    """SHA-256 over the sources that a kernel module may draw on: all of heedful's kernels, since
    families share code, or its own file for a module elsewhere."""
    if module.startswith("heedful.kernels."):
        files = sorted(_KERNELS.rglob("*.py"))
    else:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ImportError(f"no module {module}")
        files = [Path(spec.origin)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(bytes(file.parent.name, "utf-8") + b"/" + file.name.encode() + b"\0")
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def toolchain() -> str:
    """The compiler that would compile here: empty without Triton."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
    # A foreign assembler makes other code of the same PTX.
    return " ".join(filter(None, (f"triton {version}", os.environ.get("TRITON_PTXAS_PATH"))))


def kernel_key(call: KernelCall, arch: str) -> str:
    """Names a variant of a kernel's source on an architecture, whoever compiles it."""
    ref: KernelRef = call.kernel
    text = repr((source_digest(ref.module), arch, call.variant))
    return hashlib.sha256(text.encode()).hexdigest()


def cache_key(call: KernelCall, arch: str) -> str:
    """Names what this toolchain makes of the variant."""
    return hashlib.sha256(f"{kernel_key(call, arch)} {toolchain()}".encode()).hexdigest()
