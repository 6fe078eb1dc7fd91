"""Bits of a block mask in the Hopper forward: the assembly that hides scores by them, run as
Python, and what the compiled loops hold."""

import random
import re
import struct

import pytest

pytest.importorskip("triton.experimental.gluon")

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.inspector.nvidia import inspect_cubin
from heedful.kernels.hopper.sm90 import mask
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.program import programs
from support.hopper.loops import bare_loop
from support.problems.grids import slow_but

DEVICE = by_name("H200")


def kept(keys: int, words: list[int], lane: int, value: float) -> list[float]:
    """A lane's scores, 1.0 each, after the assembly. words: of a lane's two rows in turns."""
    found = {f"${keys // 2 + i}": 1.0 for i in range(keys // 2)}
    found |= {f"${keys + i}": word for i, word in enumerate(words)}
    found["%laneid"] = lane
    text = re.sub(r"\{|\}|\.reg[^;]*;", "", mask._by_bits(keys, value))
    for line in text.split(";"):
        if not line.strip():
            continue
        name, rest = line.strip().split(None, 1)
        target, *operands = (word.strip() for word in rest.split(","))
        given = [found[o] if o in found else constant(o) for o in operands]
        makes = {
            "mov.u32": lambda a: a,
            "and.b32": lambda a, b: a & b,
            "shl.b32": lambda a, b: a << b,
            "shr.b32": lambda a, b: (a & 0xFFFFFFFF) >> b,
            "setp.ne.s32": lambda a, b: a != b,
            "selp.f32": lambda a, b, p: a if p else b,
        }
        found[target] = makes[name](*given)
    return [found[f"${i}"] for i in range(keys // 2)]


def constant(text: str):
    if text.startswith("0f"):
        return struct.unpack(">f", bytes.fromhex(text[2:]))[0]
    return int(text)


@pytest.mark.parametrize("value", [float("-inf"), 0.0])
@pytest.mark.parametrize("keys", [64, 128])
def test_scores_are_kept_where_the_bits_of_their_row_show_the_key(keys, value):
    rng = random.Random(keys)
    rows = [rng.getrandbits(keys) for _ in range(16)]
    for lane in range(32):
        pair = rows[lane // 4], rows[lane // 4 + 8]
        words = [row >> at & 0xFFFFFFFF for at in range(0, keys, 32) for row in pair]
        got = kept(keys, words, lane, value)
        for i, score in enumerate(got):
            key = i // 4 * 8 + lane % 4 * 2 + i % 2
            assert score == (1.0 if pair[i // 2 % 2] >> key & 1 else value)


def compiled(head_dim: int, side: int, **facts):
    problem = AttentionProblem.dense(2, 4096, 4096, 8, 4, head_dim, block_mask=side, **facts)
    *_, call = programs.program(plan(problem, DEVICE, compiling(), "hopper"), "forward").calls
    return call


KINDS = [(128, 128, False), (128, 128, True), (128, 64, False), (64, 128, True), (64, 64, False)]


@pytest.mark.parametrize(
    "head_dim, side, causal",
    slow_but({(64, 64, False)}, KINDS),
)
def test_whole_tiles_of_a_list_run_the_loop_of_calls_without_a_mask(head_dim, side, causal):
    """In which consumers know no positions: an FFMA, an exponential and an addition for each of a
    thread's scores, and four branches."""
    call = compiled(head_dim, side, causal=causal, return_lse=True)
    assert call.constants["params.tile.BLOCK_N"] == side
    loop = bare_loop(call, DEVICE)
    assert (loop.mufu, loop.floats) == (side // 2, side)
    assert loop.counts["BRA"] <= 4


OTHERS = [
    (128, 64, {"causal": True, "softcap": 10.0}),
    (256, 128, {"return_lse": True}),
    (256, 64, {"causal": True}),
    (192, 128, {"num_splits": 2}),
    (64, 128, {"causal": True, "used_k": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, side, facts", OTHERS, ids=str)
def test_calls_with_lists_fit_an_sm_without_spills(head_dim, side, facts):
    made = compiler.artifact(compiled(head_dim, side, **facts), DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    found = inspect_cubin(made.code)
    assert found.stack_bytes == 0 and not found.whole.spills
