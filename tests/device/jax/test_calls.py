"""JAX's calls on a GPU: the very kernels of the PyTorch path, to the bit."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# Beside torch, which wants memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402

import heedful  # noqa: E402
import heedful.jax  # noqa: E402
import heedful.torch  # noqa: E402
from heedful.core.registry.by_hand import forced  # noqa: E402
from heedful.jax import Quads  # noqa: E402
from heedful.launch import record  # noqa: E402
from heedful.launch.prebuild import prebuild  # noqa: E402
from heedful.torch.base.device import device_spec, toolchain  # noqa: E402
from support.problems import far_scores  # noqa: E402
from support.problems.budget import check  # noqa: E402
from support.problems.cases import MIXED, Case, build, twins, variants  # noqa: E402
from support.runs import api, jax_api  # noqa: E402

pytestmark = pytest.mark.gpu

BASE = Case(dtype="bfloat16", head_dim=64, heads_q=4)
CALLS = [
    *variants(
        BASE,
        causal=[True],
        window=[(20, 5, 3)],
        bias=["bhqk", "hqk", "k"],
        sink=[True],
        softcap=[5.0],
        alibi=["h", "bh"],
        dropout_p=[0.3],
        dropout_origin=[(3, 2, 5, 8)],
        varlen=["qk"],
        num_splits=[3],
        seqlen_k=[0],
        seqlen_q=[300],
        batch=[0],
        head_dim=[32, 72, 96, 128, 192, 256],
        heads_k=[1, 4],
    ),
    Case(dtype="bfloat16", head_dim=64, dropout_p=0.3, return_probs=True),
    Case(dtype="bfloat16", head_dim=64, varlen="qk", causal=True, dropout_p=0.2, sink=True),
    Case(dtype="bfloat16", head_dim=128, varlen="qk", seqlen_q=200, seqlen_k=300, used="qk"),
    Case(dtype="bfloat16", head_dim=64, varlen="q", page_size=16, causal=True),
    Case(dtype="bfloat16", head_dim=128, causal=True, dropout_p=0.1, bias="hqk", sink=True),
    Case(dtype="float8_e4m3fn", head_dim=128, seqlen_q=256, seqlen_k=256, backward=False),
    Case(dtype="float8_e4m3fn", head_dim=128, causal=True, varlen="qk", backward=False),
]


def _supports_jax() -> bool:
    return any(d.platform == "gpu" for d in jax.devices())


@pytest.mark.skipif(not _supports_jax(), reason="JAX sees no GPU")
@pytest.mark.parametrize("case", twins(CALLS, "float16", "float32"), ids=str)
def test_a_call_gives_the_bits_of_the_pytorch_path(case):
    if case.dtype.startswith("float8") and (toolchain().triton or ()) < (3, 9):
        pytest.skip("fp8 needs Triton 3.9")
    built = build(case, "cuda")
    want, got = api.results(built), jax_api.results(built)
    check(built, got, "cuda")
    for name, array in want.present().items():
        np.testing.assert_array_equal(getattr(got, name), array, err_msg=name)


CACHES = [
    *variants(
        Case(dtype="bfloat16", head_dim=64, heads_q=4, used="k", backward=False, causal=True),
        seqlen_q=[1],
        page_size=[1, 16],
        kv_batch_idx=[True],
        leftpad_k=[True],
        num_splits=[4],
    ),
    Case(dtype="bfloat16", tree_mask=True, used="k", seqlen_q=6, lens_k=(50, 6), backward=False),
    Case(
        dtype="bfloat16",
        kv_dtype="int8",
        kv_group=16,
        kv_shift=True,
        backward=False,
        heads_q=4,
        head_dim=64,
        seqlen_q=1,
        used="k",
    ),
    Case(dtype="bfloat16", kv_dtype="float8_e4m3fn", backward=False, heads_q=4, used="k"),
    # On Hopper two kernels at a time.
    MIXED,
]


@pytest.mark.skipif(not _supports_jax(), reason="JAX sees no GPU")
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_a_call_over_a_cache_gives_the_bits_of_the_pytorch_path(case):
    built = build(case, "cuda")
    want, got = api.results(built), jax_api.results(built)
    check(built, got, "cuda")
    for name, array in want.present().items():
        np.testing.assert_array_equal(getattr(got, name), array, err_msg=name)


# By the decode of wide heads.
WIDE_CACHES = variants(
    Case(
        dtype="bfloat16",
        head_dim=512,
        heads_q=8,
        heads_k=2,
        used="k",
        seqlen_q=2,
        causal=True,
        backward=False,
    ),
    seqlen_q=[1],
    page_size=[16],
    leftpad_k=[True],
    num_splits=[4],
    dtype=["float16"],
)


@pytest.mark.skipif(not _supports_jax(), reason="JAX sees no GPU")
@pytest.mark.parametrize("case", WIDE_CACHES, ids=str)
def test_a_call_over_a_cache_of_wide_heads_gives_the_bits_of_the_pytorch_path(case):
    built, backend = build(case, "cuda"), forced("decode/wide")
    want, got = (side.results(built, backend=backend) for side in (api, jax_api))
    check(built, got, "cuda")
    for name, array in want.present().items():
        np.testing.assert_array_equal(getattr(got, name), array, err_msg=name)


needs_gpu = pytest.mark.skipif(not _supports_jax(), reason="JAX sees no GPU")


def drawn(*shape: int):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def bits(array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32))


@needs_gpu
@pytest.mark.parametrize("column", [0, 3, Quads(2)], ids=str)
@pytest.mark.parametrize("backend", ["portable", "hopper", None])
def test_a_traced_dropout_origin_draws_the_mask_of_a_known_one(backend, column):
    """As shards under shard_map have it: the origin comes from device memory."""
    if backend == "hopper" and column == 3:
        pytest.skip("that kernel takes multiples of 4")
    q, k, v = (jax_api.as_jax(t) for t in (drawn(2, 130, 4, 64), *(drawn(2, 200, 2, 64),) * 2))

    def run(q, k, v, head):
        # Four times a number that is known to be 2 when the program runs.
        last = Quads(head * 0 + 2) if isinstance(column, Quads) else column
        origin = (5, head, 2 * head, last)
        more = {"dropout_p": 0.4, "dropout_seed": 2**40 + 1, "dropout_origin": origin}
        return heedful.jax.flash_attn_func(q, k, v, causal=True, backend=backend, **more)

    traced = jax.jit(run)(q, k, v, jnp.int32(7))
    known = jax.jit(lambda q, k, v: run(q, k, v, 7))(q, k, v)
    np.testing.assert_array_equal(bits(traced), bits(known))
    half = jax.jit(run)(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], jnp.int32(9))
    if column != 3:
        assert half.shape == (2, 130, 2, 64)


@needs_gpu
def test_one_compiler_run_serves_both_frameworks():
    q = drawn(1, 300, 2, 96)
    heedful.torch.flash_attn_func(q, q, q, window_size=(77, 0))
    before = heedful.counters["compiles"] + heedful.counters["disk_hits"]
    x = jax_api.as_jax(q)
    jax.jit(lambda q: heedful.jax.flash_attn_func(q, q, q, window_size=(77, 0)))(x)
    assert heedful.counters["compiles"] + heedful.counters["disk_hits"] == before


@needs_gpu
def test_donated_caches_are_extended_in_place_and_others_stay_as_they_are():
    q, k, v = drawn(3, 2, 8, 64), drawn(3, 2, 2, 64), drawn(3, 2, 2, 64)
    caches = drawn(5, 64, 2, 64), drawn(5, 64, 2, 64)
    lengths = torch.tensor([3, -1, 20], dtype=torch.int32, device="cuda")
    more = {
        "k": k,
        "v": v,
        "cache_seqlens": lengths,
        "cache_batch_idx": torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda"),
        "rotary_cos": torch.randn(64, 8, device="cuda"),
        "rotary_sin": torch.randn(64, 8, device="cuda"),
    }
    given = {name: jax_api.as_jax(t) for name, t in more.items()}
    query, old_k, old_v = map(jax_api.as_jax, (q, *caches))

    def run(kc, vc, q, given):
        return heedful.jax.flash_attn_with_kvcache(q, kc, vc, causal=True, **given)

    copied = jax.jit(run)(old_k, old_v, query, given)
    np.testing.assert_array_equal(bits(old_k), caches[0].float().cpu().numpy())
    address = old_k.unsafe_buffer_pointer()
    donated = jax.jit(run, donate_argnums=(0, 1))(old_k, old_v, query, given)
    assert donated[1].unsafe_buffer_pointer() == address
    want = heedful.torch.flash_attn_with_kvcache(q, *caches, causal=True, **more)
    for results in (copied, donated):
        for got, tensor in zip(results, (want, *caches), strict=True):
            np.testing.assert_array_equal(bits(got), tensor.float().cpu().numpy())


@needs_gpu
def test_threads_of_different_shapes_get_their_own_results():
    def one(number: int) -> bool:
        x = drawn(1, 64 * (number + 1), 4, 64)
        fun = jax.jit(lambda x: heedful.jax.flash_attn_func(x, x, x, causal=True))
        found = [bits(fun(jax_api.as_jax(x))) for _ in range(10)]
        want = heedful.torch.flash_attn_func(x, x, x, causal=True).float().cpu().numpy()
        return all(np.array_equal(got, want) for got in found)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(16)))


@needs_gpu
def test_a_program_of_two_variants_of_one_kernel_runs_both():
    x = drawn(1, 300, 4, 64)

    def both(x):
        call = heedful.jax.flash_attn_func
        return call(x, x, x, causal=True), call(x, x, x, window_size=(20, 5), softcap=3.0)

    call = heedful.torch.flash_attn_func
    wanted = call(x, x, x, causal=True), call(x, x, x, window_size=(20, 5), softcap=3.0)
    for got, want in zip(jax.jit(both)(jax_api.as_jax(x)), wanted, strict=True):
        np.testing.assert_array_equal(bits(got), want.float().cpu().numpy())


@needs_gpu
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_a_program_that_alternates_two_devices_is_right():
    x = drawn(1, 300, 4, 64)
    want = heedful.torch.flash_attn_func(x, x, x, causal=True).float().cpu().numpy()
    fun = jax.jit(lambda x: heedful.jax.flash_attn_func(x, x, x, causal=True))
    found = [fun(jax.device_put(jax_api.as_jax(x), d)) for _ in range(10) for d in jax.devices()]
    for got in found:
        np.testing.assert_array_equal(bits(got), want)


def trained(folder, name: str, flags: str) -> tuple[dict[str, np.ndarray], str]:
    """Weights after some steps of twelve layers in a process of its own, and what it says."""
    result = folder / f"{name}.npz"
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_dump_to={folder / name} --xla_dump_hlo_module_re=.*step.*",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    script = [sys.executable, str(Path(__file__).with_name("jax_step.py")), str(result)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(np.load(result)), done.stdout


@needs_gpu
def test_a_captured_step_has_the_bits_of_one_that_is_not(tmp_path):
    plain, _ = trained(tmp_path, "plain", "--xla_gpu_enable_command_buffer=")
    captured, _ = trained(tmp_path, "captured", "--xla_gpu_graph_min_graph_size=1")
    # XLA writes how it runs a program once it has made command buffers of it.
    thunks = list((tmp_path / "captured").glob("*thunk_sequence_after_thunk_passes.txt"))
    assert any("kCommandBuffer" in path.read_text() for path in thunks)
    assert not list((tmp_path / "plain").glob("*thunk_sequence_after_thunk_passes.txt"))
    assert plain.keys() == captured.keys()
    for name, weights in plain.items():
        np.testing.assert_array_equal(captured[name], weights)


@needs_gpu
def test_a_second_process_compiles_nothing(tmp_path):
    _, first = trained(tmp_path, "first", "")
    _, second = trained(tmp_path, "second", "")
    assert "misses 0" not in first
    assert "misses 0" in second and "compiles 0" in second


@needs_gpu
@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_a_pack_serves_calls_and_gradients_where_no_triton_is(tmp_path, backend):
    """One made of what a PyTorch process recorded; the bits are those of a process with Triton."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels run on sm_90 alone")
    x, dout = drawn(2, 300, 4, 64), drawn(2, 300, 4, 64)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    call: Any = heedful.torch.flash_attn_func
    with heedful.record(tmp_path / "problems.json"):
        out = call(*leaves, causal=True, backend=backend)
        grads = torch.autograd.grad(out, leaves, dout)
    entries = record.load(tmp_path / "problems.json")
    assert [entry.direction for entry in entries] == ["forward", "backward"]
    made = prebuild(entries, [device_spec(x.device)], tmp_path / "pack", 2, backend)
    np.savez(tmp_path / "given.npz", x=x.float().cpu(), dout=dout.float().cpu())
    script = [sys.executable, str(Path(__file__).with_name("jax_pack.py"))]
    script += [str(tmp_path / f"{name}.npz") for name in ("given", "found")]
    environment = {"HEEDFUL_PACK": str(tmp_path / "pack"), "HEEDFUL_BACKEND": backend}
    environment |= {"HEEDFUL_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        script, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    assert counted["pack_hits"] == made and "compiles" not in counted
    found = np.load(tmp_path / "found.npz")
    wanted = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    for name, want in wanted.items():
        if name != "dq" or backend == "portable":
            np.testing.assert_array_equal(found[name], want.detach().float().cpu().numpy())
    # Sums of dq have no order: they may round otherwise.
    largest = grads[0].abs().max().item()
    apart = np.abs(found["dq"] - grads[0].float().cpu().numpy()).max()
    assert apart <= torch.finfo(torch.bfloat16).eps * largest


@needs_gpu
def test_out_of_memory_is_an_exception():
    x = jax.ShapeDtypeStruct((64, 2**18, 64, 128), jnp.bfloat16)
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        large = lambda s: jnp.full(x.shape, s, x.dtype)  # noqa: E731
        fun = jax.jit(lambda s: heedful.jax.flash_attn_func(large(s), large(s), large(s)))
        jax.block_until_ready(fun(1.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_far_rows_of_a_shared_prefix_are_merged_within_the_budget(dtype):
    for problem in far_scores.prefix_grid(dtype):
        far_scores.check(problem, jax_api.by_shared_prefix(problem.prefix))
