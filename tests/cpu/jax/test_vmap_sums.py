"""Gradients that sum over a batch stay apart where vmap adds a batch dim, for each operand that has
such by itself: what keeps one of them apart does not hide that another is not."""

from itertools import product

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402
from support.problems.grids import slow_but  # noqa: E402

SHAPES = {"sink": (4,), "bias": (4, 5, 7)}


def some(*shape: int, seed: int = 0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("name", "mapped"), slow_but({("sink", 0)}, product(SHAPES, (0, None))), ids=str
)
def test_vmap_of_the_gradient_of_one_operand_is_a_loop_of_it(name, mapped):
    q, k, v = some(3, 2, 5, 4, 8), some(3, 2, 7, 2, 8, seed=1), some(3, 2, 7, 2, 8, seed=2)
    summed = some(*(() if mapped is None else (3,)), *SHAPES[name], seed=3)

    def loss(q, k, v, summed):
        return (hj.flash_attn_func(q, k, v, **{name: summed}) ** 2).sum()

    for place in (0, 3):
        grad = jax.grad(loss, place)
        got = jax.vmap(grad, (0, 0, 0, mapped))(q, k, v, summed)
        for i in range(3):
            want = grad(q[i], k[i], v[i], summed if mapped is None else summed[i])
            np.testing.assert_array_equal(got[i], want)
