"""Every token that an engine serves over the plug-in's classes is that of a dense model."""

import pytest
import torch

from support.integrations import vllm_stub
from support.integrations.served import latent, plain, served
from support.integrations.tiny_model import Facts

CPU = "cpu", torch.float32
LAYOUTS = vllm_stub.RECORDING["modules"]["vllm.v1.kv_cache_layout"]["KVCacheLayout"]["attributes"]
PLAIN = {
    "plain": Facts(),
    "windows": Facts(windows=(7, None)),
    "sinks": Facts(windows=(9, None), sinks=True),
    "softcap": Facts(softcap=3.0),
    "alibi": Facts(alibi=True),
    "one head of keys": Facts(heads_k=1),
}


@pytest.mark.parametrize("name, drafts", [("plain", 0), *((name, 3) for name in PLAIN)])
def test_every_token_is_that_of_a_dense_model(name, drafts, vllm):
    engine = served(PLAIN[name], CPU, plain(vllm), drafts=drafts, blocks=5)
    expected = {"mixed batch", "preemption", "chunked prefill"}
    expected |= {"accepted draft", "rejected draft"} if drafts else set()
    assert engine.events == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_each_layout_of_the_cache(layout, vllm):
    served(Facts(), CPU, plain(vllm, layout))


def test_steps_that_are_padded_as_those_of_a_graph_are(vllm):
    served(Facts(windows=(7, None)), CPU, plain(vllm), drafts=2, blocks=5, pads=True)


@pytest.mark.parametrize("stored", ["auto", "fp8"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_every_token_of_latent_attention_is_that_of_a_dense_model(drafts, stored, vllm):
    facts = Facts(rank=24, rotary=8, kv_cache_dtype=stored)
    engine = served(facts, CPU, latent(vllm), drafts=drafts, blocks=5)
    assert {"mixed batch", "preemption", "chunked prefill"} <= engine.events


def test_a_cache_of_8_bits_is_served_or_refused_by_name(vllm):
    from heedful.integrations.vllm.planned import why_not

    facts = Facts(kv_cache_dtype="fp8")
    if why_not(16, 16, torch.float32, "fp8", None, False, None, latent=False) is None:
        served(facts, CPU, plain(vllm), drafts=3, blocks=5)
        return
    with pytest.raises(ValueError, match="of float32 queries and kv_cache_dtype 'fp8'"):
        served(facts, CPU, plain(vllm))


def test_calls_of_layers_are_counted(vllm):
    from heedful.integrations.vllm import paths, reset_paths

    reset_paths()
    served(Facts(windows=(None,)), CPU, plain(vllm))
    found = paths()
    assert set(found) == {"append", "paged"} and found["append"] == found["paged"] > 10
    reset_paths()
    assert not paths()
