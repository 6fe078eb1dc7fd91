"""Calls that are refused where the table of test_bad_input.py does not say it: after others, for
where tensors lie, for gradients."""

from typing import Any

import pytest
import torch

import heedful.torch as heedful
from cpu.torch.api.test_bad_input import dense, fp8
from heedful.torch.eager.calls import CALLS


def test_a_bad_call_leaves_no_trace_in_the_cache_of_calls():
    CALLS.clear()
    arguments = dense()
    arguments["softcap"] = -1.0
    for _ in range(2):
        with pytest.raises(ValueError, match="softcap"):
            heedful.flash_attn_func(**arguments)
    assert len(CALLS) == 0


def test_one_and_true_are_told_apart_after_either_was_seen():
    arguments = dense()
    heedful.flash_attn_func(**arguments, causal=True, num_splits=1)
    for name, wrong in (("causal", 1), ("num_splits", True)):
        changed: dict[str, Any] = arguments | {"causal": True, "num_splits": 1, name: wrong}
        with pytest.raises(TypeError, match=name):
            heedful.flash_attn_func(**changed)


def test_an_output_in_the_memory_of_an_input_is_refused_every_time():
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    heedful.flash_attn_func(q, k, v, out=torch.empty_like(q))
    for taken in (q, k, v):
        with pytest.raises(ValueError, match="out must have memory of its own"):
            heedful.flash_attn_func(q, k, v, out=taken)


def test_rotary_into_keys_that_are_also_the_values_is_refused():
    k_cache = torch.zeros(1, 8, 1, 16)
    tables = torch.ones(8, 4), torch.zeros(8, 4)
    k = torch.ones(1, 1, 1, 16)
    with pytest.raises(ValueError, match="rotary_cos must be None where v_cache shares"):
        heedful.flash_attn_with_kvcache(
            k, k_cache, k_cache[..., :8], k, k[..., :8], *tables, cache_seqlens=2
        )
    assert not k_cache.any()


def test_gradients_that_nobody_computes_are_refused():
    arguments = {name: tensor for name, tensor in dense().items() if name != "out"}
    arguments["q"].requires_grad_()
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes must not require a gradient"):
        heedful.flash_attn_func(**arguments, alibi_slopes=slopes)
    eight = {name: tensor.requires_grad_() for name, tensor in fp8().items()}
    with pytest.raises(ValueError, match="q must not require a gradient"):
        heedful.flash_attn_func(**eight)


def test_a_packed_form_names_itself_where_a_keyword_is_wrong():
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    q, kv, qkv = torch.zeros(4, 1, 8), torch.zeros(4, 2, 1, 8), torch.zeros(4, 3, 1, 8)
    calls = {
        "flash_attn_qkvpacked_func": (qkv[None],),
        "flash_attn_kvpacked_func": (q[None], kv[None]),
        "flash_attn_varlen_qkvpacked_func": (qkv, bounds, 4),
        "flash_attn_varlen_kvpacked_func": (q, kv, bounds, bounds, 4, 4),
    }
    for name, given in calls.items():
        for wrong in ("causual", "k"):
            words = rf"^{name}\(\) got an unexpected keyword argument '{wrong}'"
            with pytest.raises(TypeError, match=words):
                getattr(heedful, name)(*given, **{wrong: True})
        getattr(heedful, name)(*given, causal=True, return_lse=True)
