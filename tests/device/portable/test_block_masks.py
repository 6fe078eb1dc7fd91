"""Block masks on a GPU: the portable kernels against the float64 oracle, public calls, captured
graphs, and torch's FlexAttention."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import heedful.torch as heedful
from heedful import BlockMask, configure
from support.captures import graph_capture
from support.problems.budget import check, run
from support.problems.cases import Case, build, variants
from support.runs import api
from support.runs.prepared import Prepared

pytestmark = pytest.mark.gpu

BASE = Case(dtype="bfloat16", head_dim=128, heads_q=4, heads_k=2, block_mask=128, batch=2)
LONG = replace(BASE, seqlen_q=640, seqlen_k=768)
KINDS = [
    LONG,
    *variants(LONG, causal=[True], block_mask=[32, 64], head_dim=[64, 256], dtype=["float32"]),
    replace(LONG, ranges_of="bh", seqlen_q=700, seqlen_k=900),
    replace(LONG, window=(100, 60), sink=True, softcap=3.0, ranges_of="h", dtype="float16"),
    replace(LONG, used="qk", leftpad_k=True, head_dim=64, ranges_of=""),
    replace(LONG, key_ranges=2, dropout_p=0.3, alibi="h", block_mask=64),
    replace(LONG, num_splits=3, backward=False),
    replace(LONG, layout="offset", head_dim=40, head_dim_v=72),
    replace(LONG, varlen="qk", used="q", ranges_of="bh", batch=3, causal=True),
    replace(LONG, varlen="q", page_size=16, used="k", key_ranges=1, sink=True),
    replace(LONG, page_size=64, leftpad_k=True, seqlen_q=130, backward=False),
]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_portable_kernels_are_within_their_budget(case):
    run(Prepared("portable"), case, "cuda")
    run(Prepared("portable"), replace(case, seqlen_q=129, seqlen_k=31, seed=1), "cuda")


@pytest.mark.parametrize("case", [KINDS[1], KINDS[6], *KINDS[-3:]], ids=str)
def test_public_calls_are_within_their_budget(case):
    built = build(case, "cuda")
    check(built, api.results(built), "cuda")


def drawn(seed: int, length: int, device: str = "cuda") -> torch.Tensor:
    values = torch.Generator(device).manual_seed(seed)
    size = (1, 2, length, length)
    tiles = torch.randint(
        0, 3, (1, 2, length // 128, length // 128), generator=values, device=device
    )
    kind = tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)
    some = torch.rand(size, generator=values, device=device) < 0.5
    return torch.where(kind == 2, some, kind == 1)


def test_a_captured_graph_reads_the_lists_of_its_replay():
    q = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16)
    masks = [drawn(seed, 512) for seed in (0, 1)]
    made = [BlockMask.of(mask, capacity=32) for mask in masks]
    heedful.flash_attn_func(q, q, q, block_mask=made[0])
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = heedful.flash_attn_func(q, q, q, block_mask=made[0])
    for mask, own in zip(masks, made, strict=True):
        for name in ("rows", "keys", "bits"):
            getattr(made[0], name).copy_(getattr(own, name))
        graph.replay()
        want = heedful.flash_attn_func(q, q, q, bias=mask)
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


def test_hostile_lists_read_within_memory():
    q = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = BlockMask.of(drawn(0, 512))
    values = torch.Generator("cuda").manual_seed(0)
    rows, keys = (
        torch.randint(-(2**31), 2**31 - 1, t.shape, generator=values, device="cuda").int()
        for t in (mask.rows, mask.keys)
    )
    out = heedful.flash_attn_func(q, q, q, block_mask=BlockMask(rows, keys, mask.bits, 512, 512))
    out.sum().backward()
    torch.cuda.synchronize()


def test_lists_are_checked_where_a_setting_asks_for_it(monkeypatch):
    monkeypatch.delenv("HEEDFUL_CHECK_PAGES", raising=False)
    q = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16)
    mask = BlockMask.of(drawn(0, 256))
    mask.rows[0, 1, 1, 0] = 99
    heedful.flash_attn_func(q, q, q, block_mask=mask)
    # A variable that is changed by other means is not read again by calls of a known kind.
    configure(check_pages=1)
    try:
        with pytest.raises(ValueError, match="in row 1 of batch entry 0, head 1"):
            heedful.flash_attn_func(q, q, q, block_mask=mask)
    finally:
        configure(check_pages=None)


def test_masks_of_flex_attention_agree_with_it():
    def mask(b, h, i, j):
        return (i >= j) & ((i - j).remainder(5) < 2 + h)

    given = torchs.create_block_mask(mask, None, 2, 1000, 1000)
    q, k, v = torch.randn(3, 1, 2, 1000, 64, device="cuda").unbind(0)
    want = torchs.flex_attention(q, k, v, block_mask=given)
    got = heedful.flex_attention(q, k, v, block_mask=given)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
