"""A step of decoding whose keys are spread over ranks is the step of one rank that has them all."""

from typing import Any

import pytest
import torch

from heedful.distributed import attention_with_kvcache, decode
from support.distributed.decoding import DIM, HEADS, HEADS_K, stepped
from support.runs.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "owner", "has_sink", "pages"),
    [(1, 0, False, 0), (1, 2, True, 0), (4, 1, True, 0), (3, 2, False, 16), (2, None, False, 0)],
)
def test_a_step_is_that_of_one_cache(ranks, tokens, owner, has_sink, pages, name):
    for out, lse in ranks.run(stepped, tokens, owner, has_sink, pages, name):
        # float32 sums in another order, three parts of them; else one rounding of out.
        assert out <= (8 if name == "float32" else 1)
        assert lse <= 8


def refused(rank: int, count: int, more: dict[str, Any]) -> str:
    """What is said, without any transfer: only rank 0 calls it."""
    if rank:
        return ""
    q, cache = torch.zeros(1, 1, HEADS, DIM), torch.zeros(1, 8, HEADS_K, DIM)
    arguments: dict[str, Any] = {"q": q, "k_cache": cache, "v_cache": cache.clone()} | more
    with pytest.raises((TypeError, ValueError)) as caught:
        attention_with_kvcache(**arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"owner": 3}, "owner must be a rank of the group from 0 to 2, got 3"),
        ({"owner": 0}, "k and v must be tensors on rank 0, the owner"),
        ({"k": torch.zeros(1, 1, HEADS_K, DIM)}, "owner must be a rank where k and v"),
        ({"q": [1.0]}, "q must be a torch.Tensor, got list"),
        ({"v_cache": torch.zeros(9)}, "v_cache must have 4 dims, got shape (9,)"),
        ({"return_lse": "yes"}, "return_lse must be a bool, got str"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(ranks, more, said):
    found, *_ = ranks.run(refused, more)
    assert said in found


# Arguments that a rank hands on as they come.
HANDED_ON = ("cache_seqlens", "cache_batch_idx", "block_table", "softmax_scale", "softcap")
HANDED_ON += ("k_descale", "v_descale", "backend")


@pytest.mark.parametrize(("rank", "owner"), [(0, 0), (1, 0), (0, 1), (1, None)])
def test_a_rank_calls_its_part_with_all_that_is_told(rank, owner, monkeypatch):
    """The owner alone appends, under a causal mask, and rank 0 alone has the sink. Parts are put
    together in the order of ranks."""
    group: Any = object()
    told: dict[str, Any] = {name: object() for name in HANDED_ON} | {"sink": object()}
    q, part = torch.zeros(2, 3, 4, 16, dtype=torch.bfloat16), torch.zeros(2, 9, 2, 8)
    new = {} if owner is None else {"k": torch.ones(2, 3, 2, 16), "v": torch.ones(2, 3, 2, 8)}
    asked: list[Any] = []

    def attend(*tensors: Any, out: torch.Tensor, **named: Any):
        asked.append((tensors, named))
        assert (out.shape, out.dtype) == ((2, 3, 4, 8), torch.float32)
        out.copy_(torch.arange(2 * 3 * 4 * 8).view(out.shape))
        return out, torch.arange(2.0 * 3 * 4).view(2, 4, 3) / 9

    def gather(every: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        asked.append(group)
        every.view(2, -1)[0], every.view(2, -1)[1] = mine, mine + 1

    def merge(outs: torch.Tensor, lses: torch.Tensor):
        asked.append((outs, lses))
        return outs[1], lses[1]

    for name, value in (("get_rank", rank), ("get_world_size", 2)):
        monkeypatch.setattr(decode.dist, name, lambda of, value=value: asked.append(of) or value)
    monkeypatch.setattr(decode, "flash_attn_with_kvcache", attend)
    monkeypatch.setattr(decode, "_all_gather", gather)
    monkeypatch.setattr(decode, "merge_attn_states", merge)
    options: Any = {"group": group, "owner": owner, **new, **told}
    out, lse = attention_with_kvcache(q, part, part + 1, return_lse=True, **options)
    *groups, (tensors, named), of, (outs, lses) = asked
    assert groups == [group, group] and of is group
    appends = owner == rank
    assert tensors[0] is q and tensors[1] is part and torch.equal(tensors[2], part + 1)
    assert [*tensors[3:]] == ([new["k"], new["v"]] if appends else [None, None])
    wanted = {name: told[name] for name in HANDED_ON} | {"return_softmax_lse": True}
    wanted |= {"causal": appends, "sink": told["sink"] if rank == 0 else None}
    assert named == wanted
    first = torch.arange(2.0 * 3 * 4 * 8).view(2, 3, 4, 8)
    rows = torch.arange(2.0 * 3 * 4).view(2, 4, 3) / 9
    assert torch.equal(outs, torch.stack([first, first + 1]))
    assert torch.equal(lses, torch.stack([rows, rows + 1]))
    assert torch.equal(out, (first + 1).bfloat16()) and torch.equal(lse, rows + 1)
    alone = attention_with_kvcache(q, part, part + 1, **options)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, out)
