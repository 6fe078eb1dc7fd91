"""Options of the Hopper kernels that follow from what who made a mask says of it."""

from dataclasses import replace

from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.configs import ConfigRow
from heedful.core.registry.tiles import HopperBackwardConfig, HopperForwardConfig

# A consumer's keys of a work tile.
_LIST_KEYS = 64
# Head dims that were timed (measurements/hopper-forward.md, "Rows cut where documents begin";
# measurements/hopper-backward.md, "Lists of tiles of 64, a list a work tile").
_CUT_DIMS, _LIST_DIMS = (64, 128), (128,)


def with_options_of_mask(row: ConfigRow, problem: AttentionProblem, framework: str) -> ConfigRow:
    """The row, whose tiles are those of its kernel for this problem, with these options. They have
    run on hardware in calls of PyTorch alone."""
    config, dim = row.config, problem.head_dim
    if framework != "torch" or dim != problem.head_dim_v or dim not in (*_CUT_DIMS, *_LIST_DIMS):
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


def _may_cut(problem: AttentionProblem) -> bool:
    return problem.documents and problem.mask.left < 0 and problem.head_dim in _CUT_DIMS


def _cuts_forward(problem: AttentionProblem) -> bool:
    """Whether rows are cut where documents begin. Several batch entries lose by it, and so do short
    rows: the launches that find where to cut take time of their own."""
    return _may_cut(problem) and bool(problem.batch == 1 and _rows(problem) >= 1 << 18)


def _cuts_backward(problem: AttentionProblem) -> bool:
    return _may_cut(problem) and bool(_rows(problem) >= 1 << 16)


def _takes_lists_apart(problem: AttentionProblem) -> bool:
    """Whether a list of 64 keys has a work tile of its own, and not its union with the next."""
    is_timed = problem.head_dim in _LIST_DIMS
    return problem.scattered and problem.block_mask == _LIST_KEYS and is_timed
