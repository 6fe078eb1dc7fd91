"""The picture of docs/masks.md shows what calls compute: each mask is drawn from a definition,
which is held against the call that is named there."""

from collections.abc import Callable
from xml.etree import ElementTree

import pytest
import torch

import draw_masks
import heedful.torch as heedful
from draw_masks import ANSWERS, DOCUMENTS, KINDS, LISTS, PARENTS, SIDE
from heedful import BlockMask, masks

LIKE = torch.zeros(1)
N = 24


def lists() -> BlockMask:
    counts = torch.tensor([[[len(tiles) for tiles in LISTS]]])
    tiles = torch.tensor([[[[*tiles, 0, 0][:3] for tiles in LISTS]]])
    length = len(LISTS) * SIDE
    return BlockMask.of_lists(counts, tiles, seqlen_q=length, seqlen_k=length, side=SIDE)


def neighbours() -> BlockMask:
    columns = draw_masks.IMAGE[1]

    def sees(b, h, i, j):
        rows = (i // columns - j // columns).abs() <= 1
        return rows & ((i % columns - j % columns).abs() <= 2)

    return BlockMask.of(sees, seqlen_q=96, seqlen_k=96, side=SIDE, like=LIKE)


def documents() -> masks.Documents:
    place = torch.arange(N)
    return masks.documents((place[:, None] >= torch.tensor(DOCUMENTS)).sum(-1)[None])


def shared_question() -> torch.Tensor:
    question, second, end = ANSWERS
    rows = [end] * question + [second] * (second - question) + [end] * (end - second)
    return masks.from_flashmask(torch.tensor(rows)[None, None, :, None])


def tree() -> torch.Tensor:
    seen = torch.eye(len(PARENTS), dtype=torch.bool)
    for token, parent in enumerate(PARENTS):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen[None]


CALLS: dict[str, Callable[[], dict]] = {
    "causal": lambda: {"causal": True},
    "window": lambda: {"window_size": (5, 0)},
    "documents": lambda: {"causal": True, "key_ranges": documents()},
    "prefix": lambda: {"key_ranges": masks.prefix(torch.tensor([8]), N)},
    "chunks": lambda: {"key_ranges": masks.chunks(6, N, like=LIKE)},
    "padding": lambda: {
        "causal": True,
        "key_ranges": masks.padding(torch.arange(N)[None] >= 5),
    },
    "local and global": lambda: {"key_ranges": masks.local_global(4, 3, N, like=LIKE)},
    "shared question": lambda: {"causal": True, "key_ranges": shared_question()},
    "neighbours of a patch": lambda: {"block_mask": neighbours()},
    "lists of tiles": lambda: {"block_mask": lists()},
    "tree of a draft": lambda: {"tree_mask": tree()},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_mask_is_drawn_as_the_call_sees_it(kind):
    q, k = (torch.zeros(1, n, 1, 8) for n in (kind.queries, kind.keys))
    # Values of one each: the output of a query is what each key weighs.
    v = torch.eye(kind.keys)[None, :, None]
    more = CALLS[kind.name]()
    is_cached = "tree_mask" in more
    call = heedful.flash_attn_with_kvcache if is_cached else heedful.flash_attn_func
    seen = call(q, k, v, **more)[0, :, 0] > 0
    drawn = [[kind.sees(i, j) for j in range(kind.keys)] for i in range(kind.queries)]
    assert seen.tolist() == drawn


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_coloured_is_what_is_seen(kind):
    coloured = torch.zeros(kind.queries, kind.keys, dtype=torch.int32)
    for x, y, width, height in draw_masks._runs(kind.sees, kind.queries, kind.keys):
        coloured[y : y + height, x : x + width] += 1
    drawn = [[int(kind.sees(i, j)) for j in range(kind.keys)] for i in range(kind.queries)]
    assert coloured.tolist() == drawn


@pytest.mark.parametrize("name, text", draw_masks.pictures().items())
def test_a_picture_names_every_kind_and_is_well_formed(name, text):
    words = {element.text for element in ElementTree.fromstring(text).iter()}
    assert words >= {kind.name for kind in KINDS} | {kind.words for kind in KINDS}
