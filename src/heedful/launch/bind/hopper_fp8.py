"""Programs of the Hopper fp8 forward: V is transposed into scratch, then attention runs over it."""

from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.core.sizes import LaunchSizes
from heedful.core.tiles import (
    CONSUMER_ROWS,
    TRANSPOSE_SEQUENCES,
    V_T_DIMS,
    V_T_KEYS,
    HopperFp8Config,
    tile_dim,
)
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind import hopper_scheduler as scheduler
from heedful.launch.bind.hopper_scheduler import Buffers, Call
from heedful.launch.bind.portable import stored_keys
from heedful.launch.spec import (
    Argument,
    KernelCall,
    KernelRef,
    Pointer,
    Program,
    Scalar,
    TensorMap,
)


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    sizes, config = plan.sizes(), plan.configs["hopper.fp8_forward"]
    assert isinstance(config, HopperFp8Config)
    buffers = {**buffers, **{w.name: w.buffer for w in sizes.workspaces}}
    results = {"out": "out", "lse": "lse"}
    calls: list[KernelCall] = []
    if problem.varlen_q:
        calls.append(scheduler.varlen_scheduler_call(problem, config, sizes, buffers, results))
    if not config.transposes_v:
        calls.append(_transpose_call(problem, sizes.launches["hopper.transpose_v"], buffers))
    calls.append(_forward_call(problem, config, sizes.launches["hopper.fp8_forward"], buffers))
    return Program(tuple(calls), sizes.workspaces)


def _transpose_call(problem: AttentionProblem, launch: LaunchSizes, buffers: Buffers) -> KernelCall:
    v, v_t, is_packed = buffers["v"], buffers["v_t"], problem.varlen_k
    call = Call(buffers)
    call.pointers(cu_k="cu_seqlens_k", tile_counter="tile_counter")
    call.arguments |= {
        "v_ptr": Pointer("v", "uint8"),
        "out_ptr": Pointer("v_t", "uint8"),
        "dim_v": Scalar(problem.head_dim_v, divisor=16),
        "padded_k": Scalar(v_t.shape[-1], divisor=V_T_KEYS),
        "stride_vb": Scalar(0 if is_packed else v.strides[0], "i64", 16),
        "stride_vn": Scalar(v.strides[-3], "i64", 16),
        "stride_vh": Scalar(v.strides[-2], "i64", 16),
    }
    call.ints(
        heads_k=problem.heads_k,
        seqlen_k=stored_keys(buffers, 0),
        **launch.numbers,
        batch=problem.batch,
    )
    constants = call.constants | {
        "BLOCK_N": V_T_KEYS,
        "BLOCK_E": tile_dim(problem.head_dim_v),
        "BLOCK_B": TRANSPOSE_SEQUENCES,
    }
    ref = KernelRef("heedful.kernels.hopper.transpose_v_kernel", "transpose_v")
    return KernelCall(ref, launch.grid, {**call.arguments, **constants}, {"num_warps": 4})


def _forward_call(
    problem: AttentionProblem, config: HopperFp8Config, launch: LaunchSizes, buffers: Buffers
) -> KernelCall:
    call = Call(buffers)
    call.arguments |= _maps(problem, config, buffers)
    _add_transpose(call, problem, config)
    scheduler.add_common(call, problem, config, launch)
    call.pointers(
        lse_ptr="lse", q_descale="q_descale", k_descale="k_descale", v_descale="v_descale"
    )
    call.ints(seqlen_k=stored_keys(buffers, 0), **_descale_strides(buffers))
    ref = KernelRef("heedful.kernels.hopper.forward_fp8", "forward", "gluon")
    constants = call.constants | _variant(problem, config)
    return KernelCall(ref, launch.grid, {**call.arguments, **constants}, {"num_warps": 4})


def _maps(
    problem: AttentionProblem, config: HopperFp8Config, buffers: Buffers
) -> dict[str, Argument]:
    q_dim, v_dim = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    map_q = maps.packed_map if problem.varlen_q else maps.dense_map
    map_k = maps.packed_map if problem.varlen_k else maps.dense_map
    v_t, box = buffers["v_t"], (1, 1, v_dim, config.block_n)
    layout = maps.layout(v_t, 4, config.block_n)
    return {
        "q_desc": map_q("q", buffers["q"], CONSUMER_ROWS, q_dim),
        "k_desc": map_k("k", buffers["k"], config.block_n, q_dim),
        "v_t_desc": TensorMap("v_t", v_t.dtype, v_t.shape, v_t.strides, box, layout),
        "out_desc": map_q("out", buffers["out"], CONSUMER_ROWS, v_dim),
    }


def _add_transpose(call: Call, problem: AttentionProblem, config: HopperFp8Config) -> None:
    """What warps of the attention kernel need to transpose V."""
    call.constants["TRANSPOSES_V"] = config.transposes_v
    names = ("v_desc", "v_t", "v_t_counts", "heads_k", "dim_v", "padded_k", "v_tiles")
    if not config.transposes_v:
        call.constants |= dict.fromkeys(names)
        return
    padded = call.buffers["v_t"].shape[-1]
    blocks = padded // V_T_KEYS * (tile_dim(problem.head_dim_v) // V_T_DIMS)
    call.arguments |= {
        "v_desc": maps.dense_map("v", call.buffers["v"], V_T_KEYS, V_T_DIMS),
        "v_t": Pointer("v_t", "uint8"),
        "v_t_counts": Pointer("v_t_counts", "int32"),
        "padded_k": Scalar(padded, divisor=V_T_KEYS),
    }
    call.ints(
        heads_k=problem.heads_k,
        dim_v=problem.head_dim_v,
        v_tiles=problem.batch * problem.heads_k * blocks,
    )


def _descale_strides(buffers: Buffers) -> dict[str, int]:
    strides = {}
    for name in "qkv":
        spec = buffers.get(f"{name}_descale")
        batch, head = spec.strides if spec is not None else (0, 0)
        strides |= {f"stride_{name}db": batch, f"stride_{name}dh": head}
    return strides


def _variant(problem: AttentionProblem, config: HopperFp8Config) -> dict[str, object]:
    return {
        "BLOCK_N": config.block_n,
        "CONSUMERS": config.consumers,
        "Q_STAGES": config.query_stages,
        "STAGES": config.num_stages,
        "PROMOTION_INTERVAL": config.promotion_interval,
        "CONSUMER_REGS": config.consumer_regs,
        "PRODUCER_REGS": config.producer_regs,
        "RESCALE": config.rescale,
        "VOTES_LAST": config.votes_last,
        "PREFETCHES_TILE": config.prefetches_tile,
        "SUMS_IN_REGS": config.sums_in_regs,
        "PINGPONG": config.pingpong,
        "IS_RIGHT": problem.mask.right >= 0,
        "IS_LEFT": problem.mask.left >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
    }
