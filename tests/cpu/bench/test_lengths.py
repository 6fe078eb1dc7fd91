"""The timing of new lengths times what it says."""

import pytest

pytest.importorskip("triton")

import torch

from heedful.bench import lengths
from heedful.core.planning.plan import plan
from heedful.torch.eager import backends
from support.runs import standin

CPU = torch.device("cpu")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [lengths.dense, lengths.packed])
def test_calls_that_are_timed_as_new_are_of_known_kinds(make, grad, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(lengths, "CALLS", 12)
    planned = []
    monkeypatch.setattr(backends, "plan", lambda *a: planned.append(a) or plan(*a))
    with standin.gpu("H200") as gpu:

        def call(length: int):
            made = make(length, CPU, grad)
            return lengths.with_backward(made) if grad else made

        times = lengths.known_and_new(call, CPU)
        assert len(gpu.launches) >= 3 * 12 and all(time > 0 for time in times)
        assert 0 < len(planned) <= 4
    with standin.gpu("H200"):
        assert lengths.median_us([lengths.sdpa(512, CPU)], CPU) > 0
