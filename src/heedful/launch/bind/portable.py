"""Programs of the portable kernels.

Buffers are named as Operands' fields, plus out, lse, probs, dout, dlse, and d and the name of each
operand that has a gradient; absent ones are missing from the mapping. The kernels of a KV cache and
of a merge have a few other names, which their functions list.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from heedful.core.call.problem import MAX_HEAD_DIM_V, AttentionProblem
from heedful.core.planning.plan import Plan
from heedful.core.planning.sizes import Sizes, ceil_div, seen_entries
from heedful.core.registry.tiles import (
    CLEAR_UNUSED,
    CLEARING_PROGRAMS,
    DIAGONAL_GRADIENTS,
    DIAGONAL_SUMS,
    MERGE_PARTS,
    SINK_GRADIENTS,
    PortablePartsConfig,
    RowsConfig,
    TileConfig,
    combine_rows,
    pow2,
)
from heedful.kernels.args import portable as args
from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.shared import Descale, ForwardIO, PortableParams, Tile, TileOrder
from heedful.launch.bind import groups
from heedful.launch.bind.groups import Buffers, pointer, scalars, with_scratch
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar, absent

# The least columns of an unaligned tile. Triton 3.6 miscompiles WGMMA over a 16-bit tile of 32
# columns that was loaded element by element (keys from the 16th on are wrong; H200, 2026-11-20; 3.9
# is right).
_UNALIGNED_WIDTH = 64

# By side: the kernel of the gradients, and its arrays.
_GRADIENTS: dict[str, tuple[str, type]] = {
    "keys": ("backward.keys.key_gradients", args.KeyGradientsIO),
    "queries": ("backward.queries.query_gradients", args.QueryGradientsIO),
}


def shared_divisor(buffers: Buffers, names: Iterable[str]) -> int:
    """A divisor of all strides of these tensors, so that a kernel has an aligned and an unaligned
    specialization and not one per stride; 1 where an address is not aligned."""
    specs = [buffers[name] for name in names]
    strides = [s for spec in specs for s in spec.steps[:-1]]
    if not all(spec.aligned for spec in specs):
        return 1
    return next((d for d in (16, 8) if all(s % d == 0 for s in strides)), 1)


def kernel_call(
    kernel: str, grid: tuple[int, int, int], config: TileConfig | RowsConfig, **parameters: Any
) -> KernelCall:
    """The launch of the kernel folder.module.function with the tiles of `config`."""
    module, _, function = kernel.rpartition(".")
    ref = KernelRef(f"heedful.kernels.portable.{module}", function)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return KernelCall(ref, grid, parameters, options)


def tile(problem: AttentionProblem, block_m: int, block_n: int, divisor: int) -> Tile:
    """The group of block sizes. BLOCK_R: columns of a second product, since one of 576 columns
    would fill little more than half of 1024. PRECISION: float32 products are IEEE; for narrower
    inputs it does not matter."""
    least = 16 if divisor > 1 and not problem.invariant else _UNALIGNED_WIDTH
    rest = problem.head_dim - MAX_HEAD_DIM_V
    return Tile(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=min(pow2(problem.head_dim, least), MAX_HEAD_DIM_V),
        BLOCK_E=pow2(problem.head_dim_v, least),
        BLOCK_R=pow2(rest, least) if rest > 0 else 0,
        PRECISION="ieee",
    )


def params(
    problem: AttentionProblem,
    blocks: Tile,
    buffers: Buffers,
    order: TileOrder | None = None,
    has_sink: bool = False,
    is_cached: bool = False,
) -> PortableParams:
    """The groups that are not arrays. has_sink: whether rows add the sink; a known log-sum-exp
    includes it. is_cached: whether keys may lie in a cache."""
    mods = groups.score_mods(problem, buffers)
    return PortableParams(
        seqs=groups.sequences(problem, buffers),
        shape=groups.shape(problem),
        mask=groups.mask(problem, buffers),
        mods=mods if has_sink else mods._replace(sink=None),
        dropout=groups.dropout(problem, buffers),
        cache=groups.kv_layout(problem.page_size, buffers) if is_cached else None,
        descales=groups.descales(problem, buffers) if is_cached else None,
        order=order,
        tile=blocks,
    )


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """The launches that compute out, and lse and probs if there are such buffers."""
    sizes = plan.sizes()
    buffers = with_scratch(buffers, sizes)
    if problem.invariant:
        calls = _calls_in_parts(problem, plan, sizes, buffers)
    else:
        calls = [_forward_call(problem, plan, sizes, buffers)]
    if plan.is_split and not problem.invariant:
        # The first split has the sink: a merge would give it to rows that are not in use, too.
        calls.append(combine_call(buffers, has_sink=False))
    if problem.varlen_q and not problem.batch:
        # Without sequences there are no tiles, and all tokens belong to none.
        calls.append(clear_outside_call(problem, buffers))
    elif problem.varlen_q and problem.used_q:
        # Rows past a used length may lie beyond the longest sequence, where tiles end.
        calls.append(clear_call(problem, buffers, "q", "out", "lse"))
    if "probs" in buffers:
        calls.append(_probs_call(problem, plan, sizes, buffers))
    return Program(tuple(calls), sizes.workspaces)


def _forward_call(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    config, launch = plan.configs["portable.forward"], sizes.launches["portable.forward"]
    out = "partial_out" if plan.is_split else "out"
    divisor = shared_divisor(buffers, ("q", "k", "v", out))
    blocks = tile(problem, config.block_m, config.block_n, divisor)
    order = _order(launch.numbers, sizes.num_splits)
    return kernel_call(
        "forward.kernel.attention_forward",
        launch.grid,
        config,
        io=forward_io(buffers, divisor, plan.is_split),
        params=params(problem, blocks, buffers, order, has_sink=True, is_cached=True),
    )


def _calls_in_parts(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers
) -> list[KernelCall]:
    """The launches of a forward with numerics="invariant"."""
    config = plan.configs["portable.forward"]
    assert isinstance(config, PortablePartsConfig)
    out = "partial_out" if plan.is_split else "out"
    divisor = shared_divisor(buffers, ("q", "k", "v", out))
    blocks = tile(problem, config.block_m, config.block_n, divisor)
    launch = sizes.launches["portable.forward"]
    order = _order(launch.numbers, sizes.num_splits)
    attention = kernel_call(
        "forward.parts.attention_in_parts",
        launch.grid,
        config,
        io=forward_io(buffers, divisor, plan.is_split),
        params=params(problem, blocks, buffers, order, has_sink=True, is_cached=True),
        PART_TILES=config.part_keys // config.block_n,
        IS_SPLIT=plan.is_split,
    )
    if not plan.is_split:
        return [attention]
    return [attention, merge_parts_call(problem, sizes, buffers, config.part_keys)]


def merge_parts_call(
    problem: AttentionProblem,
    sizes: Sizes,
    buffers: Buffers,
    part_keys: int,
    last_first: bool = False,
) -> KernelCall:
    """Merges parts of the keys, of so many each, one after the other: after the sink from the first
    on, or, if last_first, from the last on, with the sink in the first."""
    launch = sizes.launches["portable.merge_parts"]
    divisor = shared_divisor(buffers, ("partial_out", "out"))
    order = _order(launch.numbers, sizes.num_splits)
    return kernel_call(
        "forward.parts.merge_parts",
        launch.grid,
        MERGE_PARTS,
        io=groups.arrays(
            args.MergePartsIO,
            buffers,
            divisor,
            out=groups.split_rows(buffers, "out", divisor),
            partial_out=groups.split_rows(buffers, "partial_out", divisor, True),
            partial_lse=groups.split_row_vector(buffers, "partial_lse", True),
        ),
        params=params(
            problem,
            tile(problem, MERGE_PARTS.rows, MERGE_PARTS.rows, divisor),
            buffers,
            order,
            has_sink=not last_first,
            is_cached=True,
        ),
        PART_KEYS=part_keys,
        LAST_FIRST=last_first,
    )


def forward_io(buffers: Buffers, divisor: int, is_split: bool) -> ForwardIO:
    """The arrays of a forward, whose results are partial where the keys are split."""
    if not is_split:
        return groups.arrays(ForwardIO, buffers, divisor)
    return groups.arrays(
        ForwardIO,
        buffers,
        divisor,
        out=groups.split_rows(buffers, "partial_out", divisor, is_split),
        lse=groups.split_row_vector(buffers, "partial_lse", is_split),
        rest=pointer(buffers, "partial_rest"),
        max_scores=None,
    )


def _order(numbers: Mapping[str, int], splits: int = 1) -> TileOrder:
    return TileOrder(**scalars(**numbers, splits=splits))


def clear_outside_call(problem: AttentionProblem, buffers: Buffers) -> KernelCall:
    """The launch that writes 0 to out and -inf to lse for packed tokens before the first sequence
    and after the last, for attention kernels that write rows of sequences alone."""
    total, heads, dim = buffers["out"].shape
    divisor = shared_divisor(buffers, ("out",))
    return kernel_call(
        "shared.unused.clear_outside",
        (CLEARING_PROGRAMS, 1, 1),
        CLEAR_UNUSED,
        io=groups.arrays(
            args.ClearOutsideIO, buffers, divisor, cu_seqlens=pointer(buffers, "cu_seqlens_q")
        ),
        **scalars(total=total, batch=problem.batch, heads=heads),
        DIM=dim,
        BLOCK=pow2(dim),
    )


def clear_call(
    problem: AttentionProblem, buffers: Buffers, side: str, x: str, y: str | None
) -> KernelCall:
    """The launch that clears rows of no sequence in outputs shaped like q or k (`side`); their lse
    becomes -inf."""
    divisor = shared_divisor(buffers, (x,))
    *_, heads, dim = buffers[x].shape
    dim_y, rows_y = 1, absent(Rows)
    if y == "lse" and y in buffers:
        vector = groups.row_vector(buffers, y)
        rows_y = Rows(vector.ptr, vector.stride_b, groups.row_stride(1), vector.stride_h)
    elif y is not None and y in buffers:
        dim_y, rows_y = buffers[y].shape[-1], groups.rows(buffers, y)
    packed = problem.varlen_q if side == "q" else problem.varlen_k
    return kernel_call(
        "shared.unused.clear_unused",
        (problem.batch * heads, 1, 1),
        CLEAR_UNUSED,
        io=args.ClearUnusedIO(
            cu_seqlens=pointer(buffers, f"cu_seqlens_{side}"),
            seqused=pointer(buffers, f"seqused_{side}"),
            leftpad=pointer(buffers, "leftpad_k") if side == "k" else None,
            x=groups.rows(buffers, x, divisor),
            y=rows_y,
        ),
        **scalars(seqlen=buffers[x].shape[0 if packed else 1], batch=problem.batch, heads=heads),
        DIM_X=dim,
        DIM_Y=dim_y,
        BLOCK_N=CLEAR_UNUSED.rows,
        BLOCK_X=pow2(dim),
        BLOCK_Y=pow2(dim_y, 1),
        FILL_Y=float("-inf") if y == "lse" else 0.0,
    )


def combine_call(buffers: Buffers, has_sink: bool = True, begins_early: bool = False) -> KernelCall:
    """Merges partial_out (S, B, M, H, E) or (S, T, H, E) and partial_lse (S, B, H, M) or (S, H, T)
    into out and, if there is such a buffer, lse; `sink` enters once, if has_sink. apart_out (B, M,
    H, E) and apart_lse (B, H, M), if there are such buffers, are one part more. Rows of an lse lie
    side by side. partial_rest, apart_rest and rest lie as the lses do: where the first is there,
    the second is beside apart_lse, and the last may be. begins_early: the launch is programmatic,
    which takes sm_90."""
    spec = buffers["partial_out"]
    splits, *_, heads, dim = spec.shape
    batch, rows = (1, spec.shape[1]) if len(spec.shape) == 4 else spec.shape[1:3]
    outs = [name for name in ("partial_out", "out", "apart_out") if name in buffers]
    divisor = shared_divisor(buffers, outs)
    config, at_once = combine_rows(dim, rows, splits)
    tiles = ceil_div(rows, config.rows)
    call = kernel_call(
        "forward.combine.combine_splits",
        # One axis: the others are limited to 65,535, and sequences times heads may be more.
        (tiles * batch * heads, 1, 1),
        config,
        io=groups.arrays(
            args.CombineIO,
            buffers,
            divisor,
            partial_out=groups.split_rows(buffers, "partial_out", divisor, True),
            partial_lse=groups.split_row_vector(buffers, "partial_lse", True),
            sink=pointer(buffers, "sink") if has_sink else None,
        ),
        **scalars(rows=rows, heads=heads, splits=splits, tiles=tiles),
        HEAD_DIM_V=dim,
        BLOCK_M=config.rows,
        BLOCK_E=pow2(dim),
        BLOCK_S=at_once,
        BEGINS_EARLY=begins_early,
    )
    return replace(call, programmatic=begins_early)


def merge_into_call(buffers: Buffers) -> KernelCall:
    """Merges part (B, M, H, E) or (T, H, E) and part_lse (B, H, M) or (H, T) into float32 out and
    lse of these shapes. Rows of an lse lie side by side."""
    *lead, rows, heads, dim = buffers["out"].shape
    divisor = shared_divisor(buffers, ("out", "part"))
    config, _ = combine_rows(dim, rows, 1)
    tiles = ceil_div(rows, config.rows)
    return kernel_call(
        "forward.merge_into.merge_part",
        (tiles * heads * (lead[0] if lead else 1), 1, 1),
        config,
        io=groups.arrays(args.MergeIntoIO, buffers, divisor),
        **scalars(rows=rows, heads=heads, tiles=tiles),
        HEAD_DIM_V=dim,
        BLOCK_M=config.rows,
        BLOCK_E=pow2(dim),
    )


def _probs_call(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers
) -> KernelCall:
    config, launch = plan.configs["portable.scores"], sizes.launches["portable.scores"]
    divisor = shared_divisor(buffers, ("q", "k"))
    # Rows whose maximum and sum are computed again add the sink.
    blocks = tile(problem, config.block_m, config.block_n, divisor)
    whole = params(problem, blocks, buffers, has_sink=True, is_cached=True)
    descales = groups.descales(problem, buffers)._replace(v=absent(Descale))
    return kernel_call(
        "forward.probabilities.signed_probabilities",
        launch.grid,
        config,
        io=groups.arrays(
            args.ProbabilitiesIO,
            buffers,
            divisor,
            probs=groups.score_array(buffers, "probs")._replace(stride_n=1),
        ),
        params=whole._replace(descales=descales),
        **scalars(**launch.numbers),
    )


def backward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """dq, dk, dv, and dbias, dsink and drel_bias where there are such buffers."""
    stored_k = None if problem.varlen_k else buffers["k"].shape[1]
    sizes = plan.sizes(direction="backward", stored_k=stored_k)
    buffers = with_scratch(buffers, sizes)
    common = problem, plan, sizes, buffers
    calls = [
        # First, since it also computes delta. Rows whose maximum and sum are computed again take
        # the sink.
        _gradients_call(*common, "queries", has_sink=True),
        _gradients_call(*common, "keys", IS_GQA=problem.group > 1),
        *calls_beside(problem, plan, buffers),
    ]
    return Program(tuple(calls), sizes.workspaces)


def calls_beside(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> list[KernelCall]:
    """The other launches of a backward, after those of delta, dq, dk and dv: dbias, dsink,
    drel_bias, and rows of no sequence."""
    calls = []
    if problem.varlen_q:
        calls.append(clear_call(problem, buffers, "q", "dq", None))
    if problem.varlen_k or problem.leftpad_k:
        calls.append(clear_call(problem, buffers, "k", "dk", "dv"))
    if "dbias" in buffers:
        calls.append(_bias_gradients_call(problem, plan, buffers))
    if "dsink" in buffers:
        calls.append(_sink_gradients_call(problem, plan, buffers))
    if "drel_bias" in buffers:
        calls += _relative_gradients_calls(problem, plan, buffers)
    return calls


def _sink_gradients_call(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> KernelCall:
    lse = buffers["lse"].shape
    # Packed sequences count as one.
    batch, rows = (1, lse[1]) if len(lse) == 2 else (lse[0], lse[2])
    return kernel_call(
        "backward.rows.sink_gradients",
        (buffers["sink"].shape[0], 1, 1),
        SINK_GRADIENTS,
        io=groups.arrays(args.SinkGradientsIO, buffers),
        **scalars(rows=rows, batch=batch),
        # The other backwards write references in natural units.
        IS_ADJUSTED="portable.backward_keys" not in plan.configs or groups.is_adjusted(problem),
        BLOCK_M=SINK_GRADIENTS.rows,
    )


def _gradients_call(
    problem: AttentionProblem,
    plan: Plan,
    sizes: Sizes,
    buffers: Buffers,
    side: str,
    has_sink: bool = False,
    **more: Any,
) -> KernelCall:
    """The gradients of keys and values, or of queries, by tiles of that side. has_sink: as of
    `params`. more: further parameters of the kernel."""
    kernel, (function, io) = f"portable.backward_{side}", _GRADIENTS[side]
    config, launch = plan.configs[kernel], sizes.launches[kernel]
    divisor = shared_divisor(buffers, groups.names_of_rows(io))
    blocks = tile(problem, config.block_m, config.block_n, divisor)
    parameters = params(problem, blocks, buffers, _order(launch.numbers), has_sink)
    if side == "keys":
        lists = groups.block_lists(problem, buffers, "block_keys")
        parameters = parameters._replace(mask=parameters.mask._replace(blocks=lists))
    return kernel_call(
        function,
        launch.grid,
        config,
        io=groups.arrays(
            io,
            buffers,
            divisor,
            rows=groups.arrays(args.RowReferences, buffers),
            seen=_seen_keys(problem, plan, sizes, buffers),
        ),
        params=parameters,
        **more,
    )


def _seen_keys(
    problem: AttentionProblem, plan: Plan, sizes: Sizes, buffers: Buffers
) -> args.SeenKeys:
    """The keys that tiles of queries see; absent where lengths and windows alone say it."""
    if not problem.key_ranges:
        return absent(args.SeenKeys)
    kernel = "portable.backward_queries"
    rows, tiles = plan.configs[kernel].block_m, sizes.launches[kernel].numbers["tiles"]
    return args.SeenKeys(
        ptr=pointer(buffers, "seen_keys"),
        heads=Scalar(seen_entries(problem, rows)),
        tiles=None if problem.varlen_q else Scalar(tiles),
        ROWS=rows,
    )


def _bias_gradients_call(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> KernelCall:
    config = plan.configs["portable.scores"]
    divisor = shared_divisor(buffers, ("q", "k", "v", "dout"))
    b, h, m, n = buffers["dbias"].shape
    tiles = ceil_div(m, config.block_m) * ceil_div(n, config.block_n)
    blocks = tile(problem, config.block_m, config.block_n, divisor)
    return kernel_call(
        "backward.bias.bias_gradients",
        (tiles * b * h, 1, 1),
        config,
        io=groups.arrays(args.BiasGradientsIO, buffers, divisor),
        bias=args.BiasShape(*map(Scalar, (b, h, m, n))),
        params=params(problem, blocks, buffers),
    )


def _relative_gradients_calls(
    problem: AttentionProblem, plan: Plan, buffers: Buffers
) -> list[KernelCall]:
    config, window = plan.configs["portable.scores"], DIAGONAL_SUMS.rows
    # A window's sums are beside each tile: with the warps of a tile alone registers spill on sm_90.
    wide = replace(config, num_warps=2 * config.num_warps)
    divisor = shared_divisor(buffers, ("q", "k", "v", "dout"))
    parts, heads, columns = buffers["diagonal_sums"].shape
    sums = pointer(buffers, "diagonal_sums")
    distances = buffers["drel_bias"].shape[1]
    return [
        kernel_call(
            "backward.relative.diagonal_sums",
            (columns // window * heads * parts, 1, 1),
            wide,
            io=groups.arrays(args.DiagonalSumsIO, buffers, divisor, sums=sums),
            params=params(problem, tile(problem, config.block_m, config.block_n, divisor), buffers),
            columns=Scalar(columns),
            PARTS=parts,
            WINDOW=window,
        ),
        kernel_call(
            "backward.relative.relative_gradients",
            (ceil_div(distances, DIAGONAL_GRADIENTS.rows) * heads, 1, 1),
            DIAGONAL_GRADIENTS,
            io=args.RelativeGradientsIO(sums, pointer(buffers, "drel_bias")),
            shape=groups.shape(problem),
            mask=groups.mask(problem, {}),
            **scalars(distances=distances, columns=columns),
            PARTS=parts,
            BLOCK=DIAGONAL_GRADIENTS.rows,
        ),
    ]
