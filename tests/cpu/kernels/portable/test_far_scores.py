"""The portable kernels, run by Triton's interpreter, where scores are far from 0 and close
together: forward and backward, and splits of the keys.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.registry.tiles import TileConfig
from heedful.launch.bind import portable
from heedful.launch.spec import Program
from heedful.torch.base.arrays import array_spec
from support.problems import budget, far_scores
from support.problems.cases import Case, build
from support.problems.far_scores import SMALL, by_backend, far
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret
from support.runs.portable_programs import Interpreted

TILES = TileConfig(16, 16)
FEW = replace(SMALL, batch=1, heads_q=1, seqlen_k=37)
HALF = replace(FEW, dtype="float16")
# Of every mechanism one: see `far_scores.grid` for all.
BOTH_WAYS = (
    far(FEW, (-1e9,), bias_dtype="float32"),
    far(FEW, (-1e30, far_scores.LEAST["float32"]), bias_dtype="float32", where="rows", hidden=True),
    far(FEW, (1e30,), bias_dtype="float32", where="parts"),
    far(FEW, score=26),
    far(replace(FEW, window=(9, 3)), (-1e9,), bias_dtype="float32"),
    far(replace(FEW, alibi="h", causal=True), score=23),
    far(replace(FEW, sink=True), (-1e9,), bias_dtype="float32", far_sink=True),
    # Sinks near 500 give a log-sum-exp that float32 rows are far from 0 by, and others are not.
    far(replace(FEW, sink=True, alibi="bh", causal=True), slope=20, far_sink=True),
    far(HALF, score=20),
    far(HALF, score=23, below=True),
    far(HALF, (-6e4,), "q"),
    far(replace(HALF, sink=True), score=20, far_sink=True),
    far(replace(HALF, sink=True), score=26, below=True, far_sink=True),
    far(replace(HALF, heads_q=2, varlen="qk", causal=True), score=26),
)


def wide(case, **facts):
    return replace(case, backward=False, **facts)


SPLIT = (
    far(wide(FEW, num_splits=2), (-1e9,), bias_dtype="float32"),
    far(wide(FEW, num_splits=3), (-1e30,), bias_dtype="float32", where="rows"),
    far(wide(FEW, num_splits=2, sink=True), (1e30,), bias_dtype="float32", far_sink=True),
    far(wide(FEW, num_splits=2), score=26),
    far(wide(HALF, num_splits=3), score=23),
    far(wide(HALF, num_splits=2, sink=True), score=26, far_sink=True),
    far(wide(HALF, num_splits=3, alibi="h"), slope=20),
    # Probabilities are of the maximum and the sum of such rows.
    far(wide(FEW, num_splits=1, return_probs=True, causal=True), (-1e9,), bias_dtype="float32"),
    far(wide(HALF, num_splits=1, return_probs=True), score=23),
)


@interpreted
@pytest.mark.parametrize("problem", BOTH_WAYS, ids=str)
def test_forward_and_gradients_are_within_the_budget(problem):
    far_scores.check(problem, by_backend(Interpreted(TILES)))


@interpreted
@pytest.mark.parametrize("problem", SPLIT, ids=str)
def test_splits_of_the_keys_are_within_the_budget(problem):
    far_scores.check(problem, by_backend(Interpreted(TILES, problem.case.num_splits)))


def moved(case, x, dout, dlse, _values):
    """A bias of 200 more: all rows are far from 0. Ranges of which the earlier has more tiles."""
    x = x._replace(bias=x.bias + 200)
    if case.key_ranges == 2:
        ranges = torch.tensor([16, 64, 85, 98], dtype=torch.int32)
        x = x._replace(key_ranges=ranges.expand(x.key_ranges.shape))
    return x, dout, dlse


BIASED = Case(batch=1, heads_q=1, heads_k=1, head_dim=16, seqlen_q=20, seqlen_k=100, bias="k")


@interpreted
@pytest.mark.parametrize(
    "mods",
    [
        {"window": (30, 20, 5)},
        {"key_ranges": 2},
        {"key_ranges": 1, "tree_mask": True, "alibi": "h"},
        {"softcap": 2.0, "varlen": "qk", "used": "qk", "batch": 2},
    ],
    ids=str,
)
def test_rows_far_from_0_see_each_key_once(mods):
    """Gradients of queries with a bias are computed again for such rows."""
    built = build(replace(BIASED, **mods), edit=moved)
    budget.check(built, budget.backend_results(Interpreted(TILES), built))


@interpreted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("referred", [False, True])
def test_gradients_of_sinks_are_of_the_references_or_else_of_the_log_sum_exps(referred, packed):
    """Rows that see nothing, of which anything may be stored, add nothing."""
    generator = torch.Generator().manual_seed(0)
    shape, heads = ((2, 300) if packed else (3, 2, 70)), 2
    lse, delta = (torch.randn(shape, generator=generator) for _ in range(2))
    is_hidden = torch.rand(shape, generator=generator) < 0.2
    x = {"lse": lse.masked_fill(is_hidden, -torch.inf), "sink": torch.tensor([0.7, -0.4])}
    x |= {"delta": delta.masked_fill(is_hidden, torch.nan), "dsink": torch.full((2,), torch.nan)}
    reference, factor = lse.double(), torch.ones(())
    if referred:
        x["reference"], x["factor"] = lse - 2, torch.rand(shape, generator=generator)
        reference, factor = x["reference"].double(), x["factor"]
    problem = AttentionProblem.dense(3, 70, 70, heads, sink=True, needs_grad=True)
    plan = Plan(problem, by_name("H200"), "hopper", "run", configs={})
    specs = {name: array_spec(tensor) for name, tensor in x.items()}
    interpret(Program(tuple(portable.calls_beside(problem, plan, specs)), ()), x)
    terms = (x["sink"].double()[:, None] - reference).exp() * factor * -delta
    want = terms.masked_fill(is_hidden, 0.0)
    want = want.sum((-1,) if packed else (0, -1))
    # Exponents are below 8 in magnitude, of which a unit of float32 is lost in each term.
    assert (x["sink"].double()[:, None] - reference).abs().max() < 8
    bound = 8 * 2.0**-23 * terms.abs().nan_to_num().sum()
    assert ((x["dsink"].double() - want).abs() <= bound).all()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_the_grid_is_within_the_budget(dtype):
    problems = far_scores.grid(replace(SMALL, dtype=dtype))
    tally = far_scores.run_many(problems, by_backend(Interpreted(TILES)), len(problems))
    assert tally.counted == len(problems) and not tally.outside, tally


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
