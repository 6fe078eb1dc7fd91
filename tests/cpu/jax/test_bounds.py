"""JAX's calls at the bounds of their arguments: what is just within is computed, what is outside is
refused by name, before anything is traced with it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as typed  # noqa: E402
from heedful.jax.operands.plain import seed_words  # noqa: E402
from heedful.jax.traced import registration  # noqa: E402
from heedful.jax.traced.sharding import is_spread  # noqa: E402

# What is passed here is more than the signatures say.
hj: Any = typed


ROTARY = ("rotary_cos", "rotary_sin")


def inputs(batch=2, seqlen=9, heads=4, heads_k=2) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = [(batch, seqlen, n, 8) for n in (heads, heads_k, heads_k)]
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def equal(one, other) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), one, other)


def with_gradients(*given, **options):
    def loss(*given):
        out = hj.flash_attn_func(*given, **options)
        return (out**2).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*given)


UNBOUNDED = {(-1, 2**31 - 1): (-1, -1), (2**31 - 1, -1): (-1, -1), (2**31, 3): (-1, 3)}
UNBOUNDED |= {(2**64, 2**64): (-1, -1), (3, -1, 2**40): (-1, -1), (2, 2**63, 1): (2, -1, 1)}


QUICK = [(-1, 2**31 - 1), (2**64, 2**64)]
REST = [pytest.param(w, marks=pytest.mark.slow) for w in UNBOUNDED if w not in QUICK]


@pytest.mark.parametrize("window", [*QUICK, *REST], ids=str)
def test_a_side_of_a_window_that_no_length_reaches_is_no_bound(window):
    want = with_gradients(*inputs(), window_size=UNBOUNDED[window])
    equal(with_gradients(*inputs(), window_size=window), want)


def test_the_farthest_bound_and_no_bound_are_one():
    near = with_gradients(*inputs(), window_size=(2**29 - 1, 2**29 - 1, 2**29 - 1))
    equal(near, with_gradients(*inputs()))


def test_a_local_window_of_jax_nn_may_be_as_far():
    q, k, v = inputs()
    want = hj.dot_product_attention(q, k, v)
    equal(hj.dot_product_attention(q, k, v, local_window_size=2**40), want)


def packed(**options):
    bounds = jnp.array([0, 4, 9], jnp.int32)
    given = {"max_seqlen_q": 9, "max_seqlen_k": 9} | options
    return hj.flash_attn_varlen_func(*(t[0] for t in inputs()), bounds, bounds, **given)


FAR: list[tuple[Any, dict[str, Any]]] = [
    (packed, {"max_seqlen_q": 2**31}),
    (packed, {"max_seqlen_k": 2**64}),
    *(
        (lambda **o: hj.flash_attn_func(*inputs(), **o), {n: x})
        for n in ("softmax_scale", "softcap")
        for x in (1e39, 1e300, 10**400)
    ),
    (lambda **o: hj.flash_attn_func(*inputs(), **o), {"softcap": 1e-40}),
    (lambda **o: hj.flash_attn_func(*inputs(), **o), {"dropout_origin": (0, 0, 2**32, 0)}),
    (
        lambda **o: hj.flash_attn_with_kvcache(*inputs(), **o),
        {"cache_seqlens": 2**40},
    ),
]


@pytest.mark.parametrize(
    ("function", "options"),
    FAR,
    ids=[f"{n} {i}" for i, (_, given) in enumerate(FAR) for n in given],
)
def test_numbers_that_no_kernel_can_hold_are_refused_by_name(function, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} must .*, got "):
        function(**options)


def test_a_traced_origin_with_a_word_too_large_is_refused():
    def run(row):
        return hj.flash_attn_func(
            *inputs(), dropout_p=0.5, dropout_seed=1, dropout_origin=(2**32, 0, row, 0)
        )

    with pytest.raises(ValueError, match="dropout_origin must be .* got 4294967296"):
        jax.jit(run)(jnp.uint32(0))


def test_a_length_beyond_int32_in_an_array_is_that_of_a_full_cache():
    """Not that of its low bits."""
    q, k, v = inputs()
    want = hj.flash_attn_with_kvcache(q[:, :1], k, v)
    equal(hj.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=np.array(2**40 + 3)), want)
    with jax.enable_x64():
        length = jnp.array(2**40 + 3)
        equal(hj.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=length), want)


def test_pages_that_reach_past_int32_are_refused():
    q, pages = inputs()[0], jnp.zeros((1, 2**16, 1, 8), jnp.float32)
    table = jnp.zeros((2, 2**15), jnp.int32)
    with pytest.raises(ValueError, match="block_table must reach at most 2147483647 keys"):
        hj.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=1, block_table=table)


def test_more_parts_than_tiles_of_keys_are_as_many_as_there_are():
    """And not as many turns of a loop."""
    q, k, v = (jnp.tile(t, (1, 90, 1, 1)) for t in inputs())
    want = hj.flash_attn_func(q, k, v, num_splits=4)
    for many in (10**9, 2**64):
        equal(hj.flash_attn_func(q, k, v, num_splits=many), want)


NO_KEYS = [(2, 4, 9, 0), (1, 1, 9, 0), (9, 0), (0,)]


@pytest.mark.parametrize("shape", NO_KEYS, ids=str)
def test_a_bias_of_no_keys_is_one(shape):
    q, k, v = inputs()

    def loss(q, k, v, bias):
        out, lse = hj.flash_attn_func(q, k[:, :0], v[:, :0], bias=bias, return_lse=True)
        return out.sum(), (out, lse)

    grads, (out, lse) = jax.grad(loss, range(4), has_aux=True)(q, k, v, jnp.zeros(shape))
    assert not out.any() and (lse == -jnp.inf).all()
    assert not any(g.any() for g in grads) and grads[3].shape == shape


def attention(q, k, v, **more):
    return hj.flash_attn_func(q, k, v, return_lse=True, **more)


NONE: dict[str, Any] = {
    "joined": attention,
    "its gradient": jax.grad(lambda *a: attention(*a)[0].sum(), (0, 1, 2)),
    "dropout": lambda *a: attention(*a, dropout_p=0.5, dropout_seed=1),
    "gradient of a sink": jax.grad(
        lambda q, k, v: attention(q, k, v, sink=q[0, 0, :, 0])[0].sum(), (0, 1, 2)
    ),
    "cache": lambda q, k, v: hj.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=3),
}


@pytest.mark.parametrize("name", NONE)
def test_vmap_over_an_axis_of_none_has_the_shapes_of_one(name):
    one = [t[None] for t in inputs()]
    got, want = (jax.vmap(NONE[name])(*given) for given in ([t[:0] for t in one], one))
    shapes = [[t.shape[1:] for t in jax.tree.leaves(found)] for found in (got, want)]
    assert shapes[0] == shapes[1] and all(t.shape[0] == 0 for t in jax.tree.leaves(got))


@pytest.mark.parametrize("flag", ["jax_debug_infs", "jax_debug_nans", "jax_disable_jit"])
def test_calls_run_under_the_flags_of_those_who_debug(flag):
    """Rows without keys have a log-sum-exp of -inf, which is no error."""
    q, k, v = inputs()

    def run():
        grads = with_gradients(q, k[:, :3], v[:, :3], causal=True)
        mask = jnp.ones((9, 9), bool).at[2].set(False)
        out, lse = hj.dot_product_attention(q, k, v, mask=mask, return_residual=True)
        merged = hj.flash_attn_with_kvcache(q, k, v, cache_seqlens=0, shared_prefix=(k[0], v[0]))
        return grads, out, merged[0]

    want = run()
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        equal(run(), want)
    finally:
        jax.config.update(flag, before)


@pytest.mark.parametrize(
    ("flag", "value"), [("jax_debug_infs", jnp.inf), ("jax_debug_nans", jnp.nan)]
)
def test_an_error_that_they_look_for_is_found_and_named(flag, value):
    q, k, v = inputs()
    v = v.at[0, 0, 0, 0].set(value)
    jax.config.update(flag, True)
    try:
        with pytest.raises(FloatingPointError, match="heedful_attention"):
            hj.flash_attn_func(q, k, v)
    finally:
        jax.config.update(flag, False)


@pytest.mark.parametrize("within", [lambda call: call, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("flag", "value"), [("jax_debug_infs", jnp.inf), ("jax_debug_nans", jnp.nan)]
)
def test_what_jax_itself_finds_in_a_new_program_has_the_name_of_our_primitive(flag, value, within):
    """JAX looks at programs that are compiled under its flags, and runs anew what has an error."""
    q, k, v = inputs()
    v = v.at[0, 0, 0, 0].set(value)
    registration._compiled.cache_clear()
    jax.clear_caches()
    jax.config.update(flag, True)
    try:
        with pytest.raises(FloatingPointError, match=r"encountered in heedful_attention(\n|$)"):
            within(hj.flash_attn_func)(q, k, v)
    finally:
        jax.config.update(flag, False)
        registration._compiled.cache_clear()
        jax.clear_caches()


def test_one_wrong_result_of_several_is_found():
    fine, wrong = jnp.zeros(3), jnp.array([0.0, jnp.nan])
    primitive = jax.extend.core.Primitive("ours")
    for results in ((fine, wrong), (wrong, fine), (jnp.arange(2), wrong)):
        with pytest.raises(FloatingPointError, match="nan.* in ours"):
            registration._check(primitive, results, "nan", np.isnan)
    registration._check(primitive, (fine, jnp.arange(2)), "nan", np.isnan)


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos", "rotary_sin"])
def test_what_has_to_be_an_array_of_an_update_is_named_where_it_is_none(name):
    q, k, v = inputs()
    arrays: dict[str, Any] = {"k": k, "v": v} | {n: k[0, :, 0, :8] for n in ROTARY}
    with pytest.raises(TypeError, match=f"^{name} must be"):
        hj.flash_attn_with_kvcache(q, k, v, cache_seqlens=0, **arrays | {name: "text"})


@pytest.mark.parametrize("rank", [2, 4])
def test_a_mask_beside_a_bias_hides_keys_and_leaves_the_bias_of_others(rank):
    """Whichever of both has fewer dims."""
    q, k, v = inputs()
    rows, cols = q.shape[1], k.shape[1]
    bias = jnp.arange(rows * cols, dtype=jnp.float32).reshape(rows, cols) / 40
    mask = jnp.arange(cols)[None, :] % 3 != jnp.arange(rows)[:, None] % 3
    shape = (1,) * (rank - 2) + bias.shape
    given = [(bias.reshape(shape), mask), (bias, mask.reshape(shape))]
    for bias_, mask_ in given:
        got = hj.dot_product_attention(q, k, v, bias=bias_, mask=mask_)
        want = hj.dot_product_attention(q, k, v, jnp.where(mask, bias, -jnp.inf))
        equal(got, want)
        theirs = jax.nn.dot_product_attention(q, k, v, bias[None, None], mask[None, None])
        assert jnp.abs(got - theirs).max() < 2e-5


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_residual_is_jax_nns(dtype):
    """Of key's dtype, without a gradient."""
    given = [t.astype(dtype) for t in inputs()]

    def loss(function):
        def run(q, k, v):
            out, lse = function(q, k, v, is_causal=True, return_residual=True)
            return (lse.astype(jnp.float32) ** 2).sum() + 0 * out.sum(), lse

        return jax.grad(run, (0, 1, 2), has_aux=True)

    got, want = (loss(f)(*given) for f in (hj.dot_product_attention, jax.nn.dot_product_attention))
    assert got[1].dtype == want[1].dtype and got[1].shape == want[1].shape
    assert not any(g.any() for g in (*got[0], *want[0]))
    most = 8 * jnp.finfo(dtype).eps * jnp.abs(want[1]).max()
    assert jnp.abs(got[1] - want[1]).max() <= most


def test_float64_is_refused_with_what_to_do():
    with jax.enable_x64():
        q, k, v = (t.astype("float64") for t in inputs())
        with pytest.raises(TypeError, match="^q must be .* got float64 \\(cast it"):
            hj.flash_attn_func(q, k, v)


def test_a_storage_that_is_no_dtype_is_refused_by_name():
    for storage in (4, None, "int5", jnp.int32):
        with pytest.raises(ValueError, match="^dtype must be one of int4, .*, got "):
            hj.quantize_kv(inputs()[0], storage)
    with pytest.raises(TypeError, match="^dtype must be float16"):
        hj.dequantize_kv(*hj.quantize_kv(inputs()[0], "int8"), dtype=4)


def exported(function, *shapes):
    """A function compiled for a batch that is not known yet."""
    (batch,) = jax.export.symbolic_shape("batch")
    types = [jax.ShapeDtypeStruct((batch, *shape[1:]), jnp.float32) for shape in shapes]
    return jax.export.export(jax.jit(function))(*types)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_program_is_exported_for_any_batch(is_traced):
    """With gradients, each entry its part of the dropout mask, and shared operands' sums."""
    sink = jnp.arange(4.0)

    def loss(q, k, v, sink):
        origin: Any = (7, 0, 0, 2)
        if is_traced:
            origin = jnp.array(origin, jnp.uint32) + jnp.uint32(0 * q[0, 0, 0, 0])
        more = {"causal": True, "dropout_p": 0.3, "dropout_seed": 5, "dropout_origin": origin}
        out, lse = hj.flash_attn_func(q, k, v, sink=sink, return_lse=True, **more)
        return (out**2).sum() + lse.sum(), out

    run = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
    program = exported(lambda q, k, v: run(q, k, v, sink), *(t.shape for t in inputs()))
    for batch in (1, 3):
        given = inputs(batch)
        got, want = program.call(*given), run(*given, sink)
        np.testing.assert_array_equal(got[0][1], want[0][1])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_a_batch_of_jax_nns_function_may_be_a_symbol_too():
    program = exported(hj.dot_product_attention, *(t.shape for t in inputs()))
    equal(program.call(*inputs(3)), hj.dot_product_attention(*inputs(3)))


def test_other_sizes_that_are_symbols_are_refused_by_name():
    (length,) = jax.export.symbolic_shape("length")
    q = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    with pytest.raises(ValueError, match="^q must have sizes that are known .*, got \\(2, length"):
        jax.export.export(jax.jit(lambda q: hj.flash_attn_func(q, q, q)))(q)
    cache = jax.ShapeDtypeStruct((length, 9, 4, 8), jnp.float32)
    with pytest.raises(ValueError, match="^q must have sizes that are known .*, got \\(length"):
        jax.export.export(jax.jit(lambda q: hj.flash_attn_with_kvcache(q, q, q)))(cache)


def test_an_operand_of_another_batch_than_a_symbol_is_refused_by_name():
    """One of 1 is repeated, but for keys and values."""
    (batch,) = jax.export.symbolic_shape("batch")
    q, other, one = (jax.ShapeDtypeStruct((b, 9, 4, 8), jnp.float32) for b in (batch, 3, 1))
    for k, size in ((other, 3), (one, 1)):
        with pytest.raises(ValueError, match=f"^k must have q's batch batch, got {size}"):
            jax.export.export(jax.jit(lambda q, k: hj.flash_attn_func(q, k, q)))(q, k)
    slopes = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    with pytest.raises(ValueError, match="^alibi_slopes must have q's batch batch, got 3"):
        jax.export.export(jax.jit(lambda q, s: hj.flash_attn_func(q, q, q, alibi_slopes=s)))(
            q, slopes
        )


@pytest.mark.parametrize("way", ["int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("group, has_shift", [(None, False), (4, True)])
def test_packed_values_are_read_as_torch_reads_them(way, group, has_shift):
    torch = pytest.importorskip("torch")
    import heedful

    drawn = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    more = () if group is None else (group, has_shift)
    wanted = heedful.quantize_kv(torch.from_numpy(drawn), way, *more)
    got = hj.quantize_kv(jnp.asarray(drawn), way, *more)
    for dtype in ("float32", "bfloat16"):
        want = heedful.dequantize_kv(*wanted, dtype=getattr(torch, dtype))
        values = hj.dequantize_kv(*got, dtype=dtype)
        assert values.dtype == dtype and values.shape == drawn.shape
        np.testing.assert_array_equal(np.float32(values), want.float().numpy())


def test_a_program_is_for_several_devices_where_not_all_its_axes_are_manual():
    def context(**axes):
        return SimpleNamespace(module_context=SimpleNamespace(axis_context=SimpleNamespace(**axes)))

    mesh = SimpleNamespace(axis_names=("a", "b"))
    assert is_spread(context(mesh=mesh, manual_axes=frozenset("a")))
    assert not is_spread(context(mesh=mesh, manual_axes=frozenset("ab"), num_devices=4))
    assert is_spread(context(num_devices=2)) and not is_spread(context(num_devices=1))
    assert not is_spread(context())


@pytest.mark.parametrize("name", ["packed", "scale", "shift"])
def test_what_is_read_back_is_refused_by_name_where_it_is_no_array(name):
    given = dict(
        zip(("packed", "scale", "shift"), hj.quantize_kv(inputs()[0], "int8", 4, True), strict=True)
    )
    with pytest.raises(TypeError, match=f"^{name} must be "):
        hj.dequantize_kv(**given | {name: "text"})


BOTH = (1 << 40) + 7


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (BOTH, [7, 256]),
        (-1, [2**32 - 1, 2**32 - 1]),
        (np.int64(BOTH), [7, 256]),
        (np.array([BOTH]), [7, 256]),
        (np.array([5, 9], np.uint32), [5, 9]),
        (([5, 9], "uint32"), [5, 9]),
        ((-3, "int32"), [2**32 - 3, 2**32 - 1]),
        (([-3], "int8"), [2**32 - 3, 2**32 - 1]),
        ((200, "uint8"), [200, 0]),
        ((2**32 - 1, "uint32"), [2**32 - 1, 0]),
    ],
    ids=repr,
)
def test_a_seed_is_two_words_the_low_one_first(seed, words):
    """A pair stands for an array of JAX."""
    made = seed_words(jnp.array(*seed) if isinstance(seed, tuple) else seed)
    assert made.dtype == jnp.uint32 and made.tolist() == words


def test_a_seed_of_64_bits_keeps_both_words():
    with jax.enable_x64(True):
        assert seed_words(jnp.array(BOTH, jnp.int64)).tolist() == [7, 256]
        assert seed_words(jnp.array(-1, jnp.int64)).tolist() == [2**32 - 1] * 2


def test_a_key_of_jax_is_a_seed_and_several_are_not():
    key = jax.random.key(3)
    assert seed_words(key).tolist() == jax.random.bits(key, (2,), jnp.uint32).tolist()
    with pytest.raises(ValueError, match=r"must be one key, got keys of shape \(2,\)"):
        seed_words(jax.random.split(key))


@pytest.mark.parametrize(
    ("seed", "error", "said"),
    [
        (0.5, TypeError, "dropout_seed must be "),
        ([1, 2, 3], ValueError, r"must have one element, got \(3,\)"),
        ([[1, 2]], ValueError, r"must have one element, got \(1, 2\)"),
    ],
)
def test_what_is_no_seed_is_refused_by_name(seed, error, said):
    for array in (np.array(seed), jnp.array(seed)):
        with pytest.raises(error, match=said):
            seed_words(array)
