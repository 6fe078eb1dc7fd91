"""Kernels under test: the library's portable attention, compiled for both targets, and its data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from emulated.helpers.backend import device_of
from heedful.core.planning.plan import plan
from heedful.emulator import Report, emulate
from heedful.launch import compiler
from heedful.launch.code.artifact import Artifact
from heedful.launch.program.programs import program
from heedful.launch.spec import Pointer, Scalar
from heedful.reference import oracle
from heedful.reference.convert import operands_as_numpy
from support.problems.cases import Built, Case, build

_CASE = Case(
    batch=1,
    seqlen_q=100,
    seqlen_k=200,
    heads_q=1,
    heads_k=1,
    head_dim=64,
    backward=False,
    num_splits=1,
)
_KERNELS = {
    "gfx942-bfloat16": ("gfx942", {"dtype": "bfloat16"}),
    "gfx950-bfloat16": ("gfx950", {"dtype": "bfloat16"}),
    "gfx950-causal": ("gfx950", {"dtype": "float16", "causal": True}),
}


def names() -> list[str]:
    """Names for `attention` and `Launch`."""
    return list(_KERNELS)


@cache
def _planned(name: str, **sizes):
    arch, features = _KERNELS[name]
    built = build(replace(_CASE, **features, **sizes))
    problem = replace(built.problem, return_lse=True)
    chosen = plan(problem, device_of(arch), backend="portable")
    (call,) = program(chosen, "forward").calls
    # Three stages, whatever is tuned: on gfx950 these load straight to LDS, with DMA in flight.
    options = {**call.options, "num_warps": 4, "num_stages": 3}
    return built, replace(call, options=options), arch


@cache
def attention(name: str) -> Artifact:
    """The compiled forward kernel."""
    _, call, arch = _planned(name)
    return compiler.artifact(call, arch)


@dataclass
class Outcome:
    """What a run gave: its report, output bits and largest error against the float64 oracle."""

    report: Report
    out: np.ndarray
    lse: np.ndarray
    error: float

    def same_bits(self, other: "Outcome") -> bool:
        """Whether two runs computed the same."""
        return self.out.tobytes() + self.lse.tobytes() == other.out.tobytes() + other.lse.tobytes()


class Launch:
    """A kernel with fixed inputs, to be run again and again, as it is or mutated."""

    def __init__(self, name: str, **sizes):
        self.built, self.call, _ = _planned(name, **sizes)
        self.artifact = attention(name)
        truth = oracle.forward(self.built.problem, operands_as_numpy(self.built.x))
        self.truth, self.lse = np.asarray(truth[0]), np.asarray(truth[1])

    def run(self, code, schedule: str | Sequence[str] = "lockstep", **options) -> Outcome:
        """Execute `code` (text or decoded) in place of the kernel's own."""
        out = np.full(self.truth.shape, np.nan, np.float16)
        lse = np.full(self.built.problem.lse_shape, np.nan, np.float32)
        arrays = {name: _raw(t) for name, t in self.built.x._asdict().items() if t is not None}
        arrays |= {"out": out.view(np.uint16), "lse": lse}
        args = []
        for parameter in self.artifact.parameters:
            match self.call.arguments.get(parameter.name):
                case Pointer(buffer=buffer):
                    args.append(arrays[buffer])
                case Scalar(value=value):
                    args.append(float(value) if parameter.type == "fp32" else int(value))
                case _:
                    args.append(None)
        report = emulate(
            code,
            self.call.grid,
            args,
            lds_bytes=self.artifact.shared_bytes,
            threads=64 * self.artifact.num_warps,
            schedule=schedule,
            **options,
        )
        return Outcome(report, out.view(np.uint16), lse, self._error(out, lse))

    def _error(self, out, lse) -> float:
        if self.built.case.dtype == "bfloat16":
            values = (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = out
        # The log-sum-exp is float32 and 2^-8 of bfloat16 its usual error: weigh it by 2^8.
        lse_weight = 2.0**8
        wrong = np.abs(values.astype(np.float64) - self.truth).max()
        return float(max(wrong, np.abs(lse - self.lse).max() * lse_weight))


def _raw(tensor) -> np.ndarray:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy()


def built(name: str) -> Built:
    """The inputs of a kernel."""
    return _planned(name)[0]
