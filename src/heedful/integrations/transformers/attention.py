"""The attention function of transformers' `AttentionInterface`."""

from threading import local
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import logging

from heedful import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from heedful.core.base.entered import PLANS
from heedful.core.call.arguments import UNBOUNDED
from heedful.integrations.transformers.compact import Compact, dense, is_compact, read
from heedful.integrations.transformers.masks import documents
from heedful.integrations.transformers.over_ranks import attention_over_ranks
from heedful.integrations.transformers.paths import count, count_dense
from heedful.integrations.transformers.weights import attention_weights
from heedful.torch.eager import heads_first

logger = logging.get_logger("heedful.integrations.transformers")
# Arguments of other attention functions that change the result, and that ours do not take.
REFUSED = frozenset({"head_mask", "layer_head_mask", "alibi", "indices", "topk_indices"})


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a layer.

    Args:
        query, key, value: (batch, heads, length, head_dim), with fewer heads of keys where query
            heads share them.
        attention_mask: None, a mask of `masks.mask`, or bool (True = visible) or float to add, of
            four dimensions.
        cu_seq_lens_q, ...: lengths of packed sequences in a batch of one row.

    Returns:
        (batch, q_length, heads, head_dim), and the weights where `output_attentions` asks for them.

    Raises:
        ValueError: naming what is not served.
    """
    if not REFUSED.isdisjoint(others):
        _refuse(others)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal)
    window = UNBOUNDED
    if sliding_window is not None:
        window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    options = {
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "sink": s_aux,
    }
    place, batch = None, query.shape[0]
    if (
        attention_mask is position_bias is s_aux is cu_seq_lens_q is None
        and query.shape[2] > 1  # A step's number of keys hardly comes again.
        and batch == key.shape[0]
        and not (dropout or PLANS or others.get("output_attentions") or is_compiling())
        and (batch > 1 or _by_positions(None, others.get("position_ids"), options) is None)
    ):
        facts = scaling, causal, window, options["softcap"]
        place, out = heads_first.find(query, key, value, facts)
        if out is not None:
            count("plain")
            return out, None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if batch != k.shape[0]:  # Learned queries, which all rows share.
        rows = max(batch, k.shape[0])
        q, k, v = (x.expand(rows, -1, -1, -1) for x in (q, k, v))
    if PLANS:
        others |= {"cu_seq_lens_q": cu_seq_lens_q, "position_bias": position_bias}
        rows = q, k, v
        return attention_over_ranks(PLANS[-1], rows, attention_mask, dropout, options, others), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        if attention_mask is None or is_compact(attention_mask):
            _refuse_beside_lengths(position_bias, others)
            return _given(q, k, v, lengths, dropout, options, others), None
    mask = attention_mask
    shape = q.shape[0], q.shape[1], k.shape[1]
    if position_bias is None and (mask is None or is_compact(mask)):
        lengths = None if mask is None else read(mask, *shape)
        if shape[0] == 1 and shape[1] == shape[2] > 1 and not is_compiling():
            lengths = _by_positions(lengths, others.get("position_ids"), options)
        if lengths is None:
            count("plain")
            out = flash_attn_func(q, k, v, dropout, **options)
            if place is not None:
                heads_first.keep(place, (query, key, value), (q, k, v))
        else:
            out = _compact(q, k, v, lengths, dropout, options)
            mask = lengths.as_mask() if mask is None else mask
    else:
        out = _biased(q, k, v, mask, position_bias, dropout, options)
    if not others.get("output_attentions"):
        return out, None
    logger.warning_once(
        "heedful: output_attentions=True computes the weights once more in plain PyTorch, which "
        "takes the memory of queries x keys"
    )
    return out, attention_weights(q, k, _bias(q, k, mask, position_bias), options, mask is not None)


def _refuse(others: dict[str, Any]) -> None:
    for name in REFUSED:
        if others.get(name) is not None:
            raise ValueError(f"heedful does not serve {name}; attn_implementation='eager' may")


def _refuse_beside_lengths(position_bias: Tensor | None, others: dict[str, Any]) -> None:
    asks_weights = bool(others.get("output_attentions"))
    asked = {"position_bias": position_bias is not None, "output_attentions": asks_weights}
    for name, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"heedful does not serve {name} beside cu_seq_lens_q")


def _given(q, k, v, lengths: tuple, dropout: float, options: dict, others: dict) -> Tensor:
    """Packed sequences whose lengths came with the model's arguments."""
    cu_q, cu_k, longest_q, longest_k = lengths
    if others.get("block_table") is not None:
        return paged(q, k, v, cu_k, options, others)
    count("given")
    out = flash_attn_varlen_func(
        _flat(q),
        _flat(k),
        _flat(v),
        cu_q,
        cu_k,
        q.shape[0] * q.shape[1] if longest_q is None else longest_q,
        k.shape[0] * k.shape[1] if longest_k is None else longest_k,
        dropout,
        **options,
    )
    return out.view(q.shape[0], q.shape[1], *out.shape[1:])


def paged(q, k, v, cu_k: Tensor, options: dict, others: dict) -> Tensor:
    """One new token of each sequence of a continuous batch, over its pages; appends its keys."""
    count("paged")
    tokens = q.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    # Rows that pad a captured batch have no keys; length -1 marks them.
    lengths = cu_k.diff()[:tokens] - 1
    out = flash_attn_with_kvcache(
        q,
        others["k_cache"],
        others["v_cache"],
        k,
        v,
        cache_seqlens=lengths,
        block_table=others["block_table"],
        **options,
    )
    return out.transpose(0, 1)


def _flat(x: Tensor) -> Tensor:
    """(tokens of all rows, heads, head_dim)."""
    return x.reshape(-1, *x.shape[2:])


def _compact(q, k, v, lengths: Compact, dropout: float, options: dict) -> Tensor:
    """Attention by lengths and a window."""
    options = {**options, "causal": lengths.causal, "window_size": lengths.window}
    if lengths.whole:
        count("compact, dense call")
        return flash_attn_func(q, k, v, dropout, **options)
    is_recorded = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    keys = None
    if not is_recorded and not dropout and q.dtype == k.dtype:
        keys = _row_lengths(q, k, v, lengths)
    if keys is not None:
        count("compact, cache call")
        used, leftpad = keys
        if leftpad is None:  # It takes less of the host's time.
            return flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **options)
        return flash_attn_func(q, k, v, seqused_k=used, leftpad_k=leftpad, **options)
    count("compact, packed call")
    cu_q, cu_k, used = lengths.pieces_q, lengths.pieces_k, {}
    if cu_q is None or cu_k is None or not is_recorded:
        # Where a token counts for nothing, Hopper has a forward and no backward of its own.
        cu_q, cu_k = lengths.cu_q, lengths.cu_k
        used = {"seqused_q": lengths.used_q, "seqused_k": lengths.used_k}
    out = flash_attn_varlen_func(
        _flat(q),
        _flat(k),
        _flat(v),
        cu_q,
        cu_k,
        q.shape[1],
        k.shape[1],
        dropout,
        **used,
        **options,
    )
    return out.view(q.shape[0], q.shape[1], *out.shape[1:])


def _row_lengths(q, k, v, lengths: Compact) -> tuple[Tensor, Any] | None:
    """How many keys each row has and where they begin, if a call that reads rows as they lie may
    serve: packed sequences would be copied, unless rows of keys follow each other."""
    batch, q_length = q.shape[:2]
    if lengths.seqused_k is not None:
        if q_length > 1 and batch > 1 and k.is_contiguous() and v.is_contiguous():
            return None
        return lengths.seqused_k, lengths.leftpad_k
    if q_length > 1 or not lengths.causal or lengths.used_q.shape[0] != batch + 1:
        return None
    row = torch.arange(batch, device=q.device, dtype=torch.int32) * k.shape[1]
    return lengths.used_k[1:], lengths.cu_k[1:-1] - row


def _biased(q, k, v, mask, position_bias, dropout: float, options: dict) -> Tensor:
    """Attention with a mask of queries x keys."""
    count_dense(mask, position_bias is not None)
    if mask is not None:
        options = {**options, "causal": False, "window_size": UNBOUNDED}  # The mask has both.
    return flash_attn_func(q, k, v, dropout, bias=_bias(q, k, mask, position_bias), **options)


def _bias(q: Tensor, k: Tensor, mask: Tensor | None, position_bias: Tensor | None):
    """Numbers to add to the scores, or bool: True where a query sees a key."""
    if mask is None:
        return position_bias
    shape = q.shape[0], q.shape[1], k.shape[1]
    if is_compact(mask):
        mask = dense(read(mask, *shape), *shape)
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask must have four dimensions, got {tuple(mask.shape)}: the model made it "
            "without transformers' AttentionMaskInterface"
        )
    mask = mask[..., : k.shape[1]]
    if not mask.is_floating_point():
        mask = mask.bool()
    if position_bias is None:
        return mask
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, float("-inf"))
    return position_bias + mask


class _Latest(local):
    """The position_ids of a thread's latest call, and the documents that they gave."""

    positions: Any = None
    version: int | None = -1
    lengths: Compact | None = None


_latest = _Latest()


def _by_positions(lengths: Compact | None, positions: Any, options: dict) -> Compact | None:
    """The lengths of a call of one row: a document begins where its positions start at 0 again,
    since some models make their masks without position_ids. Waits for the device once a forward,
    since all layers have the same tensor; in inference mode once a layer."""
    if not (options["causal"] if lengths is None else lengths.causal and lengths.whole):
        return lengths
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] != 1:
        return lengths
    # Changes of a tensor of inference mode leave no trace: each layer reads it.
    version = None if positions.is_inference() else positions._version
    known = _latest.positions
    is_latest = known is not None and known() is positions and _latest.version == version
    if version is None or not is_latest:
        ids = find_packed_sequence_indices(positions)
        _latest.lengths = None if ids is None else documents(ids, True, -1, positions.device)
        _latest.positions, _latest.version = ref(positions), version
    if _latest.lengths is None:
        return lengths
    left = options["window_size"][0] if lengths is None else lengths.left
    return _latest.lengths._replace(left=left)
