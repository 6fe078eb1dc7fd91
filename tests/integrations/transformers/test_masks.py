"""Masks as lengths: they say what transformers' masks of queries x keys say, and nothing takes them
for something else."""

import sys
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as theirs

from heedful.integrations.transformers import attention as calls
from heedful.integrations.transformers import compact
from heedful.integrations.transformers.masks import mask
from support.integrations.language_models import model, packed, padded_left, tokens

BATCH = 3


def functions(window: int) -> dict:
    """By name a mask function, and whether it is causal."""
    return {
        "causal": (theirs.causal_mask_function, True),
        "both": (theirs.bidirectional_mask_function, False),
        "causal window": (theirs.sliding_window_causal_mask_function(window), True),
        "window": (theirs.sliding_window_bidirectional_mask_function(window), False),
    }


@st.composite
def places(draw):
    """Queries and keys of a model with a cache, and one run of tokens in each row."""
    q_length = draw(st.integers(1, 9))
    q_offset = draw(st.integers(0, 9))
    kv_offset = draw(st.integers(0, q_offset))
    kv_length = q_offset - kv_offset + q_length + draw(st.integers(0, 4))
    total = kv_offset + kv_length
    padding = torch.zeros(BATCH, total, dtype=torch.bool)
    for row in range(BATCH):
        first = draw(st.integers(0, total - 1))
        padding[row, first : draw(st.integers(first + 1, total))] = True
    name = draw(st.sampled_from(list(functions(1))))
    return {
        "batch_size": BATCH,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": draw(st.sampled_from([q_offset, torch.tensor([q_offset])])),
        "kv_offset": kv_offset,
        "attention_mask": draw(st.sampled_from([None, padding])),
    }, functions(draw(st.integers(1, 12)))[name]


@given(places())
def test_lengths_say_what_a_mask_of_queries_and_keys_says(drawn):
    place, (function, causal) = drawn
    q_length, kv_length = place["q_length"], place["kv_length"]
    wanted = theirs.sdpa_mask(**place, mask_function=function, allow_is_causal_skip=False)
    assert wanted is not None
    found = mask(**place, mask_function=function)
    if found is None:
        rows = torch.arange(q_length)[:, None] + kv_length - q_length
        keys = torch.arange(kv_length)[None]
        sees = (keys <= rows if causal else keys >= 0).expand_as(wanted)
    elif not compact.is_compact(found):
        # The one pattern that lengths of both sides cannot say.
        assert (
            not causal
            and place["q_offset"] + q_length < place["kv_offset"] + kv_length
            or (not causal and isinstance(place["q_offset"], Tensor))
        )
        sees = found
    else:
        lengths = compact.read(found, BATCH, q_length, kv_length)
        sees = compact.dense(lengths, BATCH, q_length, kv_length)
    assert torch.equal(sees[counting(place)], wanted[counting(place)])


def counting(place: dict) -> Tensor:
    """(batch, 1, q_length): which queries are tokens. Others may see anything, or nothing."""
    padding, rows = place["attention_mask"], torch.arange(place["q_length"])
    if padding is None:
        return torch.ones(BATCH, 1, place["q_length"], dtype=torch.bool)
    at = rows + place["q_offset"]
    inside = at < padding.shape[1]
    return (padding[:, at.clamp(max=padding.shape[1] - 1)] & inside)[:, None]


def padded_mask() -> Tensor:
    found = mask(BATCH, 14, 14, attention_mask=padded_left().bool())
    assert found is not None and compact.is_compact(found)
    return found


def test_a_layer_that_takes_lengths_for_a_mask_raises():
    found = padded_mask()
    scores = torch.zeros(1, 1, found.shape[2], 1)
    for misuse in (
        lambda: scores + found,
        lambda: scores.bfloat16() + found,
        lambda: scores.masked_fill(found, 0.0),
        lambda: torch.where(found, scores, scores),
    ):
        with pytest.raises(RuntimeError):
            misuse()


def test_a_slice_of_keys_leaves_lengths_whole():
    whole = compact.read(padded_mask(), BATCH, 14, 14)
    cut = compact.read(padded_mask()[:, :, :, :2].clone(), BATCH, 14, 14)
    assert all(torch.equal(a, b) for a, b in zip(whole[:4], cut[:4], strict=True))
    assert (whole.causal, whole.left) == (cut.causal, cut.left)


@pytest.mark.parametrize("cut", [slice(16, None), slice(0, 32), slice(0, 6)])
def test_lengths_that_were_cut_are_refused(cut):
    with pytest.raises(ValueError, match="changed on its way"):
        compact.read(padded_mask()[:, :, cut], BATCH, 14, 14)


def test_documents_are_found_in_every_row():
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    function = theirs.and_masks(
        theirs.causal_mask_function, theirs.packed_sequence_mask_function(ids)
    )
    found = mask(BATCH, 6, 6, mask_function=function)
    assert found is not None
    wanted = theirs.sdpa_mask(BATCH, 6, 6, mask_function=function, allow_is_causal_skip=False)
    lengths = compact.read(found, BATCH, 6, 6)
    assert wanted is not None and torch.equal(compact.dense(lengths, BATCH, 6, 6), wanted)
    assert lengths.used_q.tolist() == [2, 3, 1, 6, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "function",
    [
        theirs.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int)),
        theirs.or_masks(theirs.causal_mask_function, theirs.bidirectional_mask_function),
        lambda batch, head, q, k: (k <= q) & (k != 3),
        theirs.sliding_window_overlay(3),
    ],
    ids=["chunks", "union", "own", "only a window"],
)
def test_a_pattern_that_is_not_known_is_dense(function):
    found = mask(BATCH, 9, 9, mask_function=function)
    wanted = theirs.sdpa_mask(BATCH, 9, 9, mask_function=function, allow_is_causal_skip=False)
    assert found is not None and wanted is not None
    assert found.dtype == torch.bool and torch.equal(found, wanted)


@pytest.fixture
def waits(monkeypatch) -> list[str]:
    """What our modules asked of tensors that makes the host wait for a device."""
    found: list[str] = []

    def watched(name):
        original = getattr(Tensor, name)

        def method(self, *args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("heedful.integrations"):
                found.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, method)

    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero"):
        watched(name)
    return found


def test_a_padded_forward_waits_for_the_device_once(waits):
    made = model("llama")
    made.set_attn_implementation("heedful")
    with torch.no_grad():
        made(input_ids=tokens(), attention_mask=padded_left())
    assert waits == ["tolist"]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_packed_forward_waits_for_the_device_once(waits, family):
    made = model(family)
    made.set_attn_implementation("heedful")
    with torch.no_grad():
        made(**packed(), use_cache=False)
    assert waits == ["nonzero"]


def test_a_forward_without_padding_does_not_wait(waits):
    made = model("gemma2")
    made.set_attn_implementation("heedful")
    with torch.no_grad():
        made(input_ids=tokens())
    assert waits == []


def test_a_window_of_the_mask_holds_where_the_layer_passes_none():
    q = torch.randn(1, 2, 9, 16)
    function = theirs.sliding_window_causal_mask_function(3)
    made = mask(1, 9, 9, mask_function=function, local_size=3)
    module = torch.nn.Module()
    out, _ = calls.attention(module, q, q, q, made, sliding_window=None)
    wanted = theirs.sdpa_mask(1, 9, 9, mask_function=function, allow_is_causal_skip=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=wanted)
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("name", sorted(calls.REFUSED))
def test_what_is_not_served_is_refused_by_name(name):
    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(ValueError, match=f"heedful does not serve {name}"):
        calls.attention(torch.nn.Module(), q, q, q, None, **cast(Any, {name: torch.ones(1)}))


@pytest.mark.parametrize("name", ["position_bias", "output_attentions"])
def test_what_packed_lengths_would_leave_out_is_refused_by_name(name):
    q = torch.randn(1, 2, 9, 16)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    how = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, name: torch.ones(1)}
    with pytest.raises(ValueError, match=f"heedful does not serve {name} beside cu_seq_lens_q"):
        calls.attention(torch.nn.Module(), q, q, q, None, **cast(Any, how))


def test_a_mask_of_two_dimensions_is_refused():
    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(ValueError, match="attention_mask must have four dimensions, got"):
        calls.attention(torch.nn.Module(), q, q, q, torch.ones(1, 9))


def test_learned_queries_are_shared_by_all_rows():
    q, k = torch.randn(1, 2, 4, 16), torch.randn(3, 2, 9, 16)
    out, _ = calls.attention(torch.nn.Module(), q, k, k, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q.expand(3, -1, -1, -1), k, k)
    torch.testing.assert_close(out.transpose(1, 2), expected)
