"""Mixed batches are timed as they are described, behind a check that finds what is wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from heedful.bench import mixed
from heedful.bench.harness import timing
from heedful.bench.harness.check import OUTSIDE
from heedful.bench.harness.protocol import Row
from heedful.bench.harness.timing import Spread
from heedful.bench.mixed import (
    BATCHES,
    attend,
    calls_of,
    draw,
    lines,
    measure,
    reference,
    run,
)
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from support.problems.grids import in_turns

CPU = torch.device("cpu")
NAMES = [batch.name for batch in BATCHES]
MASK = MaskSpec.of(True)


def small(batch: mixed.Batch) -> mixed.Batch:
    """The batch with few short sequences and heads."""
    decodes = tuple((queries, 40 + 9 * b) for b, (queries, _) in enumerate(batch.decodes[:3]))
    prefills = tuple((33 + b, 50 + b) for b, _ in enumerate(batch.prefills[:2]))
    return replace(batch, decodes=decodes, prefills=prefills, heads=(4, 2), dim=32)


def test_names_tell_batches_apart_and_all_are_asked_for_by_one_word():
    assert len(set(NAMES)) == len(NAMES) and all(name.startswith("mixed ") for name in NAMES)
    # Which no kernel is named by: `main` would take it for a backend.
    from heedful.bench.steps import BACKENDS

    assert "mixed" not in BACKENDS


def test_the_first_batch_is_the_one_that_the_bar_is_of():
    batch = BATCHES[0]
    assert batch.decodes == ((1, 4096),) * 124 and batch.prefills == ((2048, 2048),) * 4
    assert (batch.heads, batch.dim, batch.page, batch.most) == ((32, 8), 128, 16, 1.05)


@pytest.mark.parametrize("batch", BATCHES, ids=NAMES)
def test_a_batch_is_shared_by_two_kernels_and_each_kind_alone_is_not(batch):
    def backend(sequences) -> str:
        queries, keys = zip(*sequences, strict=True)
        facts: dict[str, Any] = {"page_size": batch.page, "used_k": True, "mask": MASK}
        facts |= {"total_q": sum(queries), "head_dim": batch.dim}
        sizes = (len(queries), max(queries), max(keys), *batch.heads)
        return (
            plan(AttentionProblem.dense(*sizes, **facts), by_name("H200"))
            .variant_of("forward")
            .packed_as
        )

    assert backend(batch.sequences) == "hopper_mixed"
    if batch.decodes:
        assert backend(batch.decodes) == "hopper_decode"
        assert backend(batch.prefills) == "hopper"


@pytest.mark.parametrize("batch", in_turns(BATCHES, each=2), ids=NAMES)
def test_a_batch_is_right_and_gets_its_figures(batch, monkeypatch):
    on_cpu = lambda b, t, which, backend=None: attend(b, t, which)  # noqa: E731
    monkeypatch.setattr(mixed, "attend", on_cpu)
    row = measure(small(batch), CPU, rounds=5)
    assert not row.missing
    names = {"one call", "hopper", "two calls", "prefills alone"}
    assert set(row.times) == names | ({"decodes alone"} if batch.decodes else set())
    text = "\n".join(lines(row))
    assert text.startswith(batch.name) and "one call / two calls: " in text
    assert ("bar 1.05" in text) == (batch.most == 1.05)


def test_a_forward_that_is_not_there_is_said():
    row = measure(small(BATCHES[0]), CPU, rounds=5)
    assert "no kernel for cpu" in row.missing["hopper"] and "hopper" not in row.times


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_key_that_is_lost_is_found(kind):
    batch = small(BATCHES[0])
    t = draw(batch, CPU)
    checker = reference(batch, t)
    whole = slice(0, len(batch.sequences))
    right, used = attend(batch, t, whole), t.used.clone()
    assert right is not None and checker.why_wrong(right()) is None
    used[0 if kind == "decode" else -1] -= 1
    wrong = attend(batch, t._replace(used=used), whole)
    assert wrong is not None
    assert str(checker.why_wrong(wrong())).startswith(kind)


def test_what_is_no_result_is_said():
    batch = small(BATCHES[0])
    t = draw(batch, CPU)
    checker, out = reference(batch, t), calls_of(batch, t)["one call"]()
    assert isinstance(out, torch.Tensor)
    assert "shape" in str(checker.why_wrong(out[:1]))
    assert checker.why_wrong(out * torch.nan) == "out is not finite"


def test_what_turns_wrong_while_it_is_timed_gets_no_figure(monkeypatch):
    interleaved = timing.interleaved

    def spoiled(calls, device, rounds, inspect):
        times = interleaved(calls, device, rounds, lambda name, returned: None)
        inspect("two calls", [part * 2 for part in calls["two calls"]()])
        return times

    monkeypatch.setattr(timing, "interleaved", spoiled)
    row = measure(small(BATCHES[0]), CPU, rounds=5)
    assert OUTSIDE in row.missing["two calls"] and "two calls" not in row.times


def test_the_share_is_of_the_medians(monkeypatch):
    times = {"one call": Spread(21.0, 1.0, 99.0), "two calls": Spread(20.0, 2.0, 98.0)}
    monkeypatch.setattr(mixed, "measure", lambda batch, *_: Row(batch, times, {}))
    said = list(run("pages of 64", CPU, 5))
    assert said == [
        "mixed 124 x 4096 + 4 x 2048, pages of 64:",
        "  one call: 21.0 us (1.0 to 99.0)",
        "  two calls: 20.0 us (2.0 to 98.0)",
        "  one call / two calls: 1.050 of its time",
    ]
    assert list(run("no such batch", CPU, 5)) == []


@pytest.mark.parametrize("prefills_alone", [False, True])
def test_one_call_is_of_all_sequences_and_two_are_of_each_kind(prefills_alone, monkeypatch):
    batch = small(BATCHES[2])
    if prefills_alone:
        batch = replace(batch, decodes=())
    t, asked = draw(batch, CPU), []
    assert t.table is not None

    def call(q, k, v, cu_q, cu_k, longest_q, longest_k, **options):
        asked.append((q, cu_q, longest_q, longest_k, options))
        assert k is t.k and v is t.v and cu_k is None
        return q

    monkeypatch.setattr(mixed, "flash_attn_varlen_func", call)
    calls, middle = calls_of(batch, t), len(batch.decodes)
    kinds = {"decodes alone": slice(0, middle), "prefills alone": slice(middle, middle + 2)}
    if prefills_alone:
        del kinds["decodes alone"]
    assert [*calls] == ["one call", "hopper", "two calls", *kinds]
    whole = slice(0, middle + 2)
    for name, parts in {
        "one call": [whole],
        "hopper": [whole],
        "two calls": [*kinds.values()],
        **{name: [part] for name, part in kinds.items()},
    }.items():
        asked.clear()
        made = calls[name]()
        returned = made if name == "two calls" else [made]
        for part, (q, cu_q, longest_q, longest_k, options), got in zip(
            parts, asked, returned, strict=True
        ):
            rows, keys = zip(*batch.sequences[part], strict=True)
            before = sum(rows for rows, _ in batch.sequences[: part.start])
            assert got is q and torch.equal(q, t.q[before : before + sum(rows)])
            assert cu_q.tolist() == [sum(rows[:i]) for i in range(len(rows) + 1)]
            assert (longest_q, longest_k) == (max(rows), max(keys))
            assert torch.equal(options.pop("block_table"), t.table[part])
            assert torch.equal(options.pop("seqused_k"), t.used[part])
            assert options == {"causal": True, "backend": "hopper" if name == "hopper" else None}


def test_drawn_sequences_lie_one_after_the_other_over_shuffled_pages_of_their_own():
    batch = small(BATCHES[2])
    t, again, other = draw(batch, CPU), draw(batch, CPU), draw(batch, CPU, 1)
    rows, keys = zip(*batch.sequences, strict=True)
    assert t.cu_q is not None and t.table is not None
    assert t.cu_q.tolist() == [sum(rows[:i]) for i in range(len(rows) + 1)]
    assert t.used.tolist() == [*keys] and t.used.dtype == t.cu_q.dtype == torch.int32
    counts = [-(-n // batch.page) for n in keys]
    pages = [page for row, n in zip(t.table.tolist(), counts, strict=True) for page in row[:n]]
    assert sorted(pages) == [*range(sum(counts))] != pages
    assert t.q.shape == (sum(rows), 4, 32) and t.q.dtype == torch.bfloat16
    assert t.k.shape == t.v.shape == (sum(counts), batch.page, 2, 32)
    assert not torch.equal(t.k, t.v)
    assert torch.equal(t.q, again.q) and not torch.equal(t.q, other.q)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_memory_is_given_back_between_batches_of_a_gpu(kind, monkeypatch):
    done, wanted = [], [batch for batch in BATCHES if "63" in batch.name]

    def measured(batch, device, rounds):
        assert (device.type, rounds) == (kind, mixed.ROUNDS)
        done.append(batch)
        return Row(batch, {}, {})

    monkeypatch.setattr(mixed, "measure", measured)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    assert [*run("63", torch.device(kind))] == [f"{batch.name}:" for batch in wanted]
    assert done == [x for b in wanted for x in ([b, "emptied"] if kind == "cuda" else [b])]


def test_the_words_choose_batches_of_the_current_gpu(monkeypatch):
    said = []
    monkeypatch.setattr(mixed.sys, "argv", ["mixed", "pages", "of", "64"])
    monkeypatch.setattr(mixed.script, "current_gpu", lambda: "a gpu")
    monkeypatch.setattr(mixed.script, "say", said.append)
    monkeypatch.setattr(mixed, "run", lambda *what: [f"{what}", "a line"])
    mixed.main()
    assert said == ["('pages of 64', 'a gpu')", "a line"]
