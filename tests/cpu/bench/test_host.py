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
