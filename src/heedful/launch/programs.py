"""From a plan to programs, by the modules that the registered kernels name."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heedful.core.arrays import ArraySpec
from heedful.core.plan import Plan
from heedful.launch import buffers as canonical
from heedful.launch.spec import Program


def appends(plan: Plan) -> bool:
    """Whether `step_program` takes a plan: its kernel writes new keys into a cache itself."""
    return plan.row("forward").appends


def step_program(plan: Plan, buffers: Mapping[str, ArraySpec], **how: Any) -> Program:
    """The forward of a plan, whose kernel appends new keys and values first: see `step` of
    launch/bind/decode.py."""
    canonical.check(plan.problem, buffers)
    made: Program = importlib.import_module(plan.row("forward").program).step(plan, buffers, **how)
    return made


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
