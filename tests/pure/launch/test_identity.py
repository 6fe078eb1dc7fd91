"""What a kernel is compiled from decides whether a compiled one is found: a change of anything that
changes the code is a miss, in this process, in the disk cache and in a pack; nothing else is."""

import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

import heedful
from heedful.core.base import installed
from heedful.launch import compiler
from heedful.launch.code import identity, packs
from heedful.launch.code.artifact import Artifact
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar, TensorMap
from support.packs import forget

CALL = KernelCall(
    KernelRef("heedful.kernels.portable.forward.combine", "combine"),
    (4, 2, 1),
    {
        "x_ptr": Pointer("x", "bfloat16"),
        "n": Scalar(100),
        "stride": Scalar(64, "i64", 8),
        "map": TensorMap("x", "bfloat16", (128, 64), (64, 1), (64, 64), "layout"),
        "BLOCK": 64,
        "IS_CAUSAL": False,
    },
    {"num_warps": 4, "num_stages": 2},
)
ARCH = "sm_90"


def compiled_by(monkeypatch, version: str | None) -> None:
    """As if that Triton compiled here, or none."""
    found = version and installed.Compiler(version, Path("/nowhere"))
    monkeypatch.setattr(installed, "compiler", lambda: found)


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """A process with a disk cache of its own and a compiler that only counts."""
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HEEDFUL_CACHE_READ_ONLY", raising=False)
    for name in [name for name in os.environ if name.startswith(identity._TOLD)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(compiler, "_artifacts", {})
    forget(monkeypatch)
    compiled_by(monkeypatch, "3.9.0")

    def compile_artifact(call, arch):
        return Artifact(os.urandom(8), "", "k", arch, 4, 32, 0, 1, (), 0)

    stub = types.ModuleType("triton_compat")
    stub.__dict__["compile_artifact"] = compile_artifact
    monkeypatch.setitem(sys.modules, "heedful.launch.code.triton_compat", stub)
    compiler.counters.clear()
    yield tmp_path
    compiler.counters.clear()


def got(call: KernelCall = CALL, arch: str = ARCH) -> tuple[str, Artifact]:
    """Where the kernel came from, and the kernel."""
    before = dict(compiler.counters)
    found = compiler.artifact(call, arch)
    (where,) = [name for name, n in compiler.counters.items() if n != before.get(name, 0)]
    return where, found


def restart() -> None:
    """As another process sees it: what is kept on disk stays."""
    compiler._artifacts.clear()


def changed(**facts) -> KernelCall:
    return replace(CALL, **facts)


def argument(name: str, given) -> KernelCall:
    return changed(parameters={**CALL.parameters, name: given})


DIFFERENT = {
    "architecture": (CALL, "sm_100"),
    "function": (changed(kernel=replace(CALL.kernel, function="other")), ARCH),
    "module": (
        changed(kernel=replace(CALL.kernel, module="heedful.kernels.portable.forward.kernel")),
        ARCH,
    ),
    "dialect": (changed(kernel=replace(CALL.kernel, dialect="gluon")), ARCH),
    "warps": (changed(options={**CALL.options, "num_warps": 8}), ARCH),
    "stages": (changed(options={**CALL.options, "num_stages": 3}), ARCH),
    "new option": (changed(options={**CALL.options, "maxnreg": 128}), ARCH),
    "lost option": (changed(options={"num_warps": 4}), ARCH),
    "constant": (argument("BLOCK", 128), ARCH),
    "flag": (argument("IS_CAUSAL", True), ARCH),
    "absent operand": (argument("y_ptr", None), ARCH),
    "cluster": (changed(cluster=2), ARCH),
    "dtype": (argument("x_ptr", Pointer("x", "float16")), ARCH),
    "alignment": (argument("x_ptr", Pointer("x", "bfloat16", aligned=False)), ARCH),
    "scalar type": (argument("n", Scalar(100, "i64")), ARCH),
    "divisor": (argument("stride", Scalar(64, "i64", 16)), ARCH),
    "box": (argument("map", replace(CALL.arguments["map"], block=(128, 64))), ARCH),
    "layout": (argument("map", replace(CALL.arguments["map"], layout="other")), ARCH),
}
SAME = {
    "grid": changed(grid=(1, 1, 1)),
    "programmatic launch": changed(programmatic=True),
    "cooperative launch": changed(cooperative=True),
    "value of a scalar": argument("n", Scalar(7)),
    "name of a buffer": argument("x_ptr", Pointer("y", "bfloat16")),
    "shape of a map": argument("map", replace(CALL.arguments["map"], shape=(999, 64))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_kernel_that_differs_in_what_makes_its_code_is_compiled_for_itself(compiles, what):
    call, arch = DIFFERENT[what]
    where, first = got()
    assert where == "compiles"
    where, other = got(call, arch)
    assert where == "compiles" and other.code != first.code
    restart()
    assert got() == ("disk_hits", first)
    assert got(call, arch) == ("disk_hits", other)


@pytest.mark.parametrize("what", SAME)
def test_run_time_values_compile_nothing_new(compiles, what):
    _, first = got()
    assert got(SAME[what]) == ("memory_hits", first)
    restart()
    assert got(SAME[what]) == ("disk_hits", first)


@pytest.mark.parametrize("version", ["3.9.1", "3.6.0", "3.9.0+git0123"])
def test_what_another_compiler_made_is_not_taken(compiles, version, monkeypatch):
    got()
    restart()
    compiled_by(monkeypatch, version)
    assert got()[0] == "compiles"


def test_what_other_assemblers_would_make_is_not_taken(compiles, monkeypatch):
    """Wheels of one version differ in them."""
    folder = compiles / "triton" / "backends" / "nvidia" / "bin"
    folder.mkdir(parents=True)
    found = installed.Compiler("3.9.0", compiles)
    monkeypatch.setattr(installed, "compiler", lambda: found)
    seen = []
    for size in (1, 2):
        (folder / "ptxas").write_bytes(b"x" * size)
        identity._assemblers.cache_clear()
        restart()
        seen.append(got()[0])
    identity._assemblers.cache_clear()
    assert seen == ["compiles", "compiles"]


TELLING = [
    "TRITON_PTXAS_PATH",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_F32_DEFAULT",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_HIP_USE_BLOCK_PINGPONG",
    "TRITON_A_VARIABLE_OF_TOMORROW",
    "AMDGCN_USE_BUFFER_OPS",
    "DISABLE_LLVM_OPT",
    "DISABLE_PTXAS_OPT",
    "DISABLE_MMA_V3",
    "PTXAS_OPTIONS",
    "NVPTX_ENABLE_DUMP",
    "LLVM_IR_ENABLE_DUMP",
    "MLIR_ENABLE_REMARK",
    "USE_IR_LOC",
    "DISABLE_FAST_REDUCTION",
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
]


@pytest.mark.parametrize("name", TELLING)
def test_what_was_compiled_under_other_orders_of_the_environment_is_not_taken(
    compiles, name, monkeypatch
):
    codes = [got()[1].code]
    for value in ("1", "0"):
        restart()
        monkeypatch.setenv(name, value)
        where, found = got()
        assert where == "compiles"
        codes.append(found.code)
    restart()
    monkeypatch.delenv(name)
    where, found = got()
    assert where == "disk_hits" and found.code == codes[0] and len(set(codes)) == 3


def test_an_assembler_that_was_replaced_under_its_name_is_another(compiles, monkeypatch):
    ptxas = compiles / "ptxas"
    ptxas.write_text("12.9")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    got()
    restart()
    assert got()[0] == "disk_hits"
    restart()
    ptxas.write_text("13.41")
    assert got()[0] == "compiles"


PLACES = [
    "HOME",
    "TRITON_HOME",
    "TRITON_CACHE_DIR",
    "TRITON_CACHE_MANAGER",
    "TRITON_REDIS_HOST",
    "TRITON_REMOTE_CACHE_BACKEND",
    "TRITON_PRINT_AUTOTUNING",
    "TRITON_DUMP_DIR",
    "TRITON_LIBCUDA_PATH",
    "TRITON_LIBHIP_PATH",
    "TRITON_INTERPRET",
    "TRITON_DEFAULT_BACKEND",
    "TRITON_CUDACRT_PATH",
    "TRITON_CUDART_PATH",
    "TRITON_PROTON_DISABLE",
]


@pytest.mark.parametrize("name", PLACES)
def test_where_the_compiler_keeps_its_things_does_not_matter(compiles, name, monkeypatch):
    got()
    restart()
    monkeypatch.setenv(name, str(compiles))
    assert got()[0] == "disk_hits"


def test_every_setting_of_the_installed_triton_that_shapes_code_is_seen(compiles, monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    groups = (knobs.compilation, knobs.language, knobs.nvidia, knobs.amd, knobs.runtime)
    names = {knob.key for group in groups for knob in group.knob_descriptors.values()}
    names -= {"TRITON_INTERPRET", "TRITON_LIBCUDA_PATH", "TRITON_LIBHIP_PATH"}
    assert len(names) > 20
    before = identity.toolchain()
    for name in names:
        monkeypatch.setenv(name, "1")
        assert identity.toolchain() != before, name
        monkeypatch.delenv(name)


def test_a_pack_serves_any_compiler_and_no_other_kernel(compiles, monkeypatch):
    made = Artifact(b"packed", "", "k", ARCH, 4, 32, 0, 1, (), 0)
    packs.write_pack(
        compiles / "pack", {identity.kernel_key(CALL, ARCH): made}, {"portable": "3.9.0"}
    )
    packs.load_pack(compiles / "pack")
    for version in ("3.6.0", None):
        compiled_by(monkeypatch, version)
        restart()
        assert got() == ("pack_hits", made)
        for call, arch in DIFFERENT.values():
            restart()
            if version is None:
                with pytest.raises(RuntimeError, match="in no loaded pack"):
                    got(call, arch)
            else:
                assert got(call, arch)[0] in ("compiles", "disk_hits")


_KEYS = """
import sys
from heedful.launch.code import identity
from heedful.launch.spec import KernelCall, KernelRef
call = KernelCall(KernelRef(sys.argv[1], "f"), (1, 1, 1), {})
print(identity.kernel_key(call, "sm_90"), identity.cache_key(call, "sm_90"))
"""


def keys(root: Path, module: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", _KEYS, module]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return done.stdout.split()


def test_a_change_of_any_source_that_shapes_code_is_another_kernel(tmp_path):
    package = Path(heedful.__file__).parent
    copy = tmp_path / "heedful"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    module = "heedful.kernels.hopper.forward.kernel"
    before = keys(tmp_path, module)
    assert keys(tmp_path, module) == before
    for source in (
        "kernels/hopper/forward/kernel.py",
        "kernels/hopper/sm90/softmax.py",
        "kernels/common/philox.py",
        "launch/code/triton_compat.py",
        "launch/code/artifact.py",
    ):
        file = copy / source
        text = file.read_text()
        file.write_text(text + "# other\n")
        after = keys(tmp_path, module)
        assert all(a != b for a, b in zip(after, before, strict=True)), source
        file.write_text(text)
    assert keys(tmp_path, module) == before
    # What is left out of the key does not shape code.
    for source in ("core/planning/log.py", "kernels/cdna/tile.py"):
        file = copy / source
        file.write_text(file.read_text() + "# other\n")
    assert keys(tmp_path, module) == before


def test_a_kernel_from_elsewhere_is_known_by_its_own_source(tmp_path):
    package = Path(heedful.__file__).parents[1]
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / "heedful").symlink_to(package / "heedful")
    before = keys(tmp_path, "mine")
    (tmp_path / "mine.py").write_text("x = 2\n")
    after = keys(tmp_path, "mine")
    assert all(a != b for a, b in zip(after, before, strict=True))


def test_a_kernel_of_another_package_has_the_digest_of_its_file_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_kernel_of_mine.py").write_text("x = 1")
    wanted = identity.files_digest([tmp_path / "a_kernel_of_mine.py"])
    assert identity.source_digest("a_kernel_of_mine") == wanted


def test_a_kernel_without_a_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_file_of_its_own").mkdir()
    for module in ("there_is_no_such_module", "no_file_of_its_own"):
        with pytest.raises(ImportError, match=f"no module {module}"):
            identity.source_digest(module)


def test_files_that_change_places_are_other_sources(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a")
    two.write_text("b")
    before = identity.files_digest([one, two])
    one.write_text("b")
    two.write_text("a")
    assert identity.files_digest([one, two]) != before


def test_kernels_are_counted_by_where_they_came_from_and_none_is_looked_for_twice(compiles):
    others = [argument("BLOCK", size) for size in (16, 32)]
    for call in others:
        compiler.artifact(call, ARCH)
    restart()
    for call in [*others, *others, *others]:
        compiler.artifact(call, ARCH)
    assert compiler.counters == {"compiles": 2, "disk_hits": 2, "memory_hits": 4}
    packs.write_pack(
        compiles / "pack",
        {identity.kernel_key(c, ARCH): compiler.artifact(c, ARCH) for c in others},
        {"portable": "3.9.0"},
    )
    packs.load_pack(compiles / "pack")
    restart()
    compiler.counters.clear()
    for call in [*others, *others]:
        compiler.artifact(call, ARCH)
    assert compiler.counters == {"pack_hits": 2, "memory_hits": 2}


def test_without_a_triton_a_kernel_that_lies_nowhere_is_named_with_what_helps(
    compiles, monkeypatch
):
    first = got()[1]
    compiled_by(monkeypatch, None)
    # What this process has it keeps.
    assert got() == ("memory_hits", first)
    restart()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            compiler.artifact(CALL, ARCH)
        words = str(caught.value)
        assert words.startswith("combine for sm_90 is in no loaded pack and no installed wheel")
        assert "pip install triton" in words and words.endswith("(heedful prebuild)")
    # Nothing was counted, and with a compiler it is found again.
    compiled_by(monkeypatch, "3.9.0")
    assert got() == ("disk_hits", first)


@pytest.mark.parametrize("apart", [False, True])
def test_a_compiler_that_is_apart_compiles_in_its_workers(apart, compiles, monkeypatch):
    stub = types.ModuleType("pool")
    stub.__dict__["compile_artifact"] = lambda call, arch: ("apart", call, arch)
    monkeypatch.setitem(sys.modules, "heedful.launch.worker.pool", stub)
    here = types.ModuleType("triton_compat")
    here.__dict__["compile_artifact"] = lambda call, arch: ("here", call, arch)
    monkeypatch.setitem(sys.modules, "heedful.launch.code.triton_compat", here)
    found = installed.Compiler("3.9.0", Path("/nowhere"), apart=apart)
    monkeypatch.setattr(installed, "compiler", lambda: found)
    where = "apart" if apart else "here"
    assert compiler.compile_now(CALL, ARCH) == (where, CALL, ARCH)
    # Where none is known, this process tries, and says what is missing.
    monkeypatch.setattr(installed, "compiler", lambda: None)
    assert compiler.compile_now(CALL, ARCH) == ("here", CALL, ARCH)
