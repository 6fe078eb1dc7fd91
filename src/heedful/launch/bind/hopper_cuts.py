"""Programs of dense calls with key_ranges as those of packed calls, whose sequences are cut where
rows part: see kernels/hopper/forward/cut_rows.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.call.storage import rows_follow
from heedful.core.planning import cuts
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes, Workspace, ceil_div
from heedful.core.registry.tiles import CUT_BLOCKS, CUT_ROWS, PART_BLOCKS
from heedful.kernels.args import hopper as args
from heedful.launch.bind import groups, hopper_groups
from heedful.launch.bind.groups import Buffers, pointer, with_scratch
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar

# Scratch that stands for operands of a packed call.
_NAMES = {"cu_seqlens_q": "cut_tokens", "cu_seqlens_k": "cut_tokens", "key_ranges": "cut_ranges"}
_MODULE = "heedful.kernels.hopper.forward.cut_rows"


def cut_sizes(plan: Plan, buffers: Buffers, direction: str, *names: str) -> Sizes | None:
    """The sizes of a call whose rows are cut; None where they are not. Rows of these arrays' batch
    entries have to follow each other, also of those that no plan knows, such as dO."""
    follow = all(rows_follow(buffers[name]) for name in names)
    own = hopper_groups.own_ranges(buffers)
    return cuts.sizes_of(plan, direction) if follow and not own else None


class Cut(NamedTuple):
    """A call whose rows are cut. problem, arrays: of the packed call; dense: the arrays of the call
    itself; sizes: of the packed call. Both have scratch."""

    problem: AttentionProblem
    arrays: Buffers
    dense: Buffers
    sizes: Sizes


def cut(problem: AttentionProblem, sizes: Sizes, buffers: Buffers, *names: str) -> Cut:
    """The packed call of a dense one. sizes: of `cut_sizes`; names: as there."""
    packed = cuts.packed_problem(problem)
    arrays = _packed_buffers(packed, buffers, *names)
    sizes = replace(sizes, workspaces=(*sizes.workspaces, *_scratch(arrays)))
    return Cut(packed, with_scratch(arrays, sizes), with_scratch(buffers, sizes), sizes)


def cut_program(problem: AttentionProblem, made: Cut, calls: Sequence[KernelCall]) -> Program:
    """The launches of the dense call. calls: of the packed call, first the one that schedules."""
    scheduled, *others = Program(tuple(calls)).renamed(_NAMES).calls
    hulls = _hulls_call(problem, made)
    return Program(
        (*_cut_calls(problem, made.dense), scheduled, hulls, *others), made.sizes.workspaces
    )


def _packed_buffers(problem: AttentionProblem, buffers: Buffers, *names: str) -> Buffers:
    """The arrays of the packed call. problem: the packed one. names: of arrays with rows of tokens;
    others stay."""
    made = dict(buffers)
    for name in names:
        x = buffers[name]
        shape = (x.shape[0] * x.shape[1], *x.shape[2:])
        strides = x.strides[1:]
        if x.shape[1] == 1:
            strides = (x.strides[0], *x.strides[2:])
        made[name] = x._replace(shape=shape, strides=strides)
    tokens = ArraySpec.contiguous((problem.batch + 1,), "int32")
    ranges = ArraySpec.contiguous((problem.total_q or 0, 2), "int32")
    return made | {"cu_seqlens_q": tokens, "cu_seqlens_k": tokens, "key_ranges": ranges}


def _scratch(packed: Buffers) -> tuple[Workspace, ...]:
    """Room for where sequences begin, and for their ranges."""
    tokens = packed["cu_seqlens_q"]
    return (
        Workspace.of("cut_parts", tokens.shape[0], 2, dtype="int32"),
        Workspace("cut_tokens", tokens),
        Workspace("cut_ranges", packed["key_ranges"]),
    )


def _cut_calls(problem: AttentionProblem, buffers: Buffers) -> tuple[KernelCall, KernelCall]:
    """The launches that find where rows part. problem, buffers: of the dense call, with scratch."""
    blocks = ceil_div(problem.seqlen_q, CUT_ROWS)
    io = args.CutIO(
        ranges=groups.row_ranges(buffers),
        parts=pointer(buffers, "cut_parts"),
        tokens=pointer(buffers, "cut_tokens"),
        **groups.scalars(rows=problem.seqlen_q, blocks=blocks),
    )
    grid = (problem.batch * ceil_div(blocks, PART_BLOCKS.rows), 1, 1)
    parameters = {"io": io, "CUT_ROWS": CUT_ROWS, "BLOCKS": PART_BLOCKS.rows}
    parts = KernelCall(
        KernelRef(_MODULE, "part_rows"), grid, parameters, {"num_warps": PART_BLOCKS.num_warps}
    )
    parameters = {"io": io, "BLOCKS": CUT_BLOCKS.rows}
    options = {"num_warps": CUT_BLOCKS.num_warps}
    ref = KernelRef(_MODULE, "cut_rows")
    return parts, KernelCall(ref, (problem.batch, 1, 1), parameters, options)


def _hulls_call(problem: AttentionProblem, made: Cut) -> KernelCall:
    """The launch that finds what each 64 rows see. problem: the dense one."""
    entries = made.sizes.launches["hopper.key_hulls"].numbers["entries"]
    buffers = made.dense
    io = args.CutHullIO(
        tokens=pointer(buffers, "cut_tokens"),
        ranges=pointer(buffers, "cut_ranges"),
        key_hulls=pointer(buffers, "key_hulls"),
        sequences=Scalar(made.problem.batch),
        rows=Scalar(problem.seqlen_q),
    )
    parameters = {"io": io, "mask": groups.mask(problem, buffers)}
    ref = KernelRef(_MODULE, "cut_hulls")
    return KernelCall(ref, (entries, 1, 1), parameters, {"num_warps": 1})
