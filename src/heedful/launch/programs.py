"""From a plan to programs, by the modules that the registered kernels name."""

import importlib
from collections.abc import Mapping
from dataclasses import replace

from heedful.core.arrays import ArraySpec
from heedful.core.plan import Plan
from heedful.launch import buffers as canonical
from heedful.launch.spec import Program


def program(plan: Plan, direction: str, buffers: Mapping[str, ArraySpec] | None = None) -> Program:
    """The kernel launches of one direction of a plan.

    buffers: the arrays at hand, by name; those of a contiguous call if None. For the backward, keys
    in pages have been gathered into dense ones (see torch/pages.py).
    Raises ValueError for a backend that launches no kernels (cpu, sdpa).
    """
    row = plan.row(direction)
    if not row.program:
        raise ValueError(f"the {direction} runs on {row.backend!r}, which has no kernels to launch")
    if direction == "backward" and plan.problem.page_size:
        plan = replace(plan, problem=plan.problem.gathered())
    given = getattr(canonical, direction)(plan.problem) if buffers is None else buffers
    canonical.check(plan.problem, given)
    return getattr(importlib.import_module(row.program), direction)(plan.problem, plan, given)
