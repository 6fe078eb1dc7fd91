"""Host time of known calls, beside SDPA's in the same process.

    python -m heedful.bench.host

A row is a call: microseconds on the host, and over those of SDPA's forward, or of its own forward
with gradients or backward. Both take the same tensors, (batch, seqlen, heads, dim): SDPA's call
transposes them, and its result, as in `heedful bench --cases overhead`; "sdpa, heads first" is the
call alone. Calls are of small tensors, each of a set of its own, so that none finds what an earlier
one left. Rows take turns; a figure is the median of the rounds' medians. Results are checked by
tests, not here: what is timed is what the host does.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from heedful import flash_attn_func, flash_attn_with_kvcache
from heedful.bench.harness import protocol, script, timing

SETS, ROUNDS = 256, 5
# Calls after which the device is waited for: a full queue would hold up the next.
QUEUED = 16
TOKENS, HEADS, DIM = 128, 8, 64
SEQUENCES, PAGE, PAGES = 4, 16, 16  # pages of a sequence
Calls = list[Callable[[], Any]]


class Known(NamedTuple):
    """A call with a set of tensors for each time that it is timed. beside: the row it is over."""

    calls: Calls
    beside: str = ""


def rows(device: torch.device, sets: int = SETS) -> dict[str, Known]:
    """All rows by name."""
    return dict(_rows(device, sets))


def _rows(device: torch.device, sets: int) -> Iterator[tuple[str, Known]]:
    def drawn(*shape: int, needs_grad: bool = False) -> torch.Tensor:
        x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        return x.requires_grad_(needs_grad)

    def inputs(needs_grad: bool) -> list[tuple[torch.Tensor, ...]]:
        shape = (1, TOKENS, HEADS, DIM)
        return [tuple(drawn(*shape, needs_grad=needs_grad) for _ in "qkv") for _ in range(sets)]

    plain, saved = inputs(False), inputs(True)
    first = [tuple(x.transpose(1, 2) for x in qkv) for qkv in plain]
    yield "sdpa, heads first", Known(_calls(scaled_dot_product_attention, first))
    yield "sdpa", Known(_calls(sdpa, plain))
    yield "forward", Known(_calls(flash_attn_func, plain), "sdpa")
    yield "sdpa, with gradients", Known(_calls(sdpa, saved))
    yield "forward, with gradients", Known(_calls(flash_attn_func, saved), "sdpa, with gradients")

    dout = drawn(1, TOKENS, HEADS, DIM)
    for name, forwards, beside in (
        ("sdpa, backward", _calls(sdpa, saved), ""),
        ("backward", _calls(flash_attn_func, saved), "sdpa, backward"),
    ):
        kept = [(call(), qkv, dout) for call, qkv in zip(forwards, saved, strict=True)]
        yield name, Known(_calls(torch.autograd.grad, kept, retain_graph=True), beside)

    lengths = torch.tensor([200, 100, 17, 250], dtype=torch.int32, device=device)
    table = torch.randperm(SEQUENCES * PAGES, device=device).int().view(SEQUENCES, PAGES)
    cos, sin = (drawn(PAGE * PAGES, DIM // 2) for _ in range(2))
    steps, appended = [], []
    for _ in range(sets):
        k_cache, v_cache = (drawn(SEQUENCES * PAGES, PAGE, HEADS, DIM) for _ in "kv")
        q, k, v = (drawn(SEQUENCES, 1, HEADS, DIM) for _ in "qkv")
        steps.append((q, k_cache, v_cache))
        appended.append((q, k_cache, v_cache, k, v))
    step, cache = flash_attn_with_kvcache, {"cache_seqlens": lengths, "block_table": table}
    yield "decode over pages", Known(_calls(step, steps, **cache, causal=True), "sdpa")
    yield "decode, appended", Known(_calls(step, appended, **cache, causal=True), "sdpa")
    cache |= {"rotary_cos": cos, "rotary_sin": sin}
    rotated = _calls(step, appended, **cache, causal=True)
    yield "decode, appended with rotary", Known(rotated, "sdpa")


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention of (batch, seqlen, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _calls(function: Callable[..., Any], sets: Iterable[tuple], **options) -> Calls:
    """The function's call of each set."""
    return [partial(function, *arguments, **options) for arguments in sets]


class Trial(protocol.HostTimed[int, dict[str, Known]]):
    """All rows, of so many sets of tensors each."""

    def draw(self) -> dict[str, Known]:
        return rows(self.device, self.case)

    def peers(self) -> dict[str, protocol.Maker]:
        return protocol.ready({name: row.calls for name, row in self.tensors.items()})

    def microseconds(self, name: str, call: Calls) -> float:
        return timing.host_us(call, lambda: torch.cuda.synchronize(self.device), QUEUED)


def measure(
    device: torch.device, sets: int = SETS, rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds by row, and over those of the row beside it."""
    trial = Trial(sets, device)
    trial.enter_all()
    times = trial.times(rounds)
    us = {name: statistics.median(turns) for name, turns in times.items()}
    beside = {name: row.beside for name, row in trial.tensors.items() if row.beside}
    over = {name: timing.ratios(times[name], times[other]).median for name, other in beside.items()}
    return us, over


def main() -> None:
    device = script.current_gpu()
    us, over = measure(device)
    for name, figure in us.items():
        ratio = f"{over[name]:8.3f}" if name in over else ""
        script.say(f"{name:30}{figure:8.1f}{ratio}")


if __name__ == "__main__":
    script.run(main, __doc__)
