"""Block masks by the Hopper kernels: against the float64 oracle, and beside the portable kernels
where lists are no lists."""

import random
from dataclasses import replace

import pytest
import torch

import heedful.torch as heedful
from heedful import BlockMask
from heedful.core.registry.by_hand import forced
from support.captures import graph_capture
from support.hopper.device import ON_HOPPER
from support.problems.budget import check, run
from support.problems.cases import FRESH, Case, build, variants
from support.problems.grids import drawn_rows
from support.runs import api
from support.runs.prepared import Prepared

pytestmark = ON_HOPPER

BASE = Case(dtype="bfloat16", head_dim=128, heads_q=4, heads_k=2, block_mask=128, backward=False)
LONG = replace(BASE, seqlen_q=640, seqlen_k=1024)
KINDS = [
    LONG,
    *variants(LONG, block_mask=[64], head_dim=[64, 192, 256], causal=[True], ranges_of=["bh"]),
    replace(LONG, head_dim=64, block_mask=64, dtype="float16", window=(200, 60)),
    replace(LONG, head_dim=64, causal=True, ranges_of="h", dtype="float16"),
    replace(LONG, head_dim=256, block_mask=64, ranges_of="", window=(-1, 100)),
    replace(LONG, head_dim=192, head_dim_v=128, ranges_of="bh", softcap=3.0, sink=True),
    replace(LONG, num_splits=3, ranges_of="bh"),
    replace(LONG, num_splits=2, head_dim=64, block_mask=64, causal=True),
    replace(LONG, used="qk", head_dim=64, ranges_of="h"),
    replace(LONG, used="k", leftpad_k=True, causal=True, block_mask=64),
    replace(LONG, used="k", page_size=64, ranges_of="bh"),
    replace(LONG, heads_q=8, heads_k=1, ranges_of="h", layout="heads_first"),
    replace(LONG, varlen="qk", ranges_of="bh"),
    replace(LONG, varlen="qk", used="qk", block_mask=64, head_dim=64, causal=True),
    replace(LONG, varlen="q", page_size=64, ranges_of="h", batch=3),
]
SIZES = [{}, {"seqlen_q": 300, "seqlen_k": 129}, {"seqlen_q": 30, "seqlen_k": 1100}, {"batch": 5}]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_hopper_forward_is_within_its_budget(case):
    for seed, sizes in enumerate(SIZES):
        runner = Prepared("hopper")
        run(runner, replace(case, **sizes, seed=case.seed + seed), "cuda")
        assert runner.plan.backend == "hopper"


GRADIENTS = [
    replace(LONG, ranges_of="bh"),
    replace(LONG, block_mask=64, ranges_of="h"),
    replace(LONG, head_dim=64, causal=True, ranges_of="b"),
    replace(LONG, head_dim=64, block_mask=64, ranges_of="bh", dtype="float16"),
    replace(LONG, block_mask=64, window=(200, 60), ranges_of="", sink=True),
    replace(LONG, head_dim=64, window=(-1, 100), ranges_of="h", softcap=3.0),
    replace(LONG, causal=True, softcap=3.0, ranges_of="bh", lse_grad=False),
    replace(LONG, head_dim=96, heads_q=8, heads_k=1, ranges_of="h"),
    replace(LONG, head_dim=40, block_mask=64, heads_k=4, ranges_of="h", layout="heads_first"),
    replace(LONG, seqlen_q=3000, seqlen_k=200, block_mask=64, ranges_of="bh"),
    replace(LONG, scale=8.0, ranges_of="h"),
    replace(LONG, varlen="qk", ranges_of="bh", causal=True),
    replace(LONG, head_dim=256, ranges_of="h", causal=True),
    replace(LONG, head_dim=256, block_mask=64, ranges_of="bh", varlen="qk"),
    replace(LONG, head_dim=192, head_dim_v=128, ranges_of="b", softcap=3.0),
    replace(LONG, varlen="qk", batch=4, block_mask=64, head_dim=64, ranges_of=""),
]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_of_the_hopper_kernels_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES):
        runner = Prepared("hopper")
        run(runner, replace(case, **sizes, backward=True, seed=case.seed + seed), "cuda")
        assert runner.plan.backward == "hopper"


@pytest.mark.parametrize("case", [case for case in GRADIENTS if case.head_dim <= 128], ids=str)
def test_gradients_of_consumers_that_share_a_list_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES):
        runner = Prepared("hopper+block_n=64")
        run(runner, replace(case, **sizes, backward=True, seed=case.seed + seed), "cuda")
        assert runner.plan.configs["hopper.backward"].block_n == 64


@pytest.mark.parametrize("head_dim, side", [(128, 128), (64, 64)])
def test_gradients_of_public_calls_are_within_their_budget(head_dim, side):
    case = replace(LONG, head_dim=head_dim, block_mask=side, backward=True)
    built = build(case, "cuda")
    check(built, api.results(built), "cuda")


def shown(kind: str, length: int) -> torch.Tensor:
    """Masks of long sequences, whose rows first see keys late, never, or far apart."""
    i, j = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
    if kind == "causal":
        return i >= j
    if kind == "dilated":
        return ((i - j) % 3 == 0) & (i // 128 != 2)
    return (i // 700 == j // 700) | ((i + j) % 977 == 0)


@pytest.mark.parametrize("kind", ["causal", "dilated", "documents"])
@pytest.mark.parametrize("head_dim, side", [(128, 128), (128, 64), (64, 128), (64, 64)])
def test_gradients_of_long_sequences_agree_with_a_bias(kind, head_dim, side):
    length = 4096
    made = torch.randn(4, 1, length, 4, head_dim, device="cuda").bfloat16()
    q, k, v = (x.requires_grad_() for x in (made[0], *made[1:3, :, :, :2]))
    mask = shown(kind, length)
    lists = BlockMask.of(mask[None, None], side=side)
    outs = (
        heedful.flash_attn_func(q, k, v, bias=mask),
        heedful.flash_attn_func(q, k, v, block_mask=lists, backend="hopper"),
    )
    found = [torch.autograd.grad(out, (q, k, v), made[3]) for out in outs]
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kind", ["causal", "dilated", "documents"])
@pytest.mark.parametrize("head_dim, side", [(128, 128), (128, 64), (64, 128), (64, 64)])
def test_masks_of_long_sequences_agree_with_a_bias(kind, head_dim, side):
    length = 4096
    q, k, v = torch.randn(3, 1, length, 2, head_dim, device="cuda").bfloat16().unbind(0)
    # Scores that grow from tile to tile, so that rows are scored again.
    q, k = 3 * q, k * torch.linspace(4, 0.1, length, device="cuda")[:, None, None].bfloat16()
    mask = shown(kind, length)
    want, want_lse = heedful.flash_attn_func(q, k, v, bias=mask, return_lse=True)
    lists = BlockMask.of(mask[None, None], side=side)
    got, lse = heedful.flash_attn_func(q, k, v, block_mask=lists, return_lse=True, backend="hopper")
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, want_lse, atol=0.02, rtol=0.001)


@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize("side", [64, 128])
def test_lists_of_any_numbers_are_bounded_as_the_portable_kernels_bound_them(side, length):
    q, k, v = torch.randn(3, 2, length, 2, 128, device="cuda").bfloat16().unbind(0)
    tiles = -(-length // side)
    made = torch.Generator("cuda").manual_seed(side)
    for width, most in ((1, 2**31 - 1), (7, 40), (30, 2**31 - 1)):
        shape = (2, 2, tiles, 2 + 2 * width)
        rows = torch.randint(-most - 1, most, shape, generator=made, device="cuda").int()
        if most == 40:
            rows[..., 0] = 3
        pool = torch.randint(-(2**31), 2**31 - 1, (5, side, side // 32), device="cuda").int()
        mask = BlockMask(rows, rows, pool, length, length)
        found = [
            heedful.flash_attn_func(q, k, v, block_mask=mask, return_lse=True, backend=forced(name))
            for name in ("hopper", "portable")
        ]
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("side", [64, 128])
def test_gradients_of_lists_of_any_numbers_stay_within_memory(side):
    """They mean nothing; the call ends, and the next one is right."""
    length = 1000
    made = torch.Generator("cuda").manual_seed(side)
    q, k, v = torch.randn(3, 2, length, 2, 128, device="cuda").bfloat16().unbind(0)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    for most in (2**31 - 1, 40):
        shape = (2, 2, -(-length // side), 2 + 2 * 9)
        rows, keys = torch.randint(
            -most - 1, most, (2, *shape), generator=made, device="cuda"
        ).int()
        pool = torch.randint(-(2**31), 2**31 - 1, (5, side, side // 32), device="cuda").int()
        mask = BlockMask(rows, keys, pool, length, length)
        out = heedful.flash_attn_func(q, k, v, block_mask=mask, backend="hopper")
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()
    run(Prepared("hopper"), replace(LONG, backward=True, block_mask=side), "cuda")


# What decides on kernels: so many combinations of it. All else differs from problem to problem.
COMBINATIONS, PARTS, OF_A_PART = 10, 4, 20
KERNELS = drawn_rows(
    {
        "backend": ("hopper", "hopper", "hopper", "portable"),
        "head_dim": (64, 128),
        "side": (64, 128),
        "mask": ("", "causal", "window"),
        "storage": ("", "", "", "qk", "paged"),
        "group": (1, 2),
        "own_heads": (False, True),
    },
    COMBINATIONS,
    4747 + FRESH,
)


def drawn(of: dict, number: int) -> Case:
    """A problem of these kernels: of any sizes, lengths, lists and bits."""
    rng = random.Random(number)
    paged = of["storage"] == "paged"
    return Case(
        batch=rng.randint(1, 3),
        seqlen_q=rng.randint(65, 700),
        seqlen_k=rng.randint(1, 700),
        heads_q=2 * of["group"],
        heads_k=2,
        head_dim=of["head_dim"],
        dtype="bfloat16",
        causal=of["mask"] == "causal",
        window=(100, 30) if of["mask"] == "window" else (-1, -1),
        block_mask=of["side"],
        ranges_of=rng.choice(("h", "bh") if of["own_heads"] else ("", "b")),
        page_size=16 if paged else 0,
        used="k" if paged else "",
        varlen="" if paged else of["storage"],
        backward=not paged,
        seed=number,
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernels", range(COMBINATIONS))
def test_random_problems_are_within_their_budget(part, kernels):
    of = KERNELS[kernels]
    for i in range(OF_A_PART):
        case = drawn(of, (kernels * PARTS + part) * OF_A_PART + i)
        try:
            run(Prepared(of["backend"]), case, "cuda")
        except AssertionError as error:
            raise AssertionError(f"{of['backend']}: {case}") from error


def test_a_captured_call_reads_the_lists_of_its_replay():
    q = torch.randn(1, 512, 2, 128, device="cuda").bfloat16()
    masks = [torch.rand(1, 2, 512, 512, device="cuda") < share for share in (0.4, 0.9)]
    masks[1][..., :200, 128:256] = False
    made = [BlockMask.of(mask, capacity=64) for mask in masks]
    heedful.flash_attn_func(q, q, q, block_mask=made[0], backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = heedful.flash_attn_func(q, q, q, block_mask=made[0], backend="hopper")
    for mask, own in zip(masks, made, strict=True):
        for name in ("rows", "keys", "bits"):
            getattr(made[0], name).copy_(getattr(own, name))
        graph.replay()
        want = heedful.flash_attn_func(q, q, q, bias=mask)
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
