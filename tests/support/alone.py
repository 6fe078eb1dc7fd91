"""Small grids of the Hopper kernels, each a public call that can run in a process of its own:

    python alone.py FILE '{"dtype": "bfloat16", "head_dim": 64, ...}'

writes the call's output to FILE.
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
# What `call` takes, by name.
GRIDS = {
    f"{dtype}-d{dim}-{mask}": {"dtype": dtype, "head_dim": dim, **facts}
    for dtype, dim in KINDS
    for mask, facts in MASKS.items()
}


def call(
    dtype: str, head_dim: int, packed: bool = False, keys: int = 1100, **options
) -> torch.Tensor:
    """The output of a call whose programs take several tiles of several key tiles each."""
    drawn = torch.Generator().manual_seed(0)

    def some(length, heads):
        x = torch.randn(4, length, heads, head_dim, generator=drawn)
        return x.to(getattr(torch, dtype)).cuda()

    q, k, v = some(700, 16), some(keys, 8), some(keys, 8)
    options["backend"] = "hopper"
    if not packed:
        return heedful.flash_attn_func(q, k, v, **options)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    cu_q = torch.tensor([0, 37, 437, 438, 1700, 2800], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 37, 937, 1000, 3000, 4400], dtype=torch.int32, device="cuda")
    return heedful.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1262, 2000, **options)


def environment(**extra: str) -> dict[str, str]:
    """What such a process needs of this one's."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **extra}


def main() -> None:
    torch.save(call(**json.loads(sys.argv[2])).cpu(), sys.argv[1])


if __name__ == "__main__":
    main()
