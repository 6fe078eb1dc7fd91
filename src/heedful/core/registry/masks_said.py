"""Options of the Hopper kernels that follow from what who made a mask says of it."""

from dataclasses import replace

from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.configs import ConfigRow
from heedful.core.registry.tiles import HopperBackwardConfig, HopperForwardConfig

# A consumer's keys of a work tile.
_LIST_KEYS = 64
# Head dims for which both were timed (measurements/hopper-forward.md, "Rows cut where documents
# begin"; measurements/hopper-backward.md, "Lists of tiles of 64, a list a work tile").
_TIMED_DIMS = (64, 128)


def with_options_of_mask(row: ConfigRow, problem: AttentionProblem) -> ConfigRow:
    """The row, whose tiles are those of its kernel for this problem, with these options."""
    config, is_timed = row.config, problem.head_dim == problem.head_dim_v in _TIMED_DIMS
    if not is_timed:
        return row
    if row.kernel == "hopper.forward" and isinstance(config, HopperForwardConfig):
        return replace(row, config=replace(config, cuts_rows=_cuts_forward(problem)))
    if row.kernel == "hopper.backward" and isinstance(config, HopperBackwardConfig):
        block_n = _LIST_KEYS if _takes_lists_apart(problem) else config.block_n
        made = replace(config, cuts_rows=_cuts_backward(problem), block_n=block_n)
        return replace(row, config=made)
    return row


def _rows(problem: AttentionProblem) -> int:
    return problem.batch * problem.seqlen_q * problem.heads_q


def _cuts_forward(problem: AttentionProblem) -> bool:
    """Whether rows are cut where documents begin. Several batch entries lose by it, and so do short
    rows: the launches that find where to cut take time of their own."""
    is_long = problem.batch == 1 and _rows(problem) >= 1 << 18
    return problem.documents and problem.mask.left < 0 and bool(is_long)


def _cuts_backward(problem: AttentionProblem) -> bool:
    is_long = bool(_rows(problem) >= 1 << 16)
    return problem.documents and problem.mask.left < 0 and is_long


def _takes_lists_apart(problem: AttentionProblem) -> bool:
    """Whether a list of 64 keys has a work tile of its own, and not its union with the next."""
    return problem.scattered and problem.block_mask == _LIST_KEYS
