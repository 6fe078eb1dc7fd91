"""Programs of the Hopper kernels: tensor maps, argument order, grids.

Dense tensors are mapped as (batch, head, row, dim). Packed sequences need rows past the end of each
to read as zeros and never to be written, from one map for all: see `_packed_map`.
"""

import math
from collections.abc import Mapping

from heedful.core.configs import TileConfig
from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.launch.args import portable
from heedful.launch.spec import (
    Argument,
    BufferSpec,
    KernelCall,
    KernelRef,
    Pointer,
    Program,
    Scalar,
    Workspace,
)
from heedful.launch.spec import TensorMap as Map

Buffers = Mapping[str, BufferSpec]

CONSUMER_ROWS = 64
# Stands for "farther than any sequence reaches"; sums of three stay within 32 bits.
FAR = 1 << 29
ORDER_BLOCK = 1024  # sequences that a program of the order kernel looks at at once
# Head dims that a shared-memory tile can have; in between, tensor maps fill with zeros.
TILE_DIMS = (64, 128, 256)
SWIZZLE = 64  # 16-bit elements that one swizzled row of shared memory holds


def tile_dim(dim: int) -> int:
    """The width of the shared-memory tile that holds a head dim."""
    return next(width for width in TILE_DIMS if dim <= width)


def has_tails(problem: AttentionProblem) -> tuple[bool, bool]:
    """Whether a tile of queries and keys, and one of values, is three boxes of 64 columns, since a
    box has a power of two of them. Pages fill tiles of a power of two."""
    dims = (problem.head_dim, problem.head_dim_v)
    in_d, in_e = (128 < dim <= 192 and not problem.page_size for dim in dims)
    return in_d, in_e


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer; several splits of the keys give partial results,
    which the portable merge combines."""
    splits = max(1, plan.num_splits)
    workspaces: list[Workspace] = []
    if _deal(problem, plan) == "drawn":
        # The kernel that puts packed queries in order begins the count, too.
        one = BufferSpec.contiguous((1,), "int32")
        workspaces.append(Workspace("drawn", one, zeroed=not problem.varlen_q))
    if problem.varlen_q:
        tiles = _head_tiles(problem, plan.configs["hopper.forward"])
        workspaces.append(Workspace("order", BufferSpec.contiguous((1 + 2 * tiles,), "int32")))
    if splits > 1:
        workspaces += (
            Workspace("partial_out", _dense_parts(splits, buffers["out"].shape)),
            Workspace("partial_lse", _dense_parts(splits, problem.lse_shape)),
        )
    buffers = {**buffers, **{w.name: w.buffer for w in workspaces}}
    calls = [_order_call(problem, plan, buffers)] if problem.varlen_q else []
    calls.append(_forward_call(problem, plan, buffers, splits))
    if splits > 1:
        # The first split has the sink: a merge would give it to rows that are not in use, too.
        parts = {name: spec for name, spec in buffers.items() if name != "sink"}
        calls += portable.combine(parts).calls
    # Of packed queries, rows past the lengths used, which a backward would read the lse of.
    if problem.varlen_q and (problem.used_q or problem.needs_grad):
        calls.append(portable.clear_call(problem, buffers, "q", "out", "lse"))
    return Program(tuple(calls), tuple(workspaces))


def _head_tiles(problem: AttentionProblem, config: TileConfig) -> int:
    """Tiles of queries of one head; of packed sequences, whose lengths only the device knows, as
    many as there can be."""
    if problem.total_q is not None:
        return problem.total_q // config.block_m + problem.batch
    return problem.batch * -(-problem.seqlen_q * config.pack(problem) // config.block_m)


def _tiles(problem: AttentionProblem, config: TileConfig) -> int:
    """As `_head_tiles`, of all heads."""
    heads = problem.heads_k if config.pack(problem) > 1 else problem.heads_q
    return _head_tiles(problem, config) * heads


def _work(problem: AttentionProblem, plan: Plan) -> int:
    """Tiles times the splits of their keys."""
    return _tiles(problem, plan.configs["hopper.forward"]) * max(1, plan.num_splits)


def _order_call(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> KernelCall:
    """What comes ahead of the attention kernel for packed queries: their tiles put in order."""
    call = _Call(buffers)
    call.pointers(cu_q="cu_seqlens_q", cu_k="cu_seqlens_k", order="order", drawn="drawn")
    call.ints(batch=problem.batch)
    rows = plan.configs["hopper.forward"].block_m
    constants = call.constants | {"ROWS": rows, "BLOCK": ORDER_BLOCK}
    ref = KernelRef("heedful.kernels.hopper.order", "order_tiles")
    return KernelCall(ref, (problem.batch, 1, 1), call.arguments, constants, {"num_warps": 4})


def _dense_parts(splits: int, shape: tuple[int, ...]) -> BufferSpec:
    return BufferSpec.contiguous((splits, *shape), "float32")


def _forward_call(
    problem: AttentionProblem, plan: Plan, buffers: Buffers, splits: int
) -> KernelCall:
    config = plan.configs["hopper.forward"]
    pack = config.pack(problem)
    heads, group = (problem.heads_k, 1) if pack > 1 else (problem.heads_q, problem.group)
    call = _Call(buffers)
    call.arguments |= _maps(problem, config, buffers)
    is_split = splits > 1
    call.pointers(
        sink_ptr="sink",
        lse_ptr="partial_lse" if is_split else "lse",
        parts_ptr="partial_out" if is_split else "",
        cu_q="cu_seqlens_q",
        cu_k="cu_seqlens_k",
        order="order",
        drawn="drawn",
        used_q="seqused_q",
        used_k="seqused_k",
        leftpad_k="leftpad_k",
        kv_batch_idx="kv_batch_idx",
        block_table="block_table",
        alibi_ptr="alibi_slopes",
        bias_ptr="bias",
        seed_ptr="seed" if _has_dropout(problem) else "",
    )
    call.floats(**_scales(problem))
    mask = problem.mask
    call.ints(
        heads=heads,
        group=group,
        seqlen_q=problem.seqlen_q,
        seqlen_k=_stored_keys(problem, buffers),
        total_q=problem.total_q or problem.batch * problem.seqlen_q,
        row_blocks=-(-problem.seqlen_q * pack // config.block_m),
        tiles=_tiles(problem, config),
        section=_section(problem),
        **_mask(problem),
    )
    call.ints_if(mask.first > 0, first=min(mask.first, FAR))
    call.ints_if(pack > 1, packed=problem.group)
    call.ints_if(is_split, splits=splits, dim_v=problem.head_dim_v)
    _add_terms(call, problem)
    _add_dropout(call, problem)
    _add_storage(call, problem)
    work = _work(problem, plan)
    grid = work if _deal(problem, plan) == "program" else min(work, plan.device.units)
    ref = KernelRef("heedful.kernels.hopper.forward", "forward", "gluon")
    constants = call.constants | _variant(problem, config, is_split)
    constants["IS_RAGGED"] = _is_ragged(problem)
    return KernelCall(ref, (grid, 1, 1), call.arguments, constants, {"num_warps": 4})


class _Call:
    """Collects the kernel's arguments; those of features that a call lacks are constants None."""

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.arguments: dict[str, Argument] = {}
        self.constants: dict[str, object] = {}

    def pointers(self, **names: str) -> None:
        """Parameters that take a small array's address: parameter = buffer name."""
        for parameter, name in names.items():
            if name in self.buffers:
                self.arguments[parameter] = Pointer(name, self.buffers[name].dtype, False)
            else:
                self.constants[parameter] = None

    def floats(self, **values: float) -> None:
        self.arguments |= {name: Scalar(value, "fp32") for name, value in values.items()}

    def ints(self, **values: int) -> None:
        self.arguments |= {name: Scalar(value) for name, value in values.items()}

    def ints_if(self, has: bool, **values: int) -> None:
        """As ints, where the feature that reads them is there."""
        if has:
            self.ints(**values)
        else:
            self.constants |= dict.fromkeys(values)

    def strides_if(self, has: bool, divisor: int = 1, **values: int) -> None:
        """64-bit strides of an array that is there only if `has`."""
        if has:
            strides = {name: Scalar(value, "i64", divisor) for name, value in values.items()}
            self.arguments |= strides
        else:
            self.constants |= dict.fromkeys(values)


def _maps(problem: AttentionProblem, config: TileConfig, buffers: Buffers) -> dict[str, Argument]:
    """The tensor maps: of queries and the output as they lie, of keys and values perhaps row by
    row."""
    q_dim, v_dim = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    in_d, in_e = has_tails(problem)
    # Where the queries are boxes of 64 columns the results, which may take their place, are too.
    out_dim = SWIZZLE if in_e or (in_d and v_dim == 128) else v_dim
    q_dim, v_dim = SWIZZLE if in_d else q_dim, SWIZZLE if in_e else v_dim
    maps: dict[str, Argument] = {}
    for name, dim in (("q", q_dim), ("out", out_dim)):
        if config.pack(problem) > 1:
            made = _grouped_map(name, buffers[name], problem.group, config.pack(problem), dim)
        else:
            make = _packed_map if problem.varlen_q else _dense_map
            made = make(name, buffers[name], CONSUMER_ROWS, dim)
        maps[f"{name}_desc"] = made
    rows = config.block_n
    if problem.page_size:
        # Pages are filled box by box: rows that divide a page, and as wide as the swizzle.
        rows, q_dim, v_dim = min(rows, page_rows(problem.page_size)), SWIZZLE, SWIZZLE
    make_k = _packed_map if _is_ragged(problem) else _dense_map
    for name, dim in (("k", q_dim), ("v", v_dim)):
        maps[f"{name}_desc"] = make_k(name, buffers[name], rows, dim)
    return maps


def page_rows(page_size: int) -> int:
    """The largest power of two that divides a page."""
    return page_size & -page_size


def _is_ragged(problem: AttentionProblem) -> bool:
    """Whether keys end where a sequence ends and not where its storage does."""
    return bool(problem.varlen_k or problem.used_k or problem.leftpad_k or problem.page_size)


def _stored_keys(problem: AttentionProblem, buffers: Buffers) -> int:
    """Keys that a sequence's storage has room for, where no cu_seqlens_k says otherwise."""
    if problem.page_size:
        return buffers["block_table"].shape[1] * problem.page_size
    return problem.seqlen_k if problem.varlen_k else buffers["k"].shape[1]


def _add_storage(call: _Call, problem: AttentionProblem) -> None:
    """Arguments that say where keys lie, beyond their map."""
    if problem.page_size and "cu_seqlens_k" in call.buffers:
        raise ValueError("cu_seqlens_k beside block_table must come as seqused_k")
    is_batched = _is_ragged(problem) and not problem.varlen_k
    for name in ("k", "v"):
        rows = rows_between(call.buffers[name]) if is_batched else 0
        call.ints_if(is_batched, **{f"{name}_rows": rows})
    if not is_batched:
        # Packed: there is one batch entry.
        call.constants |= {"k_rows": 0, "v_rows": 0}
    table = call.buffers.get("block_table")
    call.strides_if(table is not None, stride_table=table.strides[0] if table else 0)
    call.ints_if(table is not None, page_size=problem.page_size)


def rows_between(spec: BufferSpec) -> int:
    """Rows from one batch entry or page of (B, S, H, D) to the next, for a map of rows alone. A
    whole number, as the planner has seen to (`AttentionProblem.even_rows`)."""
    return 0 if spec.shape[0] == 1 else spec.strides[0] // _row_stride(spec)


def _has_dropout(problem: AttentionProblem) -> bool:
    """Whether any probability is dropped: one that rounds to certainty drops nothing."""
    return (1.0 - problem.dropout_p) * 2.0**32 < 2.0**32


def _wrapped(word: int) -> int:
    """A 32-bit word as the signed integer of the same bits."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _add_dropout(call: _Call, problem: AttentionProblem) -> None:
    has, keep = _has_dropout(problem), 1.0 - problem.dropout_p
    call.ints_if(has, drop_threshold=_wrapped(int(keep * 2.0**32)))
    names = ("origin_b", "origin_h", "origin_m", "origin_n")
    origin = (_wrapped(o) for o in problem.dropout_origin)
    call.ints_if(has, **dict(zip(names, origin, strict=True)))
    if has:
        call.floats(drop_scale=1.0 / keep if keep > 0 else 0.0)
    else:
        call.constants["drop_scale"] = None


def _add_terms(call: _Call, problem: AttentionProblem) -> None:
    """ALiBi and bias: their strides, and what a unit of the logits is in raw scores."""
    if problem.alibi or problem.bias:
        call.floats(per_unit=1.0 / (problem.softcap if problem.softcap > 0 else problem.scale))
    else:
        call.constants["per_unit"] = None
    alibi, bias = (call.buffers.get(name) for name in ("alibi_slopes", "bias"))
    call.strides_if(alibi is not None, stride_alibib=alibi.strides[0] if alibi else 0)
    strides = (0, 0, 0, 0)
    divisor = 1
    if bias is not None:
        pairs = zip(bias.shape, bias.strides, strict=True)
        strides = tuple(stride if size > 1 else 0 for size, stride in pairs)
        # Neighbouring keys are then one load.
        if bias.aligned and strides[3] == 1 and all(s % 8 == 0 for s in strides[:3]):
            divisor = 8
            call.arguments["bias_ptr"] = Pointer("bias", bias.dtype, True)
    names = ("stride_biasb", "stride_biash", "stride_biasm", "stride_biasn")
    values = dict(zip(names, strides, strict=True))
    last = values.pop("stride_biasn")
    call.strides_if(bias is not None, divisor, **values)
    if divisor > 1:
        call.constants["stride_biasn"] = 1
    else:
        call.strides_if(bias is not None, stride_biasn=last)


def _layout(rank: int) -> str:
    """The layout of a TMA box of 16-bit elements, at least 64 wide."""
    return (
        f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank={rank},"
        " transposed=False, fp4_padded=False, cga_layout=[])"
    )


def _dense_map(name: str, spec: BufferSpec, rows: int, dim: int) -> Map:
    """(B, S, H, D) seen as (B, H, S, D): reads past a sequence are zeros, writes are dropped."""
    order = (0, 2, 1, 3)
    shape = tuple(spec.shape[axis] for axis in order)
    strides = tuple(_stride(spec, axis) for axis in order)
    return Map(name, spec.dtype, shape, strides, (1, 1, rows, dim), _layout(4))


def _grouped_map(name: str, spec: BufferSpec, group: int, pack: int, dim: int) -> Map:
    """(B, S, H, D) seen as (B, G, S, H / G, D): boxes of all query heads of a KV head, `pack` rows
    a position; rows beyond the group are out of bounds."""
    batch, heads = spec.shape[0], spec.shape[2] // group
    steps = tuple(_stride(spec, axis) for axis in range(3))
    return Map(
        name,
        spec.dtype,
        (batch, heads, spec.shape[1], group, spec.shape[3]),
        (steps[0], group * steps[2], steps[1], steps[2], 1),
        (1, 1, CONSUMER_ROWS // pack, pack, dim),
        _layout(5),
    )


def _packed_map(name: str, spec: BufferSpec, rows: int, dim: int) -> Map:
    """(T, H, D) seen as (2^30, end, H, row, D), so that every sequence ends where it ends.

    Row r of a sequence of n that ends at token e is row 2^30 - n + r of the fourth dimension: past
    2^30 the map is out of bounds. The first two coordinates, 2^30 and e, bring the address back:
    2^30 (2^34 - s) + e s + (2^30 - n + r) s = 2^64 + (e - n + r) s elements, and addresses wrap.
    The trick is that of Triton's `tools/ragged_tma.py`.

    (B, S, H, D) is seen so too, its batch entries `rows_between` rows apart.
    """
    tokens, heads = _row_stride(spec), _stride(spec, -2)
    far = 0x7FFF0000
    return Map(
        name,
        spec.dtype,
        (far, far, spec.shape[-2], 1 << 30, spec.shape[-1]),
        ((1 << 34) - tokens, tokens, heads, tokens, 1),
        (1, 1, 1, rows, dim),
        _layout(5),
    )


def _row_stride(spec: BufferSpec) -> int:
    """The stride of the rows of (B, S, H, D) or (T, H, D), of which a batch entry's is a multiple
    if there is one row in each."""
    if len(spec.shape) == 4 and spec.shape[1] == 1 and spec.shape[0] > 1:
        return spec.strides[0] or 8
    return _stride(spec, -3)


def _stride(spec: BufferSpec, axis: int) -> int:
    """A stride in elements; that of a dim of one element may be anything, TMA wants 16 bytes."""
    axis %= len(spec.shape)
    return spec.strides[axis] if spec.shape[axis] > 1 or axis == len(spec.shape) - 1 else 8


def _scales(problem: AttentionProblem) -> dict[str, float]:
    """Raw scores times scale_log2 are logits in base 2; under softcap the kernel takes
    tanh(s scale / softcap) first, through 2^(s softcap_scale)."""
    log2e = math.log2(math.e)
    scale, softcap_scale = problem.scale * log2e, 0.0
    if problem.softcap > 0:
        softcap_scale = 2.0 * log2e * problem.scale / problem.softcap
        scale = problem.softcap * log2e
    return {"scale_log2": scale, "softcap_scale": softcap_scale}


def _mask(problem: AttentionProblem) -> dict[str, int]:
    mask = problem.mask
    return {
        "left": min(mask.left, FAR) if mask.left >= 0 else FAR,
        "right": min(mask.right, FAR) if mask.right >= 0 else FAR,
        "shift": max(-FAR, min(mask.shift, FAR)),
        "align": int(mask.bottom_right),
    }


def _section(problem: AttentionProblem) -> int:
    """Heads that are worked on together. Unmasked, one after the other, so that K and V stay in
    L2; masked, a few at once, whose long tiles then go first."""
    return 4 if problem.mask.bounded else 1


def _deal(problem: AttentionProblem, plan: Plan) -> str:
    """How programs come by their tiles: "drawn" (deal.py) by a program for each SM where lengths
    differ, and of packed queries, whose tiles only the device can count; in "strides" where they
    hardly do; a "program" for each tile where the rest is not known to be faster."""
    if problem.varlen_q:
        return "drawn"
    if problem.used_q or _is_ragged(problem):
        return "program"
    is_one_wave = _work(problem, plan) <= plan.device.units
    # Of few keys, what a draw costs is more than what it evens out.
    is_even = not problem.mask.bounded or problem.seqlen_k <= 2048
    return "strides" if is_even or is_one_wave else "drawn"


def _results_fit(problem: AttentionProblem) -> bool:
    """Whether a consumer's results fit, box by box, where its queries were."""
    in_d, in_e = has_tails(problem)
    v_dim = tile_dim(problem.head_dim_v)
    if in_d:
        return in_e or v_dim == 128
    return not in_e and tile_dim(problem.head_dim) == v_dim


def _variant(problem: AttentionProblem, config: TileConfig, is_split: bool) -> dict[str, object]:
    in_d, in_e = has_tails(problem)
    return {
        "BLOCK_N": config.block_n,
        "TAIL_D": in_d,
        "TAIL_E": in_e,
        "PACK": config.pack(problem),
        "CONSUMERS": config.block_m // CONSUMER_ROWS,
        "Q_SLOTS": config.get("q_slots", config.block_m // CONSUMER_ROWS),
        "K_STAGES": config.num_stages,
        "V_STAGES": config.get("v_stages", config.num_stages),
        "CONSUMER_REGS": config.get("consumer_regs"),
        "PRODUCER_REGS": config.get("producer_regs"),
        # Of another width, the output does not fit where the queries were; parts take no such way.
        "OUT_IN_Q": config.get("out_in_q", False) and not is_split and _results_fit(problem),
        "ORDERED": config.get("ordered", False),
        "LAZY": config.get("lazy", True),
        "IS_RIGHT": problem.mask.right >= 0,
        "IS_LEFT": problem.mask.left >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
    }
