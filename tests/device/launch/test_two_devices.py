"""Two GPUs: calls whose inputs lie on both, calls that alternate, keys that a ring shares."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

# Beside torch, which wants memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import heedful.jax  # noqa: E402
import heedful.torch  # noqa: E402
from support.captures import graph_capture  # noqa: E402
from support.problems.budget import Results, check  # noqa: E402
from support.problems.cases import Case, build, variants  # noqa: E402
from support.runs import jax_api  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(
        sum(d.platform == "gpu" for d in jax.devices()) < 2, reason="JAX sees no two GPUs"
    ),
]

BASE = Case(dtype="bfloat16", batch=4, heads_q=8, heads_k=4, head_dim=64, num_splits=1)
CASES = [
    *variants(
        BASE,
        causal=[True],
        window=[(20, 5)],
        bias=["hqk", "bhqk"],
        sink=[True],
        softcap=[5.0],
        alibi=["h"],
        dropout_p=[0.3],
        head_dim=[96, 128, 256],
        seqlen_q=[1, 300],
        deterministic=[True],
        dtype=["float16", "float32"],
    ),
    Case(dtype="bfloat16", heads_q=4, head_dim=128, varlen="qk", causal=True, dropout_p=0.2),
]
# By operand and what is split: the dim that lies on both devices; what is not named is on each.
DIMS = {
    "heads": {"q": -2, "k": -2, "v": -2, "out": -2, "lse": -2, "bias": -3, "sink": -1}
    | {"alibi_slopes": -1},
    "batch": {name: 0 for name in ("q", "k", "v", "out", "lse", "bias", "alibi_slopes")},
}


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), ("x",))


def put(name: str, array, split: str):
    """An operand where it belongs; one that is the same along that dim is on both devices."""
    if array is None:
        return None
    dim, axes = DIMS[split].get(name), [None] * array.ndim
    if dim is not None and array.shape[dim] % 2 == 0:
        axes[dim] = "x"
    return jax.device_put(array, NamedSharding(mesh(), PartitionSpec(*axes)))


def spread(split: str):
    """As jit, of inputs that lie on two devices; AssertionError where they do not stay there."""

    def wrap(function):
        def run(leaves, rest, dout, dlse):
            given = [{n: put(n, x, split) for n, x in group.items()} for group in (leaves, rest)]
            given += [put("out", dout, split), put("lse", dlse, split)]
            compiled = jax.jit(function).lower(*given).compile()
            text = compiled.as_text()
            assert "all-gather" not in text and "all-to-all" not in text
            found = compiled(*given)
            assert len(found["out"].sharding.device_set) == 2
            assert not found["out"].sharding.is_fully_replicated
            return found

        return run

    return wrap


@pytest.mark.parametrize("split", ["heads", "batch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_on_two_devices_are_computed_where_they_are(case, split):
    """The mask of dropout is that of the whole, gradients of what both have are summed."""
    if case.varlen and split == "batch":
        pytest.skip("packed sequences have no batch dim")
    built = build(case, "cuda")
    check(built, jax_api.results(built, spread(split)), "cuda")


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_shards_draw_their_part_of_the_dropout_mask(backend):
    """Their place in the whole comes from device memory."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels run on sm_90 alone")
    q = jnp.zeros((2, 64, 4, 64), jnp.bfloat16)
    v = jnp.broadcast_to(jnp.eye(64, dtype=q.dtype)[None, :, None], q.shape)

    def run(q, v, origin=(0, 0, 0, 0)):
        more = {"dropout_p": 0.3, "dropout_seed": 2**40 + 11, "dropout_origin": origin}
        return heedful.jax.flash_attn_func(q, q, v, backend=backend, **more)

    spec = PartitionSpec(None, None, "x")

    def shard(q, v):
        return run(q, v, (0, 2 * jax.lax.axis_index("x"), 0, 0))

    spread = jax.shard_map(shard, mesh=mesh(), in_specs=(spec, spec), out_specs=spec)
    whole = np.asarray(jax.jit(run)(q, v)) > 0
    np.testing.assert_array_equal(np.asarray(jax.jit(spread)(q, v)) > 0, whole)
    assert 0 < whole.mean() < 1


def drawn(*shape: int):
    return jax_api.as_jax(torch.randn(shape).bfloat16())


def test_caches_on_two_devices_are_extended_where_they_are():
    q, k, v = drawn(4, 1, 8, 64), drawn(4, 1, 2, 64), drawn(4, 1, 2, 64)
    caches = drawn(4, 64, 2, 64), drawn(4, 64, 2, 64)
    lengths = jnp.array([3, -1, 63, 0], jnp.int32)

    def step(q, k, v, k_cache, v_cache, lengths):
        more = {"cache_seqlens": lengths, "num_splits": 1, "causal": True}
        return heedful.jax.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **more)

    rows = [put("k", x, "batch") for x in (q, k, v, *caches, lengths)]
    compiled = jax.jit(step).lower(*rows).compile()
    assert "all-gather" not in compiled.as_text()
    wanted = jax.jit(step)(q, k, v, *caches, lengths)
    for got, want in zip(compiled(*rows), wanted, strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


def test_keys_on_two_devices_give_the_attention_over_all():
    """As a ring does: each device attends over its own keys, the parts are merged."""
    case = Case(dtype="bfloat16", seqlen_k=512, heads_q=8, heads_k=4, head_dim=128, backward=False)
    built = build(case, "cuda")
    q, k, v = (jax_api.as_jax(x) for x in (built.x.q, built.x.k, built.x.v))
    keys, everywhere = PartitionSpec(None, "x"), PartitionSpec()

    def shard(q, k, v):
        part = heedful.jax.flash_attn_func(q, k, v, return_lse=True)
        return heedful.jax.merge_attn_states(*(jax.lax.all_gather(x, "x") for x in part))

    ring = jax.shard_map(
        shard,
        mesh=mesh(),
        in_specs=(everywhere, keys, keys),
        out_specs=everywhere,
        check_vma=False,
    )
    out, lse = jax.jit(ring)(q, k, v)
    check(built, Results(*(np.asarray(bits(x), np.float64) for x in (out, lse))), "cuda")


def bits(array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32))


def test_each_step_on_the_other_device_gives_the_same_bits():
    """Steps that wait for each other, many of them under way, from several threads."""
    devices, start = jax.devices()[:2], jnp.ones((1, 300, 4, 64), jnp.bfloat16)

    @jax.jit
    def step(x):
        return x + heedful.jax.flash_attn_func(x, x, x, causal=True) / 7

    def walk(number: int, alternate: bool):
        x = jax.device_put(start * (number + 1), devices[number % 2])
        for i in range(40):
            x = step(jax.device_put(x, devices[(number + i * alternate) % 2]))
        return bits(x)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(partial(walk, alternate=True), range(8)))
    for number, got in enumerate(found):
        np.testing.assert_array_equal(got, walk(number, alternate=False))


def test_pmap_runs_the_same_call_on_each_device():
    rows = drawn(2, 2, 130, 4, 64)
    call: Any = partial(heedful.jax.flash_attn_func, causal=True)
    got = jax.pmap(lambda x: call(x, x, x))(rows)
    for part, x in zip(got, rows, strict=True):
        np.testing.assert_array_equal(bits(part), bits(jax.jit(lambda x: call(x, x, x))(x)))


def trained(device: str, seed: int, barrier=None) -> list:
    """The output and the gradients of some calls on a device, whatever the current one is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, 300, 4, 64, generator=generator).bfloat16()
    found = []
    for window in ((-1, -1), (100 + seed, 0), (30, 30 + seed)):
        q, k, v = x.to(device).requires_grad_()
        if barrier is not None:
            barrier.wait()
        call: Any = heedful.torch.flash_attn_func
        out = call(q, k, v, window_size=window, deterministic=True, dropout_p=0.1, dropout_seed=7)
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        found += [t.cpu() for t in (out, *grads)]
    return found


def test_threads_on_two_devices_get_the_bits_of_one():
    """Kernels that nobody has compiled yet included."""
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(trained, f"cuda:{i % 2}", i // 2, barrier) for i in range(8)]
        found = [job.result() for job in jobs]
    for number, got in enumerate(found):
        wanted = trained("cuda:0", number // 2)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_graph_of_the_other_device_replays_there():
    device = torch.device("cuda:1")
    q = torch.randn(2, 700, 8, 64, device=device, dtype=torch.bfloat16)
    call: Any = partial(heedful.torch.flash_attn_func, causal=True)
    want, out = call(q, q, q), torch.empty_like(q)
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            out.copy_(call(q, q, q))
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(device)
        assert torch.equal(out, want)
