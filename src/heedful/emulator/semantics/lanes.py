"""Traffic between lanes, and between vector and scalar registers."""

import numpy as np

from heedful.emulator.floats import U32
from heedful.emulator.program.asm import Instruction
from heedful.emulator.semantics.table import Context, Run, semantics

_LANE = np.arange(64)


@semantics("v_readfirstlane_b32")
def _readfirstlane(instruction: Instruction, ctx: Context) -> Run:
    """The value in the first enabled lane (lane 0 if there is none)."""
    target, value = instruction.operands[0].slot, ctx.slot(instruction.operands[1])

    def run(g):
        register = np.broadcast_to(g.u[value], g.shape)
        if g.full:
            g.s[target][...] = register[..., 0]
        else:
            first = g.mask.argmax(axis=-1)[..., None]
            g.s[target][...] = np.take_along_axis(register, first, axis=-1)[..., 0]

    return run


@semantics("v_readlane_b32")
def _readlane(instruction: Instruction, ctx: Context) -> Run:
    """The value in one lane, enabled or not."""
    target, value, lane = (ctx.slot(op) for op in instruction.operands)

    def run(g):
        at = np.broadcast_to(g.s[lane] & U32(63), g.shape[:2])[..., None]
        register = np.broadcast_to(g.u[value], g.shape)
        g.s[target][...] = np.take_along_axis(register, at.astype(np.intp), axis=-1)[..., 0]

    return run


@semantics("v_writelane_b32")
def _writelane(instruction: Instruction, ctx: Context) -> Run:
    """Replace one lane, enabled or not."""
    target, value, lane = (ctx.slot(op) for op in instruction.operands)

    def run(g):
        at = np.broadcast_to(g.s[lane] & U32(63), g.shape[:2])[..., None].astype(np.intp)
        values = np.broadcast_to(g.s[value], g.shape[:2])[..., None]
        np.put_along_axis(g.u[target], at, values, axis=-1)

    return run


@semantics("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _permlane_swap(instruction: Instruction, ctx: Context) -> Run:
    """Exchange the odd rows of the first register with the even rows of the second."""
    width = 32 if "32_swap" in instruction.base else 16
    a, b = (op.slot for op in instruction.operands[:2])
    odd = (_LANE // width) % 2 == 1

    def run(g):
        first, second = g.u[a], g.u[b]
        upper, lower = first[..., odd].copy(), second[..., ~odd].copy()
        if g.full:
            first[..., odd], second[..., ~odd] = lower, upper
        else:
            first[..., odd] = np.where(g.mask[..., odd], lower, upper)
            second[..., ~odd] = np.where(g.mask[..., ~odd], upper, lower)

    return run


@semantics("v_swap_b32")
def _swap(instruction: Instruction, ctx: Context) -> Run:
    """Exchange two registers."""
    a, b = (op.slot for op in instruction.operands)

    def run(g):
        first, second = g.u[a].copy(), g.u[b].copy()
        np.copyto(g.u[a], second, where=g.where)
        np.copyto(g.u[b], first, where=g.where)

    return run


@semantics("ds_bpermute_b32", "ds_permute_b32")
def _permute(instruction: Instruction, ctx: Context) -> Run:
    """Pull from (bpermute) or push to (permute) the lane whose number times four is given."""
    target, address, value = (op.slot for op in instruction.operands)
    offset = U32(instruction.mods.get("offset", 0))
    pull = "bpermute" in instruction.base

    def run(g):
        lane = (((g.u[address] + offset) >> U32(2)) & U32(63)).astype(np.intp)
        if pull:
            alive = np.where(g.mask, g.u[value], U32(0))
            result = np.take_along_axis(alive, lane, axis=-1)
        else:
            result = np.zeros(g.shape, U32)
            groups, waves, lanes = np.nonzero(g.mask)
            result[groups, waves, lane[g.mask]] = g.u[value][groups, waves, lanes]
        np.copyto(g.u[target], result, where=g.where)
        g.issue_lds(instruction)

    return run


def swizzle_pattern(offset: int):
    """Source lane of each lane for ds_swizzle_b32's two encodings."""
    if offset & 0x8000:
        return (_LANE & ~3) | np.array([offset >> 2 * i & 3 for i in range(4)])[_LANE & 3]
    keep, force, flip = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    return (_LANE & 32) | ((((_LANE & 31) & keep) | force) ^ flip)


@semantics("ds_swizzle_b32")
def _swizzle(instruction: Instruction, ctx: Context) -> Run:
    """A fixed exchange inside 32 lanes."""
    target, value = (op.slot for op in instruction.operands[:2])
    pattern = swizzle_pattern(_swizzle_code(instruction.mods.get("offset", 0)))

    def run(g):
        alive = np.where(g.mask, g.u[value], U32(0))
        np.copyto(g.u[target], alive[..., pattern], where=g.where)
        g.issue_lds(instruction)

    return run


def _swizzle_code(offset) -> int:
    """The immediate of ds_swizzle, from a number or from the assembler's macro."""
    if isinstance(offset, int):
        return offset
    name, _, rest = offset.partition("(")
    values = [v.strip().strip('"') for v in rest.rstrip(")").split(",")]
    if "QUAD_PERM" in offset:
        lanes = [int(v) for v in values[1:]]
        return 0x8000 | sum(lane << 2 * i for i, lane in enumerate(lanes))
    if "BITMASK_PERM" in offset:
        masks = {"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}
        code = 0
        for i, char in enumerate(reversed(values[1])):
            for field, bit in enumerate(masks[char]):
                code |= bit << (5 * field + i)
        return code
    if "SWAP" in offset:
        return int(values[1]) << 10 | 31
    if "REVERSE" in offset:
        return (int(values[1]) - 1) << 10 | 31
    if "BROADCAST" in offset:
        return int(values[2]) << 5 | (32 - int(values[1]))
    raise ValueError(f"unknown swizzle {offset!r} ({name})")
