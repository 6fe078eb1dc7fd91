"""Tiny encoders, encoder-decoders, vision, audio and mixed models of transformers, of 18 families,
each with calls of it. The name of a call says how it is padded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor

from support.integrations.language_models import COMMON, padded_left, tokens


class Call(NamedTuple):
    """Arguments of a model, and which of the rows of its result count; None = all."""

    arguments: dict[str, Any]
    counts: Tensor | None = None


class Family(NamedTuple):
    make: Callable[[], Any]
    calls: dict[str, Call]


_TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_CALM = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 16,
    "patch_size": 4,
}
_PAIR: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 64,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "dropout": 0.0,
}
_T5 = {
    "vocab_size": 99,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_WAV = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "feat_proj_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}


def drawn(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(name: str, config: dict[str, Any], model: str = "Model") -> Callable[[], Any]:
    """What makes the model of these classes."""
    return lambda: getattr(hf, f"{name}{model}")(getattr(hf, f"{name}Config")(**config))


def text_calls() -> dict[str, Call]:
    ids, left = tokens(), padded_left()
    right = left.flip(1)
    return {
        "plain": Call({"input_ids": ids}),
        "left": Call({"input_ids": ids, "attention_mask": left}, left.bool()),
        "right": Call({"input_ids": ids, "attention_mask": right}, right.bool()),
    }


def image_calls() -> dict[str, Call]:
    return {"image": Call({"pixel_values": drawn(2, 3, 16, 16)})}


def pair_calls() -> dict[str, Call]:
    right = padded_left().flip(1)
    given = {"attention_mask": right, "decoder_input_ids": tokens()[:, :6]}
    return {"pair": Call({"input_ids": tokens(), **given})}


def cross_calls() -> dict[str, Call]:
    given = {
        "encoder_hidden_states": drawn(3, 9, 64, seed=4),
        "encoder_attention_mask": padded_left().flip(1)[:, :9],
    }
    return {"cross": Call({"input_ids": tokens(), **given})}


def audio_calls() -> dict[str, Call]:
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 300:] = 0
    return {"audio": Call({"input_values": drawn(2, 400), "attention_mask": mask})}


def speech_calls() -> dict[str, Call]:
    given = {"decoder_input_ids": tokens()[:2, :6]}
    return {"speech": Call({"input_features": drawn(2, 16, 40), **given})}


def _image_and_text() -> dict[str, Tensor]:
    ids = torch.cat([torch.full((2, 16), 98), tokens()[:2].clamp(max=97)], 1)
    return {"input_ids": ids, "pixel_values": drawn(2, 3, 16, 16)}


def _llava() -> Any:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_VISION, projection_dim=32),
        text_config=hf.LlamaConfig(**COMMON),
        image_token_index=98,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return hf.LlavaForConditionalGeneration(config)


def _gemma3() -> Any:
    text = {"head_dim": 16, "sliding_window": 5}
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**_VISION),
        text_config=hf.Gemma3TextConfig(**{**COMMON, **text, "layer_types": kinds}),
        image_token_index=98,
        mm_tokens_per_image=16,
        boi_token_index=96,
        eoi_token_index=97,
    )
    return hf.Gemma3ForConditionalGeneration(config)


def _gemma3_calls() -> dict[str, Call]:
    kinds = torch.cat([torch.ones(2, 16), torch.zeros(2, 14)], 1).long()
    return {"image and text": Call({**_image_and_text(), "token_type_ids": kinds})}


def _qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {name: value for name, value in COMMON.items() if name != "bos_token_id"}
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    config = hf.Qwen2VLConfig(
        text_config={**text, "rope_parameters": {"type": "default", **rope}},
        vision_config=vision,
        image_token_id=98,
        vision_start_token_id=95,
        vision_end_token_id=94,
        video_token_id=93,
    )
    return hf.Qwen2VLForConditionalGeneration(config)


def _qwen2_vl_calls() -> dict[str, Call]:
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    parts = [[95], [98] * 4, [94], [95], [98] * 8, [94], tokens()[0].clamp(max=92).tolist()]
    ids = torch.tensor([[token for part in parts for token in part]])
    given = {
        "pixel_values": drawn(int(grid.prod(1).sum()), 3 * 2 * 16),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == 98).int(),
    }
    return {"image and text": Call({"input_ids": ids, **given})}


_BERT = {**_TEXT, **_CALM}
_BERT_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_MODERN = {
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    **_BERT_ENDS,
}
_DISTIL = {
    "vocab_size": 99,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 96,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_WHISPER = {
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "max_target_positions": 40,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
_BART = {"max_position_embeddings": 64, "forced_eos_token_id": None}
_GENERATES = "ForConditionalGeneration"


_EMBEDDING = {
    **COMMON,
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}


def families() -> dict[str, Family]:
    decoder = {"is_decoder": True, "add_cross_attention": True}
    image = Call(_image_and_text())
    return {
        "bert": Family(plain("Bert", _BERT), text_calls()),
        "bert_cross": Family(plain("Bert", {**_BERT, **decoder}), cross_calls()),
        "roberta": Family(plain("Roberta", _BERT), text_calls()),
        "modernbert": Family(plain("ModernBert", {**_TEXT, **_MODERN}), text_calls()),
        "distilbert": Family(plain("DistilBert", _DISTIL), text_calls()),
        "gemma3_embedding": Family(plain("Gemma3Text", _EMBEDDING), text_calls()),
        "vit": Family(plain("ViT", _VISION), image_calls()),
        "dinov2": Family(plain("Dinov2", _VISION), image_calls()),
        "siglip_vision": Family(plain("SiglipVision", _VISION), image_calls()),
        "clip_vision": Family(plain("CLIPVision", _VISION), image_calls()),
        "clip_text": Family(plain("CLIPText", {**_TEXT, **_BERT_ENDS}), text_calls()),
        "t5": Family(plain("T5", _T5, _GENERATES), pair_calls()),
        "bart": Family(plain("Bart", {**_PAIR, **_BART}, _GENERATES), pair_calls()),
        "whisper": Family(plain("Whisper", {**_PAIR, **_WHISPER}, _GENERATES), speech_calls()),
        "wav2vec2": Family(plain("Wav2Vec2", _WAV), audio_calls()),
        "llava": Family(_llava, {"image and text": image}),
        "gemma3_image": Family(_gemma3, _gemma3_calls()),
        "qwen2_vl": Family(_qwen2_vl, _qwen2_vl_calls()),
    }


def first_output(outputs: Any) -> Tensor:
    """The logits, or the hidden states of a model without a head."""
    logits = getattr(outputs, "logits", None)
    return outputs.last_hidden_state if logits is None else logits


def take(made: Any, name: str) -> None:
    """A model and all its parts take an attention. In transformers 5.17 the stacks of T5 have
    configurations of their own, which the model's set_attn_implementation leaves alone."""
    for part in made.modules():
        if isinstance(part, hf.PreTrainedModel):
            part.set_attn_implementation(name)
