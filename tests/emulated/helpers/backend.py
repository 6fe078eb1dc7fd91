"""The library's own kernels on the emulator, as the error budget's `Backend`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from heedful.core.base.device import by_name
from heedful.core.call.operands import Gradients, Operands, own_shape
from heedful.core.planning.plan import plan
from heedful.emulator import At, Report, emulate
from heedful.launch import compiler
from heedful.launch.program.programs import program
from heedful.launch.spec import Pointer, Program, Scalar
from heedful.torch.base.arrays import array_spec

TARGETS = {"gfx942": "MI300X", "gfx950": "MI355X"}


def memory_of(tensor: torch.Tensor) -> At:
    """The whole storage of a tensor as bytes, and where in it the tensor starts."""
    octets = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return At(octets.numpy(), int(tensor.storage_offset()) * tensor.element_size())


def execute(
    made: Program, arch: str, tensors: Mapping[str, torch.Tensor], schedules: Sequence[str]
) -> list[Report]:
    """Run every call of a program; scratch starts as NaN unless it is to be zeroed, and is zeros
    after it where it says so.

    The first schedule computes; any other that gives other bits in an array is a finding.
    """
    arrays = dict(tensors)
    for workspace in made.workspaces:
        spec = workspace.buffer
        fill = 0 if workspace.zeroed else torch.nan
        arrays[workspace.name] = torch.full(spec.shape, fill).to(getattr(torch, spec.dtype))
    reports = []
    storage: dict[str, At] = {}
    for call in made.calls:
        if 0 in call.grid:
            continue
        artifact = compiler.artifact(call, arch)
        args = []
        for parameter in artifact.parameters:
            match call.arguments.get(parameter.name):
                case Pointer(buffer=name):
                    args.append(storage.setdefault(name, memory_of(arrays[name])))
                case Scalar(value=value):
                    args.append(float(value) if parameter.type == "fp32" else int(value))
                case _:
                    args.append(None)
        reports.append(emulate(artifact, call.grid, args, schedule=schedules))
    for workspace in made.workspaces:
        assert not (workspace.left_zero and arrays[workspace.name].any()), workspace.name
    return reports


@cache
def device_of(arch: str):
    """A table device of an architecture."""
    return by_name(TARGETS[arch])


class Emulated:
    """Runs planned kernels of one backend for one architecture; fails on any finding, and on any
    difference between the schedules."""

    def __init__(self, arch: str, backend: str = "portable", schedules=("lockstep",)):
        self.arch, self.backend, self.schedules = arch, backend, schedules
        self.reports: list[Report] = []

    def _run(self, direction: str, problem, tensors: dict[str, torch.Tensor]):
        chosen = plan(problem, device_of(self.arch), backend=self.backend)
        buffers = {name: array_spec(t) for name, t in tensors.items()}
        made = program(chosen, direction, buffers)
        # The forward half of a training case is a forward case too: here it only makes inputs.
        once = direction == "forward" and problem.needs_grad
        schedules = self.schedules[:1] if once else self.schedules
        self.reports += execute(made, self.arch, tensors, schedules)
        for report in self.reports:
            assert report.clean, report.summary()

    def _inputs(self, x: Operands) -> dict[str, torch.Tensor]:
        return {name: t for name, t in x._asdict().items() if t is not None}

    def forward(self, problem, x, out):
        """(out, lse, probs, or the rest of lse where the problem keeps it)."""
        problem = replace(problem, return_lse=True)
        tensors = self._inputs(x) | {"out": out}
        tensors["lse"] = torch.full(problem.lse_shape, torch.nan)
        if problem.return_probs:
            shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
            tensors["probs"] = torch.zeros(shape, dtype=out.dtype)
        if problem.keeps_rest:
            tensors["rest"] = torch.full(problem.lse_shape, torch.nan)
        self._run("forward", problem, tensors)
        return out, tensors["lse"], tensors.get("rest" if problem.keeps_rest else "probs")

    def backward(self, problem, x, out, lse, dout, dlse=None):
        """Gradients of the inputs."""
        tensors = self._inputs(x) | {"out": out, "lse": lse, "dout": dout}
        for name in ("q", "k", "v"):
            source = getattr(x, name)
            tensors[f"d{name}"] = torch.full(source.shape, torch.nan).to(source.dtype)
        if problem.bias_grad:
            shape = own_shape(x.bias.shape, x.bias.stride())
            tensors["dbias"] = torch.full(shape, torch.nan).to(x.bias.dtype)
        if x.sink is not None:
            tensors["dsink"] = torch.full_like(x.sink, torch.nan)
        if dlse is not None:
            tensors["dlse"] = dlse
        self._run("backward", problem, tensors)
        return Gradients(*(tensors.get(f"d{name}") for name in ("q", "k", "v", "bias", "sink")))


def instructions(reports: list[Report]) -> int:
    """Wave-instructions of several runs."""
    return int(np.sum([report.instructions for report in reports]))
