"""Programs of the Hopper fp8 forward: V is turned into scratch, then attention runs over it."""

import math
from collections.abc import Mapping

from heedful.core.configs import TileConfig
from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.launch.spec import (
    BufferSpec,
    KernelCall,
    KernelRef,
    Pointer,
    Program,
    Scalar,
    TensorMap,
    Workspace,
    item_bytes,
)

Buffers = Mapping[str, BufferSpec]

CONSUMER_ROWS = 64
# Stands for "farther than any sequence reaches"; sums of three stay within 32 bits.
FAR = 1 << 29
# Head dims that a shared-memory tile can have; in between, tensor maps fill with zeros.
TILE_DIMS = (64, 128, 256)
# Keys of one block of the turning kernel; packed sequences begin at multiples of it.
TURN_KEYS = 128
# Keys whose products add up in the matrix unit's accumulators before float32 takes over: an output
# all of one sign loses 1 % in 1024 (H200, 2026-11-20), and as much of that in fewer.
FLUSH_KEYS = 512
# Heads that the programs work on side by side: their K and V stay in L2, and where a mask makes
# tiles uneven, the last of them are short. Of 1, 2, 4 and 8, 2 was fastest (H200, 2026-11-20).
HEADS_AT_ONCE = 2


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    turned = _turned(problem)
    calls = (_turn(problem, buffers, turned), _attend(problem, plan, buffers, turned))
    return Program(calls, (Workspace("turned_v", turned),))


def _tile_dim(dim: int) -> int:
    return next(width for width in TILE_DIMS if dim <= width)


def _turned(problem: AttentionProblem) -> BufferSpec:
    """V with keys innermost: (B, G, E, positions); packed, (1, G, E, positions)."""
    if problem.total_k is None:
        batch, positions = problem.batch, -(-problem.seqlen_k // TURN_KEYS) * TURN_KEYS
    else:
        batch, positions = 1, (problem.total_k // TURN_KEYS + problem.batch) * TURN_KEYS
    shape = (batch, problem.heads_k, problem.head_dim_v, positions)
    return BufferSpec.contiguous(shape, problem.kv_dtype)


def _turn(problem: AttentionProblem, buffers: Buffers, turned: BufferSpec) -> KernelCall:
    v, packed = buffers["v"], "cu_seqlens_k" in buffers
    blocks = -(-problem.seqlen_k // TURN_KEYS)
    arguments = {
        "v_ptr": Pointer("v", "uint8"),
        "out_ptr": Pointer("turned_v", "uint8"),
        "heads_k": Scalar(problem.heads_k),
        "seqlen_k": Scalar(problem.seqlen_k),
        "blocks": Scalar(blocks),
        "dim_v": Scalar(problem.head_dim_v, divisor=16),
        "padded_k": Scalar(turned.shape[-1], divisor=TURN_KEYS),
        "stride_vb": Scalar(0 if packed else v.strides[0], "i64", 16),
        "stride_vn": Scalar(v.strides[-3], "i64", 16),
        "stride_vh": Scalar(v.strides[-2], "i64", 16),
    }
    constants: dict[str, object] = {"BLOCK_N": TURN_KEYS, "BLOCK_E": _tile_dim(problem.head_dim_v)}
    if packed:
        arguments["cu_k"] = Pointer("cu_seqlens_k", "int32", False)
    else:
        constants["cu_k"] = None
    grid = (blocks * problem.heads_k * problem.batch, 1, 1)
    ref = KernelRef("heedful.kernels.hopper.fp8_values", "turn_values")
    return KernelCall(ref, grid, arguments, constants, {"num_warps": 4})


def _attend(
    problem: AttentionProblem, plan: Plan, buffers: Buffers, turned: BufferSpec
) -> KernelCall:
    config = plan.configs["hopper.forward"]
    row_blocks = -(-problem.seqlen_q // config.block_m)
    tiles = row_blocks * problem.batch * problem.heads_q
    arguments, constants = _maps(problem, config, buffers, turned), {}
    pointers = {
        "q_descale": "q_descale",
        "k_descale": "k_descale",
        "v_descale": "v_descale",
        "lse_ptr": "lse",
        "sink_ptr": "sink",
        "cu_q": "cu_seqlens_q",
        "cu_k": "cu_seqlens_k",
    }
    for parameter, name in pointers.items():
        if name in buffers:
            arguments[parameter] = Pointer(name, buffers[name].dtype, False)
        else:
            constants[parameter] = None
    arguments |= _scales(problem)
    numbers = {
        "heads": problem.heads_q,
        "group": problem.group,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "total_q": problem.total_q or 0,
        "row_blocks": row_blocks,
        "tiles": tiles,
        "section": HEADS_AT_ONCE,
        **_descale_strides(buffers),
        **_mask(problem),
    }
    arguments |= {name: Scalar(value) for name, value in numbers.items()}
    constants |= _variant(problem, config)
    grid = min(tiles, plan.device.units) if _is_persistent(problem) else tiles
    ref = KernelRef("heedful.kernels.hopper.fp8", "forward", "gluon")
    return KernelCall(ref, (grid, 1, 1), arguments, constants, {"num_warps": 4})


def _maps(
    problem: AttentionProblem, config: TileConfig, buffers: Buffers, turned: BufferSpec
) -> dict:
    q_dim, v_dim = _tile_dim(problem.head_dim), _tile_dim(problem.head_dim_v)
    packed_q, packed_k = "cu_seqlens_q" in buffers, "cu_seqlens_k" in buffers
    box = (1, 1, v_dim, config.block_n)
    return {
        "q_desc": _map("q", buffers["q"], CONSUMER_ROWS, q_dim, packed_q),
        "k_desc": _map("k", buffers["k"], config.block_n, q_dim, packed_k),
        "v_desc": TensorMap(
            "turned_v", turned.dtype, turned.shape, turned.strides, box, _layout(1, 4, box[-1])
        ),
        "out_desc": _map("out", buffers["out"], CONSUMER_ROWS, v_dim, packed_q),
    }


def _layout(item: int, rank: int, width: int) -> str:
    """The layout of a TMA box `width` elements of `item` bytes wide."""
    return (
        f"NVMMASharedLayout(swizzle_byte_width={min(128, width * item)},"
        f" element_bitwidth={8 * item}, rank={rank},"
        " transposed=False, fp4_padded=False, cga_layout=[])"
    )


def _map(name: str, spec: BufferSpec, rows: int, dim: int, packed: bool) -> TensorMap:
    """(B, S, H, D) as (B, H, S, D); packed (T, H, D) as launch/args/hopper.py explains."""
    item = item_bytes(spec.dtype)
    if packed:
        tokens, heads = _stride(spec, 0), _stride(spec, 1)
        far = 0x7FFF0000
        shape = (far, far, spec.shape[1], 1 << 30, spec.shape[2])
        strides = ((1 << 34) - tokens, tokens, heads, tokens, 1)
        return TensorMap(
            name, spec.dtype, shape, strides, (1, 1, 1, rows, dim), _layout(item, 5, dim)
        )
    order = (0, 2, 1, 3)
    shape = tuple(spec.shape[axis] for axis in order)
    strides = tuple(_stride(spec, axis) for axis in order)
    return TensorMap(name, spec.dtype, shape, strides, (1, 1, rows, dim), _layout(item, 4, dim))


def _stride(spec: BufferSpec, axis: int) -> int:
    """A stride in elements; that of a dim of one element may be anything, TMA wants 16 bytes."""
    return spec.strides[axis] if spec.shape[axis] > 1 or axis == len(spec.shape) - 1 else 16


def _scales(problem: AttentionProblem) -> dict[str, Scalar]:
    """Raw scores times scale_log2 are logits in base 2; under softcap the kernel takes
    tanh(s scale / softcap) first, through 2^(s softcap_scale)."""
    log2e = math.log2(math.e)
    scale, softcap_scale = problem.scale * log2e, 0.0
    if problem.softcap > 0:
        softcap_scale = 2.0 * log2e * problem.scale / problem.softcap
        scale = problem.softcap * log2e
    return {"scale_log2": Scalar(scale, "fp32"), "softcap_scale": Scalar(softcap_scale, "fp32")}


def _descale_strides(buffers: Buffers) -> dict[str, int]:
    strides = {}
    for name in "qkv":
        spec = buffers.get(f"{name}_descale")
        batch, head = spec.strides if spec is not None else (0, 0)
        strides |= {f"stride_{name}db": batch, f"stride_{name}dh": head}
    return strides


def _mask(problem: AttentionProblem) -> dict[str, int]:
    mask = problem.mask
    return {
        "left": min(mask.left, FAR) if mask.left >= 0 else FAR,
        "right": min(mask.right, FAR) if mask.right >= 0 else FAR,
        "shift": max(-FAR, min(mask.shift, FAR)),
        "align": int(mask.bottom_right),
    }


def _is_persistent(problem: AttentionProblem) -> bool:
    """Whether programs walk over tiles by themselves; tiles of unequal length are better dealt out
    by the hardware, one by one."""
    if problem.varlen_q or problem.varlen_k:
        return False
    mask = problem.mask
    is_even = not mask.bounded or (mask.left >= 0 and mask.right >= 0)
    return is_even or problem.seqlen_k <= 2048


def _variant(problem: AttentionProblem, config: TileConfig) -> dict[str, object]:
    return {
        "BLOCK_N": config.block_n,
        "CONSUMERS": config.block_m // CONSUMER_ROWS,
        "K_STAGES": config.num_stages,
        "V_STAGES": config.get("v_stages", config.num_stages),
        "FLUSH": FLUSH_KEYS // config.block_n,
        "CONSUMER_REGS": config.get("consumer_regs"),
        "PRODUCER_REGS": config.get("producer_regs"),
        "LATE": config.get("late", False),
        "SUMS_IN_REGS": config.get("sums_in_regs", False),
        "ORDERED": config.get("ordered", False),
        "IS_RIGHT": problem.mask.right >= 0,
        "IS_LEFT": problem.mask.left >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
    }
