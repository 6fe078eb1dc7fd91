"""The only module that imports Triton: it makes `Artifact`s from kernels, without a driver, with
Triton 3.6 to 3.9.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from heedful.core.base.device import vendor_of
from heedful.core.base.installed import assembler_version
from heedful.launch.code.artifact import (
    PARAMETER_BASE,
    Artifact,
    CompileError,
    lay_out,
    remedy,
    size_of,
)
from heedful.launch.spec import (
    Argument,
    KernelCall,
    KernelRef,
    TensorMap,
    is_group,
    leaves,
    map_leaves,
    promise,
)

VERSION = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])


def parse_target(arch: str) -> GPUTarget:
    """Triton's target for our name of an architecture: sm_90, gfx950."""
    vendor = vendor_of(arch)
    if vendor == "nvidia":
        return GPUTarget("cuda", int(arch[3:]), 32)
    if vendor == "amd":
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ValueError(f"arch must be sm_* or gfx*, got {arch!r}")


@cache
def function(ref: KernelRef):
    """The jit function of a reference."""
    return getattr(importlib.import_module(ref.module), ref.function)


def source(call: KernelCall):
    """The kernel with its signature, as Triton's compiler takes it.

    Raises TypeError if the call does not name exactly the kernel's parameters, or has another group
    than the kernel declares.
    """
    kernel = function(call.kernel)
    passed, wanted = set(call.parameters), set(kernel.arg_names)
    if passed != wanted:
        missing, extra = wanted - passed, passed - wanted
        raise TypeError(
            f"{call.kernel.function}: missing {sorted(missing)}, unknown {sorted(extra)}"
        )
    _check_groups(call, kernel.fn.__annotations__)
    signature, constants, attributes = {}, {}, {}

    def bind(_name: str, leaf: object, path: tuple[int, ...]) -> str:
        if not isinstance(leaf, Argument):
            constants[path] = leaf
            return "constexpr"
        if promise(leaf) > 1:
            attributes[path] = [["tt.divisibility", promise(leaf)]]
        return leaf.type

    for position, name in enumerate(kernel.arg_names):
        signature[name] = map_leaves(name, call.parameters[name], bind, (position,))
    if call.kernel.dialect == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constants, attributes)
    return ASTSource(kernel, signature, constants, attributes)


def _check_groups(call: KernelCall, declared: Mapping[str, Any]) -> None:
    """TypeError unless each group is of the class that the kernel's parameter is annotated with."""
    for name, value in call.parameters.items():
        wanted = declared.get(name)
        if is_group(value) and type(value) is not wanted:
            raise TypeError(f"{call.kernel.function}: {name} must be {wanted}, got {type(value)}")


def _keeps_lines() -> bool:
    """Whether machine code includes its PTX and source lines, for profilers. They are three
    quarters of its size, and JAX hashes it at every call."""
    return os.environ.get("TRITON_DISABLE_LINE_INFO", "").lower() in ("0", "false", "off")


def compile_kernel(call: KernelCall, arch: str):
    """Triton's CompiledKernel for one call on an architecture: no GPU needed."""
    target = parse_target(arch)
    options = {"enable_fp_fusion": True, **call.options}
    if target.backend == "cuda" and not _keeps_lines():
        asked = options.get("ptx_options") or knobs.nvidia.ptxas_options or ""
        options["ptx_options"] = f"{asked} -suppress-debug-info".strip()
    # In Gluon, layouts would be of all programs of a cluster.
    if call.cluster > 1 and call.kernel.dialect != "gluon":
        options["num_ctas"] = call.cluster
    src = source(call)
    try:
        return triton.compile(src, target=target, options=options)
    except Exception as error:
        words = f"{call.kernel.function} for {arch}: {error}{remedy(error)}"
        raise CompileError(words) from error
    finally:
        _let_go_at_exit()


def _let_go_at_exit() -> None:
    """Makes Python clear Triton's modules when it ends. Once a Gluon kernel has used a layout,
    Triton's C++ keeps the layouts' classes, and these keep all of Triton's bindings through their
    modules' dicts: nanobind then prints twenty-five lines of "leaked" at the end of the process.
    Python clears only modules that something still references, so the kept classes get a reference
    to them.
    """
    layouts = sys.modules.get("triton.experimental.gluon.language._layouts")
    kept = getattr(layouts, "AutoLayout", None)
    if kept is not None:
        modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "triton"]
        kept._cleared_at_exit = modules


def compile_artifact(call: KernelCall, arch: str) -> Artifact:
    """Compiles one call for an architecture."""
    compiled = compile_kernel(call, arch)
    target, metadata = parse_target(arch), compiled.metadata
    nvidia = target.backend == "cuda"
    maps = {name: a for name, a in call.arguments.items() if isinstance(a, TensorMap)}
    in_order = (leaves(name, call.parameters[name]) for name in function(call.kernel).arg_names)
    order = [name for group in in_order for name, *_ in group if name in call.arguments]
    types = [(name, call.arguments[name].type) for name in order]
    parameters, size = lay_out(
        types,
        {name: len(a.shape) for name, a in maps.items()},
        PARAMETER_BASE.get(f"{target.backend}:{target.arch}", 0),
    )
    text = compiled.asm["ptx" if nvidia else "amdgcn"]
    declared = _ptx_parameters(text) if nvidia else None
    if declared is not None and declared != [size_of(p.type)[0] for p in parameters]:
        raise CompileError(f"{call.kernel.function}: PTX declares parameters {declared}")
    metas = getattr(metadata, "tensordesc_meta", None) or []
    return Artifact(
        code=compiled.asm["cubin" if nvidia else "hsaco"],
        text=text,
        symbol=metadata.name,
        target=f"{target.backend}:{target.arch}",
        num_warps=metadata.num_warps,
        warp_size=target.warp_size,
        shared_bytes=metadata.shared,
        cluster=max(call.cluster, getattr(metadata, "num_ctas", 1)),
        parameters=tuple(parameters),
        parameter_bytes=size,
        # Triton 3.6 has none for AMD.
        scratch_bytes=getattr(metadata, "global_scratch_size", 0) or 0,
        tensor_maps={
            name: {
                "swizzle": meta["swizzle"],
                "elem_size": meta["elem_size"],
                "elem_type": _TENSOR_MAP_TYPES.get(meta["elem_type"], meta["elem_type"]),
                "block_size": list(meta["block_size"]),
            }
            for name, meta in zip([n for n in order if n in maps], metas, strict=True)
        },
        toolchain=f"triton {triton.__version__}" + (_assembler(int(target.arch)) if nvidia else ""),
    )


def _assembler(arch: int) -> str:
    """The assembler that Triton uses for an NVIDIA architecture, as artifacts name it."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = Path(get_ptxas(arch).path)
    return f", {path.name} {assembler_version(path)}"


# Element types of descriptors as the device numbers them -> CUtensorMapDataType.
_TENSOR_MAP_TYPES = {8: 10, 9: 8, 10: 9}

_PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def _ptx_parameters(text: str) -> list[int]:
    """Bytes of each parameter that the PTX entry declares."""
    entry = text[text.index(".entry") :]
    entry = entry[: entry.index(")")]
    sizes = []
    for line in re.findall(r"\.param ([^\n]*?),?\n", entry):
        array = re.search(r"\.b8 \w+\[(\d+)\]", line)
        kind = re.search(r"\.[usbf](8|16|32|64)\b", line)
        sizes.append(int(array[1]) if array else _PTX_BYTES[kind[1]] if kind else 0)
    return sizes
