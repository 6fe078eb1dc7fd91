"""DTensors spread over batch and heads: ranks compute their parts, and the whole is the plain
call's. Other placements are refused by name."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

import heedful.torch as typed
from support.problems.budget import check
from support.problems.cases import Case, build
from support.problems.grids import slow_but
from support.runs import api
from support.runs.mesh import on_each_rank, shard
from support.runs.sharded_calls import BATCH, HEADS, SAME, results

# What is passed here is more than the signatures say.
heedful: Any = typed

ALL = Case(
    batch=4,
    seqlen_q=5,
    seqlen_k=9,
    heads_q=8,
    heads_k=4,
    head_dim=8,
    causal=True,
    bias="bhqk",
    sink=True,
    alibi="bh",
    dropout_p=0.4,
    dropout_origin=(3, 2, 1, 4),
    return_probs=True,
)
FEW = Case(
    **{
        **vars(ALL),
        "bias": "hk",
        "alibi": "h",
        "softcap": 5.0,
        "dropout_p": 0.0,
        "return_probs": False,
    }
)
PACKED = Case(**{**vars(ALL), "bias": "hqk", "varlen": "qk", "used": "k", "alibi": "h"})


@pytest.mark.parametrize(
    ("case", "shape", "places"),
    [
        (ALL, (2,), [BATCH]),
        (ALL, (2,), [HEADS]),
        (ALL, (2, 2), [BATCH, HEADS]),
        (replace(ALL, origins=1), (2, 2), [BATCH, HEADS]),
        (ALL, (2, 2), [HEADS, HEADS]),
        (ALL, (2, 2), [SAME, BATCH]),
        (FEW, (2,), [BATCH]),
        (FEW, (2, 2), [HEADS, BATCH]),
        (PACKED, (2,), [Shard(1)]),
        (replace(PACKED, origins=4), (2, 2), [Shard(1), SAME]),
    ],
    ids=lambda value: None if isinstance(value, Case) else str(value),
)
def test_what_ranks_compute_is_the_whole(case, shape, places):
    built = build(case)
    check(built, results(built, shape, places))


def dense(ranks, places, grad=False) -> list:
    return [shard(tensor, ranks, places, grad) for tensor in api.dense()]


@pytest.mark.parametrize("places", slow_but([[HEADS]], [[BATCH], [HEADS]]), ids=str)
def test_a_compiled_call_is_the_eager_one(places):
    def attention(*tensors):
        out = heedful.flash_attn_func(*tensors)
        return out, heedful.flash_attn_func(*tensors, causal=True, softcap=3.0)

    def work(ranks):
        tensors = dense(ranks, places, grad=True)
        with torch.no_grad():
            for mine, wanted in zip(run(*tensors), attention(*tensors), strict=True):
                assert mine.placements == wanted.placements == tuple(places)
                assert torch.equal(mine.to_local(), wanted.to_local())
        cotangents = [shard(torch.randn(2, 9, 4, 8), ranks, places) for _ in range(2)]
        pair: Any = (torch.autograd.grad(f(*tensors), tensors, cotangents) for f in ways)
        for one, other in zip(*pair, strict=True):
            assert one.placements == other.placements
            assert torch.equal(one.to_local(), other.to_local())

    run = api.compiled(attention)
    ways = run, attention
    on_each_rank((1,), work)


def refused(call) -> str:
    """What a call says on the second of two ranks."""
    said = []

    def work(ranks):
        with pytest.raises((ValueError, TypeError)) as error:
            call(ranks)
        said.append(str(error.value))

    on_each_rank((2,), work)
    return said[1]


@pytest.mark.parametrize("place", [Shard(1), Shard(3), Partial()], ids=str)
def test_other_placements_are_refused(place):
    said = refused(lambda ranks: heedful.flash_attn_func(*dense(ranks, [place])))
    assert said == (
        "q must be placed on each dim of its mesh by Shard(0) (batch), Shard(2) (heads) or"
        f" Replicate(), got placements {(place,)}"
    )


def call(*, q=HEADS, k=HEADS, v=HEADS, like=None, **more):
    """A call whose tensors lie so."""

    def made(ranks):
        tensors = [
            shard(tensor, ranks, [place])
            for tensor, place in zip(like or api.dense(), (q, k, v), strict=True)
        ]
        given = {n: t(ranks) if callable(t) else t for n, t in more.items()}
        return heedful.flash_attn_func(*tensors, **given)

    return made


BIAS = torch.zeros(1, 4, 9, 12)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (call(k=SAME), r"k must have placements \(Shard\(dim=2\),\) where q has .*Replicate"),
        (call(v=BATCH), r"v must have placements \(Shard\(dim=2\),\) where q has"),
        (call(bias=BIAS), "bias must be a DTensor"),
        (call(bias=lambda r: shard(BIAS, r, [SAME])), r"bias must have placements \(Shard\(dim=1"),
        (call(sink=lambda r: shard(torch.zeros(4), r, [SAME])), "sink must have placements"),
        (call(dropout_p=0.5), "dropout_seed must be given where q is a DTensor"),
        (call(dropout_p=None), "dropout_p must be a float"),
        (call(out=torch.zeros(2, 9, 4, 8)), "out must be None where q is a DTensor"),
        (
            call(like=[t[:, :, : t.shape[2] // 2] for t in api.dense()], q=HEADS, k=SAME, v=SAME),
            "k must have a multiple of 2 KV heads, as so many ranks share them, got 1",
        ),
        (
            call(like=[torch.cat([t, t[:1]]) for t in api.dense()], q=BATCH, k=BATCH, v=BATCH),
            "k must have a multiple of 2 batch entries, as so many ranks share them, got 3",
        ),
    ],
)
def test_what_lies_otherwise_than_q_is_refused(made, says):
    assert re.match(says, refused(made))


def test_plain_and_sharded_tensors_do_not_mix():
    q, k, v = api.dense()
    said = refused(lambda r: heedful.flash_attn_func(q, *dense(r, [HEADS])[1:]))
    assert said.startswith("q must be a DTensor")
    said = refused(lambda r: heedful.flash_attn_func(*dense(r, [HEADS])[:2], v))
    assert said.startswith("v must be a DTensor")
    said = refused(lambda r: heedful.flash_attn_func(q, k, v, bias=shard(BIAS, r, [SAME])))
    assert said.startswith("q must be a DTensor")


def test_tokens_of_packed_sequences_are_not_spread():
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    whole = torch.randn(8, 2, 8)

    def packed(ranks):
        q = shard(whole, ranks, [Shard(0)])
        return heedful.flash_attn_varlen_func(q, q, q, bounds, bounds, 4, 4)

    assert "Shard(1) (heads) or Replicate()" in refused(packed)


def test_a_cache_takes_no_dtensors_and_is_not_written():
    q, k_cache, v_cache = api.dense()
    before = k_cache.clone()

    def plain_cache(ranks):
        new = [shard(t[:, :2], ranks, [SAME]) for t in (k_cache, v_cache)]
        return heedful.flash_attn_with_kvcache(q[:, :2], k_cache, v_cache, *new, cache_seqlens=1)

    assert refused(plain_cache).startswith("flash_attn_with_kvcache takes no DTensors")
    assert torch.equal(k_cache, before)
    said = refused(lambda ranks: heedful.flash_attn_with_kvcache(*dense(ranks, [HEADS])))
    assert said.startswith("flash_attn_with_kvcache takes no DTensors")


def test_explain_takes_what_a_rank_has():
    said = refused(lambda r: heedful.explain(heedful.flash_attn_func, *dense(r, [HEADS])))
    assert said.startswith("explain takes no DTensors")


def test_shards_in_another_order_than_the_mesh_are_refused():
    def work(ranks):
        q = dense(ranks, [BATCH, BATCH])[0]
        order = getattr(q._spec, "shard_order", None)
        if not order:
            pytest.skip("this torch has one order")
        turned = tuple(entry._replace(mesh_dims=entry.mesh_dims[::-1]) for entry in order)
        object.__setattr__(q._spec, "shard_order", turned)
        with pytest.raises(ValueError, match="q must be split by the dims of its mesh in their"):
            heedful.flash_attn_func(q, q, q)

    on_each_rank((1, 2), work)


def test_two_processes_agree_with_one():
    """Of a sum, whose cotangent lies on no rank as the output does; with the collectives that make
    whole tensors."""
    script = Path(__file__).parents[3] / "support" / "runs" / "two_ranks.py"
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2


def test_what_lies_on_another_mesh_or_in_another_share_than_q_is_refused():
    def elsewhere(ranks):
        q, k, v = (shard(t, ranks, [HEADS]) for t in api.dense())
        other = DeviceMesh("cpu", [1, 0])
        heedful.flash_attn_func(q, k, shard(v.full_tensor() * 0, other, [HEADS]))

    def uneven(ranks):
        q, k, v = (shard(t, ranks, [HEADS]) for t in api.dense())
        part = k.to_local()[:, 1:]
        k = DTensor.from_local(
            part, ranks, [HEADS], run_check=False, shape=k.shape, stride=k.stride()
        )
        heedful.flash_attn_func(q, k, v)

    assert re.match(r"v must lie on q's mesh, .*, got ", refused(elsewhere))
    assert re.match(r"k must have the same share on each rank, \(.*\), got", refused(uneven))
