"""python tools/time_masks.py [--heads 16] [--dims 128,64] [--rounds 12] [--only documents,left]

Times masks by key_ranges beside the calls that they may replace, forward and backward, in one
process, one call of each in turn; and what a new mask costs on the device. --lists: block masks
instead, of which some results are first compared with float32. It prints tables of
measurements/hopper-forward.md and hopper-backward.md. --only: masks whose names have one of these
words. --directions: of forward,backward. --flex: FlexAttention beside them. --ways: kernels by hand
beside the planned ones, such as hopper+cuts_rows=1, with commas between. --warm N: runs the calls
of mask N once, to compile them.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.template_heuristics import triton as triton_heuristics
from torch.nn.attention import flex_attention as flex

from heedful import BlockMask, masks
from heedful.core.registry.by_hand import forced, named
from heedful.torch import flash_attn_func, flash_attn_varlen_func

Call = Callable[..., Any]
Calls = dict[str, Any]


def lengths(total: int, middle: float = 2000.0, sigma: float = 1.2) -> list[int]:
    """Lengths of documents from a log-normal distribution of this median, which fill a row."""
    rng, made = random.Random(29), []
    while sum(made) < total:
        made.append(min(int(middle * 2.71828 ** rng.gauss(0, sigma)) + 1, total - sum(made)))
    return made


def inputs(batch: int, seqlen: int, heads: int, dim: int) -> list[torch.Tensor]:
    made = torch.randn(4, batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16)
    return [x.requires_grad_() for x in made[:3].unbind(0)] + [made[3]]


def attention(x: list[torch.Tensor], **how: Any) -> Call:
    q, k, v, _ = x
    return lambda: flash_attn_func(q, k, v, **how)


def ranged(x: list[torch.Tensor], ranges: Any, causal: bool, pairs: int, ways: list[str]) -> Calls:
    """The call by key_ranges, as planned and in each of these ways."""
    call = {"causal": causal, "key_ranges": ranges}
    by_hand = {way: (x, attention(x, **call, backend=forced(way)), pairs) for way in ways}
    return {"key_ranges": (x, attention(x, **call), pairs), **by_hand}


def within_documents(ids):
    """FlexAttention's function of a causal mask within documents. ids: (seqlen,)."""

    def shows(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    return shows


def flexed(x: list[torch.Tensor], shows: Any) -> Call:
    """FlexAttention of the same tensors, its mask made beforehand."""
    n = x[0].shape[1]
    return flexed_by(x, flex.create_block_mask(shows, None, None, n, n, device="cuda"))


def flex_beside(wanted: bool, x: list[torch.Tensor], shows: Any, pairs: int) -> Calls:
    return {"flex": (x, flexed(x, shows), pairs)} if wanted else {}


def allow_tiles_of_64() -> None:
    """Without max-autotune, whose choices take a minute, FlexAttention's backward has one config,
    of tiles of 128, and leaves it out where a mask has smaller tiles, before it reads options."""
    tiles = triton_heuristics.FlexBwDConfig(32, 64, 64, 32, 3, 4)
    # Its type names arguments of which none is wanted.
    setattr(InductorChoices, "get_flex_attention_bwd_configs", lambda *_: [tiles])  # noqa: B010


def flexed_by(x: list[torch.Tensor], mask: flex.BlockMask, stages: int = 3) -> Call:
    """stages: of the backward's loops, by tiles of 64."""
    q, k, v = (t.transpose(1, 2) for t in x[:3])
    # By default its kernels' tiles may have 128 rows, which smaller ones of a mask do not divide.
    # These are the tiles that max-autotune took among twelve (H200, 2026-11-27).
    options: Any = None
    if mask.BLOCK_SIZE[0] == 64:
        allow_tiles_of_64()
        sizes = {"M1": 32, "N1": 64, "M2": 64, "N2": 32}
        options = {f"bwd_BLOCK_{name}": size for name, size in sizes.items()}
        options |= {"bwd_num_warps": 4, "bwd_num_stages": stages}
        options |= {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4}
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, kernel_options=options).transpose(1, 2)


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def problems(
    heads: int, dim: int, wants_flex: bool, ways: list[str]
) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """(what it is, what makes its calls by name), each with its tensors and its visible pairs of a
    head. The first call is the plain one, which may be of other lengths. ways: of `ranged`."""
    n = 65536
    lens = lengths(n)
    pairs = sum(map(triangle, lens))
    ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).cuda()
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32).cuda()
    x = inputs(1, n, heads, dim)
    flat = [t.detach()[0].requires_grad_(t.requires_grad) for t in x]
    longest = max(lens)
    calls = {
        "packed": (flat, lambda: packed(flat, cu, longest), pairs),
        **ranged(x, masks.documents(ids[None]), True, pairs, ways),
    }

    def of_documents(calls=calls, x=x, pairs=pairs) -> Calls:
        return calls | flex_beside(wants_flex, x, within_documents(ids), pairs)

    yield f"1 x {n}, {len(lens)} documents to {longest}, causal", of_documents

    n = 16384
    plain = inputs(1, n, heads, dim)
    causal = (plain, attention(plain, causal=True), triangle(n))
    # A window that hides nothing: masks of this kind have the tile of ranges.
    same = (plain, attention(plain, window_size=(n, 0)), triangle(n))
    zero = torch.zeros(1, 1, n, 1, dtype=torch.int32, device="cuda")
    whole = torch.cat([zero, zero + n], -1)
    calls = {
        "causal": causal,
        "same tile": same,
        **ranged(plain, whole, True, triangle(n), ways),
    }
    yield f"1 x {n}, all keys as ranges, causal", lambda calls=calls: calls

    pairs = triangle(n) + triangle(4095)
    prefix = masks.prefix(torch.tensor([4096], device="cuda"), n)
    calls = {"causal": causal, **ranged(plain, prefix, False, pairs, ways)}

    def of_prefix(calls=calls, pairs=pairs) -> Calls:
        shows = lambda b, h, i, j: (i >= j) | (j < 4096)  # noqa: E731  (torch traces it)
        return calls | flex_beside(wants_flex, plain, shows, pairs)

    yield f"1 x {n}, a prefix of 4096", of_prefix

    n = 32768
    y = inputs(1, n, heads, dim)
    chunks = masks.chunks(8192, n, like=y[0])
    pairs = 4 * triangle(8192)
    calls = {"causal": causal, **ranged(y, chunks, True, pairs, ways)}
    yield f"1 x {n}, chunks of 8192, causal", lambda calls=calls: calls

    n = 8192
    z = inputs(4, n, heads, dim)
    real = torch.tensor([8192, 6100, 4500, 7000], device="cuda")
    place = torch.arange(n, device="cuda")
    lens = real.tolist()
    sides = {"right": place < real[:, None], "left": place >= n - real[:, None]}
    for side, shown in sides.items():
        # Rows of padding on the right see all keys that are none.
        more = sum((n - length) * length for length in lens) if side == "right" else 0
        pairs = sum(map(triangle, lens)) + more
        calls = {"causal": causal, **ranged(z, masks.padding(shown), True, pairs, ways)}
        yield f"4 x {n}, padding {side}, causal", lambda calls=calls: calls

    n = 65536
    pairs = sum(min(i + 1, 1024) + max(0, min(64, i - 1023)) for i in range(n))
    window = (x, attention(x, window_size=(1023, 0, 64)), pairs)
    local = masks.local_global(1023, 64, n, like=x[0])
    calls = {"window": window, **ranged(x, local, True, pairs, ways)}
    yield f"1 x {n}, window of 1024 beside 64 keys", lambda calls=calls: calls


def seen_by(mask: BlockMask, head: int, tile: int) -> torch.Tensor:
    """bool (side, seqlen_k): what the rows of a tile of queries see."""
    side, tiles = mask.side, mask.keys.shape[2]
    head = min(head, mask.rows.shape[1] - 1)
    whole, part, *pairs = mask.rows[0, head, tile].tolist()
    found = torch.zeros(side, tiles, side, dtype=torch.bool, device=mask.rows.device)
    bit = torch.arange(32, device=mask.rows.device)
    for i in range(whole + part):
        words = mask.bits[max(pairs[2 * i + 1], 0)]
        shown = (words[..., None] >> bit & 1).reshape(side, side) != 0
        found[:, pairs[2 * i]] = shown | (i < whole)
    return found.reshape(side, tiles * side)[:, : mask.seqlen_k]


def compared(x: list[torch.Tensor], mask: BlockMask, out: torch.Tensor) -> None:
    """Raises AssertionError where rows of a few tiles differ from float32, or their dQ."""
    q, k, v, dout = x
    (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
    rng = random.Random(3)
    for _ in range(3):
        head, tile = rng.randrange(q.shape[2]), rng.randrange(mask.rows.shape[2])
        rows = slice(tile * mask.side, (tile + 1) * mask.side)
        of_kv = head * k.shape[2] // q.shape[2]
        scores = q[0, rows, head].float() @ k[0, :, of_kv].float().T * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen_by(mask, head, tile), float("-inf"))
        probs = torch.softmax(scores, -1).nan_to_num(0.0)
        want = probs @ v[0, :, of_kv].float()
        torch.testing.assert_close(out[0, rows, head].float(), want, atol=0.01, rtol=0.02)
        into = dout[0, rows, head].float()
        ds = probs * (into @ v[0, :, of_kv].float().T - (into * want).sum(-1, keepdim=True))
        want = ds @ k[0, :, of_kv].float() * q.shape[-1] ** -0.5
        torch.testing.assert_close(dq[0, rows, head].float(), want, atol=0.01, rtol=0.02)


def some_tiles(heads: int, n: int, side: int, each: int) -> BlockMask:
    """Lists of a head's own, whose rows see `each` tiles drawn at random."""
    tiles = n // side
    drawn = torch.rand(1, heads, tiles, tiles, device="cuda").argsort(-1)[..., :each]
    counts = torch.full((1, heads, tiles), each, device="cuda")
    return BlockMask.of_lists(counts, drawn, seqlen_q=n, seqlen_k=n, side=side)


def diagonal_tiles(n: int, side: int) -> BlockMask:
    """The causal mask as lists, whose tiles on the diagonal are seen in part."""
    return BlockMask.of(
        lambda b, h, i, j: i >= j, seqlen_q=n, seqlen_k=n, side=side, like=torch.ones(1).cuda()
    )


def as_flex(mask: BlockMask) -> flex.BlockMask:
    """FlexAttention's mask of lists of whole tiles."""
    counts, tiles = mask.rows[..., 0].contiguous(), mask.rows[..., 2::2].contiguous()
    return flex.BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        tiles,
        counts,
        tiles,
        BLOCK_SIZE=mask.side,
        seq_lengths=(mask.seqlen_q, mask.seqlen_k),
    )


def listed(heads: int, dim: int, wants_flex: bool) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """`problems` of block masks. "plain" sees all keys. "alternating": consumers of the backward
    share a list of 64 keys and take its visits in turn."""

    def of(x: list[torch.Tensor], mask: BlockMask, pairs: int, backend: Any = "hopper") -> tuple:
        call = attention(x, block_mask=mask, backend=backend)
        compared(x, mask, call())
        return x, call, pairs

    n = 32768
    x = inputs(1, n, heads, dim)

    def some(side: int, each: int) -> Calls:
        mask = some_tiles(heads, n, side, each)
        pairs = n * each * side
        calls = {"plain": (x, attention(x), n * n), "lists": of(x, mask, pairs)}
        if side == 64:
            calls["alternating"] = of(x, mask, pairs, named("hopper", block_n=64))
        if not wants_flex:
            return calls
        theirs = as_flex(mask)
        flexes = {f"flex, {stages} stages": stages for stages in ((1, 3) if side == 64 else (3,))}
        return calls | {
            name: (x, flexed_by(x, theirs, stages), pairs) for name, stages in flexes.items()
        }

    yield f"1 x {n}, a quarter of tiles of 128, a list a head", lambda: some(128, n // 512)
    yield f"1 x {n}, 64 tiles of 64, a list a head", lambda: some(64, 64)

    short = 16384
    y = inputs(1, short, heads, dim)
    causal = (y, attention(y, causal=True), triangle(short))

    def full(side: int) -> Calls:
        lists = of(y, some_tiles(1, short, side, short // side), short**2)
        return {"plain": (y, attention(y), short**2), "lists": lists}

    def diagonal(side: int) -> Calls:
        return {"causal": causal, "lists": of(y, diagonal_tiles(short, side), triangle(short))}

    for side in (128, 64):
        yield f"1 x {short}, all tiles of {side}", lambda side=side: full(side)
    for side in (128, 64):
        what = f"1 x {short}, the causal mask by tiles of {side}"
        yield what, lambda side=side: diagonal(side)
    bounded = some_tiles(1, short, 128, short // 128)
    both = attention(y, causal=True, block_mask=bounded, backend="hopper")
    calls = {"causal": causal, "lists": (y, both, triangle(short))}
    yield f"1 x {short}, all tiles of 128 and causal", lambda: calls


def packed(x: list[torch.Tensor], cu: torch.Tensor, longest: int) -> torch.Tensor:
    q, k, v, _ = x
    return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)


def timed(runs: dict[str, Call], rounds: int) -> dict[str, float]:
    """Milliseconds of each, the median of so many rounds, each of which has all in turn."""
    taken: dict[str, list[Any]] = {name: [] for name in runs}
    for call in runs.values():
        call()
    for _ in range(rounds):
        for name, call in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The host runs ahead, so that the device waits for nothing.
            torch.cuda._sleep(400_000)
            begin.record()
            call()
            end.record()
            taken[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: median(a.elapsed_time(b) for a, b in pairs) for name, pairs in taken.items()}


def directions(calls: Calls, wanted: str) -> Iterator[tuple[str, dict[str, Call], int]]:
    def backward(x, call) -> Call:
        out = call()
        dout = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, x[:3], dout, retain_graph=True)

    if "forward" in wanted:
        yield "forward", {name: call for name, (_, call, _) in calls.items()}, 4
    if "backward" in wanted:
        yield "backward", {name: backward(x, call) for name, (x, call, _) in calls.items()}, 10


def device_time(call: Call) -> float:
    """Microseconds that a call's kernels take on the device."""
    call()
    kind = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[kind]) as found:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    return sum(e.device_time_total for e in found.events() or () if "Memset" not in e.name) / 5


def new_masks(heads: int) -> None:
    """What a new mask of documents costs: the ranges, the kernels that find tiles, flex's mask."""
    n = 65536
    lens = lengths(n)
    ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).cuda()[None]
    x = inputs(1, n, heads, 128)
    ranges = masks.documents(ids)
    run = attention(x, causal=True, key_ranges=ranges)
    out = run()
    dout = torch.randn_like(out)
    names = ("part_rows", "cut_rows", "cut_hulls", "key_hulls", "query_hulls")
    kinds = dict.fromkeys(names, 0.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            torch.autograd.grad(run(), x[:3], dout)
        torch.cuda.synchronize()
    for event in found.events() or ():
        for name in kinds:
            if name in event.name:
                kinds[name] += event.device_time_total / 5
    made = device_time(lambda: masks.documents(ids))
    shows = within_documents(ids[0])
    create = torch.compile(flex.create_block_mask)
    made_flex = device_time(lambda: create(shows, None, None, n, n, device="cuda"))
    print(f"\nnew mask, us: documents {made:.1f}", *(f"{k} {v:.1f}" for k, v in kinds.items()))
    print(f"create_block_mask, compiled: {made_flex:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--directions", default="forward,backward")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--lists", action="store_true")
    parser.add_argument("--warm", type=int, default=-1)
    parser.add_argument("--ways", default="")
    given = parser.parse_args()
    print("| dim | mask | direction | call | ms | TFLOP/s | ratio |\n|" + " --- |" * 7)
    for dim in map(int, given.dims.split(",")):
        kinds = problems(given.heads, dim, given.flex, given.ways.split(",") if given.ways else [])
        if given.lists:
            kinds = listed(given.heads, dim, given.flex)
        for number, (what, make) in enumerate(kinds):
            is_wanted = any(word in what for word in given.only.split(","))
            if not is_wanted or (given.warm >= 0 and number != given.warm):
                continue
            calls = make()
            for direction, runs, products in directions(calls, given.directions):
                found = timed(runs, 1 if given.warm >= 0 else given.rounds)
                rates = {
                    name: products * calls[name][2] * given.heads * dim / ms / 1e9
                    for name, ms in found.items()
                }
                first = next(iter(rates.values()))
                for name, rate in rates.items():
                    ms = found[name]
                    said = f"{ms:.3f} | {rate:.0f} | {rate / first:.3f}"
                    print(f"| {dim} | {what} | {direction} | {name} | {said} |", flush=True)
    if given.masks:
        new_masks(given.heads)


if __name__ == "__main__":
    main()
