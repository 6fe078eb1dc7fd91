"""The program of docs/bits.md: a sampler's log-probabilities beside a trainer's."""

import pytest

pytest.importorskip("transformers")

import torch

from heedful.demo import log_probs


def test_a_sampler_and_a_trainer_compute_the_same_rows(monkeypatch):
    """Up to roundings, on a CPU, and only if both know the same tokens."""
    found = log_probs.compare("fast", torch.device("cpu"))
    assert found.tokens == len(log_probs.PROMPTS) * log_probs.TOKENS
    assert found.largest < 2.0**-5
    whole = log_probs.trained

    def of_others(model, prompts, tokens):
        return whole(model, prompts, tokens.roll(1, 1))

    monkeypatch.setattr(log_probs, "trained", of_others)
    other = log_probs.compare("fast", torch.device("cpu"))
    assert other.largest > 0.5 and other.differing > 1


@pytest.mark.gpu
def test_log_probabilities_of_a_sampler_and_a_trainer_are_the_same_bits():
    assert log_probs.compare("invariant", torch.device("cuda")).differing == 0
