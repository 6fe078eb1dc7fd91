"""The portable kernels compute what the oracle computes: their programs, run by Triton's
interpreter. bfloat16 is left to GPU tests; the interpreter is wrong for it.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.registry.tiles import TileConfig
from heedful.launch.bind import portable_cache
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.cache_update import append_kv, rotate
from support.problems import budget
from support.problems.cases import Case, build
from support.problems.grids import covering
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret
from support.runs.portable_programs import Interpreted

# Small tiles, so that short sequences have full, masked and skipped ones.
TILES = TileConfig(16, 16)


def small(**facts) -> Case:
    """One sequence unless said: the interpreter takes a second for twenty tiles."""
    return Case(**{"batch": 1, **facts})


WIDER_KEYS = small(head_dim=576, head_dim_v=512, dtype="float16", heads_q=3, heads_k=1)
FORWARD_ONLY = (
    replace(WIDER_KEYS, causal=True),
    replace(WIDER_KEYS, page_size=5, window=(20, 0), sink=True),
    replace(WIDER_KEYS, varlen="qk", used="k", layout="offset", bias="k", batch=2),
    replace(WIDER_KEYS, heads_q=1, head_dim=513, head_dim_v=64, dropout_p=0.3, tree_mask=True),
    small(page_size=7),
    small(page_size=5, leftpad_k=True, causal=True),
    small(batch=2, heads_q=1, heads_k=1, kv_batch_idx=True, leftpad_k=True),
    small(page_size=7, block_mask=32, varlen="q", batch=2, sink=True),
    small(batch=2, heads_q=1, heads_k=1, kv_batch_idx=True, leftpad_k=True, block_mask=32),
    small(kv_dtype="int8", kv_group=8, page_size=4, block_mask=32, causal=True, used="k"),
    small(kv_dtype="int8", kv_group=8, kv_shift=True),
    small(q_offsets=True, rel_bias=20, page_size=7, varlen="q", batch=3, heads_k=1),
    small(kv_dtype="int8"),
    small(kv_dtype="int4", kv_group=16, page_size=4),
    small(kv_dtype="float8_e4m3fn", varlen="q", page_size=4, causal=True),
    small(kv_dtype="int8", kv_group=8, varlen="qk"),
    small(heads_q=1, heads_k=1, return_probs=True, dropout_p=0.4, causal=True, used="qk"),
)
BOTH_WAYS = (
    small(),
    small(causal=True),
    small(causal=True, heads_q=3, heads_k=1),
    small(causal=True, shift=-11),
    small(causal=True, bottom_right=False, seqlen_q=53, seqlen_k=37),
    small(window=(7, 5)),
    small(window=(5, -1, 3)),
    small(window=(20, 0), used="qk"),
    small(softcap=3.0),
    small(batch=2, heads_q=1, heads_k=1, alibi="bh", causal=True),
    small(batch=2, heads_k=1, heads_q=1, bias="bhqk"),
    small(bias="k", heads_k=1),
    small(bias="q", causal=True),
    # Heads share a bias but not keys, and sequences begin elsewhere in keys than in queries.
    small(batch=2, seqlen_q=20, seqlen_k=37, heads_q=4, heads_k=2, head_dim=8, bias="qk"),
    small(rel_bias=9, heads_k=1),
    small(rel_bias=200, causal=True, varlen="qk", used="qk", batch=6, seqlen_q=20, seqlen_k=24),
    small(rel_bias=2, window=(20, 3), alibi="h", bias="k", heads_k=1, softcap=3.0),
    small(rel_bias=1, dropout_p=0.3, heads_q=1, heads_k=1, shift=-5),
    small(rel_bias=40, bottom_right=False, seqlen_q=70, seqlen_k=33, heads_q=1, heads_k=1),
    # Both biases on whole tiles, of which a head has as many in rows as there are heads.
    small(rel_bias=9, bias="k", seqlen_q=64, seqlen_k=64, heads_k=1, head_dim=8),
    # Several windows of diagonals, of which leading keys alone see the last.
    small(rel_bias=300, window=(15, 30, 2), seqlen_q=65, seqlen_k=90, heads_q=1, heads_k=1),
    small(rel_bias=30, key_ranges=2, sink=True, dtype="float16", heads_q=1, heads_k=1),
    small(sink=True, causal=True, seqlen_q=60, seqlen_k=40),
    small(heads_q=1, heads_k=1, dropout_p=0.3, origins=4, varlen="qk"),
    small(heads_q=1, heads_k=1, dropout_p=0.3, dropout_origin=(1, 2**32 - 3, 5, 2**32 - 6)),
    small(heads_q=1, heads_k=1, dropout_p=1.0),
    small(varlen="qk", used="qk", batch=3, causal=True),
    small(varlen="q", batch=2),
    small(varlen="k", used="k", leftpad_k=True, batch=2),
    small(q_offsets=True, causal=True, batch=3, heads_k=1),
    small(q_offsets=True, window=(20, 3, 4), varlen="qk", used="k", alibi="h", batch=3, heads_k=1),
    small(q_offsets=True, block_mask=32, causal=True, used="q", batch=3, heads_k=1),
    small(tree_mask=True),
    small(key_ranges=1),
    small(key_ranges=2, ranges_of="bh", heads_k=1),
    small(key_ranges=2, causal=True, varlen="qk", used="qk", batch=3),
    small(key_ranges=1, window=(20, 3, 4), tree_mask=True, sink=True, ranges_of="h"),
    small(block_mask=32, heads_q=4, ranges_of="h"),
    small(block_mask=32, seqlen_k=1, heads_q=1, heads_k=1),
    small(block_mask=32, seqlen_q=64, seqlen_k=64, heads_q=1, heads_k=1),
    small(block_mask=64, causal=True, heads_q=1, heads_k=1, dropout_p=0.3),
    small(block_mask=32, window=(20, 3, 4), key_ranges=1, tree_mask=True, used="qk", sink=True),
    # Lists have tiles past the lengths in use, of sequences that end before the longest.
    small(block_mask=32, used="qk", leftpad_k=True, batch=3, seqlen_q=70, seqlen_k=100, heads_k=1),
    small(block_mask=32, varlen="qk", used="q", batch=3, heads_k=1, ranges_of="bh", causal=True),
    small(block_mask=32, varlen="q", batch=3, seqlen_k=70, heads_q=1, heads_k=1),
    small(head_dim=20, head_dim_v=48),
    small(head_dim=3),
    # A lone key: the backward must find the very score that the forward found.
    small(seqlen_q=2, seqlen_k=1, head_dim=192, bias="bhqk"),
    small(seqlen_q=2, seqlen_k=1, head_dim=256),
    small(layout="offset"),
    small(layout="packed", causal=True),
    small(layout="heads_first"),
    small(scale=-0.3),
    small(seqlen_q=0),
    small(seqlen_k=0),
    small(batch=0),
    small(dtype="float16", causal=True),
    small(dtype="float16", softcap=5.0, sink=True, varlen="qk", batch=2),
)


@interpreted
@pytest.mark.parametrize("case", covering(BOTH_WAYS), ids=str)
def test_forward_and_gradients_are_within_the_budget(case):
    budget.run(Interpreted(TILES), case)


@interpreted
@pytest.mark.parametrize("case, num_splits", covering(FORWARD_ONLY, (1, 3)), ids=str)
def test_forward_is_within_the_budget(case, num_splits):
    budget.run(Interpreted(TILES, num_splits), replace(case, backward=False))


@interpreted
@pytest.mark.parametrize(
    "case",
    (
        small(causal=True, sink=True, used="qk"),
        small(seqlen_q=3, seqlen_k=200, window=(90, 0, 5), heads_q=2, heads_k=1),
        small(varlen="qk", used="q", batch=3, heads_q=1, heads_k=1),
    ),
    ids=str,
)
def test_splitting_the_keys_stays_within_the_budget(case):
    budget.run(Interpreted(TILES, num_splits=4), replace(case, backward=False))


def of_lengths(side: str, lengths: tuple[int, ...], **facts) -> Case:
    """A sequence of each length in keys ("k") or queries ("q"), and of 3 on the other side."""
    few = (3,) * len(lengths)
    q, k = (lengths, few) if side == "q" else (few, lengths)
    sides = {"lens_q": q, "lens_k": k, "seqlen_q": max(q), "seqlen_k": max(k)}
    one_head = {"heads_q": 1, "heads_k": 1, "head_dim": 8, "varlen": "qk"}
    return Case(**{"batch": len(lengths), **one_head, **sides, **facts})


# The last key, and the diagonal, lie anywhere in a tile; or at its edges.
ANYWHERE, EDGES = tuple(range(1, TILES.block_n + 2)), (1, 2, 15, 16, 17)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        of_lengths("k", ANYWHERE, rel_bias=40),
        of_lengths("k", ANYWHERE, rel_bias=7, dropout_p=0.3),
        of_lengths("k", EDGES, bias="qk"),
        of_lengths("k", EDGES, window=(5, 3)),
        of_lengths("q", EDGES, bias="k", sink=True),
        of_lengths("q", EDGES, key_ranges=2, heads_q=2),
        # Heads have longer lists than those that they share keys with.
        small(block_mask=32, ranges_of="h", heads_q=3, heads_k=1, head_dim=8, seqlen_q=33),
    ],
    ids=str,
)
def test_the_last_row_may_have_any_place_in_a_tile(case):
    budget.run(Interpreted(TILES), case)


@interpreted
@pytest.mark.parametrize("heads", [1, 3])
def test_each_sequence_is_told_how_many_keys_it_has_afterwards(heads):
    new = torch.ones(3, 20, heads, 16)
    x = {"k_new": new, "v_new": new, "cache_seqlens": torch.tensor([3, -1, 9], dtype=torch.int32)}
    x |= {name: torch.zeros(3, 40, heads, 16) for name in ("k", "v")}
    x["seqused"] = torch.full((3,), -1, dtype=torch.int32)
    specs = {name: array_spec(t) for name, t in x.items()}
    interpret(portable_cache.append_kv(specs, 0, False), x)
    assert x["seqused"].tolist() == [23, 0, 29]
    assert x["k"].sum((1, 2, 3)).tolist() == [320 * heads, 0, 320 * heads]


@interpreted
@pytest.mark.parametrize("page_size", (0, 5))
@pytest.mark.parametrize("interleaved", (True, False))
def test_append_and_rotation_are_those_of_plain_torch(interleaved, page_size):
    values = torch.Generator().manual_seed(0)
    k_new, v_new, q = (
        torch.randn(3, 7, heads, dim, generator=values)
        for heads, dim in ((2, 12), (2, 10), (4, 12))
    )
    start = torch.tensor([3, 0, 11], dtype=torch.int32)
    tables = {name: torch.randn(40, 3, generator=values) for name in ("rotary_cos", "rotary_sin")}
    x = {"k_new": k_new, "v_new": v_new, "cache_seqlens": start, **tables}
    rows = (16, page_size) if page_size else (4, 20)
    x["k"], x["v"] = (torch.randn(*rows, 2, dim, generator=values) for dim in (12, 10))
    if page_size:
        x["block_table"] = torch.randperm(16, generator=values)[:12].view(3, 4).int()
    else:
        x["kv_batch_idx"] = torch.tensor([3, 0, 2], dtype=torch.int32)
        x["leftpad_k"] = torch.tensor([1, 0, 2], dtype=torch.int32)
    x["seqused"] = torch.full((3,), -1, dtype=torch.int32)
    want_k, want_v = x["k"].clone(), x["v"].clone()
    cos, sin = tables.values()
    turned = rotate(k_new, cos, sin, start + 2, interleaved)
    rows, table = x.get("kv_batch_idx"), x.get("block_table")
    append_kv(want_k, want_v, turned, v_new, start, rows, table, False)
    specs = {name: array_spec(t) for name, t in x.items()}
    interpret(portable_cache.append_kv(specs, page_size, interleaved, position0=2), x)
    assert torch.equal(x["k"], want_k)
    assert torch.equal(x["v"], want_v)
    assert torch.equal(x["seqused"], start + 7 - x.get("leftpad_k", 0))

    for advance in (True, False):
        both = {"q": q, "rotated": torch.full_like(q, torch.nan), **x}
        both |= {name: torch.zeros_like(x[name]) for name in ("k", "v", "seqused")}
        specs = {name: array_spec(t) for name, t in both.items()}
        (launch,) = portable_cache.update(specs, page_size, interleaved, advance).calls
        assert launch.kernel.function == "append_and_rotate"
        interpret(portable_cache.update(specs, page_size, interleaved, advance), both)
        assert torch.equal(both["rotated"], rotate(q, cos, sin, start, interleaved, advance))
        assert torch.equal(both["seqused"], x["seqused"])
        want_k, want_v = torch.zeros_like(want_k), torch.zeros_like(want_v)
        turned = rotate(k_new, cos, sin, start, interleaved)
        append_kv(want_k, want_v, turned, v_new, start, rows, table, False)
        assert torch.equal(both["k"], want_k) and torch.equal(both["v"], want_v)


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)


@interpreted
@pytest.mark.parametrize("varlen", ["", "qk"])
def test_gradients_of_lse_may_lie_in_memory_in_any_way(varlen):
    """Every second number of a row is its gradient."""
    built = build(Case(seqlen_q=37, seqlen_k=29, causal=True, varlen=varlen))
    assert built.dlse is not None
    wide = torch.full((*built.dlse.shape, 2), torch.nan)
    built = replace(built, dlse=wide[..., 0].copy_(built.dlse))
    budget.check(built, budget.backend_results(Interpreted(TILES), built))
