"""Runs FlashAttention-4's own tests of consistency with ours:
python -m same_bits.fa4 FILE [arguments of pytest]

FILE is its tests/cute/test_flash_attn.py. The tests compare bits: decode against prefill, pages
against none, latent vectors in pages, and one extent of splits in two batches. What they import is
a few functions here, with numerics="invariant". They skip Hopper by its compute capability: while
the file is loaded the device has another. `seqlen_k_per_split` is the keys of a part.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from heedful import configure
from heedful import flash_attn_varlen_func as varlen
from heedful.core.registry.by_hand import named

TESTS = (
    "test_flash_attn_paged_deepseek",
    "test_flash_attn_ex2_emu_decode_prefill_consistency",
    "test_flash_attn_varlen_seqlen_k_per_split",
    "test_flash_attn_mla_paged",
)


def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    causal: bool,
    qv: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    num_splits: int = 0,
    seqlen_k_per_split: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed queries. qv: those of values, which are latent vectors then; q and k are
    the rotary parts, if there are any."""
    scale = None
    if qv is not None:
        columns = [x for x in (v, k) if x is not None]
        scale = sum(x.shape[-1] for x in columns) ** -0.5
        k = torch.cat(columns, -1)
        q = torch.cat([x for x in (qv, q) if x is not None], -1)
        v = k[..., : v.shape[-1]]
    assert q is not None and k is not None
    if max_seqlen_k is None:
        assert page_table is not None
        max_seqlen_k = page_table.shape[1] * k.shape[1]
    backend = None
    if seqlen_k_per_split is not None:
        backend = named("hopper", "forward", part_keys=seqlen_k_per_split)
    return varlen(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        softmax_scale=scale,
        causal=causal,
        seqused_k=seqused_k,
        block_table=page_table,
        return_lse=True,
        backend=backend,
    )


def attention_ref(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, **how: bool
) -> tuple[Tensor, None]:
    """Plain attention of as many query as KV heads: in float32, or in the dtype of the inputs."""
    dtype = torch.float32 if how.get("upcast", True) else q.dtype
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    scores = q @ (k * q.shape[-1] ** -0.5).mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2), None


def _refused(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("is of no test that is run")


def modules() -> dict[str, ModuleType]:
    """What the file imports, by name."""
    testing = dict.fromkeys(
        ("generate_qkv", "generate_random_padding_mask", "pad_input", "unpad_input"), _refused
    )
    testing |= {
        "attention_ref": attention_ref,
        "maybe_fake_tensor_mode": lambda fake: lambda test: test,
        "is_fake_mode": lambda: False,
    }
    others = ("flash_attn_func", "get_scheduler_metadata")
    private = ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla")
    contents = {
        "einops": {"rearrange": _refused, "repeat": _refused},
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.cache_utils": {"JITCache": object},
        "flash_attn.cute.testing": testing,
        "flash_attn.cute.interface": dict.fromkeys((*others, *private), _refused)
        | {"flash_attn_varlen_func": flash_attn_varlen_func},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": None},
    }
    made = {name: ModuleType(name) for name in contents}
    for name, values in contents.items():
        made[name].__dict__.update(values)
    return made


class Loading:
    """While the file is loaded, the device has another compute capability."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self):
        with mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (10, 0)):
            yield

    def pytest_pycollect_makeitem(self, name: str):
        """Others have grids of many thousands."""
        return [] if name.startswith("test") and name not in TESTS else None


def main() -> int:
    file, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    with mock.patch.dict(sys.modules, modules()):
        configure(numerics="invariant")
        tests = [f"{file}::{name}" for name in TESTS]
        folder = [
            "--rootdir",
            str(file.parent),
            "--confcutdir",
            str(file.parent),
            "-c",
            "/dev/null",
        ]
        return pytest.main([*tests, *folder, "--noconftest", *arguments], plugins=[Loading()])


if __name__ == "__main__":
    raise SystemExit(main())
