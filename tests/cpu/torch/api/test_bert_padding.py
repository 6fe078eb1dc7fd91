"""`heedful.bert_padding` does what code that was written for flash_attn's expects of it."""

import inspect
from typing import Any

import pytest
import torch

import heedful
from heedful import bert_padding
from heedful.bert_padding import index_first_axis, pad_input, unpad_input

BATCH, SEQLEN = 4, 6
LENGTHS = (3, 0, 6, 1)
LEFT = torch.tensor([[i >= SEQLEN - n for i in range(SEQLEN)] for n in LENGTHS])
RIGHT = torch.tensor([[i < n for i in range(SEQLEN)] for n in LENGTHS])
HOLES = torch.tensor([[1, 0, 1, 0, 1, 0], [0] * 6, [1] * 6, [0, 0, 0, 0, 1, 0]])
MASKS = {"left": LEFT, "right": RIGHT, "holes": HOLES, "ints": 7 * RIGHT.long()}


def test_the_signatures_are_those_of_flash_attn():
    wanted = {
        "unpad_input": ["hidden_states", "attention_mask", "unused_mask"],
        "pad_input": ["hidden_states", "indices", "batch", "seqlen"],
        "index_first_axis": ["input", "indices"],
    }
    for name, parameters in wanted.items():
        assert list(inspect.signature(getattr(bert_padding, name)).parameters) == parameters
    assert sorted(wanted) == sorted(bert_padding.__all__)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("more", [(), (2,), (2, 3)])
def test_tokens_are_taken_in_order_and_put_back(name, more):
    mask, x = MASKS[name], torch.randn(BATCH, SEQLEN, *more)
    packed, indices, starts, longest, used = unpad_input(x, mask)
    kept = [(b, i) for b in range(BATCH) for i in range(SEQLEN) if mask[b, i]]
    assert indices.tolist() == [b * SEQLEN + i for b, i in kept]
    assert torch.equal(packed, torch.stack([x[b, i] for b, i in kept]))
    lengths = [sum(b == row for b, _ in kept) for row in range(BATCH)]
    assert starts.tolist() == [sum(lengths[:b]) for b in range(BATCH + 1)]
    assert used.tolist() == lengths and longest == max(lengths) and type(longest) is int
    assert (indices.dtype, starts.dtype, used.dtype) == (torch.int64, torch.int32, torch.int32)
    padded = pad_input(packed, indices, BATCH, SEQLEN)
    assert torch.equal(
        padded, torch.where((mask != 0).view(BATCH, SEQLEN, *(1,) * len(more)), x, 0)
    )


def test_unused_tokens_have_room_and_are_not_counted():
    unused = torch.zeros_like(RIGHT)
    unused[0, 3:5] = unused[1, 0] = True
    x = torch.randn(BATCH, SEQLEN)
    packed, indices, starts, longest, used = unpad_input(x, RIGHT, unused)
    assert starts.tolist() == [0, 5, 6, 12, 13] and longest == 6
    assert used.tolist() == list(LENGTHS)
    assert torch.equal(packed, x.flatten()[indices]) and len(indices) == 13
    both = unpad_input(x, RIGHT.int(), RIGHT.int() | unused.int())
    assert both[2].tolist() == [0, 5, 6, 12, 13]


def test_a_batch_without_tokens_and_one_without_sequences():
    packed, indices, starts, longest, _ = unpad_input(torch.randn(2, 3, 5), torch.zeros(2, 3).int())
    assert packed.shape == (0, 5) and starts.tolist() == [0, 0, 0] and longest == 0
    assert torch.equal(pad_input(packed, indices, 2, 3), torch.zeros(2, 3, 5))
    packed, _, starts, longest, _ = unpad_input(torch.randn(0, 3, 5), torch.zeros(0, 3).bool())
    assert packed.shape == (0, 5) and starts.tolist() == [0] and longest == 0


def test_gradients_are_those_of_finite_differences():
    x = torch.randn(BATCH, SEQLEN, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, HOLES)[0], x)
    packed, indices, *_ = unpad_input(x.detach(), HOLES)
    packed.requires_grad_()
    assert torch.autograd.gradcheck(lambda y: pad_input(y, indices, BATCH, SEQLEN), packed)
    twice = torch.tensor([3, 0, 3])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x.flatten(0, 1), twice), x)


def test_attention_of_what_was_unpadded_is_that_of_sequences_one_behind_the_other():
    q, k, v = torch.randn(3, BATCH, SEQLEN, 2, 8)
    rows, indices, starts, longest, _ = unpad_input(q, RIGHT)
    keys, values = (index_first_axis(x.flatten(0, 1), indices) for x in (k, v))
    bounds = starts, starts, longest, longest
    out = heedful.flash_attn_varlen_func(rows, keys, values, *bounds, causal=True)
    rows, keys, values = (torch.cat([x[b, :n] for b, n in enumerate(LENGTHS)]) for x in (q, k, v))
    ends = torch.tensor([0, 3, 3, 9, 10], dtype=torch.int32)
    want = heedful.flash_attn_varlen_func(rows, keys, values, ends, ends, 6, 6, causal=True)
    padded = pad_input(out, indices, BATCH, SEQLEN)
    assert torch.equal(padded[RIGHT], want) and not padded[~RIGHT].any()


X = torch.zeros(2, 3, 4)
TOKENS = torch.zeros(5, 4)
MASK = torch.ones(2, 3, dtype=torch.bool)
INDICES = torch.arange(5)
anything: Any = object()
text: Any = "2"


@pytest.mark.parametrize(
    ("call", "kind", "named"),
    [
        (lambda: unpad_input(anything, MASK), TypeError, "hidden_states"),
        (lambda: unpad_input(torch.zeros(3), MASK), ValueError, "hidden_states"),
        (lambda: unpad_input(X, anything), TypeError, "attention_mask"),
        (lambda: unpad_input(X, MASK.float()), TypeError, "attention_mask"),
        (lambda: unpad_input(X, MASK.T), ValueError, "attention_mask"),
        (lambda: unpad_input(X, MASK.to("meta")), ValueError, "attention_mask"),
        (lambda: unpad_input(X, MASK, MASK[:1]), ValueError, "unused_mask"),
        (lambda: pad_input(TOKENS, INDICES, -1, 3), ValueError, "batch"),
        (lambda: pad_input(TOKENS, INDICES, 2, -3), ValueError, "seqlen"),
        (lambda: pad_input(TOKENS, INDICES, text, 3), TypeError, "batch"),
        (lambda: pad_input(anything, INDICES, 2, 3), TypeError, "hidden_states"),
        (lambda: unpad_input(X, MASK, anything), TypeError, "unused_mask"),
        (lambda: unpad_input(X, MASK * 1j), TypeError, "attention_mask"),
        (lambda: pad_input(TOKENS, INDICES, 2, 2.5), TypeError, "seqlen"),  # type: ignore
        (lambda: pad_input(TOKENS, INDICES[:4], 2, 3), ValueError, "indices"),
        (lambda: pad_input(TOKENS, INDICES + 2, 2, 3), ValueError, "indices"),
        (lambda: pad_input(TOKENS, INDICES - 1, 2, 3), ValueError, "indices"),
        (lambda: pad_input(TOKENS, INDICES.float(), 2, 3), TypeError, "indices"),
        (lambda: pad_input(TOKENS, INDICES[None], 2, 3), ValueError, "indices"),
        (lambda: index_first_axis(anything, INDICES), TypeError, "input"),
        (lambda: index_first_axis(torch.zeros(()), INDICES), ValueError, "input"),
        (lambda: index_first_axis(TOKENS, INDICES + 1), ValueError, "indices"),
        (lambda: index_first_axis(TOKENS, anything), TypeError, "indices"),
        (lambda: index_first_axis(TOKENS, INDICES.to("meta")), ValueError, "indices"),
        (lambda: index_first_axis(TOKENS, INDICES.short()), TypeError, "indices"),
    ],
)
def test_a_wrong_argument_is_named(call, kind, named):
    with pytest.raises(kind, match=f"^{named} must"):
        call()


def test_a_wrong_argument_is_told_with_what_it_is():
    for call, said in (
        (lambda: unpad_input(X[0, 0], MASK), r"hidden_states must be \(batch, .* shape \(4,\)$"),
        (lambda: unpad_input(X, MASK[:, :2]), r"= \(2, 3\), got \(2, 2\)$"),
        (lambda: pad_input(TOKENS, INDICES[:4], 2, 3), "must be one a token, 5, got 4$"),
        (lambda: pad_input(TOKENS, INDICES + 2, 2, 3), "must be within 0 and 5, got 2 to 6$"),
        (lambda: index_first_axis(TOKENS, INDICES - 1), "must be within 0 and 4, got -1 to 3$"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_the_last_token_of_a_batch_and_int32_numbers_are_taken():
    last = torch.tensor([5, 0], dtype=torch.int32)
    rows = torch.arange(1.0, 3.0)[:, None]
    assert pad_input(rows, last, 2, 3).flatten().tolist() == [2, 0, 0, 0, 0, 1]
    assert index_first_axis(torch.arange(6.0), last).tolist() == [5, 0]
    assert pad_input(rows[:0], last[:0], 0, 3).shape == (0, 3, 1)
