"""The bench of JAX's calls: what it times is checked, and what is wrong gets no figure."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from heedful.bench import in_jax  # noqa: E402
from heedful.bench.cases import cases  # noqa: E402

CPU = torch.device("cpu")
SMALL = [
    replace(case, problem=replace(case.problem, batch=2, seqlen_q=40, seqlen_k=40))
    for case in cases("cpu")[:1]
]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_way_is_checked_and_timed(direction):
    case = replace(SMALL[0], direction=direction)
    found = in_jax.measure(case, CPU, "xla", rounds=2)
    assert not found.missing
    assert list(found.times) == ["PyTorch", "JAX", "xla"]
    for times in found.times.values():
        assert len(times) == 2 and all(time > 0 for time in times)
    assert "xla / JAX" in in_jax._line(case, found, "xla")


def test_a_way_that_computes_wrong_gets_no_figure(monkeypatch):
    right = in_jax.attention

    def wrong(name, causal):
        attend = right(name, causal)
        return (lambda q, k, v: attend(q, k, v) * 1.1) if name == "xla" else attend

    monkeypatch.setattr(in_jax, "attention", wrong)
    found = in_jax.measure(SMALL[0], CPU, "xla", rounds=2)
    assert list(found.missing) == ["xla"] and "out of" in found.missing["xla"]
    assert "JAX" in found.times and "xla" not in found.times
    assert "xla / JAX" not in in_jax._line(SMALL[0], found, "xla")


def test_dispatch_is_timed_with_and_without_gradients():
    found = in_jax.dispatch(CPU, "xla", rounds=2, sets=3)
    assert set(found) == {(name, grad) for name in ("heedful", "xla") for grad in (False, True)}
    assert all(len(times) == 2 for times in found.values())
