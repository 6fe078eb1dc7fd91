"""The Hopper fp8 forward compiled for sm_90 without a GPU."""

from dataclasses import replace

import pytest

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.inspector.nvidia import inspect_cubin
from heedful.launch import compiler
from heedful.launch.program import buffers, programs
from support.hopper.loops import bare_loop, each_loop

DEVICE = by_name("H200")


def calls(head_dim: int = 128, sizes=(2, 300, 333, 8, 4), **facts):
    """The launches of a problem with descales: V's transpose, unless the attention does it itself,
    then the attention."""
    facts = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "return_lse": True, **facts}
    problem = AttentionProblem.dense(*sizes, head_dim=head_dim, **facts)
    arrays = buffers.forward(problem)
    for name in "qkv":
        shape = (problem.batch, problem.heads_k)
        arrays[f"{name}_descale"] = ArraySpec.contiguous(shape, "float32")
    chosen = plan(problem, DEVICE, backend="hopper")
    return programs.program(chosen, "forward", arrays).calls


SHORT, LONG = (2, 300, 333, 8, 4), (2, 4096, 4096, 16, 16)


# D256 never transposes V itself.
@pytest.mark.parametrize(
    "sizes, head_dim",
    [
        pytest.param(SHORT, 64, id="transposed-ahead-64", marks=pytest.mark.slow),
        pytest.param(LONG, 128, id="transposed-inside-128", marks=pytest.mark.slow),
        pytest.param(LONG, 256, id="transposed-ahead-256", marks=pytest.mark.slow),
        pytest.param(LONG, 64, id="transposed-inside-64"),
        pytest.param(SHORT, 128, id="transposed-ahead-128", marks=pytest.mark.slow),
    ],
)
def test_unmasked_kernels_do_not_spill(head_dim, sizes):
    *_, call = calls(head_dim, sizes, return_lse=False)
    made = compiler.artifact(call, DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    assert inspect_cubin(made.code).stack_bytes == 0


def test_the_attention_kernel_transposes_v_where_that_is_hidden():
    """Not of packed sequences, for few queries, or at D256, whose shared memory is full."""

    def transposes_itself(head_dim=128, sizes=LONG, **facts):
        problem = AttentionProblem.dense(
            *sizes, head_dim=head_dim, dtype="float8_e4m3fn", out_dtype="bfloat16", **facts
        )
        program = programs.program(plan(problem, DEVICE, backend="hopper"), "forward")
        names = [call.kernel.function for call in program.calls]
        zeroed = [w.name for w in program.workspaces if w.zeroed]
        assert ("v_t_counts" in zeroed) == ("transpose_v" not in names)
        return "transpose_v" not in names

    assert transposes_itself() and transposes_itself(64) and transposes_itself(causal=True)
    assert transposes_itself(sizes=(2, 256, 4096, 16, 4))
    assert not transposes_itself(256) and not transposes_itself(total_q=4000, total_k=4000)
    assert not transposes_itself(sizes=(2, 512, 4096, 16, 16))


@each_loop
def test_what_few_steps_need_is_outside_of_the_loop_that_counts(head_dim, mask, lse):
    """Promotions, masks, and what an overflow takes: jumped over or predicated they would cost
    every step. What remains is an FFMA, an exponential and an addition for each of a thread's 64
    scores, and two branches: the wait for a stage, and the loop's own."""
    *_, call = calls(head_dim, LONG, mask=mask, return_lse=lse)
    loop = bare_loop(call, DEVICE)
    assert loop.wgmma == (head_dim + 128) // 32
    assert (loop.mufu, loop.floats, loop.counts["BRA"]) == (64, 128, 2)


def test_a_new_length_batch_or_head_count_is_the_same_variant():
    first, second = calls(), calls(sizes=(3, 77, 1001, 16, 2))
    assert [call.specialization for call in first] == [call.specialization for call in second]


def test_packed_and_dense_sequences_are_transposed_to_whole_blocks():
    """Dense: a multiple of 128 positions; packed: room for each sequence to begin at one."""
    problem = AttentionProblem.dense(3, 300, 333, 8, 4, dtype="float8_e4m3fn", out_dtype="float32")
    packed = replace(problem, total_q=500, total_k=700)
    found = []
    for p in (problem, packed):
        scratch = programs.program(plan(p, DEVICE, backend="hopper"), "forward").workspaces
        found += [w.buffer.shape for w in scratch if w.name == "v_t"]
    assert found == [(3, 4, 128, 384), (1, 4, 128, (700 // 128 + 3) * 128)]


def test_a_transpose_kernel_begins_the_tile_counter():
    """So that no launch of its own clears it. Without such a kernel the allocator does."""

    def found(*sizes, head_dim=128, **facts):
        problem = AttentionProblem.dense(
            *sizes,
            heads_q=16,
            head_dim=head_dim,
            dtype="float8_e4m3fn",
            out_dtype="bfloat16",
            **facts,
        )
        program = programs.program(plan(problem, DEVICE, backend="hopper"), "forward")
        takers = [c.kernel.function for c in program.calls if "tile_counter" in c.reads | c.writes]
        is_zeroed = any(w.name == "tile_counter" and w.zeroed for w in program.workspaces)
        assert program.calls[-1].grid[0] == DEVICE.units
        return takers, is_zeroed

    long, short, packed = (2, 4096, 4096), (2, 2048, 2048), {"total_q": 4000, "total_k": 4000}
    few = (16, 512, 4096)
    assert found(*long, **packed) == (["schedule_varlen_tiles", "transpose_v", "forward"], False)
    assert found(*few, causal=True) == (["transpose_v", "forward"], False)
    assert found(*long, causal=True) == (["forward"], True)
    assert found(*long, head_dim=64, causal=True) == (["forward"], True)
    assert found(*short, causal=True) == (["forward"], True)
    assert found(*long) == ([], False)


def test_what_the_fp8_kernel_lacks_is_said_in_full():
    problem = AttentionProblem.dense(
        2, 300, 300, 8, 4, 72, dtype="float8_e4m3fn", out_dtype="bfloat16", alibi=True
    )
    with pytest.raises(ValueError, match=r"takes multiples of 16.*does not take ALiBi"):
        plan(problem, DEVICE, backend="hopper")
