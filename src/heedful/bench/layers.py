"""The host's time in an attention layer of transformers, beside heedful's call by itself.

    python -m heedful.bench.layers

A layer of transformers calls a function that its registry names. This table has what the host
spends in heedful's, and in the call that it makes, of tensors of the same small shapes:
microseconds, the least and the median of rounds, and how many they are over the call. Sequences
have 128 tokens, 8 heads of 64 dims; a cache has 8 sequences.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heedful import flash_attn_func, flash_attn_with_kvcache
from heedful.bench.harness import protocol, script, timing
from heedful.integrations.transformers.attention import attention
from heedful.integrations.transformers.compact import known_mask

LAYER = "layer"
ROUNDS = 15
# As bench/host.py has them.
SETS, QUEUED = 256, 16
LENGTH, HEADS, DIM, SEQUENCES = 128, 8, 64, 8
_MODULE = torch.nn.Module()


def _draw(batch: int, rows: int, device: torch.device, needs_grad: bool = False) -> Tensor:
    """(batch, rows, heads, dim), as a model's projections give it."""
    size = (batch, rows, HEADS, DIM)
    return torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_(needs_grad)


def _layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **others: Any):
    """As transformers calls it: heads before rows."""
    return attention(_MODULE, q, k, v, mask, scaling=DIM**-0.5, is_causal=True, **others)


def _whole(positions: Tensor, needs_grad: bool) -> tuple[Callable, Callable]:
    """A layer without a mask, and its call. positions: of a model, which all layers get."""
    device = positions.device
    rows = [_draw(1, LENGTH, device, needs_grad) for _ in "qkv"]
    turned = [x.detach().transpose(1, 2).requires_grad_(needs_grad) for x in rows]
    layer = partial(_layer, *turned, None, position_ids=positions)
    return layer, partial(flash_attn_func, *rows, softmax_scale=DIM**-0.5, causal=True)


def _step(device: torch.device) -> tuple[Callable, Callable]:
    """A layer that decodes over a static cache of which 100 keys are used, and its call."""
    q, used = _draw(SEQUENCES, 1, device), [100] * SEQUENCES
    k, v = (_draw(SEQUENCES, LENGTH, device).transpose(1, 2).contiguous() for _ in "kv")
    none, one = [0] * SEQUENCES, [1] * SEQUENCES
    facts = {"causal": True, "left": -1, "whole": False}
    mask = known_mask((none, one, none, used), (1, LENGTH), device, True, **facts)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    call = partial(
        flash_attn_with_kvcache,
        *(q, k.transpose(1, 2), v.transpose(1, 2)),
        cache_seqlens=lengths,
        softmax_scale=DIM**-0.5,
        causal=True,
    )
    return partial(_layer, q.transpose(1, 2), k, v, mask), call


class Host(protocol.HostTimed[int, dict[str, list[Callable]]]):
    """Host time of layers and calls, of so many sets of tensors."""

    def draw(self) -> dict[str, list[Callable]]:
        positions = torch.arange(LENGTH, device=self.device)[None]
        kinds = {
            "flash_attn_func": partial(_whole, positions, False),
            "flash_attn_func, with gradients": partial(_whole, positions, True),
            "flash_attn_with_kvcache": partial(_step, self.device),
        }
        calls = {}
        with torch.no_grad():
            made = {name: [kind() for _ in range(self.case)] for name, kind in kinds.items()}
        for name, pairs in made.items():
            calls[name] = [call for _, call in pairs]
            calls[f"{LAYER}: {name}"] = [layer for layer, _ in pairs]
        return calls

    def peers(self) -> dict[str, protocol.Maker]:
        return protocol.ready(self.tensors)

    def microseconds(self, name: str, call: list[Callable]) -> float:
        with torch.set_grad_enabled("gradients" in name):
            return timing.host_us(call, self.wait, QUEUED)


def table(device: torch.device, sets: int = SETS, rounds: int = ROUNDS) -> Iterator[str]:
    """Lines: microseconds of the host, and how many a layer's are over its call's."""
    trial = Host(sets, device)
    trial.enter_all()
    times = trial.times(rounds)
    yield f"{'':42}{'least':>8}{'over':>8}{'median':>8}{'over':>8}"
    for name, taken in times.items():
        base = times[name.removeprefix(f"{LAYER}: ")]
        over = [a - b for a, b in zip(taken, base, strict=True)]
        least, median = min(taken), statistics.median(taken)
        figures = f"{least:8.1f}{least - min(base):8.1f}{median:8.1f}{statistics.median(over):8.1f}"
        yield f"{name:42}{figures}"


def main() -> None:
    device = script.current_gpu()
    script.say(torch.cuda.get_device_name(device), *table(device))


if __name__ == "__main__":
    script.run(main, __doc__)
