"""A plan: which tokens a rank holds, what ranks agree on, and what becomes of one that dies."""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from importlib import import_module
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.core.call.spread import BLOCK, CAUSAL, Mask, Piece, spread_heads
from heedful.distributed import ContextPlan, attention, cost, plan, schedules
from heedful.distributed.layouts import LAYOUTS
from heedful.distributed.schedules import Schedule, crossing, gathered, rows_of
from support.runs.ranks import Ranks

LENGTHS = [700, 1, 155, 0, 256]

batches = st.lists(st.integers(0, 1500), min_size=1, max_size=6)
masks = st.builds(
    Mask,
    st.one_of(st.none(), st.integers(0, 400)),
    st.one_of(st.none(), st.just(0), st.integers(0, 300)),
    st.one_of(st.just(0), st.integers(1, 300)),
    st.sampled_from([1, 256]),
)


@given(batches, st.integers(1, 9), st.sampled_from(sorted(LAYOUTS)), masks)
def test_every_token_lies_on_one_rank_and_cuts_on_multiples_of_a_tile(lengths, count, name, mask):
    made = LAYOUTS[name](lengths, count, mask)
    held = sorted(int(row) for rank in range(count) for row in rows_of(made, rank))
    assert held == list(range(sum(lengths)))
    for piece in (piece for shard in made.shards for piece in shard):
        assert piece.begin % BLOCK == 0 and len(piece) > 0
        assert piece.end % BLOCK == 0 or piece.end == lengths[piece.document]


@given(batches, st.integers(1, 5), st.sampled_from(sorted(LAYOUTS)), masks, st.booleans())
def test_what_a_rank_gathers_is_what_others_send_and_holds_all_keys_that_it_sees(
    lengths, count, name, mask, one_by_one
):
    made = LAYOUTS[name](lengths, count, mask)
    schedules = [gathered(made, mask, rank, one_by_one) for rank in range(count)]
    held = [rows_of(made, rank) for rank in range(count)]
    every = [np.full(schedule.count, -1) for schedule in schedules]
    for schedule, mine, rows in zip(schedules, held, every, strict=True):
        for own, place in schedule.own:
            rows[place] = mine[own]
    for rank, schedule in enumerate(schedules):
        # Ranks that took them for different numbers would call different collectives.
        for fact in ("most_received", "rounds", "fewest"):
            assert getattr(schedule, fact) == getattr(schedules[0], fact)
        assert schedule.rows_received <= schedule.most_received
        for other, theirs in enumerate(schedules):
            assert len(theirs.sent[rank]) <= schedule.rounds
            for there, here in zip(theirs.sent[rank], schedule.received[other], strict=True):
                assert (every[rank][here] == -1).all()
                every[rank][here] = every[other][there]
    for rank, schedule in enumerate(schedules):
        assert (np.diff(every[rank]) > 0).all() and -1 not in every[rank]
        check_calls(schedule, made, mask, every[rank], held[rank])


def check_calls(schedule: Schedule, made, mask: Mask, every, held) -> None:
    """Calls compute each row once; their keys are those that the rows see; their mask is the
    whole's."""
    computed = []
    for call in schedule.calls:
        rows, keys = held[call.rows], (held if call.is_local else every)[call.keys]
        computed += range(call.rows.start, call.rows.stop)
        begin_q = begin_k = 0
        pieces = iter(zip(call.pieces, call.firsts, strict=True))
        for length_q, length_k in zip(call.lengths_q, call.lengths_k, strict=True):
            if length_q:
                piece, first = next(pieces)
                start = made.starts[piece.document]
                found_q = rows[begin_q : begin_q + length_q] - start
                found_k = keys[begin_k : begin_k + length_k] - start
                assert found_q.tolist() == list(range(piece.begin, piece.end))
                assert found_k[0] == first and (np.diff(found_k) > 0).all()
                assert mask.first or first % mask.unit == 0
                check_mask(call.window, piece, found_k, mask, made)
            begin_q, begin_k = begin_q + length_q, begin_k + length_k
        assert (begin_q, begin_k) == (len(rows), len(keys)) and next(pieces, None) is None
    assert sorted(computed) == list(range(len(held)))


def check_mask(window, piece: Piece, keys, mask: Mask, made) -> None:
    """The last query, and the first, see in the call what they see in the document."""
    (left, right, *leading), length = window, made.lengths[piece.document]
    for row in (0, len(piece) - 1):
        diagonal = row + len(keys) - len(piece)
        index, position = np.arange(len(keys)), piece.begin + row
        is_near = (left < 0) | (index >= diagonal - left) | (index < sum(leading))
        seen = keys[is_near & ((right < 0) | (index <= diagonal + right))]
        every = np.arange(length)
        is_near = every >= (0 if mask.left is None else position - mask.left)
        is_near |= every < mask.first
        want = every[is_near & (every <= position + (length if mask.right is None else mask.right))]
        assert seen.tolist() == want.tolist()


def test_what_needs_no_other_rank_is_computed_apart_in_few_calls():
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(7.0, 1.2, 64)]
    cut = LAYOUTS["documents"](lengths, 4, CAUSAL)
    for rank in range(4):
        calls = gathered(cut, CAUSAL, rank).calls
        assert calls[0].is_local and len(calls) <= 4
    far = LAYOUTS["contiguous"]([8192], 4, Mask(1000, 0))
    inner = [call for call in gathered(far, Mask(1000, 0), 1).calls if call.is_local]
    assert [call.rows for call in inner] == [slice(1024, 2048)]


@pytest.mark.parametrize("layout", ["zigzag", "documents"])
def test_rows_that_follow_one_another_are_one_run(layout, monkeypatch):
    found, original = [], schedules._found_by

    def recorded(*facts):
        found.append(original(*facts))
        return found[-1]

    monkeypatch.setattr(schedules, "_found_by", recorded)
    for mask, rank in product((Mask(None, None), Mask(300, 300)), range(4)):
        gathered(LAYOUTS[layout]([2000, 900, 4000], 4, mask), mask, rank)
    assert any(len(runs) > 1 for runs in found)
    for runs in found:
        for (owner, rows, place), (other, more, after) in pairwise(runs):
            assert owner != other or rows.stop != more.start or place.stop != after.start


def test_a_zigzag_of_one_long_document_is_balanced_and_documents_beat_it_on_many():
    assert LAYOUTS["zigzag"]([65536], 8, CAUSAL).balance(CAUSAL) > 0.99
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(7.0, 1.2, 64)]
    many = {name: LAYOUTS[name](lengths, 4, CAUSAL).balance(CAUSAL) for name in LAYOUTS}
    assert many["documents"] > 0.95
    assert many["documents"] >= max(many.values())


def test_heads_are_spread_whole_or_replicated_or_refused():
    assert [h.keys for h in spread_heads(12, 6, 4)] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert [h.queries for h in spread_heads(8, 2, 4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [h.keys for h in spread_heads(8, 2, 4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    with pytest.raises(ValueError, match="take 'gather'"):
        spread_heads(6, 2, 4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def planned(**more) -> ContextPlan:
    return plan(**{"lengths": LENGTHS, "heads_q": 2, "heads_k": 1, "head_dim": 8} | more)


def moved(rank: int, count: int) -> dict[str, bool]:
    """Which of a plan's tools do what they say."""
    made = planned()
    tokens = torch.arange(made.total_tokens)
    mine, positions = made.shard(tokens), made.positions()
    starts = torch.tensor(made.layout.starts)
    document = torch.searchsorted(starts, mine, right=True) - 1
    labels = made.shift_labels(tokens)
    last = positions + 1 == torch.tensor(LENGTHS)[document]
    whole = torch.randn(made.total_tokens, 3, generator=torch.Generator().manual_seed(0))
    leaf = made.shard(whole).requires_grad_()
    (gathered_grad,) = torch.autograd.grad((made.gather(leaf) * whole).sum(), leaf)
    other = whole.clone().requires_grad_()
    weighted = made.scatter(other) * made.shard(whole)
    (scattered_grad,) = torch.autograd.grad(weighted.sum(), other)
    return {
        "positions": torch.equal(positions, mine - starts[document]),
        "labels": torch.equal(labels, torch.where(last, -100, mine + 1)),
        "unshard": torch.equal(made.unshard(mine), tokens),
        "gather": torch.equal(gathered_grad, made.shard(whole) * count),
        "scatter": torch.equal(scattered_grad, whole),
    }


def test_tokens_labels_and_gradients_cross_ranks(ranks):
    for found in ranks.run(moved):
        assert all(found.values()), found


def losses(rank: int, count: int) -> tuple[float, float]:
    """A rank's scaled mean of a loss over its labelled rows, and the mean of the whole batch."""
    made = planned()
    loss = torch.rand(made.total_tokens, generator=torch.Generator().manual_seed(0)).double()
    ends = torch.tensor([s - 1 for s, n in zip(made.layout.starts[1:], LENGTHS, strict=True) if n])
    loss[ends] = torch.nan
    return float(made.shard(loss).nanmean()) * made.loss_scale, float(loss.nanmean())


def test_the_average_of_scaled_losses_is_the_mean_over_the_whole_batch(ranks):
    found = ranks.run(losses)
    assert math.isclose(sum(scaled for scaled, _ in found) / 3, found[0][1], rel_tol=1e-12)


def disagree(rank: int, count: int, name: str, values: list) -> tuple[str, float]:
    start = time.monotonic()
    try:
        planned(**{name: values[rank == 1]})
    except ValueError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("lengths", [[700], [699]], "lengths"),
        ("heads_q", [2, 4], "heads"),
        ("dtype", [torch.float16, torch.bfloat16], "dtype"),
        ("layout", ["zigzag", "contiguous"], "layout"),
        ("options", [{"layers": 12, 1: 2}, {"layers": 13, 1: 2}], "options"),
    ],
)
def test_each_rank_says_what_differs_and_where(ranks, name, values, said):
    for found, seconds in ranks.run(disagree, name, values):
        assert f"the same {said} on every rank; ranks [1] have another" in found
        assert seconds < 1


def wrong(rank: int, count: int, more: dict) -> str:
    try:
        planned(**more)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lengths": None}, "lengths or cu_seqlens"),
        ({"lengths": []}, "one or more counts"),
        ({"lengths": [5, -1]}, "counts of tokens from 0"),
        ({"lengths": [2.5]}, "lengths"),
        ({"lengths": None, "cu_seqlens": torch.tensor([1, 4])}, "must begin with 0"),
        ({"heads_k": 3}, "heads_k must divide heads_q"),
        ({"layout": "zigzags"}, "layout must be one of"),
        ({"strategy": "rings"}, "strategy must be one of"),
        ({"strategy": "heads"}, "take 'gather'"),
        ({"transport": "copies"}, "transport must be one of"),
        ({"transport": "copy", "strategy": "ring"}, "transport must be 'send' under strategy"),
        ({"transport": "copy"}, "transport must be 'send' where ranks are not GPUs"),
        ({"window_size": (4, 0, -2)}, "window_size"),
        ({"group": 3}, "group must be a ProcessGroup"),
        ({"dtype": "bfloat16"}, "dtype must be one of torch.float16, torch.bfloat16"),
        ({"dtype": torch.int32}, "dtype must be one of torch.float16, torch.bfloat16"),
        ({"head_dim_v": 0}, "head_dim_v must be >= 1, got 0"),
        ({"lengths": None, "cu_seqlens": [0, 4]}, "cu_seqlens must be a torch.Tensor"),
        ({"lengths": None, "cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens must be int32"),
        ({"options": ["layers"]}, "options must be a mapping or None"),
        ({"layout": ["zigzag"]}, "layout must be one of"),
    ],
)
def test_a_plan_of_wrong_arguments_is_refused_by_name(ranks, more, said):
    for found in ranks.run(wrong, more):
        assert said in found


def told(rank: int, count: int) -> str:
    return planned(head_dim=512).explain()


def test_explain_says_why_and_what_each_rank_does(ranks):
    first, *others = ranks.run(told)
    assert others == [first, first]
    assert "layout documents: short documents stay whole" in first
    assert "strategy gather: heads do not spread evenly over the ranks" in first
    assert "balance " in first and "rank 2: " in first
    rows = max(int(n) for n in re.findall(r"gather receives (\d+) rows", first))
    mib = rows * (512 + 512) * 2 / 2**20
    assert f"a rank receives at most {mib:.1f} MiB of keys and values" in first


def predicted(options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "heedful", "explain", "--device", "H200", "--json"]
    return subprocess.run([*command, *options.split()], capture_output=True, text=True)


def test_a_forward_over_ranks_that_are_not_there_is_predicted():
    shown = predicted("-b 1 -s 131072 -n 32 --heads-k 8 --causal --ranks 64")
    layout, received, links, *strategies = json.loads(shown.stdout)["ranks"]
    assert links == "links: 45 GB/s between hosts assumed, not measured"
    assert layout == "64 ranks, layout zigzag: one document; balance 1.000"
    # The first rank sees all keys, and holds a 64th of them.
    assert f"at most {131072 * 63 / 64 * 8 * 256 * 2 / 2**20:.1f} MiB" in received
    # 32 query heads over 8 of keys do not spread over 64 ranks.
    assert [line.split(":")[0] for line in strategies] == ["gather", "ring"]
    few = predicted("-s 4096 --seqlen-k 77 --ranks 2")
    assert few.returncode == 2 and "as many keys as queries" in few.stderr


def test_longer_documents_and_fewer_ranks_waste_less(monkeypatch):
    # But for clocks, which fall under long work.
    monkeypatch.setattr(cost, "LONGER", 0.0)

    def share(length: int, ranks: int) -> float:
        whole, given = [], (CAUSAL, (32, 8), (128, 128), 2)
        for count in (1, ranks):
            layout = LAYOUTS["zigzag"]([length], count, CAUSAL)
            whole.append(cost.times(layout, *given)["gather"].forward)
        return whole[0] / (ranks * whole[1])

    assert share(8192, 2) < share(16384, 2) < share(131072, 2) <= 1
    assert share(65536, 8) < share(65536, 4) < share(65536, 2)


def test_a_call_asks_for_few_keys_at_once_and_a_replay_in_groups():
    def sizes(length: int, replayed: bool, backward: bool = False) -> list[int]:
        layout = LAYOUTS["zigzag"]([length], 2, CAUSAL)
        needs = gathered(layout, CAUSAL, 0)
        return cost.head_groups(needs, (32, 8), (128, 128), 2, backward, replayed)[0]

    # 32 MiB arrive sooner than the host asks for another group.
    assert sizes(16384, True) == [2, 6] and sizes(16384, False) == [8]
    assert len(sizes(131072, False)) == len(sizes(131072, True)) == 2
    assert sizes(16384, False, backward=True) == sizes(16384, True, backward=True)


@pytest.mark.parametrize(("length", "sizes"), [(16384, [2, 4, 2]), (65536, [1, 6, 1])])
def test_no_tile_of_keys_takes_longer_than_a_group_of_a_backward_over_all_SMs(length, sizes):
    layout = LAYOUTS["zigzag"]([length], 2, CAUSAL)
    schedules = [gathered(layout, CAUSAL, rank) for rank in range(2)]
    for schedule in schedules:
        assert cost.head_groups(schedule, (32, 8), (128, 128), 2, True, True)[0] == sizes
        for call in schedule.calls:
            tiles = sum(CAUSAL.tiles(piece, length) for piece in call.pieces)
            # Half a head more or less is rounded.
            most = max(map(len, call.pieces)) / BLOCK
            assert call.is_local or most <= (sizes[0] + 0.5) * tiles / cost.SMS


def dies(rank: int, count: int, when: str, strategy: str) -> tuple[str, float]:
    """Rank 1 ends before the step, in it or in its backward, or before that; what the others meet,
    and how late."""
    made = planned(lengths=[1024], heads_q=4, heads_k=2, strategy=strategy)
    q, k, v = (torch.randn(made.tokens, heads, 8).requires_grad_() for heads in (4, 2, 2))
    if rank == 1 and when == "before the step":
        os._exit(1)
    if rank == 1 and when.startswith("in "):
        # Its first transfer has begun or ended, and none after it will.
        calls = {
            "gather": ("attended", "differentiated"),
            "heads": ("flash_attn_varlen_func", "attention_backward"),
            "ring": ("attended", "differentiated"),
        }
        name = calls[strategy][when == "in the backward"]
        setattr(import_module(f"heedful.distributed.{strategy}"), name, lambda *a, **k: os._exit(1))
    start = time.monotonic()
    try:
        out = attention(q, k, v, made, causal=True)
        if rank == 1 and when == "before the backward":
            os._exit(1)
        out.sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


WHEN = ["before the step", "in the step", "before the backward", "in the backward"]
# When, and under which strategy: by default each once.
DEATHS = [(when, "gather") for when in WHEN]
DEATHS += [
    pytest.param(when, strategy, marks=pytest.mark.slow)
    for strategy in ("heads", "ring")
    for when in WHEN
]


@pytest.mark.parametrize(("when", "strategy"), DEATHS)
def test_the_others_raise_soon_after_a_rank_has_died(tmp_path, when, strategy):
    made = Ranks(2, tmp_path, seconds=5.0)
    try:
        (said, answer), (ended, _) = made.outcomes(dies, when, strategy)
        assert ended == "ended" and not said
        assert answer[0] and answer[1] < 10
    finally:
        made.close()


@pytest.mark.parametrize("seed", range(40))
def test_each_part_of_a_keys_gradient_is_summed_once_by_the_rank_that_has_it(seed):
    drawn = random.Random(seed)
    ranks, masks = drawn.choice([2, 3, 4]), [(None, None), (None, 0), (200, 0), (60, 40)]
    lengths = [drawn.choice([0, 1, 130, 700, 1500, 256]) for _ in range(drawn.choice([1, 3, 5]))]
    mask = Mask(*drawn.choice(masks), first=drawn.choice([0, 40]))
    layout = LAYOUTS[drawn.choice(sorted(LAYOUTS))](lengths, ranks, mask)
    schedules = [gathered(layout, mask, rank) for rank in range(ranks)]
    values = np.random.default_rng(seed)
    want, remote, local = np.zeros(sum(lengths)), [], []
    for rank, schedule in enumerate(schedules):
        spans = [np.arange(*rows) for rows in crossing(layout, mask).needed[rank]]
        needed, rows = np.concatenate([*spans, np.arange(0)]), rows_of(layout, rank)
        remote.append(np.full(schedule.back.counts[rank], np.nan))
        local.append(np.full(len(rows), np.nan))
        places = iter(schedule.back.places)
        for call in schedule.calls:
            part = values.random(call.keys.stop - call.keys.start)
            np.add.at(want, (rows if call.is_local else needed)[call.keys], part)
            if call.is_local:
                local[rank][call.keys] = part
            else:
                remote[rank][next(places)] = part
    for rank, schedule in enumerate(schedules):
        back, parts = schedule.back, np.full(schedule.back.parts, np.nan)
        for other, theirs in enumerate(schedules):
            assert theirs.back.sent[rank] == back.there[other]
            for into, rows in zip(back.received[other], back.there[other], strict=True):
                parts[into] = remote[other][rows]
        found = np.full(layout.tokens(rank), np.nan)
        for rows in back.sums:
            found[rows.rows] = local[rank][rows.rows] if rows.is_local else 0.0
            for run in rows.own:
                found[rows.rows] += remote[rank][run]
            for run in rows.received:
                found[rows.rows] += parts[run]
        np.testing.assert_allclose(found, want[rows_of(layout, rank)])


def refusals(rank: int, count: int) -> list[str]:
    made = plan(lengths=[300, 5], heads_q=2, heads_k=2, head_dim=16)
    said = []
    for call in (made.shard, made.unshard, made.shift_labels):
        with pytest.raises(ValueError) as caught:
            call(torch.zeros(304))
        said.append(str(caught.value))
    return said


def test_tensors_of_other_rows_are_refused_by_name(ranks):
    for shard, unshard, labels in ranks.run(refusals):
        assert shard.startswith("whole must have 305 rows along dim 0") and "got 304" in shard
        assert unshard.startswith("shard must have this rank's ") and "got 304" in unshard
        assert labels == "tokens must have shape (305,), got (304,)"


def twice(rank: int, count: int, name: str) -> str:
    made = planned()
    x = torch.randn(made.tokens if name == "gather" else made.total_tokens, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(getattr(made, name)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        (grad.sum() + x.sum()).backward()
    return str(caught.value)


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_second_derivatives_across_ranks_raise_and_are_not_left_out(ranks, name):
    for said in ranks.run(twice, name):
        assert "differentiate twice" in said


def in_unsigned_bytes(rank: int, count: int) -> str:
    with pytest.raises(TypeError) as caught:
        planned().shift_labels(torch.zeros(sum(LENGTHS), dtype=torch.uint8))
    return str(caught.value)


def test_tokens_that_cannot_hold_ignore_index_are_refused(ranks):
    """As a uint8, -100 would be the label 156."""
    for said in ranks.run(in_unsigned_bytes):
        assert said == "tokens must be int8 or int16 or int32 or int64, got uint8"


def trained_after_inference(rank: int, count: int) -> bool:
    made, whole = planned(), torch.randn(sum(LENGTHS), 2, requires_grad=True)
    with torch.inference_mode():
        made.shard(whole)
    (grad,) = torch.autograd.grad(made.shard(whole).sum(), whole)
    return int(grad.sum()) == 2 * made.tokens


def test_rows_that_inference_mode_saw_first_have_gradients(ranks):
    assert ranks.run(trained_after_inference) == [True, True, True]
