"""Decode steps over caches of every kind, beside a plain read of the same bytes and FlashInfer.

    python -m heedful.bench.steps [WORDS] [decode decode/portable+conversion=2 ...]

One new token of each sequence; batches of `python -m heedful.bench.mixed` follow. WORDS: only
steps whose name has them; of those that begin as a backend does, each is timed beside our own
choice. Every result is checked against float64 before it is timed and after each round; what is
wrong or missing gets its reason and no figure. Rounds are interleaved, each call has a cold L2.

A read is the fastest of those tried here: what no step can be faster than. Bars are shares of its
speed.
"""

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from heedful import (
    dequantize_kv,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    pack_latent,
    quantize_kv,
    unpack_latent,
)
from heedful.bench import mixed
from heedful.bench.harness import protocol, script
from heedful.bench.harness.caches import Drawn, Tensors
from heedful.bench.harness.cases import Case
from heedful.bench.harness.check import Parts
from heedful.bench.harness.peers import Inputs
from heedful.bench.harness.protocol import Row
from heedful.bench.harness.timing import Spread
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import ITEM_BITS, LATENT_ROW_BYTES, LATENT_ROWS, AttentionProblem
from heedful.core.registry.by_hand import forced

ROUNDS = 7
Call = Callable[[], Tensor]
BACKENDS = (
    "decode",
    "hopper",
    "hopper_decode",
    "mla",
    "mla_converting",
    "mla_converting_pair",
    "mla_swap_ab",
    "portable",
)
WORKSPACE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class Step:
    """lengths: keys of each sequence. heads: of queries and keys. dims: of keys and values; of MLA
    values are the first of the keys. page: keys of a page, which lie shuffled; 0 = not paged.
    stored: the dtype of a quantised cache, "" = bfloat16. by_head: it has a scale a KV head, not a
    row. prefix: keys before those of every sequence. window: keys that are seen, 0 = all. padded:
    sequences after those, of no keys. bar: share of a read's speed that is asked for.
    """

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    page: int = 0
    stored: str = ""
    by_head: bool = False
    prefix: int = 0
    window: int = 0
    padded: int = 0
    bar: float = 0.0

    @property
    def is_mla(self) -> bool:
        return self.dims[0] != self.dims[1]

    def read_bytes(self) -> int:
        """Keys and values that are seen, their scales and page numbers, each read once."""
        seen = [min(n, self.window or n) for n in self.lengths]
        rows = (sum(seen) + self.prefix) * self.heads[1]
        values = self.dims[0] if self.is_mla else sum(self.dims)
        scales = 0
        if self.stored == LATENT_ROWS:
            scales = rows * (LATENT_ROW_BYTES - self.dims[0]) // 4
        elif self.stored:
            scales = 2 * (len(self.lengths) * self.heads[1] if self.by_head else rows)
        pages = sum(-(-n // self.page) for n in seen) if self.page else 0
        return rows * values * ITEM_BITS[self.stored or "bfloat16"] // 8 + 4 * (scales + pages)

    def case(self, number: int) -> Case:
        """The computation of the reference of a sequence."""
        mask = MaskSpec.of(False, (self.window - 1, 0)) if self.window else MaskSpec()
        shape = (1, 1, self.lengths[number] + self.prefix, *self.heads, self.dims[0])
        problem = AttentionProblem.dense(*shape, head_dim_v=self.dims[1], mask=mask)
        return Case("decode", problem)


def ragged_lengths(count: int = 128, median: int = 4096, sigma: float = 1.2) -> tuple[int, ...]:
    """Log-normal lengths of 100 to 65536 keys, the same each time."""
    drawn = random.Random(0)
    return tuple(
        min(max(round(drawn.lognormvariate(math.log(median), sigma)), 100), 65536)
        for _ in range(count)
    )


_CACHE = (8192,) * 64  # 2 GiB in bfloat16
_LATENT: dict[str, Any] = {"dims": (576, 512), "page": 64}
_E4M3: dict[str, Any] = {"stored": "float8_e4m3fn", "bar": 0.90}
STEPS = (
    Step("1 x 8192", (8192,)),
    Step("8 x 8192", (8192,) * 8, bar=0.90),
    Step("64 x 8192", _CACHE, bar=0.98),
    Step("64 x 8192, pages of 16", _CACHE, page=16, bar=0.93),
    Step("64 x 8192, pages of 1", _CACHE, page=1),
    Step("64 x 8192, e4m3", _CACHE, **_E4M3),
    Step("64 x 8192, e4m3, scales of heads", _CACHE, by_head=True, **_E4M3),
    Step("64 x 8192, int8", _CACHE, stored="int8", bar=0.85),
    Step("64 x 8192, int4", _CACHE, stored="int4", bar=0.70),
    Step("64 x 8192, int4, pages of 16", _CACHE, stored="int4", page=16),
    Step("128 log-normal", ragged_lengths(), page=16, bar=0.90),
    Step("MLA 64 x 8192, 16 heads", _CACHE, heads=(16, 1), **_LATENT, bar=0.90),
    Step("MLA 64 x 8192, 128 heads", _CACHE, heads=(128, 1), **_LATENT),
    Step("MLA 1 x 8192, 128 heads", (8192,), heads=(128, 1), **_LATENT),
    Step("MLA 1 x 131072, 16 heads", (131072,), heads=(16, 1), **_LATENT),
    Step("prefix 16384 + 64 x 512", (512,) * 64, prefix=16384),
    Step("16 x 131072, window 1024", (131072,) * 16, window=1024),
    Step("16 x 1024", (1024,) * 16),
    Step("64 x 8192, pages of 16, 192 padded", _CACHE, page=16, padded=192),
    Step("64 x 1024", (1024,) * 64, bar=0.90),
    Step("64 x 1024, pages of 16", (1024,) * 64, page=16, bar=0.86),
    Step("64 x 1024, pages of 16, 192 padded", (1024,) * 64, page=16, padded=192),
    *(
        Step(f"MLA {count} x 8192, {heads} heads, {words}", (8192,) * count, (heads, 1), **kind)
        for count, heads in ((16, 16), (64, 16), (16, 128))
        for words, kind in (
            ("e4m3", {**_LATENT, "stored": "float8_e4m3fn", "by_head": True}),
            ("rows of bytes", {**_LATENT, "stored": LATENT_ROWS}),
        )
    ),
)
# The targets of one step beside another: (step, peer, step, peer, most of its time).
PAIRS = (
    ("64 x 8192, pages of 16", "heedful", "64 x 8192", "heedful", 1.05),
    ("64 x 8192, e4m3", "heedful", "64 x 8192", "heedful", 1.0),
    ("64 x 8192, int8", "heedful", "64 x 8192", "heedful", 1.0),
    ("64 x 8192, int4", "heedful", "64 x 8192", "heedful", 1.0),
    ("prefix 16384 + 64 x 512", "heedful", "prefix 16384 + 64 x 512", "repeated", 0.1),
    ("16 x 131072, window 1024", "heedful", "16 x 1024", "heedful", 1.1),
    ("64 x 8192, pages of 16, 192 padded", "heedful", "64 x 8192, pages of 16", "heedful", 1.05),
    ("64 x 1024, pages of 16, 192 padded", "heedful", "64 x 1024, pages of 16", "heedful", 1.05),
    ("64 x 1024, pages of 16", "heedful", "64 x 1024", "heedful", 1.05),
)


def draw(step: Step, device: torch.device, seed: int = 0) -> Tensors:
    """Normal values; pages in an order of their own."""
    drawn, (dim, dim_v), (heads, heads_k) = Drawn(device, seed), step.dims, step.heads
    batch, table = len(step.lengths) + step.padded, None
    lead = (batch, max(step.lengths))
    if step.page:
        table, pages = drawn.table(step.lengths, step.page, step.padded)
        lead = (pages, step.page)
    q = drawn.normal(batch, 1, heads, dim)
    k, k_scale = _stored(step, drawn.normal(*lead, heads_k, dim))
    v, v_scale = k if step.stored == LATENT_ROWS else k[..., :dim_v], k_scale
    if not step.is_mla:
        v, v_scale = _stored(step, drawn.normal(*lead, heads_k, dim_v))
    lengths = step.lengths + (0,) * step.padded
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    prefix = None
    if step.prefix:
        prefix = (
            drawn.normal(step.prefix, heads_k, dim),
            drawn.normal(step.prefix, heads_k, dim_v),
        )
    return Tensors(q, k, v, used, k_scale, v_scale, table, prefix)


def _stored(step: Step, x: Tensor) -> tuple[Tensor, Tensor | None]:
    if not step.stored:
        return x, None
    if step.stored == LATENT_ROWS:
        return pack_latent(x), None
    if step.by_head:
        # Normal values are in the range of the dtype as they are.
        batch, heads = len(step.lengths), x.shape[-2]
        scale = torch.linspace(0.5, 1.0, batch * heads, device=x.device).view(batch, heads)
        return x.to(getattr(torch, step.stored)), scale
    packed, scale, _ = quantize_kv(x, step.stored)
    return packed, scale


def sequence(step: Step, t: Tensors, number: int) -> tuple[Tensor, Tensor]:
    """Keys (N, G, D) and values (N, G, E) of a sequence, the prefix first."""
    parts = []
    for which, x, scale in ((0, t.k, t.k_scale), (1, t.v, t.v_scale)):
        place = number if t.table is None else t.table[number]
        rows = x[place].flatten(0, -3)[: step.lengths[number]]
        if step.stored == LATENT_ROWS:
            rows = unpack_latent(rows)[..., : step.dims[which]]
        if step.by_head:
            assert scale is not None
            rows = rows.float() * scale[number, :, None]
        elif scale is not None:
            rows = dequantize_kv(rows, scale[place].flatten(0, -3)[: step.lengths[number]])
        parts.append(rows if t.prefix is None else torch.cat((t.prefix[which], rows)))
    return parts[0], parts[1]


def reference(step: Step, t: Tensors) -> Parts:
    """That of some sequences: the first, the last, the shortest, the longest."""
    lengths = step.lengths
    ends = (0, len(lengths) - 1, lengths.index(min(lengths)), lengths.index(max(lengths)))
    parts = Parts((*t.q.shape[:-1], step.dims[1]), live=len(lengths))
    for number in dict.fromkeys(ends):
        q, (k, v) = t.q[number, None], sequence(step, t, number)
        parts.add(
            f"sequence {number}", (number,), step.case(number), Inputs(q, k[None], v[None], q)
        )
    return parts


# The implementations that are timed: each gives its call, or the reason why it has none.


def heedful(step: Step, t: Tensors, backend: str | None = None) -> Call:
    window = (step.window - 1, 0) if step.window else (-1, -1)
    return lambda: flash_attn_with_kvcache(
        t.q,
        t.k,
        t.v,
        cache_seqlens=t.used,
        block_table=t.table,
        window_size=window,
        k_descale=t.k_scale,
        v_descale=t.v_scale,
        shared_prefix=t.prefix,
        backend=backend,
    )


def repeated(step: Step, t: Tensors) -> Call | str:
    """Our packed sequences, the prefix repeated before each."""
    if t.prefix is None:
        return "is for shared prefixes"
    parts = [sequence(step, t, number) for number in range(len(step.lengths))]
    k, v = (torch.cat(sides) for sides in zip(*parts, strict=True))
    device, lengths = t.q.device, [n + step.prefix for n in step.lengths]
    cu_k = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    cu_q = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    q, longest = t.q[:, 0], max(lengths)
    return lambda: flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1, longest)[:, None]


def flashinfer(step: Step, t: Tensors, tensor_cores: bool = False) -> Call | str:
    """FlashInfer over the same pages, or contiguous ones of 16, by its wrapper of decodes or of MLA
    (https://docs.flashinfer.ai/api/attention.html). tensor_cores: whether products are made by
    them, which is faster where many heads share keys."""
    if t.q.device.type != "cuda":
        return "needs a GPU"
    if step.is_mla and tensor_cores:
        return "has one kernel of latent vectors"
    if step.stored or step.prefix or step.padded:
        return "is not timed on scales of rows, prefixes or padded rows"
    try:
        library = import_module("flashinfer")
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    page, longest = step.page or 16, max(step.lengths)
    if not step.page and longest % page:
        return f"is timed on whole pages of {page}"
    device, batch = t.q.device, len(step.lengths)
    counts = [-(-n // page) for n in step.lengths]
    bounds = torch.tensor([0, *counts], device=device).cumsum(0).int()
    table = t.table
    if table is None:
        table = torch.arange(batch * longest // page, dtype=torch.int32, device=device)
        table = table.view(batch, -1)
    places = torch.cat([row[:n] for row, n in zip(table, counts, strict=True)])
    k, v = (x.reshape(-1, page, *x.shape[2:]) for x in (t.k, t.v))
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    (heads, heads_k), (dim, dim_v), dtype = step.heads, step.dims, t.q.dtype
    if step.is_mla:
        wrapper = library.mla.BatchMLAPagedAttentionWrapper(space)
        size = (heads, dim_v, dim - dim_v, page, False, dim**-0.5, dtype, dtype)
        wrapper.plan(cu_q, bounds, places, t.used, *size)
        q = t.q[:, 0]
        columns = q[..., :dim_v], q[..., dim_v:], k[:, :, 0, :dim_v], k[:, :, 0, dim_v:]
        parts = [x.contiguous() for x in columns]
        return lambda: wrapper.run(*parts)[:, None]
    kind = library.BatchDecodeWithPagedKVCacheWrapper
    wrapper = kind(space, "NHD", use_tensor_cores=tensor_cores)
    last = t.used - (bounds.diff() - 1) * page
    left = step.window - 1 if step.window else -1
    more = {"window_left": left, "q_data_type": dtype, "kv_data_type": dtype}
    wrapper.plan(bounds, places, last, heads, heads_k, dim, page, **more)
    return lambda: wrapper.run(t.q[:, 0], (k, v))[:, None]


PEERS: dict[str, Callable[[Step, Tensors], Call | str]] = {
    "heedful": heedful,
    "repeated": repeated,
    "flashinfer": flashinfer,
    "flashinfer, tensor cores": partial(flashinfer, tensor_cores=True),
}


def reads(step: Step, device: torch.device) -> Iterator[tuple[str, Call]]:
    """Plain reads of as many bytes."""
    words = torch.ones(step.read_bytes() // 4, dtype=torch.float32, device=device)
    yield "torch.sum", lambda: torch.sum(words)
    if device.type == "cuda":
        from heedful.bench.harness.reader import read_words

        yield "Triton", lambda: read_words(words)


@dataclass(kw_only=True)
class Trial(protocol.Trial[Step, Tensors]):
    """A step by all peers and by plain reads. backends: of ours, which are timed too."""

    backends: Sequence[str] = ()

    def draw(self) -> Tensors:
        return draw(self.case, self.device)

    def refer(self) -> Parts:
        return reference(self.case, self.tensors)

    def peers(self) -> dict[str, protocol.Maker]:
        self.readers = dict(reads(self.case, self.device))
        more = {f"heedful:{name}": partial(heedful, backend=name) for name in self.backends}
        ours = {name: partial(m, self.case, self.tensors) for name, m in (PEERS | more).items()}
        return ours | protocol.ready(self.readers)

    def check(self, name: str, returned: Tensor) -> str | None:
        return None if name in self.readers else super().check(name, returned)


def measure(
    step: Step, device: torch.device, rounds: int = ROUNDS, backends: Sequence[str] = ()
) -> Row:
    """Times what is right, these backends of ours too; "read" is the fastest read."""
    trial = Trial(step, device, backends=backends)
    row = trial.measure(rounds)
    read = min((row.times.pop(name) for name in trial.readers), key=lambda spread: spread.median)
    return row._replace(times={**row.times, "read": read})


def lines(row: Row) -> Iterator[str]:
    """A row in words."""
    size, read = row.case.read_bytes(), row.times["read"].median
    yield f"{row.case.name}: {size / 1e9:.3f} GB"

    def beside(time: Spread) -> str:
        return f", {size / time.median / 1e3:.0f} GB/s, {read / time.median:.3f} of a read"

    yield from protocol.lines(row, beside)
    if row.case.bar:
        ours = row.times.get("heedful")
        share = f"{read / ours.median:.3f}" if ours else "none"
        yield f"  bar: {row.case.bar:.2f} of a read, is {share}"


def pairs(rows: list[Row]) -> Iterator[str]:
    """Bars of one step beside another, of those that were timed."""
    times = {(row.case.name, peer): time for row in rows for peer, time in row.times.items()}
    for step, peer, other, beside, most in PAIRS:
        if (step, peer) in times and (other, beside) in times:
            share = times[step, peer].median / times[other, beside].median
            yield f"{step}, {peer} / {other}, {beside}: {share:.3f} of its time, bar {most:.2f}"


def main() -> None:
    device = script.current_gpu()
    rows, ours = [], [word for word in sys.argv[1:] if re.split("[+/]", word)[0] in BACKENDS]
    words = " ".join(word for word in sys.argv[1:] if word not in ours)
    backends = [forced(word) for word in ours]
    for step in STEPS:
        if words in step.name:
            rows.append(measure(step, device, backends=backends))
            script.say(*lines(rows[-1]))
            torch.cuda.empty_cache()
    for line in mixed.run(words, device, ROUNDS):
        script.say(line)
    script.say(*pairs(rows))


if __name__ == "__main__":
    script.run(main, __doc__)
