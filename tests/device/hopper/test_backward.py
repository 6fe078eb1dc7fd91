"""The Hopper backward against the float64 oracle: lengths around tile edges, masks, storage; and
what autograd, graphs and the compiler make of it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful
from heedful.core.base.device import of_arch
from heedful.core.planning.plan import plan
from heedful.core.registry import capability
from heedful.torch.base.device import device_spec, toolchain
from support.captures import graph_capture
from support.hopper.device import ON_HOPPER, WITH_TRITON_3_9
from support.problems.budget import run
from support.problems.cases import Case, build, twins, variants
from support.problems.variants import problems, sample
from support.runs.prepared import Prepared

pytestmark = [*ON_HOPPER, WITH_TRITON_3_9]

BASE = Case(dtype="bfloat16", head_dim=64, heads_q=4, heads_k=2, num_splits=1)
# More work tiles than the device has places, by a few that are split.
TAIL = {"batch": 17, "heads_q": 8, "head_dim": 128, "seqlen_q": 700, "num_splits": 0}
# More work tiles than the device has places.
TILES = {"batch": 3, "heads_q": 8, "heads_k": 4, "seqlen_q": 300, "seqlen_k": 2100}
LENGTHS = [(1, 1), (64, 128), (193, 127), (257, 129), (300, 1), (37, 700), (511, 513)]

CASES = [
    *(
        replace(BASE, seqlen_q=sq, seqlen_k=sk, causal=causal, head_dim=dim)
        for sq, sk in LENGTHS
        for causal in (False, True)
        for dim in (64, 128)
    ),
    *(replace(BASE, seqlen_q=200, seqlen_k=333, head_dim=dim) for dim in (8, 40, 72, 96, 120)),
    *variants(
        replace(BASE, seqlen_q=200, seqlen_k=333),
        head_dim=(128,),
        heads_k=(1, 4),
        layout=("heads_first", "packed"),
        window=((-1, 0), (0, 0), (40, 0), (64, 128), (300, -1), (-1, 20)),
        bottom_right=(False,),
        shift=(250, -250),
        sink=(True,),
        lse_grad=(False,),
        scale=(8.0,),
    ),
    *(
        replace(BASE, **TILES, head_dim=dim, window=w)
        for dim in (64, 96, 128)
        for w in ((-1, -1), (-1, 0), (100, 0), (200, 300))
    ),
    replace(BASE, **TAIL, heads_k=8, seqlen_k=100),
    replace(BASE, **TAIL, heads_k=4, seqlen_k=250),
]

SMALL = replace(BASE, seqlen_q=200, seqlen_k=333)
MORE = [
    replace(SMALL, head_dim=dim, heads_k=heads_k, **mods)
    for dim, heads_k in ((64, 2), (128, 1), (256, 2), (192, 4))
    for mods in (
        {"dropout_p": 0.3, "head_dim_v": min(dim, 128)},
        {
            "dropout_p": 0.1,
            "causal": True,
            "dropout_origin": (1, 2, 3, 8),
            "head_dim_v": min(dim, 128),
        },
        {"softcap": 5.0, "causal": True, "head_dim_v": min(dim, 128)},
        {"varlen": "qk", "batch": 4},
        {"varlen": "qk", "batch": 4, "causal": True},
        {"varlen": "qk", "batch": 5, "window": (60, 30)},
        {"varlen": "q", "batch": 3, "causal": True},
        {"varlen": "k", "batch": 3},
    )
]
WIDE = [
    replace(SMALL, **({"head_dim": dim, "head_dim_v": dim_v, "heads_k": heads_k} | mods))
    for dim, dim_v, heads_k in ((256, 256, 2), (192, 192, 1), (192, 128, 4), (136, 200, 2))
    for mods in (
        {},
        {"causal": True},
        {"causal": True, "seqlen_q": 333, "seqlen_k": 200},
        {"window": (60, 30)},
        TILES,
    )
]
# A pair of consumers makes dQ of these, unless packed sequences have a mask.
PAIR = [
    replace(SMALL, **({"head_dim": 192, "head_dim_v": 128, "heads_k": 2} | mods))
    for mods in (
        *({"head_dim": dim, "head_dim_v": dim_v} for dim, dim_v in ((136, 128), (192, 72))),
        *({"head_dim_v": dim_v, "causal": True} for dim_v in (80, 96)),
        *({"window": window, **TILES} for window in ((100, 0), (200, 300), (90, -1))),
        *({"varlen": "qk", "batch": 5} | more for more in ({}, {"causal": True})),
        {"varlen": "q", "batch": 3, "causal": True},
        {"varlen": "k", "batch": 3, "causal": True},
        {"layout": "heads_first", "heads_k": 1},
        {"scale": 8.0, "causal": True},
        {"scale": 1e-30, "causal": True},
        {"sink": True, "lse_grad": True, "causal": True},
    )
]


# Both consumers are one role (launch/bind/hopper_backward.py), in all ways of dealing work tiles.
ONE_ROLE = [
    (replace(SMALL, head_dim=dim, **({"causal": True} | mods | more)), backend)
    for dim in (64, 128)
    for mods in ({"softcap": 5.0}, {"dropout_p": 0.3})
    for more, backend in (
        (TILES, "hopper"),
        (TILES | {"deterministic": True}, "hopper"),
        (TILES | {"deterministic": True}, "hopper+splits=3"),
        (TILES, "hopper+splits=2"),
        ({"varlen": "qk", "batch": 5}, "hopper"),
        ({"varlen": "qk", "batch": 5, "deterministic": True}, "hopper"),
        ({"varlen": "q", "batch": 3}, "hopper"),
        ({"varlen": "k", "batch": 3, "causal": False}, "hopper"),
        ({"seqlen_q": 1300, "seqlen_k": 1500, "window": (200, 30)}, "hopper"),
    )
]
MORE += [
    replace(SMALL, head_dim=dim, head_dim_v=dim_v, dropout_p=0.3, **mods)
    for dim, dim_v in ((256, 256), (192, 192), (136, 200), (192, 128), (96, 96))
    for mods in ({}, {"causal": True}, {"varlen": "qk", "batch": 4})
]


def check(case: Case, backend: str = "hopper") -> None:
    prepared = Prepared(backend)
    run(prepared, case, "cuda")
    assert prepared.plan.backward == "hopper"


@pytest.mark.parametrize("case", twins(CASES, "float16"), ids=str)
def test_gradients_are_within_their_error_budget(case):
    check(case)


@pytest.mark.parametrize("case", twins(MORE, "float16"), ids=str)
def test_gradients_with_dropout_and_of_packed_sequences_are_within_their_budget(case):
    check(case)


@pytest.mark.parametrize("case, backend", ONE_ROLE, ids=str)
def test_gradients_by_one_role_of_both_consumers_are_within_their_budget(case, backend):
    check(case, backend)


@pytest.mark.parametrize("case", twins(WIDE, "float16"), ids=str)
def test_gradients_of_wide_heads_are_within_their_budget(case):
    check(case)


@pytest.mark.parametrize("case", twins(PAIR, "float16"), ids=str)
def test_gradients_of_narrow_values_are_within_their_budget(case):
    check(case)


# Of many work tiles, some without a step.
MANY = [
    replace(BASE, **(TILES | lengths), **mods)
    for lengths in ({}, {"batch": 4, "heads_k": 8, "seqlen_q": 900, "seqlen_k": 700})
    for mods in ({"causal": True}, {}, {"window": (200, 30)}, {"window": (90, -1)})
]
MANY += [replace(BASE, batch=8, heads_q=8, seqlen_q=600, seqlen_k=600, varlen="qk", causal=True)]
VARIANTS = [
    *((dim, f"hopper+draws=1+last_waves={waves}") for dim in (64, 128, 256) for waves in (0, 2)),
    *((dim, "hopper+draws=0+last_waves=0") for dim in (64, 128)),
    *((dim, f"hopper+splits={splits}") for dim in (64, 128) for splits in (2, 5)),
    *((dim, "hopper+splits=2") for dim in (96, 192, 256)),
    # By default under masks of more queries.
    (128, "hopper+dk_in_keys=1"),
]


@pytest.mark.parametrize("case", MANY, ids=str)
@pytest.mark.parametrize("head_dim, backend", VARIANTS)
def test_gradients_of_variants_are_within_their_error_budget(head_dim, backend, case):
    check(replace(case, head_dim=head_dim), backend)


@pytest.mark.parametrize("backend", ["hopper", "hopper+splits=3"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_gradients_in_one_order_are_within_their_budget_and_the_same_in_every_run(
    case, head_dim, backend
):
    case = replace(case, head_dim=head_dim, deterministic=True)
    check(case, backend)
    built, found = build(case, "cuda"), []
    prepared = Prepared(backend)
    for _ in range(20):
        out, lse, _ = prepared.forward(built.problem, built.x, None)
        found.append(prepared.backward(built.problem, built.x, out, lse, built.dout))
    for again in found[1:]:
        for got, want in zip(again, found[0], strict=True):
            assert got is want or torch.equal(got, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@settings(max_examples=20)
@given(data=st.data())
def test_gradients_of_random_lengths_are_within_their_error_budget(head_dim, causal, data):
    draw = data.draw
    heads_k = draw(st.sampled_from((1, 2, 3)))
    check(
        replace(
            BASE,
            head_dim=head_dim,
            causal=causal,
            batch=draw(st.integers(1, 3)),
            heads_k=heads_k,
            heads_q=heads_k * draw(st.sampled_from((1, 2, 5))),
            seqlen_q=draw(st.integers(1, 700)),
            seqlen_k=draw(st.integers(1, 700)),
            window=draw(st.sampled_from(((-1, -1), (70, 0), (200, 30), (-1, 100)))),
        )
    )


def _takes(case: Case) -> bool:
    """Whether the row takes a case, its storage included."""
    own = [v for v in capability.VARIANTS if (v.backend, v.direction) == ("hopper", "backward")]
    return any(not v.why_not(build(case).problem, of_arch("sm_90")) for v in own)


def _random_variants(count: int) -> list[Case]:
    """What the backward is compiled for, of the whole feature product."""
    left_out = {
        "page_size": 0,
        "num_splits": 0,
        "used": "",
        "alibi": "",
        "bias": "",
        "tree_mask": False,
        "leftpad_k": False,
        "kv_batch_idx": False,
        "backward": True,
    }
    drawn = sample(6 * count, seed=5, dtypes=("float16", "bfloat16"))
    found = {str(case): case for case in (replace(v, **left_out) for v in drawn)}
    return [case for case in found.values() if _takes(case)][:count]


# 40 x 50 problems, many tiles of keys and queries and hardly any: some 300 kernels.
RANDOM, EACH = _random_variants(40), 50


def check_random(variant: Case, data) -> None:
    case = data.draw(problems(variant, longest=400).filter(_takes))
    # Few keys would have other forwards.
    check(replace(case, num_splits=1))


@pytest.mark.parametrize("variant", RANDOM[:3], ids=str)
@settings(max_examples=EACH)
@given(data=st.data())
def test_gradients_of_a_random_problem_are_within_their_error_budget(variant, data):
    check_random(variant, data)


@pytest.mark.slow
@pytest.mark.parametrize("variant", RANDOM[3:], ids=str)
@settings(max_examples=EACH)
@given(data=st.data())
def test_gradients_of_two_thousand_random_problems_are_within_their_error_budgets(variant, data):
    check_random(variant, data)


def leaves(*shape: int, count: int = 3, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.randn(count, *shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return [x.clone().requires_grad_() for x in drawn]


def gradients(call, inputs, dout=None) -> list[torch.Tensor]:
    out = call(*inputs)
    return list(torch.autograd.grad(out, inputs, torch.ones_like(out) if dout is None else dout))


def assert_same(got, want) -> None:
    """dk and dv bit for bit; dq but for the order of its sums, which may round otherwise."""
    assert all(torch.equal(a, b) for a, b in zip(got[1:], want[1:], strict=True))
    largest = want[0].abs().max().item()
    assert (got[0] - want[0]).abs().max().item() <= torch.finfo(torch.bfloat16).eps * largest


def attend(q, k, v):
    return heedful.flash_attn_func(q, k, v, causal=True, backend="hopper")


def test_cotangents_that_no_tensor_map_can_have_are_copied():
    inputs = leaves(2, 300, 4, 64)
    dout = torch.randn(1, 300, 1, 64, device="cuda", dtype=torch.bfloat16)
    odd = torch.randn(2, 300, 4, 65, device="cuda", dtype=torch.bfloat16)[..., :64]
    for given_ in (dout.expand(2, 300, 4, 64), odd):
        got = gradients(attend, inputs, given_)
        want = gradients(attend, inputs, given_.contiguous())
        assert_same(got, want)


def test_tensors_restored_with_other_strides_have_the_same_gradients():
    x = torch.randn(2, 300, 3 * 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (want,) = torch.autograd.grad(attend(*x.chunk(3, 2)).sum(), x)
    with torch.autograd.graph.save_on_cpu():
        (got,) = torch.autograd.grad(attend(*x.chunk(3, 2)).sum(), x)
    assert_same(got.chunk(3, 2), want.chunk(3, 2))


def test_keys_and_values_have_the_same_bits_in_every_run():
    """Their sums have one order; those of dq, which key tiles add, may not."""
    inputs = leaves(2, 1000, 8, 128)
    first = gradients(attend, inputs)
    for _ in range(10):
        again = gradients(attend, inputs)
        assert all(torch.equal(a, b) for a, b in zip(first[1:], again[1:], strict=True))


def test_a_captured_backward_computes_anew_in_each_replay():
    inputs = leaves(2, 500, 4, 64)
    gradients(attend, inputs)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        captured = gradients(attend, inputs)
    for seed in (1, 2):
        with torch.no_grad():
            for x, new in zip(inputs, leaves(2, 500, 4, 64, seed=seed), strict=True):
                x.copy_(new)
        graph.replay()
        assert_same(captured, gradients(attend, inputs))


def test_a_compiled_forward_and_backward_are_those_of_eager():
    inputs = leaves(2, 500, 4, 64)
    compiled = torch.compile(attend, fullgraph=True)
    assert_same(gradients(compiled, inputs), gradients(attend, inputs))


def test_a_backward_takes_no_more_memory_than_it_says():
    """Gradients, delta, the sums of dq with whole tiles, those of dk and dv of at most a tile for
    each SM in four splits, and 4 MiB."""
    inputs = leaves(2, 4000, 8, 128)
    q, k, v = inputs
    out = heedful.flash_attn_func(q, k, v, backend="hopper")
    dout = torch.ones_like(out)
    torch.autograd.grad(out, inputs, dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, inputs, dout)
    peak = torch.cuda.max_memory_allocated() - before
    problem = build(BASE).problem
    chosen = plan(
        replace(
            problem,
            batch=2,
            seqlen_q=4000,
            seqlen_k=4000,
            heads_q=8,
            heads_k=8,
            head_dim=128,
            head_dim_v=128,
            needs_grad=True,
        ),
        device_spec(torch.device("cuda")),
        toolchain(),
        "hopper",
    )
    found = chosen.sizes(direction="backward").workspaces
    scratch = sum(w.buffer.nbytes for w in found)
    (partials,) = (w.buffer.nbytes for w in found if w.name == "partials")
    assert partials < 4 * chosen.device.units * 128 * (128 + 128) * 4
    rows = 2 * 4032 * 8
    assert scratch - partials <= rows * 128 * 4 + 2 * 4000 * 8 * 4 + 2**20
    assert peak <= sum(g.numel() * g.element_size() for g in grads) + scratch + 4 * 2**20
