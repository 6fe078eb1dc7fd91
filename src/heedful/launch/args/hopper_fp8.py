"""Programs of the Hopper fp8 forward: V is turned into scratch, then attention runs over it."""

from heedful.core.arrays import ArraySpec
from heedful.core.configs import TileConfig
from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.launch.args import hopper_maps as maps
from heedful.launch.args import hopper_work as work
from heedful.launch.args.hopper_maps import CONSUMER_ROWS, tile_dim
from heedful.launch.args.hopper_work import Buffers, Call
from heedful.launch.args.portable import stored_keys
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

# Keys of one block of the turning kernel; packed sequences begin at multiples of it.
TURN_KEYS = 128
# Of a head these keys of V are reported as turned together, by the attention kernel's own warps.
TURN_CHUNK = 1024
# Their boxes are (TURN_KEYS, TURN_DIMS).
TURN_DIMS = 64
# Query rows of a KV head from which on they turn its values: for 128 keys they take some 3 us,
# and 128 rows of queries 0.9 us.
TURN_ROWS = 1024
# Packed sequences that a program of the turning kernel looks at at once.
TURN_SEQUENCES = 256
# Keys whose products add up in the matrix unit's accumulators before float32 takes over: an output
# all of one sign loses 1 % in 1024 (H200, 2026-11-20), and as much of that in fewer.
FLUSH_KEYS = 512


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    turned = _turned(problem)
    turns_itself = _turns_itself(problem, plan.configs["hopper.forward"])
    # A turning kernel of its own begins the count of tiles drawn.
    workspaces = work.deal_workspaces(problem, plan, zeroed=turns_itself)
    if turns_itself:
        chunks = problem.batch * problem.heads_k * -(-problem.seqlen_k // TURN_CHUNK)
        counts = ArraySpec.contiguous((1 + chunks,), "int32")
        workspaces.append(Workspace("turn_counts", counts, zeroed=True))
    workspaces.append(Workspace("turned_v", turned))
    buffers = {**buffers, **{w.name: w.buffer for w in workspaces}}
    results = {"out": "out", "lse": "lse"}
    calls = [work.order_call(problem, plan, buffers, results)] if problem.varlen_q else []
    if not turns_itself:
        calls.append(_turn(problem, buffers))
    return Program((*calls, _attend(problem, plan, buffers)), tuple(workspaces))


def _turns_itself(problem: AttentionProblem, config: TileConfig) -> bool:
    """Whether warps of the attention kernel turn V. Not of packed sequences, whose blocks are found
    by search, nor where few queries use what is turned, so that turning takes longer than they."""
    rows = problem.seqlen_q * problem.group
    is_packed = problem.varlen_k or problem.varlen_q
    return bool(config.get("turns")) and rows >= TURN_ROWS and not is_packed


def _turned(problem: AttentionProblem) -> ArraySpec:
    """V with keys innermost: (B, G, E, positions); packed, (1, G, E, positions)."""
    if problem.total_k is None:
        batch, positions = problem.batch, -(-problem.seqlen_k // TURN_KEYS) * TURN_KEYS
    else:
        batch, positions = 1, (problem.total_k // TURN_KEYS + problem.batch) * TURN_KEYS
    shape = (batch, problem.heads_k, problem.head_dim_v, positions)
    return ArraySpec.contiguous(shape, problem.kv_dtype)


def _turn(problem: AttentionProblem, buffers: Buffers) -> KernelCall:
    v, turned, is_packed = buffers["v"], buffers["turned_v"], problem.varlen_k
    blocks = turned.shape[-1] // TURN_KEYS
    call = Call(buffers)
    call.pointers(cu_k="cu_seqlens_k", drawn="drawn")
    call.arguments |= {
        "v_ptr": Pointer("v", "uint8"),
        "out_ptr": Pointer("turned_v", "uint8"),
        "dim_v": Scalar(problem.head_dim_v, divisor=16),
        "padded_k": Scalar(turned.shape[-1], divisor=TURN_KEYS),
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
        "BLOCK_N": TURN_KEYS,
        "BLOCK_E": tile_dim(problem.head_dim_v),
        "BLOCK_B": TURN_SEQUENCES,
    }
    grid = (blocks * problem.heads_k * turned.shape[0], 1, 1)
    ref = KernelRef("heedful.kernels.hopper.fp8_values", "turn_values")
    return KernelCall(ref, grid, call.arguments, constants, {"num_warps": 4})


def _attend(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> KernelCall:
    config = plan.configs["hopper.forward"]
    call = Call(buffers)
    call.arguments |= _maps(problem, config, buffers)
    _add_turning(call, problem, config)
    work.add_common(call, problem, plan)
    call.pointers(
        lse_ptr="lse", q_descale="q_descale", k_descale="k_descale", v_descale="v_descale"
    )
    call.ints(seqlen_k=stored_keys(buffers, 0), **_descale_strides(buffers))
    ref = KernelRef("heedful.kernels.hopper.fp8", "forward", "gluon")
    constants = call.constants | _variant(problem, config)
    grid = work.grid(problem, plan)
    return KernelCall(ref, grid, call.arguments, constants, {"num_warps": 4})


def _maps(problem: AttentionProblem, config: TileConfig, buffers: Buffers) -> dict[str, Argument]:
    q_dim, v_dim = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    map_q = maps.packed_map if problem.varlen_q else maps.dense_map
    map_k = maps.packed_map if problem.varlen_k else maps.dense_map
    turned, box = buffers["turned_v"], (1, 1, v_dim, config.block_n)
    layout = maps.layout(turned, 4, config.block_n)
    return {
        "q_desc": map_q("q", buffers["q"], CONSUMER_ROWS, q_dim),
        "k_desc": map_k("k", buffers["k"], config.block_n, q_dim),
        "v_desc": TensorMap("turned_v", turned.dtype, turned.shape, turned.strides, box, layout),
        "out_desc": map_q("out", buffers["out"], CONSUMER_ROWS, v_dim),
    }


def _add_turning(call: Call, problem: AttentionProblem, config: TileConfig) -> None:
    """What warps of the attention kernel need to turn V."""
    turns = _turns_itself(problem, config)
    call.constants["TURNS"] = turns
    names = ("raw_v_desc", "turned_v", "turn_counts", "heads_k", "dim_v", "padded_k", "pieces")
    if not turns:
        call.constants |= dict.fromkeys(names)
        return
    padded = call.buffers["turned_v"].shape[-1]
    blocks = padded // TURN_KEYS * (tile_dim(problem.head_dim_v) // TURN_DIMS)
    call.arguments |= {
        "raw_v_desc": maps.dense_map("v", call.buffers["v"], TURN_KEYS, TURN_DIMS),
        "turned_v": Pointer("turned_v", "uint8"),
        "turn_counts": Pointer("turn_counts", "int32"),
        "padded_k": Scalar(padded, divisor=TURN_KEYS),
    }
    call.ints(
        heads_k=problem.heads_k,
        dim_v=problem.head_dim_v,
        pieces=problem.batch * problem.heads_k * blocks,
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
        "Q_SLOTS": config.get("q_slots", config.block_m // CONSUMER_ROWS),
        "STAGES": config.num_stages,
        "FLUSH": FLUSH_KEYS // config.block_n,
        "CONSUMER_REGS": config.get("consumer_regs"),
        "PRODUCER_REGS": config.get("producer_regs"),
        "LATE": config.get("late", False),
        "LOOKS_LAST": config.get("looks_last", False),
        "HEARS_AHEAD": config.get("hears_ahead", False),
        "SUMS_IN_REGS": config.get("sums_in_regs", False),
        "ORDERED": config.get("ordered", False),
        "IS_RIGHT": problem.mask.right >= 0,
        "IS_LEFT": problem.mask.left >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
    }
