"""Through torch's dispatcher: torch.compile, functorch, fake tensors, autocast."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import heedful.torch as heedful
from heedful.core.call.operands import Operands
from heedful.torch.traced import private
from support.problems.grids import in_turns, slow_but

ATTENTION = torch.ops.heedful.attention_v10.default
ABSENT = (None,) * (len(Operands._fields) - 3)


def inputs(*shapes, grad=True) -> Any:
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def dense(length=5, grad=True) -> Any:
    return inputs((2, length, 4, 16), (2, length + 2, 2, 16), (2, length + 2, 2, 8), grad=grad)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def compiled(function) -> Callable[..., Any]:
    """Whole graph, dynamic shapes. aot_eager traces and functionalises as inductor does, and needs
    no C++ compiler."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")


def assert_same(got, want) -> None:
    """Both went through the same kernels on the same numbers."""
    got, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1, 1), "softcap": 5.0},
    "lse": {"return_lse": True},
    "probs": {"return_attn_probs": True},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
    "alibi": {"alibi_slopes": torch.rand(4)},
    "scale": {"softmax_scale": 0.2, "deterministic": True},
}


@pytest.mark.parametrize("keywords", in_turns(CALLS.values(), each=4), ids=CALLS)
def test_compiled_calls_give_what_eager_calls_give_at_any_length(keywords):
    keywords = keywords | {"backend": "cpu"}

    def attention(q, k, v):
        return heedful.flash_attn_func(q, k, v, **keywords)

    function = compiled(attention)
    for length in (5, 9, 6):
        tensors = dense(length)
        assert_same(function(*tensors), attention(*tensors))


def test_compiled_gradients_are_the_eager_gradients():
    bias, sink = torch.randn(1, 4, 1, 7, requires_grad=True), torch.randn(4, requires_grad=True)
    tensors = [*dense(), bias, sink]

    def loss(q, k, v, bias, sink):
        keywords = {"bias": bias, "sink": sink, "causal": True, "return_lse": True}
        out, lse = heedful.flash_attn_func(q, k, v, **keywords)
        return (out.square().sum() + lse.sum()) * 2

    want = torch.autograd.grad(loss(*tensors), tensors)
    assert_same(torch.autograd.grad(compiled(loss)(*tensors), tensors), want)


def test_new_lengths_do_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: heedful.flash_attn_func(q, k, v, causal=True),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    function(*dense(5, grad=False))
    compilations = counter.frame_count
    for length in (9, 6, 17):
        function(*dense(length, grad=False))
    assert counter.frame_count == compilations > 0


def test_compiled_varlen_calls_give_what_eager_calls_give():
    def attention(q, k, v, bounds, longest: int):
        return heedful.flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest, causal=True, return_lse=True
        )

    function = compiled(attention)
    for lengths in ((3, 4), (1, 9), (0, 2)):
        bounds, total = ints(0, lengths[0], sum(lengths)), sum(lengths)
        tensors = inputs((total, 4, 16), (total, 2, 16), (total, 2, 16))
        q, k, v = tensors
        want = attention(q, k, v, bounds, max(lengths))
        got = function(q, k, v, bounds, max(lengths))
        assert_same(got, want)
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out, _ in (got, want)]
        assert_same(*grads)


@pytest.mark.parametrize("paged", slow_but({True}, (False, True)), ids=["contiguous", "paged"])
def test_a_compiled_decoding_step_updates_the_cache_in_place(paged):
    def step(q, k_cache, v_cache, k, v, cos, sin, lengths, table):
        return heedful.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cos,
            sin,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
        )

    shape = (7, 4, 2, 16) if paged else (2, 12, 2, 16)
    table = ints(5, 0, 3, 1, 4, 2).view(2, 3) if paged else None
    eager_caches = torch.randn(shape), torch.randn(shape)
    caches = tuple(cache.clone() for cache in eager_caches)
    tables = torch.randn(12, 4), torch.randn(12, 4)
    function = compiled(step)
    for i in range(3):
        new = inputs((2, 1, 4, 16), (2, 1, 2, 16), (2, 1, 2, 16), grad=False)
        rest: Any = (*new[1:], *tables, ints(3 + i, 7 + i), table)
        want = step(new[0], *eager_caches, *rest)
        assert_same(function(new[0], *caches, *rest), want)
    assert_same(caches, eager_caches)


def test_a_compiled_step_checks_an_int_length_and_takes_any():
    cache = torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8)
    new = torch.ones(1, 1, 1, 8)

    def step(new, k_cache, v_cache, length: int):
        return heedful.flash_attn_with_kvcache(
            new, k_cache, v_cache, new, new, cache_seqlens=length
        )

    function = compiled(step)
    for length in (0, 3, 5):
        function(new, *cache, length)
        assert torch.equal(cache[0][:, length], new[:, 0])
    with pytest.raises(Exception, match="cache_seqlens must lie within the cache"):
        function(new, *cache, 6)


def test_compiled_packed_and_merged_calls_give_what_eager_calls_give():
    def both(qkv, sink):
        out, lse = heedful.flash_attn_qkvpacked_func(qkv, causal=True, return_lse=True)
        outs, lses = torch.stack([out, 2 * out]), torch.stack([lse, lse + 1])
        return heedful.merge_attn_states(outs, lses, sink)

    qkv, sink = inputs((2, 5, 3, 4, 16), (4,))
    got, want = compiled(both)(qkv, sink), both(qkv, sink)
    assert_same(got, want)
    assert_same(*(torch.autograd.grad(out.square().sum(), (qkv, sink)) for out, _ in (got, want)))


def test_a_compiled_call_draws_a_new_mask_each_time():
    q, k, v = dense(grad=False)
    function = compiled(lambda q, k, v: heedful.flash_attn_func(q, k, v, 0.5))
    first, second = function(q, k, v), function(q, k, v)
    assert not torch.equal(first, second)


def test_a_bad_call_under_compile_says_what_is_wrong():
    q, k, v = dense(grad=False)
    with pytest.raises(Exception, match="num_splits must be >= 0, got -1"):
        compiled(lambda q, k, v: heedful.flash_attn_func(q, k, v, num_splits=-1))(q, k, v)


def test_inductor_runs_the_operator():
    """The default backend of torch.compile; nothing here asks it for C++."""
    torch._dynamo.reset()
    q, k, v = dense()
    function = torch.compile(heedful.flash_attn_func, fullgraph=True)
    assert_same(function(q, k, v, causal=True), heedful.flash_attn_func(q, k, v, causal=True))


def operator_arguments(kind: str) -> tuple:
    options = (
        0.0,
        None,
        True,
        (-1, -1),
        0.0,
        False,
        False,
        True,
        False,
        0,
        None,
        None,
        (0, 0, 0, 0),
    )
    if kind == "dense":
        return (*dense(), *ABSENT, "dense", None, None, *options, True)
    tensors = inputs((5, 4, 16), (7, 2, 16), (7, 2, 8))
    if kind == "varlen":
        lengths = (*(None,) * 4, ints(0, 2, 5), ints(0, 3, 7), *(None,) * 18)
        return (*tensors, *lengths, "varlen", 3, 4, *options, True)
    bias, sink, seed = torch.randn(5, 7, requires_grad=True), *inputs((4,)), torch.tensor([3])
    relative = torch.randn(4, 9, requires_grad=True)
    extras = (bias, relative, torch.rand(4), sink, *(None,) * 14, seed, *(None,) * 5)
    return (*dense(), *extras, "dense", None, None, 0.3, *options[1:], True)


@pytest.mark.parametrize("kind", ["dense", "varlen", "everything"])
def test_the_operator_passes_opcheck(kind):
    torch.library.opcheck(ATTENTION, operator_arguments(kind))


@pytest.mark.parametrize(
    ("overload", "options"),
    [("default", ()), ("default", (True,)), ("options", (0.3, True, (2, 0), 1.5, 1, "cpu"))],
)
def test_the_inference_operators_pass_opcheck(overload, options):
    op = getattr(torch.ops.heedful.inference_v10, overload)
    torch.library.opcheck(op, (*dense(grad=False), *options))


def graph_of(function, *args) -> str:
    """The operators that a compiled function calls."""
    graphs = []

    def keep(module, _):
        graphs.append(str(module.graph))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=keep)(*args)
    (graph,) = graphs
    return graph


def test_a_compiled_call_for_the_output_alone_passes_few_arguments():
    q, k, v = dense(grad=False)
    causal = partial(heedful.flash_attn_func, causal=True)
    for function in (heedful.flash_attn_func, causal):
        assert "heedful.inference_v10.default" in graph_of(function, q, k, v)
        assert "heedful.inference_v10" not in graph_of(function, *dense())
    capped = partial(heedful.flash_attn_func, softcap=2.0)
    assert "heedful.inference_v10.options" in graph_of(capped, q, k, v)
    others: list[dict[str, Any]] = [
        {"return_lse": True},
        {"sink": torch.zeros(4)},
        {"dropout_p": 0.5},
    ]
    for more in others:
        assert "heedful.inference_v10" not in graph_of(
            partial(heedful.flash_attn_func, **more), q, k, v
        )


def test_the_inference_operator_runs_under_vmap_and_autocast_when_compiled():
    q, k, v = dense(grad=False)

    def attention(q, k, v):
        return heedful.flash_attn_func(q, k, v, causal=True)

    many = [torch.stack([t, 2 * t]) for t in (q, k, v)]
    assert_same(compiled(torch.func.vmap(attention))(*many), torch.func.vmap(attention)(*many))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(compiled(attention)(q, k, v), attention(q, k, v))
        low = torch.ops.heedful.inference_v10(q, k, v)
    assert low.dtype == torch.bfloat16


def test_the_backward_operator_passes_opcheck():
    given = operator_arguments("dense")[:-1]
    args = [t.detach() if isinstance(t, torch.Tensor) else t for t in given]
    out, lse, _ = ATTENTION(*args, False)
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    op = torch.ops.heedful.attention_v10_backward.default
    for kv_grad in (True, False):
        wanted = (False, False, kv_grad)
        torch.library.opcheck(op, (*cotangents, out, lse, *args, *wanted), test_utils=tests)


def test_fake_tensors_get_shapes_without_running():
    with FakeTensorMode():
        q, k, v = dense(grad=False)
        out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == (2, 5, 4, 8) and lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_a_fake_decoding_step_gets_shapes_without_running():
    with FakeTensorMode():
        q, k_cache, v_cache, k, v = inputs(
            (2, 1, 4, 16), (2, 8, 2, 16), (2, 8, 2, 8), (2, 1, 2, 16), (2, 1, 2, 8), grad=False
        )
        tables = torch.randn(8, 4), torch.randn(8, 4)
        lengths = torch.zeros(2, dtype=torch.int32)
        out, lse = heedful.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, *tables, cache_seqlens=lengths, return_softmax_lse=True
        )
        with pytest.raises(ValueError, match="softcap"):
            heedful.flash_attn_with_kvcache(q, k_cache, v_cache, softcap=-1.0)
    assert out.shape == (2, 1, 4, 8) and lse.shape == (2, 4, 1)


def test_meta_tensors_get_shapes_without_running():
    q, k, v = (t.to("meta") for t in dense(grad=False))
    assert heedful.flash_attn_func(q, k, v).shape == (2, 5, 4, 8)


def test_a_second_backward_of_the_operator_raises():
    args = operator_arguments("dense")
    out, _, _ = ATTENTION(*args)
    (dq,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


KEYWORDS: list[dict[str, Any]] = [
    {"causal": True},
    {"alibi_slopes": torch.rand(4)},
    {"bias": torch.randn(5, 7)},
    {"dropout_p": 0.5, "dropout_seed": 3},
]


@pytest.mark.parametrize("keywords", KEYWORDS, ids=lambda keywords: next(iter(keywords)))
def test_vmap_is_the_call_on_each_element(keywords):
    q, k, v = inputs((3, 2, 5, 4, 16), (2, 7, 3, 2, 16), (2, 7, 2, 8), grad=False)

    def attention(q, k, v):
        return heedful.flash_attn_func(q, k, v, **keywords, backend="cpu", return_lse=True)

    got = torch.func.vmap(attention, in_dims=(0, 2, None))(q, k, v)
    if "dropout_p" in keywords:
        # Each element draws the mask of its own call.
        alone = [attention(q[i], k[:, :, i], v) for i in range(3)]
        want = [torch.stack(parts) for parts in zip(*alone, strict=True)]
    else:
        joined: Any = (q, k.movedim(2, 0), v.expand(3, -1, -1, -1, -1))
        q, k, v = (t.flatten(0, 1) for t in joined)
        together = attention(q, k, v)
        want = [part.unflatten(0, (3, 2)) for part in together]
    assert_same(got, want)


def test_vmap_over_packed_sequences_is_the_call_on_each_element():
    q, k, v = inputs((3, 5, 4, 16), (3, 5, 2, 16), (3, 5, 2, 8), grad=False)
    bounds = ints(0, 2, 5)

    def attention(q, k, v):
        return heedful.flash_attn_varlen_func(q, k, v, bounds, bounds, 3, 3)

    want = torch.stack([attention(*one) for one in zip(q, k, v, strict=True)])
    assert torch.equal(torch.func.vmap(attention)(q, k, v), want)


@pytest.mark.parametrize("extra", ["", "bias", "sink"])
def test_per_sample_gradients_are_the_gradients_of_each_sample(extra):
    q, k, v = inputs((3, 2, 5, 4, 16), (3, 2, 7, 2, 16), (3, 2, 7, 2, 8), grad=False)
    shapes = {"": (3, 1), "bias": (3, 5, 7), "sink": (3, 4)}
    more = torch.randn(shapes[extra])

    def loss(q, k, v, more):
        keywords: dict[str, Any] = {extra: more} if extra else {}
        out, lse = heedful.flash_attn_func(q, k, v, causal=True, return_lse=True, **keywords)
        return out.square().sum() + lse.sum()

    wanted = (0, 1, 2, 3) if extra else (0, 1, 2)
    gradients = torch.func.grad(loss, argnums=wanted)
    got = torch.func.vmap(gradients)(q, k, v, more)
    if extra:
        alone = [gradients(*one) for one in zip(q, k, v, more, strict=True)]
        want = [torch.stack(parts) for parts in zip(*alone, strict=True)]
    else:
        # Nothing sums over the batch, so that the samples may join it.
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        together = gradients(q, k, v, more)
        want = [part.unflatten(0, (3, 2)) for part in together]
    assert_same(got, want)


@pytest.mark.parametrize("shared", ["bias", "sink"])
def test_gradients_of_what_samples_share_are_those_of_each_sample(shared):
    """They sum over a call's batch, which other samples are not to join."""
    q, k, v = inputs((3, 2, 5, 4, 16), (3, 2, 7, 2, 16), (3, 2, 7, 2, 8), grad=False)
    more = torch.randn({"bias": (5, 7), "sink": (4,)}[shared])

    def loss(q, k, v, more):
        out, lse = heedful.flash_attn_func(q, k, v, return_lse=True, **{shared: more})
        return out.square().sum() + lse.sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    got = torch.func.vmap(gradients, in_dims=(0, 0, 0, None))(q, k, v, more)
    alone = [gradients(*one, more) for one in zip(q, k, v, strict=True)]
    assert_same(got, [torch.stack(parts) for parts in zip(*alone, strict=True)])


@pytest.mark.parametrize("square", [False, True])
def test_nested_functorch_gradients_raise(square):
    q, k, v = dense(grad=False)

    def loss(q):
        out = heedful.flash_attn_func(q, k, v)
        return (out.square() if square else out).sum()

    def penalty(q):
        return torch.func.grad(loss)(q).square().sum()

    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.func.grad(penalty)(q)


def test_random_dropout_inside_vmap_follows_its_randomness():
    q, k, v = inputs(*[(3, 1, 6, 1, 8)] * 3, grad=False)
    same = q[:1].expand_as(q), k[:1].expand_as(k), v[:1].expand_as(v)

    def attention(q, k, v):
        return heedful.flash_attn_func(q, k, v, 0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(attention)(*same)
    out = torch.func.vmap(attention, randomness="different")(*same)
    assert not torch.equal(out[0], out[1])
    out = torch.func.vmap(attention, randomness="same")(*same)
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("way", ["eager", "operator", "compiled"])
def test_autocast_casts_q_k_v_and_bias(way):
    q, k, v = dense()
    bias, sink = torch.randn(5, 7), torch.randn(4)
    low = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]

    def attention(q, k, v, bias):
        return heedful.flash_attn_func(q, k, v, bias=bias, sink=sink, backend="cpu")

    want = attention(low[0], low[1], low[2], bias.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if way == "operator":
            options = (
                0.0,
                None,
                False,
                (-1, -1),
                0.0,
                False,
                False,
                True,
                False,
                0,
                None,
                "cpu",
                (0, 0, 0, 0),
                True,
            )
            extras = (bias, None, None, sink, *ABSENT[4:])
            got = ATTENTION(q, k, v, *extras, "dense", None, None, *options)[0]
        else:
            got = (compiled(attention) if way == "compiled" else attention)(q, k, v, bias)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    grads = torch.autograd.grad(got.float().square().sum(), (q, k, v))
    wanted = torch.autograd.grad(want.float().square().sum(), low)
    assert all(a.dtype == torch.float32 for a in grads)
    assert_same([a.bfloat16() for a in grads], wanted)


def test_autocast_leaves_the_cache_and_casts_to_it():
    k_cache, v_cache = torch.randn(2, 8, 2, 16).half(), torch.randn(2, 8, 2, 16).half()
    q, k, v = inputs((2, 1, 4, 16), (2, 1, 2, 16), (2, 1, 2, 16), grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = heedful.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)
    assert out.dtype == torch.float16 and torch.equal(k_cache[:, 3], k.half()[:, 0])


def test_activation_checkpointing_repeats_the_same_mask():
    q, k, v = dense()

    def attention(q, k, v):
        return heedful.flash_attn_func(q, k, v, 0.5)

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        if checkpointed:
            out = checkpoint(attention, q, k, v, use_reentrant=False)
        else:
            out = attention(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert_same(*results)


def test_forward_mode_differentiation_says_that_it_is_not_there():
    q, k, v = dense(grad=False)
    with pytest.raises(RuntimeError, match="(?i)forward"):
        torch.func.jvp(lambda q: heedful.flash_attn_func(q, k, v), (q,), (q,))


def test_files_of_all_modules_are_not_looked_for_when_an_operator_is_registered(monkeypatch):
    known, registered = {}, []
    monkeypatch.setattr(inspect, "modulesbyfile", known)
    monkeypatch.setattr(torch.library, "register_fake", lambda *given: registered.append(given))
    private.register_fake("some", max)
    frames = torch.library, private
    assert known == {inspect.getabsfile(module): module.__name__ for module in frames}
    assert registered == [("heedful::some", max)]
