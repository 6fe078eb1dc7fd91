"""The same calls as operators of torch's dispatcher: for torch.compile, functorch transforms, fake
tensors and subclasses. `torch.ops.heedful.attention_v10` and its backward share validation,
planning and runners with the eager path; this file only describes them to the dispatcher.
"""

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heedful.core.call.arguments import Options, split
from heedful.core.call.describe import check, check_out, check_results
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.torch.base.arrays import abstract_spec
from heedful.torch.base.dispatch import are_bare, has_shards, needs_dispatcher
from heedful.torch.eager.calls import CALLS, Call, make, make_seed, results_of, returned
from heedful.torch.eager.calls import attend as eager_attend
from heedful.torch.eager.keys import named_tensors, tensor_keys
from heedful.torch.operands.adapt import autocast, bias_gradient
from heedful.torch.operands.checks import (
    attention_call,
    check_constants,
    check_own_out,
    check_seed,
    check_tensor,
    check_tensors,
    gradients_wanted,
)
from heedful.torch.operands.plain import plain_flag, plain_options, plain_seed
from heedful.torch.traced.private import (
    constant_when_traced,
    keep_result,
    register_fake,
    untraced,
)

_OPERANDS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Operands._fields)
_TYPES = {
    "kind": "str",
    "max_seqlen_q": "SymInt?",
    "max_seqlen_k": "SymInt?",
    "dropout_p": "float",
    "softmax_scale": "float?",
    "causal": "bool",
    "window_size": "int[]",
    "softcap": "float",
    "deterministic": "bool",
    "return_attn_probs": "bool",
    "return_lse": "bool",
    "return_max_logits": "bool",
    "num_splits": "int",
    "q_offset": "int?",
    "backend": "str?",
    "dropout_origin": "int[]",
}
_OPTIONS = ", ".join(f"{_TYPES[name]} {name}" for name in Options._fields)

# torch.compile keeps its code on disk under the names of operators that Dynamo saw: another schema
# needs another name. So do the operators whose code calls attention, which are of its number.
LIBRARY = torch.library.Library("heedful", "DEF")
_SCHEMAS = (
    f"attention_v10({_OPERANDS}, {_OPTIONS}, bool needs_grad)"
    " -> (Tensor out, Tensor lse, Tensor more)",
    f"attention_v10_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_OPERANDS},"
    f" {_OPTIONS}, bool bias_grad, bool rel_bias_grad, bool kv_grad)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink, Tensor drel_bias)",
    # A cache that is not extended, and a prefix before it: see api/prefix.py.
    f"prefixed_attention_v10(Tensor k_prefix, Tensor v_prefix, {_OPERANDS}, {_OPTIONS})"
    " -> (Tensor out, Tensor lse)",
    # A second derivative, which raises when it is computed: it can be traced where it is not
    # wanted.
    "second_backward(Tensor grad, SymInt[] shape, ScalarType dtype) -> Tensor",
    # The Philox key that a traced call draws, for its backward: see private.keep_result.
    "kept_seed(Tensor seed) -> Tensor",
    # Dense attention of which only the output is wanted. The dispatcher's time for each argument is
    # a tenth of a call's. So inference does not pass 34 arguments, and only four if all others have
    # their defaults.
    "inference_v10(Tensor q, Tensor k, Tensor v, bool causal=False) -> Tensor out",
    "inference_v10.options(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal,"
    " int[] window_size, float softcap, int num_splits, str? backend) -> Tensor out",
)
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def attend(q, k, v, x: Operands | None, options: Options, out=None, seed=None):
    """As `calls.attend`, through the dispatcher."""
    has_parts = False
    # Compiled code checks again all that is checked here: so usual calls are recognised by few
    # checks.
    if not (q.__class__ is k.__class__ is v.__class__ is Tensor and x is out is seed is None):
        has_parts = has_shards((*((q, k, v) if x is None else x), out, seed))
        if has_parts:
            take_shards()
    if x is None:
        if out is None and seed is None and is_compiling() and _is_usual(q, k, v, options):
            return torch.ops.heedful.inference_v10.default(q, k, v, options.causal)
        x = Operands(q, k, v)
    check_tensors(x, options)
    plain, seed = plain_options(options), plain_seed(seed, x.q.device)
    check_seed(seed, x.q.device)
    if has_parts:
        # Calls of plain tensors do without.
        from heedful.torch.traced import sharded

        sharded.check_shards(plain, out, seed)
    device = x.q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        q, k, v, bias = autocast((x.q, x.k, x.v, x.bias), device)
        x = x._replace(q=q, k=k, v=v, bias=bias)
    wants_grad, *_ = gradients_wanted(x)
    if torch.is_grad_enabled():
        check_constants(x)
    if plain.dropout_p > 0:
        philox_key = make_seed(seed, x.q.device)
        if seed is None and wants_grad and is_compiling():
            philox_key = torch.ops.heedful.kept_seed.default(philox_key)
        x = x._replace(seed=philox_key)
    if out is not None:
        check_own_out(out, x.q, wants_grad)
        check_out(*map(abstract_spec, (out, x.q, x.v)))
    if out is None and not wants_grad and _is_bare(x, plain):
        return torch.ops.heedful.inference_v10.options(*x[:3], *_inference_arguments(plain))
    result, lse, probs = torch.ops.heedful.attention_v10.default(*x, *plain, wants_grad)
    if out is not None:
        if out.dtype != result.dtype:
            # A copy would not have what rounding took.
            raise ValueError(f"out must be {result.dtype} in a traced call, got {out.dtype}")
        result = out.copy_(result)
    return returned(results_of(plain), result, lse, probs)


def differentiate(
    x: Operands,
    options: Options,
    saved: tuple,
    seed,
    asked: tuple,
    known_as: Any = None,
    laid_out: bool = False,
    places: tuple[Tensor, ...] = (),
) -> Gradients:
    """The gradients of a call, through the dispatcher if a tracer or transform must see it. saved:
    the caller's dout, dlse, out, lse. seed: dropout_seed. asked: bias_grad and rel_bias_grad, as
    the caller gave them. known_as: the options under which the
    call is kept, if it runs at once. laid_out: as in Backwards, for such a call alone.
    places: dq, dk and dv that such a call writes. Raises TypeError or ValueError naming the
    argument.
    """
    has_parts = has_shards((*x, *saved, seed))
    check_tensors(x, options)
    device = x.q.device
    plain, seed = plain_options(options), plain_seed(seed, device)
    asked = plain_asked(x, *asked)
    for name, tensor in zip(_SAVED, saved, strict=True):
        if tensor is not None or name != "dlse":
            check_tensor(name, tensor, device)
    if plain.dropout_p > 0:
        if seed is None:
            raise ValueError("dropout_seed must be that of the call where dropout_p > 0, got None")
        x = x._replace(seed=make_seed(seed, device))
    named = [*named_tensors(x, plain, None, None), *zip(_SAVED, saved, strict=True)]
    if known_as is not None and are_bare(named):
        call = _call(x, plain, True, asked)
        _check_saved(call.problem, saved)
        if call.checks:
            call.operands(x, x.seed)
        CALLS.latest[known_as] = call
        return own_gradients(_gradients(call, x, saved, True, laid_out, places), x)
    if has_parts:
        take_shards()
    if not is_compiling():
        _check_saved(_problem(x, plain, asked), saved)
    args = (*saved, *x, *plain, *asked, True)
    dq, dk, dv, *more = torch.ops.heedful.attention_v10_backward.default(*args)
    wanted = asked[0], x.sink is not None, asked[1]
    pairs = zip(more, wanted, strict=True)
    return Gradients(dq, dk, dv, *(grad if is_wanted else None for grad, is_wanted in pairs))


def plain_asked(x: Operands, bias_grad, rel_bias_grad) -> tuple[bool, bool]:
    """Whether gradients of bias and rel_bias are computed: a bool bias has none."""
    of_bias = plain_flag("bias_grad", bias_grad) and _has_gradient(x.bias)
    return of_bias, plain_flag("rel_bias_grad", rel_bias_grad) and x.rel_bias is not None


def _has_gradient(bias: Tensor | None) -> bool:
    return bias is not None and bias.is_floating_point()


# The arguments of a backward before the operands.
_SAVED = ("dout", "dlse", "out", "lse")


def _check_saved(problem: AttentionProblem, saved: tuple) -> None:
    specs = [None if tensor is None else abstract_spec(tensor) for tensor in saved]
    check_results(problem, **dict(zip(_SAVED, specs, strict=True)))


def _problem(x: Operands, options: Options, asked: tuple[bool, bool]) -> AttentionProblem:
    """The problem of a backward whose tensors may have no memory."""
    return check(attention_call(x, options, (True, *asked), spec=abstract_spec))


def _gradients(
    call: Call, x: Operands, saved: tuple, kv_grad: bool, laid_out=False, places=()
) -> Gradients:
    """The gradients of a bound call on plain tensors, as its kernels give them."""
    dout, dlse, out, lse = saved
    assert call.backwards is not None
    kept = *call.backwards.pick(x if call.plain else call.seeded(x, x.seed)), out, lse
    if places:
        from heedful.torch.eager.written import write

        grads = write(call.backwards, kept, dout, dlse, places)
        assert grads is not None
        return grads
    return call.backwards(kept, dout, dlse, kv_grad, True, laid_out)


def own_gradients(grads: Gradients, x: Operands) -> Gradients:
    """Gradients in the shapes and dtypes of the caller's tensors."""
    if grads.dbias is not None:
        grads = grads._replace(dbias=bias_gradient(grads.dbias, x.bias.shape).contiguous())
    if grads.dsink is not None and grads.dsink.dtype != x.sink.dtype:
        grads = grads._replace(dsink=grads.dsink.to(x.sink.dtype))
    return grads


def _is_usual(q, k, v, options: Options) -> bool:
    """Whether a compiled call wants the output alone, and has no options but `causal`. At each call
    the compiled code checks again every value that is checked here; literals cost nothing.
    """
    return (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and (options.causal is True or options.causal is False)
        and options.kind == "dense"
        and options.dropout_p == 0.0
        and options.softmax_scale is None
        and options.window_size == (-1, -1)
        and options.softcap == 0.0
        and not (options.deterministic or options.return_attn_probs)
        and not (options.return_lse or options.return_max_logits)
        and options.num_splits == 0
        and options.q_offset is None
        and options.backend is None
        and options.dropout_origin == (0, 0, 0, 0)
        and not (
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        )
    )


def _is_bare(x: Operands, options: Options) -> bool:
    """Whether q, k and v are the only operands, `out` the only result, and inference takes the
    options."""
    usual = options.kind == "dense" and options.q_offset is None and results_of(options) == 0
    return usual and all(t is None for t in x[3:])


def _call(
    x: Operands, options: Options, needs_grad: bool, asked: tuple[bool, bool] = (False, False)
) -> Call:
    """The call of these operands, with gradients of bias and rel_bias where they are asked for; the
    operator returns the lse whatever the caller reads."""
    options = options._replace(
        window_size=tuple(options.window_size),
        return_lse=True,
        dropout_origin=tuple(options.dropout_origin),
    )
    key = ("op", options, needs_grad, asked, tensor_keys(x))
    call = CALLS.young.get(key) or CALLS.find(key)
    return call or make(key, x, options, (needs_grad, *asked), seed=x.seed)


@untraced
def _attention(*args):
    x, options, (needs_grad,) = split(args)
    call = _call(x, options, needs_grad)
    out, lse, probs = call.forward(call.operands(x, x.seed), None)
    return out.contiguous(), lse, out.new_empty(0) if probs is None else probs


def _attention_fake(*args):
    x, options, (needs_grad,) = split(args)
    problem = check(attention_call(x, options, (needs_grad, False, False), spec=abstract_spec))
    out_dtype = getattr(torch, problem.out_dtype)
    return (
        x.q.new_empty(problem.out_shape, dtype=out_dtype),
        x.q.new_empty(problem.lse_shape, dtype=torch.float32),
        x.q.new_empty(problem.lse_shape, dtype=torch.float32)
        if problem.max_scores
        else x.q.new_empty(problem.probs_shape if problem.return_probs else 0, dtype=out_dtype),
    )


# Arguments of heedful::inference_v10.options after v: all others have their defaults.
_INFERENCE = ("softmax_scale", "causal", "window_size", "softcap", "num_splits", "backend")


def _inference_arguments(options: Options) -> tuple:
    return tuple([getattr(options, name) for name in _INFERENCE])


def _inference_options(*args) -> Options:
    options = Options(kind="dense", **dict(zip(_INFERENCE, args, strict=True)))
    return options._replace(window_size=tuple(options.window_size))


_USUAL = {causal: Options(kind="dense", causal=causal) for causal in (False, True)}


def _usual_options(causal=False) -> Options:
    return _USUAL[causal]


# By overload of inference_v10: what makes Options from its arguments after q, k and v.
_OVERLOADS = {"inference_v10": _usual_options, "inference_v10.options": _inference_options}


def _made(q, k, v, x: Operands, options: Options, out, seed):
    """The output for tensors that the dispatcher has resolved as far as it can. Raises
    ValueError."""
    return Call(x, options, (False, False, False), None).forward(x)[0]


@untraced
def _inference(options_of, q, k, v, *args):
    return eager_attend(q, k, v, None, options_of(*args), None, None, _made)


@untraced
def _inference_autograd(op, options_of, q, k, v, *args):
    """An overload at the Autograd key."""
    options = options_of(*args)

    def below(*_):
        from heedful.torch.traced.autograd_rules import inference_autograd

        return inference_autograd(op, options, (q, k, v, *args))

    if needs_dispatcher(q, k, v):
        return below()
    # To dispatch again would take a fifth of its time, and this is differentiable, too.
    return eager_attend(q, k, v, None, options, None, None, below)


def _inference_fake(options_of, q, k, v, *args):
    x, options = Operands(q, k, v), options_of(*args)
    problem = check(attention_call(x, options, (False, False, False), spec=abstract_spec))
    return q.new_empty(problem.out_shape, dtype=getattr(torch, problem.out_dtype))


def _inference_of_shards(options_of, op, args):
    from heedful.torch.traced import sharded

    q, k, v, *rest = args
    return sharded.infer(op, Operands(q, k, v), options_of(*rest), tuple(rest))


@untraced
def _backward(dout, dlse, out, lse, *args):
    x, options, (*asked, kv_grad) = split(args)
    call = _call(x, options, True, (asked[0], asked[1]))
    grads = own_gradients(_gradients(call, x, (dout, dlse, out, lse), kv_grad), x)
    dk, dv = (g.contiguous() if kv_grad else x.q.new_empty(0) for g in grads[1:3])
    more = [x.q.new_empty(0) if grad is None else grad for grad in grads[3:]]
    return grads.dq.contiguous(), dk, dv, *more


def _backward_fake(dout, dlse, out, lse, *args):
    x, options, (*asked, kv_grad) = split(args)
    _check_saved(_problem(x, options, (asked[0], asked[1])), (dout, dlse, out, lse))
    empty = x.q.new_empty
    others = x.bias if asked[0] else None, x.sink, x.rel_bias if asked[1] else None
    return (
        empty(x.q.shape),
        *(empty(t.shape if kv_grad else 0, dtype=t.dtype) for t in (x.k, x.v)),
        *(empty(0) if t is None else empty(t.shape, dtype=t.dtype) for t in others),
    )


def _second_backward(grad, shape, dtype):
    from heedful.torch.traced.autograd_rules import no_second_derivative

    raise no_second_derivative()


def _second_backward_fake(grad, shape, dtype):
    return grad.new_empty(shape, dtype=dtype)


@untraced
def _kept_seed(seed):
    return seed.clone()


@constant_when_traced
def take_shards() -> None:
    """Makes the operators take DTensors. It runs at a process's first call with one, since their
    module takes half as long to load as torch. Dynamo calls it instead of tracing it."""
    _take_shards()


@cache
def _take_shards() -> None:
    from heedful.torch.traced import sharded

    rules = {
        "attention_v10": sharded.attend,
        "attention_v10_backward": sharded.differentiate,
        "second_backward": lambda op, args: sharded.twice(op, *args),
        **{name: partial(_inference_of_shards, of) for name, of in _OVERLOADS.items()},
    }
    sharded.take_shards({_overload(name): rule for name, rule in rules.items()})


def _overload(name: str):
    """The operator that is defined as `name`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.heedful, packet), overload or "default")


def _rule(module: str, name: str, *first: Any):
    """A rule of `autograd_rules` or `batching`, which load at the first call that they are for.
    first: its arguments before torch's."""

    @untraced
    def rule(*args):
        made = import_module(f"heedful.torch.traced.{module}")
        return getattr(made, name)(*first, *args)

    return rule


def _autocasting(name: str, count: int, device_type: str):
    """An operator under autocast: its first `count` tensors in its dtype."""

    @untraced
    def cast(*args):
        with torch.autocast(device_type, enabled=False):
            return _overload(name)(*autocast(args[:count], device_type), *args[count:])

    return cast


for _name, _kernel, _fake in (
    ("attention_v10", _attention, _attention_fake),
    ("attention_v10_backward", _backward, _backward_fake),
    ("second_backward", _second_backward, _second_backward_fake),
    ("kept_seed", _kept_seed, torch.empty_like),
):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    register_fake(_name, _fake)
for _name, _vmap in (
    ("attention_v10", "attention_vmap"),
    ("attention_v10_backward", "backward_vmap"),
    ("kept_seed", "seed_vmap"),
):
    torch.library.register_vmap(f"heedful::{_name}", _rule("batching", _vmap))
keep_result(torch.ops.heedful.kept_seed.default)
for _name, _kernel, _autograd in (
    ("attention_v10", _attention, "attention_autograd"),
    ("attention_v10_backward", _backward, "backward_autograd"),
):
    _differentiating = _rule("autograd_rules", _autograd, _kernel)
    LIBRARY.impl(_name, _differentiating, "Autograd", with_keyset=True)
for _name, _options_of in _OVERLOADS.items():
    _op = _overload(_name)
    LIBRARY.impl(_name, partial(_inference, _options_of), "CompositeExplicitAutograd")
    LIBRARY.impl(_name, partial(_inference_autograd, _op, _options_of), "Autograd")
    register_fake(_name, partial(_inference_fake, _options_of))
    torch.library.register_vmap(f"heedful::{_name}", _rule("batching", "inference_vmap", _op))
for _device in ("cpu", "cuda"):
    # q, k, v and the bias of the one; q, k, v of the others.
    for _name, _tensors in (
        ("attention_v10", 4),
        ("inference_v10", 3),
        ("inference_v10.options", 3),
    ):
        _cast = _autocasting(_name, _tensors, _device)
        LIBRARY.impl(_name, _cast, f"Autocast{_device.upper()}")
