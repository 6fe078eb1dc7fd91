"""How the work of a Hopper forward is cut into tiles and scheduled on programs, and the arguments
that its kernels share."""

import math
from collections.abc import Mapping

from heedful.core.arrays import ArraySpec, item_bytes
from heedful.core.configs import TileConfig
from heedful.core.plan import Plan
from heedful.core.problem import ITEM_BITS, AttentionProblem
from heedful.launch.bind import hopper_maps as maps
from heedful.launch.bind.portable import heads_in_l2, pow2
from heedful.launch.spec import Argument, KernelCall, KernelRef, Pointer, Scalar, Workspace

Buffers = Mapping[str, ArraySpec]

# Stands for "farther than any sequence reaches"; sums of three stay within 32 bits.
FAR = 1 << 29
SCHEDULER_BLOCK = 1024  # sequences that a program of the varlen scheduler looks at at once
# Heads of a group under a mask; how often the tiles of the last one fill the device; of heads
# with fewer tiles all are as large (H200, 2026-11-22, docs/lab/hopper-forward.md).
L2_HEADS, L2_HEADS_FP8 = 4, 2
LAST_WAVES = 2
L2_GROUP_BLOCKS = 8


class Call:
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

    def strides_of(self, name: str, **axes: int) -> None:
        """64-bit strides of a small array, parameter = axis, where it is there."""
        spec = self.buffers.get(name)
        if spec is None:
            self.constants |= dict.fromkeys(axes)
        else:
            values = {parameter: spec.strides[axis] for parameter, axis in axes.items()}
            self.strides_if(True, **values)


def add_common(call: Call, problem: AttentionProblem, plan: Plan) -> None:
    """Adds what every call has: sizes, mask, scales, and how its work is scheduled."""
    config = plan.configs["hopper.forward"]
    pack = config.pack_gqa(problem)
    call.pointers(
        sink_ptr="sink",
        cu_q="cu_seqlens_q",
        cu_k="cu_seqlens_k",
        varlen_tiles="varlen_tiles",
        tile_counter="tile_counter",
    )
    call.floats(**_scales(problem))
    call.ints(
        heads=work_heads(problem, config),
        group=1 if pack > 1 else problem.group,
        seqlen_q=problem.seqlen_q,
        total_q=problem.total_q or problem.batch * problem.seqlen_q,
        row_blocks=-(-problem.seqlen_q * pack // config.block_m),
        tiles=tiles(problem, config),
        **l2_swizzle(problem, plan),
        **_mask(problem),
    )


def head_tiles(problem: AttentionProblem, config: TileConfig) -> int:
    """Tiles of queries of one head; of packed sequences, whose lengths only the device knows, as
    many as there can be."""
    if problem.total_q is not None:
        return problem.total_q // config.block_m + problem.batch
    return problem.batch * -(-problem.seqlen_q * config.pack_gqa(problem) // config.block_m)


def work_heads(problem: AttentionProblem, config: TileConfig) -> int:
    """Heads of one batch entry whose queries have tiles of their own."""
    return problem.heads_k if config.pack_gqa(problem) > 1 else problem.heads_q


def tiles(problem: AttentionProblem, config: TileConfig) -> int:
    """As `head_tiles`, of all heads."""
    return head_tiles(problem, config) * work_heads(problem, config)


def work_tiles(problem: AttentionProblem, plan: Plan) -> int:
    """Tiles times the splits of their keys."""
    return tiles(problem, plan.configs["hopper.forward"]) * plan.num_splits


def l2_swizzle(problem: AttentionProblem, plan: Plan) -> dict[str, int]:
    """Heads whose tiles are scheduled together, the longest first, and how many such groups come
    before the last, which takes the heads that remain.

    Unmasked, one after the other, so that K and V stay in L2. Masked, a few, and enough for the
    last group that its short tiles outlast its longest, as far as L2 has room; where heads have
    few tiles, as many in all groups. Of packed queries only the device knows the tiles, and the
    last sequences are short.
    """
    config = plan.configs["hopper.forward"]
    heads = work_heads(problem, config)
    if not problem.varlen_q:
        heads *= problem.batch
    if not problem.mask.bounded:
        return {"l2_heads": 1, "l2_groups": heads - 1}
    few = L2_HEADS_FP8 if ITEM_BITS[problem.dtype] == 8 else L2_HEADS
    if problem.varlen_q:
        return {"l2_heads": few, "l2_groups": (heads - 1) // few}
    blocks = tiles(problem, config) // heads
    last = -(-LAST_WAVES * plan.device.units // blocks)
    # Of many keys and few queries tiles are of about one length in any case.
    last = min(last, max(few, heads_in_l2(problem, plan)))
    width = few if blocks >= L2_GROUP_BLOCKS else last
    return {"l2_heads": width, "l2_groups": max(0, heads - last) // width}


def varlen_scheduler_call(
    problem: AttentionProblem, plan: Plan, buffers: Buffers, results: Mapping[str, str]
) -> KernelCall:
    """What comes ahead of the attention kernel for packed queries: their tiles put in order, and
    tokens of no sequence cleared in `results`, the buffers of "lse", perhaps one for each split of
    the keys, and of "out" or none."""
    config, call = plan.configs["hopper.forward"], Call(buffers)
    call.pointers(
        cu_q="cu_seqlens_q",
        cu_k="cu_seqlens_k",
        varlen_tiles="varlen_tiles",
        tile_counter="tile_counter",
    )
    call.pointers(lse=results["lse"])
    out = buffers[results["out"]] if "out" in results else None
    if out is None:
        call.constants |= dict.fromkeys(("out", "stride_om", "stride_oh"))
    else:
        call.arguments["out"] = Pointer(results["out"], out.dtype)
        # Maps want rows and heads that begin at multiples of 16 bytes.
        divisor = maps.STRIDE_BYTES // item_bytes(problem.out_dtype)
        row, head = (maps.stride(out, axis) for axis in (0, 1))
        call.strides_if(True, divisor, stride_om=row, stride_oh=head)
    total_q = buffers["q"].shape[0]
    call.ints(
        total_q=total_q,
        total_k=buffers["k"].shape[0],
        batch=problem.batch,
        # Those of every split lie one after the other.
        heads=problem.heads_q * (1 if out is not None else plan.num_splits),
        capacity=head_tiles(problem, config),
    )
    dim = problem.head_dim_v
    constants = call.constants | {"ROWS": config.block_m, "BLOCK": SCHEDULER_BLOCK}
    constants |= {"DIM": dim, "BLOCK_E": pow2(dim)}
    ref = KernelRef("heedful.kernels.hopper.varlen_scheduler", "schedule_varlen_tiles")
    grid = (problem.batch + plan.device.units, 1, 1)
    return KernelCall(ref, grid, {**call.arguments, **constants}, {"num_warps": 4})


def is_ragged(problem: AttentionProblem) -> bool:
    """Whether keys end where a sequence ends and not where its storage does."""
    return bool(problem.varlen_k or problem.used_k or problem.leftpad_k or problem.page_size)


def scheduler_kind(problem: AttentionProblem, plan: Plan) -> str:
    """The tile scheduler. "dynamic", by a program for each SM, where lengths differ, and of packed
    queries, whose tiles only the device can count; "static" where they hardly do; "single", a
    program for each tile, where the rest is not known to be faster."""
    if problem.varlen_q:
        return "dynamic"
    if problem.used_q or is_ragged(problem):
        return "single"
    is_one_wave = work_tiles(problem, plan) <= plan.device.units
    return "dynamic" if problem.mask.bounded and not is_one_wave else "static"


def scheduler_workspaces(problem: AttentionProblem, plan: Plan, zeroed: bool) -> list[Workspace]:
    """Scratch of the scheduler: the tile counter, which begins at 0, by the allocator if `zeroed`,
    and the tiles of packed queries, whose varlen scheduler begins the counter, too."""
    found: list[Workspace] = []
    if scheduler_kind(problem, plan) == "dynamic":
        one = ArraySpec.contiguous((1,), "int32")
        found.append(Workspace("tile_counter", one, zeroed=zeroed and not problem.varlen_q))
    if problem.varlen_q:
        entries = 1 + 2 * head_tiles(problem, plan.configs["hopper.forward"])
        found.append(Workspace("varlen_tiles", ArraySpec.contiguous((entries,), "int32")))
    return found


def grid(problem: AttentionProblem, plan: Plan) -> tuple[int, int, int]:
    """A program for each tile, or for each SM."""
    count = work_tiles(problem, plan)
    is_each = scheduler_kind(problem, plan) == "single"
    return (count if is_each else min(count, plan.device.units), 1, 1)


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
