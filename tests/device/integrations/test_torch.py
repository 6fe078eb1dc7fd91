"""Torch's own attention by heedful, on a GPU: what `activate` and `sdpa` run is counted, right, and
captured and compiled as torch's own is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heedful import flash_attn_func, flash_attn_varlen_func
from heedful.integrations.torch import Report, activate, restore, sdpa
from heedful.integrations.torch.aten import MASKED
from heedful.integrations.torch.functional import NAME
from support.captures import graph_capture
from support.integrations import sdpa_calls
from support.integrations.sdpa_calls import BY_NAME, CALLS

pytestmark = pytest.mark.gpu

DIM = 64
# What torch gives to a fused kernel on each GPU that has them: calls without a mask, of four dims,
# whose heads do not broadcast; shared ones in calls that FlashAttention takes.
FUSED = [c for c in CALLS if c.rank == 4 and c.mask in ("none", "causal")]
SHARED = [c for c in FUSED if c.heads == "gqa" and not c.other_dim]
SHARED = [c for c in SHARED if c.mask == "none" or c.lengths == "as_many"]
FUSED = [c for c in FUSED if c.heads == "equal"] + SHARED
MASKS = [c for c in CALLS if c.rank == 4 and c.heads == "equal" and c.mask in ("bool", "whole")]
MASKS = [c for c in MASKS if not c.other_dim and c.scale is None]


@pytest.fixture
def report() -> Iterator[Report]:
    report = activate()
    yield report
    restore()
    torch._dynamo.reset()


def unmasked(report: Report) -> tuple[int, int]:
    """How many forwards and backwards without a mask heedful ran."""
    backward = sum(n for name, n in report.ours.items() if name.endswith("_backward"))
    return sum(report.ours.values()) - backward, backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_unmasked_call_of_16_bits_is_ours_and_right(report, dtype):
    for number, call in enumerate(FUSED, start=1):
        sdpa_calls.judge(call, "cuda", dtype, DIM, sdpa_calls.call_torch)
        assert unmasked(report) == (number, number), f"{call.name} ran on torch's\n{report}"
    assert not report.declined, str(report)


@pytest.mark.parametrize("call", MASKS, ids=lambda call: call.name)
def test_masked_calls_stay_torchs(report, call):
    given = call.draw("cuda", torch.bfloat16, 0, DIM)
    dout = torch.randn_like(sdpa_calls.plain(**given).detach())
    got = sdpa_calls.results(sdpa_calls.call_torch, given, dout)
    assert unmasked(report) == (0, 0) and set(report.declined) <= {MASKED}
    restore()
    want = sdpa_calls.results(sdpa_calls.call_torch, given, dout)
    assert (got["out"] == want["out"]).all()


def test_cudnns_masked_calls_are_handed_back(report):
    q, k, v = qkv(2, 8, 128, 64, grad=True)
    bias = torch.zeros(2, 8, 128, 128, device="cuda", dtype=q.dtype)
    given = q, k, v, bias, True
    got = gradients(torch.ops.aten._scaled_dot_product_cudnn_attention(*given)[0], q, k, v)
    assert report.declined == {MASKED: 2} and not report.ours
    restore()
    want = gradients(torch.ops.aten._scaled_dot_product_cudnn_attention(*given)[0], q, k, v)
    assert torch.equal(got[0], want[0])
    assert all(are_near(x, y) for x, y in zip(got, want, strict=True))


def are_near(x: Tensor, y: Tensor) -> bool:
    """Whether they differ as sums do that atomics add up in another order: one rounding, as RMS."""
    eps = torch.finfo(y.dtype).eps
    return bool((x.double() - y.double()).norm() <= eps * y.double().norm())


def qkv(*shape: int, grad: bool = False, dtype=torch.bfloat16) -> list[Tensor]:
    """Rows first in memory; heads first in shape."""
    batch, heads, rows, dim = shape
    drawn = [torch.randn(batch, rows, heads, dim, device="cuda", dtype=dtype) for _ in "qkv"]
    return [x.transpose(1, 2).requires_grad_(grad) for x in drawn]


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_an_operator_gives_what_our_own_call_gives(report, kernel, heads_first):
    q, k, v = qkv(2, 8, 300, 64, grad=True)
    if heads_first:
        q, k, v = (x.detach().contiguous().requires_grad_() for x in (q, k, v))
    op: Any = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    more = (None, True) if kernel == "cudnn" else ()
    got = gradients(op(q, k, v, *more, 0.0, True)[0], q, k, v)
    rows: Any = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    own = flash_attn_func(*rows, causal=True, deterministic=True)
    want = [x.transpose(1, 2) for x in gradients(own, *rows)]
    assert torch.equal(got[0], want[0])
    assert all(are_near(x, y) for x, y in zip(got, want, strict=True))
    assert [x.stride() for x in got[1:]] == [x.stride() for x in (q, k, v)]


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_results_lie_in_memory_as_torch_says(report, kernel, heads_first):
    from torch._subclasses.fake_tensor import FakeTensorMode

    op: Any = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    more = (None, True) if kernel == "cudnn" else ()
    q, k, v = qkv(2, 8, 300, 64)
    if heads_first:
        q, k, v = (x.contiguous() for x in (q, k, v))
    got = op(q, k, v, *more, 0.0, True)
    with FakeTensorMode() as mode:
        want = op(*(mode.from_tensor(x) for x in (q, k, v)), *more, 0.0, True)
    for x, y in zip(got, want, strict=True):
        if isinstance(y, Tensor):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_varlen_attn_is_our_own(report):
    from torch.nn.attention.varlen import varlen_attn

    bounds = torch.tensor([0, 100, 100, 350], device="cuda", dtype=torch.int32)
    q, k, v = (
        torch.randn(350, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    for window in ((-1, -1), (-1, 0), (64, 0)):
        out: Any = varlen_attn(q, k, v, bounds, bounds, 250, 250, window_size=window)
        own = flash_attn_varlen_func(q, k, v, bounds, bounds, 250, 250, window_size=window)
        assert torch.equal(out, own)
        pairs = zip(gradients(out, q, k, v), gradients(own, q, k, v), strict=True)
        assert all(are_near(x, y) for x, y in pairs)
    assert report.ours["_flash_attention_forward"] == report.ours["_flash_attention_backward"] == 3


@pytest.mark.parametrize("scope", ["activate", "sdpa"])
def test_dropout_draws_one_mask_in_both_directions(scope):
    """With the identity as values the output is the dropped probabilities."""
    q, k, _ = qkv(1, 2, 64, 64)
    v = torch.eye(64, device="cuda", dtype=q.dtype).expand(1, 2, 64, 64).clone().requires_grad_()
    with sdpa() if scope == "sdpa" else activated():
        outs = [F.scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2)]
        cotangent = torch.eye(64, device="cuda", dtype=q.dtype).expand_as(v)
        for out in outs:
            (dv,) = torch.autograd.grad(out, v, cotangent)
            assert torch.equal(dv == 0, out.mT == 0)
    assert not torch.equal(outs[0] == 0, outs[1] == 0)
    assert 0.4 < float((outs[0] == 0).float().mean()) < 0.6


class activated:
    """`activate` for a scope."""

    def __enter__(self) -> Report:
        return activate()

    def __exit__(self, *_) -> None:
        restore()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("scope", ["activate", "sdpa"])
def test_a_graph_replays_a_step(scope, dropout_p):
    q, k, v = qkv(2, 4, 65, 64, grad=True)

    def step() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
        return gradients(out, q, k, v)

    with sdpa() if scope == "sdpa" else activated() as report:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            results = step()
        seen = []
        for _ in range(2):
            graph.replay()
            seen.append([x.clone() for x in results])
        assert report.ours and not report.declined
        if dropout_p:
            assert not torch.equal(seen[0][0], seen[1][0])
            return
        assert torch.equal(seen[0][0], seen[1][0])
        assert all(are_near(x, y) for x, y in zip(seen[0], step(), strict=True))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("scope", ["activate", "sdpa"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_is_the_eager_one(scope, mode, heads_first):
    torch._dynamo.reset()
    x = torch.randn(2, 64, 8 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(3, 512, 512, device="cuda", dtype=torch.bfloat16) / 512**0.5

    def layer(x: Tensor) -> Tensor:
        q, k, v = ((x @ w).view(2, 64, 8, 64).transpose(1, 2) for w in weights)
        if heads_first:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out * 2).transpose(1, 2).reshape(2, 64, 512)

    with sdpa() if scope == "sdpa" else activated() as report:
        want = gradients(layer(x), x)
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        for _ in range(3):
            got = [y.clone() for y in gradients(compiled(x), x)]
        assert report.ours and not report.declined
    assert all(are_near(x, y) for x, y in zip(got, want, strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("scope", ["activate", "sdpa"])
def test_a_second_derivative_raises(scope):
    q, k, v = qkv(1, 2, 64, 64, grad=True)
    with sdpa() if scope == "sdpa" else activated():
        out = F.scaled_dot_product_attention(q, k, v)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="derivative|twice"):
            dq.sum().backward()


def test_restore_gives_torch_its_kernels_back():
    q, k, v = qkv(2, 8, 128, 64)
    before = F.scaled_dot_product_attention(q, k, v)
    report = activate()
    F.scaled_dot_product_attention(q, k, v)
    assert unmasked(report) == (1, 0)
    restore()
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)
    assert unmasked(report) == (1, 0)


def test_a_checkpointed_layer_computes_again_what_it_computed():
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv(2, 4, 65, 64, grad=True)

    def layer(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    with sdpa() as report:
        torch.manual_seed(1)
        want = gradients(layer(q, k, v), q, k, v)
        torch.manual_seed(1)
        got = gradients(checkpoint(layer, q, k, v, use_reentrant=False), q, k, v)
    assert all(are_near(x, y) for x, y in zip(got, want, strict=True))
    assert report.ours[NAME] >= 2 and not report.declined


SAMPLE = [call.name for call in CALLS[::27]]


@pytest.mark.parametrize("name", SAMPLE)
def test_calls_of_a_scope_are_ours_and_right(name):
    sdpa_calls.check(BY_NAME[name], "cuda", torch.bfloat16, DIM)


@pytest.mark.slow
@pytest.mark.parametrize("mask", sdpa_calls.MASKS)
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_every_call_of_a_scope_is_ours_and_right(rank, mask):
    chosen = [c for c in CALLS if (c.rank, c.mask) == (rank, mask)]
    wrong = {}
    for call in chosen:
        try:
            sdpa_calls.check(call, "cuda", torch.bfloat16, DIM)
        except Exception as error:
            wrong[call.name] = error
    assert len(chosen) == 36 and not wrong
