"""Continuous batching gives what `generate` gives for each prompt alone."""

import pytest
import torch
import transformers as hf
from transformers.generation.continuous_batching import continuous_api, initialization

from heedful.integrations import transformers as plug_in
from heedful.integrations.transformers import continuous
from heedful.integrations.transformers.attention import paged
from support.integrations.language_models import model
from support.problems.grids import slow_but

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [20], [3] * 20]


# It has sinks, and windows in every second layer.
@pytest.mark.parametrize("family", slow_but({"gpt_oss"}, ("llama", "mistral", "gemma2", "gpt_oss")))
def test_continuous_batching_equals_each_prompt_alone(family):
    plug_in.register(continuous=True)
    made = model(family)
    made.set_attn_implementation("heedful")
    how = hf.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = made.generate_batch(PROMPTS, generation_config=how).values()
    together = {tuple(each.prompt_ids): list(each.generated_tokens) for each in found}
    assert set(plug_in.paths()) <= {"given", "paged"} and plug_in.paths()
    made.set_attn_implementation("eager")
    for prompt in PROMPTS:
        given = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        alone = made.generate(torch.tensor([prompt]), **given)[0, len(prompt) :]
        assert together[tuple(prompt)] == alone.tolist()


def test_what_was_patched_is_back_after_unregister():
    plug_in.unregister()
    names = ("is_flash_attention_requested", continuous._TWO_ENTRIES[0], continuous._ONE_ENTRY[0])
    modules = continuous_api, initialization

    def state():
        return [getattr(module, name, None) for module in modules for name in names]

    before, entries = state(), set(hf.AttentionInterface._global_mapping)
    plug_in.register(continuous=True)
    assert state() != before
    plug_in.unregister()
    assert state() == before and set(hf.AttentionInterface._global_mapping) == entries


def test_an_unknown_design_is_refused_and_nothing_changes(monkeypatch):
    plug_in.unregister()
    monkeypatch.delattr(continuous_api, "is_flash_attention_requested")
    with pytest.raises(RuntimeError, match="does not know the continuous batching of this version"):
        plug_in.register(continuous=True)
    assert not plug_in.is_registered()


def test_only_our_names_are_told_apart_from_others():
    plug_in.register(continuous=True)
    asked = vars(continuous_api)["is_flash_attention_requested"]
    found = [asked(requested_attention_implementation=n) for n in ("heedful", "sdpa", "eager")]
    assert found == [True, False, False]


def test_new_tokens_are_appended_to_pages_and_rows_that_fill_up_are_left_alone():
    torch.manual_seed(0)
    pages, page, heads, dim = 6, 4, 2, 16
    k_cache, v_cache = torch.randn(2, pages, page, heads, dim)
    table = torch.tensor([[2, 0], [5, -1], [-1, -1]], dtype=torch.int32)
    lengths = [6, 3]  # With the new token; the third row fills a graph up.
    cu_k = torch.tensor([0, 6, 9, 9], dtype=torch.int32)
    q, k, v = torch.randn(3, 1, 3, heads, dim)
    before = k_cache.clone()
    how = {"softmax_scale": None, "causal": True, "window_size": (-1, -1), "softcap": 0.0}
    given = {"block_table": table, "k_cache": k_cache, "v_cache": v_cache}
    out = paged(q, k, v, cu_k, {**how, "sink": None}, given)
    for row, length in enumerate(lengths):
        own = table[row].clamp(min=0).long()
        keys, values = (x[own].flatten(0, 1)[:length] for x in (k_cache, v_cache))
        assert torch.equal(keys[-1], k[0, row]) and torch.equal(values[-1], v[0, row])
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[0, row, :, None], keys.transpose(0, 1), values.transpose(0, 1)
        )
        torch.testing.assert_close(out[0, row], expected[:, 0])
    assert (before != k_cache).any(-1).sum() == len(lengths) * heads
    assert not out[0, 2].any()
