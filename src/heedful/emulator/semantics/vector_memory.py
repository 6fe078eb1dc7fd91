"""Global, buffer, flat and scratch memory: loads, stores, loads straight to LDS (DMA), atomics;
scalar loads.
"""

import re

import numpy as np

from heedful.emulator.floats import I64, U32, U64
from heedful.emulator.machine.outstanding import Entry
from heedful.emulator.program.asm import M0, Instruction
from heedful.emulator.semantics.small import (
    ATOMICS,
    WIDTH,
    read_register,
    width_of,
    write_register,
)
from heedful.emulator.semantics.table import Context, Run, Unsupported, semantics

_LANE = np.arange(64, dtype=I64)
_LOADS = [k for k in WIDTH if k not in ("byte", "short")]
_LOADS += ["short_d16", "short_d16_hi", "ubyte_d16", "ubyte_d16_hi", "sbyte_d16", "sbyte_d16_hi"]
_STORES = ["byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4", "byte_d16_hi", "short_d16_hi"]


def _flat_address(instruction: Instruction, ctx: Context, position: int, base: int):
    """Address of a global or flat access: 64 bits per lane, or a scalar base plus 32 bits."""
    operands = instruction.operands
    offset = U64(instruction.mods.get("offset", 0) & 0xFFFFFFFFFFFFFFFF)
    lane = operands[position].slot
    scalar = operands[base] if len(operands) > base and operands[base].kind == "reg" else None
    if scalar is not None:
        slot = scalar.slot
        return lambda g: (g.s64[slot][..., None] + g.u[lane] + offset, g.where)
    return lambda g: (
        (g.u[lane + 1].astype(U64) << U64(32)) + g.u[lane] + offset,
        g.where,
    )


def _buffer_address(instruction: Instruction, ctx: Context, position: int, nbytes: int):
    """Address of a buffer access; lanes beyond the descriptor's size are inactive (they read 0)."""
    if "addr64" in instruction.mods:
        raise Unsupported(instruction, "64-bit buffer addressing")
    lane, resource, scalar = instruction.operands[position : position + 3]
    immediate = instruction.mods.get("offset", 0)
    by_lane, soffset = "offen" in instruction.mods, ctx.slot(scalar)
    r = resource.slot
    if "idxen" in instruction.mods:
        return _record_address(instruction, lane.slot, r, lambda g: _fixed(g, soffset, immediate))

    def address(g):
        fixed = _fixed(g, soffset, immediate)
        offset = fixed + g.u[lane.slot] if by_lane else np.broadcast_to(fixed, g.shape)
        return _within(g, r, offset, offset + nbytes <= g.s[r + 2][..., None])

    return address


def _fixed(g, soffset: int, immediate: int):
    """The part of a buffer's offset that all lanes share."""
    return np.asarray(g.s[soffset]).astype(I64)[..., None] + immediate


def _within(g, resource: int, offset, inside):
    """Addresses in a buffer, and the lanes whose accesses lie inside of it."""
    base = (g.s64[resource] & U64(0xFFFF_FFFF_FFFF))[..., None]
    active = g.where if inside.all() else np.broadcast_to(inside & g.mask, g.shape)
    return base + offset.view(U64), active


def _record_address(instruction: Instruction, index: int, r: int, fixed):
    """Address by record: the descriptor's stride times a lane's index, and its size in records.
    With `offen` the register behind the index holds the offset in the record."""
    by_lane = "offen" in instruction.mods

    def address(g):
        stride, flags = g.s[r + 1] >> U32(16), g.s[r + 3]
        if (stride >> U32(15)).any() or (flags >> U32(23) & U32(1)).any():
            raise Unsupported(instruction, "swizzled records, or records of threads")
        record = g.u[index].astype(I64)
        offset = fixed(g) + record * (stride & U32(0x3FFF)).astype(I64)[..., None]
        if by_lane:
            offset = offset + g.u[index + 1]
        return _within(g, r, offset, record < g.s[r + 2][..., None])

    return address


def _address(instruction: Instruction, ctx: Context, position: int, base: int, nbytes: int):
    """The address function of any space but scratch; `base` is where a scalar base would be."""
    if instruction.base.startswith("buffer"):
        return _buffer_address(instruction, ctx, position, nbytes)
    return _flat_address(instruction, ctx, position, base)


def _issue(instruction: Instruction):
    """Flat accesses count on both counters, since they may go to LDS."""
    flat = instruction.base.startswith("flat")

    def issue(g, effects=()):
        g.issue_vm(instruction, effects)
        if flat:  # the same registers, so that neither counter alone completes it
            g.out.issue(g.out.lds, Entry(instruction, g.machine.code.loads[instruction.pc]))

    return issue


@semantics(*(f"{space}_load_{kind}" for space in ("global", "buffer", "flat") for kind in _LOADS))
def _load(instruction: Instruction, ctx: Context) -> Run:
    """Memory to registers, or with `lds` to LDS."""
    if "lds" in instruction.mods:
        return _load_to_lds(instruction, ctx)
    nbytes, signed, half = width_of(instruction.base.split("_load_")[1])
    address, issue = _address(instruction, ctx, 1, 2, nbytes), _issue(instruction)
    target = instruction.operands[0].slot

    def run(g):
        where, active = address(g)
        data, effects = g.machine.memory.load(g, instruction, where, nbytes, active)
        write_register(g, target, data, nbytes, signed, half)
        issue(g, effects)

    return run


@semantics(*(f"global_load_lds_{kind}" for kind in _LOADS if "d16" not in kind))
def _load_to_lds(instruction: Instruction, ctx: Context) -> Run:
    """DMA: lane l's data lands at m0 + offset + l * width when the wave has waited for it."""
    nbytes, signed, _ = width_of(instruction.base.replace("_lds", "").split("_load_")[1])
    if nbytes > 4 and ctx.arch == "gfx942":
        raise Unsupported(instruction, "gfx942 moves at most 4 bytes per lane to LDS")
    address, stride = _address(instruction, ctx, 0, 1, nbytes), max(nbytes, 4)
    offset = instruction.mods.get("offset", 0)

    def run(g):
        where, active = address(g)
        data, effects = g.machine.memory.load(g, instruction, where, nbytes, active)
        place = g.s[M0].astype(I64)[..., None] + (offset + stride * _LANE)
        effects += g.machine.lds.start_dma(g, instruction, place, stride, data)
        g.issue_vm(instruction, effects)

    return run


@semantics(*(f"{space}_store_{kind}" for space in ("global", "buffer", "flat") for kind in _STORES))
def _store(instruction: Instruction, ctx: Context) -> Run:
    """Registers to memory."""
    buffer = instruction.base.startswith("buffer")
    nbytes, _, half = width_of(instruction.base.split("_store_")[1])
    address = _address(instruction, ctx, 1 if buffer else 0, 2, nbytes)
    issue, source = _issue(instruction), instruction.operands[0 if buffer else 1].slot

    def run(g):
        where, active = address(g)
        data = read_register(g, source, nbytes, half)
        issue(g, g.machine.memory.store(g, instruction, where, nbytes, active, data))

    return run


@semantics(
    *(f"{space}_atomic_{name}" for space in ("global", "buffer", "flat") for name in ATOMICS)
)
def _atomic(instruction: Instruction, ctx: Context) -> Run:
    """Read-modify-write in memory, lane after lane; with sc0 the old value comes back."""
    operation, per_word, count = ATOMICS[instruction.base.split("_atomic_")[1]]
    buffer, nbytes = instruction.base.startswith("buffer"), 4 * count
    returns = "sc0" in instruction.mods or "glc" in instruction.mods
    first = 1 if returns and not buffer else 0
    position, source = (1, 0) if buffer else (first, first + 1)
    address = _address(instruction, ctx, position, first + 2, nbytes)
    slot, target = instruction.operands[source].slot, instruction.operands[0].slot
    issue = _issue(instruction)

    def run(g):
        where, active = address(g)
        data = read_register(g, slot, nbytes * per_word)
        old = g.machine.memory.update(g, instruction, where, nbytes, active, operation, data)
        if returns:
            write_register(g, target, old, nbytes, False, "")
        issue(g)

    return run


_SCRATCH = [k for k in _LOADS + _STORES if k.startswith("dword")]


@semantics(*{f"scratch_{way}_{kind}" for way in ("load", "store") for kind in _SCRATCH})
def _scratch(instruction: Instruction, ctx: Context) -> Run:
    """Private memory of each lane; the address is an offset, per wave, per lane or fixed."""
    storing = "_store_" in instruction.base
    count = width_of(instruction.base.rsplit("_", 1)[1])[0] // 4
    operands = instruction.operands
    value, lane, scalar = (operands[1], operands[0], operands[2]) if storing else operands[:3]
    fixed = instruction.mods.get("offset", 0)

    def run(g):
        offset = np.full((1, 1, 1), fixed, I64)
        if lane.kind == "reg":
            offset = offset + g.u[lane.slot]
        if scalar.kind == "reg":
            offset = offset + g.s[scalar.slot][..., None].astype(I64)
        scratch, rows = g.machine.scratch, None
        rows = scratch.rows(g, instruction, offset, count)
        groups, waves = (np.arange(s.start, s.stop) for s in g.rect.index)
        index = (groups[:, None, None], waves[:, None], np.arange(64))
        for i in range(count):
            register = g.u[value.slot + i]
            if storing:
                old = scratch.words[(rows + i, *index)]
                scratch.words[(rows + i, *index)] = np.where(g.mask, register, old)
            else:
                np.copyto(register, scratch.words[(rows + i, *index)], where=g.where)
        g.issue_vm(instruction)

    return run


_SCALAR = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


def _scalar_address(instruction: Instruction, ctx: Context):
    """Address (groups, waves, 1) of a scalar access; the low two bits are ignored."""
    base, offset = instruction.operands[1:3]
    fixed = instruction.mods.get("offset", 0)
    by_register = offset.kind == "reg"
    constant = 0 if by_register else offset.bits(32)
    constant = constant - (1 << 32) if constant >> 31 else constant

    def address(g):
        offset_bytes = g.s[offset.slot].astype(I64) if by_register else constant
        extra = np.asarray(offset_bytes + fixed, I64).view(U64)
        return ((g.s64[base.slot] + extra) & U64(0xFFFFFFFFFFFFFFFC))[..., None]

    return address


@semantics(*(f"s_load_{kind}" for kind in _SCALAR))
def _scalar_load(instruction: Instruction, ctx: Context) -> Run:
    """Memory to scalar registers."""
    count = _SCALAR[re.sub(r"s_load_", "", instruction.mnemonic)]
    target, address = instruction.operands[0], _scalar_address(instruction, ctx)

    def run(g):
        data = g.machine.memory.load_scalar(g, instruction, address(g), 4 * count)
        for i in range(count):
            g.s[target.slot + i][...] = data[..., i]
        g.issue_smem(instruction)

    return run


def _in_one_lane(g, address, slot: int, count: int):
    """A wave's scalar access as one of its first lane: address, active lanes, data."""
    data = np.stack([g.s[slot + i] for i in range(count)], -1)[:, :, None]
    shape = (*g.shape, count)
    return np.broadcast_to(address(g), g.shape), _LANE == 0, np.broadcast_to(data, shape)


@semantics(*(f"s_store_{kind}" for kind in ("dword", "dwordx2", "dwordx4")))
def _scalar_store(instruction: Instruction, ctx: Context) -> Run:
    """Scalar registers to memory."""
    count = _SCALAR[instruction.mnemonic.removeprefix("s_store_")]
    source, address = instruction.operands[0].slot, _scalar_address(instruction, ctx)

    def run(g):
        where, active, data = _in_one_lane(g, address, source, count)
        active = np.broadcast_to(active, g.shape)
        g.machine.memory.store(g, instruction, where, 4 * count, active, data)
        g.issue_smem(instruction)

    return run


_SCALAR_ATOMICS = [n for n in ATOMICS if not re.search(r"f16|bf16|f32|f64", n)]


@semantics(*(f"s_atomic_{name}" for name in _SCALAR_ATOMICS))
def _scalar_atomic(instruction: Instruction, ctx: Context) -> Run:
    """Read-modify-write in memory, once a wave; with glc the old value comes back."""
    operation, per_word, count = ATOMICS[instruction.base.removeprefix("s_atomic_")]
    slot, address = instruction.operands[0].slot, _scalar_address(instruction, ctx)

    def run(g):
        where, active, data = _in_one_lane(g, address, slot, count * per_word)
        active = np.broadcast_to(active, g.shape)
        memory = g.machine.memory
        old = memory.update(g, instruction, where, 4 * count, active, operation, data)
        if "glc" in instruction.mods:
            for i in range(count):
                g.s[slot + i][...] = old[:, :, 0, i]
        g.issue_smem(instruction)

    return run
