"""Bad calls raise a TypeError or ValueError that names the argument, says what came and what is
wanted; and nothing has been written. messages.txt holds what is said, word by word.

After a change that is meant: WRITE_MESSAGES=1 pytest -n 0 tests/cpu/torch/api/test_bad_input.py
"""

import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as heedful

INT = torch.int32


def ints(*values: int, dtype=INT) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def dense() -> dict[str, Any]:
    return {
        "q": torch.randn(2, 5, 4, 16),
        "k": torch.randn(2, 7, 2, 16),
        "v": torch.randn(2, 7, 2, 8),
        "out": torch.full((2, 5, 4, 8), torch.nan),
    }


def fp8() -> dict[str, Any]:
    tensors = dense()
    return {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if n != "out"}


def varlen() -> dict[str, Any]:
    return {
        "q": torch.randn(5, 4, 16),
        "k": torch.randn(7, 2, 16),
        "v": torch.randn(7, 2, 8),
        "cu_seqlens_q": ints(0, 2, 5),
        "cu_seqlens_k": ints(0, 3, 7),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
        "out": torch.full((5, 4, 8), torch.nan),
    }


def paged_varlen() -> dict[str, Any]:
    pages = {"k": torch.randn(5, 4, 2, 16), "v": torch.randn(5, 4, 2, 8)}
    return varlen() | pages | {"block_table": ints(1, 3).view(2, 1)}


def cache() -> dict[str, Any]:
    return {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(2, 12, 2, 16),
        "v_cache": torch.randn(2, 12, 2, 8),
        "k": torch.randn(2, 1, 2, 16),
        "v": torch.randn(2, 1, 2, 8),
        "cache_seqlens": ints(3, 9),
        "out": torch.full((2, 1, 4, 8), torch.nan),
    }


def rotary() -> dict[str, Any]:
    return cache() | {"rotary_cos": torch.randn(12, 4), "rotary_sin": torch.randn(12, 4)}


def pages() -> dict[str, Any]:
    storage = {"k_cache": torch.randn(6, 4, 2, 16), "v_cache": torch.randn(6, 4, 2, 8)}
    return cache() | storage | {"block_table": ints(0, 1, 2, 3, 4, 5).view(2, 3)}


def quantised() -> dict[str, Any]:
    call = {name: value for name, value in cache().items() if name not in ("k", "v")}
    for name in ("k", "v"):
        stored, scale, shift = heedful.quantize_kv(call[f"{name}_cache"], "int8", 8, True)
        call |= {f"{name}_cache": stored, f"{name}_descale": scale, f"{name}_shift": shift}
    return call


def prefix() -> dict[str, Any]:
    return cache() | {"shared_prefix": (torch.randn(4, 2, 16), torch.randn(4, 2, 8))}


def quantising() -> dict[str, Any]:
    new = {"k": torch.randn(2, 1, 2, 16), "v": torch.randn(2, 1, 2, 8)}
    return quantised() | new


def four_bits() -> dict[str, Any]:
    call = {name: value for name, value in cache().items() if name not in ("k", "v")}
    for name, dim in (("k", 16), ("v", 8)):
        call[f"{name}_cache"] = torch.zeros(2, 12, 2, dim // 2, dtype=torch.uint8)
        call[f"{name}_descale"] = torch.ones(2, 2)
    return call


def long_rotary() -> dict[str, Any]:
    """With two queries, of which one is old, and tokens before the cache."""
    call = rotary() | prefix() | {"q": torch.randn(2, 2, 4, 16), "causal": True}
    tables = {name: torch.randn(17, 4) for name in ("rotary_cos", "rotary_sin")}
    return call | tables | {"out": torch.zeros(2, 2, 4, 8)}


def key_packed() -> dict[str, Any]:
    return {"q": torch.randn(2, 5, 4, 16), "kv": torch.randn(2, 7, 2, 4, 16)}


def packed_rows() -> dict[str, Any]:
    return {"qkv": torch.randn(5, 3, 4, 16), "cu_seqlens": ints(0, 2, 5), "max_seqlen": 3}


def key_packed_rows() -> dict[str, Any]:
    call = {name: value for name, value in varlen().items() if name not in ("k", "v", "out")}
    return call | {"kv": torch.randn(7, 2, 2, 16)}


def listed_parts() -> dict[str, Any]:
    return {name: list(value) for name, value in parts().items()}


def packed() -> dict[str, Any]:
    return {"qkv": torch.randn(2, 5, 3, 4, 16)}


def parts() -> dict[str, Any]:
    return {"outs": torch.randn(3, 2, 5, 4, 8), "lses": torch.randn(3, 2, 4, 5)}


FUNCTIONS = {
    dense: heedful.flash_attn_func,
    fp8: heedful.flash_attn_func,
    varlen: heedful.flash_attn_varlen_func,
    paged_varlen: heedful.flash_attn_varlen_func,
    packed: heedful.flash_attn_qkvpacked_func,
    key_packed: heedful.flash_attn_kvpacked_func,
    packed_rows: heedful.flash_attn_varlen_qkvpacked_func,
    key_packed_rows: heedful.flash_attn_varlen_kvpacked_func,
    parts: heedful.merge_attn_states,
    listed_parts: heedful.merge_attn_states,
}


def meta(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ODD = torch.zeros(2, 1, 4, 8, requires_grad=True)

# (the good call, what is changed, the argument that the message names, the exception)
BAD = [
    (dense, {"q": None}, "q", TypeError),
    (dense, {"q": np.zeros((2, 5, 4, 16), np.float32)}, "q", TypeError),
    (dense, {"k": [1.0]}, "k", TypeError),
    (dense, {"v": None}, "v", TypeError),
    (dense, {"q": torch.randn(5, 4, 16)}, "q", ValueError),
    (dense, {"k": torch.randn(7, 2, 16)}, "k", ValueError),
    (dense, {"v": torch.randn(2, 7, 2, 8, 1)}, "v", ValueError),
    (dense, {"q": torch.randn(2, 5, 4, 16).double()}, "q", TypeError),
    (dense, {"q": torch.ones(2, 5, 4, 16, dtype=torch.int64)}, "q", TypeError),
    (dense, {"k": torch.randn(2, 7, 2, 16).half()}, "k", TypeError),
    (dense, {"v": torch.randn(2, 7, 2, 8).bfloat16()}, "v", TypeError),
    (dense, {"q": torch.randn(2, 5, 4, 16).to_sparse()}, "q", TypeError),
    (dense, {"k": torch.randn(3, 7, 2, 16), "v": torch.randn(3, 7, 2, 8)}, "k", ValueError),
    (dense, {"k": torch.randn(2, 7, 2, 24)}, "k", ValueError),
    (dense, {"k": torch.randn(2, 7, 3, 16), "v": torch.randn(2, 7, 3, 8)}, "k", ValueError),
    (dense, {"k": torch.randn(2, 7, 0, 16), "v": torch.randn(2, 7, 0, 8)}, "k", ValueError),
    (dense, {"q": torch.randn(2, 5, 0, 16)}, "q", ValueError),
    (dense, {"q": torch.randn(2, 5, 4, 0), "k": torch.randn(2, 7, 2, 0)}, "q", ValueError),
    (dense, {"v": torch.randn(2, 7, 2, 1000)}, "v", ValueError),
    (dense, {"v": torch.randn(2, 7, 2, 576)}, "v", ValueError),
    (dense, {"q": torch.randn(2, 5, 4, 577), "k": torch.randn(2, 7, 2, 577)}, "q", ValueError),
    (dense, {"v": torch.randn(2, 6, 2, 8)}, "v", ValueError),
    (dense, {"v": torch.randn(2, 7, 1, 8)}, "v", ValueError),
    (dense, {"k": torch.randn(2, 7, 2, 16, device="meta")}, "k", ValueError),
    (dense, {"dropout_p": -0.1}, "dropout_p", ValueError),
    (dense, {"dropout_p": 1.5}, "dropout_p", ValueError),
    (dense, {"dropout_p": math.nan}, "dropout_p", ValueError),
    (dense, {"dropout_p": "0.1"}, "dropout_p", TypeError),
    (dense, {"dropout_p": True}, "dropout_p", TypeError),
    (dense, {"softmax_scale": math.inf}, "softmax_scale", ValueError),
    (dense, {"softmax_scale": torch.tensor([0.1, 0.2])}, "softmax_scale", TypeError),
    (dense, {"softmax_scale": torch.tensor(0.1, device="meta")}, "softmax_scale", TypeError),
    (dense, {"softmax_scale": torch.tensor(0.1, requires_grad=True)}, "softmax_scale", ValueError),
    (dense, {"softmax_scale": np.ones(2)}, "softmax_scale", TypeError),
    (dense, {"softmax_scale": 1j}, "softmax_scale", TypeError),
    (dense, {"softmax_scale": torch.tensor(True)}, "softmax_scale", TypeError),
    (dense, {"softcap": 10**400}, "softcap", ValueError),
    (dense, {"softmax_scale": [0.1]}, "softmax_scale", TypeError),
    (dense, {"causal": 1}, "causal", TypeError),
    (dense, {"causal": None}, "causal", TypeError),
    (dense, {"causal": np.int64(1)}, "causal", TypeError),
    (dense, {"causal": torch.tensor([True, False])}, "causal", TypeError),
    (dense, {"window_size": 5}, "window_size", ValueError),
    (dense, {"window_size": (1, 2, 3, 4)}, "window_size", ValueError),
    (dense, {"window_size": (-2, 0)}, "window_size", ValueError),
    (dense, {"window_size": (4, 0, -1)}, "window_size", ValueError),
    (dense, {"window_size": (4.0, 0)}, "window_size", TypeError),
    (dense, {"window_size": [4, None]}, "window_size", TypeError),
    (dense, {"window_size": np.array([4.0, 0.0])}, "window_size", TypeError),
    (dense, {"window_size": np.array([[4, 0]])}, "window_size", TypeError),
    (dense, {"window_size": torch.tensor(4)}, "window_size", ValueError),
    (dense, {"window_size": torch.tensor([4, 0], device="meta")}, "window_size", TypeError),
    (dense, {"window_size": "40"}, "window_size", ValueError),
    (dense, {"window_size": {4: 0, 1: 1}}, "window_size", ValueError),
    (dense, {"window_size": (True, 0)}, "window_size", TypeError),
    (dense, {"window_size": torch.tensor([4])}, "window_size", ValueError),
    (dense, {"softcap": -1.0}, "softcap", ValueError),
    (dense, {"softcap": math.nan}, "softcap", ValueError),
    (dense, {"softcap": "30"}, "softcap", TypeError),
    (dense, {"softcap": 1e39}, "softcap", ValueError),
    (dense, {"softcap": 1e-40}, "softcap", ValueError),
    (dense, {"softmax_scale": 1e39}, "softmax_scale", ValueError),
    (dense, {"softmax_scale": -1e300}, "softmax_scale", ValueError),
    (dense, {"alibi_slopes": torch.ones(3)}, "alibi_slopes", ValueError),
    (dense, {"alibi_slopes": torch.ones(3, 4)}, "alibi_slopes", ValueError),
    (dense, {"alibi_slopes": torch.ones(4).half()}, "alibi_slopes", TypeError),
    (dense, {"alibi_slopes": [1.0, 1.0, 1.0, 1.0]}, "alibi_slopes", TypeError),
    (dense, {"deterministic": 1}, "deterministic", TypeError),
    (dense, {"return_attn_probs": "yes"}, "return_attn_probs", TypeError),
    (dense, {"return_lse": 1}, "return_lse", TypeError),
    (dense, {"bias": torch.randn(3, 7)}, "bias", ValueError),
    (dense, {"bias": torch.randn(3, 4, 5, 7)}, "bias", ValueError),
    (dense, {"bias": torch.randn(1, 2, 4, 5, 7)}, "bias", ValueError),
    (dense, {"bias": torch.ones(5, 7, dtype=torch.uint8)}, "bias", TypeError),
    (dense, {"bias": torch.randn(5, 7).double()}, "bias", TypeError),
    (dense, {"sink": torch.randn(2)}, "sink", ValueError),
    (dense, {"sink": torch.randn(4).double()}, "sink", TypeError),
    (dense, {"num_splits": -1}, "num_splits", ValueError),
    (dense, {"num_splits": 1.0}, "num_splits", TypeError),
    (dense, {"num_splits": True}, "num_splits", TypeError),
    (dense, {"num_splits": np.bool_(True)}, "num_splits", TypeError),
    (dense, {"num_splits": np.float64(2)}, "num_splits", TypeError),
    (dense, {"num_splits": torch.tensor(2, device="meta")}, "num_splits", TypeError),
    (dense, {"num_splits": 3, "backend": "sdpa"}, "split", ValueError),
    (dense, {"q_descale": torch.ones(2, 2)}, "q_descale", ValueError),
    (dense, {"k_descale": torch.ones(2, 2)}, "k_descale", ValueError),
    (dense, {"v_descale": torch.ones(())}, "v_descale", ValueError),
    (dense, {"dropout_seed": 0.5, "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"dropout_seed": True, "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"dropout_seed": 2**64, "dropout_p": 0.1}, "dropout_seed", ValueError),
    (dense, {"dropout_seed": torch.ones(1), "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"dropout_seed": np.float64(1), "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"dropout_seed": np.array([1, 2]), "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"dropout_origin": 5}, "dropout_origin", ValueError),
    (dense, {"dropout_origin": None}, "dropout_origin", ValueError),
    (dense, {"dropout_origin": (0, 0, 0)}, "dropout_origin", ValueError),
    (dense, {"dropout_origin": (0, 0, 0, -1)}, "dropout_origin", ValueError),
    (dense, {"dropout_origin": (0, 0, 2**32, 0)}, "dropout_origin", ValueError),
    (dense, {"dropout_origin": (0, 1.0, 0, 0)}, "dropout_origin", TypeError),
    (dense, {"dropout_origin": (0, False, 0, 0)}, "dropout_origin", TypeError),
    (dense, {"dropout_seed": torch.ones(2).long(), "dropout_p": 0.1}, "dropout_seed", ValueError),
    (dense, {"backend": "cuda"}, "backend", ValueError),
    (dense, {"backend": "portable"}, "backend", ValueError),
    (dense, {"backend": 3}, "backend", TypeError),
    (dense, {"out": torch.zeros(2, 5, 4, 16)}, "out", ValueError),
    (dense, {"out": torch.zeros(2, 5, 4, 8).half()}, "out", TypeError),
    (dense, {"out": torch.zeros(2, 5, 8, 4).transpose(-1, -2)}, "out", ValueError),
    (dense, {"out": torch.ones(2, 1, 4, 8).expand(2, 5, 4, 8)}, "out", ValueError),
    (dense, {"out": "here"}, "out", TypeError),
    (dense, {"q": torch.randn(2, 5, 4, 16, requires_grad=True)}, "out", ValueError),
    (fp8, {"q_descale": torch.ones(2, 4)}, "q_descale", ValueError),
    (fp8, {"k_descale": torch.ones(2, 2).half()}, "k_descale", TypeError),
    (fp8, {"out": torch.zeros(2, 5, 4, 8).to(torch.float8_e4m3fn)}, "out", TypeError),
    (varlen, {"max_seqlen_q": 2**31}, "max_seqlen_q", ValueError),
    (varlen, {"max_seqlen_k": 2**64}, "max_seqlen_k", ValueError),
    (varlen, {"q": torch.randn(1, 5, 4, 16)}, "q", ValueError),
    (varlen, {"cu_seqlens_q": None}, "cu_seqlens_q", TypeError),
    (varlen, {"cu_seqlens_k": None}, "cu_seqlens_k", ValueError),
    (varlen, {"cu_seqlens_q": [0, 2, 5]}, "cu_seqlens_q", TypeError),
    (varlen, {"cu_seqlens_q": ints(0, 2, 5, dtype=torch.int16)}, "cu_seqlens_q", TypeError),
    (varlen, {"cu_seqlens_q": ints(0, 2, 5).view(3, 1)}, "cu_seqlens_q", ValueError),
    (varlen, {"cu_seqlens_q": ints()}, "cu_seqlens_q", ValueError),
    (varlen, {"cu_seqlens_k": ints(0, 7)}, "cu_seqlens_k", ValueError),
    (varlen, {"cu_seqlens_q": ints(0, 4, 3)}, "cu_seqlens_q", ValueError),
    (varlen, {"cu_seqlens_k": ints(0, 3, 9)}, "cu_seqlens_k", ValueError),
    (varlen, {"max_seqlen_q": torch.tensor(3.0)}, "max_seqlen_q", TypeError),
    (varlen, {"max_seqlen_q": torch.tensor([3, 3])}, "max_seqlen_q", TypeError),
    (varlen, {"max_seqlen_q": torch.tensor(2)}, "max_seqlen_q", ValueError),
    (varlen, {"max_seqlen_q": None}, "max_seqlen_q", TypeError),
    (varlen, {"max_seqlen_k": np.float32(4)}, "max_seqlen_k", TypeError),
    (varlen, {"max_seqlen_k": torch.tensor(4.0, device="meta")}, "max_seqlen_k", TypeError),
    (varlen, {"max_seqlen_k": 4.0}, "max_seqlen_k", TypeError),
    (varlen, {"max_seqlen_q": -1}, "max_seqlen_q", ValueError),
    (varlen, {"max_seqlen_k": 3}, "max_seqlen_k", ValueError),
    (varlen, {"seqused_q": ints(1)}, "seqused_q", ValueError),
    (varlen, {"seqused_k": torch.ones(2)}, "seqused_k", TypeError),
    (varlen, {"seqused_k": ints(4, 4)}, "seqused_k", ValueError),
    (varlen, {"block_table": ints(0, 1).view(2, 1)}, "k", ValueError),
    (paged_varlen, {"block_table": ints(1, 9).view(2, 1)}, "block_table", ValueError),
    (paged_varlen, {"block_table": ints(1, 3)}, "block_table", ValueError),
    (cache, {"q": torch.randn(2, 4, 16)}, "q", ValueError),
    (cache, {"k_cache": torch.randn(3, 12, 2, 16)}, "k_cache", ValueError),
    (cache, {"v_cache": torch.randn(2, 11, 2, 8)}, "v_cache", ValueError),
    (cache, {"k_cache": torch.randn(2, 12, 16, 2).transpose(-1, -2)}, "k_cache", ValueError),
    (cache, {"v_cache": torch.randn(2, 12, 8, 2).transpose(-1, -2)}, "v_cache", ValueError),
    (cache, {"k_cache": torch.randn(2, 1, 2, 16).expand(2, 12, 2, 16)}, "k_cache", ValueError),
    (cache, {"k_cache": torch.randn(2, 12, 2, 16).half()}, "k_cache", TypeError),
    (cache, {"k": None}, "k", ValueError),
    (cache, {"v": None}, "v", ValueError),
    (cache, {"k": torch.randn(2, 1, 2, 16).half()}, "k", TypeError),
    (cache, {"k": torch.randn(2, 1, 1, 16)}, "k", ValueError),
    (cache, {"v": torch.randn(2, 2, 2, 8)}, "v", ValueError),
    (cache, {"k": torch.randn(2, 13, 2, 16), "v": torch.randn(2, 13, 2, 8)}, "k", ValueError),
    (cache, {"cache_seqlens": None}, "cache_seqlens", ValueError),
    (cache, {"cache_seqlens": 12}, "cache_seqlens", ValueError),
    (cache, {"cache_seqlens": -1}, "cache_seqlens", ValueError),
    (cache, {"cache_seqlens": 2.0}, "cache_seqlens", TypeError),
    (cache, {"cache_seqlens": [3, 9]}, "cache_seqlens", TypeError),
    (cache, {"cache_seqlens": np.int64(12)}, "cache_seqlens", ValueError),
    (cache, {"cache_seqlens": torch.tensor(2.0)}, "cache_seqlens", TypeError),
    (cache, {"cache_seqlens": ints(3, 12)}, "cache_seqlens", ValueError),
    (cache, {"cache_seqlens": ints(3, 9, dtype=torch.int16)}, "cache_seqlens", TypeError),
    (cache, {"cache_batch_idx": ints(0, 2)}, "cache_batch_idx", ValueError),
    (cache, {"cache_batch_idx": ints(0)}, "cache_batch_idx", ValueError),
    (cache, {"cache_leftpad": ints(0, 13)}, "cache_leftpad", ValueError),
    (cache, {"cache_leftpad": torch.zeros(2)}, "cache_leftpad", TypeError),
    (cache, {"rotary_cos": torch.randn(12, 4)}, "rotary_sin", ValueError),
    (cache, {"return_softmax_lse": 1}, "return_softmax_lse", TypeError),
    (cache, {"rotary_interleaved": 1}, "rotary_interleaved", TypeError),
    (cache, {"tree_mask": torch.ones(2, 1, 2, dtype=torch.bool)}, "tree_mask", ValueError),
    (cache, {"tree_mask": torch.ones(2, 1, 1)}, "tree_mask", TypeError),
    (cache, {"k_descale": torch.ones(2, 2)}, "k_descale", ValueError),
    (cache, {"out": torch.zeros(2, 1, 4, 9)}, "out", ValueError),
    (rotary, {"rotary_sin": torch.randn(12, 3)}, "rotary_sin", ValueError),
    (rotary, {"rotary_cos": torch.ones(11, 4), "rotary_sin": torch.ones(11, 4)}, "rotary_cos"),
    (rotary, {"rotary_cos": torch.randn(12, 9), "rotary_sin": torch.randn(12, 9)}, "rotary_cos"),
    (rotary, {"rotary_cos": torch.randn(12, 4).double()}, "rotary_cos", TypeError),
    (rotary, {"k": None, "v": None}, "rotary_cos", ValueError),
    (pages, {"block_table": ints(0, 1, 2).view(1, 3)}, "block_table", ValueError),
    (pages, {"block_table": torch.zeros(2, 3)}, "block_table", TypeError),
    (pages, {"block_table": ints(0, 1, 2, 3, 4, -1).view(2, 3)}, "block_table", ValueError),
    (pages, {"cache_batch_idx": ints(0, 1)}, "cache_batch_idx", ValueError),
    (quantised, {"k_descale": torch.ones(2, 12, 2, 3)}, "k_descale", ValueError),
    (quantised, {"k_descale": None}, "k_descale", ValueError),
    (quantised, {"v_descale": torch.ones(2, 2), "v_shift": torch.ones(2, 2)}, "v_descale"),
    (quantised, {"v_shift": None}, "v_shift", ValueError),
    (quantised, {"k_shift": torch.ones(2, 12, 2, 1)}, "k_shift", ValueError),
    (quantising, {"k": torch.randn(2, 1, 2, 16).half()}, "k", TypeError),
    (quantising, {"v": torch.ones(2, 1, 2, 8).to(torch.int8)}, "v", TypeError),
    (quantising, {"k": torch.ones(2, 1, 2, 16).to(torch.int8)}, "v", TypeError),
    (quantising, {"v": torch.randn(2, 1, 2, 16)}, "v", ValueError),
    (quantising, {"k_descale": torch.ones(2, 12, 2, 1).expand(2, 12, 2, 2)}, "k_descale"),
    (quantising, {"v_shift": torch.ones(2, 12, 1, 1).expand(2, 12, 2, 1)}, "v_shift", ValueError),
    (quantising, {"k_shift": torch.ones(2, 12, 2, 4)[..., ::2]}, "k_shift", ValueError),
    (prefix, {"shared_prefix": torch.randn(4, 2, 16)}, "shared_prefix", TypeError),
    (prefix, {"shared_prefix": (torch.randn(4, 2, 16), None)}, "shared_prefix", TypeError),
    (prefix, {"shared_prefix": (torch.randn(4, 2, 16), torch.randn(3, 2, 8))}, "shared_prefix"),
    (prefix, {"window_size": (3, 0)}, "shared_prefix", ValueError),
    (prefix, {"alibi_slopes": torch.ones(4)}, "shared_prefix", ValueError),
    (packed, {"qkv": torch.randn(2, 5, 2, 4, 16)}, "qkv", ValueError),
    (packed, {"qkv": torch.randn(5, 3, 4, 16)}, "qkv", ValueError),
    (parts, {"outs": torch.randn(2, 5, 4)}, "outs", ValueError),
    (parts, {"outs": torch.randn(3, 2, 5, 4, 8).double()}, "outs", TypeError),
    (parts, {"lses": torch.randn(3, 2, 5, 4)}, "lses", ValueError),
    (parts, {"lses": torch.randn(3, 2, 4, 5).half()}, "lses", TypeError),
    (parts, {"sink": torch.randn(3)}, "sink", ValueError),
    (dense, {"v": meta(2, 7, 2, 8)}, "v", ValueError),
    (dense, {"bias": meta(5, 7)}, "bias", ValueError),
    (dense, {"bias": torch.eye(5, 7).to_sparse()}, "bias", TypeError),
    (dense, {"sink": meta(4)}, "sink", ValueError),
    (dense, {"alibi_slopes": meta(4)}, "alibi_slopes", ValueError),
    (dense, {"alibi_slopes": torch.ones(2, 4, 1)}, "alibi_slopes", ValueError),
    (dense, {"bias": torch.randn(2, 4, 5, 6)}, "bias", ValueError),
    (dense, {"bias": torch.randn(2, 4, 6, 7)}, "bias", ValueError),
    (dense, {"bias": torch.randn(2, 2, 5, 7)}, "bias", ValueError),
    (dense, {"bias": torch.randn(0)}, "bias", ValueError),
    (dense, {"key_ranges": torch.zeros(2, 1, 5, 2)}, "key_ranges", TypeError),
    (dense, {"key_ranges": torch.zeros(2, 1, 5, 2, dtype=torch.int64)}, "key_ranges", TypeError),
    (dense, {"key_ranges": torch.zeros(2, 1, 5, 3, dtype=INT)}, "key_ranges", ValueError),
    (dense, {"key_ranges": torch.zeros(2, 2, 5, 2, dtype=INT)}, "key_ranges", ValueError),
    (dense, {"key_ranges": torch.zeros(2, 1, 4, 2, dtype=INT)}, "key_ranges", ValueError),
    (dense, {"key_ranges": torch.zeros(5, 2, dtype=INT)}, "key_ranges", ValueError),
    (dense, {"key_ranges": meta(2, 1, 5, 2, dtype=INT)}, "key_ranges", ValueError),
    (dense, {"out": meta(2, 5, 4, 8)}, "out", ValueError),
    (dense, {"dropout_seed": meta(1, dtype=torch.int64)}, "dropout_seed", ValueError),
    (dense, {"dropout_seed": -(2**63) - 1, "dropout_p": 0.1}, "dropout_seed", ValueError),
    (dense, {"dropout_seed": 1j, "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"dropout_seed": torch.tensor(True), "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"dropout_seed": torch.tensor(1j), "dropout_p": 0.1}, "dropout_seed", TypeError),
    (dense, {"num_splits": "2"}, "num_splits", TypeError),
    (dense, {"num_splits": torch.tensor([2, 2])}, "num_splits", TypeError),
    (dense, {"num_splits": torch.tensor(2.0)}, "num_splits", TypeError),
    (dense, {"dropout_p": None}, "dropout_p", TypeError),
    (dense, {"window_size": b"40"}, "window_size", ValueError),
    (dense, {"window_size": {4, 1}}, "window_size", ValueError),
    (dense, {"window_size": None}, "window_size", ValueError),
    (dense, {"window_size": (4, (0,))}, "window_size", TypeError),
    (dense, {"causal": torch.tensor(1)}, "causal", TypeError),
    (dense, {"causal": meta(dtype=torch.bool)}, "causal", TypeError),
    (dense, {"causal": "yes"}, "causal", TypeError),
    (fp8, {"q_descale": torch.ones(2)}, "q_descale", ValueError),
    (fp8, {"k_descale": torch.ones(2, 7, 2, 2)}, "v_descale", ValueError),
    (fp8, {"v_descale": torch.ones(2, 1)}, "v_descale", ValueError),
    (fp8, {"q_descale": torch.ones(1, 1)}, "q_descale", ValueError),
    (varlen, {"k": torch.randn(1, 7, 2, 16)}, "k", ValueError),
    (varlen, {"v": torch.randn(1, 7, 2, 8)}, "v", ValueError),
    (varlen, {"key_ranges": torch.zeros(2, 1, 5, 2, dtype=INT)}, "key_ranges", ValueError),
    (varlen, {"key_ranges": torch.zeros(6, 2, dtype=INT)}, "key_ranges", ValueError),
    (varlen, {"max_seqlen_k": -2}, "max_seqlen_k", ValueError),
    (varlen, {"max_seqlen_k": torch.tensor(True)}, "max_seqlen_k", TypeError),
    (varlen, {"max_seqlen_k": torch.tensor(1j)}, "max_seqlen_k", TypeError),
    (varlen, {"max_seqlen_k": "4"}, "max_seqlen_k", TypeError),
    (varlen, {"cu_seqlens_q": meta(3, dtype=INT)}, "cu_seqlens_q", ValueError),
    (varlen, {"cu_seqlens_k": meta(3, dtype=INT)}, "cu_seqlens_k", ValueError),
    (varlen, {"cu_seqlens_q": ints(-1, 2, 5)}, "cu_seqlens_q", ValueError),
    (varlen, {"cu_seqlens_q": ints(0, 2, 6), "max_seqlen_q": 4}, "cu_seqlens_q", ValueError),
    (varlen, {"cu_seqlens_k": ints(3, 2, 7)}, "cu_seqlens_k", ValueError),
    (varlen, {"seqused_q": ints(2, 4)}, "seqused_q", ValueError),
    (varlen, {"seqused_q": torch.ones(2)}, "seqused_q", TypeError),
    (varlen, {"seqused_k": ints(4)}, "seqused_k", ValueError),
    (varlen, {"seqused_k": meta(2, dtype=INT)}, "seqused_k", ValueError),
    (paged_varlen, {"k": torch.randn(7, 2, 16)}, "k", ValueError),
    (paged_varlen, {"v": torch.randn(7, 2, 8)}, "v", ValueError),
    (paged_varlen, {"cu_seqlens_k": None}, "cu_seqlens_k", ValueError),
    (paged_varlen, {"block_table": ints(1, 3, 0).view(3, 1)}, "block_table", ValueError),
    (paged_varlen, {"block_table": ints(1, 5).view(2, 1)}, "block_table", ValueError),
    (cache, {"v_cache": torch.randn(2, 12, 8)}, "v_cache", ValueError),
    (cache, {"k_cache": torch.randn(2, 12, 16)}, "k_cache", ValueError),
    (cache, {"v_cache": torch.randn(2, 12, 2, 8).half()}, "v_cache", TypeError),
    (cache, {"k_cache": torch.ones(2, 12, 2, 16).int()}, "k_cache", TypeError),
    (cache, {"k_cache": meta(2, 12, 2, 16)}, "k_cache", ValueError),
    (cache, {"v_cache": None}, "v_cache", TypeError),
    (cache, {"v_cache": torch.randn(2, 1, 2, 8).expand(2, 12, 2, 8)}, "v_cache", ValueError),
    (cache, {"v_cache": torch.randn(2, 12, 2, 513)}, "v_cache", ValueError),
    (cache, {"k_cache": torch.randn(2, 12, 2, 15)}, "k_cache", ValueError),
    (cache, {"k_cache": torch.ones(2, 12, 3, 16), "v_cache": torch.ones(2, 12, 3, 8)}, "k_cache"),
    (cache, {"k": meta(2, 1, 2, 16)}, "k", ValueError),
    (cache, {"v": "new"}, "v", TypeError),
    (cache, {"k": torch.randn(2, 2, 16)}, "k", ValueError),
    (cache, {"v": torch.randn(2, 1, 2, 9)}, "v", ValueError),
    (cache, {"cache_seqlens": meta(2, dtype=INT)}, "cache_seqlens", ValueError),
    (cache, {"cache_seqlens": ints(3)}, "cache_seqlens", ValueError),
    (cache, {"cache_seqlens": True}, "cache_seqlens", TypeError),
    (cache, {"cache_batch_idx": ints(-1, 0)}, "cache_batch_idx", ValueError),
    (cache, {"cache_batch_idx": torch.ones(2)}, "cache_batch_idx", TypeError),
    (cache, {"cache_batch_idx": meta(2, dtype=INT)}, "cache_batch_idx", ValueError),
    (cache, {"cache_leftpad": ints(-1, 0)}, "cache_leftpad", ValueError),
    (cache, {"cache_leftpad": ints(0)}, "cache_leftpad", ValueError),
    (cache, {"cache_leftpad": meta(2, dtype=INT)}, "cache_leftpad", ValueError),
    (cache, {"rotary_sin": torch.randn(12, 4)}, "rotary_cos", ValueError),
    (cache, {"tree_mask": torch.ones(1, 2, 2, dtype=torch.bool)}, "tree_mask", ValueError),
    (cache, {"tree_mask": torch.ones(3, 1, 1, dtype=torch.bool)}, "tree_mask", ValueError),
    (cache, {"tree_mask": torch.ones(1, 1, dtype=torch.bool)}, "tree_mask", ValueError),
    (cache, {"key_ranges": torch.zeros(3, 1, 1, 2, dtype=INT)}, "key_ranges", ValueError),
    (cache, {"v_shift": torch.ones(2, 2)}, "v_shift", ValueError),
    (cache, {"out": ODD.detach()[:, :, :, :1].expand(2, 1, 4, 8)}, "out", ValueError),
    (cache, {"out": ODD}, "out", ValueError),
    (rotary, {"rotary_cos": torch.randn(12)}, "rotary_cos", ValueError),
    (rotary, {"rotary_cos": torch.ones(12, 0), "rotary_sin": torch.ones(12, 0)}, "rotary_cos"),
    (rotary, {"rotary_cos": meta(12, 4)}, "rotary_cos", ValueError),
    (rotary, {"rotary_sin": torch.randn(12, 4).half()}, "rotary_sin", TypeError),
    (rotary, {"rotary_sin": torch.randn(13, 4)}, "rotary_sin", ValueError),
    (prefix, {"shared_prefix": (torch.ones(4, 2, 16),) * 3}, "shared_prefix", TypeError),
    (
        long_rotary,
        {
            "rotary_cos": torch.ones(16, 4),
            "rotary_sin": torch.ones(16, 4),
            "cache_seqlens": ints(3, 11),
        },
        "rotary_cos",
    ),
    (pages, {"k_cache": torch.ones(6, 0, 2, 16), "v_cache": torch.ones(6, 0, 2, 8)}, "k_cache"),
    (pages, {"k_cache": torch.randn(24, 2, 16)}, "k_cache", ValueError),
    (pages, {"cache_seqlens": ints(3, 12)}, "cache_seqlens", ValueError),
    (pages, {"cache_seqlens": 12}, "cache_seqlens", ValueError),
    (pages, {"block_table": meta(2, 3, dtype=INT)}, "block_table", ValueError),
    (quantised, {"v_descale": None}, "v_descale", ValueError),
    (quantised, {"k_shift": None}, "k_shift", ValueError),
    (quantised, {"v_shift": torch.ones(2, 12, 2, 2)}, "v_shift", ValueError),
    (quantised, {"k_descale": torch.ones(2, 12, 2, 0)}, "k_descale", ValueError),
    (quantised, {"k_descale": torch.ones(2, 2), "k_shift": torch.ones(2, 1)}, "k_shift"),
    (quantised, {"v_descale": torch.ones(2, 12, 2, 1).half()}, "v_descale", TypeError),
    (quantised, {"v_descale": torch.ones(2, 11, 2, 1)}, "v_descale", ValueError),
    (quantised, {"k_descale": None, "k_shift": None, "v_shift": None}, "k_descale"),
    (quantised, {"v_descale": None, "k_shift": None, "v_shift": None}, "v_descale"),
    (quantised, {"q": torch.ones(2, 1, 4, 16).to(torch.float8_e4m3fn)}, "k_cache", TypeError),
    (four_bits, {"k_cache": torch.zeros(2, 12, 2, 16, dtype=torch.uint8)}, "k_cache", ValueError),
    (four_bits, {"v_cache": torch.zeros(2, 12, 2, 257, dtype=torch.uint8)}, "v_cache", ValueError),
    (prefix, {"shared_prefix": (torch.randn(4, 2, 16),)}, "shared_prefix", TypeError),
    (prefix, {"shared_prefix": [torch.randn(4, 2, 16)] * 2}, "shared_prefix", TypeError),
    (prefix, {"shared_prefix": (torch.ones(4, 1, 16), torch.ones(4, 2, 8))}, "shared_prefix"),
    (prefix, {"shared_prefix": (torch.ones(4, 2, 16), torch.ones(4, 2, 16))}, "shared_prefix"),
    (prefix, {"shared_prefix": (torch.ones(2, 4, 2, 16), torch.ones(4, 2, 8))}, "shared_prefix"),
    (prefix, {"shared_prefix": (torch.ones(()), torch.ones(4, 2, 8))}, "shared_prefix"),
    (prefix, {"shared_prefix": (meta(4, 2, 16), torch.ones(4, 2, 8))}, "shared_prefix"),
    (prefix, {"shared_prefix": (torch.ones(4, 2, 16).half(),) * 2}, "shared_prefix", TypeError),
    (key_packed, {"kv": torch.randn(2, 7, 3, 4, 16)}, "kv", ValueError),
    (key_packed, {"kv": None}, "kv", TypeError),
    (packed_rows, {"qkv": torch.randn(5, 2, 4, 16)}, "qkv", ValueError),
    (packed_rows, {"qkv": torch.randn(2, 5, 3, 4, 16)}, "qkv", ValueError),
    (key_packed_rows, {"kv": torch.randn(7, 1, 2, 16)}, "kv", ValueError),
    (parts, {"outs": torch.randn(0, 2, 5, 4, 8)}, "outs", ValueError),
    (parts, {"outs": None}, "outs", TypeError),
    (parts, {"lses": meta(3, 2, 4, 5)}, "lses", ValueError),
    (parts, {"lses": torch.randn(2, 2, 4, 5)}, "lses", ValueError),
    (parts, {"sink": torch.randn(4).double()}, "sink", TypeError),
    (parts, {"sink": meta(4)}, "sink", ValueError),
    (listed_parts, {"outs": []}, "outs", ValueError),
    (listed_parts, {"outs": [torch.ones(2, 5, 4, 8), torch.ones(2, 5, 4, 9)]}, "outs", ValueError),
    (listed_parts, {"outs": [torch.ones(5, 4, 8), torch.ones(5, 4, 8).half()]}, "outs"),
    (listed_parts, {"lses": [torch.ones(2, 4, 5), None]}, "lses", TypeError),
]


GOLDEN = Path(__file__).with_name("messages.txt")


def named(cases) -> list[tuple[str, tuple]]:
    """Each case with its name: the call, what is changed, and a number where that is not enough."""
    seen: Counter[str] = Counter()
    names = []
    for case in cases:
        name = f"{case[0].__name__}-{'-'.join(case[1])}"
        seen[name] += 1
        names.append((f"{name}-{seen[name]}", case))
    return names


NAMED = named(BAD)


def said() -> dict[str, str]:
    """What was said of each bad call, by its name."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines() if GOLDEN.exists() else []
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize(("name", "case"), NAMED, ids=[name for name, _ in NAMED])
def test_a_bad_call_names_the_argument_and_writes_nothing(name, case):
    make, changes, argument, *kind = case
    function = FUNCTIONS.get(make, heedful.flash_attn_with_kvcache)
    arguments = make()
    function(**arguments)
    arguments = make() | changes
    tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    before = {n: t.detach().clone() for n, t in tensors.items() if not t.is_meta}
    with pytest.raises(kind[0] if kind else ValueError) as caught:
        function(**arguments)
    message = str(caught.value)
    if argument in ("backend", "split"):
        assert argument in message
    else:
        assert re.match(rf"{argument}(\[\d])? (must|bounds)\b.*, got ", message), message
    for tensor, old in before.items():
        assert same_bits(tensors[tensor].detach(), old), f"{tensor} was written"
    if argument in ("backend", "split"):
        return
    # How NumPy's values are written differs from version to version.
    words = re.sub(r"got (ndarray|float\d+|int\d+|bool)_? \(.*", r"got \1", message)
    words = f"{caught.type.__name__}: {words}"
    if os.environ.get("WRITE_MESSAGES"):
        lines = said() | {name: words}
        text = "".join(f"{name}: {lines[name]}\n" for name, _ in NAMED if name in lines)
        GOLDEN.write_text(text, encoding="utf-8")
    assert said()[name] == words


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def test_the_bad_calls_are_many_and_distinct():
    assert len({f"{case[0]} {case[1]}" for case in BAD}) == len(BAD) >= 60
