"""What GPUs compute of their part of a batch is what the oracle computes of the whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from heedful import flash_attn_varlen_func
from heedful.bench.parallel import captured
from heedful.distributed import attention, plan
from support.distributed.context import CASES, computed
from support.distributed.decoding import stepped
from support.problems import budget
from support.problems.cases import build
from support.runs.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WAYS = [
    ("gather", "zigzag"),
    ("gather", "documents"),
    ("heads", "documents"),
    ("ring", "zigzag"),
    ("ring", "documents"),
    ("copy", "zigzag"),
    ("copy", "documents"),
    pytest.param(
        "heads x ring",
        "documents",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(torch.cuda.device_count(), tmp_path_factory.mktemp("ranks"), 120.0, "nccl")
    yield made
    made.close()


@pytest.mark.parametrize(("strategy", "layout"), WAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dim", [64, 128])
def test_gpus_compute_what_the_oracle_does(ranks, name, dim, strategy, layout):
    case = replace(CASES[name], head_dim=dim, head_dim_v=dim, dtype="bfloat16")
    found, *_ = ranks.run(computed, case, strategy, layout, "cuda")
    budget.check(build(case), found)


def replayed(rank: int, count: int, strategy: str, lengths: list[int]) -> list[bool]:
    """Whether a graph that was captured with other values gives the bits of one captured with
    these. A call's may differ: it may send all heads at once."""
    by: dict[str, Any] = {"strategy": strategy, "transport": "send"}
    if strategy == "copy":
        by = {"transport": "copy"}
    made = plan(lengths=lengths, heads_q=16, heads_k=8, head_dim=64, **by)
    shapes = [(made.tokens, heads, 64) for heads in (16, 8, 8, 16)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    kept: list[tuple[torch.Tensor, ...]] = []

    def step() -> None:
        out = attention(q, k, v, made, causal=True, deterministic=True)
        kept[:] = [(out.detach(), *torch.autograd.grad(out, leaves, dout))]

    replay = captured(step)
    found = kept[0]
    for x in (*leaves, dout):
        x.data.normal_()
    replay()
    captured(step)()
    return [torch.equal(x, y) for x, y in zip(found, kept[0], strict=True)]


@pytest.mark.parametrize("strategy", ["gather", "heads", "ring", "copy"])
@pytest.mark.parametrize("lengths", [[16384], [9000, 400, 2000, 3000, 1984]], ids=["one", "five"])
def test_a_replayed_graph_gives_the_bits_of_another(ranks, strategy, lengths):
    for found in ranks.run(replayed, strategy, lengths):
        assert all(found)


def repeated(rank: int, count: int, facts: dict[str, Any], window: tuple[int, int]) -> list[bool]:
    """Whether calls that come again, whose kernels are bound to memory of theirs, have the bits of
    the first. Other values lie elsewhere meanwhile."""
    made = plan(heads_q=16, heads_k=8, head_dim=64, window_size=window, transport="copy", **facts)
    shapes = [(made.tokens, heads, 64) for heads in (16, 8, 8)]
    rows = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]

    def both(q, k, v) -> tuple[torch.Tensor, ...]:
        return attention(q, k, v, made, causal=True, window_size=window, return_lse=True)

    with torch.no_grad():
        first = both(*rows)
        for _ in range(3):
            both(*map(torch.randn_like, rows))
        assert made.recent
        again = both(*(x.clone() for x in rows))
    return [torch.equal(x, y) for x, y in zip(first, again, strict=True)]


@pytest.mark.parametrize(
    ("lengths", "window"),
    [([16384], (-1, 0)), ([16384], (512, 0)), ([9000, 400, 2000, 3000, 1984], (-1, 0))],
    ids=["one", "window", "five"],
)
def test_calls_that_come_again_give_the_bits_of_the_first(ranks, lengths, window):
    for found in ranks.run(repeated, {"lengths": lengths}, window):
        assert all(found)


def invariant(
    rank: int, count: int, strategy: str, lengths: list[int], window: tuple[int, int]
) -> list[bool]:
    """Whether out and lse have the bits of a call of the whole batch; last, whether those of a call
    by other numerics differ."""
    by: dict[str, Any] = {"strategy": strategy}
    if strategy in ("copy", "send"):
        by = {"strategy": "gather", "transport": strategy}
    shape = {"heads_q": 8, "heads_k": 4, "head_dim": 128}
    made = plan(lengths=lengths, window_size=window, **shape, **by)
    torch.manual_seed(0)
    shapes = [(sum(lengths), heads, 128) for heads in (8, 4, 4)]
    whole: Any = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    given: Any = *whole, ends, ends, max(lengths), max(lengths)
    options: dict[str, Any] = {"causal": True, "window_size": window, "return_lse": True}
    with torch.no_grad():
        out, lse = flash_attn_varlen_func(*given, **options, numerics="invariant")
        fast, _ = flash_attn_varlen_func(*given, **options)
        mine: Any = *(made.shard(x) for x in whole), made
        for _ in range(2):
            found, found_lse = attention(*mine, **options, numerics="invariant")
    same = [torch.equal(found, made.shard(out)), torch.equal(found_lse, made.shard(lse, dim=1))]
    return [*same, not torch.equal(fast, out)]


ONE, WINDOW, FOUR = ([20000], (-1, 0)), ([40000], (1000, 0)), ([20000, 700, 1, 3000], (-1, 0))


@pytest.mark.parametrize(
    ("strategy", "lengths", "window"),
    [(strategy, *each) for strategy in ("copy", "send", "heads") for each in (ONE, WINDOW, FOUR)],
)
def test_invariant_numerics_give_the_bits_of_the_whole_batch(ranks, strategy, lengths, window):
    found = ranks.run(invariant, strategy, lengths, window)
    # A window of few keys may have no border of parts in which other numerics would differ.
    assert all(out and lse for out, lse, _ in found)
    assert window[0] > 0 or all(differs for *_, differs in found)


@pytest.mark.parametrize(
    ("tokens", "owner", "has_sink", "pages"), [(1, 0, True, 0), (4, 1, False, 16)]
)
def test_a_step_over_caches_of_gpus_is_that_of_one_cache(ranks, tokens, owner, has_sink, pages):
    for out, lse in ranks.run(stepped, tokens, owner, has_sink, pages, "bfloat16", "cuda"):
        # Parts are float32, and out is rounded once. Log-sum-exps are of rounded q and k.
        assert out <= 1 and lse <= 8
