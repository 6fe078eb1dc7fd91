"""Programs of plans, from the modules that the registered variants name."""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from heedful.core.base.arrays import ArraySpec
from heedful.core.planning.plan import Plan, needs_pack, without_packs
from heedful.core.planning.sizes import Workspace
from heedful.launch.code import packs
from heedful.launch.code.identity import kernel_key
from heedful.launch.program import buffers as canonical
from heedful.launch.spec import Program

log = logging.getLogger("heedful")


def program(plan: Plan, direction: str, buffers: Mapping[str, ArraySpec] | None = None) -> Program:
    """The kernel launches of one direction of a plan.

    buffers: the call's arrays by name, by default those of a contiguous call. For the backward,
    keys in pages have been gathered into dense ones (see torch/eager/pages.py). Raises ValueError
    for a backend that launches no kernels (cpu, sdpa).
    """
    kernel = plan.variant_of(direction)
    if not kernel.program:
        raise ValueError(
            f"the {direction} runs on {kernel.backend!r}, which has no kernels to launch"
        )
    if direction == "backward" and plan.problem.page_size:
        plan = replace(plan, problem=plan.problem.gathered())
    arrays = getattr(canonical, direction)(plan.problem) if buffers is None else buffers
    canonical.check(plan.problem, arrays)
    return getattr(importlib.import_module(kernel.program), direction)(plan.problem, plan, arrays)


def runnable(chosen: Plan, direction: str, make: Callable[[Plan], Program]) -> tuple[Plan, Program]:
    """A plan and its program whose kernels this process has or can compile: of this plan or, if it
    is planned for the Triton of a pack that lacks one of them, of a plan without packs. make: makes
    the program of this direction. Raises as `plan` and `make`."""
    made = make(chosen)
    if needs_pack(chosen, direction):
        keys = [kernel_key(call, chosen.device.arch) for call in made.calls]
        if not all(map(packs.has, keys)):
            log.info(
                "[%s] no loaded pack has all kernels of its %s", chosen.problem.key(), direction
            )
            chosen = without_packs(chosen, direction)
            made = make(chosen)
    return chosen, made


def as_run(chosen: Plan) -> Plan:
    """The plan by which contiguous calls run here: as it is, or without packs, see `runnable`."""
    for direction, backend in (("forward", chosen.backend), ("backward", chosen.backward)):
        if backend and needs_pack(chosen, direction) and chosen.variant_of(direction).program:
            make = partial(program, direction=direction)
            chosen, _ = runnable(chosen, direction, make)
    return chosen


def step(
    plan: Plan, buffers: Mapping[str, ArraySpec], interleaved: bool, position0: int
) -> Program:
    """The launches of a call over a cache that gives it new keys and values. They write these into
    the cache, apply rotary positions, and run the forward of a plan. They are one kernel if the
    forward appends itself.

    buffers: the arrays of attention, and k_new, v_new and cache_seqlens (B,), the storage rows of
    sequences before the new ones. The launches count the keys, unless there is a seqused_k. With
    rotary_cos and rotary_sin there is q_new, and q where rotated queries are left to the caller.
    interleaved: whether pairs of rotary dims are neighbours. position0: the position of the first
    token of the cache.
    """
    leaves_q = "q_new" in buffers and "q" in buffers
    if plan.appends_ahead("seqused_k" not in buffers, leaves_q):
        return in_turn(plan, buffers, interleaved, position0)
    canonical.check(plan.problem, buffers)
    module = importlib.import_module(plan.variant_of("forward").program)
    made: Program = module.step(plan, buffers, interleaved, position0)
    return made


def in_turn(
    plan: Plan, buffers: Mapping[str, ArraySpec], interleaved: bool, position0: int
) -> Program:
    """As `step`, but separate kernels append before the forward."""
    # Calls without new keys do without it.
    from heedful.launch.bind import portable_cache

    problem, scratch = plan.problem, {}
    if "seqused_k" not in buffers:
        scratch["seqused_k"] = ArraySpec.contiguous(buffers["cache_seqlens"].shape, "int32")
    if "q_new" in buffers and "q" not in buffers:
        q = buffers["q_new"]
        scratch["q"] = ArraySpec.contiguous(q.shape, q.dtype)
    arrays = {**buffers, **scratch}
    first = portable_cache.ahead(
        arrays, problem.page_size, interleaved, problem.mask.bounded, position0
    )
    if problem.invariant:
        # Each product and sum of a rotation is rounded, as where plain operators rotate before.
        plain = {"enable_fp_fusion": False}
        calls = (replace(call, options={**call.options, **plain}) for call in first.calls)
        first = replace(first, calls=tuple(calls))
    attention = program(plan, "forward", arrays)
    workspaces = [Workspace(name, spec) for name, spec in scratch.items()]
    return Program(first.calls + attention.calls, (*attention.workspaces, *workspaces))
