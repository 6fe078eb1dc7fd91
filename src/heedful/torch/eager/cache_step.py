"""A step over a KV cache on a GPU, by one program: new keys and values go in, rotary positions are
applied, and attention follows. No value is read back.
"""

from typing import Any

import torch
from torch import Tensor

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import CacheUpdate
from heedful.core.call.operands import Operands
from heedful.core.planning.plan import Plan
from heedful.launch.program import programs
from heedful.launch.program.buffers import results
from heedful.launch.record import note
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.execute import Allocator, Case, address_of, allocator, current_device
from heedful.torch.operands.adapt import dense_rows


class DeviceStep:
    """The work of a call that appends, for one kind of call on one GPU; compiles when it is made.
    It also counts the keys that there are then, which takes torch a launch of its own.

    counts: whether it does; without new tokens nothing is launched that could.
    """

    __slots__ = ("counts", "_device", "_keeps_rest", "_new_lse", "_new_out", "_new_q", "_run")

    def __init__(self, x: Operands, update: CacheUpdate, plan: Plan, out, q_leaves: bool):
        """x: operands of attention, but for q, which is the caller's. plan: of attention. out: what
        it writes into, None where it makes that. q_leaves: whether rotated queries are returned,
        and not the program's own."""
        q, problem = x.q, plan.problem
        self._device, self.counts = q.device, bool(update.k.numel())
        self._keeps_rest = problem.keeps_rest
        lengths = q.new_empty(q.shape[0], dtype=torch.int32)
        given = {n: array_spec(t) for n, t in named(x, update, lengths, self.counts).items()}
        left = results(problem)
        if out is not None:
            left["out"] = array_spec(out)
        if update.rotary_cos is not None and q_leaves:
            left["q"] = ArraySpec.contiguous(tuple(q.shape), given["q_new"].dtype)
        interleaved = bool(update.rotary_interleaved)
        buffers = {**given, **left}
        step = programs.step(plan, buffers, interleaved, update.position0)
        note(plan, "step", buffers, interleaved=interleaved, position0=update.position0)
        self._run = Case(step, plan.device.arch, q.device, [*given, *left]).alone()
        self._new_out = self._allocator(left["out"])
        self._new_lse = self._allocator(left["lse"]) if "lse" in left else None
        self._new_q = self._allocator(left["q"]) if "q" in left else None

    def _allocator(self, spec: ArraySpec) -> Allocator:
        return allocator(spec.shape, getattr(torch, spec.dtype), self._device)

    def __call__(
        self, x: Operands, update: CacheUpdate, start: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Any, Tensor | None]:
        """(out, lse or None, rotated queries or None). lse: a pair with its rest where that is
        kept. x: as at construction; its lengths are of
        account where none are counted. start: int32 (B,), where new tokens go."""
        tensors = [*named(x, update, start, self.counts).values()]
        return self.on([*map(address_of, tensors)], out)

    def on(self, addresses: list[int], out: Tensor | None = None):
        """The same of the addresses of `named` tensors, in a list for this call alone."""
        if current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.on(addresses, out)
        q = lse = None
        if out is None:
            out = self._new_out()
        addresses.append(out.data_ptr())
        if self._new_lse is not None:
            lse = self._new_lse()
            addresses.append(lse.data_ptr())
            if self._keeps_rest:
                lse = lse, self._new_lse()
                addresses.append(lse[1].data_ptr())
        if self._new_q is not None:
            q = self._new_q()
            addresses.append(q.data_ptr())
        self._run(addresses)
        return out, lse, q


def named(x: Operands, update: CacheUpdate, start: Tensor, counts: bool) -> dict[str, Tensor]:
    """The tensors of a step as its program knows them, rows of the new ones contiguous. counts:
    whether lengths are counted, and not x's."""
    tensors = {n: t for n, t in zip(Operands._fields, x, strict=True) if t is not None}
    tensors |= {"k_new": dense_rows(update.k), "v_new": dense_rows(update.v)}
    tensors["cache_seqlens"] = start
    if update.rotary_cos is not None:
        tensors["q_new"] = dense_rows(tensors.pop("q"))
        tensors["rotary_cos"] = update.rotary_cos.contiguous()
        tensors["rotary_sin"] = update.rotary_sin.contiguous()
    if counts:
        tensors.pop("seqused_k", None)
    return tensors
