"""Text from a trained model, one character at a time over a KV cache."""

import torch

from heedful.demo.attention import CachedAttention
from heedful.demo.model import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompt: torch.Tensor,
    count: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    backend: str | None,
    temperature: float = 0.8,
) -> list[int]:
    """The prompt (S,) and `count` sampled characters after it."""
    device = model.characters.weight.device
    example = torch.empty((), dtype=dtype, device=device)
    attend = CachedAttention(model.size, len(prompt) + count, example, backend)
    tokens, new = prompt.tolist(), prompt.to(device)[None]
    for _ in range(count):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(new, attend)
        attend.advance(new.shape[1])
        odds = torch.softmax(logits[0, -1].float().cpu() / temperature, -1)
        tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
        new = torch.tensor([[tokens[-1]]], device=device)
    return tokens
