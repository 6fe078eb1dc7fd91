"""What is left out of a call of JAX's functions is what is left out of their namesakes, and what is
passed reaches the operand or the option of its name."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

import heedful.jax as hj  # noqa: E402
import heedful.torch as ht  # noqa: E402
from heedful.core.call.arguments import CacheUpdate, Options  # noqa: E402
from heedful.core.call.operands import Operands  # noqa: E402
from heedful.jax import compat  # noqa: E402
from heedful.jax.api import attention, gradients, kvcache  # noqa: E402

# Function, its namesake, and what is otherwise there for a reason.
PAIRS: list[tuple[Callable, Callable, dict[str, Any]]] = [
    (hj.attention_backward, ht.attention_backward, {}),
    *((getattr(hj, name), getattr(ht, name), {}) for name in hj.__all__ if "flash" in name),
    (hj.merge_attn_states, ht.merge_attn_states, {}),
    (hj.merge_into, ht.merge_into, {}),
    (hj.quantize_kv, ht.quantize_kv, {}),
    # Each framework's own float32.
    (hj.dequantize_kv, ht.dequantize_kv, {"dtype": jax.numpy.float32}),
    (hj.dot_product_attention, jax.nn.dot_product_attention, {}),
    # The port's own: packed lengths beside dense arrays, and 0 for all tokens.
    (
        compat.flash_attn_func,
        ht.flash_attn_func,
        {"deterministic": True, "cu_seqlens_q": None, "cu_seqlens_kv": None},
    ),
    (compat.flash_attn_varlen, ht.flash_attn_varlen_func, {"max_seqlen_q": 0, "max_seqlen_k": 0}),
]


def defaults(function: Callable) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.parametrize(
    "function, namesake, own", PAIRS, ids=[f"{f.__module__}.{f.__name__}" for f, *_ in PAIRS]
)
def test_defaults_are_those_of_the_namesake_but_for_what_is_told(function, namesake, own):
    found = defaults(function)
    assert found == {**{n: v for n, v in defaults(namesake).items() if n in found}, **own}


# What is called otherwise inside; the cache's new keys and values have names of their own.
RENAMED = {"k_cache": "k", "v_cache": "v", "cache_batch_idx": "kv_batch_idx"}
RENAMED |= {"cache_leftpad": "leftpad_k", "return_softmax_lse": "return_lse"}
# These go through functions that look at them.
LOOKED_AT = {"block_mask", "numerics", "backend", "sm_margin", "return_max_logits"}
LOOKED_AT |= {"out", "lse", "dlse", "dout"}
SINKS = ("sink", "s_aux", "learnable_sink")
UPDATES = ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "rotary_interleaved")
UPDATES += ("shared_prefix",)


class Mark:
    """A value that only its name tells from another."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self):
        return f"<{self.name}>"


class Reached(Exception):
    """Carries what a function made of its arguments."""


def reached(monkeypatch, function, *where: tuple[Any, str], **given) -> tuple:
    def stop(*found, **more):
        raise Reached(*found, *more.values())

    for module, name in where:
        monkeypatch.setattr(module, name, stop)
    with pytest.raises(Reached) as caught:
        function(**given)
    return caught.value.args


def marks(function) -> dict[str, Mark]:
    names = [name for name in inspect.signature(function).parameters if name not in LOOKED_AT]
    return {name: Mark(name) for name in names if name not in SINKS[1:]}


def assert_reached(given: dict[str, Any], *holders) -> None:
    """Each value is what a holder has under its name, and under no other."""
    held = {}
    for holder in holders:
        held |= {name: value for name, value in holder._asdict().items() if type(value) is Mark}
    assert {name: value.name for name, value in held.items()} == {
        RENAMED.get(name, name): name for name in given
    }


PLACES = {
    hj.flash_attn_func: (attention, "attend"),
    hj.flash_attn_varlen_func: (attention, "attend"),
    hj.attention_backward: (gradients, "differentiate"),
}


@pytest.mark.parametrize("function", PLACES, ids=lambda f: f.__name__)
def test_an_argument_is_the_operand_or_option_of_its_name(monkeypatch, function):
    given = marks(function)
    others = {name: None for name in ("dout", "out", "lse", "dlse")}
    known = inspect.signature(function).parameters
    more = {name: value for name, value in others.items() if name in known}
    # Packed and dense arguments come together here.
    monkeypatch.setattr(gradients, "check_packed", lambda *facts: None)
    found = reached(monkeypatch, function, PLACES[function], **given, **more)
    holders = [x for x in found if isinstance(x, (Operands, Options))]
    apart = [x.name for x in found if type(x) is Mark]
    names = "dropout_seed", "bias_grad", "rel_bias_grad"
    assert apart == [name for name in names if name in given]
    assert_reached({n: v for n, v in given.items() if n not in apart}, *holders)


def test_an_argument_of_a_cache_is_the_operand_option_or_update_of_its_name(monkeypatch):
    function = hj.flash_attn_with_kvcache
    given = marks(function)
    monkeypatch.setattr(kvcache, "plain_options", lambda options: options)
    x, options, update = reached(monkeypatch, function, (kvcache, "_checked"), **given)
    assert isinstance(update, CacheUpdate)
    assert_reached({name: given[name] for name in UPDATES}, update)
    rest = {name: value for name, value in given.items() if name not in UPDATES}
    assert_reached(rest, x, options)


@pytest.mark.parametrize(
    "function, name",
    [
        (compat.flash_attn_func, "flash_attn_func"),
        (compat.flash_attn_varlen, "flash_attn_varlen_func"),
    ],
)
def test_an_argument_of_the_port_is_the_one_of_its_name(monkeypatch, function, name):
    """Its results are tuples. Dense calls ask for the log-sum-exp in any case."""
    seen: list[dict[str, Any]] = []
    signature = inspect.signature(getattr(attention, name))

    def called(*arrays, **more):
        seen.append(dict(signature.bind(*arrays, **more).arguments))
        results = ("out", "lse", "probs")[: 2 + bool(more.get("return_attn_probs"))]
        return results if more["return_lse"] else "out"

    monkeypatch.setattr(compat.api, name, called)
    own = {"cu_seqlens_q", "cu_seqlens_kv"} if name == "flash_attn_func" else set()
    flags = {"return_lse", "return_attn_probs"}
    names = [n for n in inspect.signature(function).parameters if n not in own | flags]
    given: dict[str, Any] = {n: Mark(n) for n in names} | {"q": Q, "k": Q + 1}
    is_dense = name == "flash_attn_func"
    for lse, probs in ((False, False), (True, False), *[(False, True), (True, True)] * is_dense):
        asked = {"return_lse": lse} | ({"return_attn_probs": probs} if is_dense else {})
        results = function(**given, **asked)
        assert results == ("out", *["lse"] * lse, *["probs"] * probs)
        assert seen.pop() == given | asked | ({"return_lse": True} if is_dense else {})
    if not is_dense:
        for sizes in ((3, 0), (0, 4), (0, 0)):
            function(**given | {"max_seqlen_q": sizes[0], "max_seqlen_k": sizes[1]})
            found = seen.pop()
            assert found["max_seqlen_q"] == (sizes[0] or 2)
            assert found["max_seqlen_k"] == (sizes[1] or 2)


Q = jax.numpy.zeros((2, 3, 4, 8))


@pytest.mark.parametrize("axes", ["x", ("x", "y")], ids=str)
def test_an_argument_of_context_parallelism_is_kept_by_its_name(monkeypatch, axes):
    """Results are two where they are asked for."""
    # The package has a function of this name.
    module = importlib.import_module("heedful.jax.distributed.attention")
    kept = []

    def keep(static, q, k, v, sink, rest):
        kept.append((static, (q, k, v), sink, rest))
        return q, k

    monkeypatch.setattr(module, "_attention", keep)
    options: dict[str, Any] = {
        "dropout_p": 0.25,
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": [3, 4],
        "softcap": 2.0,
        "deterministic": True,
    }
    strategy = "ring" if axes == "x" else "heads x ring"
    mesh = Mesh([[jax.devices()[0]]], ("x", "y"))
    x = jax.numpy.arange(2 * 4 * 2 * 8.0).reshape(2, 4, 2, 8)
    ranges, slopes = jax.numpy.ones((1, 1, 4, 2), "int32"), jax.numpy.ones(2)
    spread = module.attention

    def call(x, ranges, slopes):
        results = spread(
            *(x, x + 1, x + 2),
            axes,
            strategy=strategy,
            layout="contiguous",
            alibi_slopes=slopes,
            key_ranges=ranges,
            learnable_sink=slopes + 1,
            return_lse=True,
            dropout_seed=7,
            dropout_origin=(5, 6),
            backend="scan",
            **options,
        )
        assert len(results) == 2
        one = spread(x, x, x, axes, strategy=strategy, layout="contiguous")
        assert one.shape == x.shape
        (static, arrays, sink, rest), (plain, *_, bare) = kept
        assert dict(static.options) == options | {"window_size": (3, 4), "backend": "scan"}
        assert static[:6] == (
            strategy,
            "x",
            "y" if axes != "x" else None,
            "contiguous",
            None,
            (2, 2),
        )
        assert plain[:6] == static[:6] and dict(plain.options)["dropout_p"] == 0.0
        assert bare == (None,) * 5 and rest.cu_seqlens is None
        return *arrays, sink, rest.alibi_slopes, rest.key_ranges, rest.seed, rest.origin

    spec = PartitionSpec()
    mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    *arrays, sink, its_slopes, its_ranges, seed, origin = mapped(x, ranges, slopes)
    assert all((a == x + n).all() for n, a in enumerate(arrays))
    assert (sink == 2).all() and (its_slopes == 1).all() and (its_ranges == ranges).all()
    assert seed.tolist() == [7, 0] and origin.tolist() == [5, 6]
