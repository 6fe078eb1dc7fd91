"""heedful's kernels for torch's operators of attention, which the dispatcher calls below autograd.
Torch has checked the arguments. Results have the shapes and strides of torch's kernels, since code
from torch.compile relies on them. A second derivative raises torch's error.

    F.scaled_dot_product_attention     heads before rows: `_scaled_dot_product_..._attention`
    varlen_attn, nested tensors        rows before heads: `_flash_attention_...`
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from heedful.integrations.torch.alignment import from_top_left
from heedful.integrations.torch.report import Report
from heedful.torch.api.attention import flash_attn_func, flash_attn_varlen_func
from heedful.torch.api.gradients import attention_backward
from heedful.torch.base.dispatch import any_autocast
from heedful.torch.eager.execute import current_device, maker

# Why calls are passed to torch's own kernels, and the operators some of whose calls are.
MASKED = "attn_bias: calls with a mask stay torch's"
WIDE = "float32 or a head dim above 256 in torch's memory-efficient attention"
HANDED_BACK = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
)
# The largest head dim of torch's other fused kernels.
_MOST_DIM = 256
# Rows of the lse of memory-efficient attention come in blocks.
_LSE_ROWS = 32
_IS_HIP = torch.version.hip is not None
# As torch's own guards do, in a tenth of the time of torch.no_grad.
_set_grad_enabled = torch._C._set_grad_enabled


class Kernels:
    """The kernels of one activation.

    report: where calls are counted. torchs: torch's own kernels of `HANDED_BACK`, as
    torch.library.get_kernel gives them, None where there are none.
    """

    def __init__(self, report: Report, torchs: dict[str, Any]):
        self._report, self._torchs = report, torchs

    def by_operator(self) -> dict[str, Callable]:
        """The kernels by the operator's name. Those of `HANDED_BACK` also take the dispatch
        keys."""
        return {
            "_scaled_dot_product_flash_attention": self.sdpa_flash,
            "_scaled_dot_product_flash_attention_backward": self.sdpa_flash_backward,
            HANDED_BACK[0]: self.sdpa_cudnn,
            HANDED_BACK[1]: self.sdpa_cudnn_backward,
            HANDED_BACK[2]: self.sdpa_efficient,
            HANDED_BACK[3]: self.sdpa_efficient_backward,
            "_flash_attention_forward": self.flash,
            "_flash_attention_forward_no_dropout_inplace": self.flash_into,
            "_flash_attention_backward": self.flash_backward,
        }

    def sdpa_flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ):
        """_scaled_dot_product_flash_attention, which is causal from the bottom right."""
        _check_debug(return_debug_mask)
        state, seed, offset = _states(query.device, dropout_p, of_flash=True)
        out, lse = _heads_first(query, key, value, dropout_p, is_causal, None, scale, seed)
        self._report.count("_scaled_dot_product_flash_attention")
        debug = _empty((0,), query.dtype, query.device)
        return out, lse, None, None, query.shape[2], key.shape[2], state, offset, debug

    def sdpa_flash_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ):
        """_scaled_dot_product_flash_attention_backward."""
        how = dropout_p, is_causal, None, scale, philox_seed
        grads = _heads_first_backward(grad_out, query, key, value, out, logsumexp, *how)
        self._report.count("_scaled_dot_product_flash_attention_backward")
        return grads

    def sdpa_cudnn(
        self,
        keys,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ):
        """_scaled_dot_product_cudnn_attention, which is causal from the top left."""
        if attn_bias is not None:
            given = query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal
            return self._torchs_own(
                MASKED, HANDED_BACK[0], keys, *given, return_debug_mask, scale=scale
            )
        _check_debug(return_debug_mask)
        rows, columns = query.shape[2], key.shape[2]
        state, seed, offset = _states(query.device, dropout_p, of_flash=False)
        k, v, causal, window = from_top_left(query, key, value, is_causal)
        out, lse = _heads_first(query, k, v, dropout_p, causal, window, scale, seed)
        self._report.count(HANDED_BACK[0])
        return out, lse.unsqueeze(-1), None, None, rows, columns, state, offset, None

    def sdpa_cudnn_backward(
        self,
        keys,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ):
        """_scaled_dot_product_cudnn_attention_backward."""
        if attn_bias is not None:
            given = grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset
            more = attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal
            return self._torchs_own(MASKED, HANDED_BACK[1], keys, *given, *more, scale=scale)
        lse = logsumexp.squeeze(-1)
        how = dropout_p, is_causal, scale, philox_seed
        grads = _from_top_left_backward(grad_out, query, key, value, out, lse, *how)
        self._report.count(HANDED_BACK[1])
        return grads

    def sdpa_efficient(
        self,
        keys,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ):
        """_scaled_dot_product_efficient_attention, which is causal from the top left. Results are
        stored with rows before heads, whatever the strides of operands."""
        reason = _not_ours(query, value, attn_bias)
        if reason is not None:
            given = query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal
            return self._torchs_own(reason, HANDED_BACK[2], keys, *given, scale=scale)
        state, seed, offset = _states(query.device, dropout_p, of_flash=False)
        k, v, causal, window = from_top_left(query, key, value, is_causal)
        how = dropout_p, causal, window, scale, seed
        out, lse = _heads_first(query, k, v, *how, rows_first=True)
        self._report.count(HANDED_BACK[2])
        batch, heads, rows = lse.shape
        if not compute_log_sumexp:
            lse = _empty((batch, heads, 0), torch.float32, query.device)
        elif rows % _LSE_ROWS and not _IS_HIP:
            lse = torch.nn.functional.pad(lse, (0, -rows % _LSE_ROWS))
        return out, lse, state, offset

    def sdpa_efficient_backward(
        self,
        keys,
        grad_out_: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        dropout_p: float,
        grad_input_mask: Sequence[bool],
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ):
        """_scaled_dot_product_efficient_attention_backward."""
        reason = _not_ours(query, value, attn_bias)
        if reason is not None:
            given = grad_out_, query, key, value, attn_bias, out, logsumexp
            more = philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal
            return self._torchs_own(reason, HANDED_BACK[3], keys, *given, *more, scale=scale)
        lse = logsumexp[:, :, : query.shape[2]].contiguous()
        how = dropout_p, is_causal, scale, philox_seed
        grads = _from_top_left_backward(
            grad_out_, query, key, value, out, lse, *how, rows_first=True
        )
        self._report.count(HANDED_BACK[3])
        return *grads, None

    def flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **more,
    ):
        """_flash_attention_forward: packed sequences if cum_seq_q is passed, else dense ones."""
        _check_debug(return_debug_mask)
        state, seed, offset = _states(query.device, dropout_p, of_flash=True)
        lengths = cum_seq_q, cum_seq_k, max_q, max_k
        window = window_size_left, window_size_right
        into = None if _in_order(query) else _like(query, query.shape)
        out, lse = _rows_first(
            query, key, value, lengths, dropout_p, is_causal, window, scale, seed, into, **more
        )
        self._report.count("_flash_attention_forward")
        return out, lse, state, offset, _empty((0,), query.dtype, query.device)

    def flash_into(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **more,
    ):
        """_flash_attention_forward_no_dropout_inplace: the lse of what is written into out."""
        _check_debug(return_debug_mask)
        if dropout_p:
            raise RuntimeError(f"dropout_p must be 0 where out is given, got {dropout_p}")
        lengths = cum_seq_q, cum_seq_k, max_q, max_k
        window = window_size_left, window_size_right
        _, lse = _rows_first(
            query, key, value, lengths, 0.0, is_causal, window, scale, None, out, **more
        )
        self._report.count("_flash_attention_forward_no_dropout_inplace")
        return lse

    def flash_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ):
        """_flash_attention_backward."""
        how: dict[str, Any] = {}
        if cum_seq_q is not None:
            how = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
            how |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
        found = _bare(
            attention_backward,
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
            window_size=_window(window_size_left, window_size_right),
            dropout_seed=_seed(rng_state) if dropout_p else None,
            **how,
        )
        self._report.count("_flash_attention_backward")
        pairs = zip(found[:3], (query, key, value), strict=True)
        return tuple([_laid_out(grad, x) for grad, x in pairs])

    def _torchs_own(self, reason: str, name: str, keys, *args, **kwargs):
        """The result of torch's own kernel."""
        kernel = self._torchs.get(name)
        if kernel is None:
            raise RuntimeError(
                f"heedful does not run this call of aten::{name} ({reason}), and torch has no"
                " kernel of its own here"
            )
        self._report.decline(reason)
        return kernel.call_boxed(keys, *args, **kwargs)


def _check_debug(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise RuntimeError("return_debug_mask must be False while heedful runs this, got True")


def _not_ours(query: Tensor, value: Tensor, attn_bias: Tensor | None) -> str | None:
    """Why a call of memory-efficient attention is passed to torch's kernel; None if heedful runs
    it."""
    if attn_bias is not None:
        return MASKED
    dims = max(query.shape[3], value.shape[3])
    return WIDE if query.dtype.itemsize != 2 or dims > _MOST_DIM else None


def _from_top_left_backward(
    dout, query, key, value, out, lse, dropout_p, is_causal, scale, state, rows_first=False
):
    """Gradients of query, key and value of a call that `from_top_left` aligned."""
    k, v, causal, window = from_top_left(query, key, value, is_causal)
    how = dropout_p, causal, window, scale, state, rows_first
    dq, dk, dv = _heads_first_backward(dout, query, k, v, out, lse, *how)
    if k is not key:
        dk, dv = _padded(dk, key, rows_first), _padded(dv, value, rows_first)
    return dq, dk, dv


def _heads_first(
    query, key, value, dropout_p, causal, window, scale, seed, rows_first: bool = False
):
    """(out, lse) of operands (batch, heads, rows, dim). rows_first: out is stored with rows before
    heads; else as query is."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rows_first = rows_first or _in_order(q)
    if rows_first and not (dropout_p or window or any_autocast()):
        # As below, in two thirds of the time.
        records = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            out, lse = flash_attn_func(q, k, v, 0.0, scale, causal, return_lse=True)
        finally:
            _set_grad_enabled(records)
        return out.transpose(1, 2), lse
    how: dict[str, Any] = {"return_lse": True, "dropout_seed": seed}
    if window is not None:
        how["window_size"] = window
    if not rows_first:
        how["out"] = _like(query, (*query.shape[:3], value.shape[3])).transpose(1, 2)
    out, lse = _bare(flash_attn_func, q, k, v, dropout_p, scale, causal, **how)
    return out.transpose(1, 2), lse


def _heads_first_backward(
    dout, query, key, value, out, lse, dropout_p, causal, window, scale, state, rows_first=False
):
    """Gradients of query, key and value, (batch, heads, rows, dim). rows_first: they are stored
    with rows before heads; else each as its operand is."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    how: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
    if window is not None:
        how["window_size"] = window
    if dropout_p:
        how |= {"dropout_p": dropout_p, "dropout_seed": _seed(state)}
    dq, dk, dv, *_ = _bare(attention_backward, dout, q, k, v, out, lse, **how)
    if rows_first:
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    return (
        _laid_out(dq, q).transpose(1, 2),
        _laid_out(dk, k).transpose(1, 2),
        _laid_out(dv, v).transpose(1, 2),
    )


def _rows_first(
    query,
    key,
    value,
    lengths,
    dropout_p,
    causal,
    window,
    scale,
    seed,
    into,
    *,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """(out, lse) of (tokens, heads, dim), or without cum_seq_q of (batch, rows, heads, dim)."""
    how: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": causal,
        "window_size": _window(*window),
        "alibi_slopes": alibi_slopes,
        "return_lse": True,
        "num_splits": num_splits or 0,
        "dropout_seed": seed,
        "out": into,
    }
    if lengths[0] is not None:
        how |= {"seqused_k": seqused_k, "block_table": block_table}
        return _bare(flash_attn_varlen_func, query, key, value, *lengths, **how)
    if seqused_k is not None or block_table is not None:
        raise RuntimeError("cum_seq_q must be given with seqused_k or block_table, got None")
    return _bare(flash_attn_func, query, key, value, **how)


def _bare(function: Callable[..., Any], query: Tensor, *args, **kwargs) -> Any:
    """Calls function(query, ...) without autograd and autocast: both have handled the call
    already."""
    records = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        device = query.device.type
        if any_autocast() and torch.get_autocast_dtype(device) != query.dtype:
            with torch.autocast(device, enabled=False):
                return function(query, *args, **kwargs)
        return function(query, *args, **kwargs)
    finally:
        _set_grad_enabled(records)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _states(device: torch.device, dropout_p: float, of_flash: bool):
    """(state, dropout_seed, offset): the tensors that torch saves for the backward, and heedful's
    seed. Without dropout their values are not read."""
    is_pair = of_flash and not _IS_HIP
    shape = (2,) if is_pair else ()
    dtype = torch.uint64 if is_pair else torch.int64
    offset = _empty((), dtype, device)
    if not dropout_p:
        return _empty(shape, dtype, device), None, offset
    drawn = torch.randint(2**63 - 1, shape, dtype=torch.int64, device=device)
    return drawn.view(dtype), drawn.view(-1)[:1], offset


def _seed(state: Tensor) -> Tensor:
    """The dropout_seed saved in a state."""
    return state.view(torch.int64).view(-1)[:1]


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cuda" and device.index == current_device():
        return _maker(device)(shape, (1,) * len(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)


_maker = lru_cache(maxsize=64)(maker)


def _in_order(x: Tensor) -> bool:
    """Whether the strides of (batch, rows, heads, dim), or of (tokens, heads, dim), descend: then
    torch's results are contiguous, as ours are."""
    *batch, rows, heads, dim = x.stride()
    return rows >= heads >= dim and (not batch or batch[0] >= rows)


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialised tensor of this shape whose dims have the order of x's in memory."""
    order = sorted(range(x.dim()), key=lambda dim: x.stride(dim), reverse=True)
    strides, size = [0] * x.dim(), 1
    for dim in reversed(order):
        strides[dim] = size
        size *= shape[dim]
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


def _laid_out(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient with x's order of dims in memory."""
    return grad if _in_order(x) else _like(x, x.shape).copy_(grad)


def _padded(grad: Tensor, x: Tensor, rows_first: bool) -> Tensor:
    """The gradient of x, (batch, heads, rows, dim), from that of its first rows, with 0 for the
    others."""
    batch, heads, rows, dim = x.shape
    whole = torch.zeros_like(x)
    if rows_first:
        whole = x.new_zeros((batch, rows, heads, dim)).transpose(1, 2)
    whole[:, :, : grad.shape[2]] = grad
    return whole
