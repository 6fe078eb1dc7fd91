"""The whole demo without its screen: train the runs, compare the curves, generate a sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from heedful.demo import attention, training
from heedful.demo.agreement import Agreement, compare
from heedful.demo.generate import generate
from heedful.demo.model import Attend
from heedful.demo.text import Text
from heedful.demo.training import Recipe, Run

PROMPT = "The "
SAMPLED = 400
OURS, THEIRS, CONTROL = "heedful", "SDPA", "control"


@dataclass(frozen=True)
class Report:
    """The demo's findings. runs: by name, OURS, THEIRS and CONTROL. held_out: OURS on text that was
    not trained on, nats a character. sample: text, the prompt included; empty where the model is
    not finite."""

    runs: dict[str, Run]
    agreement: Agreement
    held_out: float
    unigram: float
    sample: str

    @property
    def learned(self) -> bool:
        """Whether the model knows more than how frequent each character is."""
        return self.held_out < self.unigram

    @property
    def passed(self) -> bool:
        return self.agreement.agrees and self.learned


def run(
    recipe: Recipe,
    text: Text,
    device: torch.device,
    on_step: Callable[[int, dict[str, Run]], None] = lambda step, runs: None,
    ours: Attend | None = None,
) -> Report:
    """Trains with `ours` (by default heedful), with SDPA, and a control that is as correct as SDPA
    but sums in another order and differs by one rounding: its distance from SDPA's run is the
    noise."""
    attentions = {
        OURS: ours or attention.with_heedful(recipe.backend),
        THEIRS: attention.with_sdpa(),
    }
    controls = {CONTROL: attention.with_math()}
    runs = training.start(recipe, len(text.vocabulary), attentions, controls, device)
    for step in training.train(recipe, text, runs, device):
        on_step(step, runs)
    losses = {name: each.losses for name, each in runs.items()}
    return Report(
        runs,
        compare(losses[OURS], losses[THEIRS], losses[CONTROL]),
        training.held_out_loss(recipe, text, runs[OURS], device),
        text.unigram_nats(),
        _sample(recipe, text, runs[OURS]),
    )


def _sample(recipe: Recipe, text: Text, trained: Run) -> str:
    if not math.isfinite(trained.losses[-1]):
        return ""
    prompt = text.encode(PROMPT)
    generator = torch.Generator().manual_seed(recipe.seed)
    tokens = generate(trained.model, prompt, SAMPLED, generator, recipe.dtype, recipe.backend)
    return text.decode(tokens)
