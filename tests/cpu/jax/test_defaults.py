"""What is left out of a call of JAX's functions is what is left out of their namesakes."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import heedful.jax as hj  # noqa: E402
import heedful.torch as ht  # noqa: E402
from heedful.jax import compat  # noqa: E402

# Function, its namesake, and what is otherwise there for a reason.
PAIRS: list[tuple[Callable, Callable, dict[str, Any]]] = [
    (hj.attention_backward, ht.attention_backward, {}),
    *((getattr(hj, name), getattr(ht, name), {}) for name in hj.__all__ if "flash" in name),
    (hj.merge_attn_states, ht.merge_attn_states, {}),
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
