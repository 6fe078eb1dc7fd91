"""The public functions compute what the oracle computes, whatever is asked of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import heedful.torch as heedful
from heedful.core.call.operands import Operands
from heedful.core.call.problem import NO_SCALE
from heedful.torch.eager import calls
from support.problems.budget import check
from support.problems.cases import Case, build, variants
from support.problems.strategies import cases
from support.runs.api import assert_agrees, compiled, dense_problem, results

DENSE = [
    Case(),
    *variants(
        Case(),
        dtype=["float16", "bfloat16"],
        causal=[True],
        window=[(9, 3), (-1, 4), (7, 0, 3)],
        heads_q=[4, 6],
        head_dim=[1, 20, 64],
        head_dim_v=[16, 48],
        scale=[0.7],
        softcap=[4.0],
        dropout_p=[0.3, 1.0],
        alibi=["h", "bh"],
        bias=["bhqk", "hqk", "qk", "k", "b"],
        sink=[True],
        layout=["heads_first", "packed", "offset"],
        deterministic=[True],
        num_splits=[1, 3],
        seqlen_q=[0, 1, 61],
        seqlen_k=[0, 1],
        batch=[0, 1],
        lse_grad=[False],
        backward=[False],
    ),
    Case(dropout_p=0.25, return_probs=True, causal=True, backward=False),
    Case(bias="hqk", sink=True, alibi="h", softcap=3.0, dropout_p=0.2, causal=True, heads_q=4),
    Case(seqlen_q=70, seqlen_k=20, causal=True),
    *variants(
        Case(bias="bhqk", bias_dtype="bool", causal=True, heads_q=4, sink=True),
        bias=["bhqk", "bqk", "qk", "bk", "q"],
        dtype=["float16", "bfloat16"],
        sink=[False],
        seqlen_k=[0],
    ),
    Case(bias="qk", bias_dtype="bfloat16"),
    *variants(
        Case(used="qk", leftpad_k=True, causal=True, heads_q=4, sink=True),
        dtype=["bfloat16"],
        used=["q", "k", ""],
        leftpad_k=[False],
        bias=["bhqk"],
        dropout_p=[0.3],
        alibi=["h"],
        window=[(9, 3)],
        lens_k=[(0, 53), (0, 0)],
        lens_q=[(0, 37)],
        index_dtype=["int64"],
        seqlen_q=[1],
        backward=[False],
    ),
    Case(sink=True, sink_dtype="bfloat16", dtype="bfloat16", causal=True),
    Case(sink=True, sink_dtype="float16", dtype="float16", head_dim=64),
]
VARLEN = [
    Case(varlen="qk", batch=3),
    *variants(
        Case(varlen="qk", batch=3),
        dtype=["bfloat16"],
        causal=[True],
        window=[(9, 3)],
        heads_q=[4],
        alibi=["bh"],
        bias=["bhqk"],
        sink=[True],
        dropout_p=[0.3],
        used=["q", "k", "qk"],
        layout=["packed"],
        batch=[0, 1],
        lens_q=[(0, 0, 0)],
        lens_k=[(0, 53, 1)],
        backward=[False],
    ),
    Case(varlen="qk", page_size=4, causal=True, heads_q=4, backward=False, batch=3),
    Case(varlen="q", page_size=7, used="k", backward=False, batch=3),
    Case(varlen="q", page_size=64, used="qk", causal=True, backward=False, batch=3),
    Case(varlen="qk", page_size=4, causal=True, heads_q=4, batch=3),
    Case(varlen="q", page_size=7, used="k", batch=3, sink=True, bias="bhqk"),
    Case(varlen="qk", batch=3, bias="bqk", bias_dtype="bool", dropout_p=0.3, used="qk"),
    Case(varlen="qk", batch=3, index_dtype="int64", used="qk", causal=True),
    Case(
        batch=3,
        varlen="qk",
        index_dtype="int64",
        sink=True,
        sink_dtype="float16",
        dtype="float16",
    ),
    Case(varlen="q", page_size=7, used="k", batch=3, index_dtype="int64"),
    Case(varlen="qk", page_size=7, batch=3, index_dtype="int64", backward=False),
    *variants(
        Case(used="k", index_dtype="int64", backward=False, causal=True),
        seqlen_q=[1, 2],
        page_size=[4],
        kv_batch_idx=[True],
        leftpad_k=[True],
    ),
]


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_flash_attn_func_agrees_with_the_oracle(case):
    built = build(case)
    check(built, results(built))


@pytest.mark.parametrize("case", VARLEN, ids=str)
def test_flash_attn_varlen_func_agrees_with_the_oracle(case):
    built = build(case)
    check(built, results(built))


# What the signatures of flash-attn cannot say.
UNSAYABLE = {"bottom_right", "shift", "dropout_origin"}


def sayable(case: Case) -> Case:
    """The case, less what no public function can be asked together with the rest."""
    # Without dropout the third result is empty, as in flash-attn.
    case = replace(case, return_probs=case.return_probs and case.dropout_p > 0)
    if case.varlen and (case.page_size or case.varlen == "qk"):
        packed = "qk" if "k" in case.varlen or "k" not in case.used else "q"
        return replace(case, varlen=packed, kv_batch_idx=False, leftpad_k=False, tree_mask=False)
    case = replace(case, varlen="")
    if not (case.page_size or case.kv_batch_idx or case.tree_mask):
        return case
    case = replace(case, used="k" if "k" in case.used else "", q_offsets=False)
    return replace(case, dropout_p=0.0, return_probs=False, bias="", backward=False)


@settings(max_examples=60)
@given(case=cases(longest=40, without=UNSAYABLE).map(sayable))
def test_any_call_agrees_with_the_oracle(case):
    built = build(case)
    check(built, results(built))


@pytest.mark.slow
@settings(max_examples=500)
@given(case=cases(without=UNSAYABLE).map(sayable))
def test_any_of_many_calls_agrees_with_the_oracle(case):
    built = build(case)
    check(built, results(built))


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_bool_mask_is_a_bias_of_minus_infinity(is_bool):
    """A row of nothing but -inf sees no key."""
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(4, 4) < 0.5
    mask[2] = False
    bias = mask if is_bool else torch.zeros(4, 4).masked_fill(~mask, -torch.inf)
    out, lse = heedful.flash_attn_func(q, k, v, bias=bias, return_lse=True)
    x = Operands(q.detach(), k.detach(), v.detach(), bias.expand(1, 2, 4, 4))
    assert_agrees(out.detach(), dense_problem(*x[:3], bias=True), x, lse.detach())
    assert not out[0, 2].any() and (lse[0, :, 2] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][0, 2].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t[:, :1].expand_as(t),
        lambda t: t.flip(1).flip(1),
    ],
    ids=["dim_major", "every_other", "expanded", "plain"],
)
def test_any_strides_give_what_contiguous_tensors_give(make):
    """Values and gradients, through copies where the last dim is not contiguous."""
    q, k, v = (make(torch.randn(2, 5, 2, 16)) for _ in range(3))
    dense = [t.contiguous().requires_grad_() for t in (q, k, v)]
    strided = [t.detach().requires_grad_() for t in (q, k, v)]
    want = heedful.flash_attn_func(*dense, causal=True, backend="cpu")
    got = heedful.flash_attn_func(*strided, causal=True, backend="cpu")
    dout = make(torch.randn(2, 5, 2, 16))
    assert torch.equal(got, want)
    for a, b in zip(
        torch.autograd.grad(got, strided, dout), torch.autograd.grad(want, dense, dout), strict=True
    ):
        assert torch.equal(a, b)


def test_the_gradient_of_a_sum_has_stride_zero_and_is_accepted():
    q, k, v = (torch.randn(2, 5, 2, 16, requires_grad=True) for _ in range(3))
    out = heedful.flash_attn_func(q, k, v)
    by_sum = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    by_ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(by_sum, by_ones, strict=True))


def test_a_loss_of_the_lse_alone_has_gradients():
    built = build(Case(causal=True))
    q, k, v = (t.requires_grad_() for t in built.x[:3])
    _, lse = heedful.flash_attn_func(q, k, v, causal=True, return_lse=True)
    alone = torch.autograd.grad(lse, (q, k), built.dlse)
    out, lse = heedful.flash_attn_func(q, k, v, causal=True, return_lse=True)
    both = torch.autograd.grad((out, lse), (q, k), (torch.zeros_like(out), built.dlse))
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))


def test_a_bool_bias_is_saved_as_it_is_and_takes_16_bits_in_a_call(monkeypatch):
    """Layers that share a mask save one, and no call makes a mask of float32."""
    seen = []
    adapted = calls.adapt
    monkeypatch.setattr(calls, "adapt", lambda *a: seen.append(adapted(*a)) or seen[-1])
    q = torch.randn(2, 8, 4, 16, requires_grad=True)
    mask = (torch.rand(1, 1, 8, 8) < 0.7).expand(2, 1, 8, 8)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        heedful.flash_attn_func(q, q, q, bias=mask).sum().backward()
    assert [t.data_ptr() for t in saved if t.dtype == torch.bool] == [mask.data_ptr()]
    made = seen[-1].bias
    assert made.dtype == torch.bfloat16 and made.shape == (2, 4, 8, 8)
    assert made.untyped_storage().nbytes() == 2 * 8 * 8


def test_a_bias_of_bool_and_one_of_numbers_are_told_apart():
    q = torch.randn(2, 8, 4, 16)
    ones = torch.ones(8, 8)
    ones[:, 3:] = 0
    both = [heedful.flash_attn_func(q, q, q, bias=bias) for bias in (ones, ones.bool()) * 2]
    assert torch.equal(both[0], both[2]) and torch.equal(both[1], both[3])
    whole = heedful.flash_attn_func(q, q[:, :3], q[:, :3])
    torch.testing.assert_close(both[1], whole)


def test_a_compiled_call_takes_a_bool_bias_and_its_gradients_are_the_eager_ones():
    q = torch.randn(2, 8, 4, 16, requires_grad=True)
    mask = torch.rand(8, 8) < 0.7

    def loss(q, mask):
        return heedful.flash_attn_func(q, q, q, bias=mask).square().sum()

    grads = [torch.autograd.grad(f(q, mask), q)[0] for f in (compiled(loss), loss)]
    assert torch.equal(*grads)


def test_a_bias_that_came_expanded_gets_a_gradient_for_each_of_its_elements():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    small = torch.randn(1, 1, 5, 5)
    expanded = small.expand(2, 2, 5, 5).detach().requires_grad_()
    whole = small.expand(2, 2, 5, 5).contiguous().requires_grad_()
    grads = [
        torch.autograd.grad(heedful.flash_attn_func(q, k, v, bias=bias).square().sum(), bias)[0]
        for bias in (expanded, whole)
    ]
    assert torch.equal(*grads)


@pytest.mark.parametrize("shape", [(5, 7), (7,), (1,), (), (2, 5, 7), (2, 1, 1, 7)], ids=str)
def test_the_gradient_of_a_bias_has_its_own_shape(shape):
    q, k, v = torch.randn(2, 5, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    bias = torch.randn(shape, requires_grad=True)
    four = bias.detach().view((1,) * (4 - len(shape)) + shape).requires_grad_()
    got, want = (
        torch.autograd.grad(heedful.flash_attn_func(q, k, v, bias=b).square().sum(), b)[0]
        for b in (bias, four)
    )
    assert got.shape == shape
    assert torch.equal(got, want.view(shape))


def test_a_second_backward_through_the_gradients_raises():
    q, k, v = (torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(3))
    losses = (
        lambda out, lse: out.square().sum(),
        lambda out, lse: out.sum(),
        lambda out, lse: lse.sum(),
        lambda out, lse: out.sum() + lse.sum(),
    )
    for loss in losses:
        results = heedful.flash_attn_func(q, k, v, return_lse=True)
        (dq,) = torch.autograd.grad(loss(*results), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (dq.square().sum() + q.sum()).backward()


def test_returns_are_those_of_flash_attn():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    assert isinstance(heedful.flash_attn_func(q, k, v), torch.Tensor)
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 2, 5) and lse.dtype == torch.float32
    out, lse, probs = heedful.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (2, 2, 5) and probs.numel() == 0
    out, lse, probs = heedful.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    assert probs.shape == (2, 2, 5, 5) and (probs < 0).any() and (probs > 0).any()


def test_out_is_written_in_place_and_returned():
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    storage = torch.full((2, 5, 4, 8), torch.nan)
    out = storage[:, :, 1:3]
    returned = heedful.flash_attn_func(q, k, v, out=out)
    assert returned is out
    assert torch.equal(out, heedful.flash_attn_func(q, k, v))
    assert storage[:, :, [0, 3]].isnan().all()


@pytest.mark.parametrize("seed", [7, -3, 2**63 + 5, torch.tensor([7]), torch.tensor(7)], ids=str)
def test_the_dropout_mask_is_a_function_of_the_seed(seed):
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    first, again = (heedful.flash_attn_func(q, k, v, 0.5, dropout_seed=seed) for _ in range(2))
    other = heedful.flash_attn_func(q, k, v, 0.5, dropout_seed=8)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_an_int_seed_and_a_tensor_seed_mean_the_same():
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    for number, signed in ((7, 7), (2**64 - 1, -1)):
        by_int = heedful.flash_attn_func(q, k, v, 0.5, dropout_seed=number)
        by_tensor = heedful.flash_attn_func(q, k, v, 0.5, dropout_seed=torch.tensor([signed]))
        assert torch.equal(by_int, by_tensor)


def test_the_default_seed_comes_from_torchs_generator():
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append([heedful.flash_attn_func(q, k, v, 0.5) for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1])
    assert not torch.equal(draws[0][0], draws[2][0])


def test_forward_and_backward_draw_the_same_mask():
    """With v and dout the identity, out is P after dropout and dv its transpose."""
    q, k = torch.randn(1, 6, 1, 8), torch.randn(1, 6, 1, 8)
    v = torch.eye(6).view(1, 6, 1, 6).requires_grad_()
    out = heedful.flash_attn_func(q, k, v, 0.4)
    (dv,) = torch.autograd.grad(out, v, torch.eye(6).view(1, 6, 1, 6))
    dropped = out[0, :, 0] == 0
    assert dropped.any() and not dropped.all()
    assert torch.equal(dv[0, :, 0] == 0, dropped.T)


def test_a_scale_of_zero_weighs_all_visible_keys_alike():
    q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))
    out = heedful.flash_attn_func(q, k, v, softmax_scale=0.0, causal=True)
    torch.testing.assert_close(out, v.cumsum(1) / torch.arange(1, 41)[:, None, None])
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    # Sums of at most 40 probabilities times the scale, times two of 16 products, times an input.
    largest = NO_SCALE * 40 * 32 * v.abs().max() * torch.cat([q, k]).abs().max()
    assert dq.abs().max() <= largest and dk.abs().max() <= largest
    torch.testing.assert_close(dv[0, -1, 0], torch.full((16,), 1 / 40))


def test_a_file_written_for_flash_attn_works_by_changing_its_import():
    source = """
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_qkvpacked_func

def layer(q, k, v, qkv, cu, cache):
    a = flash_attn_func(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False)
    a = a + flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=0.3, causal=True)
    b, lse, probs = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    c = flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 4, 4, 0.0, None, True)
    d = flash_attn_qkvpacked_func(qkv, 0.0, softmax_scale=None, causal=True)
    e = flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=3, causal=True)
    return a, b, c, d, e
"""
    space: dict = {}
    exec(source.replace("from flash_attn import", "from heedful import"), space)
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    cache = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    a, b, c, d, e = space["layer"](q, k, v, torch.stack([q, k, v], 2), cu, cache)
    assert a.shape == b.shape == d.shape == e.shape == q.shape and c.shape == q[0].shape
    problem = dense_problem(q, k, v, causal=True)
    for other in (b, c[None], d):
        assert_agrees(other, problem, Operands(q, k, v))
