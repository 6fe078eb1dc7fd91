"""The demo's GPT in JAX: `python -m heedful.demo.in_jax` trains it on the demo's text.

Weights have the names and shapes of the PyTorch model's, so that either can take the other's.
Dimension key: B batch, S characters, H heads, D head dim, C model width, V vocabulary.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from heedful.demo.topics import HELD_OUT, numbered
from heedful.jax import flash_attn_func

Weights = dict[str, Array]


@dataclass(frozen=True)
class Size:
    """The size of a model, as the PyTorch demo has it."""

    layers: int = 3
    heads: int = 4
    head_dim: int = 32
    context: int = 128

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def new_weights(size: Size, vocabulary: int, key: Array) -> Weights:
    """Weights before training: normal, norms at 1; what is added to the residual stream starts
    smaller, the more layers add."""
    width = size.width
    shapes = {"characters.weight": (vocabulary, width), "norm.weight": (width,)}
    for layer in range(size.layers):
        key_of = {
            "norm_attention": (width,),
            "norm_mlp": (width,),
            "qkv": (3 * width, width),
            "project": (width, width),
            "widen": (4 * width, width),
            "narrow": (width, 4 * width),
        }
        shapes |= {f"blocks.{layer}.{name}.weight": shape for name, shape in key_of.items()}
    weights = {}
    for (name, shape), key_of in zip(
        shapes.items(), jax.random.split(key, len(shapes)), strict=True
    ):
        adds = name.endswith(("project.weight", "narrow.weight"))
        scale = width**-0.5 * ((2 * size.layers) ** -0.5 if adds else 1.0)
        weights[name] = (
            jnp.ones(shape) if len(shape) == 1 else scale * jax.random.normal(key_of, shape)
        )
    return weights


def losses(weights: Weights, size: Size, tokens_BS: Any, next_BS: Any) -> Array:
    """Cross entropy of every character in nats, (B, S)."""
    x_BSC = weights["characters.weight"][tokens_BS]
    for layer in range(size.layers):
        x_BSC = _block(weights, f"blocks.{layer}.", size, x_BSC)
    x_BSC = _norm(x_BSC, weights["norm.weight"])
    logits_BSV = x_BSC @ weights["characters.weight"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits_BSV), next_BS[..., None], -1)[..., 0]


def _block(weights: Weights, prefix: str, size: Size, x_BSC: Array) -> Array:
    w = lambda name: weights[f"{prefix}{name}.weight"]  # noqa: E731
    rows = x_BSC.shape[:2]
    qkv = _norm(x_BSC, w("norm_attention")) @ w("qkv").T
    q, k, v = jnp.split(qkv.reshape(*rows, 3 * size.heads, size.head_dim), 3, axis=2)
    out_BSHD = flash_attn_func(_rotated(q), _rotated(k), v, causal=True)
    x_BSC = x_BSC + out_BSHD.reshape(*rows, size.width) @ w("project").T
    hidden = jax.nn.gelu(_norm(x_BSC, w("norm_mlp")) @ w("widen").T, approximate=True)
    return x_BSC + hidden @ w("narrow").T


def _norm(x: Array, weight: Array) -> Array:
    """RMSNorm, with the eps that PyTorch takes by default."""
    eps = jnp.finfo(x.dtype).eps
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight[None, None]


def _rotated(x_BSHD: Array) -> Array:
    """Rotary embedding (Su et al. 2021), halves of the head dim as the pairs."""
    length, dim = x_BSHD.shape[1], x_BSHD.shape[-1]
    angles = jnp.arange(length)[:, None] * 10000.0 ** -(jnp.arange(0, dim, 2)[None] / dim)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    one, other = jnp.split(x_BSHD, 2, -1)
    return jnp.concatenate((one * cos - other * sin, one * sin + other * cos), -1)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(size: Size, weights: Weights, moments: Any, batch: tuple, step, rate):
    """One step of Adam (Kingma & Ba 2015); (loss, weights, moments)."""

    def loss(weights):
        return losses(weights, size, *batch).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    square = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g * g, moments[1], grads)
    fix, fix_square = 1 - 0.9**step, 1 - 0.95**step

    def moved(w, m, s):
        return w - rate * (m / fix) / (jnp.sqrt(s / fix_square) + 1e-6)

    return value, jax.tree.map(moved, weights, mean, square), (mean, square)


def windows(tokens: np.ndarray, size: int, length: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Random windows (size, length) and the characters that follow each of theirs."""
    rows = rng.integers(len(tokens) - length - 1, size=size)[:, None] + np.arange(length)
    return tokens[rows], tokens[rows + 1]


def main(steps: int = 200, batch: int = 8, size: Size = Size()) -> float:
    """Trains, and prints the loss as it goes; returns that of the held-out text."""
    vocabulary, numbers = numbered()
    tokens = np.array(numbers, np.int32)
    cut = int(len(tokens) * (1 - HELD_OUT))
    weights = new_weights(size, len(vocabulary), jax.random.key(1))
    zeros = lambda: jax.tree.map(jnp.zeros_like, weights)  # noqa: E731
    moments, rng = (zeros(), zeros()), np.random.default_rng(1)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        rate = 2e-3 * min(1.0, step / (0.1 * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
        batches = windows(tokens[:cut], batch, size.context, rng)
        loss, weights, moments = train_step(size, weights, moments, batches, float(step), rate)
        if step == 1 or step % 50 == 0:
            seconds = time.perf_counter() - begin
            _say(f"step {step:4}  loss {float(loss):.3f} nats a character  {seconds:.0f} s")
    held_out = windows(tokens[cut:], batch, size.context, rng)
    value = float(losses(weights, size, *held_out).mean())
    _say(f"held out   loss {value:.3f}")
    return value


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="trains the demo's GPT in JAX")
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
