"""Errors of the packed forms are about the arguments that were given."""

import pytest
import torch

import heedful

QKV, KV, Q = torch.randn(2, 8, 3, 2, 16), torch.randn(2, 8, 2, 2, 16), torch.randn(2, 8, 2, 16)
ROWS, STARTS = torch.randn(16, 3, 2, 16), torch.tensor([0, 8, 16], dtype=torch.int32)
dense, varlen = heedful.flash_attn_qkvpacked_func, heedful.flash_attn_varlen_qkvpacked_func
keys, packed_keys = heedful.flash_attn_kvpacked_func, heedful.flash_attn_varlen_kvpacked_func


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (dense, (QKV.double(),), r"qkv \(its q\) must be float16"),
        (varlen, (ROWS, STARTS.short(), 8), "cu_seqlens must be int32"),
        (varlen, (ROWS, STARTS, -1), "max_seqlen must be >= 0"),
        (keys, (Q, KV.half()), r"kv \(its k\) must be float32 like q"),
        (keys, (Q.double(), KV), "q must be float16"),
        (packed_keys, (ROWS[:, 0], ROWS[:, :2], STARTS, STARTS.short(), 8, 8), "cu_seqlens_k must"),
    ],
)
def test_an_error_names_what_was_given(function, given, said):
    with pytest.raises((TypeError, ValueError), match=f"^{said}") as called:
        function(*given)
    with pytest.raises(type(called.value), match=f"^{said}"):
        heedful.explain(function, *given)
