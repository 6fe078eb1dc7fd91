"""Batches of prefills and decodes in one call, beside a call of each kind.

Part of `python -m heedful.bench.steps`, where their names begin with "mixed". Every result is
checked against float64 before it is timed and after each round; what is wrong gets its reason and
no figure. Rounds are interleaved, each call has a cold L2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from heedful import flash_attn_varlen_func
from heedful.bench import timing
from heedful.bench.cases import Case
from heedful.bench.check import in_words
from heedful.bench.exact import Operands, eager, exact
from heedful.core.mask import MaskSpec
from heedful.core.problem import AttentionProblem
from heedful.reference.budget import Error, allowed

One = Callable[[], Tensor]
# Of two calls the results of both.
Call = Callable[[], Tensor | list[Tensor]]
Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """decodes, prefills: (queries, keys) of each sequence, decodes first, as engines put them.
    heads: of queries and keys. page: keys of a page; pages lie shuffled. most: of the time of two
    calls, one of each kind, that the one call is to take; 0 = no bar."""

    name: str
    decodes: Lengths
    prefills: Lengths
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    page: int = 16
    most: float = 0.0

    @property
    def sequences(self) -> Lengths:
        return self.decodes + self.prefills


_PREFILLS = ((2048, 2048),) * 4
BATCHES = (
    Batch("mixed 124 x 4096 + 4 x 2048", ((1, 4096),) * 124, _PREFILLS, most=1.05),
    Batch("mixed 124 x 4096 + 4 x 2048, pages of 64", ((1, 4096),) * 124, _PREFILLS, page=64),
    Batch("mixed 124 x 4096 of 4 tokens + 4 x 2048", ((4, 4096),) * 124, _PREFILLS),
    Batch("mixed 124 x 4096 of 16 tokens + 4 x 2048", ((16, 4096),) * 124, _PREFILLS),
    Batch(
        "mixed 63 x 1024 to 65536 + 512 tokens of 8192",
        tuple((1, 1024 << number % 7) for number in range(63)),
        ((512, 8192),),
        most=1.05,
    ),
    Batch("mixed 1 x 32768 + 1 x 2048", ((1, 32768),), ((2048, 2048),), most=1.05),
    # Sizes say that some may be short, and none is: what an empty launch costs.
    Batch("mixed 0 + 8 x 300 to 2048", (), tuple((n, n) for n in (2048, *range(900, 200, -100)))),
)


class Tensors(NamedTuple):
    """q (T, H, D); k, v (pages, page, G, D); table (B, pages of a sequence); cu_q (B + 1,); used
    (B,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    cu_q: Tensor
    used: Tensor


def draw(batch: Batch, device: torch.device, seed: int = 0) -> Tensors:
    """Normal values; pages in an order of their own."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    counts = [-(-keys // batch.page) for _, keys in batch.sequences]
    order = torch.randperm(sum(counts), generator=generator, device=device).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, own in zip(table, order.split(counts), strict=True):
        row[: len(own)] = own
    queries, keys = zip(*batch.sequences, strict=True)
    heads, heads_k = batch.heads
    cache = (sum(counts), batch.page, heads_k, batch.dim)
    return Tensors(
        normal(sum(queries), heads, batch.dim),
        normal(*cache),
        normal(*cache),
        table,
        torch.tensor([0, *queries], device=device).cumsum(0).int(),
        torch.tensor(keys, dtype=torch.int32, device=device),
    )


class Part(NamedTuple):
    """What is compared of a sequence and a KV head: packed rows, heads, their truth (H, R, D)."""

    kind: str
    rows: Tensor
    heads: slice
    truth: Tensor


class Checker:
    """The reference of some rows of some sequences: of each kind the first, the last, those of the
    fewest and of the most keys. Each kind has a budget of its own."""

    def __init__(self, batch: Batch, t: Tensors):
        self._shape = tuple(t.q.shape)
        self._parts: list[Part] = []
        self._budgets: dict[str, Error] = {}
        bounds = [int(bound) for bound in t.cu_q]
        ends = dict(enumerate(pairwise(bounds)))
        middle = len(batch.decodes)
        for kind, numbers in (
            ("decode", range(middle)),
            ("prefill", range(middle, len(batch.sequences))),
        ):
            if numbers:
                by_keys = sorted(numbers, key=lambda b: batch.sequences[b][1])
                chosen = dict.fromkeys((numbers[0], numbers[-1], by_keys[0], by_keys[-1]))
                self._add(batch, t, kind, {b: ends[b] for b in chosen})

    def _add(self, batch: Batch, t: Tensors, kind: str, bounds: dict[int, tuple[int, int]]) -> None:
        errors, sizes, (heads, heads_k) = [], [], batch.heads
        group, device = heads // heads_k, t.q.device
        mask = MaskSpec.of(True)
        for b, (begin, end) in bounds.items():
            keys, count = batch.sequences[b][1], end - begin
            # Rows that see at least half of the keys, whose values are of one size.
            rows = torch.tensor(sorted({count // 2, count - 1}), device=device)
            shape = (1, count, keys, heads, heads_k, batch.dim)
            case = Case("decode", AttentionProblem.dense(*shape, mask=mask))
            k, v = (x[t.table[b]].flatten(0, 1)[:keys] for x in (t.k, t.v))
            for g in range(heads_k):
                own = slice(g * group, (g + 1) * group)
                x = Operands(t.q[begin:end, own].transpose(0, 1), k[:, g], v[:, g])
                truth, twin = (of(case, x, rows, rows).out for of in (exact, eager))
                assert truth is not None
                assert twin is not None
                self._parts.append(Part(kind, begin + rows, own, truth))
                errors.append(_error(twin.double() - truth))
                sizes.append(_error(truth))
        half_eps = torch.finfo(torch.bfloat16).eps / 2
        size, worst = (
            Error(max(e.largest for e in found), max(e.rms for e in found))
            for found in (sizes, errors)
        )
        once = Error(half_eps * size.largest, half_eps * size.rms)
        self._budgets[kind] = allowed("out", worst, once)

    def why_wrong(self, out: Tensor) -> str | None:
        """What is no result or outside of its budget, or None."""
        if tuple(out.shape) != self._shape:
            return f"out has shape {tuple(out.shape)}, not {self._shape}"
        if not out.isfinite().all():
            return "out is not finite"
        for part in self._parts:
            error = _error(out[part.rows, part.heads].transpose(0, 1).double() - part.truth)
            if not error.within(self._budgets[part.kind]):
                budget = self._budgets[part.kind]
                return f"{part.kind}, rows {part.rows.tolist()}: {error} exceeds {budget}"
        return None


def _error(difference: Tensor) -> Error:
    return Error(float(difference.abs().max()), float(difference.square().mean().sqrt()))


def attend(batch: Batch, t: Tensors, which: slice, backend: str | None = None) -> One | None:
    """One call of these sequences; None if there are none."""
    lengths = batch.sequences[which]
    if not lengths:
        return None
    first = which.start or 0
    begin, end = int(t.cu_q[first]), int(t.cu_q[first + len(lengths)])
    q, table, used = t.q[begin:end], t.table[which], t.used[which]
    cu_q = t.cu_q[first : first + len(lengths) + 1] - begin
    longest = [max(column) for column in zip(*lengths, strict=True)]
    options = {"causal": True, "block_table": table, "seqused_k": used, "backend": backend}
    return lambda: flash_attn_varlen_func(q, t.k, t.v, cu_q, None, *longest, **options)


def calls_of(batch: Batch, t: Tensors) -> dict[str, Call]:
    """Who is timed."""
    middle, all_ = len(batch.decodes), slice(0, len(batch.sequences))
    one, forward = attend(batch, t, all_), attend(batch, t, all_, backend="hopper")
    assert one is not None
    assert forward is not None
    alone = [attend(batch, t, slice(0, middle)), attend(batch, t, slice(middle, all_.stop))]
    parts = [call for call in alone if call is not None]
    found: dict[str, Call] = {"one call": one, "hopper": forward}
    found["two calls"] = lambda: [call() for call in parts]
    for name, call in zip(("decodes alone", "prefills alone"), alone, strict=True):
        if call is not None:
            found[name] = call
    return found


class Row(NamedTuple):
    """Microseconds by who was timed, and why there are none of others."""

    batch: Batch
    times: dict[str, timing.Spread]
    missing: dict[str, str]


def measure(batch: Batch, device: torch.device, rounds: int) -> Row:
    """Times what is right."""
    t = draw(batch, device)
    checker, calls, missing = Checker(batch, t), {}, {}
    for name, call in calls_of(batch, t).items():
        try:
            reason = _why_wrong(name, call(), checker)
        except Exception as error:  # whatever a call raises is its reason
            reason = in_words(error)
        if reason is None:
            calls[name] = call
        else:
            missing[name] = reason

    def inspect(name: str, returned: Tensor | list[Tensor]) -> None:
        reason = _why_wrong(name, returned, checker)
        if reason is not None:
            missing[name] = reason

    times = timing.interleaved(calls, device, rounds, inspect)
    spreads = {name: timing.Spread.of(own) for name, own in times.items() if name not in missing}
    return Row(batch, spreads, missing)


def _why_wrong(name: str, returned: Tensor | list[Tensor], checker: Checker) -> str | None:
    """Of what two calls return, the rows of both; of one of them alone nothing is asked again."""
    if name.endswith("alone"):
        return None
    return checker.why_wrong(torch.cat(returned) if isinstance(returned, list) else returned)


def lines(row: Row) -> Iterator[str]:
    """A row in words."""
    yield f"{row.batch.name}:"
    for name, time in row.times.items():
        yield f"  {name}: {time.median:.1f} us ({time.low:.1f} to {time.high:.1f})"
    for name, reason in row.missing.items():
        yield f"  {name}: none ({reason})"
    one, two = (row.times.get(name) for name in ("one call", "two calls"))
    if one and two:
        bar = f", bar {row.batch.most:.2f}" if row.batch.most else ""
        yield f"  one call / two calls: {one.median / two.median:.3f} of its time{bar}"


def run(words: str, device: torch.device, rounds: int) -> Iterator[str]:
    """Lines of all batches whose names have these words, as they are measured."""
    for batch in BATCHES:
        if words in batch.name:
            yield from lines(measure(batch, device, rounds))
            if device.type == "cuda":
                torch.cuda.empty_cache()
