"""A real text that every Python has: the documentation behind `help()`."""

import math
from collections import Counter
from dataclasses import dataclass

import torch

from heedful.demo.topics import HELD_OUT, numbered


@dataclass(frozen=True)
class Text:
    """Characters as numbers. vocabulary: character of each number. train, held_out: int64 (N,)."""

    vocabulary: str
    train: torch.Tensor
    held_out: torch.Tensor

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.vocabulary[token] for token in tokens)

    def encode(self, text: str) -> torch.Tensor:
        number = {character: i for i, character in enumerate(self.vocabulary)}
        return torch.tensor([number[character] for character in text])

    def unigram_nats(self) -> float:
        """The loss per character of a model that knows only how frequent each one is: the loss that
        any attention at all must get under."""
        counts = Counter(self.train.tolist())
        return -sum(n / len(self.train) * math.log(n / len(self.train)) for n in counts.values())


def load() -> Text:
    """All help topics, one after the other, in the order of their names."""
    vocabulary, numbers = numbered()
    tokens = torch.tensor(numbers)
    cut = int(len(tokens) * (1 - HELD_OUT))
    return Text(vocabulary, tokens[:cut], tokens[cut:])


def batch(
    tokens: torch.Tensor, size: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows (size, length) and the characters that follow each of theirs."""
    starts = torch.randint(len(tokens) - length - 1, (size,), generator=generator)
    rows = starts[:, None] + torch.arange(length)
    return tokens[rows], tokens[rows + 1]
