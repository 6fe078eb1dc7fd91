"""Batches of prefills and decodes in one call, beside a call of each kind.

    python -m heedful.bench.mixed [WORDS]

WORDS: only batches whose name has them. `python -m heedful.bench.steps` times them, too. Every
result is checked against float64 before it is timed and after each round; what is wrong gets its
reason and no figure. Rounds are interleaved, each call has a cold L2.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful import flash_attn_varlen_func
from heedful.bench.harness import protocol, script
from heedful.bench.harness.caches import Drawn, Tensors
from heedful.bench.harness.cases import Case
from heedful.bench.harness.check import Parts
from heedful.bench.harness.peers import Inputs
from heedful.bench.harness.protocol import Row
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem

One = Callable[[], Tensor]
# A call that stands for two returns the results of both.
Call = Callable[[], Tensor | list[Tensor]]
Lengths = tuple[tuple[int, int], ...]

ROUNDS = 7


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
_UNLIKE = tuple((1, 1024 << number % 7) for number in range(63))
BATCHES = (
    Batch("mixed 124 x 4096 + 4 x 2048", ((1, 4096),) * 124, _PREFILLS, most=1.05),
    Batch("mixed 124 x 4096 + 4 x 2048, pages of 64", ((1, 4096),) * 124, _PREFILLS, page=64),
    Batch("mixed 124 x 4096 of 4 tokens + 4 x 2048", ((4, 4096),) * 124, _PREFILLS),
    Batch("mixed 124 x 4096 of 16 tokens + 4 x 2048", ((16, 4096),) * 124, _PREFILLS),
    Batch("mixed 63 x 1024 to 65536 + 512 tokens of 8192", _UNLIKE, ((512, 8192),), most=1.05),
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


def reference(batch: Batch, t: Tensors) -> Parts:
    """That of some sequences: of each kind the first, the last, those of the fewest and of the most
    keys."""
    parts, middle, whole = Parts(t.q.shape), len(batch.decodes), len(batch.sequences)
    assert t.cu_q is not None and t.table is not None
    for kind, numbers in (("decode", range(middle)), ("prefill", range(middle, whole))):
        by_keys = sorted(numbers, key=lambda b: batch.sequences[b][1])
        ends = (numbers[0], numbers[-1], by_keys[0], by_keys[-1]) if numbers else ()
        for b in dict.fromkeys(ends):
            rows, keys = slice(int(t.cu_q[b]), int(t.cu_q[b + 1])), batch.sequences[b][1]
            shape = (1, *batch.sequences[b], *batch.heads, batch.dim)
            case = Case("decode", AttentionProblem.dense(*shape, mask=MaskSpec.of(True)))
            k, v = (x[t.table[b]].flatten(0, 1)[None, :keys] for x in (t.k, t.v))
            q = t.q[None, rows]
            parts.add(f"{kind}, sequence {b}", (rows,), case, Inputs(q, k, v, q))
    return parts


def attend(batch: Batch, t: Tensors, which: slice, backend: str | None = None) -> One:
    """One call of these sequences."""
    assert t.cu_q is not None and t.table is not None
    begin, end = (int(t.cu_q[place]) for place in (which.start, which.stop))
    q, table, used = t.q[begin:end], t.table[which], t.used[which]
    cu_q = t.cu_q[which.start : which.stop + 1] - begin
    longest = [max(column) for column in zip(*batch.sequences[which], strict=True)]
    options = {"causal": True, "block_table": table, "seqused_k": used, "backend": backend}
    return lambda: flash_attn_varlen_func(q, t.k, t.v, cu_q, None, *longest, **options)


def calls_of(batch: Batch, t: Tensors) -> dict[str, Call]:
    """The implementations that are timed."""
    middle, count = len(batch.decodes), len(batch.sequences)
    kinds = {"decodes alone": slice(0, middle), "prefills alone": slice(middle, count)}
    alone = {name: attend(batch, t, s) for name, s in kinds.items() if s.start < s.stop}
    whole = slice(0, count)
    calls: dict[str, Call] = {"one call": attend(batch, t, whole)}
    calls["hopper"] = attend(batch, t, whole, backend="hopper")
    return {**calls, "two calls": lambda: [call() for call in alone.values()], **alone}


class Trial(protocol.Trial[Batch, Tensors]):
    """A batch in one call, in two, and by the forward alone."""

    def draw(self) -> Tensors:
        return draw(self.case, self.device)

    def refer(self) -> Parts:
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
    yield from protocol.lines(row)
    one, two = (row.times.get(name) for name in ("one call", "two calls"))
    if one and two:
        bar = f", bar {row.case.most:.2f}" if row.case.most else ""
        yield f"  one call / two calls: {one.median / two.median:.3f} of its time{bar}"


def run(words: str, device: torch.device, rounds: int = ROUNDS) -> Iterator[str]:
    """Lines of all batches whose names have these words, as they are measured."""
    for batch in BATCHES:
        if words in batch.name:
            yield from lines(measure(batch, device, rounds))
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    for line in run(" ".join(sys.argv[1:]), script.current_gpu()):
        script.say(line)


if __name__ == "__main__":
    script.run(main, __doc__)
