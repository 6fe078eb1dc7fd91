"""What is left out of a call of JAX's functions is what is left out of their namesakes, and what is
passed reaches the operand or the option of its name."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")

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
