"""One case, all its peers: check each, time those that are right, and keep what was seen."""

import datetime
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

import heedful
from heedful.bench.harness import machine, protocol, timing
from heedful.bench.harness.cases import Case
from heedful.bench.harness.check import Checker
from heedful.bench.harness.exact import Results
from heedful.bench.harness.peers import Forward, Inputs, Peer, chosen_by, draw
from heedful.bench.harness.timing import Spread

# Arguments of host timing are rotated over so many sets, so that nothing is reused by accident.
HOST_SETS = 256
# So many of these have their results checked, in turn with those of the first.
WATCHED_SETS = 3
# Calls whose results are looked at before any is timed: what is kept from call to call shows then.
CALLS_BEFORE = 3
# The first of these that has a figure is what ratios are over.
BASES = ("bf16", "cudnn", "flash", "sdpa", "math")


@dataclass(frozen=True)
class Figure:
    """A peer on a case: its time in microseconds and its speed over the base peer's, round by
    round; or the reason why there is none."""

    peer: str
    time_us: Spread | None = None
    ratio: Spread | None = None
    missing: str | None = None
    wrong: bool = False


@dataclass
class Outcome:
    """A case with the figures of its peers. base: the peer that the ratios are over."""

    case: Case
    base: str | None
    figures: list[Figure] = field(default_factory=list)
    clocks: tuple[dict, dict] = ({}, {})

    def figure(self, peer: str) -> Figure:
        return next((f for f in self.figures if f.peer == peer), Figure(peer))


def measure(
    case: Case,
    peers: list[Peer],
    device: torch.device,
    rounds: int = 7,
    bases: tuple[str, ...] = BASES,
) -> Outcome:
    """Times every peer that can run the case and computes it right.

    bases: the first of these that has a figure is what ratios are over.
    """
    if case.host and device.type == "cpu":
        reason = "on a CPU the host's time is the kernel's"
        return Outcome(case, None, [Figure(peer.name, missing=reason) for peer in peers])
    trial = Trial(case, device, entrants=peers)
    trial.enter_all()
    bases = ("sdpa", *bases) if case.host else bases
    before = machine.clocks() if device.type == "cuda" else {}
    times = trial.times(rounds)
    after = machine.clocks() if device.type == "cuda" else {}
    base = next((name for name in bases if name in times), None)
    figures = [trial.refused.get(peer.name) or _figure(peer.name, times, base) for peer in peers]
    return Outcome(case, base, figures, (before, after))


def _figure(name: str, times: dict[str, list[float]], base: str | None) -> Figure:
    ratio = timing.ratios(times[base], times[name]) if base else None
    return Figure(name, Spread.of(times[name]), ratio)


@dataclass(frozen=True)
class Call:
    """One call on one set of inputs. run: what is checked and what is timed, the same object.
    results: what it returned, by name."""

    run: Callable[[], Any]
    results: Callable[[Any], Results]


def call_of(case: Case, forward: Forward, inputs: Inputs) -> Call:
    """The call that a case is about: a forward, or a backward on a kept forward."""
    backward = case.direction == "backward"
    q, k, v = (x.detach().requires_grad_(case.grad or backward) for x in inputs[:3])
    if not backward:
        return Call(lambda: forward(q, k, v), lambda out: Results(out.detach()))
    out = forward(q, k, v)
    return Call(
        lambda: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True),
        lambda gradients: Results(out.detach(), *gradients),
    )


def _spoil(returned: Any) -> None:
    """Fills what a call returned with NaN, so that a later call that does not write, or returns it
    again, is found."""
    for tensor in returned if isinstance(returned, tuple) else (returned,):
        if tensor is not None:
            tensor.detach().fill_(torch.nan)


class Returned(NamedTuple):
    """The result of the call on one set of inputs, and the number of the set."""

    call: Call
    number: int
    value: Any


@dataclass(kw_only=True)
class Trial(protocol.Trial[Case, list[Inputs]]):
    """Peers of a case of bench/harness/cases.py. A peer has one call a set of inputs: one set, or
    many where the host's time is asked for, of which some are watched."""

    entrants: Sequence[Peer]

    @property
    def refused(self) -> dict[str, Figure]:
        """Figures of those that cannot run the case or have computed it wrong."""
        wrong = self.wrong | {name for name in self.raised if name.startswith("heedful")}
        return {
            name: Figure(name, None, None, why, name in wrong) for name, why in self.missing.items()
        }

    def draw(self) -> list[Inputs]:
        seeds = range(HOST_SETS if self.case.host else 1)
        drawn = random.Random(0).sample(seeds[1:], WATCHED_SETS) if self.case.host else []
        self.watched = [0, *drawn]
        return [draw(self.case, self.device, seed) for seed in seeds]

    def refer(self) -> Callable[[int], Checker]:
        """By the number of a set, when it is first asked for."""
        return cache(lambda number: Checker(self.case, self.tensors[number]))

    def peers(self) -> dict[str, protocol.Maker]:
        return {peer.name: partial(self._calls_of, peer) for peer in self.entrants}

    def _calls_of(self, peer: Peer) -> list[Call] | str:
        reason = peer.why_not(self.case, self.device)
        if reason is not None:
            return reason
        forward = peer.make(self.case, self.tensors[0])
        if self.case.compiled:
            torch._dynamo.reset()
            forward = torch.compile(forward)
        return [call_of(self.case, forward, inputs) for inputs in self.tensors]

    def check(self, name: str, returned: Returned) -> str | None:
        call, number, value = returned
        reason = self.reference(number).why_wrong(call.results(value))
        if reason is None:
            _spoil(value)
        return reason

    def probe(self, name: str, call: list[Call]) -> None:
        for _ in range(CALLS_BEFORE):
            for number in self.watched:
                self.inspect(name, Returned(call[number], number, call[number].run()))

    def turns(self, rounds: int) -> dict[str, list[float]]:
        def inspect(name: str, number: int, value: Any) -> None:
            self.inspect(name, Returned(self.calls[name][number], number, value))

        if self.case.host:
            sets = {name: [call.run for call in sets_of] for name, sets_of in self.calls.items()}
            return timing.interleaved_host(sets, self.device, rounds, self.watched, inspect)
        calls = {name: sets_of[0].run for name, sets_of in self.calls.items()}
        return timing.interleaved(
            calls, self.device, rounds, lambda name, value: inspect(name, 0, value)
        )


def records(outcome: Outcome, device: torch.device) -> Iterator[dict]:
    """One plain record a figure, for JSON lines."""
    case, p = outcome.case, outcome.case.problem
    of_case = ("direction", "host", "grad", "compiled", "paged")
    of_problem = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v")
    common = {**surroundings(device), "case": case.name, "group": case.group}
    common |= {name: getattr(case, name) for name in of_case}
    common |= {name: getattr(p, name) for name in (*of_problem, "dtype")}
    common |= {"causal": p.mask.causal, "window": [p.mask.left, p.mask.right]}
    common |= {"lengths": list(case.lengths), "input_scale": case.input_scale}
    common |= {"clocks_before": outcome.clocks[0], "clocks_after": outcome.clocks[1]}
    common["base"] = outcome.base
    for figure in outcome.figures:
        yield {
            **common,
            "peer": figure.peer,
            **_numbers(case, figure),
            **_plan(figure.peer, case, device),
        }


def _plan(peer: str, case: Case, device: torch.device) -> dict:
    """Which of heedful's kernels ran, with which tiles and splits; empty for other peers."""
    if not peer.startswith("heedful"):
        return {}
    from heedful.core.planning.plan import plan
    from heedful.torch.base.device import device_spec, toolchain

    try:
        chosen = plan(case.problem, device_spec(device), toolchain(), chosen_by(peer))
    except ValueError:
        return {}
    tiles = {name: asdict(config) for name, config in chosen.configs.items()}
    backends = {"forward": chosen.variant_of("forward").label, "backward": chosen.backward}
    if chosen.backward:
        backends["backward"] = chosen.variant_of("backward").label
    return {"backends": backends, "num_splits": chosen.num_splits, "tiles": tiles}


def _numbers(case: Case, figure: Figure) -> dict:
    if figure.time_us is None:
        return {"missing": figure.missing, "wrong": figure.wrong}
    time, ratio = figure.time_us, figure.ratio
    numbers = {"time_us": time.median, "time_us_low": time.low, "time_us_high": time.high}
    if not case.host:
        numbers["tflops"] = tflops(case, time)
        numbers["kv_gb_per_s"] = kv_gb_per_s(case, time)
    if ratio is not None:
        numbers |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return numbers


def tflops(case: Case, time_us: Spread) -> float:
    return case.flops() / time_us.median * 1e-6


def kv_gb_per_s(case: Case, time_us: Spread) -> float:
    return case.kv_bytes() / time_us.median * 1e-3


def surroundings(device: torch.device) -> dict:
    """Device, versions and date, which belong to every figure."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else machine.cpu_name()
    packages = {
        "torch": "torch",
        "triton": "triton",
        "flash-attn": "flash_attn",
        "flash-attn-4": "flash_attn",
        "flashinfer-python": "flashinfer",
    }
    versions = {name: machine.version(name, module) for name, module in packages.items()}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "device": name,
        "driver": machine.driver(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"heedful": heedful.__version__, **versions},
        "compiler": machine.compiler(),
        "cudnn": torch.backends.cudnn.version() if is_gpu else None,
    }
