"""Gradients that a backward writes into the caller's tensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from heedful.core.call.operands import Gradients
from heedful.torch.base.dispatch import Likeness, is_bare
from heedful.torch.eager.backends import GpuRunner
from heedful.torch.eager.execute import address_of
from heedful.torch.eager.saved import Backwards
from heedful.torch.operands.adapt import adaptations, dense_rows, is_mappable
from heedful.torch.operands.apart import Apart

# Parts of one call lie in few places.
_MOST = 64
_WRITTEN = ("into[0]", "into[1]", "into[2]")


class _Layout(NamedTuple):
    """likeness: recognises tensors of a layout. apart: checks that those that are written have
    memory of their own. run_on: runs on their addresses; None where some are copied."""

    likeness: Likeness
    apart: Apart
    run_on: Callable[[list[int]], Gradients] | None


class Written:
    """The backwards of one kind of call that write dq, dk and dv."""

    def __init__(self, backwards: Backwards):
        self._backwards = backwards
        # Without and with a gradient of the lse.
        self._latest: list[_Layout | None] = [None, None]
        self._layouts: dict[tuple, _Layout] = {}

    def __call__(
        self, saved: Sequence[Tensor], dout, dlse, places: tuple[Tensor, ...], is_like: bool
    ) -> Gradients | None:
        """The gradients, of which dq, dk and dv are written to these three places. saved, dout,
        dlse: as of Backwards. is_like: None for tensors that are not like the last ones. Raises
        ValueError, before anything is written, where they overlap other tensors."""
        rest = () if dlse is None else (dlse,)
        tensors, layout = (*saved, dout, *rest, *places), self._latest[len(rest)]
        addresses = layout and layout.likeness.addresses(tensors)
        if layout is None or not addresses:
            if is_like:
                return None
            addresses = [*map(address_of, tensors)]
            layout = self._find(tensors, saved, dout, dlse, places)
        layout.apart.check(addresses)
        if layout.run_on is not None:
            grads = layout.run_on(addresses)
        else:
            grads = self._backwards(saved, dout, dlse, True, True)
            for place, grad in zip(places, grads, strict=False):
                place.copy_(grad)
        return grads._replace(dq=places[0], dk=places[1], dv=places[2])

    def _find(self, tensors, saved, dout, dlse, places) -> _Layout:
        """The layout of tensors that are not like the last ones."""
        key = tuple([_key(tensor) for tensor in tensors])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST:
                self._layouts.clear()
            names = *self._backwards.names, "dout", *(() if dlse is None else ("dlse",))
            apart = Apart(dict(zip((*names, *_WRITTEN), tensors, strict=True)), _WRITTEN)
            run_on = self._bound(tensors, saved, dout, dlse, places)
            layout = self._layouts[key] = _Layout(Likeness(tensors), apart, run_on)
        self._latest[dlse is not None] = layout
        return layout

    def _bound(self, tensors, saved, dout, dlse, places) -> Any:
        """Runs on addresses of such tensors, if none is copied."""
        runner, (out, lse) = self._backwards.runner, saved[-2:]
        whole = (lse,) if dlse is None else (lse, dlse)
        x = self._backwards.operands(saved)
        if (
            not isinstance(runner, GpuRunner)
            or runner.problem.page_size
            or not all(map(is_bare, tensors))
            or adaptations(x, runner.problem)
            or any(rows is not dense_rows(rows) for rows in (out, dout))
            or not all(map(Tensor.is_contiguous, whole))
            or not all(map(is_mappable, places))
        ):
            return None
        run: Any = runner.backward_of(x, out, lse, dout, dlse, False, places)
        return None if run.copied else run.run_on


def _key(tensor: Tensor) -> tuple:
    """The facts of a tensor that a backward may depend on."""
    facts = tensor.__class__, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return *facts, tensor.is_neg(), tensor.data_ptr() % 16 == 0


def write(
    backwards: Backwards, saved: Sequence[Tensor], dout, dlse, places, is_like: bool = False
) -> Gradients | None:
    """The arguments of a Written, which the backwards keep as the last of their latest."""
    if backwards.latest[-1] is None:
        backwards.latest[-1] = Written(backwards)
    return backwards.latest[-1](saved, dout, dlse, places, is_like)
