"""Attention of new tokens over a KV cache, which it can extend first, for JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from heedful.core.call.arguments import WHOLE, AttentionCall, CacheUpdate, Options, one_sink
from heedful.core.call.describe_cache import (
    attention_part,
    check_cache,
    check_int_length,
    check_prefix_pair,
    check_rotated_length,
    last_rotated_length,
)
from heedful.core.call.numerics import Documents, with_documents, with_numerics
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.jax.api.merge import merged
from heedful.jax.base.arrays import array_spec, check_array
from heedful.jax.operands.plain import as_int32, plain_options, plain_update
from heedful.jax.traced import cache_step, cache_update, primitives, sharding, symbolic
from heedful.jax.traced.call import adapted, check_arrays, computed, specs_of
from heedful.jax.traced.primitives import Static
from heedful.jax.traced.registration import infinite_lse
from heedful.masks.block_mask import BlockMask, block_operands

_UNBOUNDED = (-1, -1)
_ARRAYS = ("k", "v", "rotary_cos", "rotary_sin")


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: int | Array | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = _UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    k_shift: Array | None = None,
    v_shift: Array | None = None,
    sink: Array | None = None,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
    tree_mask: Array | None = None,
    key_ranges: Array | Documents | None = None,
    block_mask: BlockMask | None = None,
    rel_bias: Array | None = None,
    shared_prefix: tuple[Array, Array] | None = None,
    backend: str | None = None,
    numerics: str | None = None,
    sm_margin: int | None = None,
) -> Any:
    """Attention of the newest tokens over a cache of keys and values, for inference: no gradient
    flows through it. k and v, if passed, are first written into the caches, and the caches are
    returned.

    Under jit, donated caches (donate_argnums) are extended in place. Other caches are copied first,
    and stay as they are. The same holds for scales that are written. Arguments that are not listed
    are those of `flash_attn_func`.

    Args:
        q: (batch, q_len, heads_q, head_dim).
        k_cache: (batch_cache, capacity, heads_k, head_dim), or with block_table (num_pages,
            page_size, heads_k, head_dim), any page size. In q's dtype, or quantised: int8, float8,
            or uint8 with two int4 a byte (head_dim / 2 bytes) or rows of pack_latent (656 bytes).
        v_cache: as k_cache, with head_dim_v. Beside rows of pack_latent it is k_cache itself.
        k, v: (batch, new_len, heads_k, head_dim | head_dim_v) in the caches' dtype, written at
            positions cache_seqlens on. For a quantised cache they come in q's dtype and are
            quantised. Scales of heads are used as they are (by default 1). Scales and shifts of
            groups are computed as by quantize_kv, written and returned. Or k and v come quantised,
            and the caller writes their scales. Rows of pack_latent get v, and k's columns past v's.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype or float32. Keys are rotated
            at positions cache_seqlens, cache_seqlens + 1, ..., queries too if causal or windowed;
            otherwise all queries at position cache_seqlens. They require k and v.
        cache_seqlens: int, or int32 or int64 (batch,), which may be traced: tokens in the cache,
            without the new ones. By default the whole cache is used. In an array, a negative length
            marks an entry without a sequence (padding): nothing is written or read for it, and its
            rows of out are 0.
        cache_batch_idx: int32 or int64 (batch,): which row of the cache belongs to each sequence.
        cache_leftpad: int32 or int64 (batch,): where in its row a sequence begins.
        block_table: int32 or int64 (batch, pages): where the pages of each sequence are.
        rotary_interleaved: rotate dims 0 and 1, 2 and 3, ... (GPT-J), else 0 and rotary_dim / 2,
            1 and rotary_dim / 2 + 1, ... (GPT-NeoX).
        return_softmax_lse: also return the log-sum-exp, float32 (batch, heads_q, q_len).
        k_descale, v_descale, k_shift, v_shift: float32, for quantised caches: value = stored *
            descale + shift, each () or (batch, heads_k), or per group of values as quantize_kv
            makes them, (batch_cache, capacity, heads_k, groups) or (num_pages, page_size, heads_k,
            groups).
        tree_mask: bool (batch or 1, q_len, q_len): query i sees the c-th of the last q_len keys
            only if tree_mask[b, i, c], for speculative decoding.
        key_ranges: int32 (batch or 1, heads_q or 1, q_len, 2 or 4), as of flash_attn_func. Keys of
            a shared_prefix, which every query sees, do not count.
        block_mask: a `heedful.BlockMask` of q_len queries and as many keys as a row of the cache or
            of block_table has room for. Positions count from the first of q, and from a sequence's
            first key in the cache. Keys of a shared_prefix do not count.
        rel_bias: float (heads_q, distances), as of flash_attn_func. Not beside a shared_prefix.
        shared_prefix: (k, v), each (prefix_len, heads_k, head_dim | head_dim_v) or with a leading
            1: keys and values before the cache of every sequence. Rotary positions count them;
            every query sees them all.

    Returns:
        (out, k_cache, v_cache), or with return_softmax_lse (out, lse, k_cache, v_cache); out
        (batch, q_len, heads_q, head_dim_v). Where k and v come in q's dtype for a cache with scales
        of groups, these follow: k_descale, v_descale, or with shifts k_descale, k_shift,
        v_descale, v_shift.

    Raises:
        TypeError, ValueError: naming the argument. Values of arrays (lengths, indices, page
        numbers) are not read. A call with a wrong value reads other rows of the cache, never memory
        outside of it, and writes nothing for it.

    Source: signature of flash_attn 2.x; cascade inference of FlashInfer for shared_prefix.
    """
    backend = with_numerics(backend, numerics, sm_margin)
    backend, key_ranges = with_documents(backend, key_ranges)
    options = plain_options(
        Options(
            kind="kvcache",
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            return_lse=return_softmax_lse,
            num_splits=num_splits,
            backend=backend,
            dropout_origin=WHOLE,
        )
    )
    x = Operands(
        q=q,
        k=k_cache,
        v=v_cache,
        alibi_slopes=alibi_slopes,
        sink=one_sink(sink, s_aux, learnable_sink),
        block_table=block_table,
        kv_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        tree_mask=tree_mask,
        key_ranges=key_ranges,
        rel_bias=rel_bias,
        **block_operands(block_mask, q, k_cache, block_table=block_table),
        k_descale=k_descale,
        v_descale=v_descale,
        k_shift=k_shift,
        v_shift=v_shift,
    )
    update = CacheUpdate(
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        rotary_interleaved=rotary_interleaved,
        shared_prefix=shared_prefix,
    )
    problem, update = _checked(x, options, update)
    x = adapted(x)
    x = Operands._make([None if array is None else jax.lax.stop_gradient(array) for array in x])
    if update.shared_prefix is None and _writes(x, update, problem):
        # One primitive, which a GPU may run as one kernel.
        x, results = cache_step.stepped(x, options, update, _start(update, problem), problem)
        out, lse = results[0], results[-1]
    else:
        if update.cache_seqlens is not None:
            x = _extended(x, update, problem)
        out, lse = _attended(x, options, update)
    names = ["k", "v"]
    if update.k is not None:
        names = cache_update.changed({**x._asdict(), "k_new": update.k})
    written = (getattr(x, name) for name in names)
    return (out, lse, *written) if return_softmax_lse else (out, *written)


def _checked(
    x: Operands, options: Options, update: CacheUpdate
) -> tuple[AttentionProblem, CacheUpdate]:
    """The problem of a call over a cache, and its update with plain values. Raises TypeError or
    ValueError for whatever is wrong."""
    check_arrays(x, options)
    symbolic.check_known(x, options.kind)
    update = plain_update(update, x.q.shape[0] if x.q.ndim else 0)
    specs: dict[str, Any] = {}
    for name, value in update._asdict().items():
        is_array = isinstance(value, (Array, np.ndarray))
        if is_array or (value is not None and name in _ARRAYS):
            check_array(name, value)
            specs[name] = array_spec(value)
    if update.shared_prefix is not None:
        check_prefix_pair(update.shared_prefix)
        for index, part in enumerate(update.shared_prefix):
            check_array(f"shared_prefix[{index}]", part)
        specs["shared_prefix"] = tuple(map(array_spec, update.shared_prefix))
    described = update._replace(**specs)
    problem = check_cache(AttentionCall(specs_of(x), options), described)
    length = update.cache_seqlens
    if isinstance(length, int):
        new = 0 if update.k is None else update.k.shape[1]
        check_int_length(length, new, problem.seqlen_k)
        last = last_rotated_length(described, problem.seqlen_q, problem.mask.bounded)
        if last is not None:
            check_rotated_length(length, last, described)
    return problem, update


def _start(update: CacheUpdate, problem: AttentionProblem) -> Array:
    """The storage row of each sequence's first new token, int32 (B,)."""
    start = update.cache_seqlens
    if isinstance(start, int):
        return jnp.full((problem.batch,), start, jnp.int32)
    return as_int32(start)


def _writes(x: Operands, update: CacheUpdate, problem: AttentionProblem) -> bool:
    """Whether there are new tokens, and the row of each first one."""
    return update.k is not None and 0 not in (*update.k.shape, *x.k.shape, problem.batch)


def _extended(x: Operands, update: CacheUpdate, problem: AttentionProblem) -> Operands:
    """The operands after new tokens are written: caches, lengths, rotated q."""
    start = _start(update, problem)
    if not _writes(x, update, problem):
        used = start if x.leftpad_k is None else start - x.leftpad_k
        if update.rotary_cos is not None and x.q.size:
            x = x._replace(q=cache_update.rotated_only(x, update, start, problem))
        return x._replace(seqused_k=used)
    return cache_update.extended(x, update, start, problem)


def _attended(x: Operands, options: Options, update: CacheUpdate) -> tuple[Array, Array]:
    """out and lse of the attention over the cache, and over a prefix before it."""
    part, part_options = attention_part(x, options, update)
    if update.shared_prefix is None:
        results = computed(part, part_options)
        return results[0], results[-1]
    k, v = (t if t.ndim == 4 else t[None] for t in map(jnp.asarray, update.shared_prefix))
    k, v = jax.lax.stop_gradient((k, v))
    batch, q_len, heads, dim = x.q.shape
    before = Operands(x.q.reshape(1, batch * q_len, heads, dim), k, v)
    dense = part_options._replace(kind="dense", causal=False)
    first, *of_first = _with_rest(before, dense)
    out, *of_part = _with_rest(part, part_options)
    with infinite_lse():
        outs = jnp.stack([first.reshape(out.shape), out])
        lses, rests = (
            jnp.stack([one.reshape(heads, batch, q_len).transpose(1, 0, 2), other])
            for one, other in zip(of_first, of_part, strict=True)
        )
        return merged(outs, lses, x.sink, rests)


def _with_rest(x: Operands, options: Options) -> tuple:
    """out, and log-sum-exps in two numbers: one float32 far from 0 is not exact enough for
    weights."""
    return primitives.forward(sharding.alike(x), None, Static((), options, keeps_rest=True))
