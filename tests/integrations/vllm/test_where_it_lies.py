"""On a Hopper GPU the halves of vLLM's cache go straight into tensor maps, without a copy."""

import pytest
import torch

from heedful.core.base.arrays import item_bytes
from support.integrations.vllm_layers import caches, configured
from support.launches import places, role
from support.runs import standin


class Shape:
    """What `caches` reads of an engine."""

    blocks, block_size, device = 50, 16, torch.device("cpu")

    class model:
        class facts:
            windows = (None, None)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("heads_k", [1, 2])
@pytest.mark.parametrize("dim", [64, 128])
def test_keys_and_values_are_read_and_written_where_they_lie(dim, heads_k, layout, vllm):
    pytest.importorskip("triton")
    from heedful.integrations.vllm.backend import HeedfulImpl, HeedfulMetadataBuilder

    modes = vllm["vllm.config.compilation"].CUDAGraphMode
    common = vllm["vllm.v1.attention.backend"].CommonAttentionMetadata
    order = vllm["vllm.v1.kv_cache_layout"].KVCacheLayout[layout].value
    shape: object = Shape()
    cache = caches(shape, order, heads_k, 2 * dim, torch.bfloat16)[1]  # pyright: ignore
    starts, tokens = torch.tensor([0, 1, 2, 600], dtype=torch.int32), 600
    batch = common(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([40, 3, 598], dtype=torch.int32),
        num_reqs=3,
        num_actual_tokens=tokens,
        max_query_len=598,
        max_seq_len=598,
        block_table_tensor=torch.zeros(3, 40, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )
    q, k = (torch.zeros(tokens, n, dim).bfloat16() for n in (8, heads_k))
    out = torch.empty_like(q)
    with standin.gpu("H200") as machine:
        impl = HeedfulImpl(8, dim, 0.1, heads_k)
        build = HeedfulMetadataBuilder(None, ["0"], configured(modes.FULL), q.device).build
        impl.do_kv_cache_update(None, k, k, cache, batch.slot_mapping)
        impl.forward(None, q, k, k, cache, build(0, batch), out)
    append, *others = machine.launches
    assert append.kernel.function == "append_slots"
    assert [role(launch) for launch in others][0] == "schedule"
    readers = [places(launch) for launch in others if "k" in places(launch)]
    assert len(readers) == 2 and any(found["k"].map is not None for found in readers)
    halves = {"k": cache.data_ptr(), "v": cache.data_ptr() + dim * item_bytes("bfloat16")}
    for found in readers:
        assert {name: found[name].address for name in halves} == halves
        assert found["q"].address == q.data_ptr()
    assert places(others[-1])["out"].address == out.data_ptr()
