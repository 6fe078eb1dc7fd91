"""Small grids of the Hopper kernels, each a public call that can run in a process of its own:

    python alone.py FILE '{"dtype": "bfloat16", "head_dim": 64, ...}'

writes the call's output, or its gradients, to FILE.
"""

import json
import os
import sys

import torch

import heedful

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 60)},
    "packed": {"packed": True, "causal": True},
    # Most tiles see no key: nothing but the rings keeps warps and roles together.
    "blind": {"keys": 90, "causal": True, "window_size": (40, -1)},
}
KINDS = [
    *(("bfloat16", dim) for dim in (64, 128, 192, 256)),
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
# Of narrower values, whose kernel makes dQ by the consumers of its own keys.
GRIDS |= {
    f"gradients-d192v128-{mask}": {"dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128}
    | {"grad": True, **facts}
    for mask, facts in MASKS.items()
}


def result(grad: bool = False, **facts) -> torch.Tensor:
    """What a grid computes, the same bits in every run."""
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


def attend(q, k, v, packed: bool = False, backend: str = "hopper", **options) -> torch.Tensor:
    """A public call."""
    if not packed:
        return heedful.flash_attn_func(q, k, v, backend=backend, **options)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    cu_q = torch.tensor([0, 37, 437, 438, 1700, 2800], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 37, 937, 1000, 3000, 4400], dtype=torch.int32, device="cuda")
    return heedful.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 1262, 2000, backend=backend, **options
    )


def environment(**extra: str) -> dict[str, str]:
    """What such a process needs of this one's."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **extra}


def main() -> None:
    torch.save(result(**json.loads(sys.argv[2])).cpu(), sys.argv[1])


if __name__ == "__main__":
    main()
