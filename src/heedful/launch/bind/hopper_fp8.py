"""Programs of the Hopper fp8 forward: V is transposed into scratch, then attention runs over it."""

from heedful.core.arrays import ArraySpec
from heedful.core.configs import TileConfig
from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind import hopper_scheduler as scheduler
from heedful.launch.bind.hopper_maps import CONSUMER_ROWS, tile_dim
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
    Workspace,
)

# Keys of one block of the transpose kernel; packed sequences begin at multiples of it.
V_T_KEYS = 128
# Of a head these keys of V are reported together, by the attention kernel's own warps.
V_T_CHUNK = 1024
# Their boxes are (V_T_KEYS, V_T_DIMS).
V_T_DIMS = 64
# Query rows of a KV head from which on they transpose its values: for 128 keys they take some
# 3 us, and 128 rows of queries 0.9 us.
TRANSPOSE_ROWS = 1024
# Packed sequences that a program of the transpose kernel looks at at once.
TRANSPOSE_SEQUENCES = 256
# Keys whose products add up in the matrix unit's accumulators before float32 takes over: an output
# all of one sign loses 1 % in 1024 (H200, 2026-11-20), and as much of that in fewer.
PROMOTION_KEYS = 512


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    v_t = _v_t_spec(problem)
    transposes_itself = _transposes_itself(problem, plan.configs["hopper.forward"])
    # A transpose kernel of its own begins the tile counter.
    workspaces = scheduler.scheduler_workspaces(problem, plan, zeroed=transposes_itself)
    if transposes_itself:
        chunks = problem.batch * problem.heads_k * -(-problem.seqlen_k // V_T_CHUNK)
        counts = ArraySpec.contiguous((1 + chunks,), "int32")
        workspaces.append(Workspace("v_t_counts", counts, zeroed=True))
    workspaces.append(Workspace("v_t", v_t))
    buffers = {**buffers, **{w.name: w.buffer for w in workspaces}}
    results = {"out": "out", "lse": "lse"}
    calls = (
        [scheduler.varlen_scheduler_call(problem, plan, buffers, results)]
        if problem.varlen_q
        else []
    )
    if not transposes_itself:
        calls.append(_transpose_call(problem, buffers))
    return Program((*calls, _forward_call(problem, plan, buffers)), tuple(workspaces))


def _transposes_itself(problem: AttentionProblem, config: TileConfig) -> bool:
    """Whether warps of the attention kernel transpose V. Not of packed sequences, whose blocks are
    found by search, nor where few queries use the result, and take less time."""
    rows = problem.seqlen_q * problem.group
    is_packed = problem.varlen_k or problem.varlen_q
    return bool(config.get("transposes_v")) and rows >= TRANSPOSE_ROWS and not is_packed


def _v_t_spec(problem: AttentionProblem) -> ArraySpec:
    """V with keys innermost: (B, G, E, positions); packed, (1, G, E, positions)."""
    if problem.total_k is None:
        batch, positions = problem.batch, -(-problem.seqlen_k // V_T_KEYS) * V_T_KEYS
    else:
        batch, positions = 1, (problem.total_k // V_T_KEYS + problem.batch) * V_T_KEYS
    shape = (batch, problem.heads_k, problem.head_dim_v, positions)
    return ArraySpec.contiguous(shape, problem.kv_dtype)


def _transpose_call(problem: AttentionProblem, buffers: Buffers) -> KernelCall:
    v, v_t, is_packed = buffers["v"], buffers["v_t"], problem.varlen_k
    blocks = v_t.shape[-1] // V_T_KEYS
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
        blocks=blocks,
        batch=problem.batch,
    )
    constants = call.constants | {
        "BLOCK_N": V_T_KEYS,
        "BLOCK_E": tile_dim(problem.head_dim_v),
        "BLOCK_B": TRANSPOSE_SEQUENCES,
    }
    grid = (blocks * problem.heads_k * v_t.shape[0], 1, 1)
    ref = KernelRef("heedful.kernels.hopper.transpose_v_kernel", "transpose_v")
    return KernelCall(ref, grid, {**call.arguments, **constants}, {"num_warps": 4})


def _forward_call(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> KernelCall:
    config = plan.configs["hopper.forward"]
    call = Call(buffers)
    call.arguments |= _maps(problem, config, buffers)
    _add_transpose(call, problem, config)
    scheduler.add_common(call, problem, plan)
    call.pointers(
        lse_ptr="lse", q_descale="q_descale", k_descale="k_descale", v_descale="v_descale"
    )
    call.ints(seqlen_k=stored_keys(buffers, 0), **_descale_strides(buffers))
    ref = KernelRef("heedful.kernels.hopper.forward_fp8", "forward", "gluon")
    constants = call.constants | _variant(problem, config)
    grid = scheduler.grid(problem, plan)
    return KernelCall(ref, grid, {**call.arguments, **constants}, {"num_warps": 4})


def _maps(problem: AttentionProblem, config: TileConfig, buffers: Buffers) -> dict[str, Argument]:
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


def _add_transpose(call: Call, problem: AttentionProblem, config: TileConfig) -> None:
    """What warps of the attention kernel need to transpose V."""
    transposes = _transposes_itself(problem, config)
    call.constants["TRANSPOSES_V"] = transposes
    names = ("v_desc", "v_t", "v_t_counts", "heads_k", "dim_v", "padded_k", "v_tiles")
    if not transposes:
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


def _variant(problem: AttentionProblem, config: TileConfig) -> dict[str, object]:
    return {
        "BLOCK_N": config.block_n,
        "CONSUMERS": config.block_m // CONSUMER_ROWS,
        "Q_STAGES": config.get("q_stages", config.block_m // CONSUMER_ROWS),
        "STAGES": config.num_stages,
        "PROMOTION_INTERVAL": PROMOTION_KEYS // config.block_n,
        "CONSUMER_REGS": config.get("consumer_regs"),
        "PRODUCER_REGS": config.get("producer_regs"),
        "RESCALE": config.get("rescale", "threshold"),
        "VOTES_LAST": config.get("votes_last", False),
        "PREFETCHES_TILE": config.get("prefetches_tile", False),
        "SUMS_IN_REGS": config.get("sums_in_regs", False),
        "PINGPONG": config.get("pingpong", False),
        "IS_RIGHT": problem.mask.right >= 0,
        "IS_LEFT": problem.mask.left >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
    }
