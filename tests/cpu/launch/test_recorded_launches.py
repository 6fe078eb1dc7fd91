"""What the runner of GPUs hands to the driver: addresses, strides and numbers by name."""

import math

import pytest

pytest.importorskip("triton")

import torch

import heedful
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch.bind import decode, hopper_decode
from heedful.launch.program import buffers as canonical
from heedful.launch.program.programs import program
from heedful.launch.spec import Scalar
from support import launches
from support.runs import standin


def some(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(
    "batch, heads, num_splits, waits",
    [
        (1, 128, 0, True),
        (1, 16, 0, True),
        (8, 16, 0, False),
        (1, 128, 1, False),
        (1, 128, 4, False),
    ],
)
def test_programs_that_wait_for_each_other_are_launched_to_be_at_work_at_once(
    batch, heads, num_splits, waits
):
    q, k = some(batch, 1, heads, 576), some(batch, 300, 1, 576)
    lengths = torch.full((batch,), 300, dtype=torch.int32)
    with standin.gpu("H200") as gpu:
        heedful.flash_attn_with_kvcache(
            *(q, k, k[..., :512]), cache_seqlens=lengths, num_splits=num_splits, backend="mla"
        )
    (launch,) = gpu.launches
    assert launch.cooperative == waits == bool(launch.constants["params.tile.MERGE"] & 1)


def test_hopper_is_given_every_operand_in_its_place():
    q, k, v = some(2, 70, 4, 64), some(2, 90, 2, 64), some(2, 90, 2, 64)
    sink, slopes = torch.randn(4), torch.rand(4)
    out = torch.empty_like(q)
    with standin.gpu("H200") as gpu:
        heedful.flash_attn_func(
            *(q, k, v, 0.0, 0.3, True), sink=sink, alibi_slopes=slopes, out=out, backend="hopper"
        )
    launch = launches.the(gpu.launches, "forward")
    places = launches.places(launch)
    want = {"q": q, "k": k, "v": v, "out": out, "sink": sink, "alibi_slopes": slopes}
    assert {name: places[name].address for name in want} == {
        name: tensor.data_ptr() for name, tensor in want.items()
    }
    for name in ("q", "k", "v", "out"):
        batch, row, head, _ = want[name].stride()
        assert places[name].strides == {"b": batch, "h": head, "r": row}, name
    numbers = {"seqlen_q": 70, "seqlen_k": 90, "heads_q": 4, "heads_k": 2, "left": -1, "right": 0}
    assert {name: launches.number(launch, name) for name in numbers} == numbers
    assert math.isclose(launches.number(launch, "scale"), 0.3, rel_tol=1e-6)


def test_packed_steps_over_pages_are_one_launch_with_every_operand_in_its_place():
    q, k, v = some(6, 4, 64), some(7, 16, 2, 64), some(7, 16, 2, 64)
    bounds, used = torch.tensor([0, 1, 1, 4]).int(), torch.tensor([40, 0, 7]).int()
    table, sink, out = torch.arange(9).view(3, 3).int() % 7, torch.randn(4), torch.empty_like(q)
    with standin.gpu("H200") as gpu:
        heedful.flash_attn_varlen_func(
            *(q, k, v, bounds, None, 3, 48),
            causal=True,
            block_table=table,
            seqused_k=used,
            sink=sink,
            out=out,
        )
    (launch,) = gpu.launches
    assert launch.kernel.module == "heedful.kernels.hopper.decode.kernel"
    places = launches.places(launch)
    want = {"q": q, "k": k, "v": v, "out": out, "sink": sink, "cu_seqlens_q": bounds}
    want |= {"block_table": table, "seqused_k": used}
    assert {name: places[name].address for name in want} == {
        name: tensor.data_ptr() for name, tensor in want.items()
    }
    for name in ("q", "out"):
        row, head, _ = want[name].stride()
        assert places[name].strides.items() >= {"b": 0, "h": head, "m": row}.items()
    numbers = {"seqlen_q": 6, "seqlen_k": 48, "batch": 3, "heads_q": 4, "heads_k": 2}
    assert {name: launches.number(launch, name) for name in numbers} == numbers


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("device, backend", [("H200", "hopper_decode"), ("MI300X", "decode")])
def test_a_decode_is_told_how_many_rows_it_appends_to_each_sequence(device, backend, new):
    """Also where that is not how many sequences there are."""
    problem = AttentionProblem.dense(2, new, 512, 8, 2, 128, used_k=True)
    rows = ArraySpec.contiguous((2, new, 2, 128), "bfloat16")
    arrays = canonical.forward(problem)
    arrays |= {"k_new": rows, "v_new": rows, "cache_seqlens": arrays["seqused_k"]}
    binds = {"hopper_decode": hopper_decode, "decode": decode}
    (call,) = (
        binds[backend].step(plan(problem, by_name(device), backend=backend), arrays, False, 0).calls
    )
    assert call.arguments["params.seqs.new_k"] == Scalar(new)
    tile = call.constants.get("append.tile.BLOCK_N")
    assert tile is None or (tile == 1) == (new == 1)


@pytest.mark.parametrize(
    "facts, warps",
    [
        ({}, 4),
        ({"softcap": 3.0}, 8),
        ({"dropout_p": 0.1}, 8),
        ({"softcap": 3.0, "head_dim": 64}, 8),
        ({"softcap": 3.0, "head_dim": 96}, 4),
        ({"softcap": 3.0, "key_ranges": 1}, 4),
        ({"softcap": 3.0, "block_mask": 128}, 4),
    ],
    ids=str,
)
def test_consumers_of_the_hopper_backward_are_one_role_where_loops_are_long(facts, warps):
    sizes = {"batch": 2, "seqlen_q": 512, "seqlen_k": 512, "heads_q": 4, "heads_k": 4}
    problem = AttentionProblem.dense(**{**sizes, "head_dim": 128, "needs_grad": True, **facts})
    chosen = plan(problem, by_name("H200"), backend="hopper")
    calls = program(chosen, "backward", canonical.backward(chosen.problem)).calls
    (call,) = (c for c in calls if c.kernel.function in ("backward", "backward_wide"))
    assert call.options["num_warps"] == warps
