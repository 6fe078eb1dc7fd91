"""Plans decide, compare between ranks and explain, here on a rank whose others are not there.
Schedules are those of golden_schedules.txt. After a change that is meant:

    WRITE_GOLDEN_SCHEDULES=1 pytest tests/cpu/distributed/test_plan_facts.py
"""

import os
import re
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from heedful.core.call.spread import CAUSAL, Mask, Piece
from heedful.distributed import cost
from heedful.distributed import plan as plan_of
from heedful.distributed.layouts import LAYOUTS, Layout
from heedful.distributed.plan import ContextPlan, StepsOnDevice, mask_of
from heedful.distributed.rings import ring_steps
from heedful.distributed.schedules import gathered

module: Any = import_module("heedful.distributed.plan")
GOLDEN = Path(__file__).with_name("golden_schedules.txt")
GIVEN: dict[str, Any] = {"lengths": [700, 0, 256], "heads_q": 4, "heads_k": 2, "head_dim": 8}
CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch) -> Any:
    """Rank 1 of two. agreed: the facts that ranks compared, and on which device; asked: the sizes
    of memory that was wanted; why: for which reason there is none."""
    said = SimpleNamespace(rank=1, ranks=2, backend="gloo", agreed=[], asked=[], why="")

    def peers(group: Any, size: int) -> tuple[Any, str]:
        said.asked.append((group, size))
        return (None, said.why) if said.why else (SimpleNamespace(size=size), "")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: said.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: said.ranks)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: said.backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(module, "agree", lambda group, *facts: said.agreed.append(facts))
    monkeypatch.setattr(module, "peers_of", peers)
    return said


def planned(**more: Any) -> ContextPlan:
    return plan_of(**GIVEN | more)


# By argument another value, and what ranks then say is not the same.
OTHERS: dict[str, tuple[Any, str]] = {
    "lengths": ([700, 256], "lengths"),
    "heads_q": (8, "heads"),
    "heads_k": (4, "heads"),
    "head_dim": (16, "head dims"),
    "head_dim_v": (16, "head dims"),
    "dtype": (torch.float16, "dtype"),
    "causal": (False, "mask"),
    "window_size": ((5, 0), "mask"),
    "layout": ("zigzag", "layout"),
    "strategy": ("gather", "strategy"),
    "transport": ("send", "transport"),
    "options": ({"layers": 2}, "options"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_compare_each_argument_by_name(alone, name):
    other, fact = OTHERS[name]
    planned()
    planned(**{name: other})
    (first, where), (second, _) = alone.agreed
    assert {each for each in first if first[each] != second[each]} == {fact}
    assert where == CPU and all(0 <= value < 2**63 for value in first.values())


@pytest.mark.parametrize("window", [(5, 0, 2), (5, 0, 3), (6, 0, 2), (5, 1, 2)], ids=str)
def test_ranks_compare_each_bound_of_a_window(alone, window):
    for each in ((5, 0, 2), window):
        planned(window_size=each, causal=False)
    (first, _), (second, _) = alone.agreed
    assert (first["mask"] == second["mask"]) == (window == (5, 0, 2))


def test_ranks_compare_how_many_exchange_tokens_for_heads(alone, monkeypatch):
    alone.ranks = 8
    monkeypatch.setattr(module, "grid", lambda *_: SimpleNamespace(shards=None))
    for asked in (2, 4):
        planned(heads_q=8, heads_k=8, strategy="heads x ring", heads_ranks=asked)
    (first, _), (second, _) = alone.agreed
    assert {each for each in first if first[each] != second[each]} == {"heads_ranks"}
    with pytest.raises(ValueError, match="heads_ranks must be None under strategy 'ring'"):
        planned(strategy="ring", heads_ranks=2)


def test_the_order_of_options_does_not_matter_and_facts_lie_where_the_backend_is(alone):
    alone.backend = "nccl"
    for options in ({"a": 1, 2: None}, {2: None, "a": 1}):
        planned(options=options)
    assert alone.agreed[0] == alone.agreed[1]
    assert alone.agreed[0][1] == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("more", "backend", "why", "said"),
    [
        ({}, "nccl", "", ["as asked", "rows are copied between GPUs of a host"]),
        ({}, "gloo", "so", ["as asked", "rows are sent: so"]),
        ({"transport": "copy"}, "nccl", "", ["as asked", "rows are copied between GPUs of a host"]),
        ({"transport": "send"}, "nccl", "", ["as asked", None]),
        ({"strategy": "ring"}, "nccl", "", ["as asked", None]),
        ({"lengths": [128, 128]}, "nccl", "", ["as asked", "no rank needs rows of another"]),
    ],
    ids=str,
)
def test_a_plan_of_gather_says_how_rows_move_and_has_memory_for_them(
    alone, more, backend, why, said
):
    alone.backend, alone.why = backend, why
    given = {"strategy": "gather", "lengths": [512], "head_dim_v": 24} | more
    if given.get("transport") == "copy":
        given["strategy"] = "auto"
    made = planned(**given)
    layout, strategy, most, *rest = made.reasons
    name = "documents" if len(given["lengths"]) > 1 else "zigzag"
    assert layout.startswith(f"layout {name}: ")
    assert strategy == f"strategy {made.strategy}: {said[0]}"
    # Rank 0 has tiles 0 and 3 of 512 causal tokens, and gets the two others.
    rows = 256 if given["lengths"] == [512] else 0
    mib = rows * 2 * (8 + 24) * 2 / 2**20
    assert most == f"gather: a rank receives at most {mib:.1f} MiB of keys and values"
    assert rest == [each for each in said[1:] if each]
    if rest and rows:
        schedule = gathered(made.layout, made.mask, 1)
        rooms = sum(
            -(-max(counts) // 128) * 128 for counts in (schedule.counts, schedule.back.counts)
        )
        assert alone.asked == [(None, rooms * 2 * (8 + 24) * 2)]
    assert (made.peers is not None) == (bool(rest) and not why)


def test_a_copy_that_cannot_be_is_refused(alone):
    alone.why = "so"
    with pytest.raises(ValueError, match="^transport must be 'send' where so, got 'copy'$"):
        planned(transport="copy")
    planned(transport="auto", strategy="gather")


@pytest.mark.parametrize(("gather", "heads"), [((1.0, 2.0), (2.0, 2.0)), ((1.0, 2.5), (1.2, 2.0))])
def test_the_strategy_that_takes_less_forward_and_backward_is_chosen(
    alone, monkeypatch, gather, heads
):
    asked = []

    def times(*given: Any) -> dict[str, cost.Time]:
        asked.append(given)
        return {"gather": cost.Time(*gather), "ring": cost.Time(0, 0), "heads": cost.Time(*heads)}

    monkeypatch.setattr(cost, "times", times)
    alone.backend = "nccl"
    made = planned(dtype=torch.float32)
    assert made.strategy == ("gather" if sum(gather) < sum(heads) else "heads")
    words = (
        "predicted time of forward and backward: gather {:.3f} ms, ring 0.000 ms, heads {:.3f} ms"
    )
    told = words.format(sum(gather) * 1e3, sum(heads) * 1e3)
    assert f"strategy {made.strategy}: {told}" in made.reasons
    planned(dtype=torch.float32, transport="send")
    first, second = asked
    assert first == (made.layout, made.mask, (4, 2), (8, 8), 4, True)
    assert second == (*first[:5], False)


def test_heads_by_default_of_a_window_are_computed_where_they_spread(alone):
    assert planned(strategy="heads", heads_q=4, heads_k=1).strategy == "heads"
    alone.ranks = 3
    assert planned().reasons[1] == "strategy gather: heads do not spread evenly over the ranks"
    with pytest.raises(ValueError, match="cannot spread"):
        planned(strategy="heads")


@pytest.mark.parametrize("rank", range(4))
def test_under_heads_x_ring_a_shard_lies_on_the_ranks_of_a_row(alone, monkeypatch, rank):
    alone.rank, alone.ranks = rank, 4
    asked = []
    line = SimpleNamespace(rank=rank // 2)

    def grid(*given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(shards=given[1], column=line)

    monkeypatch.setattr(module, "grid", grid)
    made = planned(strategy="heads x ring", lengths=[2048])
    shards = LAYOUTS["zigzag"]([2048], 2, CAUSAL)
    assert asked == [(None, shards, 2, (4, 2))]
    begin, end = [(1536, 2048), (0, 512), (512, 1024), (1024, 1536)][rank]
    assert made.layout.shards[rank] == (Piece(0, begin, end),)
    steps = made.steps(CAUSAL, False, CPU).steps
    assert steps == ring_steps(shards, CAUSAL, rank // 2)
    assert made.steps(CAUSAL, True, CPU).steps == ring_steps(shards, CAUSAL, rank // 2, True)


def test_a_mesh_of_one_dim_is_its_group_and_no_other_is_taken(alone):
    mesh = SimpleNamespace(ndim=1, get_group=lambda: "its group")
    assert planned(group=mesh).group == "its group"
    mesh.ndim = 2
    with pytest.raises(ValueError, match="group must be a mesh of one dim, got 2 dims"):
        planned(group=mesh)


def test_a_group_is_the_plans_and_anything_else_is_refused(alone, monkeypatch):
    class Group:
        pass

    monkeypatch.setattr(dist, "ProcessGroup", Group)
    group = Group()
    assert planned(group=group).group is group and planned().group is None
    with pytest.raises(TypeError, match="group must be a ProcessGroup or DeviceMesh, got int"):
        planned(group=3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"heads_q": 3}, "heads_k must divide heads_q, got 3 and 2"),
        ({"heads_k": 0}, "heads_k must divide heads_q, got 4 and 0"),
        ({"heads_q": -2, "heads_k": -2}, "heads_k must divide heads_q, got -2 and -2"),
        ({"head_dim": 0}, "head_dim must be >= 1, got 0"),
        ({"head_dim_v": 0}, "head_dim_v must be >= 1, got 0"),
    ],
    ids=str,
)
def test_sizes_that_no_call_has_are_refused(alone, more, said):
    with pytest.raises(ValueError) as caught:
        planned(**more)
    assert str(caught.value) == said
    assert planned(heads_q=2, heads_k=2, head_dim=1).heads == (2, 2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_have_the_dtype_of_tokens_which_are_those_of_the_batch(alone, dtype):
    made = planned(lengths=[90])
    labels = made.shift_labels(torch.arange(90, dtype=dtype))
    assert labels.dtype == dtype and len(labels) == made.tokens
    with pytest.raises(ValueError, match=r"^tokens must have shape \(90,\), got \(91,\)"):
        made.shift_labels(torch.arange(91))
    with pytest.raises(TypeError, match="^tokens must be int8 or int16"):
        made.shift_labels(torch.zeros(90))


def test_without_a_group_it_says_what_is_to_be_called(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="call init_process_group before"):
        planned()


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([0, 5, 3], "counts of tokens from 0"),
        ([0], "one or more counts"),
        ([], r"must begin with 0, got \[\]"),
        ([1, 5], r"must begin with 0, got \[1\]"),
    ],
)
def test_starts_that_are_none_of_documents_are_refused(alone, starts, said):
    with pytest.raises(ValueError, match=said):
        planned(lengths=None, cu_seqlens=torch.tensor(starts, dtype=torch.int64))


def test_starts_are_lengths_and_together_they_fit_positions(alone):
    made = planned(lengths=None, cu_seqlens=torch.tensor([0, 700, 700, 956], dtype=torch.int32))
    assert made.layout == planned().layout and made.layout.lengths == (700, 0, 256)
    with pytest.raises(ValueError, match="together at most 2147483647"):
        planned(lengths=[2**30, 2**30])
    with pytest.raises(ValueError, match="lengths or cu_seqlens, one of them"):
        planned(cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("rank", range(3))
def test_a_plan_knows_its_ranks_rows(alone, rank):
    alone.rank, alone.ranks = rank, 3
    made = planned(layout="contiguous")
    shard = made.layout.shards[rank]
    assert (made.rank, made.ranks, made.total_tokens) == (rank, 3, 956)
    rows = [made.layout.starts[p.document] + i for p in shard for i in range(p.begin, p.end)]
    assert made.tokens == len(rows)
    assert made.positions().tolist() == [i for p in shard for i in range(p.begin, p.end)]
    assert made.positions().dtype == torch.int64
    every = torch.arange(956)
    assert made.shard(every).tolist() == rows
    assert made.shard(every.expand(2, 956), 1).tolist() == [rows, rows]
    with pytest.raises(ValueError, match="whole must have 956 rows along dim 1, .*, got 3"):
        made.shard(torch.zeros(956, 3), 1)
    labels = [-5 if row in (699, 955) else row + 1 for row in rows]
    assert made.shift_labels(every, -5).tolist() == labels
    # Two of 956 tokens are the last of a document.
    held = sum(row not in (699, 955) for row in rows)
    assert made.loss_scale == held * 3 / 954
    order = made.order(CPU)
    of_ranks = torch.cat([torch.from_numpy(module.rows_of(made.layout, r)) for r in range(3)])
    assert torch.equal(of_ranks[order], every)
    starts, longest = made.whole(CPU)
    assert starts.tolist() == [0, 700, 700, 956] and starts.dtype == torch.int32 and longest == 700
    places = [(mine, whole) for mine, whole in made.places[rank]]
    assert [row for _, whole in places for row in range(whole.start, whole.stop)] == rows
    assert made.rounds == max(len(each) for each in made.places)
    assert int(made.number) != int(planned().number)


@pytest.mark.parametrize("lengths", [[0, 0], [1, 1, 0]])
def test_without_labels_a_loss_counts_for_nothing(alone, lengths):
    assert planned(lengths=lengths).loss_scale == 0.0


def test_a_plan_is_the_one_of_layers_until_its_block_ends(alone):
    from heedful.core.base.entered import PLANS

    first, second = planned(), planned()
    with first as entered, second:
        assert entered is first and PLANS[-2:] == [first, second]
    assert first not in PLANS and second not in PLANS


def test_explain_lists_each_ranks_tokens_tiles_and_rows(alone):
    made = planned(lengths=[512], strategy="gather", transport="send")
    assert made.explain().splitlines() == [
        "layout zigzag: one document",
        "strategy gather: as asked",
        "gather: a rank receives at most 0.0 MiB of keys and values",
        "balance 1.000",
        # Tiles 0 and 3 see one tile of keys and four, and need tiles 1 and 2.
        "rank 0: 256 tokens, 5 tiles of 128 x 128, gather receives 256 rows of k and v",
        "rank 1: 256 tokens, 5 tiles of 128 x 128, gather receives 128 rows of k and v",
    ]


@pytest.mark.parametrize(
    ("causal", "window", "mask"),
    [
        (True, (-1, -1), Mask(None, 0)),
        (False, (-1, -1), Mask(None, None)),
        (False, (3, 4), Mask(3, 4)),
        (True, (3, 4), Mask(3, 0)),
        (False, [3, -1], Mask(3, None)),
        (True, (3, 0, 2), Mask(3, 0, 2)),
        (False, (0, 0), Mask(0, 0)),
    ],
)
def test_masks_are_those_of_the_arguments(causal, window, mask):
    assert mask_of(causal, window) == mask


@pytest.mark.parametrize(
    ("causal", "window"),
    [(1, (-1, -1)), (False, (True, 0)), (False, (1.5, 0)), (False, (True, False))],
)
def test_what_only_equals_an_argument_is_still_refused(causal, window):
    """A kept mask of (1, 0) is none of (True, 0), though these are equal."""
    mask_of(bool(causal), tuple(int(bound) for bound in window))
    with pytest.raises(TypeError, match="causal" if causal else "window_size"):
        mask_of(causal, window)


def starts_of(lengths: Any) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def same(found: Tensor, lengths: Any) -> bool:
    return found.tolist() == starts_of(lengths) and found.dtype == torch.int32


@pytest.mark.parametrize("rank", range(2))
def test_calls_and_parts_have_the_starts_of_their_own_sequences(alone, rank):
    """Those of queries and of keys differ: a chunk sees the keys before it."""
    alone.rank = rank
    made = planned(lengths=[900, 1300], layout="zigzag", strategy="gather", transport="send")
    on = made.schedule(CAUSAL, False, CPU)
    calls = on.schedule.calls
    assert on.schedule == gathered(made.layout, CAUSAL, rank) and not on.one_by_one
    assert len(on.cu_q) == len(on.cu_k) == len(calls)
    for call, cu_q, cu_k in zip(calls, on.cu_q, on.cu_k, strict=True):
        assert same(cu_q, call.lengths_q) and same(cu_k, call.lengths_k)
    assert any(call.lengths_q != call.lengths_k for call in calls)
    assert made.schedule(CAUSAL, False, CPU) is on
    apart = made.schedule(CAUSAL, True, CPU)
    assert apart.one_by_one and apart.schedule == gathered(made.layout, CAUSAL, rank, True)
    steps = StepsOnDevice.of(made.layout, Mask(300, 0), rank, False, CPU)
    assert steps.steps == ring_steps(made.layout, Mask(300, 0), rank)
    assert len(steps.cumulative) == len(steps.steps)
    for step, each in zip(steps.steps, steps.cumulative, strict=True):
        for part, (cu_q, cu_k) in zip(step.parts, each, strict=True):
            assert same(cu_q, part.lengths_q) and same(cu_k, part.lengths_k)
    parts = [part for step in steps.steps for part in step.parts]
    assert any(part.lengths_q != part.lengths_k for part in parts)


BATCHES: dict[str, tuple[Layout, Mask]] = {
    "one document": (LAYOUTS["zigzag"]([1100], 2, CAUSAL), CAUSAL),
    "a batch": (LAYOUTS["zigzag"]([700, 700], 2, CAUSAL), CAUSAL),
    "documents": (LAYOUTS["documents"]([900, 130, 0, 400, 40], 3, CAUSAL), CAUSAL),
    "no mask": (LAYOUTS["contiguous"]([500, 300], 2, CAUSAL), Mask(None, None)),
    "a window": (LAYOUTS["contiguous"]([1500], 3, CAUSAL), Mask(200, 30)),
    "a window with first keys": (LAYOUTS["contiguous"]([1200, 90], 2, CAUSAL), Mask(150, 0, 20)),
    "keys from a unit on": (LAYOUTS["contiguous"]([1500], 2, CAUSAL), Mask(200, 0, 0, 256)),
}


def golden_lines() -> list[str]:
    lines = []
    for (name, (layout, mask)), one_by_one in product(BATCHES.items(), (False, True)):
        if one_by_one and name not in ("a batch", "documents"):
            continue
        lines.append(f"{name}{', one by one' * one_by_one}")
        for rank in range(len(layout.shards)):
            made = gathered(layout, mask, rank, one_by_one)
            back = vars(made.back)
            for what, facts in (("gather", vars(made) | {"back": ""}), ("gradients", back)):
                told = ", ".join(f"{key}={value!r}" for key, value in facts.items() if value != "")
                lines.append(f"    rank {rank}, {what}: {told}")
            for step in ring_steps(layout, mask, rank, one_by_one):
                lines.append(f"    rank {rank}, ring: {step!r}")
    return [re.sub(r"slice\((\d+), (\d+), None\)", r"\1:\2", line) for line in lines]


def test_schedules_are_those_of_the_golden_table():
    """How many calls and messages a step has: others that compute the same may take more."""
    told = "\n".join(golden_lines()) + "\n"
    if os.environ.get("WRITE_GOLDEN_SCHEDULES"):
        GOLDEN.write_text(told, encoding="utf-8")
    assert told == GOLDEN.read_text(encoding="utf-8")
