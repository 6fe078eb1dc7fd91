"""Training steps of twelve layers under JAX, over two sets of weights in turn: jax_step.py FILE.

Writes the weights there. Says what JAX's persistent cache missed and what was compiled.
"""

import sys
from collections import Counter

import jax
import numpy as np
from jax import numpy as jnp

import heedful.jax
from heedful.launch.compiler import counters

LAYERS, BATCH, ROWS, HEADS, DIM = 12, 2, 256, 8, 64
WIDTH = HEADS * DIM


def model(weights, x):
    for into, back in weights:
        mean = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
        normed = (x / jnp.sqrt(mean + 1e-6)).astype(x.dtype)
        packed = (normed @ into).reshape(BATCH, ROWS, 3 * HEADS, DIM)
        q, k, v = jnp.split(packed, 3, 2)
        out = heedful.jax.flash_attn_func(q, k, v, causal=True, deterministic=True)
        x = x + out.reshape(BATCH, ROWS, WIDTH) @ back
    return x


@jax.jit
def step(weights, x):
    loss = lambda weights: (model(weights, x).astype(jnp.float32) ** 2).mean()  # noqa: E731
    gradients = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), weights, gradients)


def main(file: str) -> None:
    missed: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: missed.update([event]))
    drawn = np.random.RandomState(0)

    def normal(*shape: int, scale: float = 1.0):
        return jnp.asarray(drawn.randn(*shape) * scale, jnp.bfloat16)

    layers = [
        (normal(WIDTH, 3 * WIDTH, scale=0.02), normal(WIDTH, WIDTH, scale=0.02))
        for _ in range(LAYERS)
    ]
    sets = [layers, jax.tree.map(jnp.copy, layers)]
    inputs = [normal(BATCH, ROWS, WIDTH) for _ in sets]
    for number in range(6):
        sets[number % 2] = step(sets[number % 2], inputs[number % 2])
    leaves = [np.asarray(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(sets)]
    np.savez(file, *leaves)
    misses = missed["/jax/compilation_cache/cache_misses"]
    sys.stdout.write(f"misses {misses}, compiles {counters['compiles']}\n")


if __name__ == "__main__":
    main(sys.argv[1])
