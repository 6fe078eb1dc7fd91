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

from heedful.core.base.arrays import ordered_strides
from heedful.core.call.arguments import Options, new_operands, new_options
from heedful.integrations.torch import ways
from heedful.integrations.torch.alignment import from_top_left
from heedful.integrations.torch.report import Report
from heedful.torch.api.attention import flash_attn_func, flash_attn_varlen_func
from heedful.torch.api.gradients import attention_backward, eager, known_as
from heedful.torch.base.dispatch import any_autocast
from heedful.torch.eager.calls import CALLS, attend
from heedful.torch.eager.execute import current_device, maker
from heedful.torch.traced import library

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
_is_deterministic = torch._C._get_deterministic_algorithms


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
        device = query.device
        state, seed, offset = _states(device, dropout_p, of_flash=True)
        out, lse = _heads_first(query, key, value, dropout_p, is_causal, scale, seed)
        self._report.count("_scaled_dot_product_flash_attention")
        debug = _nothing(query.dtype, device)
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
        facts = dropout_p, is_causal, scale, philox_seed
        grads = _heads_first_backward(grad_out, query, key, value, out, logsumexp, *facts)
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
            received = query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal
            return self._torchs_own(
                MASKED, HANDED_BACK[0], keys, *received, return_debug_mask, scale=scale
            )
        _check_debug(return_debug_mask)
        rows, columns = query.shape[2], key.shape[2]
        state, seed, offset = _states(query.device, dropout_p, of_flash=False)
        facts = dropout_p, is_causal, scale, seed
        out, lse = _heads_first(query, key, value, *facts, True, has_lse=compute_log_sumexp)
        self._report.count(HANDED_BACK[0])
        if lse is not None:
            lse = lse.unsqueeze(-1)
        return out, lse, None, None, rows, columns, state, offset, None

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
            received = grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset
            more = attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal
            return self._torchs_own(MASKED, HANDED_BACK[1], keys, *received, *more, scale=scale)
        facts = dropout_p, is_causal, scale, philox_seed, True
        grads = _heads_first_backward(grad_out, query, key, value, out, logsumexp, *facts)
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
            received = query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal
            return self._torchs_own(reason, HANDED_BACK[2], keys, *received, scale=scale)
        state, seed, offset = _states(query.device, dropout_p, of_flash=False)
        facts = dropout_p, is_causal, scale, seed
        out, lse = _heads_first(query, key, value, *facts, True, True, compute_log_sumexp)
        self._report.count(HANDED_BACK[2])
        batch, heads, rows, _ = query.shape
        if lse is None:
            lse = torch.empty((batch, heads, 0), dtype=torch.float32, device=query.device)
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
            received = grad_out_, query, key, value, attn_bias, out, logsumexp
            more = philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal
            return self._torchs_own(reason, HANDED_BACK[3], keys, *received, *more, scale=scale)
        facts = dropout_p, is_causal, scale, philox_seed, True, True
        grads = _heads_first_backward(grad_out_, query, key, value, out, logsumexp, *facts)
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
        return out, lse, state, offset, _nothing(query.dtype, query.device)

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
        lengths: dict[str, Any] = {}
        if cum_seq_q is not None:
            lengths = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
            lengths |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
        grads = _bare(
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
            **lengths,
        )
        self._report.count("_flash_attention_backward")
        pairs = zip(grads[:3], (query, key, value), strict=True)
        return tuple([grad if _in_order(x) else _like(x, x.shape).copy_(grad) for grad, x in pairs])

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


def _heads_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: Tensor | None,
    top_left: bool = False,
    rows_first: bool = False,
    has_lse: bool = True,
):
    """(out, lse) of (batch, heads, rows, dim). top_left: where a causal mask is aligned, else
    bottom right. rows_first: out lies so in memory, else as query does. has_lse: else lse is
    None."""
    facts = is_causal, scale, top_left, rows_first, has_lse, _is_deterministic()
    key_of_way = ("forward", facts, query.shape, key.shape)
    results = None if dropout_p else ways.find(key_of_way, (query, key, value))
    if results is None:
        results = _bare(_new_forward, query, key, value, dropout_p, seed, facts, key_of_way)
    return results[0], results[1] if has_lse else None


def _new_forward(query, key, value, dropout_p, seed, facts, key_of_way) -> tuple:
    """(out, lse or None) of a call that is not known."""
    is_causal, scale, top_left, rows_first, has_lse, deterministic = facts
    q, k, v, causal, window = _aligned(query, key, value, is_causal, top_left)
    out = None if rows_first or _in_order(q) else _like(q, (*q.shape[:3], v.shape[3]))
    options = _options(dropout_p, scale, causal, window, deterministic, has_lse)
    results = attend(q, k, v, None, options, out, seed, library.attend)
    if not dropout_p:
        ways.keep_forward(key_of_way, (query, key, value), (q, k, v), options, out)
    out, lse = results if has_lse else (results, None)
    return out.transpose(1, 2), lse


def _heads_first_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    state: Tensor,
    top_left: bool = False,
    rows_first: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, of (batch, heads, rows, dim). lse: as the forward's
    operator returns it. rows_first: they lie so in memory; else each as its operand does."""
    facts = is_causal, scale, top_left, rows_first, _is_deterministic()
    key_of_way, received = (
        ("backward", facts, query.shape, key.shape),
        (query, key, value, out, lse, dout),
    )
    grads = None if dropout_p else ways.find(key_of_way, received)
    if grads is None:
        return _bare(_new_backward, *received, dropout_p, state, facts, key_of_way)
    return tuple(grads)


def _new_backward(query, key, value, out, lse, dout, dropout_p, state, facts, key_of_way):
    """As `_heads_first_backward`, of a call that is not known."""
    received = query, key, value, out, lse, dout
    is_causal, scale, top_left, rows_first, deterministic = facts
    q, k, v, causal, window = _aligned(query, key, value, is_causal, top_left)
    # Some operators have one more dim, some rows beyond the last.
    lse = lse.flatten(2)[:, :, : query.shape[2]].contiguous()
    out, dout = out.transpose(1, 2), dout.transpose(1, 2)
    options = _options(dropout_p, scale, causal, window, deterministic, True)
    seed = _seed(state) if dropout_p else None
    laid_out = not (rows_first or all([_in_order(x) for x in (q, k, v)]))
    saved, asked = (dout, None, out, lse), (False, False)
    call = new_operands(q=q, k=k, v=v), options, saved, seed, asked, laid_out
    grads = eager(*call)[:3]
    if not dropout_p and k.shape[1] == key.shape[2]:
        bound, tensors = CALLS.latest.get(known_as(*call)), (q, k, v, out, lse, dout)
        ways.keep_backward(key_of_way, received, bound, tensors, 2 * laid_out)
    pairs = zip(grads, (query, key, value), strict=True)
    return tuple([_of_whole(grad.transpose(1, 2), x, rows_first) for grad, x in pairs])


def _aligned(query, key, value, is_causal: bool, top_left: bool):
    """(q, k, v, causal, window) of our own calls, (batch, rows, heads, dim)."""
    window = None
    if top_left:
        key, value, is_causal, window = from_top_left(query, key, value, is_causal)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return q, k, v, is_causal, window or (-1, -1)


def _options(dropout_p, scale, causal, window, deterministic, has_lse) -> Options:
    return new_options(
        kind="dense",
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=causal,
        window_size=window,
        deterministic=deterministic,
        return_lse=has_lse,
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
    options: dict[str, Any] = {
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
        options |= {"seqused_k": seqused_k, "block_table": block_table}
        return _bare(flash_attn_varlen_func, query, key, value, *lengths, **options)
    if seqused_k is not None or block_table is not None:
        raise RuntimeError("cum_seq_q must be given with seqused_k or block_table, got None")
    return _bare(flash_attn_func, query, key, value, **options)


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
    """(state, dropout_seed, offset): what torch keeps for the backward, and what heedful draws
    from. Nobody reads the values where nothing is dropped. They are new each time all the same:
    graphs of torch.compile take no tensors from elsewhere, and write into those that they need no
    more."""
    is_pair = of_flash and not _IS_HIP
    shape, strides = ((2,), (1,)) if is_pair else ((), ())
    dtype = torch.uint64 if is_pair else torch.int64
    if device.type == "cuda" and device.index != current_device():
        with torch.cuda.device(device):
            return _states(device, dropout_p, of_flash)
    make = _maker(device)
    offset = make((), (), dtype)
    if not dropout_p:
        return make(shape, strides, dtype), None, offset
    drawn = torch.randint(2**63 - 1, shape, dtype=torch.int64, device=device)
    return drawn.view(dtype), drawn.view(-1)[:1], offset


def _seed(state: Tensor) -> Tensor:
    """The dropout_seed saved in a state."""
    return state.view(torch.int64).view(-1)[:1]


_maker = lru_cache(maxsize=64)(maker)


@lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements, and so without memory: one will do for all."""
    return torch.empty(0, dtype=dtype, device=device)


def _in_order(x: Tensor) -> bool:
    """Whether the strides of (batch, rows, heads, dim), or of (tokens, heads, dim), descend: then
    torch's results are contiguous, as ours are."""
    *batch, rows, heads, dim = x.stride()
    return rows >= heads >= dim and (not batch or batch[0] >= rows)


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor of this shape whose dims lie in memory in x's order."""
    return x.new_empty_strided(shape, ordered_strides(shape, x.stride()))


def _of_whole(grad: Tensor, x: Tensor, rows_first: bool) -> Tensor:
    """The gradient of x, (batch, heads, rows, dim), given that of its first rows, whose rows lie
    before its heads or as x lies: others have none. rows_first: it lies so; else as x does."""
    if grad.shape[2] == x.shape[2] and (
        rows_first
        or _in_order(x.transpose(1, 2))
        or grad.stride() == ordered_strides(x.shape, x.stride())
    ):
        return grad
    batch, heads, rows, dim = x.shape
    whole = _like(x, x.shape)
    if rows_first:
        whole = x.new_empty((batch, rows, heads, dim)).transpose(1, 2)
    whole[:, :, : grad.shape[2]] = grad
    whole[:, :, grad.shape[2] :] = 0
    return whole
