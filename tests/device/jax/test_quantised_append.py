"""New tokens that JAX quantises on a GPU are stored as its plain path stores them on a CPU."""

import os
from functools import partial
from typing import Any

import pytest

# Beside torch, which wants memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax = pytest.importorskip("jax")
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from heedful.jax import flash_attn_with_kvcache, quantize_kv  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(all(d.platform != "gpu" for d in jax.devices()), reason="JAX sees no GPU"),
]

BATCH, CAPACITY, NEW, DIM = 3, 48, 4, 128
STORED = ("int4", "int8", "float8_e4m3fn", "float8_e5m2")
CACHES = ("k_cache", "v_cache")
SCALES = ("k_descale", "k_shift", "v_descale", "v_shift")
STEP = partial(flash_attn_with_kvcache, causal=True)


def case(storage: str, group: int, shifted: bool, page_size: int) -> dict[str, Any]:
    """A cache on the CPU, and tokens of a sequence that is absent and of two with room for them.

    group: values that share a scale; 0: those of a head. Keys and tables are bfloat16: their
    products are exact in float32, and rotations have the same bits however they are fused.
    """
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    rows = (BATCH * CAPACITY // page_size, page_size) if page_size else (BATCH, CAPACITY)
    with jax.default_device(jax.devices("cpu")[0]):
        x = {"q": draw(BATCH, NEW, 8, DIM)} | {name: draw(BATCH, NEW, 2, DIM) for name in "kv"}
        x |= {name: draw(CAPACITY, DIM // 4) for name in ("rotary_cos", "rotary_sin")}
        x = {name: array.astype(jnp.bfloat16) for name, array in x.items()}
        for name in "kv":
            stored, scale, shift = quantize_kv(draw(*rows, 2, DIM), storage, group or DIM, shifted)
            x[f"{name}_cache"] = stored
            x[f"{name}_descale"] = scale if group else jnp.abs(draw(BATCH, 2)) + 0.1
            if shift is not None:
                x[f"{name}_shift"] = shift
        x["cache_seqlens"] = jnp.array([-1, 7, CAPACITY - NEW], jnp.int32)
        if page_size:
            order = rng.permutation(rows[0]).reshape(BATCH, -1)
            x["block_table"] = jnp.asarray(order, jnp.int32)
    return x


def on(platform: str, x: dict[str, Any]) -> dict[str, Any]:
    return jax.device_put(x, jax.devices(platform)[0])


def bits(array) -> np.ndarray:
    return np.asarray(array).reshape(-1).view(np.uint8)


def written(results: tuple, group: int, shifted: bool) -> dict[str, Any]:
    """What a step returns beside out, by name."""
    scales = [name for name in SCALES if group and (shifted or name.endswith("descale"))]
    return dict(zip((*CACHES, *scales), results[1:], strict=True))


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("group", "shifted"), [(0, False), (32, False), (32, True), (DIM, False), (DIM, True)]
)
@pytest.mark.parametrize("storage", STORED)
def test_rotated_caches_and_scales_are_those_of_the_plain_path_and_attention_reads_them(
    storage, group, shifted, page_size
):
    x = case(storage, group, shifted, page_size)
    given, run = on("gpu", x), jax.jit(STEP)
    results = run(**given)
    got, want = (written(r, group, shifted) for r in (results, run(**on("cpu", x))))
    for name, array in want.items():
        np.testing.assert_array_equal(bits(got[name]), bits(array), err_msg=name)
    # With tables that rotate nothing, as a call without new tokens has its queries.
    tables = {"rotary_cos": jnp.ones_like(x["rotary_cos"])}
    tables["rotary_sin"] = jnp.zeros_like(x["rotary_sin"])
    given |= on("gpu", tables)
    out, *again = run(**given)
    lengths = given["cache_seqlens"]
    reads = {n: a for n, a in given.items() if n not in ("k", "v", "rotary_cos", "rotary_sin")}
    reads |= written((out, *again), group, shifted)
    reads["cache_seqlens"] = jnp.where(lengths < 0, lengths, lengths + NEW)
    np.testing.assert_array_equal(bits(run(**reads)[0]), bits(out))


def test_donated_caches_and_scales_are_extended_in_place():
    x = case("int4", 32, True, 16)
    given = on("gpu", x)
    arrays = {name: given[name] for name in (*CACHES, *SCALES)}
    copied = written(jax.jit(STEP)(**given), 32, True)
    for name, array in arrays.items():
        np.testing.assert_array_equal(bits(array), bits(x[name]), err_msg=name)
    places = {name: array.unsafe_buffer_pointer() for name, array in arrays.items()}
    donated = written(jax.jit(STEP, donate_argnames=tuple(arrays))(**given), 32, True)
    assert {name: donated[name].unsafe_buffer_pointer() for name in places} == places
    for name in places:
        np.testing.assert_array_equal(bits(donated[name]), bits(copied[name]), err_msg=name)


def test_what_has_no_room_is_not_written():
    x, room = case("int8", DIM, True, 0), 2
    x["cache_seqlens"] = jnp.array([-1, 7, CAPACITY - room], jnp.int32)
    got = written(jax.jit(STEP)(**on("gpu", x)), DIM, True)
    for name, array in got.items():
        now, before = np.asarray(array), np.asarray(x[name])
        np.testing.assert_array_equal(now[0], before[0], err_msg=name)
        np.testing.assert_array_equal(now[2, :-room], before[2, :-room], err_msg=name)
        assert (now[2, -room:] != before[2, -room:]).any()
