"""The attentions that the demo compares, and the cache that it generates with."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import heedful
from heedful.demo.model import Attend, ModelSize


@cache
def rotary(length: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (length, head_dim / 2) of rotary embedding (Su et al. 2021)."""
    powers = torch.arange(0, head_dim, 2, device=device) / head_dim
    angles = torch.arange(length, device=device)[:, None] * 10000.0**-powers
    return angles.cos(), angles.sin()


def _rotated(attend: Callable[..., torch.Tensor]) -> Attend:
    """attend(q, k, v) after rotary embedding, halves of the head dim as the pairs."""

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        one, other = x.float().chunk(2, -1)
        return torch.cat((one * cos - other * sin, one * sin + other * cos), -1).to(x.dtype)

    def of_layer(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cos, sin = (x[:, None] for x in rotary(q.shape[1], q.shape[-1], q.device))
        return attend(rotate(q, cos, sin), rotate(k, cos, sin), v)

    return of_layer


def with_heedful(backend: str | None) -> Attend:
    """heedful's attention; backend=None leaves the choice to the planner."""
    return _rotated(lambda q, k, v: heedful.flash_attn_func(q, k, v, causal=True, backend=backend))


def with_sdpa() -> Attend:
    """PyTorch's own choice of kernel."""
    return _rotated(_sdpa)


def with_math() -> Attend:
    """PyTorch's unfused attention: the same formula, summed and rounded in another order."""
    return with_backend(SDPBackend.MATH)


def with_backend(backend: SDPBackend) -> Attend:
    """PyTorch's attention by one of its kernels."""

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return _sdpa(q, k, v)

    return _rotated(attend)


def _sdpa(q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    shared = {"enable_gqa": True} if k.shape[2] < q.shape[2] else {}
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, **shared).transpose(1, 2)


class CachedAttention:
    """Attention of new characters over a KV cache: they are rotated and appended in place."""

    def __init__(self, size: ModelSize, room: int, example: torch.Tensor, backend: str | None):
        """room: characters that the cache can hold. example: dtype and device of the cache."""
        self.cache = example.new_zeros(size.layers, 2, 1, room, size.heads, size.head_dim)
        self.cos, self.sin = (
            x.to(example.dtype) for x in rotary(room, size.head_dim, example.device)
        )
        self.seqlens = torch.zeros(1, dtype=torch.int32, device=example.device)
        self.backend = backend

    def __call__(self, layer, q, k, v):
        k_cache, v_cache = self.cache[layer]
        return heedful.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k=k.to(k_cache.dtype),
            v=v.to(v_cache.dtype),
            rotary_cos=self.cos,
            rotary_sin=self.sin,
            cache_seqlens=self.seqlens,
            causal=True,
            rotary_interleaved=False,
            backend=self.backend,
        )

    def advance(self, characters: int) -> None:
        """Counts characters in, once every layer has appended them."""
        self.seqlens += characters
