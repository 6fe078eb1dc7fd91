"""Programs of the Hopper forward for 16-bit inputs."""

from dataclasses import replace

from heedful.core.base.arrays import item_bytes
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes
from heedful.core.registry.tiles import (
    CONSUMER_ROWS,
    HopperForwardConfig,
    HopperWideConfig,
    tile_dim,
)
from heedful.launch.bind import groups, hopper_groups
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.groups import Buffers, with_scratch
from heedful.launch.spec import KernelCall, Program, TensorMap

# Arrays with a row for each token.
_OF_TOKENS = ("q", "k", "v", "out")
SWIZZLE = maps.SWIZZLE_BYTES // 2  # elements of a swizzled row of shared memory


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse if there is such a buffer. If the keys are split, they
    store partial results, which the portable merge combines. In a mixed batch the launch is
    programmatic, see mixed.py."""
    kernel = next(name for name in plan.configs if name.startswith("hopper."))
    sizes, config = plan.sizes(), plan.configs[kernel]
    assert isinstance(config, HopperForwardConfig)
    if config.cuts_rows:
        from heedful.launch.bind import hopper_cuts  # which most calls do without

        cut = hopper_cuts.cut_sizes(plan, buffers, "forward", *_OF_TOKENS)
        if cut is not None:
            return _cut_forward(problem, config, cut, buffers, kernel)
    hides = problem.block_mask and not groups.block_lists(problem, buffers, "block_rows").IS_PLAIN
    if hides:
        lists = hopper_groups.seen_lists(problem, buffers)
        sizes = replace(sizes, workspaces=(*sizes.workspaces, lists))
    buffers = with_scratch(buffers, sizes)
    results = {"lse": "partial_lse"} if plan.is_split else {"out": "out", "lse": "lse"}
    calls: list[KernelCall] = []
    if problem.varlen_q:
        calls.append(hopper_groups.varlen_call(problem, config, sizes, buffers, results))
    if problem.key_ranges:
        calls.append(hopper_groups.hulls_call(problem, sizes, buffers))
    if hides:
        calls.append(hopper_groups.seen_lists_call(problem, buffers))
    call = hopper_groups.forward_call(
        problem,
        config,
        sizes.launches[kernel],
        buffers,
        _maps(problem, config, buffers),
        results["lse"],
        splits=sizes.num_splits if plan.is_split else None,
        begins_early=plan.short_q > 0,
    )
    calls.append(call)
    if plan.is_split:
        calls.append(_merge_call(problem, sizes, buffers, config.part_keys))
    return Program(tuple(calls), sizes.workspaces)


def _merge_call(
    problem: AttentionProblem, sizes: Sizes, buffers: Buffers, part_keys: int
) -> KernelCall:
    """The launch that merges splits."""
    from heedful.launch.bind import portable  # which other calls do without

    if problem.invariant:
        return portable.merge_parts_call(problem, sizes, buffers, part_keys, True)
    # The first split includes the sink: a merge would add it to unused rows, too.
    return portable.combine_call(buffers, has_sink=False, begins_early=True)


def _cut_forward(
    problem: AttentionProblem,
    config: HopperForwardConfig,
    sizes: Sizes,
    buffers: Buffers,
    kernel: str,
) -> Program:
    """`forward` of a dense call whose rows are cut into packed sequences, of these sizes."""
    from heedful.launch.bind import hopper_cuts

    made = hopper_cuts.cut(problem, sizes, buffers, *_OF_TOKENS)
    packed, arrays, _, sizes = made
    attention = hopper_groups.forward_call(
        packed,
        config,
        sizes.launches[kernel],
        arrays,
        _maps(packed, config, arrays),
        entry_rows=problem.seqlen_q,
    )
    scheduled = hopper_groups.varlen_call(packed, config, sizes, arrays, {})
    return hopper_cuts.cut_program(problem, made, (scheduled, attention))


def _maps(
    problem: AttentionProblem, config: HopperForwardConfig, buffers: Buffers
) -> dict[str, TensorMap]:
    """The tensor maps of queries, keys, values and the output, unless that is float32."""
    if isinstance(config, HopperWideConfig):
        make_q = maps.packed_map if problem.varlen_q else maps.dense_map
        widths = {"q": SWIZZLE, "out": 2 * SWIZZLE}
        found = {n: make_q(n, buffers[n], CONSUMER_ROWS, widths[n]) for n in widths}
        keys = {n: key_map(problem, buffers, n, config.block_n, SWIZZLE) for n in ("k", "v")}
        return found | keys
    q_dim, v_dim = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    in_d, in_e = config.tail_d, config.tail_e
    # If queries are in boxes of 64 columns, so are results, which may be stored through the same
    # memory.
    out_dim = SWIZZLE if in_e or (in_d and v_dim == 128) else v_dim
    q_dim, v_dim = SWIZZLE if in_d else q_dim, SWIZZLE if in_e else v_dim
    pack = config.group_rows(problem)
    found: dict[str, TensorMap] = {}
    make_q = maps.packed_map if problem.varlen_q else maps.dense_map
    columns = {"q": q_dim} if hopper_groups.has_float_out(problem) else {"q": q_dim, "out": out_dim}
    for name, dim in columns.items():
        if pack > 1:
            made = maps.grouped_map(name, buffers[name], problem.group, pack, dim)
        else:
            made = make_q(name, buffers[name], CONSUMER_ROWS, dim)
        found[name] = made
    for name, dim in (("k", q_dim), ("v", v_dim)):
        found[name] = key_map(problem, buffers, name, config.block_n, dim)
    return found


def key_map(
    problem: AttentionProblem, buffers: Buffers, name: str, rows: int, dim: int
) -> TensorMap:
    """The map of keys or values, with boxes of `rows` x `dim`. In pages, the rows of a box divide a
    page, and it is as wide as the swizzle."""
    if problem.page_size:
        widest = maps.SWIZZLE_BYTES // item_bytes(problem.kv_dtype)
        rows, dim = min(rows, page_rows(problem.page_size)), min(dim, widest)
    make = maps.packed_map if problem.ragged_k else maps.dense_map
    return make(name, buffers[name], rows, dim)


def page_rows(page_size: int) -> int:
    """The largest power of two that divides a page."""
    return page_size & -page_size
