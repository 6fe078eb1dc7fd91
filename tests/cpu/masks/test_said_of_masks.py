"""Masks say to the planner what they are: it cuts rows where documents begin, and takes scattered
lists of tiles one by one. The same results by any entry and transform, and what runs on an H200,
down to a stub of the driver."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

import heedful.torch as heedful
from heedful import masks
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning import plan as planning
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced, named
from heedful.core.registry.capability import Toolchain
from heedful.core.registry.tiles import may_cut_rows
from heedful.masks import BlockMask, Documents
from heedful.torch import explain
from support.runs import standin
from support.runs.api import dense

H200 = by_name("H200")
ROWS = 16384


def inputs(length: int = ROWS) -> list[torch.Tensor]:
    return [torch.zeros(1, length, 16, 128, dtype=torch.bfloat16) for _ in range(3)]


def of_documents(length: int = ROWS, heads: int = 1) -> Documents:
    made = masks.documents(torch.arange(length)[None] // 1000)
    return Documents(made.ranges.expand(1, heads, length, 2).contiguous())


def launched(call, *args) -> list[str]:
    with standin.gpu("H200") as gpu:
        call(*args)
    return [launch.kernel.function for launch in gpu.launches]


def test_documents_are_cut_and_the_same_ranges_as_an_array_are_not():
    q, k, v = (t.requires_grad_() for t in inputs())
    documents = of_documents()

    def both(ranges, **how):
        out = heedful.flash_attn_func(q, k, v, causal=True, key_ranges=ranges, **how)
        torch.autograd.grad(out.sum(), (q, k, v))

    cut = launched(both, documents)
    assert cut.count("cut_rows") == cut.count("part_rows") == cut.count("cut_hulls") == 2
    by_name = launched(lambda ranges: both(ranges, backend="hopper"), documents)
    assert by_name == cut
    assert "cut_rows" not in launched(both, documents.ranges)
    whole = masks.padding(torch.ones(1, ROWS, dtype=torch.bool))
    for ranges in (whole, masks.chunks(4000, ROWS, like=q)):
        assert "cut_rows" not in launched(both, ranges)


def test_other_lengths_of_a_known_call_are_cut_where_that_is_faster():
    """The bound of a known case is a guard: a call of few rows is planned anew."""
    found = []
    for length in (ROWS, 2 * ROWS, 1024, ROWS):
        q, k, v = inputs(length=length)
        args = (q, k, v), of_documents(length)
        call = lambda x, ranges: heedful.flash_attn_func(*x, causal=True, key_ranges=ranges)  # noqa: E731
        found.append(launched(call, *args).count("cut_rows"))
    assert found == [1, 1, 0, 1]


def test_the_gradients_by_hand_are_cut():
    q, k, v = inputs()
    lse = torch.zeros(1, 16, ROWS)
    call = heedful.attention_backward
    names = launched(lambda: call(q, q, k, v, q, lse, causal=True, key_ranges=of_documents()))
    assert names.count("cut_rows") == 1


@pytest.mark.parametrize(
    "facts",
    [
        {"own_ranges": True},
        {"rows_follow": False},
        {"head_dim": 96},
        {"heads_q": 1, "seqlen_q": 1000, "seqlen_k": 1000},
        {"documents": False},
        {"mask": MaskSpec.of(True, (100, 0))},
        {"seqlen_k": 2 * ROWS},
        {"key_ranges": 2},
    ],
    ids=str,
)
def test_rows_are_cut_by_default_where_it_was_measured_alone(facts):
    sizes = {"batch": 1, "seqlen_q": ROWS, "seqlen_k": ROWS, "heads_q": 16}
    usual: Any = {"mask": MaskSpec.of(True), "needs_grad": True, "key_ranges": 1}
    usual |= sizes | {"documents": True}
    for dim in (64, 128):
        made = plan(AttentionProblem.dense(**usual, head_dim=dim), H200)
        assert [getattr(c, "cuts_rows", None) for c in made.configs.values()] == [True] * 2
    made = plan(AttentionProblem.dense(**{**usual, **facts}), H200)
    assert not any(getattr(config, "cuts_rows", False) for config in made.configs.values())
    assert "cuts_rows" not in planning.explain(made) and "cut into" not in planning.explain(made)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "cut"),
    [
        (1, ROWS, 16, [True, True]),
        (1, ROWS - 1, 16, [False, True]),
        (1, 4096, 16, [False, True]),
        (1, 4095, 16, [False, False]),
        (2, ROWS, 16, [False, True]),
        (2, 2048, 16, [False, True]),
        (2, 2047, 16, [False, False]),
    ],
    ids=str,
)
def test_rows_are_cut_forward_from_2_to_the_18_of_one_entry_backward_from_2_to_the_16_of_all(
    batch, length, heads, cut
):
    facts: Any = {"causal": True, "needs_grad": True, "key_ranges": 1, "documents": True}
    problem = AttentionProblem.dense(batch, length, length, heads, **facts)
    configs = plan(problem, H200).configs.values()
    assert [getattr(config, "cuts_rows", None) for config in configs] == cut


@pytest.mark.parametrize(("splits", "cut"), [(0, True), (1, True), (2, False)])
def test_rows_are_cut_of_calls_whose_keys_are_not_split(splits, cut):
    facts: Any = {"causal": True, "key_ranges": 1, "documents": True, "num_splits": splits}
    problem = AttentionProblem.dense(1, ROWS, ROWS, 16, **facts)
    assert may_cut_rows(problem) is cut


def test_a_choice_by_hand_says_itself_whether_rows_are_cut():
    usual: Any = {"causal": True, "needs_grad": True, "key_ranges": 1, "documents": True}
    problem = AttentionProblem.dense(1, ROWS, ROWS, 16, **usual)
    made = plan(problem, H200, backend=forced("hopper+cuts_rows=0"))
    assert not any(getattr(config, "cuts_rows", False) for config in made.configs.values())
    q, k, v = inputs()

    def call(**how):
        return heedful.flash_attn_func(q, k, v, causal=True, key_ranges=of_documents(), **how)

    assert "cut_rows" not in launched(lambda: call(backend=named("hopper", key_splits=1)))


def test_explain_says_which_directions_are_cut():
    q, k, v = (t.requires_grad_() for t in inputs())
    with standin.gpu("H200"):
        words = explain(heedful.flash_attn_func, q, k, v, causal=True, key_ranges=of_documents())
        alone = explain(
            heedful.flash_attn_func, q, k, v, causal=True, key_ranges=of_documents(heads=16)
        )
    assert "key_ranges=1 documents" in words
    assert "rows      forward and backward: cut into packed sequences where they part" in words
    assert words.count("cuts_rows=True") == 2
    assert "cuts_rows" not in alone and "cut into" not in alone


def test_explain_does_not_say_that_split_visits_are_cut():
    facts: Any = {"causal": True, "needs_grad": True, "key_ranges": 1}
    problem = AttentionProblem.dense(1, 2000, 2000, 2, **facts)
    words = planning.explain(plan(problem, H200, backend=forced("hopper+cuts_rows=1")))
    assert "rows      forward: cut" in words and words.count("cuts_rows=True") == 1
    assert "k_blocks" in words


def loss(q, k, v, ranges):
    return heedful.flash_attn_func(q, k, v, key_ranges=ranges, causal=True).square().sum()


def test_vmap_takes_documents_as_a_pytree():
    q, k, v = dense()
    q = q[:, :1].expand(-1, k.shape[1], -1, -1)
    documents = masks.documents(torch.arange(k.shape[1])[None] // 4)
    several = Documents(torch.stack([documents.ranges, documents.ranges - 1]))
    got = vmap(grad(loss), (None, None, None, 0))(q, k, v, several)
    one = [grad(loss)(q, k, v, ranges) for ranges in several.ranges]
    torch.testing.assert_close(got, torch.stack(one))


def test_jax_takes_documents_whose_rows_stay_whole_by_default():
    jax = pytest.importorskip("jax")
    import heedful.jax as in_jax
    from heedful.jax.traced import local

    ids = jax.numpy.arange(12)[None] // 4
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 16))
    documents = masks.documents(ids)
    call = jax.jit(lambda ranges: in_jax.flash_attn_func(q, k, v, causal=True, key_ranges=ranges))
    assert (call(documents) == call(documents.ranges)).all()
    asked = []
    spy = lambda problem, *rest: asked.append(problem) or kept(problem, *rest)  # noqa: E731
    kept, local.plan = local.plan, spy
    try:
        in_jax.flash_attn_func(q * 2, k, v, causal=True, key_ranges=documents)
        in_jax.flash_attn_func(q * 2, k, v, causal=True, key_ranges=documents.ranges)
    finally:
        local.plan = kept
    assert {problem.documents for problem in asked} == {True, False}
    # It has not run on hardware there.
    facts: Any = {"causal": True, "needs_grad": True, "key_ranges": 1, "documents": True}
    problem = AttentionProblem.dense(1, ROWS, ROWS, 16, **facts)
    made = plan(problem, H200, replace(Toolchain(), framework="jax"))
    assert not any(getattr(config, "cuts_rows", False) for config in made.configs.values())


SIZES: Any = {"seqlen_q": 512, "seqlen_k": 512, "side": 64}


def test_lists_are_scattered_where_neighbours_have_little_in_common():
    torch.manual_seed(0)
    tiles = torch.rand(1, 2, 8, 8).argsort(-1)[..., :2]
    counts = torch.full((1, 2, 8), 2)
    assert BlockMask.of_lists(counts, tiles, **SIZES).scattered
    assert not BlockMask.of_lists(counts, tiles, **SIZES, scattered=False).scattered
    place = torch.arange(512)
    window = ((place[:, None] - place).abs() < 150)[None, None]
    own = torch.eye(8)[None, None].bool().repeat_interleave(64, -1).repeat_interleave(64, -2)
    assert not BlockMask.of(window, side=64).scattered
    assert BlockMask.of(own, side=64).scattered
    assert not BlockMask.of(own, side=64, capacity=4).scattered
    wrong: Any = "all"
    with pytest.raises(TypeError, match="^scattered must be a bool"):
        BlockMask.of_lists(counts, tiles, **SIZES, scattered=wrong)


def test_scattered_lists_of_64_keys_have_work_tiles_of_their_own():
    lists = torch.zeros(1, 1, 8, 2, dtype=torch.int32)
    q, k, v = (torch.zeros(1, 512, 2, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    found = {}
    for scattered in (True, False):
        counts = torch.ones(1, 1, 8, dtype=torch.int32)
        mask = BlockMask.of_lists(counts, lists, **SIZES, scattered=scattered)
        with standin.gpu("H200"):
            found[scattered] = explain(heedful.flash_attn_func, q, k, v, block_mask=mask)
        again = pytree.tree_map(lambda x: x, mask)
        assert again.scattered == scattered
    assert "hopper.backward: 64 x 64" in found[True] and "scattered" in found[True]
    assert "hopper.backward: 64 x 64" not in found[False]
    for facts in ({"block_mask": 128}, {"head_dim": 64}):
        usual: Any = {"block_mask": 64, "head_dim": 128, "needs_grad": True, "scattered": True}
        made = plan(AttentionProblem.dense(1, 512, 512, 2, **usual | facts), H200)
        assert made.configs["hopper.backward"].block_n == 128
