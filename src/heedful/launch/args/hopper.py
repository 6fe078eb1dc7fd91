"""Programs of the Hopper kernels: tensor maps, argument order, grids.

Dense tensors are mapped as (batch, head, row, dim). Packed sequences need rows past the end of each
to read as zeros and never to be written, from one map for all: see `_packed_map`.
"""

import math
from collections.abc import Mapping

from heedful.core.configs import TileConfig
from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.launch.spec import BufferSpec, KernelCall, KernelRef, Pointer, Program, Scalar
from heedful.launch.spec import TensorMap as Map

Buffers = Mapping[str, BufferSpec]

CONSUMER_ROWS = 64
# Stands for "farther than any sequence reaches"; sums of three stay within 32 bits.
FAR = 1 << 29
# Head dims that a shared-memory tile can have; in between, tensor maps fill with zeros.
TILE_DIMS = (64, 128, 256)


def tile_dim(dim: int) -> int:
    """The width of the shared-memory tile that holds a head dim."""
    return next(width for width in TILE_DIMS if dim <= width)


def forward(problem: AttentionProblem, plan: Plan, buffers: Buffers) -> Program:
    """out, and lse if there is such a buffer."""
    config = plan.configs["hopper.forward"]
    packed_q, packed_k = "cu_seqlens_q" in buffers, "cu_seqlens_k" in buffers
    row_blocks = -(-problem.seqlen_q // config.block_m)
    tiles = row_blocks * problem.batch * problem.heads_q
    arguments, constants = {}, {}
    q_dim, v_dim = tile_dim(problem.head_dim), tile_dim(problem.head_dim_v)
    maps = {
        "q_desc": ("q", CONSUMER_ROWS, q_dim, packed_q),
        "k_desc": ("k", config.block_n, q_dim, packed_k),
        "v_desc": ("v", config.block_n, v_dim, packed_k),
        "out_desc": ("out", CONSUMER_ROWS, v_dim, packed_q),
    }
    for parameter, (name, rows, dim, packed) in maps.items():
        make = _packed_map if packed else _dense_map
        arguments[parameter] = make(name, buffers[name], rows, dim)
    pointers = {
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
    arguments |= {
        name: Scalar(value)
        for name, value in {
            "heads": problem.heads_q,
            "group": problem.group,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "total_q": problem.total_q or 0,
            "row_blocks": row_blocks,
            "tiles": tiles,
            "section": _section(problem),
            **_mask(problem),
        }.items()
    }
    constants |= _variant(problem, config)
    grid = min(tiles, plan.device.units) if _is_persistent(problem) else tiles
    ref = KernelRef("heedful.kernels.hopper.forward", "forward", "gluon")
    return Program((KernelCall(ref, (grid, 1, 1), arguments, constants, {"num_warps": 4}),))


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


def _packed_map(name: str, spec: BufferSpec, rows: int, dim: int) -> Map:
    """(T, H, D) seen as (2^30, end, H, row, D), so that every sequence ends where it ends.

    Row r of a sequence of n that ends at token e is row 2^30 - n + r of the fourth dimension: past
    2^30 the map is out of bounds. The first two coordinates, 2^30 and e, bring the address back:
    2^30 (2^34 - s) + e s + (2^30 - n + r) s = 2^64 + (e - n + r) s elements, and addresses wrap.
    The trick is that of Triton's `tools/ragged_tma.py`.
    """
    tokens, heads = _stride(spec, 0), _stride(spec, 1)
    far = 0x7FFF0000
    return Map(
        name,
        spec.dtype,
        (far, far, spec.shape[1], 1 << 30, spec.shape[2]),
        ((1 << 34) - tokens, tokens, heads, tokens, 1),
        (1, 1, 1, rows, dim),
        _layout(5),
    )


def _stride(spec: BufferSpec, axis: int) -> int:
    """A stride in elements; that of a dim of one element may be anything, TMA wants 16 bytes."""
    return spec.strides[axis] if spec.shape[axis] > 1 or axis == len(spec.shape) - 1 else 8


def _scales(problem: AttentionProblem) -> dict[str, Scalar]:
    """Raw scores times scale_log2 are logits in base 2; under softcap the kernel takes
    tanh(s scale / softcap) first, through 2^(s softcap_scale)."""
    log2e = math.log2(math.e)
    scale, softcap_scale = problem.scale * log2e, 0.0
    if problem.softcap > 0:
        softcap_scale = 2.0 * log2e * problem.scale / problem.softcap
        scale = problem.softcap * log2e
    return {"scale_log2": Scalar(scale, "fp32"), "softcap_scale": Scalar(softcap_scale, "fp32")}


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


def _is_persistent(problem: AttentionProblem) -> bool:
    """Whether programs walk over tiles by themselves: their next loads then overlap the end of a
    tile. Tiles of unequal length are better dealt out by the hardware, one by one."""
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
        "CONSUMER_REGS": config.get("consumer_regs"),
        "PRODUCER_REGS": config.get("producer_regs"),
        # Of another width, the output does not fit where the queries were.
        "OUT_IN_Q": config.get("out_in_q", False)
        and tile_dim(problem.head_dim) == tile_dim(problem.head_dim_v),
        "ORDERED": config.get("ordered", False),
        "LAZY": config.get("lazy", True),
        "FMA_EXP": config.get("fma_exp", 0),
        "IS_RIGHT": problem.mask.right >= 0,
        "IS_LEFT": problem.mask.left >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
    }
