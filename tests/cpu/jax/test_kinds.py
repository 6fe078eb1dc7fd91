"""What JAX has and NumPy has not is told by name where it is no operand."""

import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

import heedful.jax as hj  # noqa: E402

ROWS = jnp.ones((1, 8, 2, 8))


@pytest.mark.parametrize(
    "name, call",
    [
        ("q", lambda keys: hj.flash_attn_func(keys, ROWS, ROWS)),
        ("bias", lambda keys: hj.flash_attn_func(ROWS, ROWS, ROWS, bias=keys)),
        ("x", lambda keys: hj.quantize_kv(keys, "int8")),
        ("outs", lambda keys: hj.merge_attn_states(keys[None], ROWS)),
    ],
)
def test_random_keys_in_place_of_numbers_are_refused_by_their_dtype(name, call):
    keys = jax.random.split(jax.random.key(0), ROWS.shape)
    with pytest.raises(TypeError, match=rf"^{name} must be float.*, got key<"):
        call(keys)
