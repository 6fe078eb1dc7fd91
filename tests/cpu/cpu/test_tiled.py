"""The CPU backend is attention, feature by feature and in random combinations."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from heedful import cpu
from heedful.bench.harness import cases as bench_cases
from heedful.bench.harness.check import Checker
from heedful.bench.harness.peers import PEERS, draw
from heedful.bench.harness.run import call_of
from heedful.core.call.operands import Operands
from heedful.cpu import blocks, philox, tiled_forward
from heedful.cpu import whole as whole_scores
from heedful.cpu.philox import keep_tile
from heedful.reference.philox import keep_mask
from heedful.reference.sequences import sequences
from support.problems.budget import backend_results, check, run
from support.problems.cases import LAYOUTS, Case, build, variants
from support.problems.grids import covering, in_turns
from support.problems.strategies import cases

# Longer than one tile of queries and of keys, and a multiple of nothing.
LONG = Case(batch=1, seqlen_q=301, seqlen_k=611, heads_q=2, heads_k=1, head_dim=16)
SHORT = Case(heads_q=6, heads_k=2, head_dim=24, head_dim_v=8)
CHOICES: dict[str, Any] = dict(
    causal=[True],
    window=[(40, 0), (9, 17, 3), (-1, 30), (0, 0)],
    bottom_right=[False],
    shift=[-25, 31],
    scale=[-0.4],
    softcap=[3.0],
    dropout_p=[0.2, 1.0],
    alibi=["h", "bh"],
    bias=["bhqk", "hqk", "bk", "q"],
    sink=[True],
    tree_mask=[True],
    varlen=["q", "k", "qk"],
    used=["q", "k", "qk"],
    page_size=[1, 16],
    kv_batch_idx=[True],
    leftpad_k=[True],
    q_offsets=[True],
    layout=LAYOUTS[1:],
    return_probs=[True],
    seqlen_q=[0, 1, 90],
    seqlen_k=[0, 1],
    batch=[0, 5],
    head_dim=[1, 128],
    num_splits=[2, 100],
)
ALL: dict[str, Any] = dict(
    softcap=4.0, alibi="bh", bias="hqk", sink=True, dropout_p=0.15, window=(60, 3, 2)
)
COMBINED = [
    Case(**ALL, varlen="qk", used="qk", heads_q=4),
    Case(**ALL, varlen="qk", q_offsets=True, heads_q=4, rel_bias=9, batch=3),
    Case(causal=True, q_offsets=True, batch=4, key_ranges=1, block_mask=32),
    Case(**ALL, page_size=8, leftpad_k=True, heads_q=4, tree_mask=True),
    Case(**ALL, kv_batch_idx=True, used="k", layout="offset", return_probs=True),
]
BLOCKS = [
    *variants(SHORT, rel_bias=[1, 2, 9, 400]),
    replace(LONG, rel_bias=257, causal=True, dtype="bfloat16"),
    replace(
        SHORT, rel_bias=33, heads_q=6, varlen="qk", used="qk", batch=3, softcap=3.0, bias="hqk"
    ),
    replace(
        SHORT, rel_bias=8, bottom_right=False, shift=5, window=(9, 3), dropout_p=0.2, alibi="h"
    ),
    *variants(replace(SHORT, block_mask=32), ranges_of=["", "b", "h", "bh"], causal=[True]),
    replace(SHORT, block_mask=64, window=(9, 17, 3), sink=True, leftpad_k=True, used="qk"),
    replace(SHORT, block_mask=32, key_ranges=2, dropout_p=0.2, bias="hqk", alibi="h", softcap=3.0),
    replace(LONG, block_mask=128, causal=True, num_splits=3),
    replace(LONG, block_mask=32, dtype="bfloat16", seqlen_k=0),
    replace(SHORT, block_mask=32, varlen="qk", used="qk", ranges_of="bh", causal=True, batch=3),
    replace(SHORT, block_mask=32, varlen="q", page_size=16, key_ranges=1, softcap=3.0),
    replace(SHORT, block_mask=32, page_size=7, leftpad_k=True, tree_mask=True, sink=True),
    replace(SHORT, block_mask=32, kv_batch_idx=True, used="k", ranges_of="h"),
]
RANGES = [
    *variants(SHORT, key_ranges=[1, 2]),
    *variants(replace(SHORT, key_ranges=1), causal=[True], ranges_of=["h", ""], varlen=["qk"]),
    replace(SHORT, key_ranges=2, ranges_of="bh", window=(9, 17, 3), sink=True, leftpad_k=True),
    replace(SHORT, key_ranges=1, page_size=16, used="qk", dropout_p=0.2, bias="hqk", alibi="h"),
    replace(SHORT, key_ranges=2, varlen="q", page_size=16, causal=True, softcap=3.0),
    replace(LONG, key_ranges=2, causal=True, return_probs=True, num_splits=3),
    replace(LONG, key_ranges=1, dtype="bfloat16", seqlen_k=0),
]
QUANTISED = [
    Case(kv_dtype="int8", kv_group=8, kv_shift=True, backward=False, heads_q=4),
    Case(kv_dtype="int8", backward=False, kv_batch_idx=True, used="k"),
    Case(kv_dtype="int4", kv_group=16, kv_shift=True, backward=False, page_size=7),
    Case(kv_dtype="float8_e4m3fn", backward=False, dtype="bfloat16", varlen="qk"),
    *variants(
        Case(backward=False, heads_q=4, head_dim=64, layout="offset", causal=True, varlen="q"),
        dtype=["float8_e4m3fn", "float8_e4m3fnuz"],
    ),
]


@pytest.mark.parametrize(
    "case", covering([SHORT, *variants(SHORT, **CHOICES), *COMBINED, *RANGES, *BLOCKS]), ids=str
)
def test_every_feature_is_within_budget(case):
    run(cpu, case)


PLAIN = {name: CHOICES[name] for name in ("causal", "window", "bottom_right", "shift", "scale")}
PLAIN |= {name: CHOICES[name] for name in ("dropout_p", "layout", "seqlen_q", "head_dim")}


@pytest.mark.parametrize("case", [SHORT, *variants(SHORT, **PLAIN)], ids=str)
def test_tiles_of_short_sequences_are_within_budget(case, monkeypatch):
    """As where another feature keeps a call from having whole scores."""
    monkeypatch.setattr(whole_scores, "MOST", 0)
    run(cpu, case)


WHOLE = [
    Case(seqlen_q=512, seqlen_k=512, causal=True, head_dim=128),
    Case(seqlen_q=120, seqlen_k=512, heads_q=8, heads_k=2, dropout_p=0.3, dtype="float16"),
    Case(batch=3, seqlen_q=300, seqlen_k=200, heads_q=4, heads_k=4, causal=True, dropout_p=0.1),
]


@pytest.mark.parametrize("case, threads", in_turns(WHOLE, [2, 1]), ids=str)
def test_whole_scores_are_within_budget_on_threads_of_our_own(case, threads, monkeypatch):
    monkeypatch.setattr(whole_scores, "WORTH_THREADS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert whole_scores.takes(build(case).problem, build(case).x)
        run(cpu, case)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "case",
    variants(LONG, causal=[False, True], window=[(99, 20, 5)], bias=["k"], sink=[True]),
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_several_tiles_are_within_budget(case, dtype):
    run(cpu, variants(case, dtype=[dtype])[0])


@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_quantised_keys_and_values_are_within_budget(case):
    run(cpu, case)


SPLIT = [
    *variants(
        replace(LONG, num_splits=3),
        causal=[False, True],
        window=[(99, 20, 5), (30, 0)],
        sink=[True],
        dropout_p=[0.2],
        heads_k=[2],
        dtype=["float16", "bfloat16"],
        scale=[8.0],
        return_probs=[True],
        seqlen_q=[1],
        seqlen_k=[0, 64, 65],
    ),
    Case(**ALL, varlen="qk", used="qk", heads_q=4, num_splits=2, seqlen_k=300),
    Case(page_size=16, used="k", seqlen_k=500, num_splits=4, backward=False),
    Case(kv_dtype="int8", kv_group=8, kv_shift=True, backward=False, seqlen_k=300, num_splits=4),
]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_a_split_of_the_keys_is_within_budget(case):
    run(cpu, case)


@pytest.mark.parametrize("scores", [blocks.SHORT, 0], ids=["torchs-threads", "own-threads"])
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_a_split_sequence_does_not_depend_on_the_rest_of_the_batch(num_splits, scores, monkeypatch):
    """Nor on how many heads share a tile, nor on which thread ends last."""
    monkeypatch.setattr(blocks, "SHORT", scores)
    lengths = (700, 64, 0, 401)
    case = Case(batch=4, seqlen_q=70, seqlen_k=700, heads_q=4, head_dim=16, used="k", sink=True)
    built = build(replace(case, num_splits=num_splits, lens_k=lengths, causal=True))
    out, lse, _ = cpu.forward(built.problem, built.x)
    alone = replace(built.problem, batch=1)
    for b in range(4):
        own = [
            None if t is None or name == "sink" else t[b : b + 1]
            for name, t in built.x._asdict().items()
        ]
        x = Operands(*own)._replace(sink=built.x.sink)
        out_b, lse_b, _ = cpu.forward(alone, x)
        assert torch.equal(out_b[0], out[b]) and torch.equal(lse_b[0], lse[b])
    for size in (1, 64 * 1024):
        monkeypatch.setattr(blocks, "SCORES_PER_TILE", size)
        again = cpu.forward(built.problem, built.x)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (150, 0), (150, 20, 90)])
def test_a_split_cuts_each_sequences_keys_into_even_parts(window):
    """Every key tile that is visited, once and in order; no part is more than a unit longer."""
    case = Case(batch=1, seqlen_q=900, seqlen_k=1000, heads_q=1, heads_k=1, window=window)
    built = build(replace(case, backward=False))
    (block,) = blocks.blocks(built.problem, built.x, apart=True)
    for rows in blocks.query_tiles(block):
        whole = list(blocks.key_tiles(block, rows))
        keys = [(key, masked) for cols, masked in whole for key in cols]
        units = sum(-(-len(cols) // blocks.UNIT) for cols, _ in whole)
        for splits in (0, 1, 2, 3, 5, 16, 1000):
            parts = tiled_forward.parts_of_keys(whole, splits)
            found = [(key, masked) for part in parts for cols, masked in part for key in cols]
            assert found == keys
            sizes = [sum(-(-len(c) // blocks.UNIT) for c, _ in part) for part in parts]
            share = -(-units // max(1, splits))
            assert max(sizes) == share and sizes[:-1] == [share] * (len(parts) - 1)
            assert len(parts) == max(1, -(-units // max(1, share))) <= max(1, splits)


WIDER_KEYS = Case(head_dim=576, head_dim_v=512, heads_q=4, heads_k=1, causal=True)


@pytest.mark.parametrize(
    "case",
    [
        *variants(WIDER_KEYS, dtype=["float32", "float16", "bfloat16"], head_dim=[513]),
        replace(WIDER_KEYS, varlen="qk", sink=True, bias="k", dtype="bfloat16"),
        replace(WIDER_KEYS, page_size=16, used="k", num_splits=2, seqlen_k=300, dtype="float16"),
        replace(WIDER_KEYS, kv_dtype="int8", kv_group=32, dtype="bfloat16", backward=False),
        replace(WIDER_KEYS, seqlen_q=300, seqlen_k=600, batch=1, dtype="float16"),
    ],
    ids=str,
)
def test_keys_wider_than_any_value_are_within_budget(case):
    run(cpu, case)


RANDOM: dict[str, Any] = dict(
    deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@settings(max_examples=60, derandomize=True, **RANDOM)
@given(case=cases())
def test_random_features_are_within_budget(case):
    run(cpu, case)


@pytest.mark.slow
@settings(max_examples=500, **RANDOM)
@given(case=cases(longest=300))
def test_many_random_features_are_within_budget(case):
    run(cpu, case)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("origin", [(0, 0, 0, 0), (3, 5, 2**31, 2**32 - 21)])
def test_dropout_mask_is_numpys_bit_for_bit(p, origin):
    want = [keep_mask(-77, p, b, 5, 70, 90, origin) for b in range(3)]
    # A tile that begins and ends within a block of four columns.
    tile = keep_tile(-77, p, range(1, 3), range(2, 5), range(33, 70), range(17, 83), origin)
    for got, whole in zip(tile.numpy(), want[1:], strict=True):
        assert (got == whole[2:5, 33:70, 17:83]).all()


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_dropout_tile_may_begin_and_end_anywhere_in_a_block_of_columns(first, count):
    want = keep_mask(9, 0.5, 1, 3, 40, 20)[:, :, 8 + first : 8 + first + count]
    cols = range(8 + first, 8 + first + count)
    assert (keep_tile(9, 0.5, range(1, 2), range(3), range(40), cols)[0].numpy() == want).all()


@pytest.mark.parametrize("chunk", [1, 60, 1000])
def test_dropout_mask_does_not_depend_on_how_much_is_made_at_a_time(chunk, monkeypatch):
    ranges = range(2, 4), range(1, 4), range(5, 38), range(2, 71)
    want = philox.draw(123, 0.4, *ranges, (0, 0, 0, 0))
    monkeypatch.setattr(philox, "FEW", 0)
    monkeypatch.setattr(philox, "CHUNK", chunk)
    assert torch.equal(philox.draw(123, 0.4, *ranges, (0, 0, 0, 0)), want)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned in new memory."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return made


@pytest.mark.parametrize("features", [{}, dict(causal=True), ALL | {"bias": "k"}], ids=str)
def test_memory_is_linear_in_sequence_length(features):
    largest = []
    for length in (1024, 3072):
        case = Case(
            batch=1, seqlen_q=length, seqlen_k=length, heads_q=1, heads_k=1, head_dim=8, **features
        )
        built = build(case)
        assert built.dout is not None
        with LargestTensor() as found:
            out, lse, _ = cpu.forward(built.problem, built.x)
            cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
        # Scratch has one size for all lengths (or the inputs are larger, and grow with them).
        largest.append(found.elements)
    assert largest[1] <= 3 * largest[0]
    assert largest[1] < 3072 * 3072 // 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [37, 176, 600])
def test_how_many_heads_share_a_tile_changes_no_bit(length, dtype, monkeypatch):
    case = Case(
        seqlen_q=length, seqlen_k=length + 51, heads_q=8, heads_k=4, head_dim=16, dtype=dtype
    )
    built = build(replace(case, causal=True, sink=True))
    problem, x, dout = built.problem, built.x, built.dout
    assert dout is not None
    results = []
    for scores in (1, 64 * 1024, 128 * 1024, 512 * 1024):
        monkeypatch.setattr(blocks, "SCORES_PER_TILE", scores)
        out, lse, _ = cpu.forward(problem, x)
        results.append((out, lse, *cpu.backward(problem, x, out, lse, dout, built.dlse)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is b or torch.equal(a, b)


@pytest.mark.parametrize(
    "window, scores", in_turns([(-1, -1), (-1, 0), (700, 0)], (256, 1024)), ids=str
)
def test_long_sequences_are_within_budget(window, scores, monkeypatch):
    """A machine uses one of these sizes of tiles, by its cache."""
    monkeypatch.setattr(blocks, "SCORES_PER_TILE", scores * 1024)
    run(cpu, replace(LONG, seqlen_q=2100, seqlen_k=2200, heads_k=2, window=window))


def largest_sums(monkeypatch) -> list[float]:
    """A list that the largest sum by a first tile's maximum is added to, tile by tile."""
    found, sums = [], tiled_forward._by_first_maximum

    def note(*args):
        m, l_sum = sums(*args)
        found.append(l_sum.max().item())
        return m, l_sum

    monkeypatch.setattr(tiled_forward, "_by_first_maximum", note)
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_climb_after_the_first_tile_are_within_budget(causal, monkeypatch):
    found = largest_sums(monkeypatch)
    case = Case(batch=2, seqlen_q=900, seqlen_k=900, heads_q=2, head_dim=64, sink=True, scale=8.0)
    run(cpu, replace(case, causal=causal))
    assert max(found) > tiled_forward.MOST


def test_scores_that_climb_change_no_bit_of_another_sequence(monkeypatch):
    found = largest_sums(monkeypatch)
    built = build(Case(batch=2, seqlen_q=70, seqlen_k=900, heads_q=2, head_dim=64))
    calm = cpu.forward(built.problem, built.x)
    assert max(found) <= tiled_forward.MOST
    k = built.x.k.clone()
    k[0, 300:] *= 100
    climbing = cpu.forward(built.problem, built.x._replace(k=k))
    assert max(found) > tiled_forward.MOST
    for got, want in zip(climbing[:2], calm[:2], strict=True):
        assert torch.equal(got[1], want[1]) and not torch.equal(got[0], want[0])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_rows_only_key_has_probability_one_exactly(head_dim):
    """The causal mask leaves the first row one: its value and gradient pass unrounded."""
    case = Case(batch=1, seqlen_q=300, seqlen_k=300, heads_q=4, heads_k=4, head_dim=head_dim)
    built = build(replace(case, causal=True))
    problem, x, dout = built.problem, built.x, built.dout
    assert dout is not None
    dout = torch.zeros_like(dout)
    dout[:, 0] = 1.25
    out, lse, _ = cpu.forward(problem, x)
    dv = cpu.backward(problem, x, out, lse, dout)[2]
    assert torch.equal(out[:, 0], x.v[:, 0]) and torch.equal(dv[:, 0], dout[:, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_does_not_depend_on_the_rest_of_the_batch(dtype):
    case = Case(
        batch=5, seqlen_q=300, seqlen_k=600, heads_q=4, head_dim=64, causal=True, dtype=dtype
    )
    built = build(case)
    problem, x, dout = built.problem, built.x, built.dout
    assert dout is not None
    out, lse, _ = cpu.forward(problem, x)
    grads = cpu.backward(problem, x, out, lse, dout)
    alone = replace(problem, batch=1)
    for b in range(case.batch):
        part = Operands(*(a[b : b + 1] for a in x[:3]))
        out_b, lse_b, _ = cpu.forward(alone, part)
        assert torch.equal(out_b[0], out[b]) and torch.equal(lse_b[0], lse[b])
        grads_b = cpu.backward(alone, part, out_b, lse_b, dout[b : b + 1])
        for got, whole in zip(grads_b[:3], grads[:3], strict=True):
            assert torch.equal(got[0], whole[b])


def test_two_runs_are_bit_equal():
    case = Case(batch=1, seqlen_q=300, seqlen_k=700, heads_q=4, heads_k=2, rel_bias=99, **ALL)
    built = build(case)
    runs = []
    assert built.dout is not None
    for _ in range(2):
        out, lse, _ = cpu.forward(built.problem, built.x)
        grads = cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
        runs.append((out, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_sequences_that_share_keys_add_their_gradients():
    case = Case(kv_batch_idx=True, backward=True)
    built = build(case)
    shared = built.x._replace(kv_batch_idx=torch.zeros(2, dtype=torch.int32))
    k, v = (torch.nan_to_num(a) for a in (shared.k, shared.v))
    shared = shared._replace(k=k, v=v)
    rebuilt = replace(built, x=shared)
    check(rebuilt, backend_results(cpu, rebuilt))


def test_gradients_of_quantised_inputs_are_refused():
    built = build(Case(dtype="float8_e4m3fn", backward=False))
    out, lse, _ = cpu.forward(built.problem, built.x)
    with pytest.raises(ValueError, match="descales"):
        cpu.backward(built.problem, built.x, out, lse, torch.ones_like(out))


def test_several_threads_are_within_budget():
    torch.set_num_threads(2)  # conftest.py puts it back
    run(cpu, variants(LONG, heads_k=[2])[0])


ONE_KEY = [
    Case(seqlen_q=300, seqlen_k=300, causal=True, head_dim=128),
    Case(seqlen_q=300, seqlen_k=300, causal=True, head_dim=64, heads_q=4, dropout_p=0.2),
    Case(seqlen_q=300, seqlen_k=300, window=(0, 0), head_dim=128, softcap=5.0),
    Case(seqlen_q=140, seqlen_k=290, window=(0, -1), head_dim=80, shift=10, bias="hqk"),
    Case(seqlen_q=290, seqlen_k=140, causal=True, head_dim=80, varlen="qk"),
    Case(seqlen_q=70, seqlen_k=1, head_dim=100),
]


@pytest.mark.parametrize("case", ONE_KEY, ids=str)
def test_scores_of_a_row_with_one_key_have_no_gradient_to_the_bit(case):
    """Its probability is 1 whatever the score, so that dS is 0, and with it the row of dQ."""
    built = build(replace(case, lse_grad=False, backward=True))
    problem, x = built.problem, built.x
    out, lse, _ = cpu.forward(problem, x)
    assert built.dout is not None
    dq = cpu.backward(problem, x, out, lse, built.dout).dq
    rows = [
        seq.q_token + i
        for seq in sequences(problem, x)
        for i in range(seq.len_q)
        if sum(problem.mask.visible(i, j, seq.len_q, seq.len_k) for j in range(seq.len_k)) == 1
    ]
    assert rows and not dq.flatten(0, -3)[rows].any()


@pytest.mark.parametrize("seed", [0, 23, 24])
def test_scores_of_128_terms_are_as_exact_as_the_benchmarks_check_asks_for(seed):
    """Summed in one go, the largest score of one row was off by seven roundings."""
    (case,) = (
        replace(case, direction="forward", grad=True)
        for case in bench_cases.cases("cpu", "float32")
        if case.problem.head_dim == 128 and case.problem.mask.causal
        if case.direction == "backward"
    )
    inputs = draw(case, torch.device("cpu"), seed)
    ours = PEERS["heedful"].make(case, inputs)
    call = call_of(case, ours, inputs)
    assert Checker(case, inputs).why_wrong(call.results(call.run())) is None
