"""What assemblers write into machine code, which the driver is asked by."""

import math
import subprocess
from concurrent.futures import Future
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from heedful.core.base import installed
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.launch import prebuild
from heedful.launch.code import store
from heedful.launch.code.cache import DiskCache
from heedful.launch.code.manifest import WheelFacts, read_manifest
from heedful.launch.driver import cuda
from heedful.launch.record import Entry
from kernel_wheel import build
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
    """A real kernel: its instructions in PTX of an older version, its code for drivers of both."""
    compiler = installed.compiler()
    if compiler is None or "ptxas-blackwell" not in compiler.assemblers:
        pytest.skip("no Triton with two assemblers here")
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "cache"))
    entry = Entry(AttentionProblem.dense(1, 1, 4096, 32, 8, used_k=True, page_size=16), "forward")
    facts = WheelFacts("1.2.3", "sm_90", 12)
    for name, value in build.assembled_for(12).items():
        monkeypatch.setenv(name, value)
    count = prebuild.prebuild([entry], [by_name("H200")], tmp_path / "wheel", 1, wheel=facts)
    digests = read_manifest((tmp_path / "wheel" / "manifest.json").read_bytes()).digests
    made = [store.parse(key, (tmp_path / f"wheel/{key}.kernel").read_bytes()) for key in digests]
    assert count == len(made) > 0 and all(", ptxas 12." in each.toolchain for each in made)


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
