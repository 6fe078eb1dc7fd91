"""Rows of a padded batch say how much of them is used; the rest is never read."""

from itertools import product
from typing import Any

import pytest
import torch

import heedful.torch as heedful
from support.problems.grids import slow_but
from support.runs.api import compiled

LENGTHS = torch.tensor([5, 8], dtype=torch.int32)


def batch() -> Any:
    torch.manual_seed(0)
    return torch.randn(3, 2, 8, 4, 16)


def of_rows(keep, function=heedful.flash_attn_func, **more) -> list[tuple[Any, ...]]:
    """(out, lse, dq, dk, dv) of each row by itself, of what `keep` takes of it."""
    found = []
    for index, row in enumerate(batch().unbind(1)):
        q, k, v = (keep(t, index)[None].clone().requires_grad_() for t in row)
        out, lse = function(q, k, v, causal=True, return_lse=True, **more)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
        found.append((out, lse.transpose(1, 2), *grads))
    return found


@pytest.mark.parametrize(
    "left, traced",
    slow_but({(False, False), (True, False), (True, True)}, product((False, True), repeat=2)),
)
def test_a_padded_batch_is_each_of_its_rows_without_the_padding(left, traced):
    """Queries and keys are padded alike, with NaN."""
    q, k, v = batch().unbind()
    used = torch.arange(8) < LENGTHS[:, None]
    used = used.flip(1) if left else used
    q, k, v = (t.masked_fill(~used[..., None, None], torch.nan).requires_grad_() for t in (q, k, v))
    lengths: dict[str, Any] = {"seqused_q": LENGTHS, "seqused_k": LENGTHS}
    if left:
        # Queries of padding see no key: what they hold is of no account if it is a number.
        q = q.detach().nan_to_num().requires_grad_()
        lengths = {"leftpad_k": 8 - LENGTHS}

    def call(q, k, v):
        return heedful.flash_attn_func(q, k, v, causal=True, return_lse=True, **lengths)

    out, lse = (compiled(call) if traced else call)(q, k, v)
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
    got = out, lse.transpose(1, 2), *torch.autograd.grad(loss, (q, k, v))
    alone = of_rows(lambda t, b: t[-LENGTHS[b] :] if left else t[: LENGTHS[b]])
    for b, row in enumerate(alone):
        for name, mine, want in zip(("out", "lse", "dq", "dk", "dv"), got, row, strict=True):
            torch.testing.assert_close(mine[b][used[b]], want[0], msg=name)
            rest = mine[b][~used[b]]
            assert (rest == (-torch.inf if name == "lse" else 0)).all(), name


def test_vmap_is_each_element_with_the_same_lengths():
    q, k, v = batch().repeat(1, 1, 1, 1, 1)[:, None].expand(3, 3, 2, 8, 4, 16)

    def call(q, k, v):
        return heedful.flash_attn_func(q, k, v, seqused_k=LENGTHS, leftpad_k=LENGTHS - LENGTHS)

    got = torch.func.vmap(call)(q, k, v)
    assert all(torch.equal(got[i], call(q[i], k[i], v[i])) for i in range(3))


def test_the_packed_form_takes_lengths_too():
    qkv = batch().movedim(0, 2)
    got = heedful.flash_attn_qkvpacked_func(qkv, seqused_k=LENGTHS)
    assert torch.equal(got, heedful.flash_attn_func(*qkv.unbind(2), seqused_k=LENGTHS))


def test_calls_with_and_without_lengths_are_told_apart():
    q, k, v = batch().unbind()
    plain = heedful.flash_attn_func(q, k, v)
    for _ in range(2):
        for name in ("seqused_k", "leftpad_k"):
            more: dict[str, Any] = {name: LENGTHS - 3}
            assert not torch.equal(heedful.flash_attn_func(q, k, v, **more), plain)
        assert torch.equal(heedful.flash_attn_func(q, k, v), plain)


@pytest.mark.parametrize(
    ("name", "wrong", "kind"),
    [
        ("seqused_q", [9, 1], ValueError),
        ("seqused_k", [1, 9], ValueError),
        ("leftpad_k", [0, 9], ValueError),
        ("leftpad_k", [0, -1], ValueError),
        ("leftpad_k", [0], ValueError),
        ("seqused_q", [0.0, 1.0], TypeError),
    ],
)
def test_wrong_lengths_are_named(name, wrong, kind):
    q, k, v = batch().unbind()
    given: dict[str, Any] = {name: torch.tensor(wrong)}
    with pytest.raises(kind, match=f"^{name} must"):
        heedful.flash_attn_func(q, k, v, **given)


def test_explain_says_why_the_hopper_backward_does_not_run():
    pytest.importorskip("triton")
    from support.runs import standin

    with standin.gpu("H200"):
        q = torch.randn(2, 128, 4, 512, requires_grad=True).bfloat16()
        used = torch.tensor([100, 128], dtype=torch.int32)
        said = heedful.explain(heedful.flash_attn_func, q, q, q, causal=True, seqused_k=used)
    assert "forward   hopper" in said and "backward  portable" in said
    assert (
        "hopper/halves backward: has not run with lengths used of each sequence: portable has"
        in said
    )
