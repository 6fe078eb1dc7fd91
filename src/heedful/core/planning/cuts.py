"""Sizes of dense calls with key_ranges whose rows are cut into packed sequences where they part:
see kernels/hopper/forward/cut_rows.py."""

from dataclasses import replace
from typing import TYPE_CHECKING

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.sizes import LaunchSizes, Sizes, ceil_div, seen_entries
from heedful.core.registry.tiles import CUT_ROWS, HopperBackwardConfig, HopperForwardConfig

if TYPE_CHECKING:
    from heedful.core.planning.plan import Plan


def packed_problem(problem: AttentionProblem) -> AttentionProblem:
    """The packed call: a sequence for each CUT_ROWS rows of each entry, most of which are empty."""
    sequences = problem.batch * ceil_div(problem.seqlen_q, CUT_ROWS)
    total = problem.batch * problem.seqlen_q
    return replace(problem, batch=sequences, total_q=total, total_k=total)


def sizes_of(plan: "Plan", direction: str) -> Sizes | None:
    """The sizes of the packed call in a direction; None where rows are not cut."""
    kernel = next(iter(plan.variant_of(direction).configs), "")
    config = plan.configs.get(kernel)
    is_some = plan.problem.batch > 0 and plan.problem.seqlen_q > 0
    if not (isinstance(config, (HopperForwardConfig, HopperBackwardConfig)) and config.cuts_rows):
        return None
    if not is_some or (direction == "forward" and plan.is_split):
        return None
    packed = replace(plan, problem=packed_problem(plan.problem))
    if isinstance(config, HopperForwardConfig):
        return replace(packed, scheduler="dynamic").sizes()
    return _backward_sizes(packed, kernel, config)


def _backward_sizes(packed: "Plan", kernel: str, config: HopperBackwardConfig) -> Sizes | None:
    """The sizes of the packed backward, with programs for the tiles of all sequences, not for as
    many of each as the longest one might have. None where visits are split."""
    sizes = packed.sizes(direction="backward")
    if any(w.name == "partials" for w in sizes.workspaces):
        return None
    problem = packed.problem
    rows = seen_entries(problem, config.block_m)
    launches = dict(sizes.launches)
    for name in ("hopper.backward_prologue", "hopper.backward_epilogue"):
        launches[name] = LaunchSizes((rows * problem.heads_q, 1, 1), {"q_blocks": rows})
    numbers = launches["hopper.query_hulls"].numbers
    launches["hopper.query_hulls"] = LaunchSizes((numbers["entries"], 1, 1), numbers)
    return replace(sizes, launches=launches)
