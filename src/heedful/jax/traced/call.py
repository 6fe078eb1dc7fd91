"""One attention call in JAX: checked by the core, differentiable once, and two primitives that
know how to batch and to spread over devices."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import AttentionCall, Options, argument_name
from heedful.core.call.describe import check_results, describe
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.storage import casts, mask_dtype
from heedful.jax.base.arrays import array_spec, check_array, dtype_name
from heedful.jax.operands.plain import (
    as_int32,
    offset_of_each,
    origin_of_each,
    origin_words,
    plain_flag,
    plain_options,
    seed_words,
)
from heedful.jax.traced import primitives, sharding, symbolic
from heedful.jax.traced.primitives import Static
from heedful.jax.traced.registration import infinite_lse

# Names that jax.checkpoint's policies know what the backward wants by.
OUT_NAME, LSE_NAME = "heedful_out", "heedful_lse"
# Operands of floating point that have no gradient.
CONSTANTS = ("alibi_slopes", "q_descale", "k_descale", "v_descale", "k_shift", "v_shift")
_NEEDED = ("k", "v", "cu_seqlens_q")


class Differentiable(NamedTuple):
    """The operands that have gradients."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    sink: Any = None
    rel_bias: Any = None


def attend(x: Operands, options: Options, seed: Any = None) -> Any:
    """Checks a call and runs it; what the public functions return.

    x: arrays as the caller gave them. seed: dropout_seed, likewise.
    """
    results = run(x, options, seed)
    return results[0] if len(results) == 1 else results


def run(x: Operands, options: Options, seed: Any = None) -> tuple:
    """(out,), (out, lse) or (out, lse, probs or largest scores), as the options ask."""
    x, options = origin_of_each(x, options)
    check_arrays(x, options)
    x, options = offset_of_each(x, options)
    if symbolic.is_symbolic(x):
        seed = None if seed is None else seed_words(seed)
        return symbolic.one_by_one(run, x, options, seed)
    _, x, options, words = _checked(x, options, seed)
    return computed(x, options, words)


def _checked(
    x: Operands, options: Options, seed: Any, grad: tuple[bool, bool, bool] = (False, False, False)
) -> tuple[AttentionProblem, Operands, Options, Array | None]:
    """The problem of a call, its adapted arrays, its options and a traced dropout_origin. grad: as
    in AttentionCall. Raises TypeError or ValueError."""
    origin, words = origin_words(options.dropout_origin)
    options = plain_options(options._replace(dropout_origin=origin))
    seed = None if seed is None else seed_words(seed)
    problem = check_call(x, options, seed, grad)
    if options.dropout_p > 0:
        if seed is None:
            raise ValueError(
                "dropout_seed must be given where dropout_p > 0 (an int, or a jax.random key), got"
                " None"
            )
        x = x._replace(seed=seed)
    else:
        x, words = x._replace(origins=None), None
    return problem, adapted(x), options, words


def differentiate(
    x: Operands,
    options: Options,
    saved: dict[str, Any],
    seed: Any,
    bias_grad: Any,
    rel_bias_grad: Any,
) -> Gradients:
    """The gradients of a call. saved: dout, dlse, out, lse by name. Raises TypeError or ValueError
    naming the argument."""
    x, options = origin_of_each(x, options)
    check_arrays(x, options)
    x, options = offset_of_each(x, options)
    for name, array in saved.items():
        if array is not None or name != "dlse":
            check_array(name, array)
    for name, array in (x._asdict() | saved).items():
        if array is not None and any(size.__class__ is not int for size in jnp.shape(array)):
            raise ValueError(
                f"{name} must have sizes that are known when it is traced, got {array.shape}"
            )
    bias, sink = x.bias, x.sink
    bias_grad = plain_flag("bias_grad", bias_grad) and bias is not None and bias.dtype != bool
    rel_bias_grad = plain_flag("rel_bias_grad", rel_bias_grad) and x.rel_bias is not None
    grad = True, bias_grad, rel_bias_grad
    problem, x, options, origin = _checked(x, options, seed, grad)
    specs = {name: None if array is None else array_spec(array) for name, array in saved.items()}
    check_results(problem, **specs)
    arrays = {n: None if array is None else jnp.asarray(array) for n, array in saved.items()}
    x, origin, arrays = sharding.alike((x, origin, arrays))
    asked = Static((), options, *grad)
    grads = primitives.backward(x, origin, **arrays, asked=asked)
    if sink is not None:
        grads = grads._replace(dsink=grads.dsink.astype(sink.dtype))
    if bias is not None and bias_grad:
        grads = grads._replace(dbias=grads.dbias.reshape(bias.shape))
    return grads


def check_arrays(x: Operands, options: Options) -> None:
    """TypeError unless every operand is an array, or absent where it may be."""
    needed = _NEEDED if options.kind == "varlen" else _NEEDED[:2]
    for operand, value in zip(Operands._fields, x, strict=True):
        if value is not None or operand in needed or operand == "q":
            check_array(argument_name(operand, options.kind), value)


def specs_of(x: Operands) -> Operands:
    """The ArraySpec of each operand; a seed counts as the int64 that its words are."""
    specs = Operands._make([None if array is None else array_spec(array) for array in x])
    if x.seed is not None:
        specs = specs._replace(seed=ArraySpec.contiguous((1,), "int64"))
    return specs


def check_call(
    x: Operands,
    options: Options,
    seed: Array | None,
    grad: tuple[bool, bool, bool] = (False, False, False),
) -> AttentionProblem:
    """The problem of a call. grad: as in AttentionCall. Raises TypeError or ValueError."""
    return describe(AttentionCall(specs_of(x._replace(seed=seed)), options, *grad))


def adapted(x: Operands) -> Operands:
    """Checked arrays as JAX's, with the dims that kernels know them by: those that repeat stay."""
    for name, dtype in casts(specs_of(x)).items():
        array = getattr(x, name)
        array = as_int32(array) if dtype == "int32" else jnp.asarray(array).astype(dtype)
        x = x._replace(**{name: array})
    x = Operands._make([None if array is None else jnp.asarray(array) for array in x])
    if x.bias is not None:
        bias = x.bias.reshape((1,) * (4 - x.bias.ndim) + x.bias.shape)
        if bias.dtype == bool:
            with infinite_lse():
                numbers = jnp.array([-jnp.inf, 0.0], mask_dtype(dtype_name(x.q.dtype)))
                bias = jnp.where(bias, numbers[1], numbers[0])
        x = x._replace(bias=bias)
    if x.block_table is not None and x.cu_seqlens_k is not None:
        # Pages are found through the table: of cu_seqlens_k only the lengths matter.
        used = x.seqused_k
        if used is None:
            used = x.cu_seqlens_k[1:] - x.cu_seqlens_k[:-1]
        x = x._replace(cu_seqlens_k=None, seqused_k=used)
    return x


def computed(x: Operands, options: Options, origin: Array | None = None) -> tuple:
    """The results of a checked call of adapted arrays."""
    count = _count(options)
    x, origin = sharding.alike((x, origin))
    differentiable = Differentiable(*(getattr(x, name) for name in Differentiable._fields))
    rest = x._replace(**dict.fromkeys(Differentiable._fields))
    results: Any = _attention(Static((), options), differentiable, rest, origin)
    if count == 3 and len(results) == 2:
        results = (*results, jnp.zeros((0,), results[0].dtype))
    return results


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(asked: Static, differentiable: Differentiable, rest: Operands, origin) -> tuple:
    x = rest._replace(**differentiable._asdict())
    return _returned(asked.options, primitives.forward(x, origin, asked))


def _forward(asked: Static, differentiable, rest, origin):
    """As `_attention`, with what the backward wants."""
    values, perturbed = _parted((differentiable, rest, origin))
    differentiable, rest, origin = values
    for name in CONSTANTS:
        if getattr(perturbed[1], name):
            raise ValueError(
                f"{name} must not require a gradient, as none is computed for it, got one that does"
                f" (pass jax.lax.stop_gradient({name}))"
            )
    bias_grad, rel_bias_grad = bool(perturbed[0].bias), bool(perturbed[0].rel_bias)
    x = rest._replace(**differentiable._asdict())
    grad = {"needs_grad": True, "bias_grad": bias_grad, "rel_bias_grad": rel_bias_grad}
    asked = asked._replace(**grad)
    out, lse, *probs = primitives.forward(x, origin, asked)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    # A tuple without items has no arrays: it tells the backward without being one.
    kept = x, origin, out, lse, *(() if is_asked else None for is_asked in grad.values())
    return _returned(asked.options, (out, lse, *probs)), kept


def _backward(asked: Static, kept, cotangents):
    x, origin, out, lse, *grad = kept
    dout, dlse = (*(None if _is_zero(c) else c for c in cotangents), None)[:2]
    if dout is None and dlse is None:
        return None, None, None
    dout = jnp.zeros(out.shape, out.dtype) if dout is None else dout
    names = ("needs_grad", "bias_grad", "rel_bias_grad")
    is_asked = [flag is not None for flag in grad]
    asked = asked._replace(**dict(zip(names, is_asked, strict=True)))
    grads = primitives.backward(x, origin, out, lse, dout, dlse, asked)
    return Differentiable(*grads), None, None


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


def _returned(options: Options, results: tuple) -> tuple:
    return tuple(results[: _count(options)])


def _count(options: Options) -> int:
    """How many results a call has."""
    is_third = options.return_attn_probs or options.return_max_logits
    return 3 if is_third else 2 if options.return_lse else 1


def _is_zero(cotangent: Any) -> bool:
    return cotangent is None or isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _parted(tree: Any) -> tuple[Any, Any]:
    """Values, and which of them a derivative is taken of, of a tree of custom_vjp's primals."""
    is_leaf = lambda leaf: hasattr(leaf, "perturbed")  # noqa: E731
    values = jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=is_leaf)
    return values, jax.tree.map(lambda leaf: leaf.perturbed, tree, is_leaf=is_leaf)
