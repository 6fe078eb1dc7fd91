"""A sink has three names, by one of which it comes."""

import inspect
from typing import Any

import pytest
import torch

import heedful.torch as heedful
from support.runs.api import compiled

SINK = torch.linspace(-1, 1, 4)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
ROWS: Any = torch.randn(3, 8, 4, 16, generator=torch.Generator().manual_seed(0))
BATCH = ROWS.view(3, 2, 4, 4, 16)
CALLS: dict[str, Any] = {
    "flash_attn_func": lambda f, **more: f(*BATCH, **more),
    "flash_attn_varlen_func": lambda f, **more: f(*ROWS, CU, CU, 5, 5, **more),
    "flash_attn_with_kvcache": lambda f, **more: f(*BATCH, **more),
    "flash_attn_qkvpacked_func": lambda f, **more: f(BATCH.movedim(0, 2), **more),
    "flash_attn_kvpacked_func": lambda f, **more: f(BATCH[0], BATCH[1:].movedim(0, 2), **more),
    "flash_attn_varlen_qkvpacked_func": lambda f, **more: f(ROWS.movedim(0, 1), CU, 5, **more),
    "flash_attn_varlen_kvpacked_func": lambda f, **more: f(
        ROWS[0], ROWS[1:].movedim(0, 1), CU, CU, 5, 5, **more
    ),
}
OTHERS = ("s_aux", "learnable_sink")


@pytest.mark.parametrize("name", CALLS)
def test_every_forward_takes_a_sink_by_each_name(name):
    function, call = getattr(heedful, name), CALLS[name]
    want = call(function, sink=SINK)
    assert not torch.equal(call(function), want)
    for other in OTHERS:
        assert torch.equal(call(function, **{other: SINK}), want)
        said = call(lambda *a, **k: heedful.explain(function, *a, **k), **{other: SINK})
        assert said == call(lambda *a, **k: heedful.explain(function, *a, **k), sink=SINK)
    for two in ({"sink": SINK, "s_aux": SINK}, dict.fromkeys(OTHERS, SINK)):
        for run in (function, lambda *a, **k: heedful.explain(function, *a, **k)):
            with pytest.raises(TypeError, match=f"^sink must be .* got {' and '.join(two)}$"):
                call(run, **two)


@pytest.mark.parametrize("name", [name for name in CALLS if "packed" not in name])
def test_the_signature_shows_each_name(name):
    shown = inspect.signature(getattr(heedful, name)).parameters
    assert {"sink", *OTHERS} <= set(shown)


def test_a_compiled_call_takes_them_and_their_gradients_come_back():
    def loss(sink):
        return heedful.flash_attn_func(*BATCH, s_aux=sink).square().sum()

    sinks = [SINK.clone().requires_grad_() for _ in range(2)]
    got, want = (
        torch.autograd.grad(f(s), s) for f, s in zip((compiled(loss), loss), sinks, strict=True)
    )
    assert torch.equal(*got, *want)


def test_the_gradients_of_a_call_take_them():
    out, lse = heedful.flash_attn_func(*BATCH, sink=SINK, return_lse=True)
    backward: Any = heedful.attention_backward
    dsinks = [backward(out, *BATCH, out, lse, **{name: SINK}).dsink for name in ("sink", *OTHERS)]
    assert torch.equal(dsinks[0], dsinks[1]) and torch.equal(dsinks[0], dsinks[2])


def test_jax_takes_them():
    jax = pytest.importorskip("jax")
    import heedful.jax

    hj: Any = heedful.jax

    q, k, v = (jax.numpy.asarray(t.numpy()) for t in BATCH)
    sink, starts = jax.numpy.asarray(SINK.numpy()), jax.numpy.asarray(CU.numpy())
    rows = [t.reshape(8, 4, 16) for t in (q, k, v)]
    for run in (
        lambda **more: hj.flash_attn_func(q, k, v, **more),
        lambda **more: hj.flash_attn_varlen_func(*rows, starts, starts, 5, 5, **more),
        lambda **more: hj.flash_attn_with_kvcache(q, k, v, **more)[0],
    ):
        for other in OTHERS:
            assert (run(**{other: sink}) == run(sink=sink)).all()
        with pytest.raises(TypeError, match="^sink must be given by one of its names"):
            run(sink=sink, s_aux=sink)
