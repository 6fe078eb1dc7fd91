"""Parts that are merged on a GPU, its kernel interpreted: see `support.runs.standin`."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import heedful.torch as heedful
from heedful.reference.budget import DRAWS, Error, over_budget
from heedful.torch.api.merge import merged
from support.problems import far_scores
from support.problems.grids import in_turns
from support.runs import standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

# (parts, batch, seqlen, heads, head_dim) or (parts, tokens, heads, head_dim).
SHAPES = ((1, 2, 1, 4, 16), (11, 2, 3, 2, 40), (70, 1, 1, 3, 128), (3, 17, 2, 128))


def names(machine) -> list[str]:
    return [launch.kernel.function for launch in machine.launches]


def drawn(shape, sink: bool, seed: int, dtype=torch.float32):
    """Parts, some of which saw no key for a query, and a query that saw none at all."""
    values = torch.Generator().manual_seed(seed)
    parts, *batch, rows, heads, _ = shape
    outs = torch.randn(shape, generator=values).to(dtype)
    lses = 5 * torch.randn((parts, *batch, heads, rows), generator=values)
    lses[torch.rand(lses.shape, generator=values) < 0.3] = -torch.inf
    if rows > 1:
        lses[..., 0] = -torch.inf
    return outs, lses, torch.randn(heads, generator=values) if sink else None


def exact(outs, lses, sink) -> tuple[torch.Tensor, torch.Tensor]:
    return merged(outs.double(), lses.double(), None if sink is None else sink.double())


def assert_in_budget(got, draw) -> None:
    """At most twice what torch's operations in float32 err, and a rounding of the results."""
    for index, name in enumerate(("out", "lse")):
        want = exact(*draw(0))[index].numpy()
        errors = []
        for seed in range(DRAWS):
            outs, lses, sink = draw(seed)
            twin, truth = (of(outs, lses, sink)[index].double() for of in (merged, exact))
            errors.append(Error.between(twin.numpy(), truth.numpy()))
        worst = errors[0]
        for error in errors[1:]:
            worst = worst.worst(error)
        dtype = str(got[index].dtype).removeprefix("torch.")
        wrong = over_budget(name, got[index].double().numpy(), want, worst, dtype)
        assert not wrong, wrong


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_merge_is_one_launch_and_within_the_budget(shape, sink, dtype):
    """Also of other numbers of a known kind."""
    with standin.gpu(interprets=True) as machine:
        heedful.merge_attn_states(*drawn(shape, sink, 99, dtype))
        out, lse = heedful.merge_attn_states(*drawn(shape, sink, 0, dtype))
    assert names(machine) == ["combine_splits"] * 2
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_in_budget((out, lse), lambda seed: drawn(shape, sink, seed, dtype))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 19, 3, 40), (70, 2, 128), (1, 1, 16)], ids=str)
def test_a_merge_in_place_is_one_launch_and_within_the_budget(shape, dtype):
    """Into rows of larger tensors, from the second on."""

    def draw(seed):
        outs, lses, _ = drawn((2, *shape), False, seed)
        return torch.stack([outs[0], outs[1].to(dtype).float()]), lses, None

    outs, lses, _ = draw(0)
    *lead, rows, heads, dim = shape
    out = torch.full((*lead, rows + 3, heads + 1, dim), torch.nan)
    lse = torch.full((*lead, heads, rows + 3), torch.nan)
    places = out[..., 2 : 2 + rows, :heads, :], lse[..., 2 : 2 + rows]
    for place, value in zip(places, (outs[0], lses[0]), strict=True):
        place.copy_(value)
    with standin.gpu(interprets=True) as machine:
        heedful.merge_into(out[..., :heads, :], lse, outs[1].to(dtype), lses[1], begin=2)
    assert names(machine) == ["merge_part"]
    assert_in_budget(places, draw)
    assert out[..., :2, :, :].isnan().all() and out[..., heads, :].isnan().all()
    assert lse[..., :2].isnan().all() and lse[..., 2 + rows :].isnan().all()


@interpreted
@pytest.mark.parametrize("gpu", [False, True], ids=["torch", "kernel"])
def test_a_part_of_lse_plus_infinity_has_no_keys_as_one_of_minus_infinity(gpu):
    outs, lses, sink = drawn((3, 2, 5, 4, 16), True, 0)
    turned = torch.where(lses == -torch.inf, torch.inf, lses)
    assert (turned == torch.inf).any()
    run = heedful.merge_attn_states if gpu else merged
    with standin.gpu(interprets=True):
        want, got = run(outs, lses, sink), run(outs, turned, sink)
        bare_want, bare_got = run(outs, lses), run(outs, turned)
    for one, other in zip((*got, *bare_got), (*want, *bare_want), strict=True):
        assert torch.equal(one, other) and not one.isnan().any()


@interpreted
def test_parts_of_any_strides_merge_as_dense_ones():
    outs, lses, sink = drawn((3, 2, 5, 4, 16), True, 0)
    apart = torch.zeros(3, 2, 5, 4, 33)[..., 1::2].copy_(outs), lses.mT.contiguous().mT
    with standin.gpu(interprets=True):
        want, got = (heedful.merge_attn_states(*x, sink) for x in ((outs, lses), apart))
        listed = heedful.merge_attn_states(list(outs), list(lses), sink)
    for ours in (got, listed):
        assert torch.equal(ours[0], want[0]) and torch.equal(ours[1], want[1])


@interpreted
def test_gradients_of_a_merge_are_those_of_the_cpu():
    """And what nothing is to be differentiated by is launched, under no_grad too."""

    def leaves():
        outs, lses, sink = drawn((3, 2, 5, 4, 16), True, 0)
        assert sink is not None
        return [t.requires_grad_() for t in (outs, lses, sink)]

    def gradients():
        given = leaves()
        out, lse = heedful.merge_attn_states(*given)
        return torch.autograd.grad(out.sum() + lse.nan_to_num().sum(), given)

    want = gradients()
    with standin.gpu(interprets=True) as machine:
        got = gradients()
        before = len(machine.launches)
        with torch.no_grad():
            heedful.merge_attn_states(*leaves())
    assert names(machine)[before:] == ["combine_splits"]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
def test_a_shared_prefix_costs_its_attention_and_one_merge(given):
    """On the H200: 64 rows and more of a KV head are a prefill's, few are decoded."""
    q, cache = torch.zeros(64, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(64, 512, 2, 128)
    cache, prefix = cache.bfloat16(), torch.zeros(4096, 2, 128, dtype=torch.bfloat16)
    used = torch.full((64,), 512, dtype=torch.int32)
    out = torch.zeros_like(q) if given else None
    with standin.gpu("H200") as machine:
        for _ in range(2):
            before = len(machine.launches)
            got = heedful.flash_attn_with_kvcache(
                q, cache, cache.clone(), cache_seqlens=used, shared_prefix=(prefix, prefix), out=out
            )
            launched = names(machine)[before:]
            assert (got is out) == given
            assert launched[-1] == "combine_splits" and launched[0] == "decode", launched
            assert "attention_forward" in launched or "forward" in " ".join(launched), launched
            assert len(launched) <= 4, launched


WIDE, NARROW = far_scores.prefix_grid("float32"), far_scores.prefix_grid("float16")
FAR = [*WIDE, *NARROW, *far_scores.prefixed_latents()]


def by_shared_prefix(problem, **more):
    """As `far_scores.by_shared_prefix`, by the kernels of a GPU."""

    def results(built):
        with standin.gpu(interprets=True, tiles=(16, 16)):
            return far_scores.by_shared_prefix(problem.prefix, **more)(built)

    return results


@interpreted
@pytest.mark.parametrize("problem", in_turns(FAR, each=2), ids=str)
def test_far_rows_of_a_shared_prefix_are_merged_within_the_budget(problem):
    """Of a float32 kind the portable forward attends, of a float16 one the decode kernel: neither
    result's log-sum-exp alone tells how it weighs."""
    far_scores.check(problem, by_shared_prefix(problem))


@interpreted
@pytest.mark.parametrize("problem", (WIDE[2], NARROW[-2], NARROW[-1]), ids=str)
def test_far_rows_of_a_traced_shared_prefix_are_merged_within_the_budget(problem):
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def results(built):
        with Seen():
            return by_shared_prefix(problem)(built)

    far_scores.check(problem, results)
    assert torch.ops.heedful.prefixed_attention_v10.default in seen


@pytest.mark.parametrize("mapped", range(3), ids=["outs", "lses", "sink"])
def test_parts_under_a_transform_are_merged_by_torchs_operations(mapped):
    given: list[Any] = [*drawn((3, 2, 5, 4, 16), True, 0)]
    given[mapped] = torch.stack([given[mapped], 2 * given[mapped]])
    dims = tuple(0 if index == mapped else None for index in range(3))
    with standin.gpu() as machine:
        results = torch.vmap(heedful.merge_attn_states, in_dims=dims)(*given)
        assert not machine.launches
    wanted = torch.vmap(merged, in_dims=dims)(*given)
    assert all(torch.equal(*pair) for pair in zip(results, wanted, strict=True))


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
