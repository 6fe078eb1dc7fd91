"""Transformers' own tests of attention implementations, over tiny models, with ours.

They are in transformers' sdist: TRANSFORMERS_TESTS names the folder where it was unpacked, of the
version that is installed (`make test-transformers`). Skipped without.
"""

import copy
import os
import subprocess
import sys
import types
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf

from heedful.integrations.transformers import paths, reset_paths
from heedful.integrations.transformers.attention import attention
from heedful.integrations.transformers.masks import mask
from support.integrations.language_models import COMMON, FAMILIES, tokens
from support.integrations.other_models import drawn, families

FOLDER = os.environ.get("TRANSFORMERS_TESTS", "")
LANGUAGE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
OTHERS = ("bert", "modernbert", "vit", "siglip_vision", "clip_vision")
# Modules that their tests load, and that the sdist leaves out.
LEFT_OUT = ("exporters", "exporters.test_export", "generation", "generation.test_utils")


class _LeftOut(types.ModuleType):
    """Has an empty class for every name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _their_mixin() -> Any:
    """ModelTesterMixin. Their package is called `tests`, as ours is, so ours steps aside."""
    ours = {n: m for n, m in sys.modules.items() if n == "tests" or n.startswith("tests.")}
    for name in ours:
        del sys.modules[name]
    theirs = types.ModuleType("tests")
    theirs.__path__ = [os.path.join(FOLDER, "tests")]
    sys.modules["tests"] = theirs
    # Their marks are not among those that our configuration lists.
    marks: Any = pytest.mark
    strict, marks._config = marks._config, None
    try:
        for name in LEFT_OUT:
            sys.modules[f"tests.{name}"] = _LeftOut(f"tests.{name}")
        from tests.test_modeling_common import (  # pyright: ignore[reportMissingImports]
            ModelTesterMixin,
        )
    finally:
        marks._config = strict
        for name in [n for n in sys.modules if n == "tests" or n.startswith("tests.")]:
            del sys.modules[name]
        sys.modules.update(ours)
    return ModelTesterMixin


class Tester:
    """A model in the words of their tests."""

    is_training, batch_size = True, 3

    def __init__(self, family: str):
        self.num_masks = self.mask_length = 0
        if family in LANGUAGE:
            name, own = FAMILIES[family]
            short = name.removesuffix("Text")
            self.classes = [getattr(hf, f"{name}Model"), getattr(hf, f"{short}ForCausalLM")]
            self.config = getattr(hf, f"{name}Config")(**{**COMMON, **own})
        else:
            made = families()[family].make()
            self.classes, self.config = [type(made)], made.config
        ids = tokens()
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self.seq_length = ids.shape[1]
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, getattr(self.config, name))
        if hasattr(self.config, "patch_size"):
            self.inputs = {"pixel_values": drawn(3, 3, 16, 16)}
            # Patches, of which none is masked out, and a token of the class.
            self.mask_length, self.seq_length = 16, 17

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return copy.deepcopy(self.config), {n: x.clone() for n, x in self.inputs.items()}


@contextmanager
def in_place_of_sdpa() -> Iterator[None]:
    """Models with `sdpa` run ours, also while they are told from those with eager attention."""
    tables = (hf.AttentionInterface, attention), (hf.AttentionMaskInterface, mask)
    kept = [table._global_mapping["sdpa"] for table, _ in tables]
    for table, ours in tables:
        table._global_mapping["sdpa"] = ours
    try:
        yield
    finally:
        for (table, _), theirs in zip(tables, kept, strict=True):
            table._global_mapping["sdpa"] = theirs


@contextmanager
def as_default() -> Iterator[None]:
    """Models whose configuration names no attention have ours."""
    theirs = hf.PreTrainedModel.get_correct_attn_implementation

    def chosen(self, requested_attention, *more, **named):
        return theirs(self, requested_attention or "heedful", *more, **named)

    hf.PreTrainedModel.get_correct_attn_implementation = chosen
    try:
        yield
    finally:
        hf.PreTrainedModel.get_correct_attn_implementation = theirs


def _outcome(family: str, name: str) -> str:
    """What one of their tests says: "passed", "skipped", or its error."""
    torch.manual_seed(0)
    case = _case(MIXIN, family)
    try:
        case.setUp()
        # A test of theirs in a process of its own would start all tests of the family there, by the
        # name of ours: twice the time of this file, and on a busy machine no end.
        with mock.patch.dict(os.environ, {"_INSIDE_SUB_PROCESS": "1"}):
            getattr(case, name)()
    except unittest.SkipTest:
        return "skipped"
    except (Exception, pytest.fail.Exception) as error:
        return repr(error)
    return "passed"


def _case(mixin: Any, family: str) -> Any:
    """Their tests of one family, as a class whose tests are called by hand."""

    class Case(mixin, unittest.TestCase):
        has_attentions = True

    case = Case()
    case.model_tester = Tester(family)
    case.all_model_classes = tuple(case.model_tester.classes)
    return case


if FOLDER:
    MIXIN = _their_mixin()
    # Attributes of other kinds are settings.
    NAMES = sorted(n for n in dir(MIXIN) if n.startswith("test_") and callable(getattr(MIXIN, n)))
    MATCHES = [n for n in NAMES if n.startswith("test_eager_matches_sdpa_inference_")]
else:
    MIXIN, NAMES, MATCHES = None, [], ["none"]
    pytestmark = pytest.mark.skip(reason="TRANSFORMERS_TESTS names no sdist of transformers")


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", [*LANGUAGE, *OTHERS])
def test_inference_equals_eager_as_that_of_flash_attention_must(family, padding):
    reset_paths()
    _case(MIXIN, family).flash_attn_inference_equivalence("heedful", padding)
    assert paths()


@pytest.mark.parametrize("name", MATCHES)
@pytest.mark.parametrize("family", [*LANGUAGE, *OTHERS])
def test_inference_equals_eager_as_that_of_sdpa_must(family, name):
    reset_paths()
    with in_place_of_sdpa():
        try:
            getattr(_case(MIXIN, family), name)()
        except unittest.SkipTest as error:
            pytest.skip(str(error))
    assert paths()


def test_no_test_of_theirs_starts_ours_in_another_process(monkeypatch):
    started: list = []
    monkeypatch.setattr(subprocess, "run", lambda *told, **_: started.append(told))
    for name in NAMES:
        if "global_device" in name:
            assert _outcome("bert", name) in ("passed", "skipped")
    assert not started


@pytest.mark.parametrize("family", [*LANGUAGE, *OTHERS])
def test_what_passes_with_the_default_attention_passes_with_ours_as_default(family):
    """All their tests but those of sdpa's own limits."""
    names = [n for n in NAMES if n != "test_sdpa_can_dispatch_non_composite_models"]
    wanted = {name: _outcome(family, name) for name in names}
    reset_paths()
    with as_default():
        found = {name: _outcome(family, name) for name in names}
    lost = {n: found[n] for n in names if wanted[n] == "passed" and found[n] != "passed"}
    counts = {word: list(wanted.values()).count(word) for word in ("passed", "skipped")}
    failing = {n: error for n, error in wanted.items() if error not in counts}
    # pytest -rP shows it.
    sys.stdout.write(f"{family} with the default: {counts}, and fail: {failing}\n")
    assert not lost
    # Others skip themselves, or ask for a tester of one model.
    assert list(wanted.values()).count("passed") > 80 and sum(paths().values()) > 40
