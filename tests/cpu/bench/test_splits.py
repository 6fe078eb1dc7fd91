"""Splits of keys are timed as they are described, behind a check that finds what is wrong."""

import csv
import io
import math
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from heedful import flash_attn_func
from heedful.bench import splits
from heedful.bench.splits import DRAWN_FOR, Shape, counts, cut, measure, shapes, variants
from heedful.core.planning.plan import plan
from heedful.core.registry import by_hand
from heedful.core.registry.tiles import HopperForwardConfig

CPU = torch.device("cpu")
UNITS = DRAWN_FOR.units
SMALL = Shape(2, 5, 700, 4, 2, 64, True)


def on_cpu(shape, inputs, count, chosen):
    q, k, v, _ = inputs
    return lambda: flash_attn_func(q, k, v, causal=shape.causal, num_splits=count, backend="cpu")


def test_shapes_are_the_same_each_time_and_leave_half_of_the_device_idle_in_most_cases():
    drawn = shapes()
    assert drawn == shapes() and len(set(drawn)) == len(drawn) >= 150
    programs = [cut(shape, DRAWN_FOR).programs for shape in drawn]
    assert all(0 < count <= UNITS for count in programs)
    few = sum(2 * count <= UNITS for count in programs)
    assert 0.8 * len(drawn) < few < len(drawn)
    for shape in drawn:
        assert not shape.causal or shape.queries <= shape.keys
        assert shape.batch * shape.keys * shape.heads_k * shape.dim * 4 <= 2 * 1024**3


def test_shapes_need_few_kernels():
    found = [call.kernel.function for call, _ in variants(shapes(), DRAWN_FOR).values()]
    assert found.count("forward") <= 30 and found.count("combine_splits") <= 6


@pytest.mark.parametrize("shape", shapes()[::10], ids=str)
def test_counts_are_of_equal_shares_and_hold_the_chosen_one(shape):
    own = cut(shape, DRAWN_FOR)
    found = counts(own, UNITS)
    shares = [math.ceil(own.key_tiles / count) for count in found]
    assert len(set(shares)) == len(found) and found[0] == 1 and own.chosen in found
    assert all(count <= own.key_tiles for count in found)
    assert [math.ceil(own.key_tiles / share) for share in shares] == found
    # One more split a program than fills the device begins another wave.
    full = min(128, UNITS // own.programs, own.key_tiles)
    assert math.ceil(own.key_tiles / full) in shares


def test_a_count_is_planned_with_the_tiles_of_the_planner():
    shape = shapes()[0]
    own, problem = cut(shape, DRAWN_FOR), shape.problem()
    for count in counts(own, UNITS):
        backend = splits.backend_of(count, own.chosen)
        found = plan(problem, DRAWN_FOR, backend=backend)
        config = found.configs["hopper.forward"]
        assert found.num_splits == count and found.is_split == (count > 1)
        assert isinstance(config, HopperForwardConfig)
        assert replace(config, key_splits=0) == replace(own.config, rescale=config.rescale)
    assert splits.backend_of(own.chosen, own.chosen) == "hopper"


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_has_its_counts_kernel_and_its_shapes_mask(causal, monkeypatch):
    asked = []
    monkeypatch.setattr(splits, "flash_attn_func", lambda *qkv, **how: asked.append((qkv, how)))
    inputs, shape = splits.Inputs(*map(torch.tensor, range(4))), SMALL._replace(causal=causal)
    for count, chosen in ((3, 2), (2, 3), (2, 2)):
        splits.call_of(shape, inputs, count, chosen)()
    backends = [*(by_hand.named("hopper", key_splits=n) for n in (3, 2)), "hopper"]
    assert asked == [(inputs[:3], {"causal": causal, "backend": name}) for name in backends]


def test_every_count_gets_a_figure_and_a_record_of_its_shape():
    out, spec = io.StringIO(), DRAWN_FOR
    said = list(splits.record(out, CPU, spec, 60, [SMALL] * 2, make=on_cpu))
    text = out.getvalue().splitlines()
    heading = dict(line[2:].split(": ", 1) for line in text if line.startswith("#"))
    assert set(heading) == {"title", "date", "device", "versions", "commit", "method"}
    rows = list(csv.DictReader(line for line in text if not line.startswith("#")))
    own = cut(SMALL, spec)
    for row in rows:
        *sizes, causal = (int(row[name]) for name in Shape._fields)
        given = Shape(*sizes, causal=causal == 1)
        assert given == SMALL and int(row["chosen"]) == own.chosen
        assert (int(row["block_m"]), int(row["block_n"]), int(row["pack"])) == own.tiles
        assert 0 < float(row["low"]) <= float(row["us"]) <= float(row["high"])
    timed = [row for row in rows if int(row["calls"]) == splits.ROUNDS * splits.MOST_CALLS]
    assert {int(row["splits"]) for row in rows} <= set(counts(own, spec.units))
    assert [int(row["splits"]) for row in timed].count(own.chosen) == 2
    assert said[0].startswith("2 of 2 shapes in")


def test_no_shape_is_begun_when_time_is_up():
    said = list(splits.record(io.StringIO(), CPU, DRAWN_FOR, -1, [SMALL], make=on_cpu))
    assert said[0].startswith("0 of 1 shapes")


@pytest.mark.parametrize("wrong", [1, 3])
def test_what_loses_a_key_gets_no_figure(wrong):
    def make(shape, inputs, count, chosen):
        if count == wrong:
            inputs = inputs._replace(k=inputs.k[:, 1:], v=inputs.v[:, 1:])
        return on_cpu(shape, inputs, count, chosen)

    own = cut(SMALL, DRAWN_FOR)._replace(chosen=2)
    rows, missing = measure(SMALL, CPU, own, UNITS, make)
    if wrong == 1:
        assert not rows and all("one split" in reason for reason in missing.values())
    else:
        assert set(missing) == {3} and "from the result of one split" in missing[3]
        assert 3 not in [row.splits for row in rows]


def test_what_fails_says_why_and_the_rest_is_timed():
    def make(shape, inputs, count, chosen):
        def refuse():
            raise RuntimeError("no room")

        return refuse if count == 2 else on_cpu(shape, inputs, count, chosen)

    own = cut(SMALL, DRAWN_FOR)._replace(chosen=1)
    rows, missing = measure(SMALL, CPU, own, UNITS, make)
    assert missing == {2: "RuntimeError: no room"}
    assert rows and 2 not in [row.splits for row in rows]


@pytest.mark.parametrize(
    "times, chosen, probed",
    [
        ({1: 90, 2: 50, 4: 30, 8: 46, 16: 47, 32: 20}, 4, [1, 2, 4, 8, 16]),
        ({1: 90, 2: 50, 4: 30, 8: 46, 16: 47, 32: 20}, 32, [1, 2, 4, 8, 16, 32]),
        # The chosen one has its figure in any case, and others behind it have none.
        ({1: 90, 2: 10, 4: 30, 8: 40, 16: 50, 32: 60, 64: 70}, 32, [1, 2, 4, 8, 32]),
        # Ever longer, but not slow.
        ({1: 10, 2: 11, 4: 12, 8: 13, 16: 14}, 1, [1, 2, 4, 8, 16]),
        # Slow, but not slower than before.
        ({1: 90, 2: 10, 4: 30, 8: 20, 16: 30}, 1, [1, 2, 4, 8, 16]),
    ],
)
def test_more_splits_are_left_out_where_they_took_longer_twice(times, chosen, probed):
    calls = {count: lambda count=count: count for count in times}

    def clock(call, repeats, keep):
        return [times[call()] * 1e-6] * repeats, None

    found = splits._probed(calls, lambda count: True, clock, chosen)
    assert list(found) == probed
    assert all(found[count] == pytest.approx(times[count]) for count in found)


def test_regret_is_how_much_longer_than_the_best_of_all_the_chosen_count_takes():
    rows = [splits.Timed(count, us, us, us, 3) for count, us in ((1, 30.0), (2, 20.0), (4, 25.0))]
    assert [splits.regret(rows, count) for count in (1, 2, 4, 8)] == [0.5, 0.0, 0.25, math.inf]


def test_results_are_checked_at_both_ends_of_the_batch_and_of_the_heads():
    shape = Shape(2, 5, 90, 6, 3, 64, True)
    q, k, v, dout = inputs = splits.draw(splits.Case("splits", shape.problem()), CPU)
    one = flash_attn_func(q, k, v, causal=True, backend="cpu")
    right = splits.Checked(shape, inputs, one)
    assert right.wrong is None and right.why_wrong(one) is None
    for batch, head, named in ((0, 1, "batch 0, KV head 0"), (1, 4, "batch 1, KV head 2")):
        moved = one.clone()
        moved[batch, :, head] += 1
        wrong = splits.Checked(shape, inputs, moved)
        assert named in (wrong.why_wrong(one) or "") and "one split: " in (
            wrong.why_wrong(one) or ""
        )
    assert splits.Checked(shape, inputs, one).why_wrong(one[:, 1:]) == (
        "out has shape (2, 4, 6, 64), not (2, 5, 6, 64)"
    )
    # Both results may round: within twice what one may be off by, and no more.
    apart = torch.full_like(one, 0.9 * right._bound)
    assert right.why_wrong(one.double() + apart.double()) is None
    assert "more than" in (right.why_wrong(one.double() + 1.2 * apart.double()) or "")


def test_what_was_recorded_is_said_in_shares(monkeypatch):
    clock = iter([10.0, *[11.0] * 11, 12.5])
    monkeypatch.setattr(splits.time, "perf_counter", lambda: next(clock))
    slower = iter([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 2.0])
    chosen = cut(SMALL, DRAWN_FOR).chosen

    def measured(shape, device, planned, units):
        assert (shape, device, units) == (SMALL, CPU, UNITS)
        us = next(slower, None)
        if us is None:
            raise RuntimeError("no room\nat all")
        fast = splits.Timed(99, 10.0, 9.0, 11.0, 30)
        return [splits.Timed(chosen, 10 * us, 9.0, 31.0, 30), fast], {7: "slow"}

    monkeypatch.setattr(splits, "measure", measured)
    out = io.StringIO()
    said = list(splits.record(out, CPU, DRAWN_FOR, 1.0, [SMALL] * 11))
    assert said[:10] == [f"{SMALL}: 7 splits: slow"] * 10
    assert said[10].startswith(f"{SMALL}: 1 splits: ") and "no room" in said[10]
    assert said[11] == "10 of 11 shapes in 2.5 s"
    shares = "0.500 of 50%, 1.000 of 90%, 1.000 of 95%, 1.000 of all"
    assert said[12] == f"regret of the planner: {shares}" and len(said) == 13
    row = out.getvalue().splitlines()[-2].split(",")
    tiles = [str(size) for size in cut(SMALL, DRAWN_FOR).tiles]
    assert row[:7] == ["2", "5", "700", "4", "2", "64", "1"] and row[7:10] == tiles
    assert row[10:] == [str(chosen), str(chosen), "20.00", "9.00", "31.00", "30"]


@pytest.mark.parametrize("pack", [None, "HEEDFUL_PACK"])
def test_the_program_compiles_what_no_pack_has_and_records_in_what_time_is_left(
    pack, monkeypatch, tmp_path
):
    from heedful.torch.base import device

    said, asked = [], []
    file = tmp_path / "figures.csv"
    clock = iter([5.0, 8.0])
    monkeypatch.setattr(splits.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(splits.sys, "argv", ["splits", str(file), "20"])
    monkeypatch.setattr(splits.script, "current_gpu", lambda: "a gpu")
    monkeypatch.setattr(splits.script, "say", said.append)
    monkeypatch.setattr(device, "device_spec", lambda gpu: f"spec of {gpu}")
    monkeypatch.setattr(splits, "shapes", lambda: [SMALL])
    monkeypatch.setattr(splits, "compile_first", lambda *what: f"compiled {what}")
    monkeypatch.delenv("HEEDFUL_PACK", raising=False)
    if pack:
        monkeypatch.setenv(pack, "a folder")

    def record(out, *what):
        asked.append((out.name, *what))
        yield "a line"

    monkeypatch.setattr(splits, "record", record)
    splits.main()
    assert asked == [(str(file), "a gpu", "spec of a gpu", 17.0, [SMALL])]
    compiled = [f"compiled {([SMALL], 'spec of a gpu', None)}"]
    assert said == ([] if pack else compiled) + ["a line"]
    said.clear()
    monkeypatch.setattr(splits.sys, "argv", ["splits", "--pack", "a folder"])
    splits.main()
    assert said == [f"compiled {([SMALL], DRAWN_FOR, splits.Path('a folder'))}"]


def test_wrong_counts_are_left_out_and_others_go_on():
    calls = {count: lambda: torch.ones(1) for count in (1, 2, 4)}
    found = splits._probed(calls, lambda count: count != 2, lambda *_: ([1e-6], None), 1)
    assert found == {1: 1.0, 4: 1.0}


def test_kernels_go_into_a_pack_where_a_folder_is_named(monkeypatch, tmp_path):
    from heedful.launch import compiler
    from heedful.launch.code import packs

    compiled, written = [], []
    made = variants([SMALL], DRAWN_FOR)
    monkeypatch.setattr(splits, "compile_all", lambda calls, workers: compiled.append(calls))
    monkeypatch.setattr(compiler, "artifact", lambda call, target: (call, target))
    monkeypatch.setattr(packs, "write_pack", lambda *what: written.append(what))
    forwards = sum(call.kernel.function == "forward" for call, _ in made.values())
    for folder in (None, tmp_path):
        told = splits.compile_first([SMALL], DRAWN_FOR, folder)
        assert told.startswith(f"{len(made)} kernels, {forwards} of them forwards, in ")
    assert compiled == [list(made.values())] * 2 and 0 < forwards < len(made)
    assert written == [(tmp_path, made, {})]


def test_a_call_asks_for_its_count_unless_it_is_the_chosen_one(monkeypatch):
    asked = []

    def call(q, k, v, *, causal, backend):
        asked.append((q, k, v, causal, backend))
        return "out"

    monkeypatch.setattr(splits, "flash_attn_func", call)
    inputs = splits.Inputs(*map(torch.tensor, range(4)))
    for count, chosen in ((3, 2), (2, 3), (3, 3)):
        for causal in (True, False):
            made = splits.call_of(SMALL._replace(causal=causal), inputs, count, chosen)
            assert not asked and made() == "out"
            *tensors, is_causal, backend = asked.pop()
            assert tensors == [*inputs[:3]] and is_causal is causal
            wanted = "hopper" if count == chosen else splits.named("hopper", key_splits=count)
            assert backend == wanted


def test_a_bench_of_splits_needs_a_file_or_a_folder(monkeypatch):
    for words in ([], ["--pack"]):
        monkeypatch.setattr(splits.sys, "argv", ["splits", *words])
        with pytest.raises(splits.script.Refused, match="a file for figures, or --pack and a fol"):
            splits.main()
