"""What assemblers write into machine code, which the driver is asked by."""

import math
import subprocess
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from heedful.core.base import installed
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.launch import prebuild
from heedful.launch.code import store
from heedful.launch.code.cache import DiskCache
from heedful.launch.code.identity import cache_key
from heedful.launch.code.manifest import WheelFacts, read_manifest
from heedful.launch.compiler import compile_now
from heedful.launch.driver import cuda
from heedful.launch.record import Entry
from kernel_wheel import build, older
from support.artifacts import artifact


@pytest.mark.parametrize("name", ["ptxas", "ptxas-blackwell"])
def test_machine_code_says_which_cuda_its_assembler_is_of(name, tmp_path):
    compiler = installed.compiler()
    ptxas = compiler and compiler.assemblers.get(name)
    if ptxas is None:
        pytest.skip(f"no Triton with {name} here")
    told = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    source, made = tmp_path / "k.ptx", tmp_path / "k.cubin"
    source.write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() { ret; }"
    )
    subprocess.run([ptxas, "-arch=sm_90a", source, "-o", made], check=True)
    assert f"release {cuda.cuda_of(made.read_bytes())}." in told


def test_a_wheel_for_older_drivers_is_assembled_by_the_older_assembler(tmp_path, monkeypatch):
    """Real kernels: the compiler that is told of that assembler gives code for drivers of both, and
    the same code is assembled of what was compiled for newer drivers."""
    compiler = installed.compiler()
    if compiler is None or "ptxas-blackwell" not in compiler.assemblers:
        pytest.skip("no Triton with two assemblers here")
    entry = Entry(AttentionProblem.dense(1, 1, 4096, 32, 8, used_k=True, page_size=16), "forward")
    wanted, _ = prebuild.kernels([entry], [by_name("H200")])
    compiled = {key: cache_key(*one) for key, one in wanted.items()}
    cache = DiskCache(tmp_path / "assembled", 10**6, read_only=False)
    for key, (call, arch) in wanted.items():
        made = compile_now(call, arch)
        cache.get_or_make(compiled[key], lambda made=made: made)
    for name, value in build.assembled_for(12).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "assembled"))
    tool = compiler.assemblers["ptxas"]
    counts = [older.assemble_all(wanted, compiled, tool, 1) for _ in range(2)]
    assert counts == [len(wanted), 0]

    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "compiled"))
    facts = WheelFacts("1.2.3", "sm_90", 12)
    count = prebuild.prebuild([entry], [by_name("H200")], tmp_path / "wheel", 1, wheel=facts)
    digests = read_manifest((tmp_path / "wheel" / "manifest.json").read_bytes()).digests
    made = {
        key: store.parse(key, (tmp_path / f"wheel/{key}.kernel").read_bytes()) for key in digests
    }
    assert count == len(made) > 0 and all(", ptxas 12." in each.toolchain for each in made.values())
    for key, one in wanted.items():
        kept = cache.get(cache_key(*one))
        assert kept is not None and replace(kept, text="") == made[key]


def test_products_are_fused_with_sums_where_the_compiler_was_told_so():
    compiler = installed.compiler()
    tool = compiler and compiler.assemblers.get("ptxas")
    if tool is None:
        pytest.skip("no Triton with an assembler here")
    text = """.version 9.4
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
.reg .f32 %f<4>; .reg .u64 %r;
ld.param.u64 %r, [p]; ld.global.f32 %f0, [%r]; ld.global.f32 %f1, [%r+4];
mul.f32 %f2, %f0, %f1; add.f32 %f3, %f2, %f0; st.global.f32 [%r], %f3; ret; }"""
    newest = replace(artifact(), text=text, toolchain="triton 3.9.0, ptxas-blackwell 13.4.59")
    fused, apart = (older.assembled(newest, fuses, tool) for fuses in (True, False))
    assert fused.code != apart.code and fused.text == text.replace("9.4", "8.8")
    assert fused.toolchain == "triton 3.9.0, ptxas 12.9.86"


def test_what_has_no_assembly_is_left_to_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(older, "cache_key", lambda call, arch: f"{call} {arch}")
    DiskCache(tmp_path, 10**6, read_only=False).get_or_make(
        "newer", lambda: replace(artifact(), text="")
    )
    assert older.assemble_all({"k": ("call", "sm_90")}, {"k": "newer"}, Path("/no"), 1) == 0  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("version", ["13.0.1", "12.5.8", "11.8.9"])
def test_an_assembler_that_is_not_of_cuda_12_is_named(version, monkeypatch):
    monkeypatch.setattr(installed, "assembler_version", lambda path: version)
    with pytest.raises(ValueError, match="/its/ptxas is of CUDA"):
        older.ptx_version(Path("/its/ptxas"))


def test_a_build_in_shares_goes_on_where_it_ended(monkeypatch):
    """Each kernel belongs to one share, and what no time is left for is not begun."""
    calls = {f"{n:02}": (n, "sm_90") for n in range(11)}
    made: list[int] = []

    class InTurn:
        """A pool that works when its results are waited for."""

        def __init__(self, *count, **how): ...

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def submit(self, function, call, arch):
            future = Future()
            future.add_done_callback(lambda f: f.cancelled() or made.append(call))
            return future

    def as_completed(futures):
        for future in futures:
            future.set_result(None)
            yield future

    monkeypatch.setattr(build, "kernels", lambda *_: (calls, set()))
    for name, fake in {"ThreadPoolExecutor": InTurn, "ProcessPoolExecutor": InTurn}.items():
        monkeypatch.setattr(prebuild, name, fake)
    monkeypatch.setattr(prebuild, "as_completed", as_completed)
    shares = [build.share_of(f"{n}/3") for n in (1, 2, 3)]
    told = [build.compile_share([], share, math.inf, 2) for share in shares]
    assert told == [(4, 4), (4, 4), (3, 3)] and sorted(made) == [*range(11)]
    made.clear()
    assert build.compile_share([], shares[0], 0.0, 2) == (1, 4) and len(made) == 1


def test_a_shares_machine_code_is_kept_as_in_a_cache(monkeypatch, tmp_path):
    made = replace(artifact(), text="// its PTX")
    calls = {key: (key, "sm_90") for key in ("a", "b")}
    monkeypatch.setattr(build, "kernels", lambda *_: (calls, set()))
    monkeypatch.setattr(build, "cache_key", lambda call, arch: f"{call} {arch}")
    monkeypatch.setattr(prebuild, "_compiled", lambda calls, jobs: ((n, made) for n in calls))
    assert build.compile_share([], (0, 2), math.inf, 2, tmp_path) == (1, 1)
    cache = DiskCache(tmp_path, 10**6, read_only=True)
    assert cache.get("a sm_90") == replace(made, text="") and cache.get("b sm_90") is None


def test_a_triton_without_an_older_assembler_is_told_to_name_one(monkeypatch):
    monkeypatch.delenv(build.NAMED, raising=False)
    monkeypatch.setattr(installed, "assembler_version", lambda path: "13.4.59")
    with pytest.raises(ValueError, match=f"no assembler of CUDA 12: name one by {build.NAMED}"):
        build.assembled_for(12)
    monkeypatch.setenv(build.NAMED, "/its/ptxas")
    assert build.assembled_for(12) == {build.NAMED: "/its/ptxas"}
