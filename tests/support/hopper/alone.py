"""Small grids of the kernels of a Hopper, each a public call that can run in a process of its own:

    python alone.py FILE '{"dtype": "bfloat16", "head_dim": 64, ...}'

writes the call's output, or its gradients, to FILE.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

import heedful
from heedful import BlockMask
from heedful.core.registry.by_hand import forced
from heedful.torch import quantize_kv
from support.problems.served import served

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 60)},
    "packed": {"packed": True, "causal": True},
    # Most tiles see no key: nothing but the rings keeps warps and roles together.
    "blind": {"keys": 90, "causal": True, "window_size": (40, -1)},
}
KINDS = [
    *(("bfloat16", dim) for dim in (64, 128, 192, 256, 512)),
    *(("float8_e4m3fn", dim) for dim in (64, 128, 256)),
]
# Ways of the backward: dQ is added in any order or in one, visits of a key tile are split.
WAYS = {
    "gradients": {},
    "in-order": {"deterministic": True},
    "split": {"backend": "hopper+splits=2"},
}
# What `result` takes, by name.
GRIDS = {
    f"{dtype}-d{dim}-{mask}": {"dtype": dtype, "head_dim": dim, **facts}
    for dtype, dim in KINDS
    for mask, facts in MASKS.items()
} | {
    f"{way}-d{dim}-{mask}": {"dtype": "bfloat16", "head_dim": dim, "grad": True, **how, **facts}
    for way, how in WAYS.items()
    for dim in (64, 128, 256)
    for mask, facts in MASKS.items()
}
# Masks as data: one range of keys a row, two, and lists of tiles.
DATA = {
    "ranges": {"by": "ranges", "causal": True},
    "runs": {"by": "runs"},
    "lists-128": {"by": "lists", "side": 128},
    "lists-64": {"by": "lists", "side": 64, "causal": True},
    # Packed sequences, cut where rows part.
    "cut": {"by": "ranges", "causal": True, "keys": 700, "backend": "hopper+cuts_rows=1"},
}
GRIDS |= {
    f"{name}-d{dim}-{mask}": {"dtype": "bfloat16", "head_dim": dim, "grad": grad, **facts}
    for name, grad in (("bfloat16", False), ("gradients", True))
    for dim in (64, 128)
    for mask, facts in DATA.items()
}
# A list of 64 keys a work tile, whose visits consumers take in turn.
GRIDS |= {
    f"gradients-d{dim}-turns": {"dtype": "bfloat16", "head_dim": dim, "grad": True}
    | DATA["lists-64"]
    | {"backend": "hopper+block_n=64"}
    for dim in (64, 128)
}
# Of narrower values, whose kernel makes dQ by the consumers of its own keys.
GRIDS |= {
    f"gradients-d192v128-{mask}": {"dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128}
    | {"grad": True, **facts}
    for mask, facts in MASKS.items()
}
# By clusters of two programs.
GRIDS |= {
    f"{name}-d512-{mask}": {"dtype": "bfloat16", "head_dim": 512, "grad": True}
    | {"backend": way, **facts}
    for name, way in (("gradients", "hopper/halves"), ("split", "hopper/halves+splits=2"))
    for mask, facts in MASKS.items()
}
# Caches. Parts are merged by who ends last but where all do (merge=1).
CACHES = {
    "bfloat16": {},
    "bfloat16-d64-one": {"head_dim": 64, "lengths": [5000]},
    "bfloat16-d256-whole": {"head_dim": 256, "num_splits": 1},
    "e4m3": {"stored": "float8_e4m3fn"},
    "int8": {"stored": "int8"},
    "int4": {"stored": "int4"},
    "hopper": {"backend": "hopper_decode"},
    "hopper-d64-one": {"backend": "hopper_decode", "head_dim": 64, "lengths": [5000]},
    "hopper-d256": {"backend": "hopper_decode", "head_dim": 256},
    "hopper-d512": {"backend": "decode/wide", "head_dim": 512},
    "hopper-d512-one": {"backend": "decode/wide", "head_dim": 512, "lengths": [5000]},
    "hopper-window": {"backend": "hopper_decode", "window_size": (700, 0)},
    "hopper-all": {"backend": "hopper_decode+merge=1"},
    "latent": {"backend": "mla+merge=0", "heads": 128, "lengths": [5000, 0, 64, 700, 2111] * 27},
    "latent-few": {"backend": "mla+merge=0", "heads": 128},
    "latent-16": {"backend": "mla+merge=1", "heads": 16},
    "latent-swapped": {"backend": "mla_swap_ab+merge=0", "heads": 8},
    "latent-swapped-all": {"backend": "mla_swap_ab+merge=1", "heads": 16},
}
GRIDS |= {f"cache-{name}": {"cached": True, **facts} for name, facts in CACHES.items()}
# Two kernels, the second of which begins while the first runs.
GRIDS |= {
    name: {"mixed": True, "backend": kernel}
    for name, kernel in (("mixed", "mixed/portable"), ("hopper_mixed", "hopper_mixed"))
}


def result(cached: bool = False, grad: bool = False, mixed: bool = False, **facts) -> torch.Tensor:
    """What a grid computes, the same bits in every run."""
    if cached:
        return decoded(**facts)
    if mixed:
        return shared(**facts)
    return gradients(**facts) if grad else call(**facts)


def inputs(dtype: str, head_dim: int, head_dim_v: int, keys: int) -> list[torch.Tensor]:
    """q, k and v of a call whose programs take several tiles of several key tiles each."""
    drawn = torch.Generator().manual_seed(0)

    def some(length, heads, dim):
        x = torch.randn(4, length, heads, dim, generator=drawn)
        return x.to(getattr(torch, dtype)).cuda()

    return [some(700, 16, head_dim), some(keys, 8, head_dim), some(keys, 8, head_dim_v)]


def call(dtype: str, head_dim: int, keys: int = 1100, **options) -> torch.Tensor:
    """The output of a call."""
    q, k, v = inputs(dtype, head_dim, head_dim, keys)
    return attend(q, k, v, **options)


def gradients(
    dtype: str, head_dim: int, head_dim_v: int = 0, keys: int = 1100, **options
) -> torch.Tensor:
    """dk and dv of a call, and dq where its sums have one order."""
    q, k, v = (x.requires_grad_() for x in inputs(dtype, head_dim, head_dim_v or head_dim, keys))
    out = attend(q, k, v, **options)
    dq, *others = torch.autograd.grad(out.square().sum(), (q, k, v))
    found = [dq, *others] if options.get("deterministic") else others
    return torch.cat([x.flatten() for x in found])


def data_of(by: str, rows: int, keys: int, side: int) -> dict[str, Any]:
    """A mask as data of so many rows and keys. side: of a list's tiles."""
    if by == "lists":
        shown = torch.rand(1, 1, rows, keys, generator=torch.Generator().manual_seed(1)) < 0.5
        shown[..., 128:256, :] = False
        shown[..., 300:700] = True
        return {"block_mask": BlockMask.of(shown.cuda(), side=side)}
    place = torch.arange(rows, dtype=torch.int32, device="cuda")
    begin = place // 150 * 150
    bounds = [begin, begin + 500]
    if by == "runs":
        bounds = [0 * place, 0 * place + 40, place + 100, place + 400]
    return {"key_ranges": torch.stack(bounds, -1)[None, None]}


def attend(
    q,
    k,
    v,
    packed: bool = False,
    backend: str = "hopper",
    by: str = "",
    side: int = 0,
    **options: Any,
) -> torch.Tensor:
    """A public call. by: which mask as data it has, see `data_of`."""
    if by:
        options |= data_of(by, q.shape[1], k.shape[1], side)
    if not packed:
        return heedful.flash_attn_func(q, k, v, backend=forced(backend), **options)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    cu_q = torch.tensor([0, 37, 437, 438, 1700, 2800], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 37, 937, 1000, 3000, 4400], dtype=torch.int32, device="cuda")
    return heedful.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 1262, 2000, backend=forced(backend), **options
    )


def decoded(
    backend: str = "decode/portable",
    stored: str = "",
    heads: int = 8,
    head_dim: int = 128,
    lengths: Sequence[int] = (5000, 0, 64, 700, 2111, 1),
    **options: Any,
) -> torch.Tensor:
    """The output of a call of two new tokens a sequence over pages of 16 keys, drawn."""
    is_latent = backend.startswith("mla")
    drawn = torch.Generator().manual_seed(0)
    pages = -(-max(lengths) // 16)
    size = (pages * 6, 16, 1 if is_latent else 2, 576 if is_latent else head_dim)
    table = torch.randint(size[0], (len(lengths), pages), generator=drawn).int()
    q, k, v = (
        torch.randn(shape, generator=drawn).bfloat16().cuda()
        for shape in ((len(lengths), 2, heads, size[3]), size, size)
    )
    if is_latent:
        v = k[..., :512]
    elif stored:
        k, options["k_descale"], _ = quantize_kv(k, stored)
        v, options["v_descale"], _ = quantize_kv(v, stored)
    return heedful.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_table=table.cuda(),
        causal=True,
        backend=forced(backend),
        **options,
    )


def shared(backend: str) -> torch.Tensor:
    """The output of a call over pages of sequences of few queries and of many."""
    torch.manual_seed(0)
    lens_q, lens_k = [300, 1, 0, 17, 3, 16, 1, 512], [900, 5000, 50, 17, 0, 700, 1, 1600]
    call = served(lens_q, lens_k, 5008, 512)
    return heedful.flash_attn_varlen_func(**call, backend=forced(backend))[0]


def environment(**extra: str) -> dict[str, str]:
    """What such a process needs of this one's."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **extra}


def main() -> None:
    torch.save(result(**json.loads(sys.argv[2])).cpu(), sys.argv[1])


if __name__ == "__main__":
    main()
