"""Programs of dense calls with key_ranges as those of packed calls, whose sequences are cut where
rows part: see kernels/hopper/forward/cut_rows.py."""

from dataclasses import replace

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import (
    LaunchSizes,
    Sizes,
    Workspace,
    ceil_div,
    seen_entries,
)
from heedful.core.registry.tiles import CUT_BLOCKS, CUT_ROWS, PART_BLOCKS, HopperBackwardConfig
from heedful.kernels.args import hopper as args
from heedful.launch.bind import groups, hopper_groups
from heedful.launch.bind.groups import Buffers, pointer
from heedful.launch.spec import KernelCall, KernelRef, Scalar

# Scratch that stands for operands of a packed call.
NAMES = {"cu_seqlens_q": "cut_tokens", "cu_seqlens_k": "cut_tokens", "key_ranges": "cut_ranges"}
_MODULE = "heedful.kernels.hopper.forward.cut_rows"


def are_cut(problem: AttentionProblem, buffers: Buffers, *names: str) -> bool:
    """Whether these arrays of batch entries can be those of packed sequences: entries follow each
    other as rows do, and all heads have the same ranges."""
    arrays = [buffers[name] for name in names]
    follow = all(x.shape[0] == 1 or x.strides[0] == x.shape[1] * x.strides[1] for x in arrays)
    is_some = problem.batch > 0 and problem.seqlen_q > 0
    return follow and is_some and not hopper_groups.own_ranges(buffers)


def packed_problem(problem: AttentionProblem) -> AttentionProblem:
    """The packed call: a sequence for each CUT_ROWS rows of each entry, most of which are empty."""
    sequences = problem.batch * ceil_div(problem.seqlen_q, CUT_ROWS)
    total = problem.batch * problem.seqlen_q
    return replace(problem, batch=sequences, total_q=total, total_k=total)


def packed_buffers(problem: AttentionProblem, buffers: Buffers, *names: str) -> Buffers:
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


def backward_sizes(problem: AttentionProblem, plan: Plan, kernel: str) -> Sizes:
    """The sizes of the packed backward, with programs for the tiles of all sequences, not for as
    many of each as the longest one might have."""
    sizes = replace(plan, problem=problem).sizes(direction="backward")
    config = plan.configs[kernel]
    assert isinstance(config, HopperBackwardConfig)
    rows = seen_entries(problem, config.block_m)
    launches = dict(sizes.launches)
    for name in ("hopper.backward_prologue", "hopper.backward_epilogue"):
        launches[name] = LaunchSizes((rows * problem.heads_q, 1, 1), {"q_blocks": rows})
    numbers = launches["hopper.query_hulls"].numbers
    launches["hopper.query_hulls"] = LaunchSizes((numbers["entries"], 1, 1), numbers)
    return replace(sizes, launches=launches)


def scratch(packed: Buffers) -> tuple[Workspace, ...]:
    """Room for where sequences begin, and for their ranges."""
    tokens = packed["cu_seqlens_q"]
    return (
        Workspace.of("cut_parts", tokens.shape[0], 2, dtype="int32"),
        Workspace("cut_tokens", tokens),
        Workspace("cut_ranges", packed["key_ranges"]),
    )


def cut_calls(problem: AttentionProblem, buffers: Buffers) -> tuple[KernelCall, KernelCall]:
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


def hulls_call(
    problem: AttentionProblem, packed: AttentionProblem, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    """The launch that finds what each 64 rows see. sizes: of the packed call."""
    entries = sizes.launches["hopper.key_hulls"].numbers["entries"]
    io = args.CutHullIO(
        tokens=pointer(buffers, "cut_tokens"),
        ranges=pointer(buffers, "cut_ranges"),
        key_hulls=pointer(buffers, "key_hulls"),
        sequences=Scalar(packed.batch),
        rows=Scalar(problem.seqlen_q),
    )
    parameters = {"io": io, "mask": groups.mask(problem, buffers)}
    ref = KernelRef(_MODULE, "cut_hulls")
    return KernelCall(ref, (entries, 1, 1), parameters, {"num_warps": 1})
