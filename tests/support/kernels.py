"""What kernels take: spills in the loops of compiled ones, shared memory of lowered ones."""

from importlib import import_module
from typing import Any
from unittest import mock

from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from heedful.inspector.nvidia import disassemble, measure, parse_sass
from heedful.launch.code import triton_compat
from heedful.launch.spec import KernelCall

# By Triton's name of a target's backend: its passes, and that which gives out shared memory.
ALLOCATES = {
    "cuda": ("nvidia", "add_allocate_shared_memory_nv"),
    "hip": ("amd", "add_allocate_shared_memory"),
}


class _Reached(Exception):
    """Passes are added up to the one that gives out shared memory."""


def shared_bytes(call: KernelCall, arch: str) -> int:
    """Bytes of shared memory of a kernel that Triton's passes lower until it is known, ahead of
    LLVM, which takes most of a compilation. Raises what they raise."""
    target = triton_compat.parse_target(arch)
    backend: Any = make_backend(target)
    source = triton_compat.source(call)
    asked: dict[str, Any] = {"enable_fp_fusion": True, **call.options, **source.parse_options()}
    options = backend.parse_options(asked)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    names = list(stages)
    for name in names[names.index(source.ext) : names.index("llir")]:
        module = stages[name](module, metadata)
    vendor, name = ALLOCATES[target.backend]
    of_vendor = getattr(import_module("triton._C.libtriton"), vendor).passes.ttgpuir
    allocate, managers = getattr(of_vendor, name), []

    def stop_behind(manager: Any, *more: Any) -> None:
        allocate(manager, *more)
        managers.append(manager)
        raise _Reached

    with mock.patch.object(of_vendor, name, stop_behind):
        try:
            stages["llir"](module, metadata)
        except _Reached:
            managers[0].run(module, name)
    # As after a compilation: no process is to end with words about what Triton holds.
    triton_compat._let_go_at_exit()
    return module.get_int_attr("ttg.shared")


def spills_over_keys(cubin: bytes) -> int:
    """Of the innermost loops with products, whichever unit makes them."""
    code, labels, branches = parse_sass(disassemble(cubin).text)
    loops = {(labels[to], at + 1) for at, to in branches if labels.get(to, at + 1) <= at}
    found = {bounds: measure(code[slice(*bounds)]) for bounds in loops}
    busy = {b for b, sass in found.items() if sass.wgmma or sass.counts["HMMA"]}
    inner = [b for b in busy if not any(b[0] <= c[0] and c[1] <= b[1] and b != c for c in busy)]
    assert inner
    return sum(found[bounds].spills for bounds in inner)
