"""A golden table of calls that benchmarks of the host time: by row the functions that are called,
what tensors each is given, and how. No result tells a wrong one: a change shows here, to be looked
at.

After a change that is meant:

    WRITE_GOLDEN_CALLS=1 pytest tests/cpu/bench/harness/test_golden_calls.py
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

import heedful
from heedful.bench import host, lengths, small_calls, torchs
from heedful.bench.small_calls import DROPOUT, Case

GOLDEN = Path(__file__).with_name("golden_calls.txt")
CPU = torch.device("cpu")
# What a row calls, by the modules that name it.
CALLED = {
    "flash_attn_func": (heedful, host, lengths, torchs),
    "flash_attn_varlen_func": (heedful, lengths),
    "flash_attn_with_kvcache": (heedful, host),
    "scaled_dot_product_attention": (F, host, lengths),
    "grad": (torch.autograd,),
}
# Calls on a CPU are of these kinds.
SHORT = (Case(2, 16), Case(2, 16, dropout_p=DROPOUT), Case(8, 128, decode=True))
FEW = 8  # numbers that are written one by one


class Writer:
    """Writes calls. Memory has a number, the same in each call; it is kept, so that none has that
    of another."""

    def __init__(self):
        self.lines: list[str] = []
        self._kept: list[torch.Tensor] = []

    def told(self, value: Any) -> str:
        """A tensor by its memory, dtype, shape and strides, and by its numbers where these are few
        lengths. Where torch puts its own results is its affair."""
        if isinstance(value, (tuple, list)):
            return f"({self.joined(value)})"
        if not isinstance(value, torch.Tensor):
            return str(value)
        words = f"{self._number(value)}: {str(value.dtype)[6:]}{list(value.shape)}"
        if value.is_leaf or value._is_view():
            words += "" if value.is_contiguous() else f" strides {list(value.stride())}"
        words += " grad" * value.requires_grad + " result" * (not value.is_leaf)
        if value.is_floating_point() or value.dtype == torch.bool:
            return words
        if value.numel() <= FEW:
            return f"{words} {value.flatten().tolist()}"
        return f"{words} {len(value.unique())} from {value.min()} to {value.max()}"

    def joined(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.told, values))

    def _number(self, value: torch.Tensor) -> int:
        places = [x.data_ptr() for x in self._kept]
        if value.data_ptr() not in places:
            self._kept.append(value.detach())
            return len(places)
        return places.index(value.data_ptr())

    def call(self, name: str, given: tuple, named: dict[str, Any]) -> None:
        if name == "grad":
            given = given[0].shape, given[1], *(dout.shape for dout in given[2:])
        words = [f"{key}={self.told(value)}" for key, value in sorted(named.items())]
        self.lines.append(f"    {name}({', '.join([self.joined(given), *words])})")


@contextmanager
def recorded() -> Iterator[Writer]:
    """Writes calls of what is in CALLED meanwhile; what they call themselves is not written."""
    writer, depth = Writer(), [0]

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if not depth[0]:
                writer.call(name, given, named)
            depth[0] += 1
            try:
                return function(*given, **named)
            finally:
                depth[0] -= 1

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, modules in CALLED.items():
            for module in modules:
                patch.setattr(module, name, noted(name, getattr(module, name)))
        yield writer


def rows() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Words of a row, and its first call."""
    for name, row in host.rows(CPU, 1).items():
        yield f"host: {name}" + (f", over {row.beside}" if row.beside else ""), row.calls[0]
    for name, calls in torchs.Host(1, CPU).tensors.items():
        yield f"torchs: {name}", calls[0]
    for case in SHORT:
        for side, step in zip(("ours", "theirs"), small_calls.steps(case), strict=True):
            yield f"small_calls: {case.name}, {side}", step
    for make in (lengths.dense, lengths.packed):
        for grad in (False, True):
            yield f"lengths: {make.__name__}, grad={grad}", make(600, CPU, grad)
    yield "lengths: sdpa", lengths.sdpa(600, CPU)


def table() -> str:
    found = []
    with recorded() as writer:
        for name, call in rows():
            if writer.lines:
                found += [f"before {name}", *writer.lines]
                writer.lines.clear()
            call()
            found += [name, *writer.lines]
            writer.lines.clear()
    return "\n".join(found) + "\n"


def test_benchmarks_of_the_host_call_what_the_golden_table_says():
    found = table()
    if os.environ.get("WRITE_GOLDEN_CALLS"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()
