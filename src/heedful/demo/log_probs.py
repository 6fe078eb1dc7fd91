"""Whether a sampler and a trainer give tokens of a Llama the same log-probabilities, bit by bit.

    python -m heedful.demo.log_probs                       # on a GPU, with numerics="invariant"
    python -m heedful.demo.log_probs --numerics fast       # how many differ without it

The sampler fills a cache with prompts, padded on the left, and adds a token at a time. The trainer
runs all sequences packed, in one call. Attention is heedful's. Other sums, those of products, norms
and the softmax over the vocabulary, run for each row by itself: slow, and plain. A real program has
products and norms whose sums do not depend on the number of rows.
"""

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import heedful
from heedful.integrations import transformers as plug_in

PROMPTS = (3, 40, 17)
TOKENS = 24


class Compared(NamedTuple):
    """How many tokens were sampled, how many of their log-probabilities differ between sampler and
    trainer, and by how much at most."""

    tokens: int
    differing: int
    largest: float


def row_by_row(function: Any, x: Tensor) -> Tensor:
    """function of each row of x by itself: sums then cannot depend on how many rows there are."""
    rows = [function(row) for row in x.reshape(-1, 1, x.shape[-1])]
    return torch.stack(rows).reshape(*x.shape[:-1], -1)


def by_rows(model: nn.Module) -> nn.Module:
    """The same model, whose products and norms run row by row."""
    for module in model.modules():
        if isinstance(module, nn.Linear | LlamaRMSNorm):
            whole = module.forward
            setattr(module, "forward", partial(row_by_row, whole))  # noqa: B010  (to a type checker it is a method)
    return model


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token by its row of logits."""
    every = row_by_row(lambda row: row.float().log_softmax(-1), logits)
    return every.gather(-1, tokens[..., None])[..., 0]


def tiny(device: torch.device) -> nn.Module:
    """A small Llama of random weights: grouped heads of 64 columns, two layers."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="heedful")
    return model.to(device, torch.bfloat16).eval()


@torch.no_grad()
def sampled(model: Any, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(tokens, their log-probabilities), each (prompts, TOKENS), one token at a time."""
    longest, device = max(map(len, prompts)), prompts[0].device
    pads = [longest - len(prompt) for prompt in prompts]
    ids = torch.stack([nn.functional.pad(p, (n, 0)) for p, n in zip(prompts, pads, strict=True)])
    mask = torch.stack([torch.arange(longest, device=device) >= n for n in pads]).long()
    cache, tokens, chances = DynamicCache(config=model.config), [], []
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(TOKENS):
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits[:, -1]
        ids = torch.multinomial(logits.float().softmax(-1), 1)
        tokens.append(ids)
        chances.append(log_probs(logits[:, None], ids))
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = positions[:, -1:] + 1
    return torch.cat(tokens, 1), torch.cat(chances, 1)


@torch.no_grad()
def trained(model: Any, prompts: list[Tensor], tokens: Tensor) -> Tensor:
    """The log-probabilities of these tokens by one forward over all sequences, packed."""
    whole = [torch.cat([prompt, new]) for prompt, new in zip(prompts, tokens, strict=True)]
    positions = [torch.arange(len(sequence), device=tokens.device) for sequence in whole]
    logits = model(
        input_ids=torch.cat(whole)[None], position_ids=torch.cat(positions)[None], use_cache=False
    ).logits[0]
    ends = torch.tensor([len(sequence) for sequence in whole]).cumsum(0).tolist()
    chances = []
    for end, new in zip(ends, tokens, strict=True):
        # The row before a token gives its probability.
        chances.append(log_probs(logits[end - TOKENS - 1 : end - 1], new))
    return torch.stack(chances)


def compare(numerics: str, device: torch.device, seed: int = 0) -> Compared:
    """Samples from a tiny Llama, and computes the same log-probabilities as a trainer does."""
    torch.manual_seed(seed)
    plug_in.register()
    heedful.configure(numerics=numerics)
    try:
        model = by_rows(tiny(device))
        prompts = [torch.randint(512, (length,), device=device) for length in PROMPTS]
        tokens, first = sampled(model, prompts)
        second = trained(model, prompts, tokens)
    finally:
        heedful.configure(numerics=None)
        plug_in.unregister()
    return Compared(
        tokens.numel(), int((first != second).sum()), float((first - second).abs().max())
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m heedful.demo.log_probs")
    parser.add_argument("--numerics", choices=("fast", "invariant"), default="invariant")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    result = compare(options.numerics, torch.device(options.device))
    sys.stdout.write(
        f"{result.tokens} tokens sampled: the log-probabilities of {result.differing} differ"
        f" between sampler and trainer, by {result.largest:.3g} at most\n"
    )
    return int(options.numerics == "invariant" and result.differing > 0)


if __name__ == "__main__":
    sys.exit(main())
