"""Tuned tiles per kernel and architecture, each with where it was measured.

The first row that fits wins, so special cases stand above general ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from heedful.core.device import DeviceSpec
from heedful.core.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one kernel is cut: `block_m` query rows by `block_n` keys; `extra` holds what only that
    kernel knows (register splits, unrolling, compiler flags), as sorted (name, value) pairs."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    extra: tuple[tuple[str, object], ...] = ()

    def get(self, name: str, default=None):
        """The value of an extra."""
        return dict(self.extra).get(name, default)


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """A config of `kernel` for these architectures ("*" = any), head dims up to `max_dim`, and
    problems that `when` accepts. measured: device, date and Triton version, or why it is a guess.
    """

    kernel: str
    archs: tuple[str, ...]
    max_dim: int
    config: TileConfig
    measured: str
    when: Callable[[AttentionProblem], bool] = field(default=lambda problem: True)

    def fits(self, problem: AttentionProblem, device: DeviceSpec) -> bool:
        dim = max(problem.head_dim, problem.head_dim_v)
        return (
            dim <= self.max_dim
            and ("*" in self.archs or device.arch in self.archs)
            and self.when(problem)
        )


def _wide(problem: AttentionProblem) -> bool:
    """float32 inputs: IEEE products run on the FMA units, from registers."""
    return problem.dtype == "float32"


_UNMEASURED = "starting point, not measured"

ROWS: list[ConfigRow] = [
    ConfigRow("portable.forward", ("*",), 64, TileConfig(32, 32, 4, 2), _UNMEASURED, _wide),
    ConfigRow("portable.forward", ("*",), 512, TileConfig(16, 16, 4, 1), _UNMEASURED, _wide),
    ConfigRow("portable.forward", ("*",), 64, TileConfig(128, 64, 4, 3), _UNMEASURED),
    ConfigRow("portable.forward", ("*",), 128, TileConfig(128, 64, 8, 2), _UNMEASURED),
    ConfigRow("portable.forward", ("*",), 256, TileConfig(64, 32, 4, 2), _UNMEASURED),
    ConfigRow("portable.forward", ("*",), 512, TileConfig(32, 16, 4, 1), _UNMEASURED),
    ConfigRow("portable.backward_keys", ("*",), 64, TileConfig(32, 32, 4, 1), _UNMEASURED, _wide),
    ConfigRow("portable.backward_keys", ("*",), 512, TileConfig(16, 16, 4, 1), _UNMEASURED, _wide),
    ConfigRow("portable.backward_keys", ("*",), 128, TileConfig(64, 128, 8, 2), _UNMEASURED),
    ConfigRow("portable.backward_keys", ("*",), 256, TileConfig(32, 64, 8, 1), _UNMEASURED),
    ConfigRow("portable.backward_keys", ("*",), 512, TileConfig(16, 32, 8, 1), _UNMEASURED),
    ConfigRow(
        "portable.backward_queries", ("*",), 64, TileConfig(32, 32, 4, 1), _UNMEASURED, _wide
    ),
    ConfigRow(
        "portable.backward_queries", ("*",), 512, TileConfig(16, 16, 4, 1), _UNMEASURED, _wide
    ),
    ConfigRow("portable.backward_queries", ("*",), 128, TileConfig(128, 64, 8, 2), _UNMEASURED),
    ConfigRow("portable.backward_queries", ("*",), 256, TileConfig(64, 32, 8, 1), _UNMEASURED),
    ConfigRow("portable.backward_queries", ("*",), 512, TileConfig(32, 16, 8, 1), _UNMEASURED),
    ConfigRow("portable.scores", ("*",), 64, TileConfig(32, 32, 4, 1), _UNMEASURED, _wide),
    ConfigRow("portable.scores", ("*",), 512, TileConfig(16, 16, 4, 1), _UNMEASURED, _wide),
    ConfigRow("portable.scores", ("*",), 128, TileConfig(64, 64, 4, 1), _UNMEASURED),
    ConfigRow("portable.scores", ("*",), 512, TileConfig(32, 32, 4, 1), _UNMEASURED),
]


def choose(kernel: str, problem: AttentionProblem, device: DeviceSpec) -> ConfigRow:
    """The config row of `kernel` for this problem on this device."""
    for row in ROWS:
        if row.kernel == kernel and row.fits(problem, device):
            return row
    raise LookupError(f"no config of {kernel} fits {problem.key()} on {device.name}")
