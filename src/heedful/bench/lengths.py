"""Host time of calls whose lengths are known, and of calls of which only the lengths are new.

    python -m heedful.bench.lengths

Every new call has lengths that this process has not seen. Figures are medians, in microseconds, and
ratios to SDPA's host time on the same GPU. Results are checked by tests, not here: what is timed is
what the host does.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from heedful import flash_attn_func, flash_attn_varlen_func
from heedful.bench.harness import protocol, script, timing

CALLS = 400
# The bounds of a length that is drawn; calls that show which cases there are come first.
LEAST, MOST = 512, 2048
HEADS, DIM = 8, 64
Call = Callable[[], Any]


def _drawn(count: int) -> list[int]:
    """Different lengths: one that came before would not be new."""
    return random.Random(0).sample(range(LEAST + 1, MOST), count)


def dense(length: int, device: torch.device, grad: bool = False) -> Call:
    """A causal call of one sequence."""
    q, k, v = (_empty(device, grad, 1, length, HEADS, DIM) for _ in range(3))
    return lambda: flash_attn_func(q, k, v, causal=True)


def packed(length: int, device: torch.device, grad: bool = False) -> Call:
    """A causal call of three packed sequences, the longest of this length."""
    lengths = [length, length // 2, 77]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=device)
    bounds = bounds.cumsum(0, dtype=torch.int32)
    q, k, v = (_empty(device, grad, sum(lengths), HEADS, DIM) for _ in range(3))
    return lambda: flash_attn_varlen_func(q, k, v, bounds, bounds, length, length, causal=True)


def sdpa(length: int, device: torch.device) -> Call:
    """PyTorch's own call, which has no kinds."""
    q, k, v = (_empty(device, False, 1, HEADS, length, DIM) for _ in range(3))
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)


def _empty(device: torch.device, grad: bool, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=grad)


def with_backward(call: Call) -> Call:
    """The call, and the gradients of its result."""

    def both() -> None:
        out = call()
        out.backward(out.detach())

    return both


def median_us(calls: list[Call], device: torch.device) -> float:
    """Microseconds of the host in one call; the device is waited for between them."""
    return timing.host_us(calls, lambda: torch.cuda.synchronize(device), 1)


class Trial(protocol.HostTimed[Callable[[int], Call], list[int]]):
    """Calls of one length that comes again and again, and of lengths never seen."""

    def draw(self) -> list[int]:
        return _drawn(2 * CALLS)

    def peers(self) -> dict[str, protocol.Maker]:
        """After calls that show which cases there are."""
        first, new = self.tensors[:CALLS], self.tensors[CALLS:]
        median_us([self.case(length) for length in first], self.device)
        known = [self.case(LEAST)] * CALLS
        return {"known": lambda: known, "new": lambda: [self.case(length) for length in new]}

    def probe(self, name: str, call: list[Call]) -> None:
        """Nothing: a length that has been called is no new one."""

    def microseconds(self, name: str, call: list[Call]) -> float:
        return median_us(call, self.device)


def known_and_new(make: Callable[[int], Call], device: torch.device) -> tuple[float, float]:
    """The time of a call that comes again and again, and of calls of lengths never seen."""
    times = Trial(make, device).measure(1).times
    return times["known"].median, times["new"].median


def main() -> None:
    device = script.current_gpu()
    base = median_us([sdpa(LEAST, device)] * CALLS, device)
    script.say(f"SDPA forward: {base:.1f} us")
    for name, make in (("dense", dense), ("packed", packed)):
        for grad in (False, True):

            def call(length: int, make=make, grad=grad) -> Call:
                made = make(length, device, grad)
                return with_backward(made) if grad else made

            known, new = known_and_new(call, device)
            words = f"{name} forward" + " and backward" * grad
            script.say(
                f"{words}: known {known:.1f} us ({known / base:.2f} of SDPA's forward),"
                f" new {new:.1f} us ({new / base:.2f}; {new / known:.2f} of known)"
            )


if __name__ == "__main__":
    script.run(main, __doc__)
