"""Plans to runners: what computes a planned problem on torch tensors.

A runner holds everything that one kind of call needs again and again: the plan and, on a GPU, the
compiled kernels with their arguments in place.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch

from heedful.core import settings
from heedful.core.arrays import ArraySpec
from heedful.core.log import decision
from heedful.core.operands import Gradients, Operands, own_shape
from heedful.core.plan import Plan, plan, stored_as
from heedful.core.problem import AttentionProblem
from heedful.core.storage import storage
from heedful.launch import buffers
from heedful.launch.programs import program
from heedful.launch.record import note
from heedful.torch.arrays import array_spec, dtype_name
from heedful.torch.device import device_spec, toolchain
from heedful.torch.execute import Executable, allocator, current_device
from heedful.torch.forked import check_device, on_own_thread
from heedful.torch.pages import backward_of_pages

# (x, out, lse, dout, dlse=None, kv_grad=True) -> gradients of the inputs, for one layout of all
# these. kv_grad: whether those of k and v are wanted; they may be None if not.
Backward = Callable[..., Gradients]


def prepare(
    problem: AttentionProblem,
    x: Operands,
    backend: str | None = None,
    notes: tuple[str, ...] = (),
):
    """The runner of a problem on the device of `x.q`.

    Raises ValueError, with every reason, where no kernel or not the named one can run it,
    RuntimeError for a GPU in a child of a process that used it.
    """
    chosen = planned(problem, x.q.device, backend, notes)
    decision(chosen)
    if chosen.device.vendor == "cpu":
        return CpuRunner(chosen)
    return GpuRunner(chosen, x)


def planned(
    problem: AttentionProblem,
    device: torch.device,
    backend: str | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a problem on a device. Raises as `prepare`."""
    check_device(device)
    named = backend or settings.get("backend")
    return plan(problem, device_spec(device), toolchain(device), named, notes)


class CpuRunner:
    """Runs on CPU tensors."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._forward = importlib.import_module(plan.row("forward").module)
        backward = plan.row("backward" if plan.backward else "forward")
        self._backward = importlib.import_module(backward.module)

    def forward(self, x: Operands, out: torch.Tensor | None = None):
        """(out, lse or None, probs or None)."""
        return on_own_thread(self._forward.forward, self.plan.problem, x, out)

    def bind(self, out: torch.Tensor | None = None) -> None:
        """There is nothing to compile."""

    def backward(self, x, out, lse, dout, dlse=None) -> Gradients:
        """Gradients of the inputs for the cotangents of out and lse (None is zero)."""
        return self.backward_of(x, out, lse, dout, dlse)(x, out, lse, dout, dlse)

    def backward_of(self, x: Operands, out, lse, dout, dlse=None) -> Backward:
        """The backward on tensors laid out like these."""
        return partial(self._gradients, self._backward.backward, self.plan.problem)

    @staticmethod
    def _gradients(backward, problem, x, out, lse, dout, dlse=None, kv_grad=True) -> Gradients:
        return on_own_thread(backward, problem, x, out, lse, dout, dlse)


class GpuRunner:
    """Runs Triton and Gluon programs. Programs are bound on first use, one per layout of the
    tensors that the caller chooses after planning (out, dout)."""

    def __init__(self, plan: Plan, x: Operands):
        self.plan = plan
        problem, q = plan.problem, x.q
        self._device = q.device
        self._inputs = [name for name in Operands._fields if getattr(x, name) is not None]
        self._pick = itemgetter(*(Operands._fields.index(name) for name in self._inputs))
        self._buffers = {name: array_spec(getattr(x, name)) for name in self._inputs}
        self._results = buffers.results(problem)
        out_dtype = getattr(torch, problem.out_dtype)
        self._new_out = allocator(problem.out_shape, out_dtype, q.device)
        self._new_lse = allocator(problem.lse_shape, torch.float32, q.device)
        self._makes_lse = problem.makes_lse
        self._forwards: dict[tuple, Executable] = {}

    def forward(self, x: Operands, out: torch.Tensor | None = None):
        """(out, lse or None, probs or None)."""
        if current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.forward(x, out)
        key: tuple = ()
        if out is None:
            out = self._new_out()
        else:
            key = (out.stride(), out.data_ptr() % 16)
        tensors = [*self._pick(x), out]
        lse = probs = None
        if self._makes_lse:
            lse = self._new_lse()
            tensors.append(lse)
        if self.plan.problem.return_probs:
            shape = self.plan.problem.probs_shape
            probs = torch.zeros(shape, dtype=out.dtype, device=self._device)
            tensors.append(probs)
        run = self._forwards.get(key) or self._bind_forward(key, out)
        run(tensors)
        return out, lse, probs

    def bind(self, out: torch.Tensor | None = None) -> None:
        """Compiles and loads the forward, for a caller that writes something before it runs."""
        key = () if out is None else (out.stride(), out.data_ptr() % 16)
        if key not in self._forwards:
            self._bind_forward(key, out)

    def _bind_forward(self, key: tuple, out: torch.Tensor | None) -> Executable:
        given = self._buffers | self._results
        if out is not None:
            given["out"] = array_spec(out)
        self._forwards[key] = _bind(self.plan, "forward", given, self._device)
        return self._forwards[key]

    def backward(self, x, out, lse, dout, dlse=None) -> Gradients:
        """Gradients of the inputs for the cotangents of out and lse (None is zero)."""
        return self.backward_of(x, out, lse, dout, dlse)(x, out, lse, dout, dlse)

    def backward_of(self, x: Operands, out, lse, dout, dlse=None) -> Backward:
        """The backward on tensors laid out like these, which need not lie as the forward's."""
        if self.plan.problem.page_size:
            return GatheredBackward(self.plan)
        return GpuBackward(self.plan, x, out, lse, dout, dlse)


class GatheredBackward:
    """The backward of a plan whose keys lie in pages, on dense copies of them."""

    def __init__(self, plan: Plan):
        self._plan = replace(plan, problem=plan.problem.gathered())
        self._dense: GpuBackward | None = None

    def __call__(self, x, out, lse, dout, dlse=None, kv_grad=True) -> Gradients:
        """Gradients of the inputs, those of k and v in their pages, or None without kv_grad."""
        given = (out, lse, dout, dlse)
        return backward_of_pages(self._run, x, self._plan.problem.seqlen_k, kv_grad, *given)

    def _run(self, rows: Operands, *given) -> Gradients:
        """The backward on gathered rows, which lie the same each time."""
        if self._dense is None:
            self._dense = GpuBackward(self._plan, rows, *given)
        return self._dense(rows, *given)


class GpuBackward:
    """The backward of a plan on tensors laid out like those that it is made with."""

    def __init__(self, plan: Plan, x: Operands, out, lse, dout, dlse):
        self._device, self._index = x.q.device, x.q.device.index
        inputs = {name: t for name, t in zip(Operands._fields, x, strict=True) if t is not None}
        self._pick = itemgetter(*(Operands._fields.index(name) for name in inputs))
        given = {**inputs, "out": out, "lse": lse, "dout": dout}
        if dlse is not None:
            given["dlse"] = dlse
        self._has_dsink = x.sink is not None
        like = {"dq": x.q, "dk": x.k, "dv": x.v}
        if plan.problem.bias_grad:
            own = own_shape(tuple(x.bias.shape), x.bias.stride())
            like["dbias"] = x.bias[tuple(slice(size) for size in own)]
        if self._has_dsink:
            like["dsink"] = x.sink
        self._new = [allocator(t.shape, t.dtype, self._device) for t in like.values()]
        specs = {name: array_spec(tensor) for name, tensor in given.items()}
        for name, tensor in like.items():
            dtype = dtype_name(tensor.dtype)
            specs[name] = ArraySpec.contiguous(tuple(tensor.shape), dtype, self._device)
        plan = stored_as(plan, **storage(specs["q"], specs["k"], specs["v"], specs["out"]))
        self._run = _bind(plan, "backward", specs, self._device)

    def __call__(self, x, out, lse, dout, dlse=None, kv_grad=True) -> Gradients:
        """Gradients of the inputs for the cotangents of out and lse (None is zero); those of k and
        v in any case."""
        if current_device() != self._index:
            with torch.cuda.device(self._device):
                return self(x, out, lse, dout, dlse)
        gradients = [new() for new in self._new]
        tensors = [*self._pick(x), out, lse, dout]
        if dlse is not None:
            tensors.append(dlse)
        self._run(tensors + gradients)
        if len(gradients) == 3:
            return Gradients(*gradients)
        dq, dk, dv, *more = gradients
        dsink = more.pop() if self._has_dsink else None
        return Gradients(dq, dk, dv, more.pop() if more else None, dsink)


def _bind(
    plan: Plan, direction: str, buffers: dict[str, ArraySpec], device: torch.device
) -> Executable:
    """The executable of a plan that takes these buffers, in this order."""
    note(plan, direction, buffers)
    return Executable(program(plan, direction, buffers), plan.device.arch, device, list(buffers))
