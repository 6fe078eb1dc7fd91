"""The portable kernels as the interpreter runs them, for tests that compare them with the
oracle."""

from dataclasses import replace

import torch

from heedful.core.base.device import by_name
from heedful.core.call.operands import Gradients, own_shape
from heedful.core.planning.plan import Plan
from heedful.core.registry.configs import ROWS
from heedful.core.registry.tiles import TileConfig
from heedful.launch.bind import portable
from heedful.torch.base.arrays import array_spec
from support.runs.interpreter import interpret


class Interpreted:
    """Programs of `launch.bind.portable` run by the interpreter, as the budget's `Backend`. tiles:
    of every kernel."""

    def __init__(self, tiles: TileConfig, num_splits: int = 1):
        self._kernels = {row.kernel: tiles for row in ROWS if row.kernel.startswith("portable.")}
        self.num_splits = num_splits

    def _plan(self, problem) -> Plan:
        facts = {"configs": self._kernels, "is_split": self.num_splits > 1}
        return Plan(problem, by_name("H200"), "portable", "run", **facts)

    def _run(self, build, problem, tensors) -> None:
        specs = {name: array_spec(tensor) for name, tensor in tensors.items()}
        problem = replace(problem, num_splits=self.num_splits)
        interpret(build(problem, self._plan(problem), specs), tensors)

    def forward(self, problem, x, out):
        """(out, lse, probs or largest scores)."""
        tensors = {name: t for name, t in x._asdict().items() if t is not None}
        tensors |= {"out": out, "lse": torch.full(problem.lse_shape, torch.nan)}
        if problem.return_probs:
            shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
            tensors["probs"] = torch.zeros(shape, dtype=out.dtype)
        if problem.max_scores:
            tensors["max_scores"] = torch.full(problem.lse_shape, -torch.inf)
        self._run(portable.forward, problem, tensors)
        return out, tensors["lse"], tensors.get("probs", tensors.get("max_scores"))

    def backward(self, problem, x, out, lse, dout, dlse=None):
        """Gradients of the inputs."""
        tensors = {name: t for name, t in x._asdict().items() if t is not None}
        tensors |= {"out": out, "lse": lse, "dout": dout}
        if dlse is not None:
            tensors["dlse"] = dlse
        shapes = {name: getattr(x, name).shape for name in ("q", "k", "v")}
        if problem.bias_grad:
            shapes["bias"] = own_shape(x.bias.shape, x.bias.stride())
        if x.sink is not None:
            shapes["sink"] = x.sink.shape
        if problem.rel_bias_grad:
            shapes["rel_bias"] = x.rel_bias.shape
        for name, shape in shapes.items():
            tensors[f"d{name}"] = torch.full(shape, torch.nan, dtype=getattr(x, name).dtype)
        self._run(portable.backward, problem, tensors)
        return Gradients(*(tensors.get(name) for name in Gradients._fields))
