"""How long the Hopper forward takes with several numbers of splits, for core/planning/splits.py.

    python -m heedful.bench.splits OUT.csv [SECONDS]   # times shapes, no more than so many seconds
    python -m heedful.bench.splits --pack FOLDER       # compiles their kernels, on any machine

Shapes are drawn, the same each time. Each is timed in few and many splits of its keys, and in as
many as the planner chooses. One split is checked against float64, and all others against that,
before they are timed and after each round; what is wrong gets no figure. Counts are interleaved,
each call has a cold L2. Counts that a few calls show to be slow get the figure of those.
"""

import csv
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from heedful import flash_attn_func
from heedful.bench.harness import protocol, script, timing
from heedful.bench.harness.cases import Case
from heedful.bench.harness.check import Parts
from heedful.bench.harness.peers import Inputs, draw
from heedful.bench.harness.protocol import in_words
from heedful.bench.harness.run import surroundings
from heedful.core.base.device import DeviceSpec, by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.planning.sizes import hopper_tiles, scheduler_of
from heedful.core.planning.splits import candidates
from heedful.core.registry.by_hand import named
from heedful.core.registry.tiles import HopperForwardConfig
from heedful.launch.prebuild import compile_all, compiling, kernels
from heedful.launch.record import Entry
from heedful.launch.spec import KernelCall
from heedful.reference.budget import allowed

Call = Callable[[], Tensor]
ROUNDS, MOST_CALLS = 5, 6
# Calls that show how long a count takes. A count that takes so many times the least is not timed
# further. Nor is any greater count, once two in a row do so and each takes longer than the one
# before.
PROBES, SLOW = 3, 1.5
# Bounds: the bytes of keys and values, and the seconds of a call if the device were as fast as
# below.
MOST_BYTES, MOST_SECONDS = 2 * 1024**3, 500e-6
FLOPS_A_SECOND, BYTES_A_SECOND = 500e12, 4e12
SECONDS = 60.0


class Shape(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    heads_k: int
    dim: int
    causal: bool

    def problem(self) -> AttentionProblem:
        return AttentionProblem.dense(*self[:6], causal=self.causal)


class Tiles(NamedTuple):
    """As core/planning/splits.py has them: rows of a work tile, keys of a tile, rows of a
    position."""

    block_m: int
    block_n: int
    pack: int


class Cut(NamedTuple):
    """How a shape is planned. programs, key_tiles: of one split."""

    config: HopperForwardConfig
    tiles: Tiles
    programs: int
    key_tiles: int
    chosen: int


class Kind(NamedTuple):
    """Shapes of few kernels. heads: of queries and keys, one of them. queries: least and most."""

    heads: tuple[tuple[int, int], ...]
    dim: int
    causal: bool
    queries: tuple[int, int]


_ALONE = ((8, 8), (16, 16), (32, 32), (12, 12))
_ANY = (*_ALONE, (32, 8), (64, 8), (8, 1))
KINDS = (
    Kind(_ALONE, 128, False, (1, 64)),
    Kind(_ALONE, 128, True, (2, 64)),
    Kind(_ANY, 128, False, (65, 1024)),
    Kind(_ANY, 128, True, (65, 1024)),
    # Query heads share tiles: in one of 64 rows, or in some of 128.
    Kind(((32, 8),), 128, False, (1, 16)),
    Kind(((64, 8), (8, 1)), 128, False, (1, 8)),
    Kind(((64, 8), (8, 1)), 128, True, (9, 64)),
    Kind(_ALONE, 64, False, (1, 64)),
    Kind(_ANY, 64, False, (129, 1024)),
    Kind(_ALONE, 256, False, (1, 64)),
    Kind(_ANY, 256, False, (65, 1024)),
)
EACH = 15
# One in so many shapes of a kind leaves less than half of the device idle.
FULL = 6
# Shapes are drawn for this device, whatever they are timed on.
DRAWN_FOR = by_name("H200")


def shapes() -> list[Shape]:
    """EACH of all kinds, in turns."""
    drawn = random.Random(0)
    turns = [(kind, turn % FULL == FULL - 1) for turn in range(EACH) for kind in KINDS]
    return [_shape(*turn, drawn) for turn in turns]


def _shape(kind: Kind, is_full: bool, drawn: random.Random) -> Shape:
    def between(least: int, most: int) -> int:
        return round(math.exp(drawn.uniform(math.log(least), math.log(most))))

    while True:
        batch, queries = between(1, 16 if is_full else 8), between(*kind.queries)
        keys = between(256, 131072)
        shape = Shape(batch, queries, keys, *drawn.choice(kind.heads), kind.dim, kind.causal)
        if not kind.causal or queries <= keys:
            case = Case("splits", shape.problem())
            seconds = max(case.flops() / FLOPS_A_SECOND, case.kv_bytes() / BYTES_A_SECOND)
            if case.kv_bytes() <= MOST_BYTES and seconds <= MOST_SECONDS:
                programs, units = cut(shape, DRAWN_FOR).programs, DRAWN_FOR.units
                # Beyond one wave kernels of one split under a mask are others.
                low, high = (units // 2, units) if is_full else (0, units // 2)
                if low < programs <= high:
                    return shape


def cut(shape: Shape, device: DeviceSpec) -> Cut:
    problem = shape.problem()
    planned = plan(problem, device, compiling(), "hopper")
    config = planned.configs["hopper.forward"]
    assert isinstance(config, HopperForwardConfig)
    tiles = Tiles(config.block_m, config.block_n, config.group_rows(problem))
    key_tiles = -(-shape.keys // config.block_n)
    programs = hopper_tiles(config, problem)
    return Cut(config, tiles, programs, key_tiles, planned.num_splits)


def counts(planned: Cut, units: int) -> list[int]:
    """Those that the planner compares, and the one that it chose."""
    return sorted({*candidates(planned.programs, planned.key_tiles, units), planned.chosen})


def backend_of(count: int, chosen: int) -> str:
    return "hopper" if count == chosen else named("hopper", key_splits=count)


def call_of(shape: Shape, inputs: Inputs, count: int, chosen: int) -> Call:
    q, k, v, _ = inputs
    backend = backend_of(count, chosen)
    return lambda: flash_attn_func(q, k, v, causal=shape.causal, backend=backend)


class Checked:
    """Results of a shape: that of one split is right for its first and last KV head, and others are
    no further from it than two right results may be."""

    def __init__(self, shape: Shape, inputs: Inputs, one: Tensor):
        self._one, self._bound, problem = one, 0.0, shape.problem()
        group, parts = problem.group, Parts(one.shape)
        alone = Case("splits", replace(problem, batch=1, heads_q=group, heads_k=1))
        for batch, head in dict.fromkeys(((0, 0), (shape.batch - 1, shape.heads_k - 1))):
            heads, key_head = slice(head * group, (head + 1) * group), slice(head, head + 1)
            place = (slice(batch, batch + 1), slice(None), heads)
            k, v = (x[batch, None, :, key_head] for x in (inputs.k, inputs.v))
            part = Inputs(inputs.q[place], k, v, inputs.dout[place])
            parts.add(f"batch {batch}, KV head {head}", place, alone, part)
        self.wrong = parts.why_wrong(one)
        for twin, once in (
            group.budgets["out"] for *_, checker in parts.parts for group in checker.groups
        ):
            budgets = (allowed("out", twin[band], once[band]) for band in twin)
            self._bound = max(self._bound, *(2 * budget.largest for budget in budgets))

    def why_wrong(self, out: Tensor) -> str | None:
        if self.wrong is not None:
            return f"one split: {self.wrong}"
        if out.shape != self._one.shape:
            return f"out has shape {tuple(out.shape)}, not {tuple(self._one.shape)}"
        furthest = float((out - self._one).abs().max())
        if not furthest <= self._bound:
            return f"{furthest:.3g} from the result of one split: more than {self._bound:.3g}"
        return None


class Timed(NamedTuple):
    """Microseconds of a count, of so many calls: the median of the rounds' medians, and their
    range."""

    splits: int
    us: float
    low: float
    high: float
    calls: int


Make = Callable[[Shape, Inputs, int, int], Call]


@dataclass(kw_only=True)
class Trial(protocol.Trial[Shape, Inputs]):
    """A shape by counts of splits, which are the peers. probed: microseconds of a count that is
    right, by few calls; counts that these show to be slow have no turns."""

    cut: Cut
    units: int
    make: Make
    probed: dict[int, float] = field(default_factory=dict, init=False)

    def draw(self) -> Inputs:
        return draw(Case("splits", self.case.problem()), self.device)

    def refer(self) -> "Checked":
        chosen = self.cut.chosen
        self._made = {
            n: self.make(self.case, self.tensors, n, chosen) for n in counts(self.cut, self.units)
        }
        return Checked(self.case, self.tensors, self._made[1]())

    def check(self, name: str, returned: Tensor) -> str | None:
        reason = super().check(name, returned)
        # The next result may lie where this one does.
        returned.fill_(math.nan)
        return reason

    def enter_all(self) -> None:
        def is_right(count: int) -> bool:
            self.enter(str(count), lambda: self._made[count])
            return str(count) in self.calls

        clock = timing.clock_of(self.device)
        self.probed = _probed(self._made, is_right, clock, self.cut.chosen)

    def turns(self, rounds: int) -> protocol.Times:
        most = SLOW * min(self.probed.values(), default=0.0)
        near = [str(n) for n, us in self.probed.items() if us <= most or n == self.cut.chosen]
        calls = {name: self.calls[name] for name in near}
        return timing.interleaved(calls, self.device, rounds, self.inspect, MOST_CALLS)


def measure(
    shape: Shape, device: torch.device, planned: Cut, units: int, make: Make = call_of
) -> tuple[list[Timed], dict[int, str]]:
    """A row for each count that is right, and why there is none of others."""
    trial = Trial(shape, device, cut=planned, units=units, make=make)
    _, times, missing = trial.measure(ROUNDS)
    rows = []
    for n, us in trial.probed.items():
        if spread := times.get(str(n)):
            rows.append(Timed(n, *spread, ROUNDS * MOST_CALLS))
        elif str(n) not in missing:
            rows.append(Timed(n, us, us, us, PROBES))
    return rows, {int(count): reason for count, reason in missing.items()}


def _probed(
    calls: Mapping[int, Call], is_right: Callable[[int], bool], clock: timing.Clock, chosen: int
) -> dict[int, float]:
    """Microseconds of counts that are right, the fewest splits first, up to where more of them only
    take longer; of the chosen count in any case."""
    probed: dict[int, float] = {}
    last, longer = math.inf, 0
    for count, call in calls.items():
        if (longer == 2 and count != chosen) or not is_right(count):
            continue
        us = statistics.median(clock(call, PROBES, 0)[0]) * 1e6
        probed[count] = us
        is_longer = us > SLOW * min(probed.values()) and us > last
        last, longer = us, 2 if longer == 2 else (longer + 1) * is_longer
    return probed


# The record


COLUMNS = (*Shape._fields, *Tiles._fields, "chosen", *Timed._fields)
METHOD = (
    "python -m heedful.bench.splits: bfloat16, shapes drawn log-uniform with a fixed seed, the"
    " Hopper forward with its tiles as planned. us: microseconds of a call with a cold L2, median"
    " of 5 interleaved rounds' medians of 6 calls, after the reference check; low, high: the range"
    " of the rounds. Where calls is 3, the median of so many: such counts took 1.5 times the least."
    " block_m, block_n, pack: rows and keys of a tile, rows of a position. chosen: by the planner"
    " of this commit."
)


def head(device: torch.device) -> Iterator[str]:
    """The record's own head, as files of measurements/ have it."""
    facts = surroundings(device)
    versions = [f"{name} {facts['versions'][name]}" for name in ("torch", "triton")]
    versions.append(f"driver {facts['driver']}")
    yield "# title: Time of the Hopper forward by splits of its keys"
    yield f"# date: {facts['date'][:10]}"
    yield f"# device: {facts['device']}"
    yield f"# versions: {', '.join(versions)}"
    yield f"# commit: {facts['commit'] or 'unknown'}"
    yield f"# method: {METHOD}"


def regret(rows: list[Timed], chosen: int) -> float:
    """How much longer than the best of all counts the chosen one takes, as a share."""
    times = {row.splits: row.us for row in rows}
    return times.get(chosen, math.inf) / min(times.values()) - 1


def record(
    out: TextIO, device: torch.device, spec: DeviceSpec, seconds: float, wanted: list[Shape], **more
) -> Iterator[str]:
    """Writes the rows of one shape after the other for so many seconds, and says what it did."""
    start, regrets = time.perf_counter(), []
    out.write("\n".join(head(device)) + "\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for shape in wanted:
        if time.perf_counter() - start > seconds:
            break
        planned = cut(shape, spec)
        try:
            rows, missing = measure(shape, device, planned, spec.units, **more)
        except Exception as error:  # the other shapes may do
            rows, missing = [], {1: in_words(error)}
        for row in rows:
            us = (f"{figure:.2f}" for figure in row[1:4])
            facts = (*shape[:6], int(shape.causal), *planned.tiles, planned.chosen)
            writer.writerow((*facts, row.splits, *us, row.calls))
        out.flush()
        for count, reason in missing.items():
            yield f"{shape}: {count} splits: {reason}"
        if rows:
            regrets.append(regret(rows, planned.chosen))
    taken = time.perf_counter() - start
    yield f"{len(regrets)} of {len(wanted)} shapes in {taken:.1f} s"
    if regrets:
        regrets.sort()
        shares = (f"{regrets[int(len(regrets) * p)]:.3f} of {p:.0%}" for p in (0.5, 0.9, 0.95))
        yield f"regret of the planner: {', '.join(shares)}, {regrets[-1]:.3f} of all"


# Kernels


def variants(wanted: list[Shape], spec: DeviceSpec) -> dict[str, tuple[KernelCall, str]]:
    """Kernel key -> what is to be compiled for these shapes."""
    seen, wanted_calls = set(), {}
    for shape in wanted:
        problem, planned = shape.problem(), cut(shape, spec)
        for count in counts(planned, spec.units):
            scheduler = scheduler_of(planned.config, problem, spec, count)
            rows = (planned.config, planned.tiles.pack, shape.queries == 1)
            what = (*rows, shape.dim, shape.causal, count > 1, scheduler)
            if what not in seen:
                seen.add(what)
                entry = Entry(problem, "forward", None, spec)
                wanted_calls |= kernels([entry], [spec], backend_of(count, planned.chosen))[0]
    return wanted_calls


def compile_first(wanted: list[Shape], spec: DeviceSpec, folder: Path | None) -> str:
    """Compiles all kernels into the cache and, if there is such a folder, into a pack."""
    start, kernels_by_key = time.perf_counter(), variants(wanted, spec)
    forwards = sum(call.kernel.function == "forward" for call, _ in kernels_by_key.values())
    compile_all(list(kernels_by_key.values()), os.cpu_count() or 1)
    if folder is not None:
        from heedful.launch.code.packs import write_pack
        from heedful.launch.compiler import artifact

        write_pack(folder, {key: artifact(*call) for key, call in kernels_by_key.items()}, {})
    taken = time.perf_counter() - start
    return f"{len(kernels_by_key)} kernels, {forwards} of them forwards, in {taken:.1f} s"


def main() -> None:
    words = sys.argv[1:]
    if len(words) < 1 + (words[:1] == ["--pack"]):
        raise script.Refused("a file for figures, or --pack and a folder, must be named")
    if words[0] == "--pack":
        script.say(compile_first(shapes(), DRAWN_FOR, Path(words[1])))
        return
    from heedful.torch.base.device import device_spec

    start, (seconds,) = time.perf_counter(), script.numbers(words[1:], "SECONDS") or [SECONDS]
    device = script.current_gpu()
    spec, wanted = device_spec(device), shapes()
    if not os.environ.get("HEEDFUL_PACK"):
        script.say(compile_first(wanted, spec, None))
    left = seconds - (time.perf_counter() - start)
    with open(words[0], "w", encoding="utf-8") as out:
        for line in record(out, device, spec, left, wanted):
            script.say(line)


if __name__ == "__main__":
    script.run(main, __doc__)
