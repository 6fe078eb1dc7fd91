"""`attention_backward` gives the gradients of a call to whoever kept its results, in JAX too."""

from typing import Any

import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402
from heedful.reference.convert import as_numpy  # noqa: E402
from support.problems.budget import Results, check  # noqa: E402
from support.problems.cases import Case, build, variants  # noqa: E402
from support.problems.grids import in_turns, slow_but  # noqa: E402
from support.runs import jax_api  # noqa: E402
from support.runs.jax_backend import as_tensor  # noqa: E402

CASES = [
    *variants(
        Case(causal=True, heads_q=4),
        lse_grad=[True, False],
        dropout_p=[0.3],
        bias=["k"],
        sink=[True],
        window=[(9, 3)],
    ),
    Case(varlen="qk", batch=3, causal=True, used="qk"),
    Case(bias="qk", bias_dtype="bool"),
    Case(used="qk", leftpad_k=True),
    Case(dtype="bfloat16", sink=True, sink_dtype="bfloat16"),
]


@pytest.mark.parametrize("case", in_turns(CASES, each=2), ids=str)
def test_the_gradients_are_the_oracles(case):
    built = build(case)
    x = {name: jax_api.as_jax(t) for name, t in built.x._asdict().items() if t is not None}
    dout, dlse = (None if t is None else jax_api.as_jax(t) for t in (built.dout, built.dlse))
    given = {"causal": case.causal, "window_size": case.window, "dropout_p": case.dropout_p}
    lengths = {"max_seqlen_q": built.problem.seqlen_q, "max_seqlen_k": built.problem.seqlen_k}
    given |= lengths if case.varlen else {}

    @jax.jit
    def both(x: dict[str, Any], dout, dlse):
        out, lse, *_ = jax_api.call(built, x)
        rest = {name: array for name, array in x.items() if name not in ("q", "k", "v", "seed")}
        more: dict[str, Any] = {"dlse": dlse, "dropout_seed": x.get("seed"), **rest, **given}
        grads = hj.attention_backward(dout, x["q"], x["k"], x["v"], out, lse, **more)
        return {"out": out, "lse": lse, **grads._asdict()}

    found = {n: None if a is None else as_tensor(a) for n, a in both(x, dout, dlse).items()}
    check(built, Results(**{n: as_numpy(t) for n, t in found.items()}))


def test_the_gradient_of_a_bias_has_its_shape_and_can_be_left_out():
    q = k = v = dout = jnp.ones((1, 3, 2, 8))
    bias = jnp.ones((3, 3))
    out, lse = hj.flash_attn_func(q, k, v, bias=bias, return_lse=True)
    given = dout, q, k, v, out, lse
    assert hj.attention_backward(*given, bias=bias).dbias.shape == (3, 3)
    assert hj.attention_backward(*given, bias=bias, bias_grad=False).dbias is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"dout": jnp.ones((1, 3, 2, 4))},
        {"lse": jnp.ones((1, 3, 2))},
        {"out": None},
        {"dlse": jnp.ones((1, 2, 3), jnp.bfloat16)},
        {"dropout_seed": None, "dropout_p": 0.5},
        {"bias_grad": 1},
        {"rel_bias_grad": 1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_bad_call_names_the_argument(wrong):
    q = k = v = dout = jnp.ones((1, 3, 2, 8))
    out, lse = hj.flash_attn_func(q, k, v, return_lse=True)
    given: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))} must"):
        hj.attention_backward(**{**given, **wrong})


@pytest.mark.parametrize("scale", slow_but({40.0}, [0.25, 40.0]), ids=["", "far from 0"])
def test_gradients_from_parts_of_the_keys_add_up_to_those_of_all(scale):
    length, cut = 40, 28
    q, k, v, dout = jax.random.normal(jax.random.key(0), (4, 1, length, 2, 16))
    given: Any = {"softmax_scale": scale}
    out, lse = hj.flash_attn_func(q, k, v, causal=True, return_lse=True, **given)
    want = hj.attention_backward(dout, q, k, v, out, lse, causal=True, **given)
    dq, dk, dv = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    for keys in (slice(0, cut), slice(cut, length)):
        rows, window = slice(keys.start, None), (-1, length - keys.stop)
        queries, results = (dout[:, rows], q[:, rows]), (out[:, rows], lse[:, :, rows])
        part: Any = (*queries, k[:, keys], v[:, keys], *results)
        function: Any = hj.attention_backward
        got = function(*part, window_size=window, **given)
        dq = dq.at[:, rows].add(got.dq)
        dk, dv = dk.at[:, keys].set(got.dk), dv.at[:, keys].set(got.dv)
    # A few roundings of sums of as many terms as there are keys, and of lse.
    rounded = 2**-18 + 2**-22 * float(jnp.abs(lse).max())
    for whole, part in zip(want, (dq, dk, dv), strict=False):
        assert float(jnp.abs(whole - part).max()) <= float(jnp.abs(whole).max()) * rounded
