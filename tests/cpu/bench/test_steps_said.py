"""Which decode steps there are, against what each is held, and what is said of their figures."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from heedful.bench import steps
from heedful.bench.harness import timing
from heedful.bench.harness.protocol import Row
from heedful.bench.harness.timing import Spread
from heedful.bench.steps import STEPS, Step, pairs, ragged_lengths
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.by_hand import forced

CPU = torch.device("cpu")
PLAIN = {
    "heads": (32, 8),
    "dims": (128, 128),
    "page": 0,
    "stored": "",
    "by_head": False,
    "prefix": 0,
    "window": 0,
    "padded": 0,
    "bar": 0.0,
}
E4M3 = {"stored": "float8_e4m3fn", "bar": 0.9}
LATENT = {"dims": (576, 512), "page": 64}
# By name, what is not as in a plain step; how many sequences of how many keys, names say.
TABLE = {
    "1 x 8192": {},
    "8 x 8192": {"bar": 0.9},
    "64 x 8192": {"bar": 0.98},
    "64 x 8192, pages of 16": {"page": 16, "bar": 0.93},
    "64 x 8192, pages of 1": {"page": 1},
    "64 x 8192, e4m3": E4M3,
    "64 x 8192, e4m3, scales of heads": {"by_head": True, **E4M3},
    "64 x 8192, int8": {"stored": "int8", "bar": 0.85},
    "64 x 8192, int4": {"stored": "int4", "bar": 0.7},
    "64 x 8192, int4, pages of 16": {"stored": "int4", "page": 16},
    "128 log-normal": {"page": 16, "bar": 0.9},
    "MLA 64 x 8192, 16 heads": {"heads": (16, 1), "bar": 0.9, **LATENT},
    "MLA 64 x 8192, 128 heads": {"heads": (128, 1), **LATENT},
    "MLA 1 x 8192, 128 heads": {"heads": (128, 1), **LATENT},
    "MLA 1 x 131072, 16 heads": {"heads": (16, 1), **LATENT},
    "prefix 16384 + 64 x 512": {"prefix": 16384},
    "16 x 131072, window 1024": {"window": 1024},
    "16 x 1024": {},
    "64 x 8192, pages of 16, 192 padded": {"page": 16, "padded": 192},
    "64 x 1024": {"bar": 0.90},
    "64 x 1024, pages of 16": {"page": 16, "bar": 0.86},
    "64 x 1024, pages of 16, 192 padded": {"page": 16, "padded": 192},
    **{
        f"MLA {count} x 8192, {heads} heads, {words}": {"heads": (heads, 1), **LATENT, **stored}
        for count, heads in ((16, 16), (64, 16), (16, 128))
        for words, stored in (
            ("e4m3", {"stored": "float8_e4m3fn", "by_head": True}),
            ("rows of bytes", {"stored": "fp8_ds_mla"}),
        )
    },
}


def test_steps_are_those_of_the_table():
    assert [step.name for step in STEPS] == list(TABLE)
    for step in STEPS:
        facts = dataclasses.asdict(step)
        name, lengths = facts.pop("name"), facts.pop("lengths")
        assert facts == PLAIN | TABLE[name]
        if name != "128 log-normal":
            words = name.removeprefix("MLA ").removeprefix("prefix 16384 + ").partition(",")[0]
            count, keys = map(int, words.split(" x "))
            assert lengths == (keys,) * count
    assert dataclasses.asdict(Step("a", (1,))) == PLAIN | {"name": "a", "lengths": (1,)}


def test_log_normal_lengths_are_those_of_earlier_figures():
    lengths = ragged_lengths()
    assert lengths[:6] == (3285, 4259, 9475, 3649, 22336, 651) and sum(lengths) == 954540
    assert (len(lengths), min(lengths), max(lengths)) == (128, 255, 65536)
    assert STEPS[10].lengths == lengths == ragged_lengths(128, 4096, 1.2)
    assert ragged_lengths(3, 700, 0.0) == (700,) * 3
    assert ragged_lengths(2, 10, 0.0) == (100, 100) and ragged_lengths(1, 10**6, 0.0) == (65536,)


def test_each_sequence_of_a_step_is_one_problem():
    step = Step("a", (9, 70, 30), heads=(6, 2), dims=(24, 16), prefix=5)
    case = step.case(1)
    problem = AttentionProblem.dense(1, 1, 75, 6, 2, 24, head_dim_v=16)
    assert (case.group, case.problem, case.direction) == ("decode", problem, "forward")
    assert step.case(2).problem == dataclasses.replace(problem, seqlen_k=35)
    assert step.is_mla and not Step("a", (9,)).is_mla
    window = dataclasses.replace(step, window=20).case(1).problem
    assert window == dataclasses.replace(problem, mask=MaskSpec.of(False, (19, 0)))


def spread(us: float, low: float = 0.0, high: float = 0.0) -> Spread:
    return Spread(us, low or us, high or us)


def test_a_row_says_speed_beside_a_read_and_why_figures_are_missing():
    step = Step("64 keys", (64000,) * 10, bar=0.9)  # 2.62 GB
    times = {
        "heedful": spread(1000.0, 990.0, 1011.11),
        "flashinfer": spread(2000.0),
        "read": spread(800.0, 799.0, 801.0),
    }
    missing = {"repeated": "is for shared prefixes"}
    assert list(steps.lines(Row(step, times, missing))) == [
        "64 keys: 2.621 GB",
        "  heedful: 1000.0 us (990.0 to 1011.1), 2621 GB/s, 0.800 of a read",
        "  flashinfer: 2000.0 us (2000.0 to 2000.0), 1311 GB/s, 0.400 of a read",
        "  read: 800.0 us (799.0 to 801.0), 3277 GB/s, 1.000 of a read",
        "  repeated: none (is for shared prefixes)",
        "  bar: 0.90 of a read, is 0.800",
    ]
    alone = Row(step, {"read": spread(800.0)}, {"heedful": "no"})
    assert list(steps.lines(alone))[2:] == [
        "  heedful: none (no)",
        "  bar: 0.90 of a read, is none",
    ]
    free = Row(dataclasses.replace(step, bar=0.0), {"read": spread(800.0)}, {})
    assert len(list(steps.lines(free))) == 2


def test_steps_that_are_held_against_others_are_these():
    """Every step took ten times as many microseconds as its place, the prefixes repeated 1000."""
    rows = []
    for place, step in enumerate(STEPS):
        times = {"heedful": spread(10.0 * place + 10)}
        if step.prefix:
            times["repeated"] = spread(1000.0)
        rows.append(Row(step, times, {}))
    said = [
        "64 x 8192, pages of 16, heedful / 64 x 8192, heedful: 1.333 of its time, bar 1.05",
        "64 x 8192, e4m3, heedful / 64 x 8192, heedful: 2.000 of its time, bar 1.00",
        "64 x 8192, int8, heedful / 64 x 8192, heedful: 2.667 of its time, bar 1.00",
        "64 x 8192, int4, heedful / 64 x 8192, heedful: 3.000 of its time, bar 1.00",
        "prefix 16384 + 64 x 512, heedful / prefix 16384 + 64 x 512, repeated:"
        " 0.160 of its time, bar 0.10",
        "16 x 131072, window 1024, heedful / 16 x 1024, heedful: 0.944 of its time, bar 1.10",
        "64 x 8192, pages of 16, 192 padded, heedful / 64 x 8192, pages of 16, heedful:"
        " 4.750 of its time, bar 1.05",
        "64 x 1024, pages of 16, 192 padded, heedful / 64 x 1024, pages of 16, heedful:"
        " 1.048 of its time, bar 1.05",
        "64 x 1024, pages of 16, heedful / 64 x 1024, heedful: 1.050 of its time, bar 1.05",
    ]
    assert list(pairs(rows)) == said
    # Without one of the two there is nothing to say.
    assert list(pairs([row for row in rows if row.case.name != "64 x 8192"])) == said[4:]
    assert list(pairs([row._replace(times={}) if row.case.prefix else row for row in rows])) == [
        *said[:4],
        *said[5:],
    ]
    assert list(pairs(rows[:4])) == said[:1]


def test_the_fastest_read_is_the_read_and_what_turns_wrong_is_left_out(monkeypatch):
    ready = {name: lambda n=name: n for name in ("fine", "late", "early", "raises", "silent")}
    step, drawn = Step("a", (16,)), object()

    class Looked:
        def __init__(self, *given):
            assert given == (step, drawn)

        def why_wrong(self, out):
            return {"early": "is early", "late again": "is late"}.get(out)

    def made(name: str):
        def make(*given):
            assert given == (step, drawn)
            if name == "raises":
                raise ValueError("one\ntwo")
            if name == "silent":
                raise RuntimeError
            return ready.get(name, "is not here")

        return make

    def interleaved(calls, device, rounds, inspect):
        assert list(calls) == ["fine", "late", "slow read", "read of a kernel"]
        assert (device, rounds) == (CPU, 6) and calls["fine"]() == "fine"
        for name in calls:
            inspect(name, f"{name} again")
        inspect("read of a kernel", "early")
        return {name: [5.0 - at, 9.0, 4.0 - at] for at, name in enumerate(calls)}

    def drawing(*given):
        assert given == (step, CPU)
        return drawn

    def reads(*given):
        assert given == (step, CPU)
        return {"slow read": lambda: "a", "read of a kernel": lambda: "b"}.items()

    monkeypatch.setattr(steps, "draw", drawing)
    monkeypatch.setattr(steps, "reference", Looked)
    monkeypatch.setattr(steps, "PEERS", {name: made(name) for name in (*ready, "absent")})
    monkeypatch.setattr(steps, "reads", reads)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    row = steps.measure(step, CPU, 6)
    times = {"fine": Spread(5.0, 4.0, 9.0), "read": Spread(2.0, 1.0, 9.0)}
    missing = {
        "early": "is early",
        "raises": "ValueError: one",
        "silent": "RuntimeError: ",
        "absent": "is not here",
        "late": "is late",
    }
    assert row == (step, times, missing) and steps.ROUNDS == 7


def test_a_read_is_of_as_many_bytes_by_torch_and_on_a_gpu_by_a_kernel(monkeypatch):
    pytest.importorskip("triton")
    from heedful.bench.harness import reader

    step, ones, asked = Step("a", (10, 20), heads=(4, 2), dims=(16, 16)), torch.ones, []

    def on_a_cpu(count, dtype, device):
        asked.append((count, dtype, device))
        return ones(count, dtype=dtype)

    monkeypatch.setattr(torch, "ones", on_a_cpu)
    monkeypatch.setattr(reader, "read_words", lambda words: -words.sum())
    gpu = torch.device("cuda", 3)
    # 30 keys and values of 2 heads of 16 bfloat16, two a word.
    assert {name: float(call()) for name, call in steps.reads(step, CPU)} == {"torch.sum": 960.0}
    both = {name: float(call()) for name, call in steps.reads(step, gpu)}
    assert both == {"torch.sum": 960.0, "Triton": -960.0}
    assert asked == [(960, torch.float32, CPU), (960, torch.float32, gpu)]


@pytest.mark.parametrize(
    ("words", "names", "backends"),
    [
        ([], list(TABLE), []),
        (["log-normal"], ["128 log-normal"], []),
        (["MLA", "64"], [name for name in TABLE if name.startswith("MLA 64")], []),
        (
            ["decode", "pages", "of", "16", "mla+ahead=1", "hopper", "portable"],
            [name for name in TABLE if "pages of 16" in name],
            ["decode", "mla+ahead=1", "hopper", "portable"],
        ),
        (["decoding"], [], []),
    ],
)
def test_steps_that_words_name_are_timed_on_the_current_device(
    words, names, backends, monkeypatch, capsys
):
    asked, emptied = [], []

    def measure(step, device, **more):
        asked.append((step.name, device, more))
        return Row(step, {"heedful": spread(2.0)}, {})

    def said(row: Row) -> Iterator[str]:
        yield from (row.case.name, "second line")

    def compared(rows: Any) -> Iterator[str]:
        yield f"{len(rows)} rows"
        yield "at the end"

    def batches(*given: Any) -> Iterator[str]:
        words = " ".join(word for word in given[0].split() if word not in backends)
        assert given == (words, gpu, steps.ROUNDS)
        yield f"mixed: {words}"

    gpu = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(steps.mixed, "run", batches)
    for name, stand_in in {"measure": measure, "lines": said, "pairs": compared}.items():
        monkeypatch.setattr(steps, name, stand_in)
    # What begins as a backend does is one, but not the program's own name.
    monkeypatch.setattr(sys, "argv", ["decode", *words])
    steps.main()
    assert asked == [(name, gpu, {"backends": [*map(forced, backends)]}) for name in names]
    assert len(emptied) == len(names)
    lines = [line for name in names for line in (name, "second line")]
    lines.append(f"mixed: {' '.join(word for word in words if word not in backends)}")
    assert capsys.readouterr().out == "\n".join([*lines, f"{len(names)} rows", "at the end", ""])
