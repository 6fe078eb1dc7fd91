"""How many tiles a mask shows, by its values: as the oracle's definition counts them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as heedful
from heedful import BlockMask, masks
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.masks.seen import ARRAYS, Seen, seen_tiles
from heedful.reference.oracle import in_blocks, in_ranges, visible
from heedful.reference.sequences import sequences
from support.problems.cases import Case, build

BASE = Case(seqlen_q=300, seqlen_k=270, heads_q=4, heads_k=2, backward=False)
CASES = [
    replace(BASE, causal=True),
    replace(BASE, key_ranges=1, causal=True, ranges_of="b", batch=3),
    replace(BASE, key_ranges=2, window=(40, 9, 30), ranges_of="bh"),
    replace(BASE, key_ranges=2, varlen="qk", causal=True, ranges_of="", batch=3),
    replace(BASE, key_ranges=1, leftpad_k=True, used="qk", window=(-1, 20)),
    replace(BASE, block_mask=64, causal=True, ranges_of="h"),
    replace(BASE, block_mask=32, key_ranges=2, ranges_of="bh", batch=2),
    replace(BASE, block_mask=128, varlen="qk", ranges_of="", window=(90, 0)),
    replace(BASE, q_offsets=True, causal=True, key_ranges=1, used="k"),
]


def counted(problem, x, tile: tuple[int, int]) -> Seen:
    """By the definition of each score."""
    total = np.zeros(5, int)
    for seq in sequences(problem, x):
        seen = visible(problem, x, seq)[None]
        seen = seen if x.key_ranges is None else seen & in_ranges(x, seq)
        seen = seen if x.block_rows is None else seen & in_blocks(x, seq)
        for head in np.broadcast_to(seen, (problem.heads_q, *seen.shape[1:])):
            for i in range(0, head.shape[0], tile[0]):
                for j in range(0, head.shape[1], tile[1]):
                    part = head[i : i + tile[0], j : j + tile[1]]
                    shown, all_of_it = int(part.sum()), part.size
                    kind = [shown == all_of_it, 0 < shown < all_of_it, shown == 0]
                    total += [*kind, shown, all_of_it if shown else 0]
    return Seen(*total.tolist())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_are_those_that_the_definition_shows(case):
    for seed in range(2):
        built = build(replace(case, seed=case.seed + seed))
        x = built.x._replace(
            **{n: t.numpy() for n, t in built.x._asdict().items() if t is not None and n != "sink"}
        )
        for tile in ((64, 128), (32, 32)):
            if case.block_mask:
                tile = (min(tile[0], case.block_mask), min(tile[1], case.block_mask))
            assert seen_tiles(built.problem, x, tile) == counted(built.problem, x, tile)
    assert set(ARRAYS) <= set(built.x._fields)


def test_entries_of_lists_that_point_nowhere_show_nothing():
    """As kernels read them: no tile before the first or behind the last, no count below 0."""
    mask = BlockMask.of(torch.ones(1, 1, 96, 80, dtype=torch.bool), side=32)
    problem = AttentionProblem.dense(1, 96, 80, 2, head_dim=16, block_mask=32)
    arrays = {n: t.numpy() for n, t in mask.operands(96, 80, "").items()}
    rows = arrays["block_rows"]
    rows[0, 0, 0, 2::2] = [2, -1, 3]
    rows[0, 0, 1, 2::2] = [0, -2, 99]
    rows[0, 0, 2, :2] = [-4, 3]
    x = Operands(*[np.zeros(1)] * 3, **arrays)
    # Of the first row the short tile, of the second a whole one, of the third none; of two heads.
    pairs = 2 * (32 * 16 + 32 * 32)
    assert seen_tiles(problem, x, (32, 32)) == Seen(4, 0, 2 * 7, pairs, pairs)
    assert seen_tiles(replace(problem, seqlen_k=0), x, (32, 32)) == Seen(0, 0, 0, 0, 0)


def test_explain_reads_a_mask_where_it_is_asked_to():
    q, k, v = torch.zeros(3, 1, 512, 2, 16).unbind(0)
    documents = masks.documents(torch.arange(512)[None] // 128)

    def words(**how) -> str:
        return heedful.explain(heedful.flash_attn_func, q, k, v, values=True, **how)

    # Each head has four triangles of one tile.
    said = words(causal=True, key_ranges=documents)
    assert "tiles of 128 x 128: 0 seen whole, 8 in part, 24 left out" in said
    assert f"{8 * 128 * 129 // 2} pairs are seen, 50.4% of the scores" in said
    ones = torch.ones(1, 1, 4, dtype=torch.int32)
    mask = BlockMask.of_lists(ones, 0 * ones[..., None], seqlen_q=512, seqlen_k=512)
    assert "8 seen whole, 0 in part, 24 left out" in words(block_mask=mask)
    assert "mask " not in heedful.explain(heedful.flash_attn_func, q, k, v, block_mask=mask)
    with pytest.raises(TypeError, match="^values must be a bool, got str"):
        heedful.explain(heedful.flash_attn_func, q, k, v, values=str(mask.side))  # pyright: ignore
    cache = torch.zeros(2, 9, 2, 16)
    with pytest.raises(ValueError, match="^values must be False for flash_attn_with_kvcache"):
        heedful.explain(heedful.flash_attn_with_kvcache, cache, cache, cache, values=True)


def test_lengths_that_point_outside_are_refused_by_name():
    """As the call itself refuses them on a CPU."""
    q, ends = torch.zeros(9, 2, 16), torch.tensor([0, 50, 90])
    ranges = torch.zeros(9, 2, dtype=torch.int32)
    call: Any = q, q, q, ends, torch.tensor([0, 4, 9]), 5, 5
    with pytest.raises(ValueError, match="^cu_seqlens_q must end within q's 9 tokens, got 90"):
        heedful.explain(heedful.flash_attn_varlen_func, *call, key_ranges=ranges, values=True)
