"""The gradients of a call from its results, for JAX."""

from collections.abc import Sequence

from jax import Array
from jax.typing import ArrayLike

from heedful.core.call.arguments import WHOLE, Options, Quads, one_sink
from heedful.core.call.describe import check_packed
from heedful.core.call.numerics import Documents, with_block_mask, with_documents, with_numerics
from heedful.core.call.operands import Gradients, Operands
from heedful.jax.traced.call import differentiate
from heedful.masks.block_mask import BlockMask, block_operands


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    leftpad_k: Array | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    q_offset: ArrayLike | None = None,
    key_ranges: Array | Documents | None = None,
    block_mask: BlockMask | None = None,
    bias: Array | None = None,
    rel_bias: Array | None = None,
    sink: Array | None = None,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
    dropout_seed: ArrayLike | None = None,
    dropout_origin: Sequence[int] | Array | Quads = WHOLE,
    bias_grad: bool = True,
    rel_bias_grad: bool = True,
    backend: str | None = None,
    sm_margin: int | None = None,
) -> Gradients:
    """The gradients of sum(out * dout) + sum(lse * dlse) with respect to the inputs of a call of
    `flash_attn_func`, or with cu_seqlens_q of `flash_attn_varlen_func`. Arguments that are not
    listed are that function's, and must be those of the call. k and v may be a part of the keys, as
    under context parallelism, with out and lse of all keys: the gradients are then those of that
    part.

    Args:
        dout: as out.
        q, k, v: the call's.
        out: what the call returned.
        lse: the log-sum-exp that it returned, float32.
        dlse: the gradient with respect to lse, float32, as lse; None means zero.
        cu_seqlens_q: if passed, sequences are packed; cu_seqlens_k, max_seqlen_q, max_seqlen_k and
            block_table come with it alone, leftpad_k without it.
        dropout_seed: the seed that the call had; required if dropout_p > 0.
        bias_grad: whether the gradient of a bias is computed; a bool bias has none.
        rel_bias_grad: whether that of rel_bias is.

    Returns:
        A named tuple (dq, dk, dv, dbias, dsink, drel_bias), each in the shape and dtype of its
        input; the last three are None where there is no such input, dbias also without bias_grad,
        drel_bias without rel_bias_grad.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    packed = cu_seqlens_q is not None
    check_packed(packed, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, leftpad_k)
    longest = (max_seqlen_q, max_seqlen_k) if packed else None
    backend = with_numerics(backend, None, sm_margin)
    backend, key_ranges = with_documents(backend, key_ranges)
    backend = with_block_mask(backend, block_mask)
    options = Options(
        kind="varlen" if packed else "dense",
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=True,
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
        leftpad_k=leftpad_k,
        block_table=block_table,
        key_ranges=key_ranges,
        **block_operands(block_mask, q, k, longest=longest),
    )
    saved = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    return differentiate(x, options, saved, dropout_seed, bias_grad, rel_bias_grad)
