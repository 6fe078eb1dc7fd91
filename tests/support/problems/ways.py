"""Ways to compute the same rows of one sequence, whose results are compared as bits.

Rows [first, last) of a sequence see keys by a causal mask or a window that ends at the diagonal,
both aligned bottom right. So a call over the keys before `last` alone has the same rows as one over
all of them. Memory that no way shows to these rows is full of other finite values.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import heedful.torch as heedful
from heedful import configure
from heedful.core.registry.by_hand import named

PAGES = (1, 3, 16, 64)


@dataclass(frozen=True)
class Rows:
    """q (n, H, D), k (n, G, D), v (n, G, E) of a sequence, and which of its rows are wanted.
    options: of every call. pages: sizes of pages that calls may have."""

    q: Tensor
    k: Tensor
    v: Tensor
    first: int
    last: int
    options: dict[str, Any]
    pages: tuple[int, ...] = PAGES

    @property
    def wanted(self) -> Tensor:
        return self.q[self.first : self.last]

    def other(self, *shape: int, like: Tensor) -> Tensor:
        """Other values of the same size as these."""
        made = torch.randn(*shape, *like.shape[1:], device=like.device) * self.q.float().std()
        return made.to(like.dtype)


Result = tuple[Tensor, Tensor]
Way = Callable[[random.Random, Rows], Result]


def _dense(x: Rows, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Result:
    """(out, lse) of the last wanted rows of the first batch entry."""
    count = x.last - x.first
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True, **x.options, **more)
    return out[0, -count:], lse[0, :, -count:]


def whole(rng: random.Random, x: Rows) -> Result:
    """All rows of the sequence at once."""
    every = heedful.flash_attn_func(x.q[None], x.k[None], x.v[None], return_lse=True, **x.options)
    return every[0][0, x.first : x.last], every[1][0, :, x.first : x.last]


def chunk(rng: random.Random, x: Rows) -> Result:
    """The wanted rows alone."""
    return _dense(x, x.wanted[None], x.k[None, : x.last], x.v[None, : x.last])


def one_by_one(rng: random.Random, x: Rows) -> Result:
    """A call for each of the last two wanted rows, and one for those before."""
    results, first = [], x.first
    for stop in sorted({max(x.first + 1, x.last - 2), max(x.first + 1, x.last - 1), x.last}):
        part = replace(x, first=first, last=stop)
        results.append(chunk(rng, part))
        first = stop
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], 1)


def neighbours(rng: random.Random, x: Rows) -> Result:
    """A batch of caches of different lengths in use, of which it is one."""
    batch, place, room = rng.choice((2, 3)), 0, x.last + rng.randrange(40)
    place = rng.randrange(batch)
    lengths = [rng.randint(1, room) for _ in range(batch)]
    lengths[place] = x.last
    count = x.last - x.first
    q, k, v = x.other(batch, count, like=x.q), *(x.other(batch, room, like=t) for t in (x.k, x.v))
    q[place], k[place, : x.last], v[place, : x.last] = x.wanted, x.k[: x.last], x.v[: x.last]
    used = torch.tensor(lengths, dtype=torch.int32, device=x.q.device)
    out, lse = heedful.flash_attn_func(q, k, v, seqused_k=used, return_lse=True, **x.options)
    return out[place], lse[place]


def _places(lengths: list[int], device) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32).to(device)


def packed(rng: random.Random, x: Rows) -> Result:
    """One of several packed sequences, with bounds on lengths that may be larger."""
    place, count = rng.randrange(3), x.last - x.first
    of_q = [rng.randint(0, 30) for _ in range(3)]
    of_k = [length + rng.randint(0, 60) for length in of_q]
    of_q[place], of_k[place] = count, x.last
    q = x.other(sum(of_q), like=x.q)
    k, v = (x.other(sum(of_k), like=t) for t in (x.k, x.v))
    at, at_k = sum(of_q[:place]), sum(of_k[:place])
    q[at : at + count] = x.wanted
    k[at_k : at_k + x.last], v[at_k : at_k + x.last] = x.k[: x.last], x.v[: x.last]
    device = q.device
    out, lse = heedful.flash_attn_varlen_func(
        q,
        k,
        v,
        _places(of_q, device),
        _places(of_k, device),
        max(of_q) + rng.choice((0, 1, 70)),
        max(of_k) + rng.choice((0, 1, 70)),
        return_lse=True,
        **x.options,
    )
    return out[at : at + count], lse[:, at : at + count]


def _pages(rng: random.Random, x: Rows, size: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, block_table) of two sequences in pages in any order; the second is the wanted one, and
    its pages have its keys before `last`."""
    each = -(-room // size)
    order = rng.sample(range(2 * each + 1), 2 * each)
    k, v = (x.other(2 * each + 1, size, like=t) for t in (x.k, x.v))
    table = torch.tensor(order, dtype=torch.int32, device=x.q.device).view(2, each)
    page, row = _places_in(table, size, 0, x.last)
    k[page, row], v[page, row] = x.k[: x.last], x.v[: x.last]
    return k, v, table


def _places_in(table: Tensor, size: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The page, and the row in it, of tokens [first, last) of the second sequence."""
    tokens = torch.arange(first, last, device=table.device)
    return table[1, tokens // size].long(), tokens % size


def packed_over_pages(rng: random.Random, x: Rows) -> Result:
    """Packed queries of a mixed batch over caches in pages."""
    size, count = rng.choice(x.pages), x.last - x.first
    k, v, table = _pages(rng, x, size, x.last + rng.randrange(3 * size))
    other = rng.randint(1, min(20, table.shape[1] * size))
    q = torch.cat([x.other(other, like=x.q), x.wanted])
    used = torch.tensor([other, x.last], dtype=torch.int32, device=q.device)
    out, lse = heedful.flash_attn_varlen_func(
        q,
        k,
        v,
        _places([other, count], q.device),
        None,
        max(other, count) + rng.choice((0, 5)),
        table.shape[1] * size,
        block_table=table,
        seqused_k=used,
        return_lse=True,
        **x.options,
    )
    return out[other:], lse[:, other:]


def _cached(x: Rows, q: Tensor, caches: tuple[Tensor, Tensor], place: int, **more) -> Result:
    out, lse = heedful.flash_attn_with_kvcache(
        q, *caches, return_softmax_lse=True, **x.options, **more
    )
    return out[place], lse[place]


def cache(rng: random.Random, x: Rows) -> Result:
    """A cache that is padded on the left, whose rows are found by an index."""
    count, pad, room = x.last - x.first, rng.randrange(20), x.last + 20 + rng.randrange(20)
    q = x.other(2, count, like=x.q)
    k, v = (x.other(3, room, like=t) for t in (x.k, x.v))
    q[1] = x.wanted
    k[2, pad : pad + x.last], v[2, pad : pad + x.last] = x.k[: x.last], x.v[: x.last]

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    return _cached(
        *(x, q, (k, v), 1),
        cache_seqlens=ints(rng.randint(20, room), x.last + pad),
        cache_leftpad=ints(rng.randrange(20), pad),
        cache_batch_idx=ints(0, 2),
    )


def appended(rng: random.Random, x: Rows) -> Result:
    """The wanted rows as new tokens, whose keys the call writes into a cache in pages."""
    size, count, held = rng.choice(x.pages), x.last - x.first, x.first
    k, v, table = _pages(rng, x, size, x.last + rng.randrange(3 * size))
    page, row = _places_in(table, size, held, x.last)
    k[page, row], v[page, row] = 0.0, 0.0
    q = x.other(2, count, like=x.q)
    new_k, new_v = (x.other(2, count, like=t) for t in (x.k, x.v))
    q[1], new_k[1], new_v[1] = x.wanted, x.k[held : x.last], x.v[held : x.last]
    most = table.shape[1] * size - count
    lengths = torch.tensor([rng.randint(0, most), held], dtype=torch.int32, device=q.device)
    return _cached(x, q, (k, v), 1, k=new_k, v=new_v, cache_seqlens=lengths, block_table=table)


def unaligned(rng: random.Random, x: Rows) -> Result:
    """Tensors whose addresses and strides are no multiples of 16 bytes."""

    def moved(t: Tensor) -> Tensor:
        wider = torch.zeros(1, *t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype, device=t.device)
        view = wider[..., 1 : t.shape[-1] + 1]
        view[0] = t
        return view

    return _dense(x, moved(x.wanted), moved(x.k[: x.last]), moved(x.v[: x.last]))


def heads_apart(rng: random.Random, x: Rows) -> Result:
    """Each KV head, with its query heads, in a call of its own, as ranks have them."""
    heads, group, results = x.k.shape[1], x.q.shape[1] // x.k.shape[1], []
    for g in range(heads):
        of_q = slice(g * group, (g + 1) * group)
        options = dict(x.options)
        for name in ("sink", "alibi_slopes"):
            if name in options:
                options[name] = options[name][of_q]
        k, v = x.k[:, g : g + 1].contiguous(), x.v[:, g : g + 1].contiguous()
        part = replace(x, q=x.q[:, of_q].contiguous(), k=k, v=v, options=options)
        results.append(chunk(rng, part))
    return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 0)


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        *(whole, chunk, one_by_one, neighbours, packed, packed_over_pages),
        *(cache, appended, unaligned, heads_apart),
    )
}


def in_turn(rng: random.Random, x: Rows) -> Result:
    """All rows of the sequence at once by the Hopper forward, whose programs take all parts of a
    row's keys in turn, as where there are many rows."""
    options = {name: value for name, value in x.options.items() if name != "numerics"}
    options["backend"] = named("hopper", "forward", key_splits=1)
    configure(numerics=x.options["numerics"])
    try:
        return whole(rng, replace(x, options=options))
    finally:
        configure(numerics=None)


# The options of a call, from a generator, the number of query heads, keys of a tile and a device.
Options = Callable[[random.Random, int, int, str], dict[str, Any]]


def _window(rng: random.Random, heads: int, tile: int, device: str) -> dict[str, Any]:
    return {"window_size": (rng.randrange(3 * tile), 0)}


OPTIONS: dict[str, Options] = {
    "causal": lambda rng, heads, tile, device: {"causal": True},
    "window": _window,
    "leading": lambda rng, heads, tile, device: {
        "window_size": (rng.randrange(3 * tile), 0, rng.choice((3, tile)))
    },
    "softcap": lambda rng, heads, tile, device: {"causal": True, "softcap": 8.0},
    "sink": lambda rng, heads, tile, device: {
        **_window(rng, heads, tile, device),
        "sink": torch.randn(heads, device=device),
    },
    "alibi": lambda rng, heads, tile, device: {
        "causal": True,
        "alibi_slopes": torch.rand(heads, device=device) / 16,
    },
}


def draw(
    rng: random.Random,
    head_dims: tuple[int, int],
    longest: int,
    borders: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    options: str = "",
    pages: tuple[int, ...] = PAGES,
    heads: tuple[int, int] | None = None,
) -> Rows:
    """Rows of a random sequence of up to `longest` tokens, whose end often lies 0 to 127 past a
    multiple of one of `borders`, the first of which is a tile's keys; with scores times 1, 4 or 16.
    options: of OPTIONS, by default any. heads: KV heads, and query heads of each; by default any of
    one or two."""
    last = rng.randint(1, longest)
    if rng.random() < 0.7:
        border = rng.choice(borders)
        last = min(longest, border * rng.randint(1, max(1, longest // border)) + rng.randrange(128))
    first = max(0, last - rng.choice((1, 1, 2, rng.randint(1, 64), rng.randint(1, longest), last)))
    length = min(longest, last + rng.randrange(70))
    heads_k, group = heads or (rng.choice((1, 2)), rng.choice((1, 2)))
    all_heads = heads_k * group
    made = OPTIONS[options or rng.choice([*OPTIONS])](rng, all_heads, borders[0], device)
    dim, dim_v = head_dims
    scale = rng.choice((1.0, 2.0, 4.0))

    def values(count: int, columns: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(length, count, columns, device=device) * factor).to(dtype)

    q, k = values(all_heads, dim, scale), values(heads_k, dim, scale)
    return Rows(q, k, values(heads_k, dim_v), first, last, made, pages)


def same_bits(first: Result, second: Result) -> bool:
    """Whether out and lse have the same bits."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )


# Ways of the Hopper forward, which loads by TMA and wants aligned tensors.
HOPPER_WAYS = {name: way for name, way in WAYS.items() if name != "unaligned"}
HOPPER_WAYS["in_turn"] = in_turn


def differing(
    seeds: range, numerics: str, names: Sequence[str] = tuple(WAYS), **drawn: Any
) -> list[str]:
    """What differs in the pairs of ways, of one for each seed, whose results have other bits.
    names: of the ways. drawn: arguments of `draw`."""
    found = []
    for seed in seeds:
        rng = random.Random(f"{seed} {drawn['options']} {drawn['head_dims']} {drawn['dtype']}")
        torch.manual_seed(seed)
        x = draw(rng, **drawn)
        x = replace(x, options={**x.options, "numerics": numerics})
        first, second = rng.sample(names, 2)
        every = WAYS | HOPPER_WAYS
        one, other = every[first](rng, x), every[second](rng, x)
        if not same_bits(one, other):
            rows = (one[0] != other[0]).flatten(1).any(1).nonzero().flatten() + x.first
            lses = (one[1] != other[1]).any(0).nonzero().flatten() + x.first
            words = f"rows {x.first} to {x.last} of {len(x.q)}, {x.q.shape[1]}/{x.k.shape[1]} heads"
            found.append(
                f"{first} and {second}, draw {seed}, {words}: out of {rows.tolist()[:4]} and"
                f" {len(rows)} in all, lse of {lses.tolist()[:4]} and {len(lses)} in all"
            )
    return found
