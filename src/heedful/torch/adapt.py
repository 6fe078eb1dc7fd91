"""From the tensors a caller gave to the operands that kernels take: views wherever possible."""

import torch
from torch import Tensor

from heedful.core.operands import Operands
from heedful.core.problem import AttentionProblem
from heedful.torch.checks import FLOATS

_VECTORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "kv_batch_idx", "leftpad_k")
_SCALES = ("q_descale", "k_descale", "v_descale", "k_shift", "v_shift")


def adapt(x: Operands, problem: AttentionProblem) -> Operands:
    """Checked tensors as Operands has them: expanded by strides of 0; q, k, v and index tensors
    copied where their last dim is not contiguous. Returns fields that need nothing as they are.
    """
    changed: dict[str, Tensor | None] = {}
    for name in ("q", "k", "v", *_VECTORS, "block_table"):
        tensor = getattr(x, name)
        if tensor is not None:
            changed[name] = dense_rows(tensor)
    if x.block_table is not None and x.cu_seqlens_q is not None:
        # Pages are found through the table: of cu_seqlens_k only the lengths matter.
        if x.seqused_k is None:
            changed["seqused_k"] = x.cu_seqlens_k[1:] - x.cu_seqlens_k[:-1]
        changed["cu_seqlens_k"] = None
    batch, heads = problem.batch, problem.heads_q
    if x.bias is not None:
        full = (batch, heads, problem.seqlen_q, problem.seqlen_k)
        changed["bias"] = _expanded(own_bias(x.bias, problem), full)
    if x.alibi_slopes is not None:
        changed["alibi_slopes"] = _expanded(x.alibi_slopes, (batch, heads))
    if x.tree_mask is not None:
        square = (batch, problem.seqlen_q, problem.seqlen_q)
        changed["tree_mask"] = _expanded(x.tree_mask, square)
    if x.sink is not None:
        changed["sink"] = dense_rows(x.sink)
    if x.seed is not None:
        changed["seed"] = x.seed if x.seed.dim() == 1 else x.seed.reshape(1)
    for name in _SCALES:
        tensor = getattr(x, name)
        if tensor is not None:
            whole = tensor.dim() > 2
            changed[name] = tensor if whole else _expanded(tensor, (batch, problem.heads_k))
    return x._replace(**changed)


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last dim has another stride than 1."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous()


def own_bias(bias: Tensor, problem: AttentionProblem) -> Tensor:
    """The bias before we expand it. One that came expanded is copied if it wants a gradient, since
    each of its elements has one of its own."""
    if problem.bias_grad and any(
        stride == 0 and size > 1 for stride, size in zip(bias.stride(), bias.shape, strict=True)
    ):
        return bias.contiguous()
    return bias


def _expanded(tensor: Tensor, shape: tuple) -> Tensor:
    return tensor if tensor.shape == shape else tensor.expand(shape)


def bias_gradient(dbias: Tensor, shape: tuple) -> Tensor:
    """The gradient in the shape of the caller's bias."""
    return dbias.sum_to_size((1,) * (4 - len(shape)) + tuple(shape)).reshape(shape)


def copies(x: Operands, adapted: Operands) -> list[str]:
    """What a user should know about the tensors that were copied."""
    notes = []
    for name in ("q", "k", "v"):
        given = getattr(x, name)
        if getattr(adapted, name) is not given:
            notes.append(f"{name} is copied: its last dim has stride {given.stride(-1)}")
    return notes


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether all bases and strides are multiples of 16 bytes."""
    for tensor in tensors:
        if tensor is None:
            continue
        item = tensor.element_size()
        if tensor.data_ptr() % 16 or any(
            stride * item % 16 and size > 1
            for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False)
        ):
            return False
    return True


def autocast(tensors: tuple, device_type: str) -> tuple:
    """q, k, v and bias, the first four, in autocast's dtype; fp8, float64 and None stay."""
    dtype = torch.get_autocast_dtype(device_type)
    cast = (
        t.to(dtype) if isinstance(t, Tensor) and t.dtype in FLOATS and t.dtype != dtype else t
        for t in tensors
    )
    return tuple(cast)
