"""Launching on the GPU: packs without a compiler, cold processes that share a cache, streams."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import heedful
from heedful.torch.eager import backends, calls
from support.captures import graph_capture

pytestmark = pytest.mark.gpu
ROOT = Path(heedful.__file__).parents[1]

_CALL = """
import json, sys, time
if "--no-triton" in sys.argv:
    from support import absent
    absent.hide("triton")
import torch
torch.manual_seed(0)
# Ahead of the clock: PyTorch loads its own kernels when it first launches them.
q, k, v = (torch.randn(1, 128, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
import heedful
heedful.flash_attn_func
imports = time.perf_counter() - start
out = heedful.flash_attn_func(q, k, v, backend="portable")
torch.cuda.synchronize()
seconds = time.perf_counter() - start
want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
difference = (out - want.transpose(1, 2)).abs().max().item()
counters = dict(heedful.counters)
times = {"seconds": seconds, "imports": imports}
print(json.dumps({**times, "difference": difference, **counters}))
"""


def start(cache: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    """A fresh process that makes one call and prints what it cost. It keeps the bytecode of what it
    imports, as an installation does: Python takes 110 ms to make heedful's."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    env |= {"HEEDFUL_CACHE_DIR": str(cache), **environment}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", _CALL, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> dict:
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(printed.splitlines()[-1])


def one_rounding() -> float:
    """What two bfloat16 results of outputs below 4 may differ by: a rounding each."""
    return 2 * 4 * torch.finfo(torch.bfloat16).eps / 2


def test_of_32_cold_processes_one_compiles_each_kernel(tmp_path):
    told = [finish(p) for p in [start(tmp_path) for _ in range(32)]]
    assert sum(t.get("compiles", 0) for t in told) == 1
    assert sum(t.get("disk_hits", 0) for t in told) == 31
    assert max(t["difference"] for t in told) <= one_rounding()


def test_a_first_call_takes_under_3_s_cold_and_under_150_ms_warm(tmp_path):
    finish(start(tmp_path / "another"))  # whose imports leave bytecode
    cache = tmp_path / "cold"
    cold = finish(start(cache))
    warm = min((finish(start(cache)) for _ in range(3)), key=lambda told: told["seconds"])
    assert cold["compiles"] == 1 and warm["disk_hits"] == 1
    assert cold["seconds"] < 3.0, cold
    assert warm["seconds"] < 0.15, warm


@pytest.mark.parametrize("arguments", [(), ("--no-triton",)], ids=["beside-triton", "no-triton"])
def test_a_pack_from_another_machine_serves_with_no_compilation(tmp_path, arguments):
    pack = os.environ.get("HEEDFUL_TEST_PACK")
    if not pack:
        pytest.skip(
            "HEEDFUL_TEST_PACK names no pack: heedful prebuild tests/device/jax/pack.json"
            " --device H200 --backend portable --out PACK, on any machine"
        )
    told = finish(start(tmp_path, *arguments, HEEDFUL_PACK=pack))
    assert told["pack_hits"] == told["launches"] == 1
    assert "compiles" not in told and "disk_hits" not in told
    assert told["difference"] <= one_rounding()


def tensors(seed: int, device="cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shape, dtype = (2, 200, 4, 64), torch.bfloat16
    q, k, v = torch.randn(3, *shape, device=device, dtype=dtype, generator=generator)
    return q, k, v


def test_threads_on_streams_of_their_own_get_their_own_results():
    wanted = [heedful.flash_attn_func(*tensors(seed)) for seed in range(8)]
    results: dict[int, list] = {}

    def work(seed: int):
        q, k, v = tensors(seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            results[seed] = [heedful.flash_attn_func(q, k, v) for _ in range(50)]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, want in enumerate(wanted):
        assert all(torch.equal(got, want) for got in results[seed])


def test_a_call_runs_on_the_device_of_its_tensors_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    want = heedful.flash_attn_func(*tensors(0))
    q, k, v = (t.to("cuda:1") for t in tensors(0))
    with torch.cuda.device(0):
        got = heedful.flash_attn_func(q, k, v)
    assert got.device == torch.device("cuda:1")
    assert torch.equal(got.cpu(), want.cpu())


def test_kernels_that_count_start_from_zero_in_every_call_and_replay():
    """Hopper forwards of tiles of unlike length count the tiles drawn."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels run on sm_90 alone")
    q = torch.randn(4, 2500, 8, 64, device="cuda", dtype=torch.bfloat16)
    run = partial(heedful.flash_attn_func, q, q, q, causal=True, backend="hopper")
    want = run()
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with graph_capture(graph):
        run(out=out)
    # More than a region of zeros has room for.
    for call in range(1100):
        if call % 100 == 0:
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, want)
        assert torch.equal(run(), want)


def test_a_known_call_plans_nothing_and_replays_from_a_graph(monkeypatch):
    q, k, v = tensors(0)
    want = heedful.flash_attn_func(q, k, v)
    out = torch.empty_like(want)
    # The first is made, the second is found by its key: it is the latest from then on.
    for _ in range(2):
        heedful.flash_attn_func(q, k, v, out=out)
    torch.cuda.synchronize()

    def refuse(*_, **__):
        raise AssertionError("looked up or planned again")

    for step in ("call_key", "make"):
        monkeypatch.setattr(calls, step, refuse)
    monkeypatch.setattr(backends, "prepare", refuse)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        heedful.flash_attn_func(q, k, v, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)
