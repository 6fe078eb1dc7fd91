"""Parts that are merged on a GPU: budgets, captured graphs, and steps over a shared prefix."""

import pytest
import torch

import heedful.torch as heedful
from heedful.reference.budget import DRAWS, Error, over_budget
from heedful.torch.api.merge import merged
from support.captures import graph_capture
from support.problems.merges import SIZES, largest_share, parts_near

pytestmark = pytest.mark.gpu


def drawn(shape, seed: int, dtype=torch.float32):
    """Parts, some of which saw no key for a query."""
    values = torch.Generator().manual_seed(seed)
    parts, *batch, rows, heads, _ = shape
    outs = torch.randn(shape, generator=values).to(dtype)
    lses = 5 * torch.randn((parts, *batch, heads, rows), generator=values)
    lses[torch.rand(lses.shape, generator=values) < 0.3] = -torch.inf
    return outs, lses, torch.randn(heads, generator=values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 64, 1, 32, 128), (70, 2, 1, 8, 128), (9, 2, 37, 4, 72), (5, 331, 4, 512)], ids=str
)
def test_a_merge_is_within_its_error_budget(shape, dtype):
    given = [t.cuda() for t in drawn(shape, 0, dtype)]
    for index, got in enumerate(heedful.merge_attn_states(*given)):
        truths, errors = [], []
        for seed in range(DRAWS):
            outs, lses, sink = drawn(shape, seed, dtype)
            truth = merged(outs.double(), lses.double(), sink.double())[index]
            twin = merged(outs, lses, sink)[index].double()
            truths.append(truth.numpy())
            errors.append(Error.between(twin.numpy(), truth.numpy()))
        worst = errors[0]
        for error in errors[1:]:
            worst = worst.worst(error)
        name, kind = ("out", "lse")[index], str(got.dtype).removeprefix("torch.")
        wrong = over_budget(name, got.cpu().double().numpy(), truths[0], worst, kind)
        assert not wrong, wrong


@pytest.mark.parametrize("size", SIZES)
def test_a_merge_errs_by_no_more_than_its_bound(size):
    parts = parts_near(size, (7, 300, 8, 128))
    out, lse = heedful.merge_attn_states(parts.outs.cuda(), parts.lses.cuda())
    largest_share(parts, out, lse)


def test_a_captured_merge_reads_its_parts_anew():
    outs, lses, sink = (t.cuda() for t in drawn((3, 4, 1, 8, 128), 0))
    heedful.merge_attn_states(outs, lses, sink)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        got = heedful.merge_attn_states(outs, lses, sink)
    for t, new in zip((outs, lses, sink), drawn((3, 4, 1, 8, 128), 1), strict=True):
        t.copy_(new)
    graph.replay()
    want = heedful.merge_attn_states(outs, lses, sink)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
