"""Problems for code objects of ROCm/aiter: their arguments, and what they should compute.

The argument segments follow the structs of aiter's host code (csrc): one slot of 16 bytes each, so
that `@32` names the third. The objects themselves are not part of this repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heedful.emulator.floats import FP8, bf16_bits, bf16_values, fp8_bits

# One unit of roundoff of the narrowest format on the way to an output.
UNITS = {"bf16": 2.0**-8, "fp8": 2.0**-4}
TRUNCATED = 2.0**-7
_NAN = {"bf16": 0x7FC0}


@dataclass
class Problem:
    """One launch: values by slot, the grid, outputs with what they should be.

    Attributes:
        outputs: name to (array, its format, what it should hold, the bound of its error).
        after: what has to run on the outputs before they are compared.
    """

    grid: tuple[int, ...]
    slots: list[Any]
    outputs: dict[str, tuple[np.ndarray, str, np.ndarray, float]]
    threads: int
    after: list[Callable] = field(default_factory=list)

    def arguments(self) -> dict[str, Any]:
        """Values by the offsets of their slots."""
        return {f"@{16 * i}": value for i, value in enumerate(self.slots)}

    def errors(self) -> dict[str, tuple[float, float]]:
        """Relative rms error and its bound, by output; an output with a NaN has an infinite one."""
        found = {}
        for name, (array, kind, wanted, bound) in self.outputs.items():
            got = decoded(array, kind)
            error = np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))
            found[name] = (float("inf") if np.isnan(error) else float(error), bound)
        return found


def decoded(array: np.ndarray, kind: str, arch: str = "gfx950") -> np.ndarray:
    """Stored numbers as float64."""
    if kind == "bf16":
        return bf16_values(array).astype(np.float64)
    if kind == "fp8":
        return FP8[arch]["fp8"][array].astype(np.float64)
    return array.astype(np.float64)


class Operands:
    """Random operands of one problem, reproducible."""

    def __init__(self, arch: str, seed: int = 0):
        self.arch, self.rng = arch, np.random.default_rng(seed)

    def make(self, kind: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        """Normal values as they are stored, and as float64."""
        x = self.rng.standard_normal(shape).astype(np.float32)
        if kind == "fp8":
            bits = fp8_bits(x, FP8[self.arch]["fp8"]).astype(np.uint8)
        else:
            bits = bf16_bits(x).astype(np.uint16)
        return bits, decoded(bits, kind, self.arch)


def unwritten(*shape: int) -> np.ndarray:
    """bfloat16 output that holds NaN."""
    return np.full(shape, _NAN["bf16"], np.uint16)


def softmax(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and log-sum-exp over the last axis."""
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return p / total, (np.log(total) + top)[..., 0]


def scores(q: np.ndarray, k: np.ndarray, scale: float, causal: bool) -> np.ndarray:
    """Scaled products of (heads, tokens, dim); the mask is aligned to the last key."""
    s = scale * np.einsum("hqd,hkd->hqk", q, k)
    if causal:
        queries, keys = s.shape[1:]
        s[:, np.arange(keys)[None] > np.arange(queries)[:, None] + keys - queries] = -np.inf
    return s


def forward(
    arch: str,
    lengths_q: list[int],
    lengths_k: list[int],
    heads: int = 1,
    heads_k: int = 1,
    dims: tuple[int, int] = (128, 128),
    kind: str = "bf16",
    causal: bool = False,
    group: bool = False,
    tile: int = 256,
    unit: float = 0.0,
    reference: bool = True,
) -> Problem:
    """fmha_v3_fwd: a batch of equal lengths in (batch, head, token, dim), or a packed group in
    (token, head, dim). Without a reference its outputs should be 0, which nobody may compare."""
    make = Operands(arch).make
    d, dv = dims
    batch, (sq, sk) = len(lengths_q), (max(lengths_q), max(lengths_k))
    starts_q, starts_k = (np.cumsum([0, *n]).astype(np.int32) for n in (lengths_q, lengths_k))
    if group:
        shapes = [(starts_q[-1], heads, d), (starts_k[-1], heads_k, d), (starts_k[-1], heads_k, dv)]
        o, lse = unwritten(starts_q[-1], heads, dv), np.full((heads, starts_q[-1]), np.nan, "f4")
    else:
        shapes = [(batch, heads, sq, d), (batch, heads_k, sk, d), (batch, heads_k, sk, dv)]
        o, lse = unwritten(batch, heads, sq, dv), np.full((batch, heads, sq), np.nan, "f4")
    (q, qf), (k, kf), (v, vf) = (make(kind, *shape) for shape in shapes)
    descale = {"q": 0.5, "k": 0.75, "v": 1.25} if kind == "fp8" else dict.fromkeys("qkv", 1.0)
    scale, wanted, wanted_lse = d**-0.5, np.zeros(o.shape), np.zeros(lse.shape)
    for b in range(batch if reference else 0):
        if group:
            at_q, at_k = (slice(s[b], s[b + 1]) for s in (starts_q, starts_k))
            parts = qf[at_q].swapaxes(0, 1), kf[at_k].swapaxes(0, 1), vf[at_k].swapaxes(0, 1)
        else:
            parts = qf[b], kf[b], vf[b]
        qb, kb, vb = parts[0], *(np.repeat(x, heads // heads_k, 0) for x in parts[1:])
        p, total = softmax(scores(qb, kb, scale * descale["q"] * descale["k"], causal))
        out = descale["v"] * (p @ vb)
        if group:
            wanted[at_q], wanted_lse[:, at_q] = out.swapaxes(0, 1), total
        else:
            wanted[b], wanted_lse[b] = out, total

    def strides(x: np.ndarray) -> tuple[int, int, int]:
        """Of a token, a head and a sequence, in bytes."""
        if group:
            return x.strides[0], x.strides[1], 0
        return x.strides[2], x.strides[1], x.strides[0]

    option = 5 - 2 * (causal and heads % 8 != 0)
    if dims == (192, 128) and arch == "gfx942":
        option = 0
    (tq, hq, bq), (tk, hk, bk), (tv, hv, bv), (to, ho, bo) = map(strides, (q, k, v, o))
    sequences = [starts_q, starts_k] if group else [None, None]
    slots = [o, q, k, v, lse, np.float32(scale), sq, tq, tile * tq, hq, bq, heads // heads_k]
    slots += [tk, hk, bk, option, 1, sk, d, dv, heads, tv, hv, bv, to, ho, bo]
    slots += [*sequences, lse.strides[0 if group else 1], *sequences]
    slots += [np.array([descale[x]], np.float32) if kind == "fp8" else None for x in "qkv"]
    slots += [0] * 6
    tiles = -(-sq // tile)
    halves = 2 if causal and not (arch == "gfx942" and dims == (192, 128)) else 1
    grid = (-(-tiles // halves), heads, batch)
    if arch == "gfx942" and dims == (192, 128):
        grid = (heads, tiles, batch)
    if group:
        grid = (heads, batch, -(-tiles // halves))
    outputs = {
        "o": (o, "bf16", wanted, unit or UNITS[kind]),
        "lse": (lse, "f32", wanted_lse, unit or UNITS[kind]),
    }
    return Problem(grid, slots, outputs, 256 if dims == (192, 128) else 512)


def backward(
    arch: str,
    sq: int,
    sk: int,
    heads: int = 1,
    heads_k: int = 1,
    batch: int = 1,
    causal: bool = False,
    atomic: int = 32,
    tile: int = 256,
    reference: bool = True,
) -> Problem:
    """fmha_v3_bwd with head dim 128: dK, dV, and dQ added up in float32 or bfloat16. Without a
    reference `lse` is 0 and so is what the outputs should be."""
    make, d = Operands(arch).make, 128
    (q, qf), (k, kf), (v, vf), (do, dof) = (
        make("bf16", batch, n, s, d)
        for n, s in ((heads, sq), (heads_k, sk), (heads_k, sk), (heads, sq))
    )
    scale, repeat = d**-0.5, heads // heads_k
    gradients = [np.zeros((batch, heads, n, d)) for n in (sq, sk, sk)]
    lse, delta = (np.zeros((batch, heads, sq), np.float32) for _ in range(2))
    for b in range(batch if reference else 0):
        kb, vb = np.repeat(kf[b], repeat, 0), np.repeat(vf[b], repeat, 0)
        p, lse[b] = softmax(scores(qf[b], kb, scale, causal))
        delta[b] = ((p @ vb) * dof[b]).sum(-1)
        ds = p * (dof[b] @ vb.swapaxes(1, 2) - delta[b][..., None])
        gradients[0][b] = scale * (ds @ kb)
        gradients[1][b] = scale * (ds.swapaxes(1, 2) @ qf[b])
        gradients[2][b] = p.swapaxes(1, 2) @ dof[b]
    rows = -(-sq // 16) * 16 if atomic == 16 and arch == "gfx950" else sq
    dq = np.zeros((batch, heads, rows, d), np.float32 if atomic == 32 else np.uint16)
    dk, dv = unwritten(batch, heads, sk, d), unwritten(batch, heads, sk, d)

    def strides(x: np.ndarray) -> tuple[int, int, int]:
        """Of a head, a sequence and a token, in bytes."""
        return x.strides[1], x.strides[0], x.strides[2]

    slots = [dq, dk, dv, q, k, v, do, lse, delta, np.float32(scale), np.float32(np.log2(np.e))]
    slots += [sq, tile * k.strides[2], *strides(q), repeat, *strides(k), dk.strides[2], sk, d, d]
    slots += [heads, *strides(v), *strides(do), *strides(dk)[:2], *strides(dv)]
    slots += [lse.strides[1], None, None, None, None, -(-sq // 16) * 16 if atomic == 16 else sq]
    slots += [0, 0]
    tiles = -(-sk // tile)
    # Each of the tiles rounds the sum of dQ where that is kept in bfloat16.
    roundings = 1 if atomic == 32 else tiles
    outputs = {
        "dq": (dq, "f32" if atomic == 32 else "bf16", gradients[0], roundings * UNITS["bf16"]),
        "dk": (dk, "bf16", gradients[1], UNITS["bf16"]),
        "dv": (dv, "bf16", gradients[2], UNITS["bf16"]),
    }
    return Problem((-(-tiles // (1 + causal)), heads, batch), slots, outputs, 256)
