"""Attention over latent vectors (MLA). vLLM's own classes split batches, gather contexts and merge;
ours write the cache, decode over it, and run the attention of prefills."""

# vLLM is no part of what developers install.
# pyright: reportMissingImports=false

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from heedful import flash_attn_varlen_func, flash_attn_with_kvcache
from heedful.integrations.vllm.answers import Answers
from heedful.integrations.vllm.backend import (
    check_planned,
    check_served,
    numerics,
    own_scale,
    refuse,
)
from heedful.integrations.vllm.paths import count
from heedful.integrations.vllm.planned import E4M3
from heedful.torch.eager.slots import append_slots


class HeedfulMLABackend(Answers, MLACommonBackend):
    """Answers vLLM's questions before it makes a layer of latent attention."""

    # Those for rotary positions.
    _keys_alone: ClassVar[int] = 64

    @staticmethod
    def get_name() -> str:
        return "HEEDFULMLA"

    @staticmethod
    def get_impl_cls() -> type["HeedfulMLAImpl"]:
        return HeedfulMLAImpl

    @staticmethod
    def get_builder_cls() -> type["HeedfulMLABuilder"]:
        return HeedfulMLABuilder


class HeedfulMLABuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's builder, for decodes whose sequences have equal numbers of queries."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM


class HeedfulMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """A layer's latent attention.

    Raises:
        ValueError: naming what is not served.
    """

    # vLLM's own are shared out over ranks.
    supports_pcp: bool = False
    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        check_served(kv_cache_dtype)
        if numerics() is not None:
            refuse("batch invariance (VLLM_BATCH_INVARIANT=1) of latent attention")
        others = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "sinks": mla_args.get("sinks"),
            "indexer": mla_args.get("indexer"),
        }
        for name, value in others.items():
            if value is not None:
                refuse(f"{name} of latent attention")
        if attn_type != AttentionType.DECODER:
            refuse(f"attn_type {attn_type!r} of latent attention")
        if not mla_args["qk_rope_head_dim"]:
            refuse("latent vectors without rotary columns")
        facts = head_size, mla_args["kv_lora_rank"], torch.get_default_dtype(), kv_cache_dtype
        check_planned(*facts, None, False, None, latent=True)
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        # Queries stay of 16 bits over a cache of 8.
        self.supports_quant_query_input = False

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Writes latent vectors, kv_c_normed (tokens, kv_lora_rank) beside k_pe (tokens, 1,
        rotary), into the cache (pages, page_size, both), where slot_mapping says: one launch."""
        if not kv_cache.numel():
            return
        count(("latent append",))
        scales: tuple = ()
        if kv_cache_dtype in E4M3:
            kv_cache = kv_cache.view(E4M3[kv_cache_dtype])
            scales = () if skip_scale else 2 * (own_scale(k_scale),)
        rows, rank = kv_cache.unsqueeze(2), kv_c_normed.shape[-1]
        latent, rotary = rows[..., :rank], rows[..., rank:]
        slots = slot_mapping.flatten()
        append_slots(kv_c_normed.unsqueeze(1), k_pe, latent, rotary, slots, *scales)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The decodes of a batch.

        Args:
            q: (tokens, heads, kv_lora_rank + rotary), or its two parts; as many tokens for each
                sequence.
            kv_c_and_k_pe_cache: (pages, page_size, kv_lora_rank + rotary): values are the first
                columns, and are read where they lie.

        Returns:
            (tokens, heads, kv_lora_rank), and None: no log-sum-exp is wanted.
        """
        decode = attn_metadata.decode
        assert decode is not None
        count(("latent",))
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        sequences = decode.seq_lens.shape[0]
        keys = kv_c_and_k_pe_cache.unsqueeze(2)
        scales: dict[str, Any] = {}
        if keys.dtype != q.dtype:
            scale = own_scale(layer._k_scale)
            scales = {"k_descale": scale, "v_descale": scale}
        out = flash_attn_with_kvcache(
            q.unflatten(0, (sequences, -1)),
            keys,
            keys[..., : self.kv_lora_rank],
            cache_seqlens=decode.seq_lens,
            block_table=decode.block_table,
            softmax_scale=self.scale,
            causal=True,
            **scales,
        )
        return out.flatten(0, 1), None


class HeedfulMLAPrefill(MLAPrefillBackend):
    """The attention of prefills over keys and values made of latent vectors."""

    @staticmethod
    def get_name() -> str:
        return "HEEDFUL"

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Causal attention of new tokens, packed: q, k (tokens, heads, head_dim), v (tokens, heads,
        v_head_dim). Returns out, or (out, lse), lse float32 (heads, tokens)."""
        if output_scale is not None:
            refuse("output_scale (results of 8 bits)")
        count(("latent prefill",))
        batch = self._prefill_metadata
        lengths: Any = 2 * (batch.query_start_loc,) + 2 * (batch.max_query_len,)
        options = {"softmax_scale": self.scale, "return_lse": return_softmax_lse, "out": out}
        return flash_attn_varlen_func(q, k, v, *lengths, causal=True, **options)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of new tokens over a chunk of earlier keys, all of which they see. Returns
        (out, lse)."""
        count(("latent context",))
        lengths = chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        options = {"softmax_scale": self.scale, "return_lse": True, "out": out}
        return flash_attn_varlen_func(q, k, v, *lengths, **options)
