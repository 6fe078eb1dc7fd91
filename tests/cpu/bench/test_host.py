"""The host's time of a call is of calls that find nothing of each other."""

import time

import pytest

pytest.importorskip("torch")

import torch

from heedful.bench import host

CPU = torch.device("cpu")


def test_every_row_is_over_a_row_of_sdpa():
    found = host.rows(CPU, sets=2)
    assert {row.beside for row in found.values()} - {""} <= set(found)
    assert [name for name, row in found.items() if not row.beside] == [
        name for name in found if name.startswith("sdpa")
    ]
    assert all(len(row.calls) == 2 for row in found.values())


def test_each_call_of_a_row_has_tensors_of_its_own():
    """What differs between calls of one row is what they were given."""
    for name, row in host.rows(CPU, sets=2).items():
        first, second = (call() for call in row.calls)
        for one, other in zip(*map(_tensors, (first, second)), strict=True):
            assert one.shape == other.shape and not torch.equal(one, other), name


def _tensors(result):
    return result if isinstance(result, tuple) else (result,)


def test_steps_append_what_they_are_given():
    """A step that appends reads its own token, one over the same cache that does not cannot."""
    torch.manual_seed(0)
    found = host.rows(CPU, sets=1)
    names = ("decode over pages", "decode, appended", "decode, appended with rotary")
    plain, appended, turned = (found[name].calls[0]() for name in names)
    assert not torch.equal(plain, appended) and not torch.equal(appended, turned)


def test_a_ratio_is_of_one_round_and_the_device_is_waited_for_outside_of_calls(monkeypatch):
    now, waits = [0], []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def taking(*microseconds):
        turns = iter(microseconds)

        def call():
            now[0] += 1000 * next(turns)

        return call

    def wait(device):
        assert device == CPU
        waits.append(now[0])
        now[0] += 10**6

    # Of the first turn, which finds everything new, nothing is kept.
    found = {
        "sdpa": host.Known([taking(99, 2, 20, 10)]),
        "ours": host.Known([taking(99, 1, 30, 5)], "sdpa"),
    }
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(host, "rows", lambda device, sets: found)
    us, over = host.measure(CPU, sets=1, rounds=3)
    assert us == {"sdpa": 10, "ours": 5} and over == {"ours": 0.5}
    assert len(waits) == 2 * 2 * 4


def test_a_line_has_microseconds_and_the_ratio_where_a_row_has_one(monkeypatch, capsys):
    monkeypatch.setattr(host.script, "current_gpu", lambda: CPU)
    monkeypatch.setattr(host, "measure", lambda device: ({"a": 12.34, "b": 5.0}, {"a": 1.5}))
    host.main()
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{'a':30}    12.3   1.500", f"{'b':30}     5.0"]


# By row: the shapes of its tensors, those that its call is told by name, and the row beside it.
QKV = [(1, host.TOKENS, host.HEADS, host.DIM)] * 3
HEADS_FIRST = [(1, host.HEADS, host.TOKENS, host.DIM)] * 3
STEP, PAGES = (4, 1, 8, 64), (64, 16, 8, 64)
LENGTHS = {"cache_seqlens": (4,), "block_table": (4, 16)}
ROTARY = {"rotary_cos": (256, 32), "rotary_sin": (256, 32)}
BACKWARD = [(1, host.TOKENS, host.HEADS, host.DIM)] * 5
ROWS = {
    "sdpa, heads first": (HEADS_FIRST, {}, ""),
    "sdpa": (QKV, {}, ""),
    "forward": (QKV, {}, "sdpa"),
    "sdpa, with gradients": (QKV, {}, ""),
    "forward, with gradients": (QKV, {}, "sdpa, with gradients"),
    "sdpa, backward": (BACKWARD, {}, ""),
    "backward": (BACKWARD, {}, "sdpa, backward"),
    "decode over pages": ([STEP, PAGES, PAGES], LENGTHS, "sdpa"),
    "decode, appended": ([STEP, PAGES, PAGES, STEP, STEP], LENGTHS, "sdpa"),
    "decode, appended with rotary": (
        [STEP, PAGES, PAGES, STEP, STEP],
        LENGTHS | ROTARY,
        "sdpa",
    ),
}


def _leaves(given):
    for x in given:
        yield from _leaves(x) if isinstance(x, tuple) else [x]


def test_rows_take_bfloat16_of_these_shapes_on_the_device():
    # What is made on no device in particular would lie elsewhere.
    with torch.device("meta"):
        found = host.rows(CPU, sets=1)
    assert list(found) == list(ROWS)
    for name, (shapes, named, beside) in ROWS.items():
        (call,) = found[name].calls
        tensors = [*_leaves(call.args)]
        told = {key: x for key, x in call.keywords.items() if isinstance(x, torch.Tensor)}
        assert [tuple(x.shape) for x in tensors] == shapes, name
        assert {key: tuple(x.shape) for key, x in told.items()} == named
        assert {x.device for x in (*tensors, *told.values())} == {CPU}
        assert {x.dtype for x in tensors} == {torch.bfloat16}
        assert found[name].beside == beside
        needs = "gradients" in name or "backward" in name
        assert all(x.requires_grad for x in tensors[:4]) is needs, name
        assert (call.keywords.get("causal"), call.keywords.get("retain_graph")) == (
            True if "decode" in name else None,
            True if "backward" in name else None,
        )


def test_sequences_of_a_decode_lie_within_pages_of_their_own():
    call = host.rows(CPU, sets=1)["decode over pages"].calls[0]
    table, lengths = (call.keywords[name] for name in ("block_table", "cache_seqlens"))
    assert sorted(table.flatten().tolist()) == list(range(64))
    assert table.flatten().tolist() != list(range(64))
    assert table.dtype == lengths.dtype == torch.int32
    assert lengths.min() > 0 and lengths.max() < table.shape[1] * host.PAGE


def test_rows_of_gradients_are_of_the_same_forwards():
    """Of one result each: sdpa and ours differ by their roundings alone."""
    torch.manual_seed(0)
    found = host.rows(CPU, sets=1)
    for name, row in found.items():
        if row.beside and "decode" not in name:
            own, other = (_tensors(x.calls[0]()) for x in (row, found[row.beside]))
            for x, y in zip(own, other, strict=True):
                torch.testing.assert_close(x, y)
