"""Torch's own calls with heedful in their place, beside heedful's calls of the same tensors.

    python -m heedful.bench.torchs

While `heedful.integrations.torch.activate` is in force, F.scaled_dot_product_attention runs the
kernels that flash_attn_func runs. The first table has microseconds of the device by direction and
shape. The second has what the host spends in a call of small tensors: of SDPA, and of the operator
that it calls. A ratio is torch's call over ours. Gradients of ours are those that autograd records.
Tensors are stored with rows before heads, so that torch's call makes no copy.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful import flash_attn_func
from heedful.bench.harness import protocol, script, timing
from heedful.integrations.torch import activate, restore, sdpa

OURS, TORCHS, SCOPE = "flash_attn_func", "activate()", "sdpa()"
# Torch's operator by itself: without what SDPA does before it, to choose among kernels.
OPERATOR = "operator"
ROUNDS = 7
# Sets of small tensors, and calls after which the device is waited for, as bench/host.py has them.
SETS, QUEUED = 256, 16


class Shape(NamedTuple):
    """A call of (batch, rows, heads, dim)."""

    batch: int
    rows: int
    heads: int
    heads_k: int
    dim: int
    causal: bool

    def __str__(self) -> str:
        words = f"{self.batch} x {self.rows}, {self.heads}/{self.heads_k} x {self.dim}"
        return words + " causal" * self.causal

    def draw(self, device: torch.device, needs_grad: bool) -> tuple[Tensor, ...]:
        """q, k and v, in bfloat16."""
        heads = self.heads, self.heads_k, self.heads_k
        sizes = [(self.batch, self.rows, count, self.dim) for count in heads]
        drawn = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes)
        return tuple([x.requires_grad_(needs_grad) for x in drawn])


SHAPES = [
    Shape(batch, rows, heads, heads_k, dim, causal)
    for dim, heads, heads_k in ((128, 16, 16), (128, 16, 4), (64, 32, 32), (64, 32, 8))
    for batch, rows in ((8, 2048), (1, 16384))
    for causal in (False, True)
]
SMALL = Shape(1, 128, 8, 8, 64, True)


def _turned(qkv: tuple[Tensor, ...], needs_grad: bool) -> tuple[Tensor, ...]:
    """The same memory with heads before rows. Leaves, as ours are: a backward would pass through
    the views' own nodes otherwise, which take as long as a call."""
    return tuple([x.detach().transpose(1, 2).requires_grad_(needs_grad) for x in qkv])


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention of (batch, rows, heads, dim)."""
    return flash_attn_func(q, k, v, causal=causal)


def torchs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same by whatever is in the place of F.scaled_dot_product_attention."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    shared = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
    return out.transpose(1, 2)


def heads_first(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same of (batch, heads, rows, dim), as it comes."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def operator(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same by the operator of FlashAttention that SDPA calls."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]


class Device(protocol.Trial[tuple[Shape, bool], tuple[Tensor, ...]]):
    """One direction of one shape: (shape, whether it is the backward)."""

    def draw(self) -> tuple[Tensor, ...]:
        shape, backward = self.case
        return shape.draw(self.device, backward)

    def refer(self) -> Any:
        """Our own result: both run the same kernels."""
        shape, backward = self.case
        return _call(ours, self.tensors, shape.causal, backward)()

    def peers(self) -> dict[str, protocol.Maker]:
        shape, backward = self.case
        by_name = {OURS: ours, TORCHS: torchs}
        calls = {
            name: _call(function, self.tensors, shape.causal, backward)
            for name, function in by_name.items()
        }
        return protocol.ready(calls)

    def check(self, name: str, returned: Any) -> str | None:
        # Atomic sums of a gradient may differ in their last bit.
        near = [_are_near(x, y) for x, y in zip(returned, self.reference, strict=True)]
        return None if all(near) else "another result than flash_attn_func's"


def _are_near(x: Tensor, y: Tensor) -> bool:
    rounding = torch.finfo(y.dtype).eps * y.abs().max()
    return bool((x - y).abs().max() <= rounding)


def _call(function, tensors: tuple[Tensor, ...], causal: bool, backward: bool) -> Callable:
    """A call that returns a tuple: the output, or the gradients of one that was computed before."""
    if not backward:
        return lambda: (function(*tensors, causal),)
    out = function(*tensors, causal)
    return partial(torch.autograd.grad, out, tensors, out.detach(), retain_graph=True)


class Host(protocol.HostTimed[int, dict[str, list[Callable]]]):
    """Host time of small calls, of so many sets of tensors."""

    def draw(self) -> dict[str, list[Callable]]:
        return dict(self._rows())

    def _rows(self) -> Iterator[tuple[str, list[Callable]]]:
        for words, needs_grad in (("", False), (", with gradients", True)):
            sets = [SMALL.draw(self.device, needs_grad) for _ in range(self.case)]
            turned = [_turned(qkv, needs_grad) for qkv in sets]
            calls = {OURS: (ours, sets), TORCHS: (heads_first, turned)}
            if self.device.type == "cuda":
                calls[OPERATOR] = operator, turned
            for name, (function, tensors) in calls.items():
                yield name + words, [partial(function, *qkv, True) for qkv in tensors]
                if needs_grad:
                    kept = [_call(function, qkv, True, True) for qkv in tensors]
                    yield name + ", backward", kept
        sets = [SMALL.draw(self.device, False) for _ in range(self.case)]
        turned = [_turned(qkv, False) for qkv in sets]
        yield SCOPE, [partial(heads_first, *qkv, True) for qkv in turned]

    def peers(self) -> dict[str, protocol.Maker]:
        return protocol.ready(self.tensors)

    def microseconds(self, name: str, call: list[Callable]) -> float:
        with sdpa() if name == SCOPE else nullcontext():
            return timing.host_us(call, self.wait, QUEUED)


def device_table(device: torch.device, shapes: list[Shape], rounds: int) -> Iterator[str]:
    """Lines of the first table: microseconds of ours and of torch's, and their ratio."""
    yield f"{'':34}{OURS:>16}{TORCHS:>12}{'ratio':>8}  (range)"
    for backward in (False, True):
        for shape in shapes:
            trial = Device((shape, backward), device)
            trial.enter_all()
            times = trial.times(rounds)
            words = f"{'backward' if backward else 'forward':9}{shape}"
            if OURS not in times or TORCHS not in times:
                yield f"{words}: none ({trial.missing})"
                continue
            over = timing.ratios(times[TORCHS], times[OURS])
            medians = [statistics.median(times[name]) for name in (OURS, TORCHS)]
            figures = f"{medians[0]:16.1f}{medians[1]:12.1f}{over.median:8.3f}"
            yield f"{words:34}{figures}  ({over.low:.3f} to {over.high:.3f})"


def host_table(device: torch.device, sets: int = SETS, rounds: int = ROUNDS) -> Iterator[str]:
    """Lines of the second table: microseconds of the host, and how many they are over ours."""
    trial = Host(sets, device)
    trial.enter_all()
    us = {name: statistics.median(times) for name, times in trial.times(rounds).items()}
    for name, figure in us.items():
        base = OURS + name.partition(",")[1] + name.partition(",")[2]
        yield f"{name:34}{figure:8.1f}{figure - us[base]:+8.1f}"


def main() -> None:
    device = script.current_gpu()
    report = activate()
    try:
        for line in (*device_table(device, SHAPES, ROUNDS), "", *host_table(device)):
            script.say(line)
    finally:
        restore()
    script.say("", str(report))


if __name__ == "__main__":
    script.run(main, __doc__)
