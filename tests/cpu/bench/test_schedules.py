"""The schedules of others, which are timed beside ours, compute the whole's attention."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from heedful import flash_attn_varlen_func
from heedful.bench.harness import schedules
from heedful.bench.harness.schedules import PEERS
from support.runs.ranks import Ranks

HEADS, HEADS_K, DIM = 8, 4, 16


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def apart(rank: int, count: int, name: str, lengths: list[int], window: int) -> float:
    """The largest difference of out and gradients from those of one call."""
    made = PEERS[name](lengths, window)
    drawn = torch.Generator().manual_seed(0)
    counts = HEADS, HEADS_K, HEADS_K, HEADS
    q, k, v, dout = (torch.randn(sum(lengths), n, DIM, generator=drawn) for n in counts)
    whole = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    more: Any = {"causal": True, "window_size": (window, 0)}
    want = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, **more)
    wanted = [want, *torch.autograd.grad(want, whole, dout)]
    leaves = [made.shard(x.detach()).requires_grad_() for x in whole]
    out = made.call(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, made.shard(dout))]
    pairs = zip(map(made.unshard, found), wanted, strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "lengths", "window"),
    [
        ("zigzag", [512], -1),
        ("llama3", [512], -1),
        ("llama3", [100, 300, 1, 111], -1),
        ("llama3", [512], 70),
        ("torch", [512], -1),
    ],
)
def test_a_peers_schedule_is_right(ranks, name, lengths, window):
    # float32 of order 1, in another order of sums.
    assert max(ranks.run(apart, name, lengths, window)) < 2e-5


def refused(rank: int, count: int, name: str, lengths: list[int], window: int) -> str:
    with pytest.raises(ValueError) as caught:
        PEERS[name](lengths, window)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "lengths", "window"),
    [("zigzag", [512, 8], -1), ("zigzag", [512], 9), ("llama3", [5], -1), ("torch", [512], 9)],
)
def test_what_a_peer_does_not_take_is_refused(ranks, name, lengths, window):
    for said in ranks.run(refused, name, lengths, window):
        assert said.startswith(f"{name.replace('torch', 'zigzag')} takes")


@pytest.fixture
def alone(monkeypatch):
    """One rank, without a process group."""
    monkeypatch.setattr(schedules.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(schedules.dist, "get_world_size", lambda: 1)


def test_a_peer_that_is_not_installed_says_so(alone, monkeypatch):
    looked: list[str] = []
    monkeypatch.setattr(schedules, "find_spec", looked.append)
    with pytest.raises(ValueError, match=r"^transformer_engine is not installed$"):
        PEERS["te"]([512], -1)
    assert looked == ["transformer_engine"]


def test_transformer_engine_is_asked_for_its_own_ring_once(alone, monkeypatch):
    asked: list[Any] = []

    class Attention:
        def __init__(self, *given, **more):
            asked.append((given, more))

        def set_context_parallel_group(self, *given):
            asked.append(given)

        def __call__(self, q, k, v, **more):
            assert q.shape[0] == k.shape[0] == v.shape[0] == 1 and more == {"qkv_format": "bshd"}
            return (q * 2).flatten(2)

    modules = {"transformer_engine.pytorch": SimpleNamespace(DotProductAttention=Attention)}
    monkeypatch.setattr(schedules, "find_spec", lambda name: name)
    monkeypatch.setattr(schedules, "import_module", modules.__getitem__)
    monkeypatch.setattr(schedules.torch.cuda, "Stream", lambda: "a stream")
    made = PEERS["te"]([8], -1)
    q, kv = torch.randn(8, HEADS, DIM), torch.randn(8, HEADS_K, DIM)
    assert torch.equal(made.call(q, kv, kv), q * 2) and torch.equal(made.call(q, kv, kv), q * 2)
    given = {"num_gqa_groups": HEADS_K, "attn_mask_type": "causal"}
    assert asked == [((HEADS, DIM), given), (dist.group.WORLD, [0], "a stream", "p2p")]
