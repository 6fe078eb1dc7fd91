"""The backward of a call on what autograd saved for it.

Hooks on saved tensors (activation offload, checkpoints, compression) may give back the same values
in other memory, with other strides. So a backward is bound to the tensors that it gets, and not to
those of its forward.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.core.call.arguments import Options
from heedful.core.call.operands import Gradients, Operands
from heedful.torch.base.dispatch import Likeness, check_bare, is_bare
from heedful.torch.base.forked import on_own_thread
from heedful.torch.eager.backends import GpuBackward
from heedful.torch.eager.execute import address_of
from heedful.torch.operands.adapt import Step, adapt, adaptations, dense_rows

# A hook that returns another layout each time should not fill the memory.
_MOST_LAYOUTS = 64


class _Layout(NamedTuple):
    """The backward for one layout of saved tensors and incoming gradients. likeness: recognises
    tensors of this layout; None for one that comes only once. steps: from the caller's tensors to
    operands. is_plain: whether there are no steps, and rows of out and the whole lse are
    contiguous. run_on: runs on the addresses of plain tensors, if it can.
    """

    likeness: Likeness | None
    steps: tuple[Step, ...]
    run: Any  # a Backward, of a layout that is kept
    is_plain: bool
    run_on: Callable[[list[int]], Gradients] | None


class Backwards:
    """The backwards of one kind of call: one for each layout of the tensors that autograd
    passes."""

    def __init__(self, runner, x: Operands, options: Options):
        """runner: the forward's. x: the caller's tensors, and a Philox key if there is one.
        options: the call's."""
        self._device, self._options = x.q.device, options
        present = [index for index, tensor in enumerate(x) if tensor is not None]
        self._present, self.pick = present, itemgetter(*present)
        self.names = (*(Operands._fields[index] for index in present), "out", "lse")
        self._dtypes = [tensor.dtype for tensor in self.pick(x)]
        self._begin(runner, x)

    def _begin(self, runner, x: Sequence[Any]) -> None:
        self.runner = runner
        self._shapes = [tensor.shape for tensor in self.pick(x)]
        # The latest layouts by slot: of a backward without and with a gradient of the lse, and of
        # one without whose gradients lie as their operands do; last the Written, if there is one.
        self.latest: list[Any] = [None, None, None, None]
        self._layouts: dict[tuple, _Layout] = {}

    def at(self, runner, x: Sequence[Any]) -> "Backwards":
        """The backwards of the same call at other lengths."""
        made = object.__new__(Backwards)
        made._device, made.pick, made.names = self._device, self.pick, self.names
        made._present, made._dtypes = self._present, self._dtypes
        made._options = self._options
        made._begin(runner, x)
        return made

    def __call__(
        self,
        saved: Sequence[Tensor],
        dout,
        dlse=None,
        kv_grad: bool = True,
        is_dispatched: bool = False,
        laid_out: bool = False,
    ) -> Gradients:
        """Gradients of the operands. saved: the operands that are there, as `pick` picks them from
        the caller's tensors, then out and lse. dout, dlse: from autograd: any strides, or None.
        kv_grad: whether those of k and v are wanted; if not, they may be None. is_dispatched:
        whether the dispatcher has already resolved the tensors. laid_out: without dlse, whether
        gradients are to lie as their operands do, where that costs no copy. Raises ValueError if a
        hook returned other tensors than were saved.
        """
        if dout is None:
            dout = on_own_thread(torch.zeros_like, saved[-2])
        tensors, received = (*saved, dout), dlse
        if dlse is not None:
            if not is_bare(dlse):
                return self._of_odd(tensors, dlse, kv_grad, is_dispatched)
            dlse = on_own_thread(dlse.contiguous)
        slot = 2 if laid_out else int(dlse is not None)
        grads = self.like_latest(tensors, dlse, slot) or self._of_any(tensors, dlse, kv_grad, slot)
        return grads or self._of_odd(tensors, received, kv_grad, is_dispatched)

    def like_latest(self, tensors: Sequence[Tensor], dlse=None, slot: int = 0) -> Gradients | None:
        """The gradients, if tensors are like the last ones; None if not. tensors: the saved ones,
        and dout. dlse: contiguous. slot: as in `latest`."""
        layout = self.latest[slot]
        if layout is None or layout.run_on is None or layout.likeness is None:
            return None
        addresses = layout.likeness.addresses(tensors)
        if addresses is None:
            return None
        if dlse is not None:
            addresses.append(dlse.data_ptr())
        return layout.run_on(addresses)

    def _of_odd(
        self, tensors: tuple[Tensor, ...], dlse: Tensor | None, kv_grad: bool, is_dispatched: bool
    ) -> Gradients:
        """The gradients of tensors whose values only the dispatcher knows: views with a negative
        bit, wrappers, batches of gradients."""
        *saved, dout = tensors
        if is_dispatched:
            for name, tensor in zip((*self.names, "dout", "dlse"), (*tensors, dlse), strict=True):
                check_bare(name, tensor)
        problem = self.runner.problem
        asked = problem.bias_grad, problem.rel_bias_grad
        x, options = self.operands(saved), self._options
        if options.kind == "varlen":
            longest = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
            options = options._replace(**longest)
        dq, dk, dv, *more = torch.ops.heedful.attention_v10_backward.default(
            dout, dlse, *saved[-2:], *x, *options, *asked, kv_grad
        )
        if not kv_grad:
            dk = dv = None
        wanted = asked[0], x.sink is not None, asked[1]
        others = [grad if is_wanted else None for grad, is_wanted in zip(more, wanted, strict=True)]
        return Gradients(dq, dk, dv, *others)

    def _of_any(self, tensors: tuple, dlse, kv_grad: bool, slot: int) -> Gradients | None:
        """The gradients of tensors of any layout; None if dout is not bare."""
        *saved, dout = tensors
        dout = dense_rows(dout)
        tensors = (*saved, dout)
        layout = self.latest[slot]
        addresses = layout and layout.likeness and layout.likeness.addresses(tensors)
        if layout is None or addresses is None:
            if not is_bare(dout):
                return None
            addresses = [*map(address_of, tensors)]
            layout = self._find(tensors, dlse, slot)
        if layout.run_on is not None:
            return layout.run_on(addresses if dlse is None else [*addresses, dlse.data_ptr()])
        x, (out, lse) = self.operands(tensors), saved[-2:]
        if not layout.is_plain:
            x, out, lse = adapt(x, layout.steps), dense_rows(out), lse.contiguous()
        return layout.run(x, out, lse, dout, dlse, kv_grad)

    def operands(self, tensors: Sequence[Tensor]) -> Operands:
        """The operands among the tensors: the first ones."""
        x: list[Tensor | None] = [None] * len(Operands._fields)
        for index, tensor in zip(self._present, tensors, strict=False):
            x[index] = tensor
        return Operands._make(x)

    def _find(self, tensors: tuple[Tensor, ...], dlse: Tensor | None, slot: int) -> _Layout:
        """The layout of tensors that are not like the last ones."""
        layout = self._like_others(tensors, dlse, slot)
        if layout is not None:
            # A layout that came once is not kept.
            once = layout.likeness is None
            self.latest[slot] = layout._replace(run=None, run_on=None) if once else layout
            return layout
        key = (slot, *[_key(tensor) for tensor in tensors])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._new(tensors, dlse, slot)
        elif layout is self.latest[slot]:
            # The layout is the same, but guards differ: for example, one tensor now stands for two.
            layout = self._layouts[key] = layout._replace(likeness=Likeness(tensors))
        if all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
            self.latest[slot] = layout
        return layout

    def _like_others(self, tensors: tuple, dlse: Tensor | None, slot: int) -> _Layout | None:
        """The layout, if it differs from that of another call in lengths alone. It has no guards:
        for lengths that come only once these take longer than they save."""
        latest = self.latest[slot]
        if latest is not None and latest.likeness is not None:
            return None
        # The lse is read with its strides, and deltas have the same.
        shapes = [tensor.shape for tensor in tensors[:-3]]
        if shapes != self._shapes or not tensors[-2].is_contiguous():
            return None
        once = latest is None
        whole = tensors if dlse is None else (*tensors, dlse)
        run = self.runner.backward_like(whole, slot, once)
        if run is None:
            return None
        return _Layout(None if once else Likeness(tensors), (), run, True, run.run_on)

    def _new(self, tensors: tuple[Tensor, ...], dlse: Tensor | None, slot: int) -> _Layout:
        problem = self.runner.problem
        out_kind = problem.out_shape, getattr(torch, problem.out_dtype)
        of_operands = zip(self._shapes, self._dtypes, strict=True)
        kinds = (*of_operands, out_kind, (problem.lse_shape, torch.float32))
        for name, tensor, kind in zip(self.names, tensors, kinds, strict=False):
            check_restored(name, tensor, *kind, self._device)
            check_bare(name, tensor)
        x, (out, lse, dout) = self.operands(tensors), tensors[-3:]
        steps = adaptations(x, problem)
        dense = dense_rows(out), lse.contiguous()
        run = self.runner.backward_of(adapt(x, steps), *dense, dout, dlse, slot == 2)
        is_plain, run_on = not steps and dense[0] is out and lse.is_contiguous(), None
        if is_plain and isinstance(run, GpuBackward):
            run_on = None if run.copied else run.run_on
            if run.kinds:
                # It can be found again, since only lengths differ.
                likeness = Likeness(tensors if dlse is None else (*tensors, dlse), run.kinds)
                self.runner.case.latest[slot] = likeness, run
        return _Layout(Likeness(tensors), steps, run, is_plain, run_on)


def _key(tensor: Tensor) -> tuple:
    """The facts of a saved tensor that a backward may depend on."""
    facts = (tensor.__class__, tensor.shape, tensor.dtype, tensor.device, tensor.layout)
    address = tensor.data_ptr()
    return *facts, tensor.stride(), tensor.is_neg(), address != 0, address % 16 == 0


def check_restored(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """ValueError unless a hook returned a tensor of the saved shape, dtype and device."""
    got = tuple(tensor.shape), tensor.dtype, tensor.device
    if tensor.layout != torch.strided or got != (tuple(shape), dtype, device):
        raise ValueError(
            f"{name} must come back from a saved-tensor hook as it was saved, {tuple(shape)}"
            f" {dtype} on {device}, got {got[0]} {got[1]} on {got[2]}"
        )
