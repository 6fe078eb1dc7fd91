"""vLLM finds heedful by its entry point, and asks before it makes a layer."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.integrations.vllm_layers import configured

ROOT = Path(__file__).parents[3]
HOPPER = SimpleNamespace(major=9, minor=0)


def test_the_entry_point_is_the_function_that_registers():
    from heedful.integrations.vllm import register

    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert facts == {
        "vllm.general_plugins": {"heedful": f"{register.__module__.rpartition('.')[0]}:register"}
    }


def test_registering_twice_is_once_and_gives_three_names(vllm):
    from heedful.integrations import vllm as plug_in

    backends = vllm["vllm.v1.attention.backends.registry"].AttentionBackendEnum
    prefills = vllm["vllm.v1.attention.backends.mla.prefill.registry"].MLAPrefillBackendEnum
    assert not plug_in.is_registered()
    plug_in.register()
    plug_in.register()
    assert plug_in.is_registered()
    members = {name: x.get_class().__name__ for name, x in backends.__members__.items()}
    assert members == {
        "CUSTOM": "HeedfulBackend",
        "HEEDFUL": "HeedfulBackend",
        "HEEDFULMLA": "HeedfulMLABackend",
    }
    found = {name: x.get_class().__name__ for name, x in prefills.__members__.items()}
    assert found == dict.fromkeys(("CUSTOM", "HEEDFUL"), "HeedfulMLAPrefill")
    # vLLM looks names up that its backends say they have.
    for member in backends.__members__.values():
        assert member.get_class().get_name() in backends.__members__


def test_another_plug_ins_custom_stays(vllm):
    from heedful.integrations.vllm import register

    backends = vllm["vllm.v1.attention.backends.registry"].AttentionBackendEnum
    backends.CUSTOM.path = "others.Backend"
    register()
    assert backends.CUSTOM.get_path() == "others.Backend" and "HEEDFUL" in backends.__members__


def asked(latent: bool, **others) -> list[str]:
    """The reasons against a layer of these facts."""
    from heedful.integrations.vllm import backend, mla

    made = mla.HeedfulMLABackend if latent else backend.HeedfulBackend
    given = {
        "head_size": 576 if latent else 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": latent,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": HOPPER,
        "attn_type": "decoder",
    }
    return made.validate_configuration(**(given | others))


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"has_sink": True, "has_sliding_window": True},
        {"dtype": torch.float16, "head_size": 64},
        {"head_size": 512},
        {"use_non_causal": True},
        {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder"},
        {"use_kv_connector": True},
        {"block_size": None},
        {"device_capability": SimpleNamespace(major=8, minor=0)},
        {"device_capability": SimpleNamespace(major=17, minor=3)},
    ],
    ids=str,
)
def test_what_is_served_has_no_reason_against_it(facts):
    assert asked(False, **facts) == []


def test_latent_attention_has_no_reason_against_it():
    assert asked(True) == [] and asked(True, dtype=torch.float16) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"use_batch_invariant": True}, "batch_invariance"),
        ({"use_mm_prefix": True}, "mm_prefix"),
        ({"use_dcp": True}, "dcp"),
        ({"use_pcp": True}, "pcp"),
        ({"use_rswa": True}, "rswa"),
        ({"use_adaptive_verification": True}, "device_cpu_query_lens_mismatch"),
        ({"use_mla": True}, "mla"),
        ({"use_sparse": True}, "sparse"),
        ({"head_size": 100}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "of bfloat16 queries and kv_cache_dtype 'float16': k must"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(facts, words):
    assert any(words in reason for reason in asked(False, **facts)), asked(False, **facts)


def test_latent_attention_is_not_shared_out_over_ranks():
    """Though vLLM's base says that it is."""
    impl = type(latent())
    assert impl.supports_pcp is False and impl.supports_dcp is False


def test_latent_vectors_of_8_bits_are_served_where_the_planner_has_a_kernel():
    assert asked(True, kv_cache_dtype="fp8") == []
    ampere = SimpleNamespace(major=8, minor=0)
    (reason,) = asked(True, kv_cache_dtype="fp8", device_capability=ampere)
    assert "kv_cache_dtype 'fp8': no kernel can run" in reason


def plain(**others):
    from heedful.integrations.vllm.backend import HeedfulImpl

    given: Any = {"num_heads": 4, "head_size": 16, "scale": 0.25, "num_kv_heads": 2}
    return HeedfulImpl(**(given | others))


def latent(**others):
    from heedful.integrations.vllm.mla import HeedfulMLAImpl

    names = "alibi_slopes sliding_window logits_soft_cap kv_sharing_target_layer_name q_lora_rank"
    given: Any = dict.fromkeys(names.split()) | {"num_heads": 4, "head_size": 40, "scale": 0.25}
    given |= {"num_kv_heads": 1, "kv_cache_dtype": "auto", "attn_type": "decoder"}
    given |= {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    given |= {"qk_head_dim": 24, "v_head_dim": 16, "kv_b_proj": None}
    return HeedfulMLAImpl(**(given | others))


@pytest.mark.parametrize(
    ("make", "facts", "words"),
    [
        (plain, {"kv_cache_dtype": "int8"}, "does not serve kv_cache_dtype 'int8', but auto"),
        (plain, {"attn_type": "other"}, "attn_type 'other'"),
        (latent, {"alibi_slopes": [1.0]}, "alibi_slopes of latent"),
        (latent, {"sliding_window": 4}, "sliding_window of latent"),
        (latent, {"logits_soft_cap": 4.0}, "logits_soft_cap of latent"),
        (latent, {"indexer": object()}, "indexer of latent"),
        (latent, {"attn_type": "encoder"}, "attn_type 'encoder' of latent"),
        (latent, {"qk_rope_head_dim": 0}, "without rotary columns"),
    ],
)
def test_a_layer_that_cannot_be_is_named(make, facts, words):
    assert make() is not None
    with pytest.raises(ValueError, match=words):
        make(**facts)


def test_batch_invariance_of_latent_attention_is_refused_by_name(vllm):
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = True
    with pytest.raises(ValueError, match="batch invariance .VLLM_BATCH_INVARIANT=1. of latent"):
        latent()


@pytest.mark.parametrize("wanted", [False, True])
def test_calls_of_a_layer_are_invariant_where_batches_are(wanted, vllm, monkeypatch):
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = wanted
    seen = []
    monkeypatch.setattr(
        "heedful.integrations.vllm.backend.flash_attn_varlen_func",
        lambda *_, numerics, **__: seen.append(numerics),
    )
    layer, kept = plain(), batch(vllm)
    metadata = builder(vllm).build(0, kept)
    q, cache = torch.zeros(5, 4, 16), torch.zeros(8, 2, 16, 32)
    layer.forward(layer, q, q[:, :2], q[:, :2], cache, metadata, torch.zeros(5, 4, 16))
    assert seen == ["invariant" if wanted else None]


def batch(vllm, **others):
    common = vllm["vllm.v1.attention.backend"].CommonAttentionMetadata
    starts = torch.tensor([0, 1, 5], dtype=torch.int32)
    given = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor([9, 4], dtype=torch.int32),
        "num_reqs": 2,
        "num_actual_tokens": 5,
        "max_query_len": 4,
        "max_seq_len": 9,
        "block_table_tensor": torch.zeros(2, 3, dtype=torch.int32),
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
    }
    return common(**(given | others))


def builder(vllm, mode: str = "FULL_AND_PIECEWISE"):
    from heedful.integrations.vllm.backend import HeedfulMetadataBuilder

    modes = vllm["vllm.config.compilation"].CUDAGraphMode
    return HeedfulMetadataBuilder(None, ["0"], configured(modes[mode]), torch.device("cpu"))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"causal": torch.ones(2, dtype=torch.int32)}, "causal as a tensor"),
        ({"mm_req_doc_ranges": {0: [(1, 2)]}}, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": torch.ones(2, dtype=torch.int32)}, "rswa_prefix_lens"),
    ],
)
def test_a_batch_with_a_mask_that_is_not_served_is_refused(facts, words, vllm):
    with pytest.raises(ValueError, match=words):
        builder(vllm).build(0, batch(vllm, **facts))


@pytest.mark.parametrize(
    ("mode", "longest"), [("FULL", 5), ("FULL_AND_PIECEWISE", 4), ("FULL_DECODE_ONLY", 4)]
)
def test_a_captured_batch_has_bounds_for_any_lengths(mode, longest, vllm):
    """Graphs of mixed batches may have all tokens in one sequence."""
    made = builder(vllm, mode)
    captured = made.build_for_cudagraph_capture(batch(vllm))
    assert captured.max_query_len == longest and captured.max_seq_len >= 128
    assert made.build(0, batch(vllm, max_seq_len=700)).max_seq_len == 768
    support = vllm["vllm.v1.attention.backend"].AttentionCGSupport
    assert type(made)._cudagraph_support is support.ALWAYS


def test_another_group_of_layers_gets_its_pages_alone(vllm):
    made = builder(vllm)
    first = made.build(0, batch(vllm))
    table, slots = torch.ones(2, 3, dtype=torch.int32), torch.ones(5, dtype=torch.int64)
    second = made.update_block_table(first, table, slots)
    assert second.block_table is table and second.slot_mapping is slots
    assert second.seq_lens is first.seq_lens and first.block_table is not table


def test_a_profiling_run_gives_zeros_and_fused_results_are_refused():
    impl, rows = plain(), torch.ones(3, 4, 16)
    cache = torch.zeros(2, 2, 16, 32)
    assert not impl.forward(None, rows, rows, rows, cache, None, rows.clone()).any()
    with pytest.raises(ValueError, match="output_scale and output_block_scale"):
        impl.forward(None, rows, rows, rows, cache, None, rows.clone(), torch.ones(()))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_an_encoder_sees_all_tokens_and_has_no_cache(attn_type, window, vllm):
    from heedful import flash_attn_func

    impl = plain(attn_type=attn_type, sliding_window=window)
    q, k, v = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    cache, out = torch.zeros(0), torch.full((7, 4, 16), torch.nan)
    impl.do_kv_cache_update(None, k, v, cache, torch.zeros(5, dtype=torch.int64))
    impl.forward(None, q, k, v, cache, builder(vllm).build(0, batch(vllm)), out)
    window = (-1, -1) if window is None else (window - 1, window - 1)
    for a, b in ((0, 1), (1, 5)):
        q_part, k_part, v_part = (x[None, a:b] for x in (q, k, v))
        want = flash_attn_func(q_part, k_part, v_part, softmax_scale=0.25, window_size=window)
        torch.testing.assert_close(out[a:b], want[0])
    assert out[5:].isnan().all()  # Padding.


def test_a_decoder_sees_all_that_an_encoder_wrote(vllm):
    from heedful import flash_attn_func

    impl = plain(attn_type="encoder_decoder")
    k, v, cache = torch.randn(13, 2, 16), torch.randn(13, 2, 16), torch.zeros(6, 2, 16, 32)
    tables = torch.tensor([[4], [1]], dtype=torch.int32)
    slots = torch.cat([4 * 16 + torch.arange(9), 16 + torch.arange(4)])
    impl.do_kv_cache_update(None, k, v, cache, slots)
    q, out = torch.randn(5, 4, 16), torch.empty(5, 4, 16)
    given = batch(vllm, causal=False, block_table_tensor=tables)
    impl.forward(None, q, q, q, cache, builder(vllm).build(0, given), out)
    for rows, keys in ((slice(0, 1), slice(0, 9)), (slice(1, 5), slice(9, 13))):
        want = flash_attn_func(q[None, rows], k[None, keys], v[None, keys], softmax_scale=0.25)
        torch.testing.assert_close(out[rows], want[0])
