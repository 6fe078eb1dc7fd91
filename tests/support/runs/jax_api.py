"""A built case through the public JAX functions, as a user would call them."""

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp

import heedful.jax
from heedful.reference.convert import as_numpy
from support.problems.budget import Results
from support.problems.cases import Built
from support.runs.api import LENGTHS, block_mask, is_cache_call, offset_of, origin_of
from support.runs.jax_backend import as_array, as_tensor

LEAVES = ("q", "k", "v", "bias", "sink", "rel_bias")


def results(built: Built, wrap: Callable = jax.jit, **more) -> Results:
    """What the public function returns for a case, and its gradients if the case has cotangents.

    wrap: what is made of the function, such as jit. more: further keyword arguments of the call.
    """
    found = arrays(built, wrap, **more)
    return Results(**{name: as_numpy(as_tensor(array)) for name, array in found.items()})


def arrays(built: Built, wrap: Callable = jax.jit, **more) -> dict[str, Any]:
    """As `results`, as JAX's arrays by name."""
    given = {name: as_jax(t) for name, t in built.x._asdict().items() if t is not None}
    has_gradient = [n for n in LEAVES if n in given and given[n].dtype != bool]
    leaves = {name: given.pop(name) for name in has_gradient}
    dout, dlse = (None if t is None else as_jax(t) for t in (built.dout, built.dlse))

    def run(leaves, rest, dout, dlse):
        out, lse, *probs = call(built, {**leaves, **rest}, **more)
        found = {"out": out, "lse": lse}
        return found | ({"probs": probs[0]} if built.problem.return_probs else {})

    def run_with_gradients(leaves, rest, dout, dlse):
        found, pull = jax.vjp(lambda leaves: run(leaves, rest, dout, dlse), leaves)
        cotangents = jax.tree.map(jnp.zeros_like, found)
        cotangents |= {"out": dout} | ({} if dlse is None else {"lse": dlse})
        (grads,) = pull(cotangents)
        return found | {f"d{name}": grad for name, grad in grads.items()}

    function = run if dout is None else run_with_gradients
    return wrap(function)(leaves, given, dout, dlse)


def as_jax(tensor) -> jax.Array:
    """A torch tensor's values, without the dims that a stride of 0 repeats; of int64 the words."""
    array = as_array(tensor)
    assert array is not None
    return jnp.asarray(array.view("uint32") if array.dtype == "int64" else array)


def call(built: Built, x: dict[str, Any], **more) -> Any:
    """(out, lse[, probs]) of the function that takes this kind of case."""
    case, problem = built.case, built.problem
    slopes = x.get("alibi_slopes")
    if slopes is not None and "b" not in case.alibi and len(slopes):
        slopes = slopes[0]
    keywords = {
        "softmax_scale": case.scale or None,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "num_splits": case.num_splits,
        "sink": x.get("sink"),
        "alibi_slopes": slopes,
        "key_ranges": x.get("key_ranges"),
        "rel_bias": x.get("rel_bias"),
        "block_mask": block_mask(built, x),
    }
    if is_cache_call(built):
        lengths = x.get("seqused_k")
        if lengths is not None and "leftpad_k" in x:
            lengths = lengths + x["leftpad_k"]
        out, lse, *_ = heedful.jax.flash_attn_with_kvcache(
            x["q"],
            x["k"],
            x["v"],
            cache_seqlens=lengths,
            cache_batch_idx=x.get("kv_batch_idx"),
            cache_leftpad=x.get("leftpad_k"),
            return_softmax_lse=True,
            **{name: x.get(name) for name in ("block_table", "tree_mask")},
            **{name: x.get(name) for name in ("k_descale", "v_descale", "k_shift", "v_shift")},
            **keywords,
            **more,
        )
        return out, lse
    keywords |= {
        "dropout_p": case.dropout_p,
        "dropout_origin": origin_of(built, x.get("origins")),
        "q_offset": offset_of(built, x.get("q_offsets")),
        "deterministic": case.deterministic,
        "bias": x.get("bias"),
        "dropout_seed": x.get("seed"),
        "return_lse": True,
        "return_attn_probs": case.return_probs,
    }
    keywords |= {name: x.get(name) for name in ("q_descale", "k_descale", "v_descale")}
    if not problem.varlen_q:
        keywords |= {name: x.get(name) for name in LENGTHS}
        return heedful.jax.flash_attn_func(x["q"], x["k"], x["v"], **(keywords | more))
    keywords |= {name: x.get(name) for name in ("block_table", "seqused_q", "seqused_k")}
    bounds = x["cu_seqlens_q"], x.get("cu_seqlens_k"), problem.seqlen_q, problem.seqlen_k
    return heedful.jax.flash_attn_varlen_func(x["q"], x["k"], x["v"], *bounds, **(keywords | more))


def by_shared_prefix(prefix: int, **more) -> Callable[[Built], Results]:
    """As `far_scores.by_shared_prefix`, in JAX. more: further arguments."""

    def results(one: Built) -> Results:
        x, problem = one.x, one.problem
        q, k, v = map(as_jax, x[:3])
        out, lse, *_ = heedful.jax.flash_attn_with_kvcache(
            q,
            k[:, prefix:],
            v[:, prefix:],
            softmax_scale=problem.scale,
            causal=one.case.causal,
            num_splits=one.case.num_splits,
            sink=None if x.sink is None else as_jax(x.sink),
            return_softmax_lse=True,
            shared_prefix=(k[0, :prefix], v[0, :prefix]),
            **more,
        )
        return Results(*(as_numpy(as_tensor(t)) for t in (out, lse)))

    return results
