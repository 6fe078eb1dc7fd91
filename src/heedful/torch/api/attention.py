"""Attention on dense and on packed sequences, as `flash_attn` 2.x calls it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, are_deterministic_algorithms_enabled

from heedful.core.call.arguments import (
    ROWS,
    UNBOUNDED,
    WHOLE,
    Options,
    Quads,
    is_asked,
    new_operands,
    new_options,
    one_sink,
)
from heedful.core.call.numerics import Documents, with_block_mask, with_documents, with_numerics
from heedful.core.call.operands import Operands
from heedful.masks.block_mask import BlockMask, block_operands
from heedful.torch.base.dispatch import needs_dispatcher
from heedful.torch.eager.calls import attend
from heedful.torch.operands.plain import (
    offset_of_each,
    origin_of_each,
    plain_length,
    plain_window,
)
from heedful.torch.operands.values import is_readable
from heedful.torch.traced import library


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    key_ranges: Tensor | Documents | None = None,
    block_mask: BlockMask | None = None,
    bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool | str = False,
    num_splits: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    dropout_origin: Sequence[int] | Tensor | Quads = WHOLE,
    out: Tensor | None = None,
    backend: str | None = None,
    numerics: str | None = None,
    sm_margin: int | None = None,
) -> Any:
    """softmax(q k^T * softmax_scale) v, without ever storing the scores.

    Scores in this order: scale; `softcap * tanh(s / softcap)`; ALiBi; biases; mask; then the sink
    logit in the denominator. A query that sees no key gives 0 (and lse -inf, or the sink's).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16, float32 or float8_e4m3.
        k: (batch, seqlen_k, heads_k, head_dim), like q; heads_k divides heads_q, and query head h
            uses KV head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v), like q. Any strides; where the last dim is not
            contiguous, q, k and v are copied.
        dropout_p: fraction of the probabilities to drop, 0 to 1; the others are multiplied by 1 /
            (1 - p).
        softmax_scale: by default 1 / sqrt(head_dim).
        causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned bottom right).
        window_size: (left, right) keys around that diagonal, -1 = no bound; a third element keeps
            that many first keys visible. Any sequence of ints, also of NumPy's or in CPU tensors.
        softcap: > 0 bounds the scores (Gemma 2).
        alibi_slopes: float32, (heads_q,) or (batch, heads_q): adds -slope * |distance to the
            diagonal| (Press et al. 2022).
        deterministic: the gradients are equal bit for bit from run to run; implied by
            torch.use_deterministic_algorithms.
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
        dropout_seed: 64-bit int, or int64 tensor (1,) on the device; the mask is a pure function of
            it. By default it is drawn on the device from torch's generator.
        dropout_origin: (batch, head, row, column) of this call's first score in a larger problem
            that it is a shard of, each from 0 to 2**32 - 1. The call then draws its part of the
            mask that the whole problem would draw from this seed. Heads are query heads; rows and
            columns count from each sequence's start. Or int32 or int64 (batch, 4) on the device,
            each from 0 to 2**31 - 1: where the first score of each sequence lies. Some kernels take
            columns that are multiples of 4 alone: in `heedful.Quads(tensor)` they count in fours.
        out: (batch, seqlen_q, heads_q, head_dim_v) to write into, if no gradient is wanted: as q,
            or float32 for parts of the keys.
        backend: the backend to run on; it raises if that cannot. By default the planner chooses.
        numerics: "fast", or "invariant": no bit of a row's out and lse depends on anything but its
            query, the keys and values that it sees, their positions and the options; by default
            HEEDFUL_NUMERICS, else "fast". docs/bits.md has the fine print.
        sm_margin: how many SMs kernels of a fixed number of programs leave to others, such as those
            of a transfer; by default HEEDFUL_SM_MARGIN, else 0.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype (bfloat16 for fp8, unless `out`
        says otherwise). With return_lse: (out, lse), lse float32 (batch, heads_q, seqlen_q),
        natural log, with the sink, without the dropout, differentiable. With return_attn_probs:
        (out, lse, S_dmask), empty at dropout_p = 0, else (batch, heads_q, seqlen_q, seqlen_k),
        negative where dropped. With return_max_logits the largest scores come last, float32
        (heads_q,) or, of rows, like lse; -inf where no key is seen.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched or written.

    Source: FlashAttention-2 (Dao 2023); signature of flash_attn 2.x.
    """
    if s_aux is not None or learnable_sink is not None:
        sink = one_sink(sink, s_aux, learnable_sink)
    dispatched = needs_dispatcher(q, k, v)
    if dispatched or window_size is not UNBOUNDED:
        window_size = plain_window(window_size)
    origins = None
    if dispatched or dropout_origin is not WHOLE:
        dropout_origin, origins = origin_of_each(dropout_origin)
    if numerics is not None or sm_margin is not None:
        backend = with_numerics(backend, numerics, sm_margin)
    if key_ranges is not None:
        backend, key_ranges = with_documents(backend, key_ranges)
    if block_mask is not None:
        backend = with_block_mask(backend, block_mask)
    q_offsets = None
    if q_offset is not None:
        q_offset, q_offsets = offset_of_each(q_offset)
    if deterministic is False and are_deterministic_algorithms_enabled():
        deterministic = True
    # In the order of fields: matching so many keywords takes a fifth of a microsecond.
    options = (Options if dispatched else new_options)(
        "dense",
        None,
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
        return_max_logits is not False and is_asked(return_max_logits),
        num_splits,
        q_offset,
        backend,
        dropout_origin,
    )
    x = None
    if not (
        bias is None
        and alibi_slopes is None
        and sink is None
        and q_descale is None
        and k_descale is None
        and v_descale is None
        and seqused_q is None
        and seqused_k is None
        and leftpad_k is None
        and q_offsets is None
        and key_ranges is None
        and block_mask is None
        and rel_bias is None
        and origins is None
    ):
        x = (Operands if dispatched else new_operands)(
            q=q,
            k=k,
            v=v,
            bias=bias,
            rel_bias=rel_bias,
            alibi_slopes=alibi_slopes,
            sink=sink,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            q_offsets=q_offsets,
            origins=origins,
            key_ranges=key_ranges,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
        )
        if block_mask is not None:
            x = x._replace(**block_operands(block_mask, q, k, is_readable))
    if dispatched:
        results = library.attend(q, k, v, x, options, out, dropout_seed)
    else:
        results = attend(q, k, v, x, options, out, dropout_seed, library.attend)
    return results if return_max_logits is False else _with_max(results, options, return_max_logits)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    key_ranges: Tensor | Documents | None = None,
    block_mask: BlockMask | None = None,
    bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool | str = False,
    num_splits: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    dropout_origin: Sequence[int] | Tensor | Quads = WHOLE,
    out: Tensor | None = None,
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
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,) on the device: sequence b's storage
            is tokens cu_seqlens[b] to cu_seqlens[b + 1]. An int64 tensor costs a launch that casts
            it. Sequences may be empty. cu_seqlens_k may be None with block_table and seqused_k.
        max_seqlen_q, max_seqlen_k: ints, at least the longest sequence. A tensor that is not on a
            CPU is not read, since that would wait for the device. An upper bound takes its place
            (all tokens of q or k, all keys of a row of block_table, or the bias's length), at the
            cost of some empty tiles.
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
        TypeError, ValueError: naming the argument, before anything is launched or written. Values
            on a GPU (lengths, page numbers) are not read back, and so not checked.
    """
    if s_aux is not None or learnable_sink is not None:
        sink = one_sink(sink, s_aux, learnable_sink)
    dispatched = needs_dispatcher(q, k, v)
    if dispatched or window_size is not UNBOUNDED:
        window_size = plain_window(window_size)
    origins = None
    if dispatched or dropout_origin is not WHOLE:
        dropout_origin, origins = origin_of_each(dropout_origin)
    if numerics is not None or sm_margin is not None:
        backend = with_numerics(backend, numerics, sm_margin)
    if key_ranges is not None:
        backend, key_ranges = with_documents(backend, key_ranges)
    if block_mask is not None:
        backend = with_block_mask(backend, block_mask)
    q_offsets = None
    if q_offset is not None:
        q_offset, q_offsets = offset_of_each(q_offset)
    if deterministic is False and are_deterministic_algorithms_enabled():
        deterministic = True
    if max_seqlen_q.__class__ is not int or max_seqlen_k.__class__ is not int:
        lengths = max_seqlen_q, max_seqlen_k
        max_seqlen_q, max_seqlen_k = plain_lengths(lengths, q, k, bias, block_table)
    # In the order of fields: matching so many keywords takes a fifth of a microsecond.
    options = (Options if dispatched else new_options)(
        "varlen",
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
        return_max_logits is not False and is_asked(return_max_logits),
        num_splits,
        q_offset,
        backend,
        dropout_origin,
    )
    x = (Operands if dispatched else new_operands)(
        q,
        k,
        v,
        bias,
        rel_bias,
        alibi_slopes,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        block_table,
        None,  # kv_batch_idx
        None,  # leftpad_k
        q_offsets,
        origins,
        None,  # tree_mask
        key_ranges,
        None,  # block_rows
        None,  # block_keys
        None,  # block_bits
        None,  # seed
        q_descale,
        k_descale,
        v_descale,
    )
    if block_mask is not None:
        longest = max_seqlen_q, max_seqlen_k
        x = x._replace(**block_operands(block_mask, q, k, is_readable, longest=longest))
    if dispatched:
        results = library.attend(q, k, v, x, options, out, dropout_seed)
    else:
        results = attend(q, k, v, x, options, out, dropout_seed, library.attend)
    return results if return_max_logits is False else _with_max(results, options, return_max_logits)


def _with_max(results: Any, options: Options, asked: Any) -> tuple:
    """(out, largest scores), or (out, lse, them). results: with those of rows. asked: as in
    `return_max_logits`."""
    if not options.return_max_logits:
        return results
    out, lse, largest = results
    if asked != ROWS:
        heads, rest = largest.shape[-2], [0, 2] if largest.dim() == 3 else [1]
        if all([largest.shape[dim] for dim in rest]):
            largest = largest.amax(rest)
        else:
            largest = largest.new_full((heads,), float("-inf"))
    return (out, lse, largest) if options.return_lse else (out, largest)


def plain_lengths(lengths: tuple, q, k, bias, block_table) -> tuple:
    """max_seqlen_q and max_seqlen_k as ints. Tensors that are not on a CPU are not read. Raises
    TypeError."""
    most = _most_rows(q, bias, -2), _most_rows(k, bias, -1, block_table)
    names = "max_seqlen_q", "max_seqlen_k"
    return tuple([plain_length(*of_side) for of_side in zip(names, lengths, most, strict=True)])


def _most_rows(x, bias, dim: int, block_table=None) -> int:
    """An upper bound of the rows of any sequence in x: the rows of its storage, or those of the
    bias, which may be fewer. Arguments may be wrong: later checks report errors in them."""
    if isinstance(bias, Tensor) and bias.dim() >= -dim and bias.shape[dim] > 1:
        return bias.shape[dim]
    if not isinstance(x, Tensor) or x.dim() < 2:
        return 0
    if isinstance(block_table, Tensor) and block_table.dim() == 2:
        return block_table.shape[1] * x.shape[1]
    return x.shape[0]
