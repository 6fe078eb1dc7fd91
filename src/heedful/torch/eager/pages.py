"""Paged keys for a backward that takes dense keys: pages are gathered before it, and gradients
added up in the pages after it. It is plain torch, and reads nothing back. Several sequences may
share a page, whose gradient is then the sum of theirs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.core.call.operands import Gradients, Operands


def backward_of_pages(
    dense: Callable[..., Gradients], x: Operands, longest: int, kv_grad: bool, *cotangents
) -> Gradients:
    """The result of `dense(x, *cotangents)` for x with its keys in pages.

    x: as Operands says, with block_table (B, pages) and seqused_k (B,). longest: an upper bound of
    the keys of a sequence. kv_grad: whether gradients of the pages are wanted, which are as large
    as the cache.
    """
    numbers = page_numbers(x, longest)
    rows = x._replace(k=gathered(x.k, numbers), v=gathered(x.v, numbers), block_table=None)
    grads = dense(rows, *cotangents)
    dk, dv = (
        added_up(grad, numbers, pages) if kv_grad else None
        for grad, pages in ((grads.dk, x.k), (grads.dv, x.v))
    )
    return grads._replace(dk=dk, dv=dv)


def page_numbers(x: Operands, longest: int) -> Tensor:
    """int64 (B, pages): the numbers of the pages that `longest` keys fill. Numbers of pages that do
    not exist are replaced, and are 0 where a sequence has no key."""
    page_size = x.k.shape[1]
    table = x.block_table[:, : -(-longest // page_size)]
    begin = torch.arange(table.shape[1], device=table.device) * page_size
    ends = x.seqused_k if x.leftpad_k is None else x.seqused_k + x.leftpad_k
    table = torch.where(begin < ends[:, None], table, 0)
    return table.clamp(0, x.k.shape[0] - 1).long()


def gathered(pages: Tensor, numbers: Tensor) -> Tensor:
    """(B, pages * page_size, heads, dim) of (num_pages, page_size, heads, dim)."""
    shape = (numbers.shape[0], numbers.shape[1] * pages.shape[1], *pages.shape[2:])
    if not pages.shape[0]:
        return pages.new_zeros(shape)
    return pages.index_select(0, numbers.flatten()).view(shape)


def added_up(grad: Tensor, numbers: Tensor, pages: Tensor) -> Tensor:
    """The gradient of the pages from that of the gathered rows; rows past a sequence's end have
    none. The order of the sums, and so their bits, are the same each time."""
    result = torch.zeros_like(pages, memory_format=torch.contiguous_format)
    if pages.shape[0]:
        parts = grad.view(-1, *pages.shape[1:])
        result.index_put_((numbers.flatten(),), parts, accumulate=True)
    return result
