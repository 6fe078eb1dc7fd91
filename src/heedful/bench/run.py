"""One case, all its peers: check each, time those that are right, and keep what was seen."""

import datetime
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch

import heedful
from heedful.bench import machine, timing
from heedful.bench.cases import Case
from heedful.bench.check import Checker, Results
from heedful.bench.peers import Forward, Inputs, Peer, draw
from heedful.bench.timing import Spread

# Arguments of host timing are rotated over so many sets, so that nothing is reused by accident.
HOST_SETS = 256
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

    def figure(self, peer: str) -> Figure | None:
        return next((f for f in self.figures if f.peer == peer), None)


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
    ready, refused = _prepare(case, peers, device)
    bases = ("sdpa", *bases) if case.host else bases
    base = next((name for name in bases if name in ready), None)
    before = machine.clocks() if device.type == "cuda" else {}
    if case.host:
        calls = {name: _host_call(case, forward, device) for name, forward in ready.items()}
        times = timing.interleaved_host(calls, HOST_SETS, device, rounds)
    else:
        inputs = draw(case, device)
        calls = {name: _call(case, forward, inputs) for name, forward in ready.items()}
        times = timing.interleaved(calls, device, rounds)
    after = machine.clocks() if device.type == "cuda" else {}
    figures = [
        refused[peer.name] if peer.name in refused else _figure(peer.name, times, base)
        for peer in peers
    ]
    return Outcome(case, base, figures, (before, after))


def _figure(name: str, times: dict[str, list[float]], base: str | None) -> Figure:
    ratio = timing.ratios(times[base], times[name]) if base else None
    return Figure(name, Spread.of(times[name]), ratio)


def _prepare(
    case: Case, peers: list[Peer], device: torch.device
) -> tuple[dict[str, Forward], dict[str, Figure]]:
    """The peers whose result is right, and for the others why they have no figure."""
    inputs = draw(case, device)
    checker = None
    ready: dict[str, Forward] = {}
    refused: dict[str, Figure] = {}
    for peer in peers:
        reason, wrong = peer.why_not(case, device), False
        if reason is None:
            try:
                forward = peer.make(case, inputs)
                if case.compiled:
                    torch._dynamo.reset()
                    forward = torch.compile(forward)
                got = _results(case, forward, inputs)
                checker = checker or Checker(case, inputs)
                reason = checker.why_wrong(got)
                wrong = reason is not None
            except Exception as error:  # whatever a peer raises is its reason
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                wrong = peer.name.startswith("heedful")
        if reason is None:
            ready[peer.name] = forward
        else:
            refused[peer.name] = Figure(peer.name, missing=reason, wrong=wrong)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ready, refused


def _leaves(inputs: Inputs, grad: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x.detach().requires_grad_(grad) for x in inputs[:3])
    return q, k, v


def _results(case: Case, forward: Forward, inputs: Inputs) -> Results:
    """What a peer computes, once; a backward's gradients too."""
    if case.direction == "forward":
        with torch.set_grad_enabled(case.grad):
            return Results(forward(*_leaves(inputs, case.grad)).detach())
    leaves = _leaves(inputs, True)
    out = forward(*leaves)
    return Results(out.detach(), *torch.autograd.grad(out, leaves, inputs.dout))


def _call(case: Case, forward: Forward, inputs: Inputs) -> Callable[[], object]:
    """One timed call: a forward without a graph, or a backward on a kept forward."""
    if case.direction == "forward":
        leaves = _leaves(inputs, False)
        return lambda: forward(*leaves)
    leaves = _leaves(inputs, True)
    out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def _host_call(case: Case, forward: Forward, device: torch.device) -> Callable[[int], object]:
    """One call on the argument set of a number."""
    sets = [draw(case, device, seed) for seed in range(HOST_SETS)]
    if case.direction == "forward":
        leaves = [_leaves(inputs, case.grad) for inputs in sets]

        def call(index: int) -> object:
            return forward(*leaves[index])

        return call
    calls = [_call(case, forward, inputs) for inputs in sets]
    return lambda index: calls[index]()


def records(outcome: Outcome, device: torch.device) -> Iterator[dict]:
    """One plain record a figure, for JSON lines."""
    case, p = outcome.case, outcome.case.problem
    common = {**surroundings(device), "case": case.name, "group": case.group}
    common |= {
        "direction": case.direction,
        "host": case.host,
        "grad": case.grad,
        "compiled": case.compiled,
        "paged": case.paged,
        "batch": p.batch,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "heads_q": p.heads_q,
        "heads_k": p.heads_k,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "dtype": p.dtype,
        "causal": p.mask.causal,
        "window": [p.mask.left, p.mask.right],
        "lengths": list(case.lengths),
        "input_scale": case.input_scale,
        "clocks_before": outcome.clocks[0],
        "clocks_after": outcome.clocks[1],
        "base": outcome.base,
    }
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
    from heedful.core.plan import plan
    from heedful.torch.device import device_spec, toolchain

    try:
        chosen = plan(
            case.problem, device_spec(device), toolchain(), peer.partition(":")[2] or None
        )
    except ValueError:
        return {}
    tiles = {name: asdict(config) for name, config in chosen.configs.items()}
    backends = {"forward": chosen.backend, "backward": chosen.backward}
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
    """Where and when: what a figure is worth nothing without."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
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
        "python": platform.python_version(),
        "versions": {"heedful": heedful.__version__, **versions},
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
    }
