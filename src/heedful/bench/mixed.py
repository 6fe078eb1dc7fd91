"""Batches of prefills and decodes in one call, beside a call of each kind.

Part of `python -m heedful.bench.steps`, where their names begin with "mixed". Every result is
checked against float64 before it is timed and after each round; what is wrong gets its reason and
no figure. Rounds are interleaved, each call has a cold L2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful import flash_attn_varlen_func
from heedful.bench import protocol
from heedful.bench.caches import Drawn, Reference, Tensors
from heedful.bench.cases import Case
from heedful.bench.exact import Operands
from heedful.bench.protocol import Row
from heedful.core.mask import MaskSpec
from heedful.core.problem import AttentionProblem

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


def draw(batch: Batch, device: torch.device, seed: int = 0) -> Tensors:
    """Normal values; pages in an order of their own."""
    drawn, (heads, heads_k) = Drawn(device, seed), batch.heads
    queries, keys = zip(*batch.sequences, strict=True)
    table, pages = drawn.table(keys, batch.page)
    q = drawn.normal(sum(queries), heads, batch.dim)
    k, v = (drawn.normal(pages, batch.page, heads_k, batch.dim) for _ in "kv")
    used = torch.tensor(keys, dtype=torch.int32, device=device)
    cu_q = torch.tensor([0, *queries], device=device).cumsum(0).int()
    return Tensors(q, k, v, used, table=table, cu_q=cu_q)


def reference(batch: Batch, t: Tensors) -> Reference:
    """That of some rows of some sequences: of each kind the first, the last, those of the fewest
    and of the most keys. Each kind has a budget of its own."""
    found, middle, (heads, heads_k) = Reference(t.q.shape), len(batch.decodes), batch.heads
    group, starts = heads // heads_k, t.cu_q
    assert starts is not None and t.table is not None
    kinds = {"decode": range(middle), "prefill": range(middle, len(batch.sequences))}
    for kind, numbers in kinds.items():
        by_keys = sorted(numbers, key=lambda b: batch.sequences[b][1])
        ends = (numbers[0], numbers[-1], by_keys[0], by_keys[-1]) if numbers else ()
        for b in dict.fromkeys(ends):
            begin, (count, keys) = int(starts[b]), batch.sequences[b]
            # Rows that see at least half of the keys, whose values are of one size.
            rows = torch.tensor(sorted({count // 2, count - 1}), device=t.q.device)
            shape = (1, count, keys, heads, heads_k, batch.dim)
            case = Case("decode", AttentionProblem.dense(*shape, mask=MaskSpec.of(True)))
            k, v = (x[t.table[b]].flatten(0, 1)[:keys] for x in (t.k, t.v))
            words = f"{kind}, rows {(begin + rows).tolist()}"
            for g in range(heads_k):
                own = slice(g * group, (g + 1) * group)
                x = Operands(t.q[begin : begin + count, own].transpose(0, 1), k[:, g], v[:, g])
                found.add((kind, words, (begin + rows, own)), case, x, rows)
    return found


def attend(batch: Batch, t: Tensors, which: slice, backend: str | None = None) -> One | None:
    """One call of these sequences; None if there are none."""
    lengths = batch.sequences[which]
    if not lengths:
        return None
    assert t.cu_q is not None and t.table is not None
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


class Trial(protocol.Trial[Batch, Tensors]):
    """A batch in one call, in two, and by the forward alone."""

    def draw(self) -> Tensors:
        return draw(self.case, self.device)

    def refer(self) -> Reference:
        return reference(self.case, self.tensors)

    def peers(self) -> dict[str, protocol.Maker]:
        return protocol.ready(calls_of(self.case, self.tensors))

    def check(self, name: str, returned: Tensor | list[Tensor]) -> str | None:
        """Two calls return the rows of both; one of them alone is not asked again."""
        if name.endswith("alone"):
            return None
        whole = torch.cat(returned) if isinstance(returned, list) else returned
        return super().check(name, whole)


def measure(batch: Batch, device: torch.device, rounds: int) -> Row:
    """Times what is right."""
    return Trial(batch, device).measure(rounds)


def lines(row: Row) -> Iterator[str]:
    """A row in words."""
    yield f"{row.case.name}:"
    for name, time in row.times.items():
        yield f"  {name}: {time.median:.1f} us ({time.low:.1f} to {time.high:.1f})"
    for name, reason in row.missing.items():
        yield f"  {name}: none ({reason})"
    one, two = (row.times.get(name) for name in ("one call", "two calls"))
    if one and two:
        bar = f", bar {row.case.most:.2f}" if row.case.most else ""
        yield f"  one call / two calls: {one.median / two.median:.3f} of its time{bar}"


def run(words: str, device: torch.device, rounds: int) -> Iterator[str]:
    """Lines of all batches whose names have these words, as they are measured."""
    for batch in BATCHES:
        if words in batch.name:
            yield from lines(measure(batch, device, rounds))
            if device.type == "cuda":
                torch.cuda.empty_cache()
