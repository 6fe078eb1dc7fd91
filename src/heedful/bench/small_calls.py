"""Short calls on a CPU beside SDPA, alone and beside a busy neighbour.

    python -m heedful.bench.small_calls [ROUNDS]

Each case is timed on one thread and on two of an idle machine, and on two while another process
keeps one of the cores busy. heedful and SDPA take turns round by round, which of them is first
alternates; a figure is SDPA's median time over heedful's. Ends with status 1 where one is below its
bar. The machine has to have two cores, and nothing else to do.
"""

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import heedful
from heedful.bench.harness import protocol, script

ROUNDS = 20
HEADS, DIM = 8, 64
DROPOUT = 0.1
# A round calls for as long as this, but at least once.
ROUND_S = 2e-3
Step = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """How a case is timed, and the least speed over SDPA's."""

    name: str
    threads: int
    neighbour: bool
    bar: float


SETTINGS = (
    Setting("1 thread", 1, False, 0.7),
    Setting("2 threads", 2, False, 0.7),
    Setting("2 threads, busy neighbour", 2, True, 0.5),
)


@dataclass(frozen=True)
class Case:
    """Batch and length of a call of HEADS heads of DIM columns in float32. decode: single queries
    over lengths up to `length`; else a forward with its backward."""

    batch: int
    length: int
    dropout_p: float = 0.0
    decode: bool = False

    @property
    def name(self) -> str:
        if self.decode:
            return f"decode {self.batch} x {self.length}, lengths"
        dropout = f", dropout {self.dropout_p:g}" if self.dropout_p else ""
        return f"{self.batch} x {self.length}{dropout}"


SIZES = ((1, 16), (1, 64), (1, 128), (32, 64), (1, 512), (2, 512))
CASES = (
    *(Case(*size) for size in SIZES),
    *(Case(*size, dropout_p=DROPOUT) for size in SIZES),
    Case(8, 128, decode=True),
    Case(8, 1024, decode=True),
)


def steps(case: Case) -> tuple[Step, Step]:
    """One call of heedful's and the same of SDPA's."""
    return _decodes(case) if case.decode else _with_gradients(case)


def _with_gradients(case: Case) -> tuple[Step, Step]:
    shape = case.batch, case.length, HEADS, DIM
    q, k, v = inputs = [torch.randn(shape, device="cpu", requires_grad=True) for _ in range(3)]
    dout = torch.randn(shape, device="cpu")

    def ours() -> object:
        out = heedful.flash_attn_func(q, k, v, dropout_p=case.dropout_p)
        return torch.autograd.grad(out, inputs, dout)

    def theirs() -> object:
        heads = (x.transpose(1, 2) for x in inputs)
        out = F.scaled_dot_product_attention(*heads, dropout_p=case.dropout_p)
        return torch.autograd.grad(out.transpose(1, 2), inputs, dout)

    return ours, theirs


def _decodes(case: Case) -> tuple[Step, Step]:
    q, k, v = (
        torch.randn(case.batch, tokens, HEADS, DIM, device="cpu")
        for tokens in (1, case.length, case.length)
    )
    longest = case.length
    lengths = torch.linspace(longest // 4, longest, case.batch, device="cpu").to(torch.int32)
    places = torch.arange(longest, device="cpu")

    def ours() -> Tensor:
        return heedful.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)

    def theirs() -> Tensor:
        seen = (places < lengths[:, None])[:, None, None]
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(1, 2)

    return ours, theirs


@dataclass
class Trial(protocol.HostTimed[Case, tuple[Step, Step]]):
    """A case by heedful and by SDPA, each of which is first in every other round."""

    counts: dict[Step, int] = field(default_factory=dict, init=False)

    def draw(self) -> tuple[Step, Step]:
        return steps(self.case)

    def peers(self) -> dict[str, protocol.Maker]:
        return protocol.ready(dict(zip(("heedful", "SDPA"), self.tensors, strict=True)))

    def probe(self, name: str, call: Step) -> None:
        call()
        self.counts[call] = max(1, int(ROUND_S / _seconds(call, 1)))

    def microseconds(self, name: str, call: Step) -> float:
        return _seconds(call, self.counts[call]) * 1e6

    def order(self, number: int) -> list[str]:
        return [*self.calls][:: 1 if number % 2 else -1]


def _seconds(step: Step, calls: int) -> float:
    """The time of one of so many calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - begin) / calls


def figures(case: Case, rounds: int) -> tuple[float, float]:
    """Microseconds of a call of ours and of theirs, medians of rounds in turn."""
    times = Trial(case, torch.device("cpu")).measure(rounds).times
    return times["heedful"].median, times["SDPA"].median


@contextlib.contextmanager
def neighbour(core: int) -> Iterator[None]:
    """Another process that spins on a core."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, args=(core,), daemon=True)
    process.start()
    try:
        time.sleep(1.0)  # until it has begun
        yield
    finally:
        process.terminate()
        process.join()


def _spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def main(words: Sequence[str] = ()) -> int:
    """words: ROUNDS, as on the command line. Prints every figure; 1 if one misses its bar."""
    (rounds,) = script.numbers(words, "ROUNDS") or [ROUNDS]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise script.Refused("two cores are wanted, this process may use one")
    missed, before = 0, torch.get_num_threads()
    for setting in SETTINGS:
        busy = neighbour(cores[1]) if setting.neighbour else contextlib.nullcontext()
        torch.set_num_threads(setting.threads)
        with busy:
            for case in CASES:
                mine, other = figures(case, rounds)
                faster = other / mine
                says = "" if faster >= setting.bar else f"  below {setting.bar:g}"
                missed += bool(says)
                script.say(
                    f"{setting.name:26} {case.name:24} heedful {mine:9,.0f} us,"
                    f" SDPA {other:9,.0f} us: {faster:.2f}{says}"
                )
    torch.set_num_threads(before)
    return int(missed > 0)


if __name__ == "__main__":
    script.run(lambda: main(sys.argv[1:]), __doc__)
