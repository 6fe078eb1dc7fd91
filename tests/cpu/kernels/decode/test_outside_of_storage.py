"""The decode kernel touches nothing outside of the caller's tensors, whatever page numbers, rows
and lengths say: run by Triton's interpreter, with caches and results within larger tensors of NaN.
What is read out there shows in the results, and what is written there is NaN no more.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.registry.tiles import DecodeConfig
from heedful.launch.bind import decode
from heedful.torch.base.arrays import array_spec
from support.fenced import Fenced
from support.problems.grids import in_turns
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

TILES = DecodeConfig(16, 16, programs=1, least_tiles=1)
UNITS = 5
INF = float("inf")
PAGES, PAGE = 6, 8
Named = dict[str, Any]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def cache_problem(batch: int, rows: int, seqlen_k: int, **facts) -> AttentionProblem:
    facts = {"used_k": True} | facts
    return AttentionProblem.dense(
        batch, rows, seqlen_k, 2, 1, head_dim=16, dtype="float16", **facts
    )


def forward(problem: AttentionProblem, num_splits: int = 0, tiles=TILES, **tensors: torch.Tensor):
    """(out, lse) of the decode kernel, which writes nothing beside them."""
    problem = replace(problem, num_splits=num_splits)
    device = replace(by_name("MI300X"), units=UNITS)
    chosen = Plan(
        problem, device, "decode", "run", variant="portable", configs={"decode.forward": tiles}
    )
    q = tensors["q"]
    results = {
        "out": Fenced.like(torch.full((*q.shape[:-1], problem.head_dim_v), 7.0).half()),
        "lse": Fenced.like(torch.full(problem.lse_shape, 7.0)),
    }
    given: Named = {**tensors, **{name: fenced.inside for name, fenced in results.items()}}
    specs = {name: array_spec(tensor) for name, tensor in given.items()}
    interpret(decode.forward(problem, chosen, specs), given)
    for fenced in results.values():
        fenced.assert_whole()
    return results["out"].inside, results["lse"].inside


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


SPLITS = [0, 1, 3]
# Of 8 rows, keys are the rows of products.
WAYS = in_turns(SPLITS, (TILES, replace(TILES, block_m=8)))


@interpreted
@pytest.mark.parametrize("num_splits, tiles", WAYS)
def test_pages_that_do_not_exist_give_what_the_nearest_that_does_gives(num_splits, tiles):
    k, v = (Fenced.like(randn(PAGES, PAGE, 1, 16)) for _ in range(2))
    used = ints(30, 17, 32)
    # The first past the last page, the one before the first, and such as are far off.
    table = ints(2, -1, PAGES, PAGES - 1, 0, 1, PAGES + 1, 3, -2, 3, 4, 8).view(3, 4)
    given: Named = {"q": randn(3, 2, 2, 16), "k": k.inside, "v": v.inside, "seqused_k": used}
    problem = cache_problem(3, 2, 32, page_size=PAGE, causal=True)
    got = forward(problem, num_splits, tiles, **given, block_table=table)
    want = forward(problem, num_splits, tiles, **given, block_table=table.clamp(0, PAGES - 1))
    assert_same(got, want)


@interpreted
@pytest.mark.parametrize("num_splits", SPLITS)
def test_scales_of_pages_that_do_not_exist_are_those_of_the_nearest(num_splits):
    k, v = (
        Fenced.like(torch.randint(-9, 9, (PAGES, PAGE, 1, 16), dtype=torch.int8)) for _ in range(2)
    )
    scales = [Fenced.like(torch.rand(PAGES, PAGE, 1, 2)) for _ in range(4)]
    names = ("k_descale", "v_descale", "k_shift", "v_shift")
    given: Named = {name: fenced.inside for name, fenced in zip(names, scales, strict=True)}
    given |= {"q": randn(1, 1, 2, 16), "k": k.inside, "v": v.inside, "seqused_k": ints(32)}
    table = ints(-1, PAGES, 2, PAGES + 1).view(1, 4)
    facts: Named = {"kv_dtype": "int8", "kv_group": 8, "kv_shift": True}
    problem = cache_problem(1, 1, 32, page_size=PAGE, **facts)
    got = forward(problem, num_splits, **given, block_table=table)
    want = forward(problem, num_splits, **given, block_table=table.clamp(0, PAGES - 1))
    assert_same(got, want)


@interpreted
@pytest.mark.parametrize("num_splits", SPLITS)
def test_entries_past_a_length_are_never_looked_up(num_splits):
    """Numbers so large that an access by them would end the process."""
    table = ints(1, 2, 2**31 - 1, 3, -(2**31), 2**30).view(2, 3)
    problem = cache_problem(2, 1, 24, page_size=8)
    given: Named = {"q": randn(2, 1, 2, 16), "k": randn(4, 8, 1, 16), "v": randn(4, 8, 1, 16)}
    given |= {"seqused_k": ints(16, 5)}
    got = forward(problem, num_splits, **given, block_table=table)
    want = forward(problem, num_splits, **given, block_table=ints(1, 2, 0, 3, 0, 0).view(2, 3))
    assert_same(got, want)


@interpreted
@pytest.mark.parametrize("num_splits, sink", in_turns(SPLITS, (False, True)))
@pytest.mark.parametrize("lengths", [(-1, 0, -(2**31), -7), (0,), (-3,)], ids=str)
def test_lengths_below_one_read_nothing_and_give_zeros(lengths, num_splits, sink):
    nothing = torch.full((len(lengths), 24, 1, 16), torch.nan).half()
    given: Named = {"q": randn(len(lengths), 3, 2, 16), "k": nothing, "v": nothing}
    logits = torch.randn(2)
    given |= {"sink": logits} if sink else {}
    problem = cache_problem(len(lengths), 3, 24, sink=sink)
    out, lse = forward(problem, num_splits, **given, seqused_k=ints(*lengths))
    assert (out == 0).all()
    want = logits[None, :, None].expand(lse.shape) if sink else torch.full(lse.shape, -INF)
    torch.testing.assert_close(lse, want)


@interpreted
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_cache_without_keys_gives_zeros(batch, num_splits):
    given: Named = {"q": randn(batch, 1, 2, 16)}
    given |= {name: torch.empty(batch, 0, 1, 16).half() for name in ("k", "v")}
    out, lse = forward(cache_problem(batch, 1, 0, used_k=False), num_splits, **given)
    assert (out == 0).all() and (lse == -INF).all()


@interpreted
@pytest.mark.parametrize("num_splits", SPLITS)
def test_lengths_beyond_the_storage_end_with_it(num_splits):
    k, v = (Fenced.like(randn(2, 24, 1, 16)) for _ in range(2))
    given: Named = {"q": randn(2, 2, 2, 16), "k": k.inside, "v": v.inside}
    problem = cache_problem(2, 2, 24)
    got = forward(problem, num_splits, **given, seqused_k=ints(31, 2**31 - 1))
    assert_same(got, forward(problem, num_splits, **given, seqused_k=ints(24, 24)))


@interpreted
@pytest.mark.parametrize("num_splits", SPLITS)
def test_rows_and_padding_outside_of_the_cache_are_the_nearest_inside(num_splits):
    k, v = (Fenced.like(randn(3, 24, 1, 16)) for _ in range(2))
    given: Named = {"q": randn(4, 2, 2, 16), "k": k.inside, "v": v.inside}
    given |= {"seqused_k": ints(20, 24, 9, 24)}
    problem = cache_problem(4, 2, 24, kv_batch_idx=True, leftpad_k=True)
    rows, pads = ints(3, -1, 2, 2**30), ints(-5, 3, 2, 0)
    got = forward(problem, num_splits, **given, kv_batch_idx=rows, leftpad_k=pads)
    inside: Named = {"kv_batch_idx": rows.clamp(0, 2), "leftpad_k": pads.clamp(0, 24)}
    assert_same(got, forward(problem, num_splits, **given, **inside))


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
