"""A JAX process without Triton: an attention and its gradients, kernels from a pack alone.

python jax_pack.py INPUTS.npz OUTPUTS.npz
"""

import json
import sys
from functools import partial

from support import absent

# Before what looks for them is imported.
absent.hide("triton", "torch")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402

import heedful  # noqa: E402
import heedful.jax  # noqa: E402

x, dout = (jnp.asarray(a, jnp.bfloat16) for a in np.load(sys.argv[1]).values())


@jax.jit
def run(x, dout):
    out, pull = jax.vjp(partial(heedful.jax.flash_attn_func, causal=True), x, x, x)
    return (out, *pull(dout))


names = ("out", "dq", "dk", "dv")
found = {n: np.asarray(a, np.float32) for n, a in zip(names, run(x, dout), strict=True)}
np.savez(sys.argv[2], allow_pickle=False, **found)
sys.stdout.write(json.dumps(dict(heedful.counters)) + "\n")
