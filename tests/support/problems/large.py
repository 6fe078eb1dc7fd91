"""Random problems of the sizes that people run, for the GPU: many tiles a program, or hardly any
tile that sees a key.

Such problems are too large for the oracle. Some rows of each are checked against float64 on the
GPU, in formulas of their own, and all rows for what needs no reference: rows that see no key are
exactly 0 with a log-sum-exp of -inf, and all others are finite. Dimension key: R sampled rows of
one head, N keys, D qk dim, E v dim.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import heedful
from heedful.core.call.mask import MaskSpec
from heedful.reference.budget import Error, allowed, rounding
from heedful.reference.eager import as_operand, twin_dtype

PROBLEMS_EACH, MOSTLY_EMPTY, MANY_TILES = 38, 9, 7
MOST_FLOPS = 1e12
MOST_BYTES = 4e9
MOST_TOKENS = 100_000
ROWS = 128
UNITS = 132  # SMs of an H200: programs that share the tiles
LAUNCHES = 10
SAMPLED_HEADS, SAMPLED_ROWS = 4, 64
DRAWS = 4


@dataclass(frozen=True)
class Variant:
    """What kernels are compiled for. packed: sequences of different lengths. pages: keys a page of
    a paged cache, 0 without. lengths: keys in use are fewer than the storage."""

    dtype: str
    dim: int
    dim_v: int
    causal: bool
    window: tuple[int, int]
    packed: bool = False
    pages: int = 0
    lengths: bool = False
    softcap: float = 0.0
    sink: bool = False

    def __str__(self) -> str:
        dims = f"d{self.dim}" + (f"v{self.dim_v}" if self.dim_v != self.dim else "")
        words = [self.dtype, dims, "causal" if self.causal else "", *self._flags()]
        if self.window != (-1, -1):
            words.insert(
                3, "window" + "".join("lr"[i] * (w >= 0) for i, w in enumerate(self.window))
            )
        return "-".join(word for word in words if word)

    def _flags(self) -> Iterator[str]:
        for name in ("packed", "pages", "lengths", "softcap", "sink"):
            if getattr(self, name):
                yield f"{name}{self.pages}" if name == "pages" else name

    @property
    def ends_right(self) -> bool:
        """Whether early queries can see no key at all."""
        return self.causal or self.window[1] >= 0


@dataclass(frozen=True)
class Problem:
    """One problem of a variant: (queries, keys) of each sequence, all alike unless packed."""

    variant: Variant
    lengths: tuple[tuple[int, int], ...]
    heads_k: int
    group: int
    window: tuple[int, int]
    seed: int

    @property
    def heads_q(self) -> int:
        return self.heads_k * self.group

    @property
    def mask(self) -> MaskSpec:
        return MaskSpec.of(self.variant.causal, self.window)

    def seen(self, len_q: int, len_k: int) -> np.ndarray:
        """How many keys each query of a sequence sees."""
        begin, end = bounds(self.mask, np.arange(len_q), len_q, len_k)
        return np.maximum(end - begin, 0)

    @property
    def flops(self) -> float:
        pairs = sum(float(self.seen(*sizes).sum()) for sizes in self.lengths)
        return pairs * self.heads_q * 2 * (self.variant.dim + self.variant.dim_v)

    @property
    def bytes(self) -> float:
        v = self.variant
        q, k = (sum(size[i] for size in self.lengths) for i in (0, 1))
        return 2 * (v.dim + v.dim_v) * (q * self.heads_q * 2 + k * self.heads_k)

    @property
    def tiles_each(self) -> float:
        """Tiles of ROWS queries a program, of a program for each SM."""
        return sum(-(-len_q // ROWS) for len_q, _ in self.lengths) * self.heads_q / UNITS

    @property
    def mostly_empty(self) -> bool:
        """Whether most tiles of ROWS queries see no key."""
        seen = [
            np.maximum.reduceat(self.seen(*sizes), np.arange(0, sizes[0], ROWS)) > 0
            for sizes in self.lengths
            if sizes[0]
        ]
        return bool(np.concatenate(seen).mean() < 0.5)

    def __str__(self) -> str:
        sizes = " ".join(f"{q}x{k}" for q, k in self.lengths[:6])
        more = "..." if len(self.lengths) > 6 else ""
        batch = f"{len(self.lengths)} of " if len(self.lengths) > 1 else ""
        return (
            f"{self.variant} {batch}{sizes}{more} h{self.heads_q}/{self.heads_k}"
            f" window {self.window} seed {self.seed}"
        )


def bounds(mask: MaskSpec, rows, len_q: int, len_k: int):
    """The first key that each row sees, and the one behind the last."""
    at = rows + mask.offset(len_q, len_k)
    end = at * 0 + len_k
    if mask.right >= 0:
        end = (at + mask.right + 1).clip(0, len_k)
    begin = (at - mask.left).clip(0, len_k) if mask.left >= 0 else at * 0
    return begin, end


def variants(count: int = 60, seed: int = 0) -> list[Variant]:
    """So many distinct ones: every head dim, every kind of mask, dense, packed, paged."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        dim, dim_v = rng.choice(
            [(64, 64), (96, 96), (128, 128), (128, 128), (192, 128), (256, 256)]
        )
        storage = rng.choice(["dense", "dense", "packed", "packed", "lengths", "pages"])
        fp8 = rng.random() < 0.15 and dim in (64, 128, 256) and storage in ("dense", "packed")
        causal = rng.random() < 0.5
        window = rng.choice([(-1, -1), (1, -1), (1, -1), (1, 1), (-1, 1)])
        variant = Variant(
            "float8_e4m3fn" if fp8 else rng.choice(["bfloat16", "bfloat16", "float16"]),
            dim,
            dim_v,
            causal,
            (window[0], -1) if causal else window,
            packed=storage == "packed",
            pages=rng.choice((16, 64)) if storage == "pages" else 0,
            lengths=storage == "lengths",
            softcap=20.0 if rng.random() < 0.15 else 0.0,
            sink=rng.random() < 0.15 and not fp8,
        )
        found.setdefault(str(variant), variant)
    return list(found.values())


def problem(variant: Variant, number: int, seed: int = 0) -> Problem:
    """One of PROBLEMS_EACH of a variant. In the order of their numbers: mostly of empty tiles,
    where a mask can make them so; over 100 tiles a program; any."""
    rng = random.Random(f"{seed} {variant} {number}")
    is_empty = number < MOSTLY_EMPTY and variant.ends_right
    is_many = 0 <= number - MOSTLY_EMPTY < MANY_TILES
    while True:
        drawn = _any(rng, variant, 4096 if is_empty else MOST_TOKENS)
        fits = drawn.bytes <= MOST_BYTES and 2 <= drawn.tiles_each <= 200
        wanted = fits and (drawn.tiles_each > 100 or not is_many)
        if wanted and (drawn.mostly_empty or not is_empty) and drawn.flops <= MOST_FLOPS:
            return drawn


def _any(rng: random.Random, variant: Variant, longest_k: int) -> Problem:
    def length(least: int, most: int) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    heads_k, group = rng.choice((1, 2, 3, 4, 8, 16)), rng.choice((1, 1, 2, 4, 5, 8))
    batch = rng.choice((1, 1, 2, 3, 8))
    if variant.packed:
        count = rng.choice((1, 3, 17, 100, 400))
        most = max(2, 2 * MOST_TOKENS // count)
        lengths = [(length(1, most), length(1, min(most, longest_k))) for _ in range(count)]
        lengths = [(q * (rng.random() > 0.1), k * (rng.random() > 0.1)) for q, k in lengths]
        if sum(q for q, _ in lengths) == 0 or sum(k for _, k in lengths) == 0:
            lengths[0] = (128, 128)
    else:
        lengths = [(length(64, MOST_TOKENS), length(1, longest_k))] * batch
    left, right = (length(1, 2000) - 1 if w >= 0 else -1 for w in variant.window)
    return Problem(variant, tuple(lengths), heads_k, group, (left, right), rng.randrange(2**31))


@dataclass
class Inputs:
    """Tensors of a problem, packed: (tokens, heads, dim); what a call is given beside them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: torch.Tensor | None


def build(problem: Problem, device: str = "cuda") -> Inputs:
    """Scores have a standard deviation of 1."""
    drawn = torch.Generator(device).manual_seed(problem.seed)
    dtype = getattr(torch, problem.variant.dtype)
    plain = torch.bfloat16 if dtype.itemsize == 1 else dtype

    def some(tokens, heads, dim):
        x = torch.randn(tokens, heads, dim, generator=drawn, device=device, dtype=plain)
        return x.to(dtype)

    q, k = (sum(size[i] for size in problem.lengths) for i in (0, 1))
    v = problem.variant
    sink = torch.randn(problem.heads_q, generator=drawn, device=device) if v.sink else None
    return Inputs(
        some(q, problem.heads_q, v.dim),
        some(k, problem.heads_k, v.dim),
        some(k, problem.heads_k, v.dim_v),
        sink,
    )


def call(problem: Problem, x: Inputs, backend: str) -> Callable[[torch.Tensor | None], tuple]:
    """The public call of a problem: a function of `out` that returns (out, lse), out (tokens,
    heads, dim) and lse (heads, tokens)."""
    variant, count = problem.variant, len(problem.lengths)
    len_q, len_k = problem.lengths[0]
    device = x.q.device
    options: dict[str, Any] = {
        "causal": variant.causal,
        "window_size": problem.window,
        "backend": backend,
    }
    options |= {"softcap": variant.softcap, "sink": x.sink, "return_lse": True, "num_splits": 1}
    if variant.packed:
        sizes = list(zip(*problem.lengths, strict=True))
        cu_q, cu_k = (
            torch.tensor([0, *np.cumsum(s)], dtype=torch.int32, device=device) for s in sizes
        )
        most_q, most_k = (max(s) for s in sizes)

        def packed(out):
            return heedful.flash_attn_varlen_func(
                x.q, x.k, x.v, cu_q, cu_k, most_q, most_k, out=out, **options
            )

        return packed
    q, k, v = (t.unflatten(0, (count, -1)) for t in (x.q, x.k, x.v))
    if not (variant.lengths or variant.pages):

        def dense(out):
            out = None if out is None else out.view(*q.shape[:3], -1)
            out, lse = heedful.flash_attn_func(q, k, v, out=out, **options)
            return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

        return dense
    options["return_softmax_lse"] = options.pop("return_lse")
    options["cache_seqlens"] = torch.full((count,), len_k, dtype=torch.int32, device=device)
    if variant.pages:
        k, v, options["block_table"] = _paged(problem, k, v)
    else:
        k, v = (torch.cat([t, torch.full_like(t[:, :33], torch.nan)], 1) for t in (k, v))

    def cached(out):
        out = None if out is None else out.view(*q.shape[:3], -1)
        out, lse = heedful.flash_attn_with_kvcache(q, k, v, out=out, **options)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    return cached


def _paged(problem: Problem, k: torch.Tensor, v: torch.Tensor):
    """Keys and values in shuffled pages, NaN where no key is, and the table."""
    size, (count, len_k) = problem.variant.pages, k.shape[:2]
    each = -(-len_k // size)
    drawn = torch.Generator(k.device).manual_seed(problem.seed)
    table = torch.randperm(count * each, generator=drawn, device=k.device).view(count, each)

    def pages(x):
        filled = x.new_full((count, each * size, *x.shape[2:]), torch.nan)
        filled[:, :len_k] = x
        spread = torch.empty_like(filled).view(count * each, size, *x.shape[2:])
        spread[table.flatten()] = filled.view_as(spread)
        return spread

    return pages(k), pages(v), table.int()


def exact_and_twin(problem: Problem, x: Inputs, sequence: int, head: int, rows: torch.Tensor):
    """Of some rows of one head, (R, E + 1) with lse behind out: the truth in float64, and what
    eager PyTorch makes of it, which rounds each intermediate to the dtype."""
    len_q, len_k = problem.lengths[sequence]
    start_q, start_k = (sum(s[i] for s in problem.lengths[:sequence]) for i in (0, 1))
    q_RD = x.q[start_q + rows, head]
    k_ND, v_NE = (t[start_k : start_k + len_k, head // problem.group] for t in (x.k, x.v))
    begin_R, end_R = bounds(problem.mask, rows, len_q, len_k)
    key_N = torch.arange(len_k, device=rows.device)
    seen_RN = (key_N >= begin_R[:, None]) & (key_N < end_R[:, None])
    sink = q_RD.new_full((), -torch.inf, dtype=torch.float32) if x.sink is None else x.sink[head]
    return tuple(
        _attention(problem, q_RD, k_ND, v_NE, seen_RN, sink, is_twin) for is_twin in (0, 1)
    )


def _attention(problem, q_RD, k_ND, v_NE, seen_RN, sink, is_twin):
    stored = q_RD.dtype
    wide = torch.float32 if is_twin else torch.float64
    narrow = twin_dtype(stored) if is_twin else wide
    q_RD, k_ND, v_NE, sink = (t.to(wide) for t in (q_RD, k_ND, v_NE, sink))
    s_RN = (q_RD @ k_ND.T).to(narrow) * problem.variant.dim**-0.5
    if problem.variant.softcap:
        s_RN = torch.tanh(s_RN / problem.variant.softcap) * problem.variant.softcap
    s_RN = s_RN.masked_fill(~seen_RN, -torch.inf).to(wide)
    # The sink is a key that has no value.
    lse_R = torch.logsumexp(torch.cat([s_RN, sink.expand(len(s_RN), 1)], 1), 1)
    p_RN = torch.exp(s_RN - lse_R.masked_fill(lse_R == -torch.inf, 0.0)[:, None]).to(narrow)
    p_RN = (as_operand(p_RN, stored) if is_twin else p_RN).to(wide)
    out_RE = (p_RN @ v_NE).to(narrow)
    return torch.cat([out_RE.double(), lse_R.double()[:, None]], 1)


def check(problem: Problem, x: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """AssertionError unless all rows are sound and sampled ones within their budget."""
    wrong = _of_all_rows(problem, x, out, lse)
    assert not wrong, f"{problem}: {wrong}"
    rng = random.Random(problem.seed)
    got, exact, eager = _sampled(rng, problem, x, out, lse)
    twin = _errors(eager, exact)
    for _ in range(DRAWS):
        wrong = _over(problem, got, exact, twin)
        if not wrong:
            return
        # The largest of a few rounding errors varies: what eager PyTorch errs by elsewhere counts.
        _, other, eager = _sampled(rng, problem, x, out, lse)
        twin = [a.worst(b) for a, b in zip(twin, _errors(eager, other), strict=True)]
    raise AssertionError(f"{problem}: {wrong}")


def _sampled(rng: random.Random, problem: Problem, x: Inputs, out, lse) -> np.ndarray:
    """Of rows of some heads what was got, the truth and the twin's: (3, R, E + 1)."""
    filled = [i for i, (len_q, _) in enumerate(problem.lengths) if len_q]
    rng.shuffle(filled)
    found = []
    for sample in range(SAMPLED_HEADS):
        sequence, head = filled[sample % len(filled)], rng.randrange(problem.heads_q)
        rows = torch.tensor(_rows(rng, *problem.lengths[sequence]), device=out.device)
        token = sum(len_q for len_q, _ in problem.lengths[:sequence]) + rows
        got = torch.cat([out[token, head].double(), lse[head, token].double()[:, None]], 1)
        found.append(torch.stack([got, *exact_and_twin(problem, x, sequence, head, rows)]))
    return torch.cat(found, 1).cpu().numpy()


def _rows(rng: random.Random, len_q: int, len_k: int) -> list[int]:
    """Some rows of a sequence, those at both ends and where a mask's diagonal begins."""
    edge = len_q - len_k
    rows = {0, len_q - 1, *(min(max(edge + d, 0), len_q - 1) for d in (-1, 0, 1))}
    rows |= {rng.randrange(len_q) for _ in range(SAMPLED_ROWS - len(rows))}
    return sorted(rows)


def _errors(got: np.ndarray, want: np.ndarray) -> list[Error]:
    """Of out and of lse."""
    return [Error.between(got[:, part], want[:, part]) for part in (slice(-1), slice(-1, None))]


def _over(problem: Problem, got: np.ndarray, want: np.ndarray, twin: list[Error]) -> str:
    out = str(twin_dtype(getattr(torch, problem.variant.dtype))).removeprefix("torch.")
    parts = (("out", out, want[:, :-1]), ("lse", "float32", want[:, -1:]))
    for (name, dtype, exact), error, eager in zip(parts, _errors(got, want), twin, strict=True):
        budget = allowed(name, eager, rounding(exact, dtype))
        if not error.within(budget):
            return f"{name}: {error} exceeds {budget}"
    return ""


def _of_all_rows(problem: Problem, x: Inputs, out: torch.Tensor, lse: torch.Tensor) -> str:
    """What is wrong with any row, in words. One look at the device, which others may share."""
    seen = np.concatenate([problem.seen(*sizes) for sizes in problem.lengths])
    blind = torch.from_numpy(seen == 0).to(out.device)
    nothing = out.new_full((1, 1), -torch.inf, dtype=torch.float32)
    nothing = nothing if x.sink is None else x.sink[:, None]
    # The sink's logit goes through base 2 and back. Two constants, two products and a sum of zero
    # are rounded, each by half of eps at most.
    is_nothing = torch.isclose(lse, nothing, rtol=5 * torch.finfo(lse.dtype).eps / 2, atol=0.0)
    wrong = {
        "out is not finite": ~torch.isfinite(out),
        "a row that sees no key is not 0": blind[:, None, None] & (out != 0),
        "a row that sees no key has a log-sum-exp": blind & ~is_nothing,
        "lse is not finite": ~blind & ~torch.isfinite(lse),
    }
    found = torch.stack([any_wrong.any() for any_wrong in wrong.values()]).tolist()
    return "; ".join(words for words, is_wrong in zip(wrong, found, strict=True) if is_wrong)


def run(problem: Problem, backend: str, device: str = "cuda") -> None:
    """LAUNCHES calls in a row, of equal bits, all but the first into an output that held NaN."""
    # What the last problem took is for other processes on the device, too.
    torch.cuda.empty_cache()
    x = build(problem, device)
    attend = call(problem, x, backend)
    first = attend(None)
    out = torch.full_like(first[0], torch.nan)
    for _ in range(LAUNCHES - 1):
        last = attend(out)
    assert torch.equal(first[0], last[0]) and torch.equal(first[1], last[1]), f"{problem}: bits"
    check(problem, x, *last)


def takes(variant: Variant, backend: str, triton: tuple[int, ...]) -> bool:
    """Whether the backend has a kernel for it."""
    return variant.dtype != "float8_e4m3fn" or (backend == "hopper" and triton >= (3, 9))
