"""The largest scores of JAX's calls: the oracle's, beside other results and under transforms."""

from dataclasses import replace

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as heedful  # noqa: E402
from heedful.core.call.arguments import Options  # noqa: E402
from heedful.jax.api.attention import _with_max  # noqa: E402
from support.problems.cases import Case, build  # noqa: E402
from support.problems.largest import check_largest  # noqa: E402
from support.runs import jax_api  # noqa: E402
from support.runs.jax_backend import as_tensor  # noqa: E402

BASE = Case(dtype="float32", seqlen_q=40, seqlen_k=50, heads_q=4, heads_k=2, head_dim=16)
CASES = [
    replace(BASE, causal=True, sink=True),
    replace(BASE, softcap=3.0, bias="hqk", window=(20, 3)),
    replace(BASE, varlen="qk", used="qk", dropout_p=0.3),
    replace(BASE, block_mask=32, ranges_of="h", key_ranges=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_largest_scores_of_rows_are_those_of_the_oracle(case):
    built = build(replace(case, backward=False))
    given = {n: jax_api.as_jax(t) for n, t in built.x._asdict().items() if t is not None}
    results = jax_api.call(built, given, return_max_logits="rows")
    check_largest(built, as_tensor(results[2]))


def test_heads_have_the_largest_of_their_rows_under_transforms():
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(2, 9, 3, 8))) for i in range(3))

    def attend(q, asked: bool | str = True):
        return heedful.flash_attn_func(q, k, v, causal=True, return_max_logits=asked)

    out, largest = jax.jit(attend)(q)
    _, rows = attend(q, "rows")
    np.testing.assert_array_equal(largest, rows.max((0, 2)))
    mapped = jax.vmap(lambda q: attend(q, "rows")[1])(jnp.stack([q, 2 * q]))
    np.testing.assert_allclose(mapped[0], rows, rtol=1e-6)
    grad = jax.grad(lambda q: attend(q)[0].sum())(q)
    assert grad.shape == q.shape and out.shape == q.shape
    assert attend(q[:, :0])[1].tolist() == [-np.inf] * 3


@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 5)], ids=["dense", "packed"])
def test_the_largest_of_heads_are_over_all_but_them_and_come_last(shape):
    """A false number asks for none."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    results = "out", "lse", rows
    heads = np.asarray(rows).max(tuple(n for n in range(len(shape)) if n != len(shape) - 2))
    for has_lse in (False, True):
        options = Options("dense", return_lse=has_lse, return_max_logits=True)
        *others, largest = _with_max(results, options, True)
        assert others == ["out", "lse"][: 1 + has_lse] and (largest == heads).all()
        assert _with_max(results, options, "rows") == (*others, rows)
        none = options._replace(return_max_logits=np.False_)
        assert _with_max(results[:2], none, np.False_) == results[:2]
    nobody = _with_max(("out", "lse", rows[..., :0]), options, True)[2]
    assert (nobody == -np.inf).all() and nobody.shape == (3,)


def test_other_words_are_refused_by_name():
    q = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="return_max_logits must be a bool or 'rows'"):
        heedful.flash_attn_func(q, q, q, return_max_logits="heads")
