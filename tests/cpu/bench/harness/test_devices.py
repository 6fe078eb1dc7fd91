"""What a bench makes lies on the device that it was given, whatever torch's default is. There a
tensor that was made for no device in particular would hold nothing."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from heedful.bench import lengths, mixed, small_calls, steps, torchs
from heedful.bench.harness import cases, check, peers, timing
from heedful.bench.harness.exact import Results
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem

CPU = torch.device("cpu")
DENSE = AttentionProblem.dense(2, 24, 32, 4, 2, 16, dtype="float32")
DECODE = AttentionProblem.dense(2, 1, 2 * peers.PAGE, 4, 2, 16, mask=MaskSpec.of(True))
PACKED = AttentionProblem.dense(1, 40, 40, 4, 2, 16, dtype="float32", causal=True)
CASES = {
    "dense": cases.Case("forward", DENSE),
    "causal": cases.Case("forward", replace(DENSE, mask=MaskSpec.of(True))),
    "backward": cases.Case("backward", replace(DENSE, needs_grad=True), "backward"),
    "packed": cases.Case("forward", PACKED, lengths=(24, 16)),
    "paged": cases.Case("decode", DECODE, paged=True),
}


@pytest.fixture
def nowhere():
    """Of a tensor without a device there are a shape and no values."""
    with torch.device("meta"):
        assert torch.ones(1).is_meta
        yield


def here(*tensors: Tensor | None) -> bool:
    return all(x is None or x.device == CPU for x in tensors)


@pytest.mark.parametrize("name", CASES)
def test_inputs_of_a_case_its_peers_and_its_check_are_on_its_device(name, nowhere):
    case = CASES[name]
    inputs = peers.draw(case, CPU)
    assert here(*inputs)
    checker = check.Checker(case, inputs)
    ran = 0
    for peer in map(peers.find, ("heedful", "math", "flash")):
        if peer.why_not(case, CPU) is None:
            out = peer.make(case, inputs)(*inputs[:3])
            assert here(out)
            if case.direction == "forward":
                assert checker.why_wrong(Results(out)) is None
            ran += 1
    assert ran


def test_steps_and_batches_are_on_their_device_with_all_that_compares_them(nowhere):
    kinds = {"page": {"page": 16}, "prefix": {"prefix": 20}, "int8": {"stored": "int8"}}
    kinds |= {"heads": {"stored": "float8_e4m3fn", "by_head": True}, "padded": {"padded": 2}}
    for kind in kinds.values():
        step = replace(steps.STEPS[0], lengths=(40, 32), heads=(4, 2), **kind)
        if step.padded:
            step = replace(step, page=16)
        t = steps.draw(step, CPU)
        assert here(t.q, t.k, t.v, t.used, t.k_scale, t.v_scale, t.table, *(t.prefix or ()))
        wanted = steps.reference(step, t)
        for make in (steps.heedful, steps.repeated):
            call = make(step, t)
            assert isinstance(call, str) or wanted.why_wrong(call()) is None
        for _, read in steps.reads(step, CPU):
            assert here(read())
    batch = mixed.Batch("mixed", ((4, 40), (1, 24)), ((16, 16),), heads=(4, 2), dim=32)
    t = mixed.draw(batch, CPU)
    assert here(t.q, t.k, t.v, t.used, t.table, t.cu_q)
    assert mixed.reference(batch, t).why_wrong(mixed.attend(batch, t, slice(0, 3))()) is None


def test_short_calls_and_new_lengths_are_on_their_device(nowhere):
    for case in (small_calls.Case(2, 16), small_calls.Case(2, 40, decode=True)):
        for step in small_calls.steps(case):
            made: Any = step()
            assert here(*(made if isinstance(made, tuple) else [made]))
    for made in (lengths.dense, lengths.packed, lengths.sdpa):
        assert here(made(80, CPU)())
    small = torchs.Shape(1, 32, 4, 2, 16, True)
    assert here(*small.draw(CPU, False)) and here(*torchs._turned(small.draw(CPU, True), True))


def test_calls_are_timed_with_a_cold_cache_of_their_device(nowhere):
    times = timing.interleaved({"one": lambda: torch.ones(1, device=CPU)}, CPU, 5, lambda *_: None)
    assert [len(turns) for turns in times.values()] == [5]
