"""torch.compile over torch.func: whatever transforms a call, compiled or not, it stays the call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

import heedful.torch as heedful
from support.problems.grids import in_turns

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
BOUNDS = torch.tensor((0, 2, 5), dtype=torch.int32)


def forward(q, k, v, bias):
    return heedful.flash_attn_func(q, k, v, causal=True)


def options(q, k, v, bias):
    return heedful.flash_attn_func(q, k, v, window_size=(2, 0), softcap=3.0)


def lse(q, k, v, bias):
    return heedful.flash_attn_func(q, k, v, causal=True, return_lse=True)


def varlen(q, k, v, bias):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bounds = (BOUNDS, BOUNDS, 3, 3)
    return heedful.flash_attn_varlen_func(q, k, v, *bounds, causal=True, return_lse=True)


def biased(q, k, v, bias):
    return heedful.flash_attn_func(q, k, v, bias=bias, sink=bias[0, :2])


CALLS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "options": options,
    "lse": lse,
    "varlen": varlen,
    "bias": biased,
}
ALL = (0, 1, 2, 3)


def samples(*lead: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and a bias."""
    shapes = ((1, 5, 2, 8), (1, 5, 1, 8), (1, 5, 1, 4), (5, 5))
    return tuple(torch.randn(*lead, *shape) for shape in shapes)


def weighted(call) -> Callable[..., torch.Tensor]:
    """A scalar whose cotangents are numbers of the test, equal to the last bit whoever computes
    them. (Sums of what a call returns differ between compilers.)"""

    def loss(*tensors):
        parts = call(*tensors)
        parts = parts if isinstance(parts, tuple) else (parts,)
        total = torch.zeros(())
        for part in parts:
            weights = torch.arange(1.0, part.numel() + 1).view(part.shape)
            total = total + (part * weights).sum()
        return total

    return loss


class Layer(torch.nn.Module):
    """Keys, values and a bias as parameters."""

    def __init__(self, call, k, v, bias):
        super().__init__()
        self.call = call
        self.k, self.v, self.bias = (torch.nn.Parameter(x) for x in (k, v, bias))

    def forward(self, q):
        return self.call(q, self.k, self.v, self.bias)


def of_parameters(call):
    """Gradients by a layer's parameters, as in torch's tutorials on per-sample gradients."""
    layer = Layer(call, *samples()[1:])

    def loss(q, k, v, bias):
        given = {"k": k, "v": v, "bias": bias}
        return weighted(lambda q: functional_call(layer, given, (q,)))(q)

    return grad(loss, ALL)


# From a call to (its transform, how many samples it takes; none for one without a samples' dim).
TRANSFORMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "grad": (lambda call: grad(weighted(call), ALL), ()),
    "vmap": (vmap, (3,)),
    "vmap-grad": (lambda call: vmap(grad(weighted(call), ALL)), (3,)),
    "grad-vmap": (lambda call: grad(weighted(vmap(call)), ALL), (3,)),
    "jacrev": (lambda call: jacrev(call, ALL), ()),
    "functional-call": (of_parameters, ()),
    "vmap-functional-call": (lambda call: vmap(of_parameters(call)), (3,)),
}


def leaves(tree) -> list[torch.Tensor]:
    return tree_leaves(tree)


def assert_same(got, want) -> None:
    got, want = leaves(got), leaves(want)
    assert any(w.any() for w in want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def compiled(function, backend, fullgraph=True) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


# A tenth of all transforms of all calls, the two backends in turns; graphs that break are slow.
SQUARE = [f"{transform} {call}" for transform in TRANSFORMS for call in CALLS]
BROKEN = pytest.param(False, marks=pytest.mark.slow)


@pytest.mark.parametrize("fullgraph", [True, BROKEN], ids=["fullgraph", "graphs"])
@pytest.mark.parametrize("which, backend", in_turns(SQUARE, ("eager", "aot_eager"), each=10))
def test_a_compiled_transform_gives_what_it_gives_uncompiled(which, backend, fullgraph):
    name, call = which.split()
    (transform, lead), call = TRANSFORMS[name], CALLS[call]
    if transform is TRANSFORMS["jacrev"][0] and call in (lse, varlen) and TORCH < (2, 13):
        pytest.skip("Dynamo raises on jacrev of two outputs, whatever computes them")
    tensors = samples(*lead)
    function = transform(call)
    assert_same(compiled(function, backend, fullgraph)(*tensors), function(*tensors))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_transform_gives_what_autograd_gives(call):
    tensors = samples()
    leaf = [t.clone().requires_grad_() for t in tensors]
    want = torch.autograd.grad(weighted(call)(*leaf), leaf, materialize_grads=True)
    assert_same(grad(weighted(call), ALL)(*tensors), want)
    assert_same(of_parameters(call)(*tensors), want)
    outs, jacobians = leaves(call(*leaf)), leaves(jacrev(call, ALL, chunk_size=1)(*tensors))
    for out, own in zip(outs, zip(*[iter(jacobians)] * 4, strict=True), strict=True):
        rows = [
            torch.autograd.grad(x, leaf, retain_graph=True, materialize_grads=True)
            for x in out.flatten()
        ]
        for got, parts in zip(own, zip(*rows, strict=True), strict=True):
            assert torch.equal(got, torch.stack(parts).view_as(got))


@pytest.mark.parametrize("call", [forward, lse])
@pytest.mark.parametrize("mapped", [False, True], ids=["vjp", "vmap-vjp"])
def test_inductor_gives_gradients_of_transforms(call, mapped):
    """The default backend of torch.compile; nothing here asks it for C++."""

    def gradients(q, k, v, cotangents):
        return vjp(lambda q, k, v: call(q, k, v, None), q, k, v)[1](cotangents)

    tensors = samples(*((3,) if mapped else ()))[:3]
    function: Any = vmap(gradients) if mapped else gradients
    own: Any = vmap(call) if mapped else call
    likes = own(*tensors, tensors[0])
    cotangents = tree_map(torch.randn_like, likes)
    given = (*tensors, cotangents)
    assert_same(compiled(function, "inductor")(*given), function(*given))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients_by_parameters_that_autograd_knows_too(backend):
    """functional_call on a module's own parameters: the gradients could be differentiated."""
    tensors = tuple(t.requires_grad_() for t in samples())
    function = of_parameters(lse)
    got = compiled(function, backend)(*tensors)
    assert_same(got, function(*tensors))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(got[0].sum(), tensors[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autograd_differentiates_a_compiled_transform(backend):
    tensors = tuple(t.requires_grad_() for t in samples(3))
    wants = [weighted(f)(*tensors) for f in (vmap(lse), compiled(vmap(lse), backend))]
    want, got = (torch.autograd.grad(w, tensors, materialize_grads=True) for w in wants)
    assert_same(got, want)


def ways(function) -> list[Callable[..., Any]]:
    """As it is, and compiled."""
    return [function, *(compiled(function, backend) for backend in ("eager", "aot_eager"))]


@pytest.mark.parametrize("way", range(3), ids=["uncompiled", "eager", "aot_eager"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_forward_mode_raises(call, way):
    q, k, v, bias = samples()

    def tangent(x):
        return jvp(lambda x: call(q, k, x, bias), (x,), (x,))

    with pytest.raises(Exception, match="no forward-mode derivative"):
        ways(tangent)[way](v)


def test_forward_mode_raises_in_a_dual_level():
    q, k, v, bias = samples()
    with torch.autograd.forward_ad.dual_level():
        v = torch.autograd.forward_ad.make_dual(v, v)
        for call in CALLS.values():
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                call(q, k, v, bias)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.ops.heedful.inference_v10(q, k, v)


OUTER = {"grad": grad, "jacrev": jacrev}


@pytest.mark.parametrize("name, way, outer", in_turns(CALLS, range(3), OUTER))
def test_a_second_derivative_raises(name, way, outer):
    call, outer = CALLS[name], OUTER[outer]
    tensors = samples()

    def total(*tensors):
        return sum(part.sum() for part in grad(weighted(call), ALL)(*tensors))

    with pytest.raises(Exception, match="no second derivative"):
        ways(outer(total))[way](*tensors)
    # An error leaves no level of a transform behind.
    assert not torch._C._are_functorch_transforms_active()


@pytest.mark.parametrize("way", range(3), ids=["uncompiled", "eager", "aot_eager"])
def test_what_has_no_gradient_says_so_to_transforms(way):
    q, k, v, _ = samples()
    low, slopes = q.to(torch.float8_e4m3fn), torch.rand(2)

    def by_slopes(slopes):
        return heedful.flash_attn_func(q, k, v, alibi_slopes=slopes).sum()

    with pytest.raises(Exception, match="alibi_slopes must not require a gradient"):
        ways(grad(by_slopes))[way](slopes)
    with pytest.raises(Exception, match="fp8 is forward only"):
        ways(grad(lambda q: heedful.flash_attn_func(q, q, q).float().sum()))[way](low)


@pytest.mark.parametrize("overload", ["default", "options"])
def test_an_operator_for_the_output_alone_is_differentiable(overload):
    """As in a graph that was exported without gradients, and is trained."""
    op = getattr(torch.ops.heedful.inference_v10, overload)
    options = (True,) if overload == "default" else (None, True, (2, 0), 1.5, 1, None)
    keywords = {} if overload == "default" else {"window_size": (2, 0), "softcap": 1.5}

    def want(q, k, v):
        return heedful.flash_attn_func(q, k, v, causal=True, **keywords)

    leaf = [t.requires_grad_() for t in samples()[:3]]
    wanted = torch.autograd.grad(weighted(want)(*leaf), leaf)
    for way in ways(lambda q, k, v: op(q, k, v, *options)):
        assert_same(torch.autograd.grad(weighted(way)(*leaf), leaf), wanted)


def test_a_model_exported_without_gradients_trains():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 8)

        def forward(self, x):
            x = self.project(x)
            return heedful.flash_attn_func(x, x, x, causal=True)

    model, x = Model(), samples()[0]
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
    wants = [weighted(f)(x) for f in (model, exported)]
    want = torch.autograd.grad(wants[0], list(model.parameters()))
    assert_same(torch.autograd.grad(wants[1], list(exported.parameters())), want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", [forward, lse])
def test_transforms_of_compiled_calls_give_what_they_give_uncompiled(call, backend):
    """Dynamo leaves some of these to Python, and is then to stay out of the operators too."""
    tensors = samples(3)
    for transform in (vmap, lambda call: vmap(grad(weighted(call), ALL))):
        function = transform(compiled(call, backend, fullgraph=False))
        assert_same(function(*tensors), transform(call)(*tensors))


def test_vmap_over_an_axis_of_none_has_the_shapes_of_one():
    q, k, v = torch.randn(1, 2, 5, 4, 8), torch.randn(1, 2, 7, 2, 8), torch.randn(1, 2, 7, 2, 6)
    given = {
        "lse": lambda q, k, v: heedful.flash_attn_func(q, k, v, return_lse=True),
        "out": heedful.flash_attn_func,
        "dropout": lambda q, k, v: heedful.flash_attn_func(q, k, v, 0.5, dropout_seed=1),
        "gradients": torch.func.grad(
            lambda q, k, v: heedful.flash_attn_func(q, k, v).sum(), (0, 1, 2)
        ),
        "sink": lambda q, k, v: heedful.flash_attn_func(q, k, v, sink=q[0, 0, :, 0]),
    }
    for name, fun in given.items():
        got, want = (torch.func.vmap(fun, randomness="same")(q[:n], k[:n], v[:n]) for n in (0, 1))
        got, want = (t if isinstance(t, tuple) else (t,) for t in (got, want))
        assert [t.shape[1:] for t in got] == [t.shape[1:] for t in want], name
        assert all(t.shape[0] == 0 for t in got), name
