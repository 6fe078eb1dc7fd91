"""`attention_backward` gives the gradients of a call to whoever kept its results."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import heedful.torch as heedful
from heedful.torch.api import gradients
from heedful.torch.traced import library
from support.problems.budget import check
from support.problems.cases import Case, build, variants
from support.problems.grids import slow_but
from support.runs import api
from support.runs.api import compiled
from support.runs.gradients import keywords_of, results

DENSE = variants(
    Case(causal=True, heads_q=4),
    lse_grad=[True, False],
    dtype=["bfloat16"],
    window=[(9, 3)],
    head_dim_v=[16],
    scale=[0.7],
    softcap=[4.0],
    dropout_p=[0.3],
    alibi=["h"],
    bias=["bhqk", "k"],
    sink=[True],
    layout=["heads_first"],
    deterministic=[True],
    seqlen_k=[0],
)
PACKED = [
    *variants(
        Case(varlen="qk", batch=3, causal=True),
        sink=[True],
        bias=["bhqk"],
        dropout_p=[0.3],
        used=["qk"],
        lens_k=[(0, 53, 1)],
    ),
    Case(varlen="q", page_size=7, used="k", batch=3),
    Case(varlen="qk", batch=3, bias="bqk", bias_dtype="bool"),
    Case(varlen="qk", batch=3, index_dtype="int64", used="qk"),
    Case(used="qk", leftpad_k=True, causal=True),
    Case(dtype="bfloat16", sink=True, sink_dtype="bfloat16"),
]


@pytest.mark.parametrize("case", [*DENSE, *PACKED], ids=str)
def test_the_gradients_are_the_oracles(case):
    built = build(case)
    got = results(built)
    check(built, got)
    has_dbias = bool(case.bias) and not case.bias_dtype
    assert (got.dbias is not None, got.dsink is not None) == (has_dbias, case.sink)


@pytest.mark.parametrize("case", [*DENSE[:3], *PACKED[:2]], ids=str)
def test_they_are_autograds_to_the_bit(case):
    built = build(case)
    got, want = results(built), api.results(built)
    for name, value in want.present().items():
        assert (getattr(got, name) == value).all(), name


def tensors(length: int = 5) -> Any:
    """(dout, q, k, v) of two query heads a KV head."""
    torch.manual_seed(length)
    q, k = torch.randn(2, length, 4, 16), torch.randn(2, length + 2, 2, 16)
    return torch.randn(2, length, 4, 8), q, k, torch.randn(2, length + 2, 2, 8)


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
    "sink": {"sink": torch.randn(4), "window_size": (3, 1), "softcap": 5.0},
}


@pytest.mark.parametrize("name", slow_but({"dropout"}, COMPILED))
def test_a_compiled_call_gives_what_the_eager_call_gives_at_any_length(name):
    keywords = COMPILED[name]

    def both(dout, q, k, v):
        out, lse = heedful.flash_attn_func(q, k, v, return_lse=True, **keywords)
        return heedful.attention_backward(dout, q, k, v, out, lse, dlse=lse, **keywords)

    function = compiled(both)
    for length in (5, 9):
        given = tensors(length)
        for got, want in zip(function(*given), both(*given), strict=True):
            assert got is want is None or torch.equal(got, want)


def test_a_compiled_packed_call_gives_what_the_eager_call_gives():
    case = Case(varlen="qk", batch=3, causal=True, sink=True, bias="bhqk", rel_bias=9)
    built = build(case)
    keywords = keywords_of(built)
    out, lse, *_ = api.call(built, api._leaves(replace(built, dout=None)))

    def backward(dout, q, k, v, out, lse):
        return heedful.attention_backward(dout, q, k, v, out, lse, **keywords)

    given: Any = (built.dout, *built.x[:3], out, lse)
    for got, want in zip(compiled(backward)(*given), backward(*given), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_length_of_packed_gradients_may_be_a_tensor_which_elsewhere_is_not_read(name, device):
    built = build(Case(varlen="qk", heads_q=2, head_dim=8))
    keywords = keywords_of(built)
    out, lse, *_ = api.call(built, api._leaves(replace(built, dout=None)))
    given: Any = (built.dout, *built.x[:3], out, lse)
    want = heedful.attention_backward(*given, **keywords)
    keywords[name] = torch.tensor(keywords[name], device=device)
    got = heedful.attention_backward(*given, **keywords)
    assert all(map(torch.equal, got[:3], want[:3]))


def test_the_gradient_of_a_bias_can_be_left_out():
    dout, q, k, v = tensors()
    bias = torch.randn(5, 7)
    out, lse = heedful.flash_attn_func(q, k, v, bias=bias, return_lse=True)
    given = dout, q, k, v, out, lse
    with_bias: Any = heedful.attention_backward(*given, bias=bias)
    without = heedful.attention_backward(*given, bias=bias, bias_grad=False)
    assert with_bias.dbias.shape == bias.shape and without.dbias is None
    assert all(torch.equal(a, b) for a, b in zip(with_bias[:3], without[:3], strict=True))


def test_one_call_of_a_batch_is_each_by_itself():
    dout, q, k, v = tensors()
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    given: Any = [t[:, None] for t in (dout, q, k, v, out, lse)]
    function: Any = heedful.attention_backward
    mapped = torch.func.vmap(lambda *t: function(*t)[:3])(*given)
    whole = heedful.attention_backward(dout, q, k, v, out, lse)
    for got, want in zip(mapped, whole, strict=False):
        torch.testing.assert_close(got[:, 0], want)


def test_fake_gradients_have_the_shapes_of_real_ones():
    dout, q, k, v = tensors()
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    with FakeTensorMode() as mode:
        *fakes, lse = [mode.from_tensor(t) for t in (dout, q, k, v, out, lse)]
        function: Any = heedful.attention_backward
        grads = function(*fakes, lse)
        with pytest.raises(ValueError, match="^lse must have shape"):
            function(*fakes, lse[:, :1])
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, v.shape]


def test_a_second_derivative_raises():
    dout, q, k, v = tensors()
    q.requires_grad_()
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    grads: Any = heedful.attention_backward(dout, q, k, v, out.detach(), lse.detach())
    with pytest.raises(RuntimeError, match="twice"):
        grads.dq.sum().backward()


def test_odd_tensors_are_what_they_stand_for():
    dout, q, k, v = tensors()
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    want = heedful.attention_backward(dout, q, k, v, out, lse, dlse=lse)

    def view(t):
        return torch.complex(torch.zeros_like(t), -t).conj().imag

    odd = view(dout), view(q), k, v, out, lse
    assert odd[0].is_neg()
    for got in (
        heedful.attention_backward(*odd, dlse=view(lse)),
        heedful.attention_backward(dout, q, k, v, out, lse, dlse=view(lse)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


BOUNDS = torch.tensor([0, 2, 5], dtype=torch.int32)
BAD: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "dout": (ValueError, {"dout": torch.randn(2, 5, 4, 16)}),
    "dout ": (TypeError, {"dout": torch.randn(2, 5, 4, 8).half()}),
    "dout  ": (TypeError, {"dout": None}),
    "out": (ValueError, {"out": torch.randn(2, 4, 4, 8)}),
    "lse": (ValueError, {"lse": torch.randn(2, 5, 4)}),
    "lse ": (TypeError, {"lse": torch.randn(2, 4, 5).double()}),
    "dlse": (ValueError, {"dlse": torch.randn(4, 5)}),
    "dlse ": (ValueError, {"dlse": torch.randn(2, 4, 5, device="meta")}),
    "k": (ValueError, {"k": torch.randn(3, 7, 2, 16)}),
    "dropout_seed": (ValueError, {"dropout_p": 0.5}),
    "cu_seqlens_q": (ValueError, {"cu_seqlens_k": BOUNDS}),
    "cu_seqlens_q ": (ValueError, {"max_seqlen_q": 3}),
    "leftpad_k": (ValueError, {"cu_seqlens_q": BOUNDS, "leftpad_k": BOUNDS[:2]}),
    "seqused_k": (ValueError, {"seqused_k": torch.tensor([3, 8])}),
    "max_seqlen_q": (TypeError, {"cu_seqlens_q": BOUNDS}),
    "bias": (ValueError, {"bias": torch.randn(3, 7)}),
    "backend": (ValueError, {"backend": "hopper"}),
    "alibi_slopes": (ValueError, {"alibi_slopes": torch.rand(4, requires_grad=True)}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_names_the_argument(name):
    dout, q, k, v = tensors()
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    given: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    kind, wrong = BAD[name]
    heedful.attention_backward(**given)
    with pytest.raises(kind, match=rf"\b{name.strip()}\b.* (must|cannot)\b|cannot run"):
        heedful.attention_backward(**{**given, **wrong})


def test_a_known_call_is_run_without_a_look_at_anything_else(monkeypatch):
    pytest.importorskip("triton")
    from support.runs import standin

    looks: list[Any] = []
    look = library.differentiate
    monkeypatch.setattr(library, "differentiate", lambda *a, **k: looks.append(a) or look(*a, **k))
    with standin.gpu("H200") as gpu:
        q = torch.randn(2, 64, 4, 64).bfloat16()
        out, lse = heedful.flash_attn_func(q, q, q, causal=True, return_lse=True)

        def kernels(dlse=None, **more) -> list[Any]:
            first = len(gpu.launches)
            heedful.attention_backward(out, q, q, q, out, lse, dlse=dlse, causal=True, **more)
            return [launch.kernel for launch in gpu.launches[first:]]

        plain, with_dlse = kernels(), kernels(lse)
        assert plain and len(looks) == 2
        assert kernels() == plain and kernels(lse) == with_dlse and len(looks) == 2
        for wrong in (lse.double(), lse[:, :1], lse.transpose(1, 2)):
            with pytest.raises((TypeError, ValueError), match="^dlse must"):
                kernels(wrong)
        assert kernels(lse.transpose(1, 2).contiguous().transpose(1, 2)) == with_dlse
        looked = len(looks)
        kernels(softcap=2.0)
        with pytest.raises(TypeError, match="^softcap must"):
            kernels(softcap=False)
        assert len(looks) == looked + 2


def test_lengths_past_their_storage_are_refused():
    built = build(Case(varlen="qk", batch=2, lens_q=(3, 5), lens_k=(4, 6)))
    keywords = keywords_of(built)
    out, lse, *_ = api.call(built, api._leaves(replace(built, dout=None)))
    keywords["cu_seqlens_k"] = keywords["cu_seqlens_k"] + 1
    with pytest.raises(ValueError, match="^cu_seqlens_k must end within"):
        heedful.attention_backward(torch.randn_like(out), *built.x[:3], out, lse, **keywords)


# Short sequences without a softcap have a way of their own. Some rows see one key of a part.
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(("length", "dropout_p"), [(40, 0.0), (40, 0.3), (600, 0.0)])
@pytest.mark.parametrize("scale", [0.25, 40.0], ids=["", "far from 0"])
def test_gradients_from_parts_of_the_keys_add_up_to_those_of_all(length, dropout_p, softcap, scale):
    torch.manual_seed(length)
    q, dout = torch.randn(2, 1, length, 4, 16).unbind()
    k, v = torch.randn(2, 1, length, 2, 16).unbind()
    drops: Any = {"dropout_p": dropout_p, "dropout_seed": 3}
    drops |= {"softcap": softcap * scale, "softmax_scale": scale}
    out, lse = heedful.flash_attn_func(q, k, v, causal=True, return_lse=True, **drops)
    want = heedful.attention_backward(dout, q, k, v, out, lse, dlse=lse, causal=True, **drops)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for keys in (slice(0, length - 12), slice(length - 12, length)):
        # The last row is on the last key, or behind it.
        rows = slice(keys.start, None)
        window = (-1, length - keys.stop)
        drops["dropout_origin"] = (0, 0, keys.start, keys.start)
        parts = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        got = heedful.attention_backward(*parts, dlse=parts[-1], window_size=window, **drops)
        dq[:, rows] += got.dq
        dk[:, keys], dv[:, keys] = got.dk, got.dv
    for got, part in zip(want, (dq, dk, dv), strict=False):
        # A few roundings of sums of as many terms as there are keys, and of lse.
        rounded = 2**-18 + 2**-22 * float(lse.abs().max())
        assert (got - part).abs().max() <= got.abs().max() * rounded


PLACES = [*DENSE[:4], Case(causal=True, sink=True, bias="bhqk", lse_grad=True), *PACKED[:3]]


def places(built, of: str) -> tuple[Any, ...]:
    """Memory for dq, dk and dv: rows with gaps; for sums ones in float32."""
    if of == "accumulate":
        return tuple(torch.ones(x.shape) for x in built.x[:3])
    wider = ((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 8) for x in built.x[:3])
    made = [torch.full(s, torch.nan, dtype=x.dtype) for s, x in zip(wider, built.x, strict=False)]
    return tuple(x[..., :-1, :-8] for x in made)


@pytest.mark.parametrize("case", PLACES, ids=str)
@pytest.mark.parametrize("of", ["into", "accumulate"])
def test_gradients_may_be_written_or_added_where_the_caller_says(case, of):
    built = build(case)
    keywords = keywords_of(built)
    out, lse, *_ = api.call(built, api._leaves(replace(built, dout=None)))
    given: Any = (built.dout, *built.x[:3], out, lse)
    keywords["dlse"] = built.dlse
    want: Any = heedful.attention_backward(*given, **keywords)
    mine = places(built, of)
    got: Any = heedful.attention_backward(*given, **keywords, **{of: mine})
    for place, grad, true in zip(mine, got, want, strict=False):
        assert grad is place
        assert torch.equal(place, true.float() + 1 if of == "accumulate" else true)
    for grad, true in zip(got[3:], want[3:], strict=True):
        assert grad is true is None or torch.equal(grad, true)


@pytest.mark.parametrize("of", ["into", "accumulate"])
def test_wrong_places_for_gradients_are_refused_by_name(of):
    dout, q, k, v = tensors()
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    good: list[Any] = [torch.zeros_like(x) for x in (q, k, v)]
    wrong: list[tuple[Any, str]] = [
        (good[0], rf"{of} must be \(dq, dk, dv\)"),
        (good[:2], rf"{of} must be \(dq, dk, dv\)"),
        ([good[0], good[1][:1], good[2]], rf"{of}\[1\] must be \(2, 7, 2, 16\)"),
        ([good[0], good[1], good[2].half()], rf"{of}\[2\] must be torch.float32"),
        ([good[0].transpose(1, 2).contiguous().transpose(1, 2), *good[1:]], ""),
    ]
    for value, message in wrong[:-1]:
        with pytest.raises((TypeError, ValueError), match=message):
            heedful.attention_backward(dout, q, k, v, out, lse, **{of: value})
    for number in range(3):
        leaf: Any = [x.clone().requires_grad_(index == number) for index, x in enumerate(good)]
        message = rf"^{of}\[{number}\] must not require a gradient: it is written in place"
        with pytest.raises(ValueError, match=message), torch.no_grad():
            heedful.attention_backward(dout, q, k, v, out, lse, **{of: leaf})  # pyright: ignore
    with pytest.raises(ValueError, match="into must be None where accumulate is passed"):
        heedful.attention_backward(dout, q, k, v, out, lse, into=good, accumulate=good)
    with pytest.raises(ValueError, match=r"into\[1\] must have memory of its own"):
        heedful.attention_backward(dout, q, k, v, out, lse, into=[good[0], k, good[2]])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_torchs_own_determinism_is_that_of_gradients(own, given, monkeypatch):
    seen = []

    def noted(x, options, *_):
        seen.append(options.deterministic)
        raise NotImplementedError

    monkeypatch.setattr(gradients, "are_deterministic_algorithms_enabled", lambda: own)
    monkeypatch.setattr(gradients, "eager", noted)
    dout, q, k, v = tensors()
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    with pytest.raises(NotImplementedError):
        heedful.attention_backward(dout, q, k, v, out, lse, deterministic=given)
    assert seen == [own or given]
