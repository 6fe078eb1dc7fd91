"""The lists of the Hopper forward without tiles that positions hide, as the kernel before it stores
them, run by Triton's interpreter in a process of its own."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.planning.plan import plan
from heedful.launch.program import buffers, programs
from heedful.launch.spec import Program
from heedful.reference import oracle
from heedful.reference.convert import operands_as_numpy
from heedful.reference.sequences import sequences
from heedful.torch.base.arrays import array_spec
from support.problems.cases import Case, build
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

BASE = Case(
    dtype="float16",
    seqlen_q=700,
    seqlen_k=900,
    heads_q=4,
    heads_k=2,
    head_dim=64,
    block_mask=128,
    causal=True,
    backward=False,
)
CASES = [
    BASE,
    replace(BASE, block_mask=64, ranges_of="bh"),
    replace(BASE, causal=False, window=(200, 60), ranges_of="h"),
    replace(BASE, causal=False, used="qk", ranges_of="b", block_mask=64),
    replace(BASE, varlen="qk", batch=4, ranges_of="h"),
    replace(BASE, causal=False, used="k", page_size=64, ranges_of="bh"),
    replace(BASE, seqlen_q=64, seqlen_k=130, used="k", leftpad_k=True, block_mask=64),
]


def stored(built) -> np.ndarray:
    """(batch, heads, tiles of queries, numbers)."""
    x = {name: t for name, t in built.x._asdict().items() if t is not None}
    arrays = buffers.forward(built.problem) | {name: array_spec(t) for name, t in x.items()}
    whole = programs.program(
        plan(built.problem, by_name("H200"), backend="hopper"), "forward", arrays
    )
    (call,) = (c for c in whole.calls if c.kernel.function == "seen_lists")
    (shape,) = (w.buffer.shape for w in whole.workspaces if w.name == "seen_lists")
    made = {"seen_lists": torch.full(shape, -77, dtype=torch.int32)}
    interpret(Program((call,), ()), x | made)
    return made["seen_lists"].numpy()


def shown(pool: np.ndarray, index: int) -> np.ndarray:
    if index < 0:
        return np.ones(pool.shape[1:2] * 2, bool)
    return (pool[index][..., None] >> np.arange(32) & 1).reshape(pool.shape[1], -1) != 0


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_listed_tiles_are_those_that_positions_leave_and_whole_ones_are_seen_whole(case):
    built = build(case)
    x, lists, side = operands_as_numpy(built.x), stored(built), case.block_mask
    pool = np.asarray(x.block_bits)
    for seq in sequences(built.problem, built.x):
        by_place = oracle.visible(built.problem, x, seq)
        seen = by_place & oracle.in_blocks(x, seq)
        for h in range(case.heads_q):
            found = np.zeros_like(by_place)
            of_head = lists[min(seq.batch, len(lists) - 1)][min(h, lists.shape[1] - 1)]
            for tile, (whole, part, *numbers) in enumerate(of_head.tolist()):
                rows = slice(tile * side, (tile + 1) * side)
                for i in range(whole + part):
                    keys, bits = numbers[2 * i : 2 * i + 2]
                    cols = slice(keys * side, (keys + 1) * side)
                    place = by_place[rows, cols]
                    assert place.any(), "a tile that positions hide"
                    whole_tile = shown(pool, bits)[: place.shape[0], : place.shape[1]]
                    assert not found[rows, cols].any(), "a tile twice"
                    found[rows, cols] = whole_tile & place
                    is_whole = bits < 0 and place.all() and place.shape[1] == side
                    assert is_whole == (i < whole)
            np.testing.assert_array_equal(found, seen[h])


@interpreted
@pytest.mark.parametrize("side", [64, 128])
def test_numbers_that_are_no_list_stay_within_the_keys_the_pool_and_the_room(side):
    rng = np.random.default_rng(side)
    for _ in range(3):
        built = build(replace(BASE, block_mask=side, ranges_of="bh"))
        rows = built.x.block_rows
        odd = rng.choice([-(2**31), 2**31 - 1, -1, 0, 1, 2, 40], tuple(rows.shape))
        rows.copy_(torch.from_numpy(odd.astype(np.int32)))
        lists = stored(built)
        for whole, part, *numbers in lists.reshape(-1, lists.shape[-1]).tolist():
            assert min(whole, part) >= 0 and 2 * (whole + part) <= len(numbers)
            for keys, bits in zip(
                *(numbers[i : 2 * (whole + part) : 2] for i in (0, 1)), strict=True
            ):
                assert 0 <= keys * side < BASE.seqlen_k
                assert -1 <= bits < len(built.x.block_bits)


@starts_interpreter
def test_lists_are_exact_and_bounded():
    pass_in_the_interpreter(__file__)
