"""A step of decoding whose keys are spread over ranks is the step of one rank that has them all."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heedful import flash_attn_with_kvcache
from heedful.distributed import attention_with_kvcache
from support.runs.ranks import Ranks

HEADS, HEADS_K, DIM, CAPACITY = 8, 2, 16, 128
# Keys of each sequence on each of three ranks.
HELD = torch.tensor([[40, 0, 0, 7], [13, 90, 0, 0], [64, 5, 0, 1]], dtype=torch.int32)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def drawn(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What all ranks have together."""
    source, batch = torch.Generator().manual_seed(0), HELD.shape[1]
    shapes = {
        "q": (batch, tokens, HEADS, DIM),
        "k": (batch, tokens, HEADS_K, DIM),
        "v": (batch, tokens, HEADS_K, DIM),
        "caches": (2, len(HELD), batch, CAPACITY, HEADS_K, DIM),
    }
    return {name: torch.randn(shape, generator=source).to(dtype) for name, shape in shapes.items()}


def one_cache(parts: Tensor) -> Tensor:
    """Each sequence's keys one after the other. parts: (ranks, batch, capacity, heads, dim)."""
    whole = parts.new_zeros((parts.shape[1], len(HELD) * CAPACITY, *parts.shape[3:]))
    for row, counts in enumerate(HELD.T.tolist()):
        held = torch.cat([part[row, :count] for part, count in zip(parts, counts, strict=True)])
        whole[row, : len(held)] = held
    return whole


def paged(cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pages of a cache, and their block table, in another order."""
    pages = cache.view(-1, size, *cache.shape[2:])
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(1))
    table = torch.argsort(order).int().view(cache.shape[0], -1)
    return pages[order].contiguous(), table


def stepped(
    rank: int, count: int, tokens: int, owner: int | None, has_sink: bool, pages: int, name: str
) -> list[float]:
    """How far out, lse and what is appended are from those of one rank, in units of the dtype's
    rounding of the largest value."""
    dtype = getattr(torch, name)
    x = drawn(tokens, dtype)
    sink = torch.linspace(-1, 2, HEADS) if has_sink else None
    whole = [one_cache(parts) for parts in x["caches"]]
    new = {} if owner is None else {"k": x["k"], "v": x["v"]}
    want, want_lse = flash_attn_with_kvcache(
        x["q"].float(),
        *(cache.float() for cache in whole),
        **{side: rows.float() for side, rows in new.items()},
        cache_seqlens=HELD.sum(0).int(),
        causal=owner is not None,
        sink=sink,
        return_softmax_lse=True,
    )
    k_cache, v_cache = mine = [parts[rank].clone() for parts in x["caches"]]
    more: dict[str, Any] = {}
    if pages:
        k_cache, more["block_table"] = paged(k_cache, pages)
        v_cache, _ = paged(v_cache, pages)
    given = new if rank == owner else {}
    out, lse = attention_with_kvcache(
        x["q"],
        k_cache,
        v_cache,
        **given,
        owner=owner,
        cache_seqlens=HELD[rank],
        sink=sink,
        return_lse=True,
        **more,
    )
    assert out.dtype == dtype
    if rank == owner and not pages:
        for cache, rows in zip(mine, (x["k"], x["v"]), strict=True):
            for row, length in enumerate(HELD[rank].tolist()):
                assert torch.equal(cache[row, length : length + tokens], rows[row])
    eps = torch.finfo(dtype).eps
    pairs = (out, want), (lse, want_lse)
    # Rows without keys have -inf in both.
    return [
        float((a.float() - b).nan_to_num(0.0, posinf=9e9, neginf=9e9).abs().max())
        / float(b.nan_to_num(neginf=0.0).abs().max())
        / eps
        for a, b in pairs
    ]


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
    with pytest.raises(ValueError) as caught:
        attention_with_kvcache(q, cache, cache.clone(), **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"owner": 3}, "owner must be a rank of the group from 0 to 2, got 3"),
        ({"owner": 0}, "k and v must be tensors on rank 0, the owner"),
        ({"k": torch.zeros(1, 1, HEADS_K, DIM)}, "owner must be a rank where k and v"),
    ],
)
def test_an_owner_is_checked_before_anything_is_sent(ranks, more, said):
    found, *_ = ranks.run(refused, more)
    assert said in found
