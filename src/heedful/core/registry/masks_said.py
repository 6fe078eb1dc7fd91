"""Options of the Hopper kernels that follow from what who made a mask says of it."""

from dataclasses import replace

from heedful.core.call.problem import AttentionProblem
from heedful.core.registry.configs import ConfigRow
from heedful.core.registry.tiles import HopperBackwardConfig, HopperForwardConfig


def with_options_of_mask(row: ConfigRow, problem: AttentionProblem) -> ConfigRow:
    """The row, whose tiles are those of its kernel for this problem, with these options."""
    kinds = HopperForwardConfig, HopperBackwardConfig
    if isinstance(row.config, kinds) and row.kernel in _LEAST and _cuts_documents(row, problem):
        return replace(row, config=replace(row.config, cuts_rows=True))
    return row


# By kernel: rows of all heads from which on rows are cut.
_LEAST = {"hopper.forward": 1 << 18, "hopper.backward": 1 << 16}


def _cuts_documents(row: ConfigRow, problem: AttentionProblem) -> bool:
    """Whether rows are cut where documents begin. Head dims, masks and sizes are those that were
    timed (measurements/hopper-forward.md, "Rows cut where documents begin")."""
    is_timed = problem.head_dim == problem.head_dim_v in (64, 128) and problem.mask.left < 0
    rows = problem.batch * problem.seqlen_q * problem.heads_q
    return problem.documents and is_timed and bool(rows >= _LEAST[row.kernel])
