"""Plans to runners: what computes a planned problem on torch tensors.

A runner holds everything that one kind of call needs again and again: the plan and, on a GPU, the
compiled kernels with their arguments in place.
"""

import importlib
from operator import itemgetter

import torch

from heedful.core import settings
from heedful.core.log import decision
from heedful.core.operands import Gradients, Operands, own_shape
from heedful.core.plan import Plan, plan
from heedful.core.problem import AttentionProblem
from heedful.launch.programs import program
from heedful.launch.record import note
from heedful.launch.spec import BufferSpec
from heedful.torch.device import device_spec, toolchain
from heedful.torch.execute import Executable, allocator, buffer_spec, current_device
from heedful.torch.forked import check_device, on_own_thread


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
    device = x.q.device
    check_device(device)
    chosen = plan(
        problem,
        device_spec(device),
        toolchain(device),
        backend or settings.get("backend"),
        notes,
    )
    decision(chosen)
    if chosen.device.vendor == "cpu":
        return CpuRunner(chosen)
    return GpuRunner(chosen, x)


class CpuRunner:
    """Runs on CPU tensors."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._forward = _cpu_module(plan.backend)
        self._backward = _cpu_module(plan.backward or plan.backend)

    def forward(self, x: Operands, out: torch.Tensor | None = None):
        """(out, lse or None, probs or None)."""
        return on_own_thread(self._forward.forward, self.plan.problem, x, out)

    def bind(self, out: torch.Tensor | None = None) -> None:
        """There is nothing to compile."""

    def backward(self, x, out, lse, dout, dlse=None) -> Gradients:
        """Gradients of the inputs for the cotangents of out and lse."""
        given = (x, out, lse, dout, dlse)
        return on_own_thread(self._backward.backward, self.plan.problem, *given)


def _cpu_module(backend: str):
    return importlib.import_module("heedful.cpu.sdpa" if backend == "sdpa" else "heedful.cpu")


class GpuRunner:
    """Runs Triton and Gluon programs. Programs are bound on first use, one per layout of the
    tensors that the caller chooses after planning (out, dout)."""

    def __init__(self, plan: Plan, x: Operands):
        self.plan = plan
        problem, q = plan.problem, x.q
        self._device = q.device
        self._inputs = [name for name in Operands._fields if getattr(x, name) is not None]
        self._pick = itemgetter(*(Operands._fields.index(name) for name in self._inputs))
        self._buffers = {name: buffer_spec(getattr(x, name)) for name in self._inputs}
        self._out_shape = (*q.shape[:-1], problem.head_dim_v)
        out_dtype = getattr(torch, problem.out_dtype)
        self._new_out = allocator(self._out_shape, out_dtype, q.device)
        self._new_lse = allocator(problem.lse_shape, torch.float32, q.device)
        self._new_gradients = [allocator(t.shape, t.dtype, q.device) for t in x[:3]]
        self._probs_shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        self._wants_lse = problem.return_lse or problem.needs_grad or problem.return_probs
        self._forwards: dict[tuple, Executable] = {}
        self._backwards: dict[tuple, Executable] = {}

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
        if self._wants_lse:
            lse = self._new_lse()
            tensors.append(lse)
        if self.plan.problem.return_probs:
            probs = torch.zeros(self._probs_shape, dtype=out.dtype, device=self._device)
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
        problem, dense = self.plan.problem, BufferSpec.contiguous
        given = {"out": dense(self._out_shape, problem.out_dtype)}
        if out is not None:
            given["out"] = buffer_spec(out)
        if self._wants_lse:
            given["lse"] = dense(problem.lse_shape, "float32")
        if problem.return_probs:
            given["probs"] = dense(self._probs_shape, problem.out_dtype)
        self._forwards[key] = self._bind("forward", given)
        return self._forwards[key]

    def backward(self, x, out, lse, dout, dlse=None) -> Gradients:
        """Gradients of the inputs for the cotangents of out and lse (None is zero)."""
        if current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.backward(x, out, lse, dout, dlse)
        problem = self.plan.problem
        dq, dk, dv = (new() for new in self._new_gradients)
        dbias = dsink = None
        tensors = [*self._pick(x), out, lse, dout, dq, dk, dv]
        if problem.bias_grad:
            shape = own_shape(x.bias.shape, x.bias.stride())
            dbias = torch.empty(shape, dtype=x.bias.dtype, device=dq.device)
            tensors.append(dbias)
        if x.sink is not None:
            dsink = torch.empty_like(x.sink)
            tensors.append(dsink)
        if dlse is not None:
            tensors.append(dlse)
        key = (out.stride(), dout.stride(), dout.data_ptr() % 16, dlse is None)
        run = self._backwards.get(key)
        if run is None:
            optional = {"dbias": dbias, "dsink": dsink, "dlse": dlse}
            given = {"out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
            given |= {name: t for name, t in optional.items() if t is not None}
            specs = {name: buffer_spec(t) for name, t in given.items()}
            run = self._backwards[key] = self._bind("backward", specs)
        run(tensors)
        return Gradients(dq, dk, dv, dbias, dsink)

    def _bind(self, direction: str, given: dict[str, BufferSpec]) -> Executable:
        """The executable that takes the inputs and then what is given, in that order."""
        buffers = {**self._buffers, **given}
        note(self.plan, direction, buffers)
        made = program(self.plan, direction, buffers)
        return Executable(made, self.plan.device.arch, self._device, [*self._inputs, *given])
