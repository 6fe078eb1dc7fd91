"""What numerics="invariant" costs: python -m same_bits.cost KINDS [--jobs N] [--seconds S]

KINDS, of table,parts,waves,decode,backward. table: the forward cases of `heedful bench`. parts:
grids in which programs take all parts of a row's keys, or one. waves: those that leave SMs idle.
decode: steps beside a plain read. backward: deterministic calls. Microseconds, medians of
interleaved rounds, each call with a cold L2. --jobs: what is called is compiled by so many at once
beforehand.

fast: numerics="fast". invariant: as planned. turn: programs take all parts in turn. Ratios are the
time of a fast call over that of another; where results of the last two differ in a bit, it says so.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch

from heedful import configure, flash_attn_func
from heedful.bench import steps
from heedful.bench.harness.cases import cases
from heedful.core.call.numerics import with_numerics
from heedful.core.registry.by_hand import named
from same_bits.__main__ import collected, compile_calls

ROUNDS = 9
BF16 = torch.bfloat16
IN_TURN = named("hopper", "forward", key_splits=1)
# No call but those of fast has the keyword: one with a backend by hand may not have it.
WAYS: dict[str, dict[str, Any]] = {
    "fast": {"numerics": "fast"},
    "invariant": {},
    "turn": {"backend": IN_TURN},
}
Ways = dict[str, Callable[[], Any]]


class Cell(NamedTuple):
    """make: the calls of a device, by name."""

    name: str
    make: Callable[[str], Ways]


def dense(batch, len_q, len_k, heads, heads_k, dims, causal, ways=("fast", "invariant", "turn")):
    """A forward; dims: of keys and values."""

    def make(device: str) -> Ways:
        sizes = (len_q, heads, dims[0]), (len_k, heads_k, dims[0]), (len_k, heads_k, dims[1])
        q, k, v = (torch.randn(batch, *size, device=device, dtype=BF16) for size in sizes)
        options = {"causal": causal, "return_lse": True}

        def way(name: str) -> Callable[[], Any]:
            return lambda: flash_attn_func(q, k, v, **options, **WAYS[name])

        return {name: way(name) for name in ways}

    shape = f"{batch} x {len_q}" + f" over {len_k}" * (len_q != len_k)
    mask = "causal" if causal else "full"
    return Cell(f"{shape}, {heads}/{heads_k} heads, {dims[0]}/{dims[1]}, {mask}", make)


def table() -> Iterator[Cell]:
    for case in cases("forward"):
        p = case.problem
        sizes = (p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_k)
        dims = (p.head_dim, p.head_dim_v)
        yield dense(*sizes, dims, p.mask.causal, ways=("fast", "invariant"))


def parts() -> Iterator[Cell]:
    """Of one to eight tiles an SM of an H200, two to eight parts."""
    for dims, each in (((128, 128), 1), ((64, 64), 2), ((256, 256), 1), ((192, 128), 1)):
        for causal in (True, False):
            for heads in (1, 2, 4, 8):
                count = heads * each
                yield dense(1, 16384, 16384, count, count, dims, causal)
    for dims in ((128, 128), (256, 256)):
        for causal in (True, False):
            for length, heads in ((32768, 1), (32768, 2), (65536, 1)):
                yield dense(1, length, length, heads, heads, dims, causal)
    for len_q, len_k, heads, heads_k in (
        (2048, 32768, 8, 8),
        (512, 32768, 32, 8),
        (8192, 65536, 4, 4),
    ):
        yield dense(1, len_q, len_k, heads, heads_k, (128, 128), True)


def waves() -> Iterator[Cell]:
    """Of 1.2, 1.5 and 2.2 tiles an SM of an H200, two parts."""
    for length, heads, dims in (
        (10240, 2, (128, 128)),
        (12288, 2, (128, 128)),
        (12288, 3, (128, 128)),
        (16384, 3, (64, 64)),
        (16384, 8, (256, 256)),
    ):
        for causal in (True, False):
            yield dense(1, length, length, heads, heads, dims, causal)


def decode() -> Iterator[Cell]:
    known = {step.name: step for step in steps.STEPS}
    wanted = [known["64 x 8192"], known["128 log-normal"]]
    wanted += [steps.Step(f"1 x {n}", (n,)) for n in (131072, 32768, 8192)]

    def make(step: steps.Step) -> Callable[[str], Ways]:
        def of(device: str) -> Ways:
            drawn = steps.draw(step, torch.device(device))
            fast = with_numerics(None, "fast")
            options = {"fast": fast, "invariant": None, "turn": IN_TURN}
            calls = {name: steps.heedful(step, drawn, option) for name, option in options.items()}
            return calls | (
                dict(steps.reads(step, torch.device(device))) if device != "cpu" else {}
            )

        return of

    return (Cell(f"decode {step.name}, 32/8 heads", make(step)) for step in wanted)


def backward() -> Iterator[Cell]:
    def make(length: int, heads: int, dim: int, causal: bool) -> Callable[[str], Ways]:
        def of(device: str) -> Ways:
            shape = (4, 1, length, heads, dim)
            q, k, v, dout = torch.randn(*shape, device=device, dtype=BF16).unbind(0)
            x = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

            def way(name: str) -> Callable[[], Any]:
                options: dict[str, Any] = {"causal": causal, "deterministic": True}
                out = flash_attn_func(*x, **(options | WAYS[name]))
                return lambda: torch.autograd.grad(out, x, dout, retain_graph=True)

            return {name: way(name) for name in ("fast", "invariant")}

        return of

    for dim, heads in ((128, 16), (128, 2), (64, 32), (64, 4)):
        for causal in (True, False):
            mask = "causal" if causal else "full"
            yield Cell(
                f"1 x 8192, {heads} heads, {dim}, {mask}, gradients", make(8192, heads, dim, causal)
            )


KINDS = {"table": table, "parts": parts, "waves": waves, "decode": decode, "backward": backward}


def timed(ways: Ways, spoiler: torch.Tensor) -> dict[str, float]:
    """Medians. Between calls the host is ahead, so that the device waits for nothing."""
    taken: dict[str, list[Any]] = {name: [] for name in ways}
    for call in ways.values():
        call()
    for _ in range(ROUNDS):
        for name, call in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            spoiler.zero_()
            torch.cuda._sleep(300_000)
            begin.record()
            call()
            end.record()
            taken[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: 1e3 * median(a.elapsed_time(b) for a, b in each) for name, each in taken.items()}


def differ(ways: Ways) -> str:
    """Whether invariant results differ, in words."""
    if "turn" not in ways:
        return ""
    one, other = ways["invariant"](), ways["turn"]()
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (one, other)), strict=True)
    same = all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )
    return "" if same else " DIFFERENT BITS"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", type=lambda words: words.split(","))
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    until = time.time() + given.seconds
    configure(numerics="invariant")
    cells = [(kind, cell) for kind in given.kinds for cell in KINDS[kind]()]
    if given.jobs or not torch.cuda.is_available():

        def once() -> None:
            for _, cell in cells:
                for call in cell.make("cpu").values():
                    call()

        compile_calls(collected(once, "H200"), given.jobs)
    if not torch.cuda.is_available():
        return
    spoiler = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    ratios: dict[str, list[float]] = {kind: [] for kind in given.kinds}
    for kind, cell in cells:
        if time.time() > until:
            break
        torch.manual_seed(0)
        ways = cell.make("cuda")
        different = differ(ways)
        times = timed(ways, spoiler)
        ratios[kind].append(times["fast"] / times["invariant"])
        words = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
        over = [times["fast"] / times[name] for name in times if name in ("invariant", "turn")]
        print(f"{cell.name}: {words};", *(f"{ratio:.3f}" for ratio in over), different, flush=True)
    for kind, each in ratios.items():
        if each:
            print(
                f"{kind}: {len(each)} cells, geometric mean {geometric_mean(each):.4f},"
                f" least {min(each):.4f}"
            )


if __name__ == "__main__":
    main()
