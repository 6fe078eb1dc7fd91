"""Decode steps are timed as they are described, behind a check that finds what is wrong."""

from dataclasses import replace

import pytest
import torch

from heedful.bench import steps
from heedful.bench.harness import timing
from heedful.bench.harness.timing import Spread
from heedful.bench.steps import (
    PAIRS,
    PEERS,
    STEPS,
    draw,
    measure,
    ragged_lengths,
    reference,
    sequence,
)
from support.problems.grids import in_turns

CPU = torch.device("cpu")
NAMES = [step.name for step in STEPS]


def small(step: steps.Step) -> steps.Step:
    """The step with few short sequences."""
    lengths = (70, 64) if step.page else (64, 64)
    window, prefix = min(step.window, 20), min(step.prefix, 50)
    heads = (step.heads[0] // max(1, step.heads[1] // 2), min(step.heads[1], 2))
    few = {"window": window, "prefix": prefix, "padded": min(step.padded, 3)}
    return replace(step, lengths=lengths, heads=heads, **few)


def test_names_tell_steps_apart_and_pairs_are_of_steps():
    assert len(set(NAMES)) == len(NAMES)
    for step, peer, other, beside, most in PAIRS:
        assert {step, other} <= set(NAMES) and {peer, beside} <= set(PEERS) and most > 0


def test_lengths_are_log_normal_and_the_same_each_time():
    lengths = ragged_lengths()
    assert lengths == ragged_lengths() and len(lengths) == 128
    assert min(lengths) >= 100 and max(lengths) <= 65536
    assert 3000 < sorted(lengths)[64] < 5500 and max(lengths) > 20000


@pytest.mark.parametrize("step", in_turns(STEPS, each=2), ids=NAMES)
def test_a_step_is_right_and_gets_its_figures(step):
    row = measure(small(step), CPU, rounds=5)
    assert "heedful" in row.times, row.missing
    assert ("repeated" in row.times) == bool(step.prefix), row.missing
    assert row.missing["flashinfer"] == "needs a GPU"
    text = "\n".join(steps.lines(row))
    assert "of a read" in text and text.startswith(step.name)


def test_a_backend_that_is_named_is_timed_beside_our_choice():
    row = measure(small(STEPS[0]), CPU, rounds=5, backends=["cpu", "decode"])
    assert "heedful:cpu" in row.times
    assert "no kernel for cpu" in row.missing["heedful:decode"]


@pytest.mark.parametrize("fact", ["page", "prefix", "stored", "window"])
def test_every_tensor_of_a_step_lies_on_the_device_that_is_named(fact):
    step = small(next(step for step in STEPS if getattr(step, fact)))
    with torch.device("meta"):
        t = draw(step, CPU)
        checker = reference(step, t)
        assert checker.why_wrong(steps.heedful(step, t)()) is None
        again = steps.repeated(step, t)
        assert isinstance(again, str) or checker.why_wrong(again()) is None


@pytest.mark.parametrize("step", in_turns(STEPS, each=2), ids=NAMES)
def test_a_step_that_loses_a_key_is_found(step):
    step = small(step)
    t = draw(step, CPU)
    checker = reference(step, t)
    assert checker.why_wrong(steps.heedful(step, t)()) is None
    fewer = t._replace(used=t.used - 1)
    assert checker.why_wrong(steps.heedful(step, fewer)()) is not None


def test_padded_rows_that_are_not_0_are_found():
    step = small(next(step for step in STEPS if step.padded))
    t = draw(step, CPU)
    checker, out = reference(step, t), steps.heedful(step, t)()
    assert t.used.tolist() == [70, 64, 0, 0, 0] and checker.why_wrong(out) is None
    out[-1, 0, 0, 0] = 1.0
    assert checker.why_wrong(out) == "padded rows are not 0"


def test_what_is_no_result_is_said():
    step = small(STEPS[0])
    t = draw(step, CPU)
    checker, out = reference(step, t), steps.heedful(step, t)
    assert "shape" in str(checker.why_wrong(out()[:1]))
    assert checker.why_wrong(out() * torch.nan) == "out is not finite"


def test_what_turns_wrong_while_it_is_timed_gets_no_figure(monkeypatch):
    interleaved = timing.interleaved

    def spoiled(calls, device, rounds, inspect):
        times = interleaved(calls, device, rounds, lambda name, returned: None)
        inspect("heedful", calls["heedful"]() * torch.nan)
        return times

    monkeypatch.setattr(timing, "interleaved", spoiled)
    row = measure(small(STEPS[0]), CPU, rounds=5)
    assert "heedful" not in row.times and row.missing["heedful"] == "out is not finite"


def test_bytes_are_those_that_a_step_must_read():
    plain = next(step for step in STEPS if step.name == "64 x 8192")
    assert plain.read_bytes() == 64 * 8192 * 8 * 256 * 2
    rows = 64 * 8192 * 8
    # Of keys and of values, with a float32 for each row, for each head of a sequence, or for none.
    assert replace(plain, stored="int4").read_bytes() == 2 * rows * (64 + 4)
    assert replace(plain, stored="int8").read_bytes() == 2 * rows * (128 + 4)
    by_head = replace(plain, stored="float8_e4m3fn", by_head=True)
    assert by_head.read_bytes() == 2 * (rows * 128 + 64 * 8 * 4)
    assert replace(plain, page=16).read_bytes() == plain.read_bytes() + 64 * 512 * 4
    assert replace(plain, window=1024).read_bytes() == plain.read_bytes() // 8
    assert replace(plain, prefix=8192).read_bytes() == plain.read_bytes() // 64 * 65
    latent = replace(plain, heads=(16, 1), dims=(576, 512))
    assert latent.read_bytes() == 64 * 8192 * 576 * 2
    assert replace(latent, stored="fp8_ds_mla").read_bytes() == 64 * 8192 * 656


def test_values_of_latent_vectors_are_their_keys_first_columns():
    step = small(next(step for step in STEPS if step.is_mla))
    t = draw(step, CPU)
    assert t.v.data_ptr() == t.k.data_ptr() and t.v.stride() == t.k.stride()
    k, v = sequence(step, t, 1)
    assert k.shape == (64, 1, 576) and torch.equal(v, k[..., :512])


@pytest.mark.parametrize("words", ("e4m3", "rows of bytes"))
def test_steps_over_latent_vectors_of_8_bits_are_right(words):
    wanted = next(step for step in STEPS if step.name.endswith(f"16 heads, {words}"))
    step = replace(small(wanted), lengths=(64, 33))
    t = draw(step, CPU)
    assert t.v.data_ptr() == t.k.data_ptr() and t.k.element_size() == 1
    assert steps.reference(step, t).why_wrong(steps.heedful(step, t)()) is None


def test_pages_lie_shuffled_and_hold_their_sequence():
    step = replace(small(STEPS[0]), page=16, lengths=(64, 33))
    t = draw(step, CPU)
    assert t.table is not None and sorted(t.table.flatten().tolist())[-1] == 6
    k, _ = sequence(step, t, 1)
    assert torch.equal(k[32:], t.k[t.table[1, 2], :1]) and len(k) == 33


def test_pairs_are_shares_of_time():
    def row(name: str, us: float) -> steps.Row:
        step = next(step for step in STEPS if step.name == name)
        return steps.Row(step, {"heedful": Spread(us, us, us)}, {})

    (said,) = steps.pairs([row("64 x 8192", 100.0), row("64 x 8192, int8", 60.0)])
    assert said.endswith("0.600 of its time, bar 1.00")
