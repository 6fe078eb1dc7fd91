"""Device code of the micro-kernels: see validation/micro.py."""

# pyright: reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def timed(out, iterations, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, LANES: tl.constexpr):
    """Runs assembly that counts the clocks and the 100 MHz ticks of `iterations` rounds, and writes
    both for every lane.

    out: (programs, LANES, 2) int32. ASM: its $0 and $1 are the counts, $2 the iterations, $3 the
    lane.
    """
    lane = tl.arange(0, LANES)
    rounds = tl.full((LANES,), iterations, tl.int32)
    inputs = [rounds, lane]
    clocks, ticks = tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, inputs, (tl.int32, tl.int32), is_pure=False, pack=1
    )
    results = out + (tl.program_id(0) * LANES + lane) * 2
    tl.store(results, clocks)
    tl.store(results + 1, ticks)


@triton.jit
def atomics(x, iterations, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Every program adds 1 to LANES neighbours at a time, each from a place of its own on, as many
    programs of a backward do with the gradient of the queries.

    x: (SIZE,) float32. SIZE: a power of two, a multiple of LANES.
    """
    lane = tl.arange(0, LANES)
    first = tl.program_id(0) * LANES * 61
    for i in range(iterations):
        start = (first + i * LANES) & (SIZE - 1)
        tl.atomic_add(x + start + lane, 1.0, sem="relaxed")
