"""What transformers calls for models of real head shapes is in the list of the kernels' wheel: as
they train, and as they generate with and without padding, with growing and static caches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from heedful.core.base.device import by_name
from heedful.launch import record
from kernel_wheel import problems
from support.integrations.language_models import model
from support.integrations.other_models import plain, take
from support.listed import Listed
from support.runs import standin

H200 = by_name("H200")
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_GPT2 = {"n_embd": 768, "n_head": 12, "n_positions": 1024}


def heads(queries: int, keys: int, dim: int, **more: Any) -> dict[str, Any]:
    """Facts of a config: where a family has no head dim, its width says it."""
    shape = {"num_attention_heads": queries, "num_key_value_heads": keys}
    return shape | {"head_dim": dim, "max_position_embeddings": 2048} | more


def wide(queries: int, keys: int, dim: int, **more: Any) -> dict[str, Any]:
    facts = heads(queries, keys, dim, hidden_size=queries * dim, **more)
    return {name: value for name, value in facts.items() if name != "head_dim"}


# By name the family and its head shapes.
GENERATING: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.2 1B": ("llama", heads(32, 8, 64)),
    "Llama 3.1 8B": ("llama", heads(32, 8, 128)),
    "Llama 3.1 70B": ("llama", heads(64, 8, 128)),
    "Qwen2 0.5B": ("qwen2", wide(14, 2, 64, use_sliding_window=False)),
    "Qwen3 8B": ("qwen3", heads(32, 8, 128)),
    "Gemma 2 9B": (
        "gemma2",
        heads(
            16,
            8,
            256,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            query_pre_attn_scalar=256,
        ),
    ),
    "Gemma 3 4B": ("gemma3", heads(8, 4, 256, sliding_window=1024, query_pre_attn_scalar=256)),
    "gpt-oss 20B": ("gpt_oss", heads(64, 8, 64, sliding_window=128)),
    "Mistral 7B": ("mistral", heads(32, 8, 128, sliding_window=4096)),
    "Mixtral 8x7B": ("mixtral", heads(32, 8, 128)),
    "DeepSeek V3": ("deepseek_v3", heads(128, 128, 64, **_LATENT)),
    "Phi-3 mini": ("phi3", wide(32, 32, 96, sliding_window=2047)),
    "OLMo 2 7B": ("olmo2", wide(32, 32, 128)),
    "GLM-4 9B": ("glm4", heads(32, 2, 128)),
    "SmolLM3 3B": ("smollm3", wide(16, 4, 128)),
    "GPT-NeoX": ("gpt_neox", wide(32, 32, 128)),
    "GPT-2": ("gpt2", _GPT2),
}
_CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
}
_TEXT = {"vocab_size": 99, **_BASE}
_MODERN = {"local_attention": 128, "global_attn_every_n_layers": 2, "attention_dropout": 0.0}
_ENDS = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
_WHISPER: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 768,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_T5: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 64,
    "d_kv": 64,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def ids(batch: int, length: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(3, 99, (batch, length), generator=drawn)


def padding(batch: int, length: int) -> torch.Tensor:
    """Of each sequence after the first some more is padding, on the left."""
    begins = torch.arange(batch)[:, None] * (length // (batch + 1))
    return (torch.arange(length) >= begins).long()


def learn(made: Any, **given: Any) -> None:
    out = made.train()(**given)
    logits = getattr(out, "logits", None)
    (out.last_hidden_state if logits is None else logits).float().sum().backward()


def generate(made: Any, batch: int, length: int, cache: str | None = None, padded=False) -> None:
    given = padding(batch, length) if padded else torch.ones(batch, length, dtype=torch.long)
    options = {"cache_implementation": cache, "disable_compile": True} if cache else {}
    made.eval().generate(
        ids(batch, length),
        attention_mask=given,
        do_sample=False,
        max_new_tokens=3,
        min_new_tokens=3,
        **options,
    )


JOBS: dict[str, Callable[[Any], None]] = {
    "trains": lambda made: learn(made, input_ids=ids(2, 256), use_cache=False),
    "trains padded": lambda made: learn(
        made, input_ids=ids(2, 256), attention_mask=padding(2, 256).flip(1), use_cache=False
    ),
    "generates": lambda made: generate(made, 1, 300),
    "generates padded": lambda made: generate(made, 3, 200, padded=True),
    "generates into a static cache": lambda made: generate(made, 2, 100, "static"),
    "generates padded into a static cache": lambda made: generate(made, 2, 100, "static", True),
}
TEXT = {"input_ids": ids(4, 128)}
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "BERT": (plain("Bert", {**_TEXT, **_CALM}), TEXT),
    "BERT, padded": (
        plain("Bert", {**_TEXT, **_CALM}),
        {**TEXT, "attention_mask": padding(4, 128).flip(1)},
    ),
    "ModernBERT": (plain("ModernBert", {**_TEXT, **_MODERN, **_ENDS}), TEXT),
    "ViT": (
        plain("ViT", {**_BASE, **_CALM}),
        {"pixel_values": torch.zeros(2, 3, 224, 224, dtype=torch.bfloat16)},
    ),
    "Whisper": (
        plain("Whisper", _WHISPER, "ForConditionalGeneration"),
        {
            "input_features": torch.zeros(1, 80, 3000, dtype=torch.bfloat16),
            "decoder_input_ids": ids(1, 64),
        },
    ),
    "T5": (
        plain("T5", _T5, "ForConditionalGeneration"),
        {"input_ids": ids(2, 128), "decoder_input_ids": ids(2, 64)},
    ),
}


# Those that have what no other has; the rest takes a minute.
QUICK = {"gpt-oss 20B", "BERT, padded", "T5"}


def names(table: dict[str, Any]) -> list[Any]:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in table]


@pytest.fixture(scope="module")
def listed() -> Listed:
    return Listed(problems.entries())


def unlisted(made: Any, run: Callable[[Any], None], listed: Listed, path) -> list[str]:
    """Problems that a run has and whose kernels are not all listed."""
    made = made.to(torch.bfloat16)
    take(made, "heedful")
    with standin.gpu(H200.name), record.record(path):
        run(made)
    found = record.load(path)
    assert found
    return [
        f"{entry.direction} {entry.problem.key()}" for entry in found if listed.lacks([entry], H200)
    ]


@pytest.mark.parametrize("name", names(GENERATING))
def test_a_language_model_needs_no_kernel_that_is_not_listed(name, listed, tmp_path):
    family, facts = GENERATING[name]
    made = model(family, **facts)
    for number, (job, run) in enumerate(JOBS.items()):
        assert not unlisted(made, run, listed, tmp_path / f"{number}"), job


@pytest.mark.parametrize("name", names(OTHERS))
def test_an_encoder_needs_no_kernel_that_is_not_listed(name, listed, tmp_path):
    make, given = OTHERS[name]
    made = make()
    assert not unlisted(made, lambda made: learn(made, **given), listed, tmp_path / "learns")

    def read(made: Any) -> None:
        with torch.no_grad():
            made.eval()(**given)

    assert not unlisted(made, read, listed, tmp_path / "reads")
