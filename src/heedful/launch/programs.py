"""From a plan to programs: the one place that knows which module has a backend's arguments."""

import importlib
from collections.abc import Mapping
from dataclasses import replace

from heedful.core.arrays import ArraySpec
from heedful.core.plan import Plan
from heedful.core.problem import ITEM_BITS
from heedful.launch import buffers as canonical
from heedful.launch.spec import Program

# Backend -> module with `forward` and `backward`, each (problem, plan, buffers) -> Program.
ARGUMENTS = {
    "portable": "heedful.launch.bind.portable",
    "hopper": "heedful.launch.bind.hopper",
    "cdna": "heedful.launch.bind.cdna",
}
# The same for calls whose queries are fp8, where they have kernels of their own.
FP8_ARGUMENTS = {"hopper": "heedful.launch.bind.hopper_fp8"}


def program(plan: Plan, direction: str, buffers: Mapping[str, ArraySpec] | None = None) -> Program:
    """The kernel launches of one direction of a plan.

    buffers: the arrays at hand, by name; those of a contiguous call if None. For the backward, keys
    in pages have been gathered into dense ones (see torch/pages.py).
    Raises ValueError for a backend that launches no kernels (cpu, sdpa).
    """
    backend = plan.backend if direction == "forward" else plan.backward
    if backend not in ARGUMENTS:
        raise ValueError(f"the {direction} runs on {backend!r}, which has no kernels to launch")
    if direction == "backward" and plan.problem.page_size:
        plan = replace(plan, problem=plan.problem.gathered())
    if buffers is None:
        buffers = getattr(canonical, direction)(plan.problem)
    is_fp8 = ITEM_BITS[plan.problem.dtype] == 8
    modules = ARGUMENTS | FP8_ARGUMENTS if is_fp8 else ARGUMENTS
    arguments = importlib.import_module(modules[backend])
    return getattr(arguments, direction)(plan.problem, plan, buffers)
