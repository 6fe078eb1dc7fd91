"""A JAX process without Triton: an attention and its gradients, kernels from a pack alone.

python jax_pack.py INPUTS.npz OUTPUTS.npz
"""

import importlib.metadata as metadata
import json
import sys

find = metadata.version


def version(name: str) -> str:
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return find(name)


metadata.version = version
missing: dict = dict.fromkeys(("triton", "torch"))
sys.modules.update(missing)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402

import heedful  # noqa: E402
import heedful.jax  # noqa: E402

x, dout = (jnp.asarray(a, jnp.bfloat16) for a in np.load(sys.argv[1]).values())


@jax.jit
def run(x, dout):
    call = lambda q, k, v: heedful.jax.flash_attn_func(q, k, v, causal=True)  # noqa: E731
    out, pull = jax.vjp(call, x, x, x)
    return (out, *pull(dout))


results = run(x, dout)
names = ("out", "dq", "dk", "dv")
found: dict = {n: np.asarray(a, np.float32) for n, a in zip(names, results, strict=True)}
np.savez(sys.argv[2], **found)
sys.stdout.write(json.dumps(dict(heedful.counters)) + "\n")
