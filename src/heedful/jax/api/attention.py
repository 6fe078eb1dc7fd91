"""Attention on dense and on packed sequences, for JAX: arguments, semantics and messages are those
of the PyTorch functions."""

from collections.abc import Sequence
from typing import Any

from jax import Array
from jax import numpy as jnp
from jax.typing import ArrayLike

from heedful.core.call.arguments import ROWS, WHOLE, Options, Quads, is_asked, one_sink
from heedful.core.call.numerics import Documents, with_block_mask, with_documents, with_numerics
from heedful.core.call.operands import Operands
from heedful.jax.traced.call import attend
from heedful.masks.block_mask import BlockMask, block_operands

_UNBOUNDED = (-1, -1)


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    leftpad_k: Array | None = None,
    q_offset: ArrayLike | None = None,
    key_ranges: Array | Documents | None = None,
    block_mask: BlockMask | None = None,
    bias: Array | None = None,
    rel_bias: Array | None = None,
    sink: Array | None = None,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
    return_lse: bool = False,
    return_max_logits: bool | str = False,
    num_splits: int = 0,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    dropout_seed: ArrayLike | None = None,
    dropout_origin: Sequence[int] | Array | Quads = WHOLE,
    backend: str | None = None,
    numerics: str | None = None,
    sm_margin: int | None = None,
) -> Any:
    """softmax(q k^T * softmax_scale) v, without ever storing the scores.

    Scores in this order: scale; `softcap * tanh(s / softcap)`; ALiBi; biases; mask; then the sink
    logit in the denominator. A query that sees no key gives 0 (and lse -inf, or the sink's). The
    function runs under jit, grad, vmap, checkpoint and shard_map, and by itself.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16, float32 or float8_e4m3.
        k: (batch, seqlen_k, heads_k, head_dim), like q; heads_k divides heads_q, and query head h
            uses KV head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v), like q.
        dropout_p: fraction of the probabilities to drop, 0 to 1; the others are multiplied by 1 /
            (1 - p).
        softmax_scale: by default 1 / sqrt(head_dim).
        causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned bottom right).
        window_size: (left, right) keys around that diagonal, -1 = no bound; a third element keeps
            that many first keys visible.
        softcap: > 0 bounds the scores (Gemma 2).
        alibi_slopes: float32, (heads_q,) or (batch, heads_q): adds -slope * |distance to the
            diagonal| (Press et al. 2022).
        deterministic: the gradients are equal bit for bit from run to run.
        return_attn_probs: for tests: also return the probabilities, see below.
        seqused_q: int32 or int64 (batch,): how many queries of its row a sequence uses. The others
            are never read; they give 0, lse -inf and no gradient. Masks align with the lengths in
            use.
        seqused_k: int32 or int64 (batch,): how many keys of its row a sequence uses, from leftpad_k
            on; by default all. The others are never read, and have a gradient of 0.
        leftpad_k: int32 or int64 (batch,): where in its row the keys of a sequence begin.
        q_offset: places the diagonal: causal query i sees keys up to i + q_offset, counted from its
            sequence's first query and first key; windows and ALiBi measure from there. An int, or
            int32 or int64 (batch,). By default aligned bottom right.
        key_ranges: int32 (batch or 1, heads_q or 1, seqlen_q, 2 or 4): a query sees keys [a, b) of
            its own, or those of two such ranges, among those that the other masks show. Positions
            count from its sequence's first key. A range is cut to the keys that exist; one with a
            >= b shows none. `heedful.masks` makes them, those of documents in `masks.Documents`.
        block_mask: a `heedful.BlockMask`: tiles of queries and keys that the other masks show, too.
        bias: float, broadcastable to (batch, heads_q, seqlen_q, seqlen_k); differentiable. Or bool:
            True where a query sees a key. The call makes it a bias of 16 bits in scratch memory.
        rel_bias: float (heads_q, distances), a bias by relative position (T5): the score of query i
            and key j gets entry i + off - j + distances // 2, or the first or last entry where
            there is none; off is seqlen_k - seqlen_q, of the lengths in use. Differentiable.
            `heedful.masks.t5_bias` makes it.
        sink: float (heads_q,), a logit in every softmax's denominator, without a value (gpt-oss);
            differentiable.
        s_aux, learnable_sink: other names of sink; at most one of the three may be passed.
        return_lse: also return the log-sum-exp of the scores.
        return_max_logits: also return the largest score of each head, over all queries and the keys
            that they see, after the softcap and biases; "rows" returns that of each query.
        num_splits: into how many splits the keys are cut: 0 = choose, 1 = do not split.
        q_descale, k_descale, v_descale: float32, () or (batch, heads_k), with fp8 alone: the real
            value is stored * descale.
        dropout_seed: a 64-bit int, a jax.random key, an int64 array of one element, or uint32
            (2,), the low word first; needed where dropout_p > 0. The mask is a pure function of it.
            An int is part of the compiled program.
        dropout_origin: (batch, head, row, column) of this call's first score in a larger problem
            that it is a shard of, each from 0 to 2**32 - 1. The call then draws its part of the
            mask that the whole problem would draw from this seed. It may be traced (uint32 (4,), or
            a tuple of numbers), as jax.lax.axis_index makes it. Or int32 or int64 (batch, 4), each
            from 0 to 2**31 - 1: where the first score of each sequence lies. Some kernels take
            columns that are multiples of 4 alone: `heedful.jax.Quads(count)` is one that may be
            traced, and in `Quads(array)` those of each sequence count in fours.
        backend: the backend to run on; it raises if that cannot. By default the planner chooses.
        numerics: "fast", or "invariant": no bit of a row's out and lse depends on anything but its
            query, the keys and values that it sees, their positions and the options; by default
            HEEDFUL_NUMERICS, else "fast". docs/bits.md has the fine print.
        sm_margin: how many SMs kernels of a fixed number of programs leave to others, such as those
            of a transfer; by default HEEDFUL_SM_MARGIN, else 0.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype (bfloat16 for fp8). With
        return_lse: (out, lse), lse float32 (batch, heads_q, seqlen_q), natural log, with the sink,
        without the dropout, differentiable. With return_attn_probs: (out, lse, S_dmask), empty at
        dropout_p = 0, else (batch, heads_q, seqlen_q, seqlen_k), negative where dropped.
        With return_max_logits the largest scores come last, float32 (heads_q,) or, of rows, like
        lse; -inf where no key is seen.

    Raises:
        TypeError, ValueError: naming the argument, where the call is traced; ValueError with every
        reason where it is compiled, if no kernel can run it.

    Source: FlashAttention-2 (Dao 2023); signature of flash_attn 2.x.
    """
    backend = with_numerics(backend, numerics, sm_margin)
    backend, key_ranges = with_documents(backend, key_ranges)
    backend = with_block_mask(backend, block_mask)
    options = Options(
        kind="dense",
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        return_max_logits=is_asked(return_max_logits),
        num_splits=num_splits,
        q_offset=q_offset,
        backend=backend,
        dropout_origin=dropout_origin,
    )
    x = Operands(
        q=q,
        k=k,
        v=v,
        bias=bias,
        rel_bias=rel_bias,
        alibi_slopes=alibi_slopes,
        sink=one_sink(sink, s_aux, learnable_sink),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        key_ranges=key_ranges,
        **block_operands(block_mask, q, k),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    results = attend(x, options, dropout_seed)
    return results if return_max_logits is False else _with_max(results, options, return_max_logits)


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    *,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    q_offset: ArrayLike | None = None,
    key_ranges: Array | Documents | None = None,
    block_mask: BlockMask | None = None,
    bias: Array | None = None,
    rel_bias: Array | None = None,
    sink: Array | None = None,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
    return_lse: bool = False,
    return_max_logits: bool | str = False,
    num_splits: int = 0,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    dropout_seed: ArrayLike | None = None,
    dropout_origin: Sequence[int] | Array | Quads = WHOLE,
    backend: str | None = None,
    numerics: str | None = None,
    sm_margin: int | None = None,
) -> Any:
    """Attention over sequences of different lengths, packed one after the other.

    Arguments that are not listed are those of `flash_attn_func`; seqlen_q and seqlen_k in their
    shapes are the largest lengths.

    Args:
        q: (total_q, heads_q, head_dim).
        k: (total_k, heads_k, head_dim), or with block_table (num_pages, page_size, heads_k,
            head_dim). Like q, or of fewer bits where no gradient is wanted: int8, float8, or uint8,
            two int4 a byte.
        v: as k, with head_dim_v.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,), which may be traced: sequence b's
            storage is tokens cu_seqlens[b] to cu_seqlens[b + 1]. Sequences may be empty.
            cu_seqlens_k may be None with block_table and seqused_k.
        max_seqlen_q, max_seqlen_k: ints, at least the longest sequence. They cannot be traced:
            grids are part of the compiled program.
        block_table: int32 or int64 (batch, pages): where the pages of each sequence are; any page
            size.
        seqused_q, seqused_k: int32 or int64 (batch,): how many tokens of its storage a sequence
            uses; the others are never read, and give 0 with lse -inf.
        key_ranges: int32 (total_q, 2 or 4), the same for all heads.
        block_mask: a `heedful.BlockMask` of max_seqlen_q queries and max_seqlen_k keys. Positions
            count from each sequence's first query and first key.
        k_descale, v_descale: float32, with k and v of 8 bits or fewer: value = stored * descale,
            each () or (batch, heads_k), or per group of values as quantize_kv makes them.

    Returns:
        As flash_attn_func: out (total_q, heads_q, head_dim_v), lse (heads_q, total_q), S_dmask
        (batch, heads_q, max_seqlen_q, max_seqlen_k).

    Raises:
        TypeError, ValueError: naming the argument. Values of arrays (lengths, page numbers) are not
            read, and so not checked.
    """
    backend = with_numerics(backend, numerics, sm_margin)
    backend, key_ranges = with_documents(backend, key_ranges)
    backend = with_block_mask(backend, block_mask)
    options = Options(
        kind="varlen",
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        return_max_logits=is_asked(return_max_logits),
        num_splits=num_splits,
        q_offset=q_offset,
        backend=backend,
        dropout_origin=dropout_origin,
    )
    x = Operands(
        q=q,
        k=k,
        v=v,
        bias=bias,
        rel_bias=rel_bias,
        alibi_slopes=alibi_slopes,
        sink=one_sink(sink, s_aux, learnable_sink),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=block_table,
        key_ranges=key_ranges,
        **block_operands(block_mask, q, k, longest=(max_seqlen_q, max_seqlen_k)),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    results = attend(x, options, dropout_seed)
    return results if return_max_logits is False else _with_max(results, options, return_max_logits)


def _with_max(results: Any, options: Options, asked: Any) -> Any:
    """(out, largest scores), or (out, lse, them). results: with those of rows. asked: as in
    `return_max_logits`."""
    if not options.return_max_logits:
        return results
    out, lse, largest = results
    if asked != ROWS:
        axes = tuple(axis for axis in range(largest.ndim) if axis != largest.ndim - 2)
        largest = jnp.max(largest, axes, initial=-jnp.inf)
    return (out, lse, largest) if options.return_lse else (out, largest)
