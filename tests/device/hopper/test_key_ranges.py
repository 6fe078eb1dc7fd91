"""key_ranges on a GPU against the float64 oracle: the Hopper kernels and the portable ones, in
every storage, and in a captured graph whose masks change."""

import random
from dataclasses import replace

import pytest
import torch

import heedful.torch as heedful
from heedful import masks
from heedful.core.registry.by_hand import named
from support.captures import graph_capture
from support.hopper.device import ON_HOPPER
from support.problems.budget import backend_results, check, run
from support.problems.cases import FRESH, Case, build, variants
from support.problems.grids import drawn_rows
from support.runs import api
from support.runs.prepared import Prepared

pytestmark = ON_HOPPER

BASE = Case(dtype="bfloat16", head_dim=128, heads_q=4, heads_k=2, backward=False, key_ranges=1)
LONG = replace(BASE, seqlen_q=700, seqlen_k=900)
KINDS = [
    LONG,
    *variants(LONG, causal=[True], key_ranges=[2], head_dim=[64, 256], window=[(100, 60)]),
    replace(LONG, causal=True, varlen="qk", used="qk", seqlen_k=700, dtype="float16"),
    replace(LONG, causal=True, varlen="q", page_size=64, batch=3),
    replace(LONG, page_size=16, used="k", key_ranges=2, head_dim=64),
    replace(LONG, leftpad_k=True, ranges_of="bh", sink=True, softcap=3.0),
    replace(LONG, key_ranges=2, causal=True, ranges_of="h", bias="hqk"),
    replace(LONG, dropout_p=0.3, ranges_of="", alibi="h"),
    replace(LONG, num_splits=3, head_dim=64, seqlen_q=130),
    replace(LONG, key_ranges=2, window=(200, -1), varlen="qk", head_dim=64, heads_q=2),
]
SIZES = [{}, {"seqlen_q": 300, "seqlen_k": 129}, {"seqlen_q": 64, "seqlen_k": 1030}, {"batch": 5}]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_hopper_forward_is_within_its_budget(case):
    for seed, sizes in enumerate(SIZES):
        run(Prepared("hopper"), replace(case, **sizes, seed=case.seed + seed), "cuda")


PORTABLE = [
    replace(LONG, backward=True, causal=True),
    replace(LONG, backward=True, key_ranges=2, ranges_of="bh", head_dim=64),
    replace(LONG, backward=True, varlen="q", page_size=16, lse_grad=False),
    replace(LONG, backward=True, causal=True, varlen="qk", used="q", seqlen_k=700),
]
GRADIENTS = [
    *PORTABLE[:2],
    replace(LONG, backward=True, causal=True, varlen="qk", seqlen_k=700),
    replace(LONG, backward=True, key_ranges=2, window=(90, 30), dtype="float16", batch=1),
    replace(LONG, backward=True, key_ranges=2, varlen="qk", head_dim=64, heads_k=4, sink=True),
    replace(LONG, backward=True, deterministic=True, key_ranges=2, ranges_of="h"),
    replace(LONG, backward=True, deterministic=True, causal=True, head_dim=64),
    replace(LONG, backward=True, deterministic=True, causal=True, key_ranges=2, varlen="qk"),
    replace(LONG, backward=True, dropout_p=0.3, causal=True),
    replace(LONG, backward=True, softcap=3.0, head_dim=64, key_ranges=2, window=(-1, 100)),
    replace(LONG, backward=True, head_dim=96, key_ranges=2, causal=True),
    replace(LONG, backward=True, head_dim=192, head_dim_v=128, key_ranges=2, causal=True),
    replace(LONG, backward=True, head_dim=192, head_dim_v=128, ranges_of="bh", varlen=""),
    replace(LONG, backward=True, head_dim=256, key_ranges=1, window=(300, 0)),
    replace(LONG, backward=True, head_dim=256, key_ranges=2, varlen="qk"),
]


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_portable_gradients_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES[:3]):
        run(Prepared("portable"), replace(case, **sizes, seed=case.seed + seed), "cuda")


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_of_the_hopper_kernels_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES[:3]):
        runner = Prepared("hopper")
        run(runner, replace(case, **sizes, seed=case.seed + seed), "cuda")
        assert runner.plan.backward == "hopper"


@pytest.mark.parametrize(
    "case", [c for c in GRADIENTS if c.key_ranges == 1 and c.head_dim <= 128], ids=str
)
def test_gradients_are_within_their_budget_where_rows_are_hidden_by_their_sums(case):
    for seed, sizes in enumerate(SIZES):
        runner = Prepared("hopper+hides_rows=1")
        run(runner, replace(case, **sizes, backward=True, seed=case.seed + seed), "cuda")


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_gradients_of_public_calls_are_within_their_budget(case):
    for seed, sizes in enumerate(SIZES[:2]):
        built = build(replace(case, **sizes, seed=case.seed + seed), "cuda")
        check(built, api.results(built), "cuda")


def lent(kind: str, seqlen: int):
    """(ranges, causal) of documents, of a prefix, of windows beside leading keys."""
    place = torch.arange(seqlen, device="cuda")
    if kind == "documents":
        ids = (place // 700 + place // 1900)[None]
        return masks.documents(ids).ranges, True
    if kind == "prefix":
        return masks.prefix(torch.tensor([900], device="cuda"), seqlen), False
    return masks.local_global(300, 64, seqlen, like=place), True


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["documents", "prefix", "local and global"])
def test_masks_of_long_sequences_agree_with_a_bias(kind, head_dim):
    """Whose kernels know nothing of ranges; gradients in a fixed order are the same bits twice."""
    seqlen = 4096
    made = torch.randn(4, 1, seqlen, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    *inputs, dout = made.unbind(0)
    q, k, v = (x.requires_grad_() for x in inputs)
    ranges, causal = lent(kind, seqlen)
    key = torch.arange(seqlen, device="cuda")
    pairs = ranges.unflatten(-1, (-1, 1, 2))
    seen = ((key >= pairs[..., 0]) & (key < pairs[..., 1])).any(-2)

    def results(**how):
        out = heedful.flash_attn_func(q, k, v, causal=causal, **how)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    want = results(bias=seen)
    got = results(key_ranges=ranges)
    in_order = [results(key_ranges=ranges, deterministic=True) for _ in range(2)]
    hidden = results(key_ranges=ranges, backend=named("hopper", hides_rows=1))
    for one, ordered, again, by_rows, other in zip(got, *in_order, hidden, want, strict=True):
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)
        torch.testing.assert_close(by_rows, other, atol=0.03, rtol=0.03)
        torch.testing.assert_close(ordered, other, atol=0.03, rtol=0.03)
        assert torch.equal(ordered, again)


# What decides on kernels: so many combinations of it, since compiling takes long. All else differs
# from problem to problem.
COMBINATIONS, PARTS, OF_A_PART = 12, 5, 20
KERNELS = drawn_rows(
    {
        "backend": ("hopper", "hopper", "hopper", "portable"),
        "head_dim": (64, 128),
        "key_ranges": (1, 2),
        "mask": ("", "causal", "window"),
        "storage": ("", "", "qk", "qk", "q paged", "paged"),
        "group": (1, 2),
        "own_heads": (False, True),
        "deterministic": (False, False, False, False, True),
        "num_splits": (1, 1, 0),
    },
    COMBINATIONS,
    4709 + FRESH,
)


def drawn(of: dict, number: int) -> Case:
    """A problem of these kernels: of any sizes, lengths and ranges."""
    rng = random.Random(number)
    storage = of["storage"]
    paged, varlen = "paged" in storage, storage.removesuffix("paged").strip()
    dims = ("h", "bh") if of["own_heads"] else ("", "b")
    return Case(
        batch=rng.randint(1, 3),
        seqlen_q=rng.randint(65, 500),
        seqlen_k=rng.randint(1, 600),
        heads_q=2 * of["group"],
        heads_k=2,
        head_dim=of["head_dim"],
        dtype="bfloat16",
        causal=of["mask"] == "causal",
        window=(100, 30) if of["mask"] == "window" else (-1, -1),
        key_ranges=of["key_ranges"],
        ranges_of="b" if storage else rng.choice(dims),
        varlen=varlen,
        page_size=16 if paged else 0,
        backward=not paged,
        deterministic=not paged and of["deterministic"],
        # With as many as the planner likes, so few queries have tiles of 64 rows.
        num_splits=of["num_splits"],
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


SQUARE = Case(
    dtype="bfloat16",
    batch=3,
    seqlen_q=1000,
    seqlen_k=1000,
    heads_q=4,
    heads_k=2,
    head_dim=128,
    causal=True,
    key_ranges=1,
    ranges_of="b",
    backward=False,
)
CUT = [
    SQUARE,
    *variants(SQUARE, head_dim=[64, 96, 256], window=[(70, 0)], dtype=["float16"], sink=[True]),
    replace(SQUARE, head_dim=192, head_dim_v=128, softcap=3.0),
    replace(SQUARE, ranges_of="", batch=2),
]
CUT_GRADIENTS = [
    replace(case, backward=True)
    for case in (
        SQUARE,
        replace(SQUARE, head_dim=64, lse_grad=False),
        replace(SQUARE, window=(70, 0), deterministic=True, dtype="float16"),
        replace(SQUARE, head_dim=96, heads_k=4, ranges_of="", softcap=3.0),
    )
]
CUT_KINDS = ("documents", "short documents", "left", "right", "within documents", "drawn", "none")


def parting_ranges(kind: str, batch: int, seqlen: int, rng: random.Random) -> torch.Tensor | None:
    """(batch, 1, seqlen, 2), None for those that a case draws by itself."""
    place = torch.arange(seqlen)
    if kind == "drawn":
        return None
    if kind in ("left", "right"):
        real = torch.tensor([rng.randint(0, seqlen) for _ in range(batch)])
        shown = place < real[:, None] if kind == "right" else place >= seqlen - real[:, None]
        return masks.padding(shown).expand(batch, 1, seqlen, 2)
    if kind == "none":
        return torch.zeros(batch, 1, seqlen, 2, dtype=torch.int32)
    rows = []
    for _ in range(batch):
        longest = 90 if kind == "short documents" else 500
        lengths = [rng.randint(1, longest) for _ in range(seqlen)]
        rows.append(torch.arange(seqlen).repeat_interleave(torch.tensor(lengths))[:seqlen])
    found = masks.documents(torch.stack(rows)).ranges.clone()
    if kind == "within documents":
        found[..., 0] = torch.maximum(found[..., 0], place - rng.randint(0, 150))
    return found


def is_within_budget(case: Case, kind: str, runner: Prepared) -> None:
    built = build(case, "cuda")
    rng = random.Random(f"{case} {kind}")
    found = parting_ranges(kind, built.x.key_ranges.shape[0], case.seqlen_q, rng)
    if found is not None:
        shared = built.x.key_ranges[:, :1] if case.ranges_of else built.x.key_ranges[:1, :1]
        shared.copy_(found[: len(shared)])
    try:
        check(built, backend_results(runner, built), "cuda")
    except AssertionError as error:
        raise AssertionError(f"{kind}, {case}") from error


def is_within_budget_where_rows_are_cut(case, kernel):
    for seed, seqlen in enumerate((1000, 357, 128)):
        sized = replace(case, seqlen_q=seqlen, seqlen_k=seqlen, seed=case.seed + seed)
        for kind in CUT_KINDS:
            runner = Prepared("hopper+cuts_rows=1")
            is_within_budget(sized, kind, runner)
            assert runner.plan.configs[kernel].cuts_rows


@pytest.mark.parametrize("case", CUT, ids=str)
def test_forwards_whose_rows_are_cut_are_within_their_budget(case):
    is_within_budget_where_rows_are_cut(case, "hopper.forward")


@pytest.mark.parametrize("case", CUT_GRADIENTS, ids=str)
def test_gradients_whose_rows_are_cut_are_within_their_budget(case):
    is_within_budget_where_rows_are_cut(case, "hopper.backward")


# Kernels of random problems whose rows are cut, by hand.
CUT_KERNELS = drawn_rows(
    {
        "head_dim": (64, 128),
        "window": ((-1, -1), (-1, -1), (90, 0)),
        "group": (1, 2),
        "ranges_of": ("b", "b", ""),
        "deterministic": (False, False, True),
        "dtype": ("bfloat16", "float16"),
    },
    8,
    4714 + FRESH,
)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernels", range(len(CUT_KERNELS)))
def test_random_problems_whose_rows_are_cut_are_within_their_budget(part, kernels):
    of = dict(CUT_KERNELS[kernels])
    heads = 2 * of.pop("group")
    for i in range(OF_A_PART):
        number = (kernels * PARTS + part) * OF_A_PART + i
        rng = random.Random(number)
        rows = rng.randint(65, 1500)
        sizes = {"batch": rng.randint(1, 3), "seqlen_q": rows, "seqlen_k": rows}
        case = replace(SQUARE, **of, **sizes, heads_q=heads, backward=True, seed=number)
        is_within_budget(case, rng.choice(CUT_KINDS), Prepared("hopper+cuts_rows=1"))


def test_a_captured_call_reads_the_masks_of_its_replay():
    q, k, v = torch.randn(3, 1, 1000, 4, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    ranges = torch.zeros(1, 1, 1000, 2, dtype=torch.int32, device="cuda")

    def called():
        return heedful.flash_attn_func(q, k, v, causal=True, key_ranges=ranges)

    called()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = called()
    begin = torch.arange(1000, device="cuda", dtype=torch.int32) // 300 * 300
    for first in (begin, begin // 2, begin * 0):
        ranges[0, 0, :, 0], ranges[0, 0, :, 1] = first, 1000
        graph.replay()
        assert torch.equal(out, called())
        seen = torch.arange(1000, device="cuda") >= first[:, None]
        want = heedful.flash_attn_func(q, k, v, causal=True, bias=seen)
        torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)


def test_a_captured_call_cuts_the_rows_of_its_replay():
    q, k, v = torch.randn(3, 2, 1000, 4, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    ranges = torch.zeros(2, 1, 1000, 2, dtype=torch.int32, device="cuda")
    backend = named("hopper", cuts_rows=1)

    def called():
        return heedful.flash_attn_func(q, k, v, causal=True, key_ranges=ranges, backend=backend)

    called()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = called()
    place = torch.arange(1000, device="cuda", dtype=torch.int32)
    for first in (place // 300 * 300, place // 2, place * 0, place // 7 * 7):
        ranges[..., 0], ranges[..., 1] = first, 1000
        graph.replay()
        assert torch.equal(out, called())
        seen = torch.arange(1000, device="cuda") >= first[:, None]
        want = heedful.flash_attn_func(q, k, v, causal=True, bias=seen)
        torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_are_cut_by_default_and_are_packed_sequences(head_dim):
    """Also where a captured call gets other documents in the same memory."""
    seqlen, place = 16384, torch.arange(16384, device="cuda")
    made = torch.randn(4, 1, seqlen, 16, head_dim, device="cuda", dtype=torch.bfloat16)
    *inputs, dout = made.unbind(0)
    q, k, v = (x.requires_grad_() for x in inputs)
    documents = masks.documents(place[None] // 1000)

    def called(**how):
        out = heedful.flash_attn_func(q, k, v, causal=True, **how)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    def compared(got, length):
        starts = torch.arange(0, seqlen + length, length, device="cuda").clamp(max=seqlen).int()
        one, two, three = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
        out = heedful.flash_attn_varlen_func(
            one, two, three, starts, starts, length, length, causal=True
        )
        want = out, *torch.autograd.grad(out, (one, two, three), dout.flatten(0, 1))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.flatten(0, 1), other, atol=0.03, rtol=0.03)

    words = heedful.explain(heedful.flash_attn_func, q, k, v, causal=True, key_ranges=documents)
    assert "forward and backward: cut into packed sequences" in words
    got = called(key_ranges=documents)
    by_hand = called(key_ranges=documents.ranges, backend=named("hopper", cuts_rows=1))
    assert torch.equal(got[0], by_hand[0])
    compared(got, 1000)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        heedful.flash_attn_func(q, k, v, causal=True, key_ranges=documents)
        torch.cuda.synchronize()
        with graph_capture(graph):
            out = heedful.flash_attn_func(q, k, v, causal=True, key_ranges=documents)
    for length in (1000, 3000, 77):
        documents.ranges.copy_(masks.documents(place[None] // length).ranges)
        graph.replay()
        assert torch.equal(out, called(key_ranges=documents)[0])
        compared(called(key_ranges=documents), length)
