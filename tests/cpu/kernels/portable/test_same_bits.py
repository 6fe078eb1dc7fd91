"""With numerics="invariant" a row has the same bits, whichever way a call computes it; faults that
are planted are noticed.

Small tiles and parts, so that short sequences have several parts. They run in a process of their
own: see `support.runs.interpreted`.
"""

import importlib
import importlib.util
import random
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime import interpreter

from heedful.core.base.device import by_name
from heedful.core.registry import configs
from heedful.core.registry.tiles import PortablePartsConfig
from support.problems import budget, ways
from support.problems.cases import Case
from support.problems.grids import in_turns
from support.runs import portable_programs, standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret
from support.runs.portable_programs import Interpreted

TILES = PortablePartsConfig(16, 16, 1, 1, part_keys=32)
KERNELS = "heedful.kernels.portable.forward.parts"
OTHER_WAYS = [name for name in ways.WAYS if name != "whole"]


def small(**facts) -> Case:
    return Case(**{"batch": 1, "backward": False, **facts})


CASES = (
    small(),
    small(causal=True, heads_q=3, heads_k=1, sink=True, used="qk"),
    small(window=(5, -1, 3), softcap=3.0),
    small(key_ranges=2, causal=True, varlen="qk", used="qk", batch=3),
    small(key_ranges=1, window=(20, 3, 4), tree_mask=True, sink=True, ranges_of="h"),
    small(batch=2, heads_q=1, heads_k=1, alibi="bh", bias="q", causal=True),
    small(kv_dtype="int8", kv_group=8, kv_shift=True),
    small(kv_dtype="float8_e4m3fn", varlen="q", page_size=4, causal=True),
    small(head_dim=576, head_dim_v=512, dtype="float16", heads_q=1, heads_k=1, causal=True),
    small(seqlen_k=0, sink=True),
    small(layout="offset", dtype="float16", scale=-0.3),
    small(varlen="qk", batch=2, layout="offset"),
    Case(
        head_dim=576, head_dim_v=512, heads_q=1, heads_k=1, seqlen_q=3, page_size=8, backward=False
    ),
)


def _product(a, b, d, input_precision, max_num_imprecise_acc):
    """The interpreter's product, summed in the order of columns. A BLAS sums a row in an order that
    depends on its place in the matrix."""
    terms = a.data.astype(d.data.dtype)[:, :, None] * b.data.astype(d.data.dtype)[None]
    return interpreter.TensorHandle(terms.sum(1) + d.data, d.dtype.scalar)


@contextmanager
def tiles(config: PortablePartsConfig = TILES, units: int = 132):
    """A stand-in for a GPU with so many SMs, where calls with numerics="invariant" have these
    tiles."""
    choose = configs.choose

    def chosen(kernel, problem, spec):
        made = choose(kernel, problem, spec)
        is_own = isinstance(made.config, PortablePartsConfig)
        return replace(made, config=config) if is_own else made

    def spec_of(name: str):
        return replace(by_name(name), units=units)

    with (
        mock.patch.object(standin, "by_name", spec_of),
        standin.gpu(interprets=True) as gpu,
        mock.patch.object(configs, "choose", chosen),
        mock.patch.object(interpreter.interpreter_builder, "create_dot", _product),
    ):
        yield gpu


@contextmanager
def planted(folder: Path, right: str, wrong: str):
    """`tiles` with kernels in whose source this stands in place of what is right."""
    package, _, name = KERNELS.rpartition(".")
    source = Path(str(importlib.import_module(KERNELS).__file__)).read_text()
    assert right in source
    file = folder / f"{name}.py"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(KERNELS, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with (
        mock.patch.dict(sys.modules, {KERNELS: module}),
        mock.patch.object(importlib.import_module(package), name, module),
        tiles(),
    ):
        yield


def compared(rng: random.Random, way: str, numerics="invariant", by=tiles) -> bool:
    """Whether a way gives the bits of the whole sequence for drawn rows. by: where it runs."""
    torch.manual_seed(rng.randrange(2**31))
    x = ways.draw(rng, (16, 16), 80, (16, 32), torch.float16)
    x = replace(x, options={**x.options, "numerics": numerics})
    with tiles():
        want = ways.whole(rng, x)
    with by():
        return ways.same_bits(ways.WAYS[way](rng, x), want)


@interpreted
@pytest.mark.parametrize("way", in_turns(OTHER_WAYS, each=2))
def test_a_way_gives_the_bits_of_the_whole_sequence(way):
    for seed in range(2):
        assert compared(random.Random(f"{way} {seed}"), way), seed


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_many_draws_give_the_bits_of_the_whole_sequence(way):
    for seed in range(40):
        assert compared(random.Random(f"{way} {seed}"), way), seed


@interpreted
def test_fast_calls_have_other_bits_in_another_way():
    draws = ((random.Random(f"{way} {seed}"), way) for way in OTHER_WAYS for seed in range(2))
    assert any(not compared(rng, way, "fast") for rng, way in draws)


FAULTS = {
    "order of tiles": ("begin2 + (visit - count)", "begin2 + (count + count2 - 1 - visit)"),
    "order of merges": ("part * io.partial_", "(params.order.splits - 1 - part) * io.partial_"),
    "reference of a tile": (
        "        # S = Q K^T\n",
        "        m_M = tl.zeros_like(m_M) + tl.max(m_M, 0)\n",
    ),
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path):
    def faulty():
        return planted(tmp_path, *FAULTS[fault])

    draws = ("chunk", "packed", "cache")
    seeds = ((way, seed) for seed in range(4) for way in draws)
    assert any(not compared(random.Random(f"{w} {s}"), w, by=faulty) for w, s in seeds)


@interpreted
@pytest.mark.parametrize("facts", [{"block_n": 32}, {"part_keys": 48}], ids=str)
def test_other_tiles_are_noticed(facts):
    def other():
        return tiles(replace(TILES, **facts))

    seeds = ((way, seed) for seed in range(4) for way in ("chunk", "packed", "cache"))
    assert any(not compared(random.Random(f"{w} {s}"), w, by=other) for w, s in seeds)


@interpreted
@pytest.mark.parametrize("sink", [False, True])
def test_one_program_merges_parts_as_a_kernel_of_its_own_does(sink):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 50, 2, 16).half() for _ in "qkv")
    x = {"causal": True, "return_lse": True, "numerics": "invariant"}
    if sink:
        x["sink"] = torch.randn(2)
    x["seqused_q"] = torch.tensor([50, 20], dtype=torch.int32)
    import heedful.torch as heedful

    results, kernels = [], []
    for units in (1, 1000):
        with tiles(units=units) as gpu:
            results.append(heedful.flash_attn_func(q, k, v, **x))
            kernels.append([launch.kernel.function for launch in gpu.launches])
    assert kernels == [["attention_in_parts"], ["attention_in_parts", "merge_parts"]]
    assert ways.same_bits(*results)


class InParts(Interpreted):
    """The programs of numerics="invariant", as the budget's `Backend`."""

    def _plan(self, problem):
        return super()._plan(replace(problem, invariant=True, num_splits=0))

    def _run(self, build, problem, tensors) -> None:
        super()._run(lambda p, *rest: build(replace(p, invariant=True), *rest), problem, tensors)


@interpreted
@pytest.mark.parametrize("case, num_splits", in_turns(CASES, [1, 3]), ids=str)
def test_results_are_within_the_budget(case, num_splits):
    budget.run(InParts(TILES, num_splits), case)


def interpret_with_poison(program, tensors) -> None:
    """As `interpret`, but that what is no number beside a part without keys stays so: kernels that
    clear such parts write no rest."""
    attention, merge = program.calls
    made = interpret(replace(program, calls=(attention,)), tensors)
    is_empty = made["partial_lse"] == -torch.inf
    assert is_empty.any()
    made["partial_rest"].masked_fill_(is_empty, torch.nan)
    interpret(replace(program, calls=(merge,), workspaces=()), {**tensors, **made})


@interpreted
@pytest.mark.parametrize("case", [small(causal=True), small(causal=True, sink=True)], ids=str)
def test_a_part_without_keys_need_not_have_a_rest(case):
    with mock.patch.object(portable_programs, "interpret", interpret_with_poison):
        budget.run(InParts(TILES, 3), case)


@starts_interpreter
def test_checks_pass_in_the_interpreter():
    pass_in_the_interpreter(__file__)
