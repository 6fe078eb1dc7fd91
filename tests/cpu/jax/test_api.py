"""The public JAX functions: transforms, messages, and what they leave alone."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful  # noqa: E402
import heedful.jax as hj  # noqa: E402
import heedful.torch as ht  # noqa: E402
from heedful.core.call.quant import QUANT_MAX  # noqa: E402
from support.problems.budget import check  # noqa: E402
from support.problems.cases import Case, build  # noqa: E402
from support.problems.grids import in_turns  # noqa: E402
from support.runs import jax_api  # noqa: E402

CASES = [
    Case(heads_q=4, causal=True, bias="hqk", sink=True),
    Case(heads_q=4, causal=True, varlen="qk", dropout_p=0.2, alibi="h", lse_grad=False),
    Case(heads_q=4, causal=True, bias="bqk", bias_dtype="bool", sink=True),
    Case(varlen="qk", bias="qk", bias_dtype="bool", used="qk"),
    Case(used="qk", leftpad_k=True, causal=True, heads_q=4, bias="k"),
    Case(dtype="bfloat16", heads_q=4, causal=True, sink=True, sink_dtype="bfloat16"),
    Case(varlen="q", page_size=8, window=(9, 3), softcap=2.0),
    Case(used="k", page_size=4, backward=False, causal=True, seqlen_q=2),
    Case(kv_dtype="int8", kv_group=8, kv_shift=True, backward=False, used="k", leftpad_k=True),
]


@pytest.mark.parametrize("case", in_turns(CASES, each=2), ids=str)
def test_public_calls_agree_with_the_oracle(case):
    built = build(case)
    check(built, jax_api.results(built))


def inputs(batch: int = 2, seqlen: int = 21, heads: int = 4, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    shapes = [(batch, seqlen, heads, 8), (batch, seqlen, 2, 8), (batch, seqlen, 2, 8)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def as_torch(array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array).copy())


def equal(one, other) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), one, other)


def close(one, other) -> None:
    """Within what another order of float32 sums, of up to 64 terms, may change."""

    def check(a, b):
        most = 64 * np.finfo(np.float32).eps * np.abs(b).max(initial=1)
        assert np.abs(a - b).max(initial=0) <= most

    jax.tree.map(check, one, other)


def weighted(q, k, v, sink, bias):
    out, lse = hj.flash_attn_func(
        q, k, v, causal=True, sink=sink, bias=bias, return_lse=True, dropout_p=0.3, dropout_seed=7
    )
    return (out**2).sum() + lse.sum()


def test_gradients_are_the_same_under_checkpoint_and_its_policies():
    given = (*inputs(), jnp.zeros(4), jnp.ones((21, 21)))
    want = jax.grad(weighted, range(5))(*given)
    names = jax.checkpoint_policies.save_only_these_names("heedful_out", "heedful_lse")
    for policy in (None, names):
        equal(jax.grad(jax.checkpoint(weighted, policy=policy), range(5))(*given), want)


def test_named_residuals_save_the_forward():
    """With out and lse kept, the backward computes no attention again."""

    def count(policy) -> int:
        fun = jax.checkpoint(lambda *a: weighted(*a) ** 2, policy=policy)
        given = (*inputs(), jnp.zeros(4), jnp.ones((21, 21)))
        return str(jax.make_jaxpr(jax.grad(fun))(*given)).count("heedful_attention[")

    names = jax.checkpoint_policies.save_only_these_names("heedful_out", "heedful_lse")
    assert (count(None), count(names)) == (2, 1)


def test_vmap_of_the_gradient_is_a_loop_of_it():
    q, k, v = (jnp.stack([t, t + 0.5, 2 * t]) for t in inputs())
    sink, bias = jnp.arange(4.0), jnp.ones((21, 21))
    grad = jax.grad(weighted, range(5))
    got = jax.vmap(grad, (0, 0, 0, None, None))(q, k, v, sink, bias)
    want = [grad(q[i], k[i], v[i], sink, bias) for i in range(3)]
    close(got, jax.tree.map(lambda *a: jnp.stack(a), *want))


def test_vmap_joins_the_batch_where_nothing_tells_batches_apart():
    q, k, v = (jnp.stack([t, t + 0.5]) for t in inputs())
    fun = partial(hj.flash_attn_func, causal=True, return_lse=True)
    text = str(jax.make_jaxpr(jax.vmap(fun, (0, 0, None)))(q, k, v[0]))
    assert "scan" not in text and "while" not in text
    got = jax.vmap(fun, (0, 0, None))(q, k, v[0])
    want = [fun(q[i], k[i], v[0]) for i in range(2)]
    equal(got, jax.tree.map(lambda *a: jnp.stack(a), *want))


def test_vmap_over_heads_is_attention_with_these_heads():
    q, _, _ = inputs()
    fun = lambda x: hj.flash_attn_func(x, x, x, causal=True)  # noqa: E731
    split = q[..., None, :]
    got = jax.vmap(fun, in_axes=2, out_axes=2)(split)[..., 0, :]
    equal(got, fun(q))


def test_unused_and_integer_inputs_have_zero_or_no_gradients():
    q, k, v = inputs(1, 12)
    packed = [t[0] for t in (q, k, v)]
    bounds = jnp.array([0, 5, 12], jnp.int32)

    def run(q, k, v, bounds):
        out = hj.flash_attn_varlen_func(q, k, v, bounds, bounds, 12, 12, return_lse=True)
        return out[0].sum()

    grads = jax.grad(run, (0, 3), allow_int=True)(*packed, bounds)
    assert grads[0].shape == packed[0].shape and grads[1].dtype == jax.dtypes.float0
    only_lse = jax.grad(lambda v: hj.flash_attn_func(q, k, v, return_lse=True)[1].sum())(v)
    equal(only_lse, jnp.zeros_like(v))


def test_gradients_in_bfloat16_have_their_inputs_dtype():
    given = [t.astype(jnp.bfloat16) for t in inputs()]
    grads = jax.grad(lambda *a: hj.flash_attn_func(*a).astype(jnp.float32).sum(), (0, 1, 2))(*given)
    assert all(g.dtype == jnp.bfloat16 for g in grads)


def test_second_derivatives_and_forward_mode_raise():
    q, k, v = inputs()
    fun = lambda q: (hj.flash_attn_func(q, k, v) ** 2).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="no second derivative"):
        jax.grad(lambda q: (jax.grad(fun)(q) ** 2).sum())(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(fun, (q,), (q,))


def mesh_of_four():
    """Batch and heads over two devices each."""
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("b", "h"))


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_shards_draw_their_part_of_the_dropout_mask(check_vma):
    """Batch and heads over four devices: output and gradients to the bit, gradients of what is on
    all devices summed."""
    mesh = mesh_of_four()
    given = (*inputs(4, 19, 8), jnp.arange(8.0))
    spec = jax.sharding.PartitionSpec
    specs = (*[spec("b", None, "h")] * 3, spec("h"))

    def run(q, k, v, sink, origin=(0, 0, 0, 0)):
        return hj.flash_attn_func(
            q, k, v, causal=True, dropout_p=0.4, dropout_seed=3, sink=sink, dropout_origin=origin
        )

    def shard(q, k, v, sink):
        batch, head = (jax.lax.axis_index(a) * n for a, n in (("b", 2), ("h", 4)))
        return run(q, k, v, sink, (batch, head, 0, 0))

    spread = jax.shard_map(
        shard, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma
    )
    equal(jax.jit(spread)(*given), jax.jit(run)(*given))
    grads = [
        jax.jit(jax.grad(lambda *a, f=f: (f(*a) ** 2).sum(), range(4)))(*given)
        for f in (spread, run)
    ]
    close(*grads)


def put(mesh, array, *axes):
    return jax.device_put(
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    )


@pytest.mark.parametrize(
    "heads", [pytest.param(2, marks=pytest.mark.slow, id="mha"), pytest.param(8, id="gqa")]
)
def test_sharded_inputs_of_jit_are_computed_where_they_are(heads):
    """By a partitioning rule: nothing is gathered, the dropout mask is that of the whole, and
    gradients of shared operands are summed."""
    mesh = mesh_of_four()
    q, k, v = inputs(4, 19, heads)
    sink, bias = jnp.arange(float(heads)), jnp.ones((1, heads, 19, 19))
    run = jax.jit(jax.value_and_grad(weighted, range(5)))
    want = run(q, k, v, sink, bias)
    rows = [put(mesh, t, "b", None, "h") for t in (q, k, v)]
    given = (*rows, put(mesh, sink, "h"), put(mesh, bias, None, "h"))
    got = run(*given)
    close(got, want)
    assert got[1][0].sharding.spec[0] == "b" and got[1][0].sharding.spec[2] == "h"
    # A place of each sequence, of which each device shifts the head.
    places = hj.Quads(jnp.arange(16, dtype=jnp.int32).reshape(4, 4))
    drop: Any = partial(hj.flash_attn_func, dropout_p=0.5, dropout_seed=1)
    drops = (drop, partial(drop, dropout_origin=places))
    for out in map(jax.jit, drops[: 1 if heads == 2 else 2][::-1]):
        equal(out(*rows), out(q, k, v))
    text = out.lower(*rows).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


def test_arrays_whose_sharding_is_part_of_their_type_are_taken():
    """As jax.make_mesh makes them unless it is told otherwise."""
    mesh = jax.make_mesh((2, 2), ("b", "h"))
    with jax.set_mesh(mesh):
        given = inputs(4, 19, 8)
        rows = [put(mesh, t, "b", None, "h") for t in given]
        run = jax.jit(lambda q, k, v: hj.flash_attn_func(q, k, v, causal=True) + q)
        got = np.asarray(run(*rows))
    equal(got, np.asarray(run(*given)))


def test_sharded_inputs_that_cannot_stay_are_gathered():
    """Two KV heads over four devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("h",))
    given = inputs(2, 19, 8)
    run = jax.jit(partial(hj.flash_attn_func, causal=True))
    equal(run(put(mesh, given[0], None, None, "h"), *given[1:]), run(*given))


def test_sharded_caches_are_extended_where_they_are():
    mesh = mesh_of_four()
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    q, k, v = draw(4, 1, 4, 8), draw(4, 1, 2, 8), draw(4, 1, 2, 8)
    caches = draw(4, 16, 2, 8), draw(4, 16, 2, 8)
    lengths = jnp.array([3, -1, 15, 0], jnp.int32)
    run = jax.jit(
        lambda q, k, v, kc, vc, n: hj.flash_attn_with_kvcache(q, kc, vc, k, v, cache_seqlens=n)
    )
    want = run(q, k, v, *caches, lengths)
    rows = [put(mesh, t, "b", None, "h") for t in (q, k, v, *caches)]
    got = run(*rows, put(mesh, lengths, "b"))
    equal(got, want)
    text = run.lower(*rows, put(mesh, lengths, "b")).compile().as_text()
    assert "all-gather" not in text


def test_shared_prefixes_are_merged_where_they_are():
    """Spread by jit, by shard_map, and under vmap."""
    mesh = mesh_of_four()
    q, k, v = inputs(4, 19, 4)
    prefix, spec = (k[0, :5], v[0, :5]), jax.sharding.PartitionSpec

    def run(q, k, v, *prefix):
        return hj.flash_attn_with_kvcache(q[:, :2], k, v, shared_prefix=prefix)[0]

    want = jax.jit(run)(q, k, v, *prefix)
    rows = [put(mesh, t, "b", None, "h") for t in (q, k, v)]
    of_heads = [put(mesh, t, None, "h") for t in prefix]
    close(jax.jit(run)(*rows, *of_heads), want)
    specs = (*[spec("b", None, "h")] * 3, *[spec(None, "h")] * 2)
    spread = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0])
    close(jax.jit(spread)(q, k, v, *prefix), want)
    mapped = jax.vmap(run, (0, 0, 0, None, None))
    close(mapped(*(t[:, None] for t in (q, k, v)), *prefix)[:, 0], want)


BAD: dict[str, Any] = {
    "dtype": lambda q, k, v: (q, k, v.astype("bfloat16")),
    "heads": lambda q, k, v: (q[:, :, :3], k, v),
    "head_dim": lambda q, k, v: (q[..., :7], k, v),
    "batch": lambda q, k, v: (q, k[:1], v[:1]),
    "rank": lambda q, k, v: (q[0], k, v),
    "window": dict(window_size=(-2, 0)),
    "window_type": dict(window_size=3),
    "softcap": dict(softcap=-1.0),
    "dropout": dict(dropout_p=1.5),
    "scale": dict(softmax_scale="x"),
    "splits": dict(num_splits=-1),
    "causal": dict(causal=1),
    "origin": dict(dropout_p=0.5, dropout_origin=(0, 0, 0)),
    "backend": dict(backend=3),
    "descale": dict(q_descale=np.ones((), np.float32)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_raise_what_the_pytorch_function_raises(name):
    given: Any = inputs()
    more: dict[str, Any] = {}
    if callable(BAD[name]):
        given = BAD[name](*given)
    else:
        more = BAD[name]
    q, k, v = (as_torch(t.astype("float32")).to(getattr(torch, str(t.dtype))) for t in given)
    converted: dict[str, Any] = {
        n: torch.as_tensor(a) if hasattr(a, "shape") else a for n, a in more.items()
    }
    with pytest.raises((TypeError, ValueError)) as theirs:
        ht.flash_attn_func(q, k, v, **converted)
    with pytest.raises((TypeError, ValueError)) as ours:
        hj.flash_attn_func(*given, **more)
    assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))


TRACED = ("softmax_scale", "softcap", "dropout_p", "causal", "num_splits", "window_size")


@pytest.mark.parametrize("name", TRACED)
def test_what_must_be_known_says_so_when_it_is_traced(name):
    value = jnp.array([1, 1]) if name == "window_size" else jnp.array(1)
    with pytest.raises(TypeError, match=f"{name} must be .* known when it is traced"):
        jax.jit(lambda x: hj.flash_attn_func(*inputs(), **{name: x}))(value)


def test_dropout_wants_a_seed_and_takes_it_in_every_form():
    q, k, v = inputs()
    run = partial(hj.flash_attn_func, q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="dropout_seed must be given"):
        run()
    seed = 2**63 + 5
    want = run(dropout_seed=seed)
    words = jnp.array([5, 2**31], jnp.uint32)
    for form in (words, np.array([seed - 2**64]), np.uint64(seed)):
        equal(run(dropout_seed=form), want)
    tensors: list[Any] = [as_torch(t) for t in (q, k, v)]
    theirs = ht.flash_attn_func(*tensors, dropout_p=0.5, dropout_seed=seed, return_attn_probs=True)[
        2
    ]
    ours = run(dropout_seed=seed, return_attn_probs=True)[2]
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs.numpy()))
    key = jax.random.key(0)
    equal(jax.jit(lambda key: run(dropout_seed=key))(key), run(dropout_seed=key))
    negative = jnp.array(-5, jnp.int32)
    equal(run(dropout_seed=negative), run(dropout_seed=-5))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("storage", QUANT_MAX)
def test_quantize_kv_gives_the_bits_of_pytorchs(storage, asymmetric):
    """Also where it is compiled: XLA would multiply by the reciprocal of a storage's limit."""
    values = torch.randn(64, 5, 64) * torch.logspace(-5, 1, 64)
    wanted = ht.quantize_kv(values, storage, 8, asymmetric)
    fun = partial(hj.quantize_kv, dtype=storage, group_size=8, asymmetric=asymmetric)
    for quantize in (fun, jax.jit(fun)):
        for got, want in zip(quantize(jnp.asarray(values.numpy())), wanted, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                bits = np.asarray(got).view(np.uint8)
                np.testing.assert_array_equal(bits, want.view(torch.uint8).numpy())


def test_alibi_slopes_have_no_gradient_and_say_so():
    given = inputs()
    with pytest.raises(ValueError, match="alibi_slopes must not require a gradient"):
        jax.grad(lambda s: hj.flash_attn_func(*given, alibi_slopes=s).sum())(jnp.ones(4))


def test_backends_are_chosen_by_name_or_raise_every_reason(monkeypatch):
    given = inputs()
    equal(hj.flash_attn_func(*given, backend="scan"), hj.flash_attn_func(*given))
    with pytest.raises(ValueError, match="takes torch calls alone"):
        hj.flash_attn_func(*given, backend="cpu")
    with pytest.raises(ValueError, match="takes jax calls alone"):
        q, k, v = map(as_torch, given)
        ht.flash_attn_func(q, k, v, backend="scan")


def test_export_round_trip_gives_the_same_bits():
    given = inputs()
    fun = jax.jit(partial(hj.flash_attn_func, causal=True))
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in given]
    exported = jax.export.deserialize(jax.export.export(fun)(*types).serialize())
    equal(exported.call(*given), fun(*given))


def test_pmap_runs_the_same_call_on_each_device():
    q, k, v = (jnp.stack([t, 2 * t]) for t in inputs())
    got = jax.pmap(partial(hj.flash_attn_func, causal=True))(q, k, v)
    equal(got, jnp.stack([hj.flash_attn_func(q[i], k[i], v[i], causal=True) for i in range(2)]))


ROOT = Path(heedful.__file__).parent.parent


def test_a_call_imports_neither_torch_nor_triton():
    code = (
        "import sys, jax, heedful.jax as h; from jax import numpy as jnp\n"
        "q = jnp.ones((1, 8, 2, 8))\n"
        "jax.grad(lambda q: h.flash_attn_func(q, q, q).sum())(q)\n"
        "h.flash_attn_with_kvcache(q, q, q, q, q, cache_seqlens=0)\n"
        "print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert shown.stdout.strip() == "[]", shown.stderr
