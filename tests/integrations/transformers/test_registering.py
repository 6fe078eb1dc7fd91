"""Names that heedful is registered under, and how it goes away again."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from heedful import integrations
from heedful.integrations import transformers as plug_in
from support.integrations.language_models import model, tokens


def known() -> tuple[set, set]:
    return set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)


def test_registering_twice_is_once_and_unregistering_leaves_nothing():
    plug_in.unregister()
    before = known()
    plug_in.register("ours")
    plug_in.register("ours")
    assert plug_in.is_registered()
    assert [now - then for now, then in zip(known(), before, strict=True)] == [{"ours"}] * 2
    plug_in.unregister("ours")
    assert known() == before and not plug_in.is_registered()


def test_the_table_of_frameworks_says_whether_heedful_is_registered():
    def is_registered():
        return {each.name: each.registered for each in integrations.installed()}["transformers"]

    assert is_registered()
    plug_in.unregister()
    assert not is_registered()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("heedful_flash", "must not hold 'flash', got 'heedful_flash'"),
        ("my_sdpa", "must not hold 'sdpa'"),
        ("org/heedful", "must not hold '/'"),
        ("paged|heedful", "must not hold '|'"),
        ("", "must be a non-empty str, got ''"),
        (None, "must be a non-empty str, got None"),
    ],
)
def test_a_name_that_means_something_else_is_refused(name, words):
    before = known()
    with pytest.raises(ValueError, match="name ") as refused:
        plug_in.register(name)
    assert words in str(refused.value) and known() == before


def test_a_name_that_is_not_registered_cannot_be_taken_out():
    with pytest.raises(ValueError, match="name must be registered, got 'other'"):
        plug_in.unregister("other")


def test_a_model_takes_the_name():
    made = model("llama")
    made.set_attn_implementation("heedful")
    plug_in.reset_paths()
    with torch.no_grad():
        made(input_ids=tokens())
    assert plug_in.paths() == {"plain": 2}
