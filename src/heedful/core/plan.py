"""Which kernel runs a problem on a device, and why the others do not. Pure: never queries a device."""

from dataclasses import dataclass

from heedful.core.configs import TileConfig
from heedful.core.device import DeviceSpec
from heedful.core.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class Rejection:
    """A backend that was not chosen, with every reason."""

    backend: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The decision for one problem on one device.

    configs: kernel name ("portable.forward", "portable.backward_dkdv", ...) -> its tiles.
    num_splits: in how many parts the keys are split, 1 = not.
    """

    problem: AttentionProblem
    device: DeviceSpec
    backend: str
    configs: dict[str, TileConfig]
    num_splits: int
    level: str
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...] = ()
