"""A step over a KV cache on a GPU as one program: it writes new keys and values, applies rotary
positions, and computes attention. No value is read back.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import CacheUpdate
from heedful.core.call.operands import Operands
from heedful.core.planning.plan import Plan
from heedful.launch.noted import note
from heedful.launch.program import programs
from heedful.launch.program.buffers import results
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.execute import Case, address_of, as_results
from heedful.torch.operands.adapt import dense_rows


class DeviceStep:
    """The program of one kind of call that appends, on one GPU; compiles when it is made. It also
    computes the lengths with the new keys, which would take torch another launch. run: takes the
    addresses of the `named` tensors, and of `out` if that is passed, and returns the results.
    counts: whether it computes the lengths; it does not without new tokens.
    """

    __slots__ = ("counts", "run", "_keeps_rest")

    def __init__(self, x: Operands, update: CacheUpdate, plan: Plan, out, q_leaves: bool):
        """x: operands of attention, with the caller's q. plan: that of attention. out: the tensor
        to write into, None if the program makes it. q_leaves: whether rotated queries are a result,
        not scratch."""
        q, problem = x.q, plan.problem
        self.counts, self._keeps_rest = bool(update.k.numel()), problem.keeps_rest
        lengths = q.new_empty(q.shape[0], dtype=torch.int32)
        specs = {n: array_spec(t) for n, t in named(x, update, lengths, self.counts).items()}
        made = results(problem)
        if out is not None:
            specs["out"] = array_spec(out)
            del made["out"]
        if update.rotary_cos is not None and q_leaves:
            made["q"] = ArraySpec.contiguous(tuple(q.shape), specs["q_new"].dtype)
        buffers, interleaved = specs | made, bool(update.rotary_interleaved)
        more = {"interleaved": interleaved, "position0": update.position0}
        make = partial(programs.step, buffers=buffers, **more)
        plan, step = programs.runnable(plan, "forward", make)
        note(plan, "step", buffers, **more)
        self.run = Case(step, plan.device.arch, q.device, specs, made).alone()

    def __call__(
        self, x: Operands, update: CacheUpdate, start: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Any, Tensor | None]:
        """(out, lse or None, rotated queries or None). lse: a pair with its rest if that is kept.
        x: as at construction; its lengths matter only if the program does not compute them. start:
        int32 (B,), the storage row of each first new token."""
        tensors = [*named(x, update, start, self.counts).values()]
        if out is not None:
            tensors.append(out)
        return as_results(self.run([*map(address_of, tensors)]), self._keeps_rest, out)


def named(x: Operands, update: CacheUpdate, start: Tensor, counts: bool) -> dict[str, Tensor]:
    """The tensors of a step by the program's names, with contiguous rows of new keys, values and
    queries. counts: whether the program computes the lengths, so that x's are left out."""
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
