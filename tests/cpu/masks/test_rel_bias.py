"""A bias by relative position is the dense bias that is gathered from it, and its gradient the sum
of that one's."""

from typing import Any

import pytest
import torch

import heedful.torch as heedful
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.cpu import tiled_backward
from heedful.launch.program import buffers
from heedful.launch.program.programs import program
from heedful.masks import t5_bias
from heedful.torch.eager.calls import CALLS
from support.runs.api import compiled

SIZES = [(1, 7), (5, 9), (40, 40), (70, 33), (33, 300)]


def inputs(*shapes) -> Any:
    values = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=values, requires_grad=True) for shape in shapes]


def gathered(rel_bias: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """(heads, rows, keys): entry i + off - j + center, or the first or the last."""
    count = rel_bias.shape[1]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None]
    entry = i + (keys - rows) - j + count // 2
    return rel_bias[:, entry.clamp(0, count - 1)]


def gathered_sum(of_scores: torch.Tensor, rel_bias, rows: int, keys: int) -> torch.Tensor:
    """The float64 gradient of rel_bias from that of the bias that is gathered from it."""
    leaf = rel_bias.detach().double().requires_grad_()
    (total,) = torch.autograd.grad(gathered(leaf, rows, keys), leaf, of_scores.sum(0))
    return total


@pytest.mark.parametrize("rows, keys", SIZES)
@pytest.mark.parametrize("count", [1, 2, 9, 1000])
def test_a_call_gives_what_its_dense_bias_gives(rows, keys, count):
    q, k, v = inputs((2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    rel_bias = torch.randn(4, count, requires_grad=True)
    bias = gathered(rel_bias.detach(), rows, keys).expand(2, -1, -1, -1).requires_grad_()
    results = []
    for name, leaf in (("rel_bias", rel_bias), ("bias", bias)):
        arguments: Any = {"causal": True, "softcap": 3.0, "return_lse": True, name: leaf}
        out, lse = heedful.flash_attn_func(q, k, v, **arguments)
        loss = (out.double() ** 2).sum() + lse[lse > -torch.inf].double().sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v, leaf))))
    *alike, got = results[0]
    *wanted, of_scores = results[1]
    assert all(torch.equal(a, b) for a, b in zip(alike, wanted, strict=True))
    # The same gradients of scores, added up in float64; a float32 sum of n terms has an error of at
    # most n eps of the sum of their magnitudes.
    exact = gathered_sum(of_scores.double(), rel_bias, rows, keys)
    sizes = gathered_sum(of_scores.double().abs(), rel_bias, rows, keys)
    terms = 2 * rows * torch.finfo(torch.float32).eps
    assert ((got - exact).abs() <= terms * sizes).all()


@pytest.mark.parametrize("value, words", [
    (torch.zeros(4), r"rel_bias must be \(heads_q, distances\), got shape \(4,\)"),
    (torch.zeros(3, 9), r"rel_bias must have shape \(heads_q, distances\) = \(4, 9\)"),
    (torch.zeros(4, 0), "rel_bias must have an entry for at least one distance"),
])  # fmt: skip
def test_a_wrong_shape_is_refused(value, words):
    q, k, v = inputs((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    with pytest.raises(ValueError, match=words):
        heedful.flash_attn_func(q, k, v, rel_bias=value)
    with pytest.raises(TypeError, match="rel_bias must be float16 or bfloat16 or float32"):
        heedful.flash_attn_func(q, k, v, rel_bias=torch.zeros(4, 9, dtype=torch.int32))


def test_no_gradient_is_lost_where_the_bias_alone_wants_one():
    q, k, v = (t.detach() for t in inputs((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)))
    rel_bias = torch.randn(4, 9, requires_grad=True)
    for _ in range(2):
        out = heedful.flash_attn_func(q, k, v, rel_bias=rel_bias)
        (grad,) = torch.autograd.grad(out.square().sum(), rel_bias)
        assert grad.shape == rel_bias.shape and grad.abs().sum() > 0
    CALLS.clear()


def backward_functions(**facts) -> set[str]:
    """The kernels and workspaces of a backward with rel_bias on an H200."""
    problem = AttentionProblem.dense(2, 256, 256, 4, 4, 64, rel_bias=True, needs_grad=True, **facts)
    chosen = plan(problem, by_name("H200"))
    made = program(chosen, "backward", buffers.backward(problem))
    names = {call.kernel.function.rsplit(".")[-1] for call in made.calls}
    return names | {workspace.name for workspace in made.workspaces}


def test_kernels_and_memory_of_its_gradient_come_only_where_it_is_asked_for():
    of_gradient = {"diagonal_sums", "relative_gradients"}
    assert backward_functions(rel_bias_grad=True) >= of_gradient
    assert not backward_functions() & of_gradient


def test_its_gradient_is_computed_only_where_it_is_asked_for(monkeypatch):
    q, k, v = inputs((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    rel_bias, added = torch.randn(4, 9), []
    add = tiled_backward._BlockBackward._add_relative
    monkeypatch.setattr(
        tiled_backward._BlockBackward,
        "_add_relative",
        lambda *given: added.append(None) or add(*given),
    )

    def call(q, rel_bias):
        return heedful.flash_attn_func(q, k, v, rel_bias=rel_bias, return_lse=True)

    out, lse = call(q, rel_bias)
    (alone,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    of_functions = torch.func.grad(lambda q: call(q, rel_bias)[0].sum())(q.detach())
    given: Any = [t.detach() for t in (torch.ones_like(out), q, k, v, out, lse)]
    left_out = heedful.attention_backward(*given, rel_bias=rel_bias, rel_bias_grad=False)
    assert not added and left_out.drel_bias is None
    asked: Any = heedful.attention_backward(*given, rel_bias=rel_bias)
    assert added and asked.drel_bias.shape == rel_bias.shape
    assert all(torch.equal(t, asked.dq) for t in (alone, of_functions, left_out.dq))
    CALLS.clear()


def test_a_compiled_call_and_transforms_give_what_the_eager_call_gives():
    q, k, v = (t.detach() for t in inputs((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)))
    rel_bias = torch.randn(4, 9, requires_grad=True)

    def loss(rel_bias, q):
        return heedful.flash_attn_func(q, k, v, rel_bias=rel_bias).square().sum()

    want = torch.autograd.grad(loss(rel_bias, q), rel_bias)[0]
    assert torch.equal(torch.autograd.grad(compiled(loss)(rel_bias, q), rel_bias)[0], want)
    assert torch.equal(torch.func.grad(loss)(rel_bias.detach(), q), want)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(rel_bias.detach(), torch.stack([q, q]))
    assert torch.equal(each, torch.stack([want, want]))


def bucket_of_t5(place: int, count: int, most: int, bidirectional: bool) -> int:
    """The bucket of a key that is `place` after its query, as the paper's code has it."""
    bucket, n = 0, -place
    if bidirectional:
        count //= 2
        bucket, n = (count, abs(n)) if place > 0 else (0, n)
    n = max(n, 0)
    exact = count // 2
    if n < exact:
        return bucket + n
    steps = torch.log(torch.tensor(float(n)) / exact) / torch.log(torch.tensor(most / exact))
    return bucket + min(exact + int(steps * (count - exact)), count - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("count, most", [(32, 128), (8, 20)])
def test_the_buckets_of_t5_are_expanded_to_distances(bidirectional, count, most):
    weight = torch.randn(count, 3, requires_grad=True)
    made = t5_bias(weight, bidirectional, most)
    assert made.shape == (3, 2 * most + 1)
    dense = gathered(made, 300, 300)
    for i, j in [(0, 0), (0, 299), (299, 0), (5, 9), (9, 5), (200, 190), (100, 190), (128, 0)]:
        bucket = bucket_of_t5(j - i, count, most, bidirectional)
        assert torch.equal(dense[:, i, j], weight[bucket]), (i, j)
    dense.sum().backward()
    assert weight.grad is not None and weight.grad.sum() == 3 * 300 * 300


def test_buckets_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="weight must have an even number of at least 4 buckets"):
        t5_bias(torch.zeros(7, 2))
    with pytest.raises(ValueError, match="weight must have at least 2 buckets, got 1"):
        t5_bias(torch.zeros(1, 2), bidirectional=False)
    with pytest.raises(ValueError, match="max_distance must be > 8"):
        t5_bias(torch.zeros(32, 2), max_distance=8)
    with pytest.raises(TypeError, match="weight must be a torch.Tensor or a jax.Array"):
        t5_bias([[0.0]])


@pytest.mark.parametrize("paged", [False, True])
def test_a_cached_call_gives_what_its_last_rows_give_in_a_dense_one(paged):
    q, k, v = (t.detach() for t in inputs((2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16)))
    rel_bias = torch.randn(4, 9)
    want = heedful.flash_attn_func(q, k, v, causal=True, rel_bias=rel_bias)[:, 37:]
    lengths, more = torch.tensor([40, 40], dtype=torch.int32), {}
    if paged:
        k, v = (t.reshape(10, 8, 2, 16) for t in (k, v))
        more = {"block_table": torch.arange(10, dtype=torch.int32).view(2, 5)}
    cached = {"cache_seqlens": lengths, "causal": True, "rel_bias": rel_bias, **more}
    for _ in range(2):
        got = heedful.flash_attn_with_kvcache(q[:, 37:], k, v, **cached)
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="shared_prefix must be None beside rel_bias"):
        prefix = k[0, :4], v[0, :4]
        heedful.flash_attn_with_kvcache(q[:, 37:], k, v, **cached, shared_prefix=prefix)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [0, -3, 200])
def test_the_diagonal_of_q_offset_is_that_of_the_bias(offset, causal):
    q, k, v = (t.detach() for t in inputs((1, 20, 4, 16), (1, 31, 2, 16), (1, 31, 2, 16)))
    rel_bias = torch.randn(4, 25)
    i, j = torch.arange(20)[:, None], torch.arange(31)[None]
    dense = rel_bias[:, (i + offset - j + 12).clamp(0, 24)]
    more: Any = {"causal": causal, "q_offset": offset}
    got = heedful.flash_attn_func(q, k, v, rel_bias=rel_bias, **more)
    assert torch.equal(got, heedful.flash_attn_func(q, k, v, bias=dense, **more))
