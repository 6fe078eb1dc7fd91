"""vLLM's plug-in on a GPU: the engine's tokens are those of a dense model, eagerly and by one graph
for all steps, and slots of a cache get what plain assignment puts there."""

import pytest
import torch

from heedful.torch.eager.slots import append_slots
from support.integrations import vllm_stub
from support.integrations.served import latent, plain, served
from support.integrations.tiny_model import Facts

pytestmark = pytest.mark.gpu

MODELS = {
    "plain": Facts(heads=8, heads_k=2, dim=64),
    "dim 128, windows": Facts(heads=4, heads_k=1, dim=128, windows=(20, None)),
    "sinks": Facts(heads=8, heads_k=8, dim=64, windows=(9, None), sinks=True),
    "softcap": Facts(heads=8, heads_k=2, dim=64, softcap=3.0),
}


@pytest.fixture(autouse=True)
def vllm():
    with vllm_stub.installed() as made:
        yield made


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_that_of_a_dense_model(name, layout, vllm):
    layers = plain(vllm, layout, "PIECEWISE")
    engine = served(MODELS[name], ("cuda", torch.bfloat16), layers, drafts=3, blocks=5)
    assert {"mixed batch", "preemption", "chunked prefill"} <= engine.events


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_serves_all_lengths(name, dtype, vllm):
    """Prefills, decodes, mixed batches and verified drafts replay the graph of the first step."""
    layers = plain(vllm, "LBHNC", "FULL", captures=True)
    engine = served(MODELS[name], ("cuda", dtype), layers, drafts=3, blocks=5, pads=True)
    assert engine.layers.graphs == 1
    assert {"mixed batch", "preemption", "chunked prefill"} <= engine.events


@pytest.mark.parametrize("stored", ["auto", "fp8"])
@pytest.mark.parametrize("heads, drafts", [(16, 0), (16, 3), (64, 0)])
def test_every_token_of_latent_attention_is_that_of_a_dense_model(heads, drafts, stored, vllm):
    facts = Facts(heads=heads, dim=128, rank=512, rotary=64, kv_cache_dtype=stored)
    served(facts, ("cuda", torch.bfloat16), latent(vllm), drafts=drafts, blocks=5)


def test_a_cache_of_8_bits_is_served_or_refused_by_name(vllm):
    from heedful.integrations.vllm.planned import why_not

    reason = why_not(64, 64, torch.bfloat16, "fp8", 16, False, None, latent=False)
    facts = Facts(heads=8, heads_k=2, dim=64, kv_cache_dtype="fp8")
    layers = plain(vllm, "LBHNC", "FULL", captures=True)
    if reason is not None:
        with pytest.raises(ValueError, match="kv_cache_dtype 'fp8'"):
            served(facts, ("cuda", torch.bfloat16), layers, pads=True)
        return
    served(facts, ("cuda", torch.bfloat16), layers, drafts=3, pads=True)


@pytest.mark.parametrize("tokens", [1, 77, 4096])
@pytest.mark.parametrize("store", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads, dim, dim_v", [(8, 128, 128), (1, 512, 64), (2, 80, 80)])
def test_tokens_go_into_their_slots_and_no_other(tokens, store, heads, dim, dim_v):
    pages, size = 300, 16
    draws = torch.Generator("cuda").manual_seed(0)
    k, v = (
        torch.randn(tokens, heads, d, generator=draws, device="cuda").bfloat16()
        for d in (dim, dim_v)
    )
    pool = torch.randn(pages, heads, size, dim + dim_v, generator=draws, device="cuda")
    pool = pool.to(store).transpose(1, 2)
    slots = torch.randperm(pages * size, generator=draws, device="cuda")[:tokens]
    slots[::5] = -1
    scale = torch.tensor(0.7, device="cuda")
    scales = () if store == torch.bfloat16 else (scale, scale)
    want = pool.float()
    kept = slots >= 0
    rows = torch.cat([k, v], -1).float()
    rows = (rows / scale).clamp(-448, 448) if scales else rows
    places = slots[kept]
    want[places // size, places % size] = rows[kept].to(store).float()
    append_slots(k, v, pool[..., :dim], pool[..., dim:], slots, *scales)
    assert torch.equal(pool.float(), want)
