"""Which ranks read each other's memory, why others cannot, and how much memory there is. The other
ranks and the GPUs are stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heedful.distributed import peers as module

# Stand-ins are no groups.
peers: Any = module
MIB = 2**20
HERE = torch.device("cpu", 0)


@pytest.fixture
def others(monkeypatch):
    """What the one other rank says: facts of its GPU to all, and to each reduction a tensor."""
    said = SimpleNamespace(facts=[1, 2], reductions=[], reaches=True, seen=2, asked=[])

    def gather(into, mine, group=None):
        for tensor, facts in zip(into, (mine.tolist(), said.facts), strict=True):
            tensor.copy_(torch.tensor(facts))

    def reduce(told, op, group=None):
        other = said.reductions.pop(0)(told)
        join = torch.maximum if op == dist.ReduceOp.MAX else torch.minimum
        told.copy_(join(told, other))

    def reaches(one, other):
        said.asked.append((one, other))
        return said.reaches

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: said.seen)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    return said


def test_ranks_are_on_one_host_where_their_names_of_it_are_the_same(others):
    step = torch.tensor([1, -1])
    for other, is_same in ((0, True), (step, False), (-step, False)):
        others.reductions = [lambda told, other=other: told + other]
        assert peers._is_one_host(dist.group.WORLD, HERE) is is_same


@pytest.mark.parametrize(
    "change, why",
    [
        ({}, ""),
        ({"seen": 3, "facts": [1, 3]}, ""),
        ({"facts": [0, 2]}, "ranks do not see all GPUs of the group"),
        ({"facts": [1, 1]}, "ranks do not see all GPUs of the group"),
        ({"seen": 1}, "ranks do not see all GPUs of the group"),
        ({"reaches": False}, "a GPU cannot read the memory of another"),
        ({"other reaches": False}, "a GPU cannot read the memory of another"),
        ({"same host": False}, "ranks are on several hosts"),
    ],
    ids=str,
)
def test_ranks_say_why_they_cannot_read_each_others_memory(others, change, why):
    of_host = (lambda told: told) if change.get("same host", True) else (lambda told: told + 1)
    reached = torch.tensor(int(change.get("other reaches", True)))
    others.reductions = [of_host, lambda told: reached]
    vars(others).update({name: value for name, value in change.items() if " " not in name})
    assert peers._why_not(dist.group.WORLD, HERE) == why
    assert set(others.asked) <= {(0, 1)}
    assert others.asked or why not in ("", "a GPU cannot read the memory of another")


@pytest.fixture
def gpus(monkeypatch):
    """Ranks that are GPUs under NCCL; why: what they answer when they are asked."""
    made = SimpleNamespace(backend="nccl", why="", asked=[])

    def why_not(group, device):
        made.asked.append((group, device))
        return made.why

    monkeypatch.setattr(peers, "_HAS_SYMMETRIC", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: made.backend)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="all"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(peers, "_why_not", why_not)
    monkeypatch.setattr(peers, "_KNOWN", {})
    monkeypatch.setattr(peers, "_REFUSED", {})
    monkeypatch.setattr(peers, "Peers", lambda *facts: SimpleNamespace(facts=facts, size=facts[2]))
    return made


def test_memory_that_is_too_small_is_followed_by_twice_as_much_and_else_kept(gpus):
    sizes = {1: 2, 2 * MIB: 2, 2 * MIB + 1: 4, 9 * MIB: 10, 4 * MIB: 10, 11 * MIB: 20}
    last = None
    for size, mib in sizes.items():
        found, why = peers.peers_of(None, size)
        assert (found.size, why) == (mib * MIB, "") and found.facts[0] == "all"
        assert found.facts[1] == torch.device("cuda", 3)
        assert last is None or (found is last) == (found.size == last.size)
        last = found
    other, _ = peers.peers_of("some", 1)
    assert other.size == 2 * MIB and other.facts[0] == "some"
    assert gpus.asked == [(group, torch.device("cuda", 3)) for group in ("all", "some")]


def test_where_ranks_share_no_memory_it_is_said_and_asked_once(gpus, monkeypatch):
    assert peers.peers_of(None, 0) == (None, "")
    gpus.why = "so"
    assert peers.peers_of(None, 5) == peers.peers_of(None, 6) == (None, "so")
    assert len(gpus.asked) == 1
    words = "ranks are not GPUs of NVIDIA's under NCCL with torch's symmetric memory but under "
    for change in ("gloo", "hip", "symmetric"):
        with monkeypatch.context() as patch:
            if change == "gloo":
                patch.setattr(gpus, "backend", "gloo")
            elif change == "hip":
                patch.setattr(torch.version, "hip", "7.2")
            else:
                patch.setattr(peers, "_HAS_SYMMETRIC", False)
            assert peers.peers_of(None, 0) == (None, words + gpus.backend)
