"""Programs of the Hopper forward for 16-bit inputs: argument order, scratch, variants."""

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.sizes import Sizes
from heedful.core.tiles import CONSUMER_ROWS, HopperForwardConfig, tile_dim
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind import hopper_scheduler as scheduler
from heedful.launch.bind import portable
from heedful.launch.bind.hopper_scheduler import FAR, Buffers, Call
from heedful.launch.spec import Argument, KernelCall, KernelRef, Pointer, Program

SWIZZLE = maps.SWIZZLE_BYTES // 2  # elements that one swizzled row of shared memory holds


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer; several splits of the keys give partial results,
    which the portable merge combines."""
    sizes, config = plan.sizes(), plan.configs["hopper.forward"]
    assert isinstance(config, HopperForwardConfig)
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    results = {"lse": "partial_lse"} if plan.is_split else {"out": "out", "lse": "lse"}
    calls: list[KernelCall] = []
    if problem.varlen_q:
        calls.append(scheduler.varlen_scheduler_call(problem, config, sizes, buffers, results))
    calls.append(_forward_call(problem, plan, config, sizes, buffers))
    if plan.is_split:
        # The first split has the sink: a merge would give it to rows that are not in use, too.
        operands = {name: spec for name, spec in buffers.items() if name != "sink"}
        calls += portable.combine(operands).calls
    return Program(tuple(calls), sizes.workspaces)


def _forward_call(
    problem: AttentionProblem,
    plan: Plan,
    config: HopperForwardConfig,
    sizes: Sizes,
    buffers: Buffers,
) -> KernelCall:
    is_split, launch = plan.is_split, sizes.launches["hopper.forward"]
    call = Call(buffers)
    call.arguments |= _maps(problem, config, buffers)
    scheduler.add_common(call, problem, config, launch)
    call.pointers(
        lse_ptr="partial_lse" if is_split else "lse",
        partial_ptr="partial_out" if is_split else "",
        used_q="seqused_q",
        used_k="seqused_k",
        leftpad_k="leftpad_k",
        kv_batch_idx="kv_batch_idx",
        block_table="block_table",
        alibi_ptr="alibi_slopes",
        bias_ptr="bias",
        seed_ptr="seed" if _has_dropout(problem) else "",
    )
    call.ints(seqlen_k=portable.stored_keys(buffers, problem.page_size))
    first = problem.mask.first
    call.ints_if(first > 0, first=min(first, FAR))
    call.ints_if(config.group_rows(problem) > 1, packed_heads=problem.group)
    call.ints_if(is_split, splits=sizes.num_splits, dim_v=problem.head_dim_v)
    _add_score_mods(call, problem)
    _add_dropout(call, problem)
    _add_storage(call, problem)
    ref = KernelRef("heedful.kernels.hopper.forward", "forward", "gluon")
    constants = call.constants | _variant(problem, config, is_split)
    constants["IS_RAGGED"] = problem.ragged_k
    return KernelCall(ref, launch.grid, {**call.arguments, **constants}, {"num_warps": 4})


def _maps(
    problem: AttentionProblem, config: HopperForwardConfig, buffers: Buffers
) -> dict[str, Argument]:
    """The tensor maps: of queries and the output as they lie, of keys and values perhaps row by
    row."""
    q_dim, v_dim = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    in_d, in_e = config.tail_d, config.tail_e
    # Where the queries are boxes of 64 columns the results, which may take their place, are too.
    out_dim = SWIZZLE if in_e or (in_d and v_dim == 128) else v_dim
    q_dim, v_dim = SWIZZLE if in_d else q_dim, SWIZZLE if in_e else v_dim
    pack = config.group_rows(problem)
    found: dict[str, Argument] = {}
    make_q = maps.packed_map if problem.varlen_q else maps.dense_map
    for name, dim in (("q", q_dim), ("out", out_dim)):
        if pack > 1:
            made = maps.grouped_map(name, buffers[name], problem.group, pack, dim)
        else:
            made = make_q(name, buffers[name], CONSUMER_ROWS, dim)
        found[f"{name}_desc"] = made
    rows = config.block_n
    if problem.page_size:
        # Pages are filled box by box: rows that divide a page, and as wide as the swizzle.
        rows, q_dim, v_dim = min(rows, page_rows(problem.page_size)), SWIZZLE, SWIZZLE
    make_k = maps.packed_map if problem.ragged_k else maps.dense_map
    for name, dim in (("k", q_dim), ("v", v_dim)):
        found[f"{name}_desc"] = make_k(name, buffers[name], rows, dim)
    return found


def page_rows(page_size: int) -> int:
    """The largest power of two that divides a page."""
    return page_size & -page_size


def _add_storage(call: Call, problem: AttentionProblem) -> None:
    """Arguments that say where keys lie, beyond their map."""
    if problem.ragged_k and not problem.varlen_k:
        call.ints(**{f"{n}_rows": maps.rows_between(call.buffers[n]) for n in ("k", "v")})
    else:
        # Packed: there is one batch entry.
        call.constants |= {"k_rows": 0, "v_rows": 0}
    call.ints_if(problem.kv_batch_idx, entries=call.buffers["k"].shape[0])
    call.constants["NO_PAGE"] = maps.no_page(call.buffers) if problem.page_size else None
    call.strides_of("block_table", stride_table=0)
    call.ints_if("block_table" in call.buffers, page_size=problem.page_size)


def _has_dropout(problem: AttentionProblem) -> bool:
    """Whether any probability is dropped: one that rounds to certainty drops nothing."""
    return (1.0 - problem.dropout_p) * 2.0**32 < 2.0**32


def _wrapped(word: int) -> int:
    """A 32-bit word as the signed integer of the same bits."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _add_dropout(call: Call, problem: AttentionProblem) -> None:
    has, keep = _has_dropout(problem), 1.0 - problem.dropout_p
    call.ints_if(has, drop_threshold=_wrapped(int(keep * 2.0**32)))
    b, h, m, n = (_wrapped(o) for o in problem.dropout_origin)
    call.ints_if(has, origin_b=b, origin_h=h, origin_m=m, origin_n=n)
    if has:
        call.floats(drop_scale=1.0 / keep if keep > 0 else 0.0)
    else:
        call.constants["drop_scale"] = None


def _add_score_mods(call: Call, problem: AttentionProblem) -> None:
    """ALiBi and bias: their strides, and what a unit of the logits is in raw scores."""
    if problem.alibi or problem.bias:
        call.floats(per_unit=1.0 / (problem.softcap if problem.softcap > 0 else problem.scale))
    else:
        call.constants["per_unit"] = None
    # Dense sequences are as long as the bias says.
    may_differ = problem.varlen_q or problem.varlen_k or problem.page_size
    call.ints_if(bool(problem.bias and may_differ), longest_k=problem.seqlen_k)
    call.strides_of("alibi_slopes", stride_alibib=0)
    bias = call.buffers.get("bias")
    b, h, m, n = bias.steps if bias else (0, 0, 0, 0)
    # Neighbouring keys are then one load.
    is_wide = bool(bias and bias.aligned and n == 1 and all(s % 8 == 0 for s in (b, h, m)))
    if bias and is_wide:
        call.arguments["bias_ptr"] = Pointer("bias", bias.dtype, True)
    has, divisor = bias is not None, 8 if is_wide else 1
    call.strides_if(has, divisor, stride_biasb=b, stride_biash=h, stride_biasm=m)
    call.strides_if(has and not is_wide, stride_biasn=n)
    if is_wide:
        call.constants["stride_biasn"] = 1


def _variant(
    problem: AttentionProblem, config: HopperForwardConfig, is_split: bool
) -> dict[str, object]:
    return {
        "BLOCK_N": config.block_n,
        "TAIL_D": config.tail_d,
        "TAIL_E": config.tail_e,
        "PACK_GQA": config.group_rows(problem),
        "CONSUMERS": config.consumers,
        "Q_STAGES": config.query_stages,
        "K_STAGES": config.num_stages,
        "V_STAGES": config.value_stages,
        "KV_SHARE_STAGES": config.kv_share_stages,
        "CONSUMER_REGS": config.consumer_regs,
        "PRODUCER_REGS": config.producer_regs,
        # Partial results take no such way.
        "OUT_IN_Q": config.out_in_q and not is_split,
        "PINGPONG": config.pingpong,
        "RESCALE": config.rescale,
        "IS_RIGHT": problem.mask.right >= 0,
        "IS_LEFT": problem.mask.left >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
    }
