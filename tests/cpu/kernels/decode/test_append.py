"""A decode that appends new keys and values itself computes what an append and a decode in turn do,
bit for bit.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from heedful import quantize_kv
from heedful.core.base.device import by_name
from heedful.core.call.arguments import CacheUpdate, Options
from heedful.core.call.describe_cache import check_cache
from heedful.core.call.operands import Operands
from heedful.core.planning.plan import Plan
from heedful.core.registry.tiles import DecodeConfig
from heedful.launch.program import programs
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.cache_step import named
from heedful.torch.eager.cache_update import update_cache
from heedful.torch.operands.cache_checks import cache_call
from support.problems.grids import in_turns
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

# Small tiles and few programs, so that new rows are in several pieces of a unit.
TILES = DecodeConfig(16, 16, programs=1, least_tiles=1)
DEVICE = replace(by_name("MI300X"), units=5)
BATCH, HEADS, DIM, CAPACITY = 3, 2, 32, 60
STARTS = torch.tensor([3, 41, -1], dtype=torch.int32)
# What a call has on top of BATCH sequences of one query.
CASES: dict[str, dict[str, Any]] = {
    # One of them is the first of its sequence.
    "one token": {"starts": (0, 41, -1)},
    "one token, rotated by halves": {"rotary": False},
    "one token, rotated by pairs": {"rotary": True},
    "queries at one position": {"new": 4, "q_len": 4, "rotary": True, "causal": False},
    "a chunk over several tiles of keys": {"new": 19, "q_len": 19, "rotary": True},
    "more rows than are written at once": {"new": 50, "q_len": 2, "starts": (3, 9, -1)},
    "past the capacity": {"new": 9, "starts": (55, 60, 1)},
    "two tiles of rows": {"new": 9, "q_len": 9, "heads_q": 8, "rotary": False},
    "new keys that no query sees": {"new": 40, "window_size": (6, 0), "starts": (3, 17, -1)},
    "the same, but for the first ones": {
        "new": 40,
        "window_size": (6, 0, 4),
        "starts": (0, 17, -1),
    },
    "pages": {"page_size": 5, "new": 7, "rotary": True},
    "one row of the cache for each sequence": {"rows": True, "new": 3, "rotary": False},
    "padded on the left": {"pads": True, "new": 3, "q_len": 3, "rotary": True},
    "a tree": {"new": 3, "q_len": 3, "tree": True},
    "fixed parts": {"new": 19, "q_len": 2, "num_splits": 3},
    "int8": {"storage": "int8", "rotary": True},
    "int8 with shifts": {"storage": "int8", "shifted": True, "new": 5},
    "int4": {"storage": "int4", "new": 5, "page_size": 5},
    "int4 of groups": {"storage": "int4", "group": 32, "shifted": True, "new": 5, "rotary": True},
    "float8 of groups": {"storage": "float8_e4m3fn", "group": 8, "new": 19, "rotary": False},
}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def call_of(
    new: int = 1,
    q_len: int = 1,
    heads_q: int = 4,
    rotary: bool | None = None,
    starts: tuple[int, ...] | None = None,
    page_size: int = 0,
    rows: bool = False,
    pads: bool = False,
    tree: bool = False,
    storage: str = "",
    group: int = 0,
    shifted: bool = False,
    **options: Any,
) -> tuple[Operands, Options, CacheUpdate]:
    """rotary: whether pairs are neighbours, None for none. group: values that share a scale."""
    x: dict[str, torch.Tensor] = {"q": drawn(BATCH, q_len, heads_q, DIM, seed=1)}
    held = (40, page_size) if page_size else (5, CAPACITY)
    for name in "kv":
        x[name] = drawn(*held, HEADS, DIM, seed=2 + len(x))
        if storage:
            x[name], scale, shift = quantize_kv(x[name], storage, group or DIM, shifted)
            if not group:
                scale = drawn(BATCH, HEADS, seed=7).abs().float() + 0.01
                shift = drawn(BATCH, HEADS, seed=8).float() if shifted else None
            x |= {f"{name}_descale": scale} | ({} if shift is None else {f"{name}_shift": shift})
    if page_size:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(9))
        x["block_table"] = order[: BATCH * CAPACITY // page_size].view(BATCH, -1).int()
    if rows or not page_size:
        x["kv_batch_idx"] = torch.tensor([3, 0, 2], dtype=torch.int32)
    if pads:
        x["leftpad_k"] = torch.tensor([1, 17, 0], dtype=torch.int32)
    if tree:
        x["tree_mask"] = torch.ones(1, q_len, q_len, dtype=torch.bool).tril()
    start = STARTS if starts is None else torch.tensor(starts, dtype=torch.int32)
    cos = sin = None
    if rotary is not None:
        cos, sin = (drawn(CAPACITY + 50, 12, seed=seed) for seed in (10, 11))
    k_new, v_new = (drawn(BATCH, new, HEADS, DIM, seed=seed) for seed in (12, 13))
    update = CacheUpdate(k_new, v_new, cos, sin, start, bool(rotary), None)
    return Operands(**x), Options("kvcache", **{"causal": True, **options}), update


@interpreted
@pytest.mark.parametrize("name", in_turns(CASES, each=2))
def test_one_kernel_does_what_two_do(name):
    x, options, update = call_of(**CASES[name])
    start = update.cache_seqlens
    problem = check_cache(*cache_call(x._replace(seqused_k=start), options, update, None))
    plan = Plan(
        problem, DEVICE, "decode", "run", variant="portable", configs={"decode.forward": TILES}
    )
    want = x._replace(**{n: t.clone() for n, t in x._asdict().items() if t is not None})
    update_cache(want, update, start, problem.mask.bounded)
    assert not torch.equal(want.k.view(torch.uint8), x.k.view(torch.uint8))

    how = bool(update.rotary_interleaved), update.position0
    made = []
    for fused in (True, False):
        fresh = x._replace(**{n: t.clone() for n, t in x._asdict().items() if t is not None})
        given = named(fresh, update, start, True)
        out, lse = (
            torch.full(problem.out_shape, torch.nan),
            torch.full(problem.lse_shape, torch.nan),
        )
        left = {"out": out.half(), "lse": lse}
        specs, results = ({n: array_spec(t) for n, t in d.items()} for d in (given, left))
        program = (programs.step if fused else programs.in_turn)(plan, specs | results, *how)
        assert len(program.calls) == (1 if fused else 2)
        interpret(program, {**given, **left})
        for field in ("k", "v", "k_descale", "v_descale", "k_shift", "v_shift"):
            ours, theirs = getattr(fresh, field), getattr(want, field)
            if theirs is not None:
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), field
        made.append(left)
    assert not made[0]["out"].isnan().any()
    assert torch.equal(made[0]["out"], made[1]["out"])
    assert torch.equal(made[0]["lse"], made[1]["lse"])


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
