"""Tiles of the CPU backend: in what precision they are multiplied, and in whose memory."""

import warnings
from dataclasses import replace

import pytest
import torch

from heedful import cpu
from heedful.cpu import tiled_backward
from heedful.cpu.blocks import Scratch
from heedful.cpu.scores import Tiles
from support.problems.cases import Case, build

LOW = Case(seqlen_q=3, seqlen_k=5, head_dim=16, dtype="bfloat16", backward=False)


@pytest.mark.parametrize(
    "case, low",
    [
        (LOW, torch.bfloat16),
        (replace(LOW, kv_dtype="int8", kv_group=8), None),
        (replace(LOW, kv_dtype="float8_e4m3fn"), None),
        (replace(LOW, dtype="float16"), None),
        (replace(LOW, dtype="float32"), None),
    ],
    ids=str,
)
def test_products_are_in_bfloat16_where_queries_and_keys_are(case, low, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    built = build(case)
    assert Tiles(built.problem, built.x).low is low


@pytest.mark.parametrize(
    "features",
    [{}, {"sink": True}, {"num_splits": 2}, {"causal": True, "seqlen_q": 400}, {"scale": 90.0}],
    ids=str,
)
def test_results_have_the_size_of_the_memory_that_they_are_written_to(features):
    """Torch gives memory of another size up for new, which it warns of. The scale makes scores
    climb after the first tile; causal queries without a key have no tile to begin with."""
    built = build(replace(Case(seqlen_k=300, head_dim=16), **features))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse, _ = cpu.forward(built.problem, built.x)
        assert built.dout is not None
        cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_way_to_sum_and_the_backward_work_in_the_same_memory(dtype, monkeypatch):
    """By the first tile's maximum, by the running one, in parts that are merged."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(tiled_backward, "HELD", 0)
    names: set[str] = set()
    take = Scratch.take

    def noted(scratch, name, *shape, **more):
        names.add(name)
        return take(scratch, name, *shape, **more)

    monkeypatch.setattr(Scratch, "take", noted)
    case = Case(seqlen_k=600, head_dim=16, dtype=dtype)
    taken = []
    for features in ({}, {"scale": 90.0}, {"num_splits": 2}):
        built = build(replace(case, **features))
        names.clear()
        out, lse, _ = cpu.forward(built.problem, built.x)
        taken.append(set(names))
    first, running, parts = taken
    assert first < running and parts <= running
    names.clear()
    assert built.dout is not None
    cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
    # Of its own the forward has but sums and what it subtracts.
    assert running - names == {"acc", "m", "l", "total", "largest"}
