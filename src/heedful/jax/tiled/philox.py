"""The dropout mask of one tile in JAX, bit for bit that of `reference.philox`.

All in uint32: JAX has no 64-bit integers unless it is told to.
"""

from jax import Array, lax
from jax import numpy as jnp

# Philox4x32-10 (Salmon et al., SC 2011), as in heedful.reference.philox.
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_HALF = 0xFFFF


def keep_threshold(dropout_p: float) -> int:
    """A word below this is kept: 2^32 (every word) at p = 0, 0 (none) at p = 1."""
    return int((1.0 - dropout_p) * 2.0**32)


def keep_scale(dropout_p: float) -> float:
    """The factor of kept probabilities; at p = 1 nothing is kept, and 0 avoids 0/0."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def keep_tile(seed: Array, dropout_p: float, batch, heads, rows, cols) -> Array:
    """Which scores of a tile survive: bool (heads, rows, cols).

    seed: uint32 (2,), the low word first. batch: uint32 (); heads, rows, cols: uint32 vectors, the
    indices in the whole problem, modulo 2^32.
    """
    threshold = keep_threshold(dropout_p)
    shape = (heads.shape[0], rows.shape[0], cols.shape[0])
    if threshold >= 2**32:
        return jnp.ones(shape, bool)
    counter = ((cols >> 2)[None, None], rows[None, :, None], heads[:, None, None], batch)
    words = jnp.stack(philox4x32((seed[0], seed[1]), counter, shape))
    picked = jnp.take_along_axis(words, (cols & 3).astype(jnp.int32)[None, None, None, :], axis=0)
    return picked[0] < jnp.uint32(threshold)


def philox4x32(key: tuple, counter: tuple, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Ten rounds on uint32 arrays that broadcast to `shape`; the four words."""
    words = tuple(jnp.broadcast_to(word, shape) for word in counter)

    def one(_, state):
        (c0, c1, c2, c3), (k0, k1) = state
        high0, low0 = _wide_product(c0, MULTIPLIERS[0])
        high1, low1 = _wide_product(c2, MULTIPLIERS[1])
        mixed = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        return mixed, (k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1]))

    # A loop compiles in a fraction of the time of ten rounds.
    return lax.fori_loop(0, ROUNDS, one, (words, key))[0]


def _wide_product(x: Array, factor: int) -> tuple[Array, Array]:
    """High and low word of x * factor, from products of 16-bit halves."""
    half = jnp.uint32(_HALF)
    f0, f1 = jnp.uint32(factor & _HALF), jnp.uint32(factor >> 16)
    x0, x1 = x & half, x >> 16
    middle = x1 * f0 + (x0 * f0 >> 16)
    low_middle = x0 * f1 + (middle & half)
    return x1 * f1 + (middle >> 16) + (low_middle >> 16), x * jnp.uint32(factor)
