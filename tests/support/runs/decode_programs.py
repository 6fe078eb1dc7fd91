"""The decode kernel as the interpreter runs it, for tests that compare it with the oracle."""

from dataclasses import replace

import torch

from heedful.core.base.device import by_name
from heedful.core.planning.plan import Plan
from heedful.core.registry.tiles import DecodeConfig, TileConfig
from heedful.launch.bind import decode
from heedful.torch.base.arrays import array_spec
from support.runs.interpreter import interpret

# Small tiles, so that short sequences have full, masked and skipped ones.
TILES = DecodeConfig(16, 16, programs=1, least_tiles=1)
# Few programs, so that units have several parts.
UNITS = 5


class Interpreted:
    """The programs of `launch.bind.decode` run by the interpreter, as the budget's `Backend`."""

    def __init__(self, num_splits: int = 0, tiles: DecodeConfig = TILES):
        self.num_splits, self.tiles = num_splits, tiles

    def forward(self, problem, x, out):
        """(out, lse, None)."""
        tensors = {name: t for name, t in x._asdict().items() if t is not None}
        tensors |= {"out": out, "lse": torch.full(problem.lse_shape, torch.nan)}
        specs = {name: array_spec(tensor) for name, tensor in tensors.items()}
        problem = replace(problem, num_splits=self.num_splits)
        device = replace(by_name("MI300X"), units=UNITS)
        tiles: dict[str, TileConfig] = {"decode.forward": self.tiles}
        plan = Plan(problem, device, "decode", "run", variant="portable", configs=tiles)
        scratch = interpret(decode.forward(problem, plan, specs), tensors)
        if self.num_splits > 1:
            # Whatever the lengths, parts are a sequence's own: see the test of invariance.
            assert "counts" in scratch
        # The next launch finds them as this one did.
        assert not scratch.get("counts", torch.zeros(1)).any()
        return out, tensors["lse"], None

    def backward(self, problem, x, out, lse, dout, dlse=None):
        raise AssertionError("decoding has no backward")
