"""The strategy "ring": its steps, and what merging many parts costs."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful import merge_into
from heedful.core.call.spread import BLOCK, CAUSAL, Mask
from heedful.distributed import ring
from heedful.distributed.layouts import LAYOUTS, Layout
from heedful.distributed.plan import StepsOnDevice
from heedful.distributed.rings import Step, ring_steps
from heedful.distributed.schedules import rows_of
from heedful.reference.convert import as_numpy
from support.problems import budget
from support.problems.budget import Results
from support.problems.cases import Built, Case, build

batches = st.lists(st.integers(0, 1500), min_size=1, max_size=5)
masks = st.builds(
    Mask,
    st.one_of(st.none(), st.integers(0, 400)),
    st.one_of(st.none(), st.just(0), st.integers(0, 300)),
    st.one_of(st.just(0), st.integers(1, 300)),
)


@given(batches, st.integers(1, 6), st.sampled_from(sorted(LAYOUTS)), masks, st.booleans())
def test_each_row_meets_each_key_that_it_sees_in_one_step(lengths, count, name, mask, one_by_one):
    layout = LAYOUTS[name](lengths, count, mask)
    every = [ring_steps(layout, mask, rank, one_by_one) for rank in range(count)]
    held = [rows_of(layout, rank) for rank in range(count)]
    for rank, steps in enumerate(every):
        met = np.zeros((len(held[rank]), sum(lengths)), np.int8)
        for index, step in enumerate(steps):
            # Ranks that took them for different numbers would call different collectives.
            assert [theirs[index].rounds for theirs in every] == [step.rounds] * count
            keys = held[rank] if index == 0 else arrived(step, every[step.source][index], held)
            own = step.parts[: sum(part.is_own for part in step.parts)] if index == 0 else ()
            assert [part for part in step.parts if part.is_own] == list(own)
            for part in step.parts:
                meet(met, part, keys)
            rows = [row for part in own for row in range(part.rows.start, part.rows.stop)]
            assert index or sorted(rows) == list(range(len(held[rank])))
        assert (met == seen(layout, mask, held[rank])).all()


def arrived(step: Step, theirs: Step, held: list[Any]) -> Any:
    """The rows of the batch that a step gets, from what the source sends."""
    rows = np.full(step.count, -1)
    for here, there in zip(step.received, theirs.sent, strict=True):
        rows[here] = held[step.source][there]
    assert -1 not in rows and len(step.received) <= step.rounds
    return rows


def meet(met: Any, part: Any, keys: Any) -> None:
    """Counts the pairs that a call computes, by the rule of its window."""
    begin_q, begin_k = part.rows.start, part.keys.start
    left, right = part.window
    for length_q, length_k in zip(part.lengths_q, part.lengths_k, strict=True):
        distance = np.arange(length_k) - np.arange(length_q)[:, None] - (length_k - length_q)
        visible = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
        columns = keys[begin_k : begin_k + length_k]
        met[begin_q : begin_q + length_q, columns] += visible
        begin_q, begin_k = begin_q + length_q, begin_k + length_k
    assert (begin_q, begin_k) == (part.rows.stop, part.keys.stop)


def seen(layout: Layout, mask: Mask, rows: Any) -> Any:
    """Which keys of the batch the rows see."""
    document = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    every = np.arange(len(document))
    distance = every - rows[:, None]
    visible = document == document[rows][:, None]
    position = every - np.asarray(layout.starts)[document]
    is_near = (mask.left is None) | (distance >= -(mask.left or 0))
    visible &= is_near | (position < mask.first)
    return visible & ((mask.right is None) | (distance <= (mask.right or 0)))


def test_a_step_of_one_document_is_one_call_and_sends_only_keys_that_are_seen():
    layout = LAYOUTS["zigzag"]([8192], 4, CAUSAL)
    first, *others = ring_steps(layout, CAUSAL, 1)
    assert len(first.parts) == 2 and first.count == 2048
    assert [len(step.parts) for step in others] == [1, 1, 1]
    # Of an earlier rank both chunks of queries see its earlier chunk, of a later the last sees all.
    assert [step.count for step in others] == [1024, 2048, 2048]


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, count: int):
        self.count = count
        pairs = [(a, b) for a in range(count) for b in range(count)]
        self._queues: dict[Any, queue.Queue] = {pair: queue.Queue() for pair in pairs}

    def exchange(self, made: Any, step: Step, sent: list, into: list, like: Any) -> Any:
        """In place of `ring._exchange`."""
        self._queues[made.rank, step.target].put([rows.clone() for rows in sent])

        def wait() -> None:
            for rows, found in zip(into, self._queues[step.source, made.rank].get(), strict=True):
                rows.copy_(found)

        return SimpleNamespace(wait=wait)

    def run(self, function: Any) -> list[Any]:
        """What function(rank) returned, by rank."""
        found: list[Any] = [None] * self.count

        def work(rank: int) -> None:
            found[rank] = function(rank)

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


PARTS = 16


def in_parts(built: Built, monkeypatch: Any) -> Results:
    """The results of 16 ranks, put together, with gradients if the case has any."""
    x, case, ranks = built.x, built.case, Threads(PARTS)
    layout = LAYOUTS["contiguous"]([case.seqlen_k], PARTS, CAUSAL)
    monkeypatch.setattr(ring, "_exchange", ranks.exchange)
    options = {"sink": None, "dropout_p": 0.0}
    whole = [t[0] for t in (x.q, x.k, x.v, x.q if built.dout is None else built.dout)]
    rows = [torch.from_numpy(rows_of(layout, rank)) for rank in range(PARTS)]

    def work(rank: int) -> Any:
        made: Any = SimpleNamespace(rank=rank, ranks=PARTS, group=None)
        on = StepsOnDevice.of(layout, CAUSAL, rank, False, torch.device("cpu"))
        q, k, v, dout = (t[rows[rank]] for t in whole)
        out, lse = ring.forward(q, k, v, made, on, options)
        if built.dout is None:
            return out, lse.T
        grads = ring.backward(dout, None, (q, k, v, out, lse), made, on, options)
        return out, lse.T, *grads[:3]

    order = torch.argsort(torch.cat(rows))
    found = (torch.cat(parts)[order] for parts in zip(*ranks.run(work), strict=True))
    out, lse, *grads = (as_numpy(t[None]) for t in found)
    return Results(out, lse.swapaxes(1, 2), None, *grads)


def causal(dtype: str, backward: bool) -> Built:
    length = PARTS * BLOCK
    facts: Any = {"seqlen_q": length, "seqlen_k": length, "head_dim": 16, "dtype": dtype}
    facts |= {"causal": True, "lse_grad": False, "backward": backward}
    return build(Case(batch=1, heads_q=1, heads_k=1, **facts))


def test_sixteen_parts_stay_in_the_budget(monkeypatch):
    """Parts of 16-bit inputs are float32."""
    merged = set()

    def noted(out, lse, part, part_lse, begin):
        merged.add(part.dtype)
        merge_into(out, lse, part, part_lse, begin=begin)

    monkeypatch.setattr(ring, "merge_into", noted)
    built = causal("bfloat16", backward=True)
    budget.check(built, in_parts(built, monkeypatch))
    assert merged == {torch.float32}


@pytest.mark.parametrize("planted", ["", "merges", "parts"])
def test_a_ring_that_rounds_each_step_to_16_bits_is_seen(planted, monkeypatch):
    """Merges, or parts before they are merged exactly. Inputs are float32, of which nothing else is
    rounded to 16 bits."""

    def rounded(out, lse, part, part_lse, begin):
        merge_into(out, lse, part.bfloat16() if planted == "parts" else part, part_lse, begin=begin)
        if planted == "merges":
            out.copy_(out.bfloat16())

    monkeypatch.setattr(ring, "merge_into", rounded)
    built = causal("float32", backward=False)
    got, want = in_parts(built, monkeypatch).out, budget.oracle_results(built).out
    error = np.abs(got - want).max() / np.abs(want).max()
    # A few roundings of each part and of each merge; or one of bfloat16 in a part.
    assert error > 2.0**-12 if planted else error < 4 * PARTS * 2.0**-24


def test_a_row_without_keys_in_a_part_or_in_all_stays_as_it_is():
    out, lse = torch.ones(2, 1, 4), torch.tensor([[0.5, -torch.inf]])
    out[1] = 0.0
    merge_into(out, lse, torch.zeros(2, 1, 4), torch.full((1, 2), -torch.inf))
    assert torch.equal(out[:, 0, 0], torch.tensor([1.0, 0.0]))
    assert torch.equal(lse, torch.tensor([[0.5, -torch.inf]]))
