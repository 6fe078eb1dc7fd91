"""Which work tiles of a Hopper backward are split while others are not."""

from heedful.core.base.device import DeviceSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.splits import choose_tail_splits
from heedful.core.registry.tiles import HopperBackwardConfig


def split_tail(
    config: HopperBackwardConfig,
    problem: AttentionProblem,
    device: DeviceSpec,
    tiles: int,
    q_blocks: int,
    splits: int,
) -> tuple[int, int]:
    """How many work tiles, the last ones, are split while others are not, and how many splits they
    have: (0, 1) for none. They are those that are left once all SMs have had as many. Under a mask
    short tiles fill the time of long ones. Only the device knows the tiles of packed sequences."""
    is_free = config.draws and splits == 1 and not (problem.is_masked or problem.deterministic)
    if config.tail_splits == 1 or not is_free or problem.ragged_k or problem.varlen_q:
        return 0, 1
    tail_splits = config.tail_splits
    if not tail_splits:
        tail_splits = choose_tail_splits(tiles, q_blocks * problem.group, device.units)
    return (tiles % device.units, tail_splits) if tail_splits > 1 else (0, 1)
