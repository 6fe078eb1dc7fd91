"""Tiny language models of transformers, of 20 families, with random weights."""

from typing import Any

import torch
import transformers as hf

COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_WINDOW = {"sliding_window": 5}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], **_WINDOW}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    **_EXPERTS,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    **_EXPERTS,
}
_CHUNKS = {
    "intermediate_size_mlp": 96,
    "num_local_experts": 2,
    "attention_chunk_size": 5,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
_GPT2 = {
    "n_positions": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
# By family the name of its classes, and what its tiny model has beside COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", _WINDOW),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **_WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, **_WINDOW},
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "query_pre_attn_scalar": 16, **_MIXED}),
    "phi3": ("Phi3", _WINDOW),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_ROPE, **_MIXED},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "llama4": ("Llama4Text", {"head_dim": 16, **_CHUNKS}),
    "cohere2": ("Cohere2", _MIXED),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {}),
    "gpt2": ("GPT2", _GPT2),
    "gpt_neox": ("GPTNeoX", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("Qwen3Next", {"head_dim": 16, **_LINEAR}),
}
BATCH, LENGTH = 3, 14
# Documents of one packed row.
DOCUMENTS = (5, 9, 4, 10, 14)


def model(family: str, **more: Any) -> Any:
    """A family's tiny model, with weights that leave nothing zero, in evaluation mode."""
    name, own = FAMILIES[family]
    torch.manual_seed(0)
    common = COMMON
    if family == "gpt2":
        kept = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
        common = {name: COMMON[name] for name in kept}
    config = getattr(hf, f"{name}Config")(**{**common, **own, **more})
    head = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    made = getattr(hf, name.removesuffix("Text") + head)(config).eval()
    for name, parameter in made.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
        if family == "gpt_oss" and "experts" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return made


def tokens() -> torch.Tensor:
    """(BATCH, LENGTH)."""
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(3, 99, (BATCH, LENGTH), generator=drawn)


def padded_left() -> torch.Tensor:
    """An attention_mask, (BATCH, LENGTH)."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    mask[2, :9] = 0
    return mask


def packed() -> dict[str, torch.Tensor]:
    """DOCUMENTS in one row, with positions that begin anew with each."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    return {"input_ids": tokens().reshape(1, -1), "position_ids": positions}
