"""How kernels are given to Triton, and what is kept of what it makes: a stub stands for the
compiler."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import mangle_type

from heedful.core.base.device import by_name
from heedful.core.call.problem import LATENT_ROWS, AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch.code import triton_compat as compat
from heedful.launch.code.artifact import Parameter
from heedful.launch.program.programs import program
from heedful.launch.spec import TRITON_TYPES, KernelCall, Pointer, Scalar, TensorMap, leaves


def some_call(device: str = "H200", backend: str = "portable", **facts) -> KernelCall:
    problem = AttentionProblem.dense(1, 64, 512, 2, head_dim=128, **facts)
    return program(plan(problem, by_name(device), backend=backend), "forward").calls[0]


def names(call: KernelCall) -> list[str]:
    """The leaves of the kernel's parameters, in its order."""
    parameters = compat.function(call.kernel).arg_names
    return [leaf for name in parameters for leaf, *_ in leaves(name, call.parameters[name])]


def at(signature: dict, path: tuple[int, ...]) -> Any:
    """What a signature, whose groups are tuples, has in this place."""
    found = list(signature.values())[path[0]]
    for index in path[1:]:
        found = found[index]
    return found


def paths(call: KernelCall) -> dict[str, tuple[int, ...]]:
    """Where each leaf is: the position of its parameter, then of its field in each group."""
    found = {}

    def visit(name: str, value: Any, path: tuple[int, ...]) -> None:
        if not hasattr(value, "_fields"):
            found[name] = path
            return
        for position, (field, item) in enumerate(value._asdict().items()):
            visit(f"{name}.{field}", item, (*path, position))

    for position, name in enumerate(compat.function(call.kernel).arg_names):
        visit(name, call.parameters[name], (position,))
    return found


@pytest.mark.parametrize(
    "arch, backend, number, warp",
    [
        ("sm_90", "cuda", 90, 32),
        ("sm_100", "cuda", 100, 32),
        ("gfx942", "hip", "gfx942", 64),
        ("gfx90a", "hip", "gfx90a", 64),
        ("gfx1100", "hip", "gfx1100", 32),
    ],
)
def test_an_architecture_is_tritons_target(arch, backend, number, warp):
    target = compat.parse_target(arch)
    assert (target.backend, target.arch, target.warp_size) == (backend, number, warp)


@pytest.mark.parametrize("arch", ["cpu", "90", "xsm_90"])
def test_another_architecture_is_refused(arch):
    with pytest.raises(ValueError, match="arch must be"):
        compat.parse_target(arch)


def test_the_version_is_its_first_two_numbers():
    wanted = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert wanted == compat.VERSION


@pytest.mark.parametrize("dtype", TRITON_TYPES)
def test_an_array_has_the_type_that_triton_gives_tensors_of_its_dtype(dtype):
    # Two values of four bits are a byte; rows of latent vectors are bytes.
    stored = "uint8" if dtype in ("int4", LATENT_ROWS) else dtype
    tensor = torch.empty(0, dtype=getattr(torch, stored))
    # Of one bit there is a name with and one without a sign.
    assert Pointer("x", dtype).type == mangle_type(tensor).replace("u1", "i1")


@pytest.mark.parametrize("facts", [{}, {"sink": True, "bias": True, "causal": True}])
@pytest.mark.parametrize("device, backend", [("H200", "hopper"), ("B200", "portable")])
def test_every_parameter_is_given_its_type_its_value_or_its_promise(device, backend, facts):
    call = some_call(device, backend, **facts)
    made = compat.source(call)
    assert list(made.signature) == list(compat.function(call.kernel).arg_names)
    assert type(made).__name__ == ("GluonASTSource" if backend == "hopper" else "ASTSource")
    promised = {}
    for name, path in paths(call).items():
        if name in call.constants:
            assert at(made.signature, path) == "constexpr"
            assert made.constants[path] == call.constants[name]
            continue
        argument = call.arguments[name]
        assert at(made.signature, path) == argument.type and path not in made.constants
        aligned = isinstance(argument, Pointer) and argument.aligned
        multiple = 16 if aligned else getattr(argument, "divisor", 1)
        if multiple > 1:
            promised[path] = [["tt.divisibility", multiple]]
    assert made.attrs == promised
    assert len(made.constants) == len(call.constants)


def test_a_call_that_names_other_parameters_is_refused():
    call = some_call()
    given = {name: value for name, value in call.parameters.items() if name != "params"}
    wrong = replace(call, parameters={**given, "spare": Scalar(1)})
    with pytest.raises(TypeError, match=r"missing \['params'\], unknown \['spare'\]"):
        compat.source(wrong)
    with pytest.raises(TypeError, match=r"missing \[\], unknown \['spare'\]"):
        compat.source(replace(call, parameters={**call.parameters, "spare": Scalar(1)}))


def test_a_group_of_another_class_than_the_kernel_declares_is_refused():
    call = some_call()
    wrong = {**call.parameters, "params": call.parameters["io"]}
    with pytest.raises(TypeError, match="params must be .*PortableParams.*got .*ForwardIO"):
        compat.source(replace(call, parameters=wrong))


# What the compiler is asked beside a call's own options.
ASKED = {"enable_fp_fusion": True, "ptx_options": "-suppress-debug-info"}


@pytest.fixture
def compiled(monkeypatch):
    """What the stub was asked, and what it answers."""
    asked: list[Any] = []
    metadata = SimpleNamespace(name="mangled", num_warps=12, shared=4096)
    answer = SimpleNamespace(metadata=metadata, asm={})

    def compile(src, target, options):
        asked.append((src, target, options))
        return answer

    monkeypatch.setattr(triton, "compile", compile)
    return SimpleNamespace(asked=asked, answer=answer, metadata=metadata)


def declared(call: KernelCall) -> list[str]:
    """The PTX parameters of a call's arguments."""
    kinds = {"i32": ".u32 p", "i64": ".u64 p", "fp32": ".f32 p"}
    found = []
    for name in names(call):
        argument = call.arguments.get(name)
        if isinstance(argument, Pointer):
            found.append(".u64 .ptr .global .align 1 p")
        elif isinstance(argument, Scalar):
            found.append(kinds[argument.type])
        elif isinstance(argument, TensorMap):
            found.append(".align 64 .b8 p[128]")
            found += [".u32 p"] * len(argument.shape) + [".u64 p"] * len(argument.shape)
    return [kind.replace("p[", "x[") for kind in found] + [".u64 .ptr .global .align 1 p"] * 2


def as_ptx(kinds: list[str]) -> str:
    # A name is a word before an array's length.
    lines = ",\n".join(
        f"\t.param {kind.replace('x[', f'x{i}[')}" if "[" in kind else f"\t.param {kind}{i}"
        for i, kind in enumerate(kinds)
    )
    return f".visible .entry mangled(\n{lines}\n)\n.reqntid 384\n{{ .param .b8 y[7]\n }}"


def test_what_the_compiler_made_is_kept_with_what_a_launch_needs(compiled):
    call = some_call()
    compiled.answer.asm = {"cubin": b"machine code", "ptx": as_ptx(declared(call))}
    made = compat.compile_artifact(call, "sm_90")
    ((source, target, options),) = compiled.asked
    assert (target.backend, target.arch) == ("cuda", 90)
    assert options == {**ASKED, **call.options}
    assert source.signature == compat.source(call).signature
    assert (made.code, made.text) == (b"machine code", compiled.answer.asm["ptx"])
    facts = (made.symbol, made.target, made.num_warps, made.warp_size, made.shared_bytes)
    assert facts == ("mangled", "cuda:90", 12, 32, 4096)
    assert (made.cluster, made.scratch_bytes, made.tensor_maps) == (1, 0, {})
    path = Path(get_ptxas(90).path)
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    name, _, number = made.toolchain.removeprefix(f"triton {triton.__version__}, ").partition(" ")
    assert name == path.name and f"V{number}\n" in said.replace(" ", "\n")
    given = [name for name in names(call) if name in call.arguments]
    assert [p.name for p in made.parameters] == [*given, "scratch[0]", "scratch[1]"]
    assert made.parameters[0] == Parameter(given[0], call.arguments[given[0]].type, 0)
    assert made.parameter_bytes == made.parameters[-1].offset + 8


def test_what_the_compiler_says_of_clusters_and_scratch_is_kept(compiled):
    call = some_call()
    compiled.answer.asm = {"cubin": b"", "ptx": as_ptx(declared(call))}
    compiled.metadata.num_ctas, compiled.metadata.global_scratch_size = 2, 640
    made = compat.compile_artifact(call, "sm_90")
    assert (made.cluster, made.scratch_bytes) == (2, 640)
    compiled.metadata.global_scratch_size = None
    assert compat.compile_artifact(call, "sm_90").scratch_bytes == 0


def test_a_cluster_is_asked_of_the_compiler(compiled):
    call = replace(some_call(), cluster=2)
    compiled.answer.asm = {"cubin": b"", "ptx": as_ptx(declared(call))}
    compat.compile_artifact(call, "sm_90")
    ((_, _, options),) = compiled.asked
    assert options == {**ASKED, "num_ctas": 2, **call.options}


@pytest.mark.parametrize(
    "kept, ptxas, own, wanted",
    [
        (None, None, None, "-suppress-debug-info"),
        ("1", None, None, "-suppress-debug-info"),
        ("0", None, None, None),
        ("False", None, None, None),
        ("off", "--verbose", None, None),
        (None, "--verbose", None, "--verbose -suppress-debug-info"),
        (None, "--verbose", "-O1", "-O1 -suppress-debug-info"),
    ],
)
def test_machine_code_carries_source_lines_only_where_they_are_asked_for(
    compiled, kept, ptxas, own, wanted, monkeypatch
):
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)
    if kept is not None:
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", kept)
    monkeypatch.setattr(knobs.nvidia, "ptxas_options", ptxas)
    call = some_call()
    call = replace(call, options={**call.options, **({"ptx_options": own} if own else {})})
    compat.compile_kernel(call, "sm_90")
    assert compiled.asked[-1][2].get("ptx_options") == wanted


def test_amds_compiler_is_told_nothing_of_ptx_and_fusion_may_be_forbidden(compiled):
    call = some_call("MI300X")
    compat.compile_kernel(replace(call, options={"enable_fp_fusion": False}), "gfx942")
    assert compiled.asked[-1][2] == {"enable_fp_fusion": False}


def test_amds_code_is_kept_without_a_look_at_its_text(compiled):
    call = some_call("MI300X", "portable")
    compiled.answer.asm = {"hsaco": b"code object", "amdgcn": "s_endpgm"}
    made = compat.compile_artifact(call, "gfx942")
    assert (made.code, made.text) == (b"code object", "s_endpgm")
    assert (made.target, made.warp_size) == ("hip:gfx942", 64)


def test_tensor_maps_lie_where_hopper_has_them_and_keep_what_encodes_them(compiled):
    call = some_call(backend="hopper")
    maps = [name for name in names(call) if isinstance(call.arguments.get(name), TensorMap)]
    compiled.answer.asm = {"cubin": b"", "ptx": as_ptx(declared(call))}
    compiled.metadata.tensordesc_meta = [
        {"swizzle": 3, "elem_size": 2, "elem_type": kind, "block_size": (1, 1, 64, 64 + i)}
        for i, kind in enumerate((8, 9, 10, 7))
    ]
    made = compat.compile_artifact(call, "sm_90")
    assert list(made.tensor_maps) == maps and len(maps) == 4
    # Bytes of a device's number for bfloat16, float16 and float32 -> CUtensorMapDataType.
    for i, (name, kind) in enumerate(zip(maps, (10, 8, 9, 7), strict=True)):
        assert made.tensor_maps[name] == {
            "swizzle": 3,
            "elem_size": 2,
            "elem_type": kind,
            "block_size": [1, 1, 64, 64 + i],
        }
    for parameter in made.parameters:
        if parameter.type == "tensormap":
            assert (parameter.offset + 0x210) % 64 == 0
    compiled.metadata.tensordesc_meta.pop()
    with pytest.raises(ValueError):
        compat.compile_artifact(call, "sm_90")


def test_parameters_that_the_compiler_declares_otherwise_are_refused(compiled):
    call = some_call()
    for wrong in (declared(call)[:-1], [".u16 p", *declared(call)[1:]]):
        compiled.answer.asm = {"cubin": b"", "ptx": as_ptx(wrong)}
        with pytest.raises(compat.CompileError, match="PTX declares parameters"):
            compat.compile_artifact(call, "sm_90")


def test_sizes_of_declared_parameters_are_read(compiled):
    kinds = [".u8 p", ".s16 p", ".b32 p", ".f64 p", ".align 64 .b8 x[128]", ".pred p"]
    assert compat._ptx_parameters(as_ptx(kinds)) == [1, 2, 4, 8, 128, 0]


def test_what_the_compiler_cannot_do_is_said_in_its_words(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("out of registers")

    monkeypatch.setattr(triton, "compile", fail)
    with pytest.raises(compat.CompileError, match="for sm_90: out of registers"):
        compat.compile_artifact(some_call(), "sm_90")
