"""Programs of the Hopper backward. The prologue computes delta and clears the sums of dQ; the main
kernel computes dK, dV and these sums; the epilogue makes dQ from them."""

from dataclasses import replace
from typing import Any

from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import LaunchSizes, Sizes, Workspace, ceil_div
from heedful.core.registry.tiles import (
    CONSUMER_ROWS,
    HopperBackwardConfig,
    backward_dim,
    pow2,
    product_dim,
)
from heedful.kernels.args import hopper_backward as args
from heedful.kernels.args.kinds import Rows
from heedful.launch.bind import groups, hopper_cuts, hopper_groups, portable
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.groups import Buffers, number, pointer, stride, with_scratch
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Program, Scalar, absent

# Warps of prologue and epilogue: their time is that of the bytes, which they read and write once.
_ROWS_WARPS = 4
# Arrays with a row for each token.
_OF_TOKENS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_ORDER = ("tiles", "key_blocks", "l2_heads", "l2_groups")
_MODULES = {
    "backward_prologue": "backward.prologue",
    "backward": "backward.kernel",
    "backward_pair": "backward.pair",
    "backward_wide": "backward.wide",
    "backward_halves": "backward_halves.kernel",
    "backward_epilogue": "backward.dq.epilogue",
    "query_hulls": "backward.query_hulls",
    "list_visits": "backward.list_visits",
}
# The tile in which far rows are computed again. Few calls have far rows, so it is small. For other
# rows, the same registers hold more of out and dout on their way.
_FAR_BLOCK = 16


def backward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute dq, dk, dv, and dbias and dsink where there are such buffers."""
    kernel = plan.variant_of("backward").configs[0]
    config = plan.configs[kernel]
    assert isinstance(config, HopperBackwardConfig)
    if config.cuts_rows:
        cut = hopper_cuts.cut_sizes(plan, buffers, "backward", *_OF_TOKENS)
        if cut is not None:
            return _cut_backward(problem, cut, kernel, config, buffers)
    stored_k = None if problem.varlen_k else buffers["k"].shape[1]
    sizes = plan.sizes(direction="backward", stored_k=stored_k)
    if problem.block_mask:
        visits = _visits(problem, config, buffers)
        sizes = replace(sizes, workspaces=(*sizes.workspaces, visits))
    buffers = with_scratch(buffers, sizes)
    calls = [_schedule_call(problem, config, sizes, buffers)] if problem.varlen_k else []
    if problem.key_ranges:
        calls.append(hopper_groups.hulls_call(problem, sizes, buffers, config.hides_rows))
        calls.append(_query_hulls_call(problem, config, sizes, buffers))
    if problem.block_mask:
        calls.append(_list_visits_call(problem, config, buffers))
    calls += [
        _prologue_call(problem, config, sizes, buffers),
        _backward_call(problem, kernel, config, sizes, buffers),
        _epilogue_call(problem, kernel, config, sizes, buffers),
    ]
    calls += portable.calls_beside(problem, plan, buffers)
    return Program(tuple(calls), sizes.workspaces)


def _cut_backward(
    problem: AttentionProblem,
    sizes: Sizes,
    kernel: str,
    config: HopperBackwardConfig,
    buffers: Buffers,
) -> Program:
    """`backward` of a dense call whose rows are cut into packed sequences, of these sizes."""
    made = hopper_cuts.cut(problem, sizes, buffers, *_OF_TOKENS)
    packed, arrays, _, sizes = made
    rows = problem.seqlen_q
    calls = (
        _schedule_call(packed, config, sizes, arrays),
        _query_hulls_call(packed, config, sizes, arrays, packed.batch),
        _prologue_call(packed, config, sizes, arrays, rows),
        _backward_call(packed, kernel, config, sizes, arrays),
        _epilogue_call(packed, kernel, config, sizes, arrays, rows),
    )
    return hopper_cuts.cut_program(problem, made, calls)


def _rows_call(
    name: str,
    launch_sizes: Sizes,
    programmatic: bool = False,
    **parameters,
) -> KernelCall:
    """The launch of prologue or epilogue, whose programs have tiles of rows."""
    launch = launch_sizes.launches[f"hopper.backward_{name}"]
    ref = _kernel(f"backward_{name}")
    parameters |= groups.scalars(**launch.numbers)
    options = {"num_warps": _ROWS_WARPS}
    return KernelCall(ref, launch.grid, parameters, options, programmatic=programmatic)


def _kernel(function: str, dialect: str = "triton") -> KernelRef:
    module = f"heedful.kernels.hopper.{_MODULES[function]}"
    return KernelRef(module, function, dialect)


def _sizes(
    problem: AttentionProblem, buffers: Buffers, entry_rows: int | None = None
) -> args.HopperBackwardSizes:
    """entry_rows: rows of a batch entry of which packed sequences are pieces."""
    is_cut = entry_rows is not None
    return args.HopperBackwardSizes(
        heads_k=Scalar(problem.heads_k),
        group=Scalar(problem.group),
        scale=number(problem.scale),
        accum_rows=Scalar(buffers["dq_accum"].shape[1]),
        sequences=Scalar(problem.batch) if is_cut else None,
        entry_rows=Scalar(entry_rows) if entry_rows is not None else None,
    )


def _schedule_call(
    problem: AttentionProblem, config: HopperBackwardConfig, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    """The launch that lists key tiles of packed sequences, those that most queries see first."""
    counts = {
        "total_q": buffers["k"].shape[0],
        "total_k": buffers["q"].shape[0],
        "batch": problem.batch,
        "heads": problem.heads_k,
    }
    return hopper_groups.schedule_call(
        sizes.launches["hopper.varlen_scheduler"],
        buffers,
        config.block_n,
        problem.head_dim,
        counts,
        cu_q=pointer(buffers, "cu_seqlens_k"),
        cu_k=pointer(buffers, "cu_seqlens_q"),
        **dict.fromkeys(("tile_counter", "out", "lse")),
    )


def _query_hulls_call(
    problem: AttentionProblem,
    config: HopperBackwardConfig,
    sizes: Sizes,
    buffers: Buffers,
    sequences: int | None = None,
) -> KernelCall:
    """The launch that finds which query tiles see a key tile by their key_ranges. sequences: as of
    `QueryHullIO`."""
    launch = sizes.launches["hopper.query_hulls"]
    heads, group = problem.heads_k, problem.group
    if not hopper_groups.own_ranges(buffers):
        heads, group = 1, 1
    numbers: dict[str, Any] = groups.scalars(heads=heads, group=group, **launch.numbers)
    numbers["sequences"] = None if sequences is None else Scalar(sequences)
    of_keys = hopper_groups.key_hulls(problem, buffers)
    parameters = {
        "io": groups.arrays(args.QueryHullIO, buffers, of_keys=of_keys, **numbers),
        "seqs": groups.sequences(problem, buffers),
        "shape": groups.shape(problem),
        "mask": groups.mask(problem, buffers),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HIDES_ROWS": config.hides_rows,
    }
    grid = launch.grid
    if sequences is None:
        grid = (launch.numbers["blocks"] * problem.batch * heads, 1, 1)
    return KernelCall(_kernel("query_hulls"), grid, parameters, {"num_warps": _ROWS_WARPS})


def _list_heads(problem: AttentionProblem, buffers: Buffers) -> int:
    """Query heads that a list of visits is of: of a KV head if they have lists of their own."""
    return problem.group if buffers["block_keys"].steps[1] else 1


def _visits(problem: AttentionProblem, config: HopperBackwardConfig, buffers: Buffers) -> Workspace:
    """Room for the lists of query tiles that visit a key tile, see `args.BackwardLists`."""
    keys = buffers["block_keys"]
    differ = problem.varlen_q or problem.ragged_k or problem.q_offsets
    batch = problem.batch if differ or keys.steps[0] else 1
    heads = problem.heads_k if keys.steps[1] else 1
    boxes = max(1, config.block_n // problem.block_mask)
    blocks = ceil_div(keys.shape[2] * problem.block_mask, config.block_n)
    steps = problem.block_mask // config.block_m
    visits = (keys.shape[-1] - 2) // 2 * steps * boxes * _list_heads(problem, buffers)
    numbers = 2 + visits * (1 + boxes)
    return Workspace.of("visits", batch, heads, blocks, numbers, dtype="int32")


def _lists(problem: AttentionProblem, buffers: Buffers) -> args.BackwardLists:
    """The group of a block mask's lists."""
    if not problem.block_mask:
        return absent(args.BackwardLists)
    b, h, n, _ = buffers["visits"].steps
    list_heads = _list_heads(problem, buffers)
    return args.BackwardLists(
        pointer(buffers, "visits"),
        stride(b),
        stride(h),
        stride(n),
        blocks=Scalar(buffers["visits"].shape[2]),
        list_heads=Scalar(list_heads),
        shared=Scalar(problem.group // list_heads),
    )


def _list_visits_call(
    problem: AttentionProblem, config: HopperBackwardConfig, buffers: Buffers
) -> KernelCall:
    """The launch that lists which query tiles visit a key tile."""
    lists = _lists(problem, buffers)
    batch, heads, blocks, _ = buffers["visits"].shape
    parameters = {
        "io": args.ListVisitsIO(*lists[:6], heads=Scalar(heads)),
        "seqs": groups.sequences(problem, buffers),
        "shape": groups.shape(problem),
        "mask": groups.mask(problem, buffers)._replace(
            blocks=groups.block_lists(problem, buffers, "block_keys")
        ),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    grid = (batch * heads * blocks, 1, 1)
    return KernelCall(_kernel("list_visits"), grid, parameters, {"num_warps": _ROWS_WARPS})


def _hulls(
    problem: AttentionProblem,
    config: HopperBackwardConfig,
    launch: LaunchSizes | None,
    buffers: Buffers,
) -> args.BackwardHulls:
    """The group of which rows see which keys by key_ranges."""
    if launch is None:
        return absent(args.BackwardHulls)
    own = hopper_groups.own_ranges(buffers)
    return args.BackwardHulls(
        hopper_groups.key_hulls(problem, buffers),
        pointer(buffers, "query_hulls"),
        Scalar(launch.numbers["entries"]) if own else None,
        config.hides_rows,
    )


def _prologue_call(
    problem: AttentionProblem,
    config: HopperBackwardConfig,
    sizes: Sizes,
    buffers: Buffers,
    entry_rows: int | None = None,
) -> KernelCall:
    divisor = portable.shared_divisor(buffers, ("out", "dout"))
    of_scores = portable.shared_divisor(buffers, ("q", "k"))
    blocks = portable.tile(problem, _FAR_BLOCK, _FAR_BLOCK, 16)
    params = portable.params(problem, blocks, buffers, has_sink=True)
    mods = hopper_groups.score_mods(problem, buffers)
    return _rows_call(
        "prologue",
        sizes,
        io=groups.arrays(
            args.BackwardPrologueIO, buffers, divisor, **_scratch(buffers, "dq_accum")
        ),
        far=groups.arrays(args.FarRowsIO, buffers, of_scores),
        params=params._replace(dropout=None),
        sizes=_sizes(problem, buffers, entry_rows),
        scale_log2=mods.scale_log2,
        softcap_scale=mods.softcap_scale,
        BLOCK_M=config.block_m,
        D=product_dim(problem.head_dim),
        E=problem.head_dim_v,
        BLOCK_E=pow2(problem.head_dim_v),
    )


def _tail(launch: LaunchSizes, config: HopperBackwardConfig, programs: int) -> args.BackwardTail:
    """The group of which work tiles are split, if only the last ones are. programs: all those of
    the epilogue."""
    whole = launch.numbers.get("whole")
    if whole is None:
        return absent(args.BackwardTail)
    tiles, key_blocks = (launch.numbers[name] for name in ("tiles", "key_blocks"))
    boxes = (tiles - whole) * (config.block_n // CONSUMER_ROWS)
    named = {name: launch.numbers[name] for name in ("key_blocks", "l2_heads", "l2_groups")}
    numbers = {"whole": whole, "heads": tiles // key_blocks, "programs": programs - boxes}
    return args.BackwardTail(**groups.scalars(**numbers, **named))


def _epilogue_call(
    problem: AttentionProblem,
    kernel: str,
    config: HopperBackwardConfig,
    sizes: Sizes,
    buffers: Buffers,
    entry_rows: int | None = None,
) -> KernelCall:
    splits = _splits(buffers)
    # The main kernel stores gradients that are not split.
    whole = {} if splits["splits"] else dict.fromkeys(("dk", "dv"), absent(Rows))
    aligned = _scratch(buffers, "dq_accum", "partials")
    return _rows_call(
        "epilogue",
        sizes,
        programmatic=True,
        io=groups.arrays(args.BackwardEpilogueIO, buffers, 8, **aligned, **whole),
        seqs=groups.sequences(problem, buffers),
        sizes=_sizes(problem, buffers, entry_rows),
        **{"k_blocks": None, **splits},
        tail=_tail(
            sizes.launches[kernel], config, sizes.launches["hopper.backward_epilogue"].grid[0]
        ),
        tile=groups.constants(
            args.BackwardEpilogueTile,
            config,
            D=problem.head_dim,
            BLOCK_D=product_dim(problem.head_dim),
            E=problem.head_dim_v,
            BLOCK_E=product_dim(problem.head_dim_v),
        ),
    )


def _scratch(buffers: Buffers, *names: str) -> dict[str, Pointer | None]:
    """Addresses of scratch, which are multiples of 16 bytes."""
    return {name: pointer(buffers, name, True) for name in names}


def _splits(buffers: Buffers) -> dict[str, Scalar | None]:
    """How many splits the visits of key tiles have, and how many keys of a head are stored for each
    split; None without splits."""
    if "partials" not in buffers:
        return {"splits": None, "partial_rows": None}
    partials = buffers["partials"].shape
    return {"splits": Scalar(partials[0]), "partial_rows": Scalar(partials[2])}


def _parts(launch: LaunchSizes, buffers: Buffers) -> args.BackwardParts:
    """The group of work tiles that are split."""
    found, whole = _splits(buffers), launch.numbers.get("whole")
    return args.BackwardParts(
        splits=found["splits"],
        rows=found["partial_rows"],
        whole=None if whole is None else Scalar(whole),
        **_scratch(buffers, "partials"),
    )


def _backward_call(
    problem: AttentionProblem,
    kernel: str,
    config: HopperBackwardConfig,
    sizes: Sizes,
    buffers: Buffers,
) -> KernelCall:
    launch = sizes.launches[kernel]
    dims = dict.fromkeys(("q", "k", "dk"), problem.head_dim)
    dims |= dict.fromkeys(("v", "dout", "dv"), problem.head_dim_v)
    found = {}
    for name, dim in dims.items():
        of_queries = name in ("q", "dout")
        # Gradients have rows of keys that are not in use, too: zeros.
        of_keys = problem.ragged_k if name in ("k", "v") else problem.varlen_k
        is_ragged = problem.varlen_q if of_queries else of_keys
        make = maps.packed_map if is_ragged else maps.dense_map
        # Each consumer has a box of keys.
        rows = config.block_m if of_queries else CONSUMER_ROWS
        columns = backward_dim(dim) // config.programs
        found[name] = make(name, buffers[name], rows, columns)
    parameters = {
        "io": groups.arrays(
            args.HopperBackwardIO,
            buffers,
            **found,
            **_scratch(buffers, "dq_accum"),
            **_rows_between(problem, buffers),
        ),
        "params": args.HopperBackwardParams(
            seqs=groups.sequences(problem, buffers),
            sizes=_sizes(problem, buffers),
            **hopper_groups.scores(problem, buffers),
            order=groups.arrays(
                args.HopperBackwardOrder,
                buffers,
                **groups.scalars(**{name: launch.numbers[name] for name in _ORDER}),
                parts=_parts(launch, buffers),
                hulls=_hulls(problem, config, sizes.launches.get("hopper.query_hulls"), buffers),
                lists=_lists(problem, buffers),
            ),
            tile=groups.constants(
                args.HopperBackwardTile,
                config,
                D=product_dim(problem.head_dim),
                E=product_dim(problem.head_dim_v),
                Q_STAGES=config.num_stages,
                DO_STAGES=config.dout_stages,
            ),
            ways=groups.constants(args.HopperBackwardWays, config),
        ),
    }
    ref = _kernel(kernel.partition(".")[2], "gluon")
    options = {"num_warps": 8 if _shares_code(problem, config, kernel) else 4}
    return KernelCall(
        ref, launch.grid, parameters, options, cluster=config.programs, programmatic=True
    )


def _rows_between(problem: AttentionProblem, buffers: Buffers) -> dict[str, Scalar | None]:
    """The rows of the maps of keys and values from one batch entry to the next, see
    `args.HopperBackwardIO`."""
    if problem.varlen_k or not problem.ragged_k:
        return {"k_rows": None, "v_rows": None}
    return {f"{name}_rows": Scalar(maps.rows_between(buffers[name])) for name in ("k", "v")}


def _shares_code(problem: AttentionProblem, config: HopperBackwardConfig, kernel: str) -> bool:
    """Whether both consumers are one role, see `kernel.backward`. Softcap and dropout make loops
    long. Other head dims, key_ranges and block masks have not been measured."""
    is_long = problem.softcap or problem.dropout_p
    is_measured = problem.head_dim == problem.head_dim_v and problem.head_dim in (64, 128)
    plain = not (problem.key_ranges or problem.block_mask) and config.block_m == CONSUMER_ROWS
    return bool(is_long and is_measured and plain) and kernel == "hopper.backward"
