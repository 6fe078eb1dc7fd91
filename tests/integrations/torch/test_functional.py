"""`sdpa()`: calls that it takes are right, the others are torch's, counted with a reason."""

import threading
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from heedful.integrations.torch import sdpa
from heedful.integrations.torch.functional import NAME
from support.integrations import sdpa_calls

SAMPLE = [call.name for call in sdpa_calls.CALLS[::16]]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_call_and_its_gradients_are_within_their_budgets(name):
    sdpa_calls.check(sdpa_calls.BY_NAME[name], "cpu", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", sdpa_calls.BY_NAME)
def test_every_call_and_its_gradients_are_within_their_budgets(name):
    sdpa_calls.check(sdpa_calls.BY_NAME[name], "cpu", torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SAMPLE[::6])
def test_a_call_of_16_bits_is_within_its_budgets(name, dtype):
    sdpa_calls.check(sdpa_calls.BY_NAME[name], "cpu", dtype)


@pytest.mark.parametrize(
    "calls",
    [sdpa_calls.CALLS[::24], pytest.param(sdpa_calls.CALLS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_gpu_has_kernels_for_every_call_and_its_gradients(calls):
    pytest.importorskip("triton")
    from support.runs import standin

    with standin.gpu("H200") as gpu, sdpa() as report:
        for call in calls:
            given = call.draw("cpu", torch.bfloat16, 0, 64)
            dout = torch.zeros(sdpa_calls.plain(**given).shape)
            sdpa_calls.results(sdpa_calls.call_torch, given, dout)
    assert dict(report.ours) == {NAME: len(calls)} and not report.declined, str(report)
    assert len(gpu.launches) >= 3 * len(calls)


def test_there_are_more_than_448_calls():
    assert len(sdpa_calls.BY_NAME) == len(sdpa_calls.CALLS) == 864


@pytest.mark.parametrize("name", SAMPLE)
def test_the_formula_of_the_tests_is_torchs(name):
    """In float64, of which nothing but torch's own attention exists; but for rows without keys."""
    given = sdpa_calls.as_double(sdpa_calls.BY_NAME[name].draw("cpu", torch.float32, 0))
    mine, theirs = sdpa_calls.plain(**given), F.scaled_dot_product_attention(**given)
    torch.testing.assert_close(mine, theirs.nan_to_num())


def qkv(*shape: int, dtype=torch.float32) -> list[Tensor]:
    return [torch.randn(shape or (2, 4, 9, 16), dtype=dtype) for _ in range(3)]


OTHER_SHAPES = {
    "two dims": ((9, 16), (7, 16), (7, 8), None),
    "a mask of one dim": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), (7,)),
    "one batch of keys": ((3, 4, 9, 16), (1, 4, 7, 16), (1, 4, 7, 8), (3, 1, 9, 7)),
    "one batch of queries": ((1, 4, 9, 16), (3, 4, 7, 16), (3, 4, 7, 8), None),
    "one head of queries": ((2, 1, 9, 16), (2, 4, 7, 16), (2, 4, 7, 8), (4, 9, 7)),
    "one head of keys and values": ((2, 4, 9, 16), (2, 1, 7, 16), (2, 1, 7, 16), (1, 1)),
    "batches that broadcast": ((5, 1, 2, 9, 16), (1, 3, 2, 7, 16), (5, 3, 2, 7, 8), (3, 1, 9, 7)),
    "no rows": ((2, 4, 0, 16), (2, 4, 7, 16), (2, 4, 7, 16), None),
    "no keys": ((2, 4, 9, 16), (2, 4, 0, 16), (2, 4, 0, 16), None),
    "no batch": ((0, 4, 9, 16), (0, 4, 7, 16), (0, 4, 7, 16), None),
}


@pytest.mark.parametrize("shapes", OTHER_SHAPES.values(), ids=OTHER_SHAPES)
def test_shapes_broadcast_as_torchs_do(shapes):
    *of_qkv, of_mask = shapes
    q, k, v = (torch.randn(shape) for shape in of_qkv)
    mask = None if of_mask is None else torch.randn(of_mask)
    want = sdpa_calls.plain(q, k, v, mask)
    with sdpa() as report:
        got = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, want)
    assert report.ours[NAME] == 1, str(report)


DECLINED = {
    "float64": lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
    "a head dim of 520": lambda q, k, v: (qkv(1, 1, 3, 520), {}),
    "no head dim": lambda q, k, v: (qkv(1, 1, 3, 0), {}),
    "ranks": lambda q, k, v: ((q, k[0], v[0]), {}),
    "value heads": lambda q, k, v: ((q, k[:, :2], v[:, :1]), {"enable_gqa": True}),
    "a subclass": lambda q, k, v: ((_Seen(q), k, v), {}),
    "a mask of float64": lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(9, 9).double()}),
    "two masks": lambda q, k, v: ((q, k, v, torch.ones(9, 9) > 0), {"is_causal": True}),
}


@pytest.mark.parametrize("given", DECLINED.values(), ids=DECLINED)
def test_a_call_that_heedful_does_not_take_is_torchs_and_counted(given):
    args, more = given(*qkv())
    try:
        want = F.scaled_dot_product_attention(*args, **more)
    except (RuntimeError, ValueError) as error:
        want = error
    with sdpa() as report:
        if isinstance(want, Exception):
            with pytest.raises(type(want)) as raised:
                F.scaled_dot_product_attention(*args, **more)
            assert str(raised.value) == str(want)
        else:
            got = F.scaled_dot_product_attention(*args, **more)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert not report.ours and sum(report.declined.values()) == 1
    (reason,) = report.declined
    assert reason in str(report)


class _Seen(Tensor):
    """A subclass that sees calls of torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [a.as_subclass(Tensor) if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


WRONG = {
    "batch": lambda q, k, v: ((q, k[:1].expand(3, -1, -1, -1), v), {}),
    "mask": lambda q, k, v: ((q, k, v, torch.zeros(5, 9)), {}),
    "heads": lambda q, k, v: ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
    "probability": lambda q, k, v: ((q, k, v, None, 1.5), {}),
    "dtypes": lambda q, k, v: ((q, k.half(), v), {}),
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_a_wrong_call_gets_torchs_own_error(given):
    args, more = given(*qkv())
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        F.scaled_dot_product_attention(*args, **more)
    with sdpa() as report, pytest.raises(type(torchs.value)) as ours:
        F.scaled_dot_product_attention(*args, **more)
    assert str(ours.value) == str(torchs.value)
    assert not report.ours and report.declined


@pytest.mark.parametrize("rows, keys", [(9, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_one_of_ours(make, rows, keys):
    q, k, v = (torch.randn(2, 4, n, 16) for n in (rows, keys, keys))
    if make is causal_lower_right and rows > keys:
        with pytest.warns(UserWarning, match="NaN"):
            bias = make(rows, keys)
    else:
        bias = make(rows, keys)
    want = sdpa_calls.plain(q, k, v, bias._materialize())
    with sdpa() as report:
        got = F.scaled_dot_product_attention(q, k, v, bias)
    assert report.ours[NAME] == 1 and not report.declined
    torch.testing.assert_close(got, want)


def test_torchs_function_is_back_after_the_last_scope_and_after_an_error():
    before = F.scaled_dot_product_attention
    with pytest.raises(KeyError), sdpa():
        assert F.scaled_dot_product_attention is not before
        raise KeyError
    assert F.scaled_dot_product_attention is before


def test_scopes_nest_and_each_counts():
    q, k, v = qkv()
    with sdpa() as outer:
        F.scaled_dot_product_attention(q, k, v)
        with sdpa() as inner:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert (outer.ours[NAME], inner.ours[NAME]) == (3, 1)


def test_a_scope_that_another_thread_leaves_first_leaves_ours_in_place():
    q, k, v = qkv()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with sdpa():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with sdpa() as report:
        leave.set()
        thread.join()
        F.scaled_dot_product_attention(q, k, v)
    assert report.ours[NAME] == 1


def test_threads_lose_no_count():
    q, k, v = qkv(1, 1, 2, 4)

    def calls():
        for _ in range(200):
            F.scaled_dot_product_attention(q, k, v)

    with sdpa() as report:
        threads = [threading.Thread(target=calls) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert report.ours[NAME] == 800


def test_a_replacement_made_inside_of_a_scope_stays_and_may_be_undone_later():
    """Whoever replaced it last has it, and reaches torch's through ours."""
    q, k, v = qkv()
    torchs = F.scaled_dot_product_attention
    try:
        with sdpa() as report:
            ours = F.scaled_dot_product_attention
            theirs: Any = lambda *args: ours(*args)  # noqa: E731
            F.scaled_dot_product_attention = theirs
        assert F.scaled_dot_product_attention is theirs
        theirs(q, k, v)
        assert not report.ours
        F.scaled_dot_product_attention = ours
        with sdpa() as report:
            F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        assert F.scaled_dot_product_attention is torchs and report.declined
    finally:
        F.scaled_dot_product_attention = torchs


def test_modules_of_torch_run_ours():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 7, 32)
    want = layer(x)
    with sdpa() as report:
        got = layer(x)
    assert report.ours[NAME] == 1
    torch.testing.assert_close(got, want)


def test_autocast_casts_as_torch_does():
    q, k, v = qkv()
    mask = torch.randn(9, 9)
    mask_of_bools = mask > 0
    with torch.autocast("cpu", torch.bfloat16), sdpa() as report:
        for given in (mask, mask_of_bools, None):
            got = F.scaled_dot_product_attention(q, k.bfloat16(), v, given)
            assert got.dtype == torch.bfloat16
    assert report.ours[NAME] == 3


def test_a_dropped_call_draws_one_mask_in_both_directions():
    """With values of one column each, the output says which probabilities were dropped, and the
    gradient of the values says it too."""
    q, k, _ = qkv(1, 1, 16, 16)
    v = torch.eye(16)[None, None].requires_grad_()
    with sdpa() as report:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert report.ours[NAME] == 1
    (dv,) = torch.autograd.grad(out, v, torch.eye(16)[None, None])
    torch.testing.assert_close(dv, out.mT)
    assert 0 < (out == 0).sum() < out.numel()


def test_a_checkpointed_call_computes_again_what_it_computed():
    """With the dropout mask of the first time."""
    from torch.utils.checkpoint import checkpoint

    leaves = [t.requires_grad_() for t in qkv()]

    def layer(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    def gradients(function) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(function(*leaves).sum(), leaves)

    with sdpa() as report:
        want = gradients(layer)
        got = gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not report.declined


def test_a_second_derivative_raises():
    q, k, v = (t.requires_grad_() for t in qkv())
    with sdpa():
        out = F.scaled_dot_product_attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice|is not implemented"):
        dq.sum().backward()


def test_vmap_maps_a_call():
    q, k, v = qkv(3, 4, 9, 16)
    want = F.scaled_dot_product_attention(q, k, v)
    with sdpa() as report:
        got = torch.vmap(F.scaled_dot_product_attention)(q, k, v)
    torch.testing.assert_close(got, want)
    assert report.ours[NAME] == 1


def test_fake_tensors_have_the_shape_of_the_output():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), sdpa() as report:
        q, k, v = qkv()
        out = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2, :, :8], enable_gqa=True)
    assert out.shape == (2, 4, 9, 8) and report.ours[NAME] == 1


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "learned"])
def test_a_compiled_call_is_one_graph_and_counts_where_it_is_traced(dynamo, mask):
    call = sdpa_calls.BY_NAME[f"rank4-gqa-more-{mask}-dv"]
    compiled = torch.compile(sdpa_calls.call_torch, backend="aot_eager", fullgraph=True)
    sdpa_calls.check(call, "cpu", torch.float32, function=compiled)
    with sdpa() as report:
        sdpa_calls.results(compiled, call.draw("cpu", torch.float32, 1), torch.zeros(2, 4, 11, 8))
    assert not report.ours and not report.declined


def test_code_compiled_outside_of_a_scope_is_compiled_anew_inside_and_back(dynamo):
    q, k, v = qkv()
    compiled = torch.compile(sdpa_calls.call_torch, backend="aot_eager", fullgraph=True)
    given = {"query": q, "key": k, "value": v}
    want = compiled(**given)
    with sdpa() as report:
        got = compiled(**given)
        assert report.ours[NAME] == 1
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(compiled(**given), want, rtol=0, atol=0)
    assert report.ours[NAME] == 1
