"""Tiny language models of random weights, and what they give when they see a sequence at once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

VOCABULARY, WIDTH, LONGEST = 61, 32, 128


@dataclass(frozen=True)
class Facts:
    """A model. windows: of each layer, how many of the newest tokens a query sees; None: all.
    rank, rotary: of latent vectors, 0 where there are none."""

    heads: int = 4
    heads_k: int = 2
    dim: int = 16
    windows: tuple[int | None, ...] = (None, None)
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    rank: int = 0
    rotary: int = 0
    kv_cache_dtype: str = "auto"

    @property
    def scale(self) -> float:
        return (self.dim + self.rotary) ** -0.5


@dataclass
class Model:
    """Weights of one dtype on one device. `logits` runs it with a function that attends, by layer:
    attend(layer, q, k, v) over all tokens that are given."""

    facts: Facts
    weights: dict[str, Tensor] = field(default_factory=dict)
    absorbs: bool = False  # Attends over latent vectors, and not over keys made of them.

    def ways(self) -> "list[Model]":
        """The same model in each way that it may be computed, of which each rounds otherwise."""
        return [self, replace(self, absorbs=True)] if self.facts.rank else [self]

    @classmethod
    def drawn(cls, facts: Facts, seed: int = 0) -> "Model":
        draws = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draws, dtype=torch.float64) * shape[0] ** -0.5

        w = {"embed": draw(VOCABULARY, WIDTH) * 8, "place": draw(LONGEST, WIDTH) * 4}
        keys = facts.heads_k * facts.dim
        for n in range(len(facts.windows)):
            w[f"q{n}"] = 3 * draw(WIDTH, facts.heads * (facts.dim + facts.rotary))
            w[f"o{n}"] = draw(facts.heads * facts.dim, WIDTH)
            w[f"sink{n}"] = draw(facts.heads)
            if facts.rank:
                w[f"latent{n}"] = 2 * draw(WIDTH, facts.rank + facts.rotary)
                for half in ("up_k", "up_v"):
                    w[f"{half}{n}"] = draw(facts.rank, facts.heads, facts.dim)
            else:
                w[f"k{n}"], w[f"v{n}"] = draw(WIDTH, keys), draw(WIDTH, keys)
        return cls(facts, w)

    def to(self, *where: Any) -> "Model":
        return Model(self.facts, {name: w.to(*where) for name, w in self.weights.items()})

    def logits(self, tokens: Tensor, places: Tensor, attend: Callable) -> Tensor:
        """(tokens, VOCABULARY) of tokens at places."""
        w, facts = self.weights, self.facts
        x = w["embed"][tokens] + w["place"][places]
        for n in range(len(facts.windows)):
            y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
            q = (y @ w[f"q{n}"]).unflatten(-1, (facts.heads, -1))
            if facts.rank:
                latent = y @ w[f"latent{n}"]
                if facts.kv_cache_dtype != "auto":
                    # As a cache stores it, since prefills attend to what is not stored yet.
                    latent = latent.to(torch.float8_e4m3fn).to(latent.dtype)
                k, v = latent.split([facts.rank, facts.rotary], -1)
            else:
                k, v = ((y @ w[f"{half}{n}"]).unflatten(-1, (facts.heads_k, -1)) for half in "kv")
            x = x + attend(n, q, k, v).flatten(-2) @ w[f"o{n}"]
        return x @ w["embed"].T

    def dense(self, tokens: list[int]) -> Tensor:
        """Logits of a sequence, all of it at once, by torch's plain operations."""
        device = self.weights["embed"].device
        ids, places = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)
        return self.logits(ids, places, self._attend_plainly)

    def _attend_plainly(self, n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        facts = self.facts
        if self.absorbs:
            nope, rotary = q.split([facts.dim, facts.rotary], -1)
            q = torch.cat(
                [torch.einsum("thd,rhd->thr", nope, self.weights[f"up_k{n}"]), rotary], -1
            )
            k, v = torch.cat([k, v], -1)[:, None], k[:, None]
        elif facts.rank:
            rotary = v[:, None].expand(-1, facts.heads, -1)
            k, v = (
                torch.einsum("tr,rhd->thd", k, self.weights[f"{h}{n}"]) for h in ("up_k", "up_v")
            )
            k = torch.cat([k, rotary], -1)
        elif facts.kv_cache_dtype != "auto":
            k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * facts.scale
        if facts.softcap:
            scores = facts.softcap * torch.tanh(scores / facts.softcap)
        count = q.shape[0]
        far = torch.arange(count)[:, None] - torch.arange(count)
        far = far.to(q.device)
        if facts.alibi:
            scores = scores - slopes(facts).to(scores)[:, None, None] * far.abs()
        seen = (far >= 0) & (far < (facts.windows[n] or LONGEST))
        scores = scores.masked_fill(~seen, -torch.inf)
        if facts.sinks:
            sink = self.weights[f"sink{n}"][:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :count]
        out = torch.einsum("hqk,khd->qhd", weights, v)
        return torch.einsum("thr,rhd->thd", out, self.weights[f"up_v{n}"]) if self.absorbs else out

    def continued(self, prompt: list[int], length: int) -> list[int]:
        """The prompt and the likeliest tokens after it, up to a length."""
        tokens = list(prompt)
        while len(tokens) < length:
            tokens.append(int(self.dense(tokens)[-1].argmax()))
        return tokens


def slopes(facts: Facts) -> Tensor:
    """ALiBi's slopes of the heads."""
    return 2.0 ** -torch.arange(1, facts.heads + 1)
