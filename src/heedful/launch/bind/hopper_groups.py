"""Fills the groups of arguments that only Hopper kernels have; and the launch of the varlen
scheduler."""

import math
from collections.abc import Mapping
from typing import Any

from heedful.core.base.arrays import item_bytes
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.sizes import (
    LaunchSizes,
    Sizes,
    Workspace,
    ceil_div,
    seen_entries,
    work_heads,
)
from heedful.core.registry.tiles import (
    CONSUMER_ROWS,
    VARLEN_SCHEDULER,
    HopperConfig,
    HopperForwardConfig,
    HopperFp8Config,
    HopperWideConfig,
    pow2,
)
from heedful.kernels.args import hopper as args
from heedful.kernels.args.kinds import Rows, ScoreArray
from heedful.kernels.args.shared import KeyHulls, Tile
from heedful.launch.bind import groups
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.groups import Buffers, number, pointer, relative_bias, stride
from heedful.launch.spec import KernelCall, KernelRef, Scalar, TensorMap, absent


def forward_call(
    problem: AttentionProblem,
    config: HopperConfig,
    launch: LaunchSizes,
    buffers: Buffers,
    tensor_maps: Mapping[str, TensorMap],
    lse: str = "lse",
    splits: int | None = None,
    transpose: args.TransposeV | None = None,
    begins_early: bool = False,
    entry_rows: int | None = None,
) -> KernelCall:
    """The launch of the attention. tensor_maps: of q, k, v and out. lse: the name of the
    log-sum-exp's buffer, if there is one. splits: as of `_split_kv`. There is no map of a float32
    out. entry_rows: as of `HopperTileOrder`."""
    split = _split_kv(problem, config, buffers, splits)
    parameters = {
        "io": args.HopperIO(**{"out": None, **tensor_maps}, lse=pointer(buffers, lse)),
        "params": _params(problem, config, launch, buffers, split, entry_rows),
        "transpose": transpose,
        "BEGINS_EARLY": begins_early,
    }
    ref = KernelRef("heedful.kernels.hopper.forward.kernel", "forward", "gluon")
    options = {"num_warps": 4}
    if isinstance(config, HopperWideConfig):
        ref = KernelRef("heedful.kernels.hopper.forward_wide.kernel", "forward_wide", "gluon")
        wide = {name: parameters[name] for name in ("io", "params")}
        return KernelCall(ref, launch.grid, wide, options, cluster=config.consumers)
    return KernelCall(ref, launch.grid, parameters, options, programmatic=begins_early)


def _params(
    problem: AttentionProblem,
    config: HopperConfig,
    launch: LaunchSizes,
    buffers: Buffers,
    split: args.SplitKV,
    entry_rows: int | None,
) -> args.HopperParams:
    """The groups that the roles of a forward share."""
    return args.HopperParams(
        seqs=groups.sequences(problem, buffers),
        gqa=_gqa(problem, config),
        **scores(problem, buffers),
        kv=groups.kv_layout(problem.page_size, buffers),
        kv_rows=kv_rows(problem, buffers),
        order=_tile_order(problem, launch, buffers, entry_rows),
        split=split,
        stages=_stages(config),
        tile=_tile(problem, config, is_split=split.partials is not None),
        fp8=_fp8(problem, config, buffers),
    )


def scores(problem: AttentionProblem, buffers: Buffers) -> dict[str, Any]:
    """The group of score modifiers. Calls without any run kernels that are compiled without leading
    keys and dropout."""
    mask, dropout = groups.mask(problem, buffers), groups.dropout(problem, buffers)
    if problem.mask.first == 0:
        mask = mask._replace(first=None)
    if "seen_lists" in buffers:
        b, h, m, _ = buffers["seen_lists"].steps
        strides = {"stride_b": stride(b), "stride_h": stride(h), "stride_m": stride(m)}
        seen = pointer(buffers, "seen_lists")
        mask = mask._replace(blocks=mask.blocks._replace(ptr=seen, IS_EXACT=True, **strides))
    if not dropout.IS_ON:
        dropout = dropout._replace(inverse_keep=None)
    return {"mask": mask, "mods": score_mods(problem, buffers), "dropout": dropout}


def _gqa(problem: AttentionProblem, config: HopperConfig) -> args.Gqa:
    rows = config.group_rows(problem)
    return args.Gqa(
        heads=Scalar(work_heads(config, problem)),
        group=Scalar(1 if rows > 1 else problem.group),
        packed_heads=Scalar(problem.group) if rows > 1 else None,
        PACK_GQA=rows,
    )


def score_mods(problem: AttentionProblem, buffers: Buffers) -> args.HopperScoreMods:
    """The score modifiers of a forward or a backward."""
    log2e = math.log2(math.e)
    scale, softcap_scale = problem.scale * log2e, 0.0
    if problem.softcap > 0:
        softcap_scale = 2.0 * log2e * problem.scale / problem.softcap
        scale = problem.softcap * log2e
    alibi, has_bias = buffers.get("alibi_slopes"), "bias" in buffers
    unit = problem.softcap if problem.softcap > 0 else problem.scale
    # Probabilities are float16 where keys are quantised, too.
    is_half = problem.dtype == "float16" or problem.quantized_kv
    is_natural = has_bias or problem.rel_bias or (alibi is not None and is_half)
    # The bias has a row and a column for each query and key of dense sequences.
    may_differ = has_bias and (problem.varlen_q or problem.varlen_k or problem.page_size)
    return args.HopperScoreMods(
        scale_log2=number(scale),
        softcap_scale=number(softcap_scale),
        per_unit=number(1.0 / unit) if alibi and not is_natural else None,
        unit=number(unit) if is_natural else None,
        alibi=pointer(buffers, "alibi_slopes"),
        stride_alibib=stride(alibi.strides[0]) if alibi else None,
        bias=_bias(buffers),
        relative=relative_bias(buffers),
        longest_q=Scalar(problem.seqlen_q) if has_bias and problem.varlen_q else None,
        longest_k=Scalar(problem.seqlen_k) if may_differ else None,
        sink=pointer(buffers, "sink"),
        HAS_SOFTCAP=problem.softcap > 0,
    )


def _bias(buffers: Buffers) -> ScoreArray:
    bias = buffers.get("bias")
    if bias is None:
        return ScoreArray(None, None, None, None, None)
    b, h, m, n = bias.steps
    # One load then reads neighbouring keys.
    is_wide = bias.aligned and n == 1 and all(s % 8 == 0 for s in (b, h, m))
    strides = (stride(s, 8 if is_wide else 1) for s in (b, h, m))
    last = 1 if is_wide else stride(n)
    return ScoreArray._make((pointer(buffers, "bias", is_wide), *strides, last))


def kv_rows(problem: AttentionProblem, buffers: Buffers) -> args.KVRows:
    """The group that says how tensor maps of keys and values number their rows."""
    # Packed: there is one batch entry.
    k_rows, v_rows = 0, 0
    if problem.ragged_k and not problem.varlen_k:
        k_rows, v_rows = (Scalar(maps.rows_between(buffers[name])) for name in ("k", "v"))
    no_page = maps.no_page(buffers) if problem.page_size else None
    return args.KVRows(k_rows, v_rows, IS_RAGGED=problem.ragged_k, NO_PAGE=no_page)


def _tile_order(
    problem: AttentionProblem, launch: LaunchSizes, buffers: Buffers, entry_rows: int | None
) -> args.HopperTileOrder:
    numbers: dict[str, Any] = groups.scalars(**launch.numbers)
    numbers["entry_rows"] = None if entry_rows is None else Scalar(entry_rows)
    hulls = key_hulls(problem, buffers)
    return groups.arrays(args.HopperTileOrder, buffers, **numbers, hulls=hulls)


def key_hulls(problem: AttentionProblem, buffers: Buffers) -> KeyHulls:
    """The group of what each 64 rows see by their key_ranges."""
    if not problem.key_ranges:
        return absent(KeyHulls)
    own = own_ranges(buffers)
    return KeyHulls(
        pointer(buffers, "key_hulls"),
        Scalar(seen_entries(problem, CONSUMER_ROWS)) if own else None,
        None if problem.varlen_q else Scalar(ceil_div(problem.seqlen_q, CONSUMER_ROWS)),
    )


def own_ranges(buffers: Buffers) -> bool:
    """Whether heads have key_ranges of their own."""
    spec = buffers.get("key_ranges")
    return spec is not None and len(spec.shape) == 4 and spec.steps[1] != 0


def seen_lists(problem: AttentionProblem, buffers: Buffers) -> Workspace:
    """Room for the lists without tiles that positions hide, of each entry where lengths differ."""
    rows = buffers["block_rows"]
    is_ragged = problem.used_q or problem.varlen_q or problem.ragged_k or problem.q_offsets
    batch = problem.batch if is_ragged or rows.steps[0] else 1
    heads = problem.heads_q if rows.steps[1] else 1
    return Workspace.of("seen_lists", batch, heads, *rows.shape[2:], dtype="int32")


def seen_lists_call(problem: AttentionProblem, buffers: Buffers) -> KernelCall:
    """The kernel that leaves out of the lists what positions hide."""
    spec = buffers["seen_lists"]
    batch, heads, tiles, _ = spec.shape
    b, h, m, _ = spec.steps
    parameters = {
        "io": args.SeenListsIO(
            pointer(buffers, "seen_lists"),
            *(stride(b), stride(h), stride(m)),
            tiles=Scalar(tiles),
            heads=Scalar(heads),
        ),
        "seqs": groups.sequences(problem, buffers),
        "shape": groups.shape(problem),
        "mask": groups.mask(problem, buffers),
    }
    ref = KernelRef("heedful.kernels.hopper.forward.seen_lists", "seen_lists")
    return KernelCall(ref, (batch * heads * tiles, 1, 1), parameters, {"num_warps": 4})


def hulls_call(
    problem: AttentionProblem, sizes: Sizes, buffers: Buffers, first_rows: bool = False
) -> KernelCall:
    """The kernel that finds what each 64 rows see by their key_ranges. first_rows: whether its
    entries have the numbers that a backward needs whose config hides rows."""
    launch = sizes.launches["hopper.key_hulls"]
    heads = problem.heads_q if own_ranges(buffers) else 1
    grid = (launch.numbers["blocks"] * problem.batch * heads, 1, 1)
    numbers = groups.scalars(heads=heads, **launch.numbers)
    block = Tile(*(None,) * len(Tile._fields))
    parameters = {
        "io": groups.arrays(args.HullIO, buffers, **numbers),
        "seqs": groups.sequences(problem, buffers),
        "shape": groups.shape(problem),
        "mask": groups.mask(problem, buffers),
        "tile": block._replace(BLOCK_M=CONSUMER_ROWS, BLOCK_N=1),
        "IS_BOUNDED": problem.bias,
        "FIRST_ROWS": first_rows,
    }
    ref = KernelRef("heedful.kernels.hopper.forward.key_hulls", "key_hulls")
    return KernelCall(ref, grid, parameters, {"num_warps": 1})


def _split_kv(
    problem: AttentionProblem, config: HopperConfig, buffers: Buffers, splits: int | None
) -> args.SplitKV:
    """The group of partial results. splits: how many the keys have; None without. The results may
    have a rest in either case."""
    part_tiles = None
    if isinstance(config, HopperForwardConfig) and problem.invariant:
        part_tiles = config.part_keys // config.block_n
    if splits is None:
        rest, largest = pointer(buffers, "rest"), pointer(buffers, "max_scores")
        held = pointer(buffers, "held", True)
        exact: dict[str, Any] = {"exact": absent(Rows), "dim_v": None}
        if has_float_out(problem):
            divisor = maps.STRIDE_BYTES // item_bytes(problem.out_dtype)
            exact["exact"] = groups.rows(buffers, "out", divisor)
            exact["dim_v"] = Scalar(problem.head_dim_v)
        return args.SplitKV(
            **dict.fromkeys(("partials", "splits", "batch")),
            rest=rest,
            max_scores=largest,
            PART_TILES=part_tiles,
            held=held,
            **exact,
        )
    return args.SplitKV(
        partials=pointer(buffers, "partial_out"),
        rest=pointer(buffers, "partial_rest"),
        max_scores=None,
        splits=Scalar(splits),
        batch=None if problem.varlen_q else Scalar(problem.batch),
        dim_v=Scalar(problem.head_dim_v),
        PART_TILES=part_tiles,
        held=None,
        exact=absent(Rows),
    )


def has_float_out(problem: AttentionProblem) -> bool:
    """Whether 16-bit inputs have results in float32, which pass through no shared memory."""
    return item_bytes(problem.dtype) == 2 and problem.out_dtype == "float32"


def _stages(config: HopperConfig) -> args.HopperStages:
    if isinstance(config, HopperForwardConfig):
        v_stages, shared = config.value_stages, config.kv_share_stages
    else:
        v_stages, shared = config.num_stages, config.rescale == "speculative"
    stored = config.stored_stages if isinstance(config, HopperForwardConfig) else 0
    return args.HopperStages(config.query_stages, config.num_stages, v_stages, shared, stored)


def _tile(problem: AttentionProblem, config: HopperConfig, is_split: bool) -> args.HopperTile:
    is_16_bit = isinstance(config, HopperForwardConfig)
    visits_second = not is_16_bit and config.rescale == "speculative" and problem.mask.bounded
    return groups.constants(
        args.HopperTile,
        config,
        TAIL_D=is_16_bit and config.tail_d,
        TAIL_E=is_16_bit and config.tail_e,
        # Results in float32 are not stored through a tensor map.
        OUT_IN_Q=is_16_bit and config.out_in_q and not (is_split or has_float_out(problem)),
        V_TRANSPOSED=not is_16_bit,
        PREFETCHES_TILE=isinstance(config, HopperFp8Config) and config.prefetches_tile,
        VISITS_SECOND=visits_second and config.consumers * CONSUMER_ROWS <= config.block_n,
    )


def _fp8(problem: AttentionProblem, config: HopperConfig, buffers: Buffers) -> Any:
    if problem.quantized_kv:
        return args.HopperFp8(groups.descales(problem, buffers), None, None, None)
    if not isinstance(config, HopperFp8Config):
        return None
    return groups.constants(args.HopperFp8, config, descales=groups.descales(problem, buffers))


def varlen_call(
    problem: AttentionProblem,
    config: HopperConfig,
    sizes: Sizes,
    buffers: Buffers,
    results: Mapping[str, str],
) -> KernelCall:
    """The launch of the varlen scheduler, before the attention kernel: it lists the tiles of packed
    queries in order, and clears tokens of no sequence in `results`: the buffers of "lse", which may
    have a dim of splits, and of "out", those that are there."""
    launch = sizes.launches["hopper.varlen_scheduler"]
    out = buffers[results["out"]] if "out" in results else None
    row = head = None
    if out is not None:
        # Tensor maps require rows and heads that begin at multiples of 16 bytes.
        divisor = maps.STRIDE_BYTES // item_bytes(problem.out_dtype)
        row, head = (stride(maps.stride(out, axis), divisor) for axis in (0, 1))
    counts = {
        "total_q": buffers["q"].shape[0],
        "total_k": buffers["k"].shape[0],
        "batch": problem.batch,
        # Those of all splits lie one after the other.
        "heads": problem.heads_q * (1 if out is not None else sizes.num_splits),
    }
    return schedule_call(
        launch,
        buffers,
        config.block_m,
        problem.head_dim_v,
        counts,
        cu_q=pointer(buffers, "cu_seqlens_q"),
        cu_k=pointer(buffers, "cu_seqlens_k"),
        out=pointer(buffers, results["out"], True) if out is not None else None,
        lse=pointer(buffers, results["lse"]) if "lse" in results else None,
        stride_om=row,
        stride_oh=head,
    )


def schedule_call(
    launch: LaunchSizes, buffers: Buffers, rows: int, dim: int, counts: dict[str, int], **io: Any
) -> KernelCall:
    """The kernel that puts the tiles of packed sequences, of so many rows, in order. dim: of the
    results that it clears. counts, io: of `VarlenSizes` and `VarlenIO`."""
    numbers = groups.scalars(**counts, **launch.numbers)
    parameters = {
        "io": groups.arrays(args.VarlenIO, buffers, **io),
        "sizes": args.VarlenSizes(**{"short_q": None, **numbers}),
        "ROWS": rows,
        "BLOCK": VARLEN_SCHEDULER.rows,
        "DIM": dim,
        "BLOCK_E": pow2(dim),
    }
    ref = KernelRef("heedful.kernels.hopper.sm90.varlen_scheduler", "schedule_varlen_tiles")
    return KernelCall(ref, launch.grid, parameters, {"num_warps": VARLEN_SCHEDULER.num_warps})
