"""JAX's calls beside PyTorch's, which run the same kernels, and beside JAX's own attention.

    python -m heedful.bench.in_jax [WORDS]

WORDS: only cases whose name has them. Device time is how long kernels, memsets and copies of a call
run, as CUPTI records them, of one program over several sets of inputs: by JAX under jit, by PyTorch
as a replayed CUDA graph. Host time is what a jitted call takes until it returns. Each result is
checked against float64 before it is timed. Rounds are interleaved.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

# Beside torch, which wants memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch
from jax import numpy as jnp
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import heedful
import heedful.jax
from heedful.bench.harness import protocol, script
from heedful.bench.harness.cases import Case, cases
from heedful.bench.harness.check import Checker
from heedful.bench.harness.exact import Results
from heedful.bench.harness.peers import Inputs, draw
from heedful.bench.harness.timing import ROUND_SECONDS, Spread, ratios

MOST_CALLS = 6
ROUNDS = 12  # twice as many as three ways have orders
HOST_ROUNDS = 6
HOST_SETS = 256
Run = Callable[[], Any]


class Way(NamedTuple):
    """One way to make a case's calls. run: makes all of them and waits; first: what the first of
    them computes, by name."""

    run: Run
    first: Callable[[], Results]


def attention(name: str, causal: bool) -> Callable[..., Any]:
    """(q, k, v) to the output, under JAX: "heedful", or an implementation of JAX's own."""
    if name == "heedful":
        return lambda q, k, v: heedful.jax.flash_attn_func(q, k, v, causal=causal)
    implementation: Any = name
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation=implementation
    )


def step(name: str, case: Case) -> Callable[..., tuple]:
    """(q, k, v, dout) to the output, with dq, dk and dv where the case is a backward."""
    attend = attention(name, case.problem.mask.causal)

    def forward(q, k, v, dout):
        return (attend(q, k, v),)

    def backward(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(dout))

    return backward if case.direction == "backward" else forward


def in_jax(name: str, case: Case, sets: Sequence[Inputs]) -> Way:
    """All sets in one program."""
    one = step(name, case)
    arrays = [tuple(map(jax.dlpack.from_dlpack, inputs)) for inputs in sets]
    program = jax.jit(lambda sets: [one(*arrays) for arrays in sets])

    def first() -> Results:
        return Results(*map(torch.from_dlpack, program(arrays)[0]))

    return Way(lambda: jax.block_until_ready(program(arrays)), first)


def in_torch(case: Case, sets: Sequence[Inputs]) -> Way:
    """All sets in a CUDA graph; on a CPU one after the other."""

    def one(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        causal = case.problem.mask.causal
        if case.direction != "backward":
            return (heedful.flash_attn_func(q, k, v, causal=causal),)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = heedful.flash_attn_func(q, k, v, causal=causal)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

    def first() -> Results:
        return Results(*one(*sets[0]))

    def every() -> list:
        return [one(*inputs) for inputs in sets]

    if sets[0].q.device.type == "cpu":
        return Way(every, first)
    every()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = every()

    def run() -> list:
        graph.replay()
        torch.cuda.synchronize()
        return kept

    return Way(run, first)


def microseconds(run: Run, calls: int) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / calls * 1e6


class Spent(NamedTuple):
    """The device time that a call takes."""

    us: float
    kernels: float
    memsets: float
    copies: float


def spent(run: Run, calls: int, device: torch.device) -> Spent:
    """The time of one of so many calls; on a CPU the time of the host."""
    if device.type == "cpu":
        return Spent(microseconds(run, calls), 0, 0, 0)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
    events = [e for e in recorded.events() or () if e.device_type.name == "CUDA"]
    memsets = sum(event.name.startswith("Memset") for event in events)
    copies = sum(event.name.startswith("Memcpy") for event in events)
    kernels = len(events) - memsets - copies
    total = sum(event.time_range.elapsed_us() for event in events)
    return Spent(total / calls, kernels / calls, memsets / calls, copies / calls)


def calls_a_turn(case: Case, device: torch.device) -> int:
    """How many calls one program makes. A turn is short: in a long one a device at its power limit
    slows down, and the next peer would be timed on it."""
    alone = in_torch(case, [draw(case, device)])
    seconds = min(microseconds(alone.run, 1) for _ in range(3)) * 1e-6
    return max(1, min(MOST_CALLS, int(ROUND_SECONDS / seconds)))


class Measured(NamedTuple):
    """By way: microseconds of a call, round by round, and what it launches; or why there are
    none."""

    times: dict[str, list[float]]
    launches: dict[str, Spent]
    missing: dict[str, str]


@dataclass(kw_only=True)
class Trial(protocol.Timed[Case, list[Inputs]]):
    """PyTorch's calls, ours under JAX, and those of `of_jax`, an implementation of JAX's."""

    of_jax: str
    launches: dict[str, Spent] = field(default_factory=dict, init=False)

    def draw(self) -> list[Inputs]:
        sets = range(calls_a_turn(self.case, self.device))
        return [draw(self.case, self.device, seed) for seed in sets]

    def refer(self) -> Checker:
        return Checker(self.case, self.tensors[0])

    def peers(self) -> dict[str, protocol.Maker]:
        arguments = (self.case, self.tensors)
        ways = {name: partial(in_jax, name, *arguments) for name in ("heedful", self.of_jax)}
        return {"PyTorch": partial(in_torch, *arguments), "JAX": ways.pop("heedful"), **ways}

    def probe(self, name: str, call: Way) -> None:
        self.inspect(name, call.first())
        call.run()

    def order(self, number: int) -> tuple[str, ...]:
        """A later peer finds a warmer device. So each peer follows each other one equally often, in
        as many rounds as there are orders."""
        orders = [*permutations(self.calls)]
        return orders[number % len(orders)]

    def microseconds(self, name: str, call: Way) -> float:
        self.launches[name] = spent(call.run, len(self.tensors), self.device)
        return self.launches[name].us


def measure(case: Case, device: torch.device, of_jax: str, rounds: int = ROUNDS) -> Measured:
    """The ways that are right."""
    trial = Trial(case, device, of_jax=of_jax)
    trial.enter_all()
    return Measured(trial.times(rounds), trial.launches, trial.missing)


@dataclass(kw_only=True)
class Dispatch(protocol.HostTimed[Case, list[tuple]]):
    """The host time until a jitted call returns, with gradients and without."""

    of_jax: str
    sets: int

    def draw(self) -> list[tuple]:
        sets = (draw(self.case, self.device, seed) for seed in range(self.sets))
        return [tuple(map(jax.dlpack.from_dlpack, inputs)) for inputs in sets]

    def peers(self) -> dict[str, protocol.Maker]:
        made = {}
        for name in ("heedful", self.of_jax):
            attend = attention(name, self.case.problem.mask.causal)

            def loss(q, k, v, attend=attend):
                return attend(q, k, v).astype(jnp.float32).sum()

            made[name] = jax.jit(attend)
            made[f"{name} with gradients"] = jax.jit(jax.grad(loss, (0, 1, 2)))
        return protocol.ready(made)

    def microseconds(self, name: str, call: Callable[..., Any]) -> float:
        kept: list = []
        taken = microseconds(lambda: kept.extend(call(*a[:3]) for a in self.tensors), self.sets)
        jax.block_until_ready(kept)
        return taken


def dispatch(
    device: torch.device, of_jax: str, rounds: int = HOST_ROUNDS, sets: int = HOST_SETS
) -> protocol.Times:
    """Microseconds of the host by way: what a jitted call takes to return."""
    case = next(case for case in cases("overhead") if case.direction == "forward")
    trial = Dispatch(case, device, of_jax=of_jax, sets=sets)
    trial.enter_all()
    return trial.times(rounds)


def _line(case: Case, row: Measured, of_jax: str) -> str:
    words = [f"{case.name:52s}"]
    words += [f"{name} {_us(times)}{_beside(row, name)};" for name, times in row.times.items()]
    words += [f"{name}: {why};" for name, why in row.missing.items()]
    for base in ("PyTorch", of_jax):
        if base in row.times and "JAX" in row.times:
            spread = ratios(row.times[base], row.times["JAX"])
            words.append(f"{base} / JAX {spread.median:.3f}")
    return " ".join(words)


def _beside(row: Measured, name: str) -> str:
    """How much more than PyTorch launches, of the same kernels."""
    if name != "JAX" or "PyTorch" not in row.launches:
        return ""
    ours, theirs = row.launches[name], row.launches["PyTorch"]
    kinds = ("kernels", "memsets", "copies")
    more = [(kind, getattr(ours, kind) - getattr(theirs, kind)) for kind in kinds]
    words = ", ".join(f"{count:+.3g} {kind}" for kind, count in more if count)
    return f" ({words})" if words else ""


def _us(times: list[float]) -> str:
    return f"{Spread.of(times).median:.1f} us"


def main(words: str) -> None:
    device = script.current_gpu()
    versions = f"torch {torch.__version__}, jax {jax.__version__}"
    script.say(f"{torch.cuda.get_device_name(device)}, {versions}")
    logs = []
    for group in ("forward", "backward"):
        for case in cases(group):
            if words in case.name:
                row = measure(case, device, "cudnn")
                script.say(_line(case, row, "cudnn"))
                if group == "forward" and {"JAX", "cudnn"} <= row.times.keys():
                    logs.append(ratios(row.times["cudnn"], row.times["JAX"]).median)
    if logs:
        mean = statistics.geometric_mean(logs)
        script.say(f"forward: {mean:.3f} of cuDNN's speed, least {min(logs):.3f}")
    for name, times in dispatch(device, "cudnn").items():
        script.say(f"dispatch {name}: {_us(times)}")


if __name__ == "__main__":
    script.run(lambda: main(" ".join(sys.argv[1:])), __doc__)
