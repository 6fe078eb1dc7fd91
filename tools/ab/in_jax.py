"""A cell's calls under JAX."""

import os
from collections.abc import Callable
from typing import Any

import torch

from ab.cases import Spec
from ab.operands import Draw

# Beside torch and the other side, which want memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def calls(spec: Spec, device: torch.device, sets: int) -> list[Callable[[], Any]]:
    """Jitted dense calls, one for each of `sets` draws; a device's wait for their result, host
    calls do not."""
    import jax
    from jax import numpy as jnp

    import heedful.jax

    options, waits = dict(spec["options"] or {}), spec["clock"] == "device"
    batch, rows, keys, heads, heads_k, dim = spec["shape"]
    dim_v = spec["dim_v"] or dim

    def attend(q, k, v):
        return heedful.jax.flash_attn_func(q, k, v, **options)

    def gradients(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout.astype(jnp.bfloat16))

    backward = spec["direction"] == "backward"
    program = jax.jit(gradients if backward else attend)
    found = []
    for seed in range(sets):
        draw = Draw(device, seed)
        arrays = [
            draw.normal(batch, rows, heads, dim, dtype=spec["dtype"]),
            draw.normal(batch, keys, heads_k, dim, dtype=spec["dtype"]),
            draw.normal(batch, keys, heads_k, dim_v, dtype=spec["dtype"]),
        ]
        if backward:
            arrays.append(draw.normal(batch, rows, heads, dim_v, dtype=spec["dtype"]))
        own = [jax.dlpack.from_dlpack(x) for x in arrays]
        if waits:
            found.append(lambda own=own: jax.block_until_ready(program(*own)))
        else:
            found.append(lambda own=own: program(*own))
    return found
