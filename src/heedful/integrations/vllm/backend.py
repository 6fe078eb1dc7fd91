"""Attention over vLLM's cache: the backend of models without latent attention."""

# vLLM is no part of what developers install.
# pyright: reportMissingImports=false

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from heedful import flash_attn_varlen_func
from heedful.integrations.vllm.answers import CACHE_DTYPES, Answers
from heedful.integrations.vllm.paths import count
from heedful.integrations.vllm.planned import E4M3, why_not
from heedful.torch.eager.slots import append_slots

_LARGEST_HEAD = 512
# Upper bounds of lengths of keys are rounded up to multiples of this: a bound that changed with
# each token would make each call a new one.
_BOUND = 256


class HeedfulBackend(Answers, AttentionBackend):
    """Answers vLLM's questions before it makes a layer, which it refuses where something is not
    served."""

    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        return "HEEDFUL"

    @staticmethod
    def get_impl_cls() -> type["HeedfulImpl"]:
        return HeedfulImpl

    @staticmethod
    def get_builder_cls() -> type["HeedfulMetadataBuilder"]:
        return HeedfulMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= _LARGEST_HEAD

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _SERVED


_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_SERVED = (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)


@dataclass
class HeedfulMetadata(AttentionMetadata):
    """A batch. Tensors are those of vLLM's runner; a graph reads them at each replay.

    query_start_loc: int32 (sequences + 1,). seq_lens: int32 (sequences,), new tokens included.
    block_table: int32 (sequences, pages). max_query_len, max_seq_len: bounds of the lengths.
    causal: else each query sees all keys of its sequence.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True


class HeedfulMetadataBuilder(AttentionMetadataBuilder[HeedfulMetadata]):
    """Makes the metadata of a batch, and reads no tensor for it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        mode = vllm_config.compilation_config.cudagraph_mode
        # None before vLLM has settled it.
        self._mixes = mode is None or mode.mixed_mode() == CUDAGraphMode.FULL
        self._longest = vllm_config.model_config.max_model_len

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HeedfulMetadata:
        """The metadata of a batch.

        Raises:
            ValueError: naming a mask that is not served.
        """
        batch = common_attn_metadata
        if not isinstance(batch.causal, bool):
            refuse("causal as a tensor, one for each sequence")
        if batch.mm_req_doc_ranges:
            refuse("mm_req_doc_ranges (tokens of images that see one another)")
        if batch.rswa_prefix_lens is not None:
            refuse("rswa_prefix_lens (windows beside a prefix)")
        return HeedfulMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            max_seq_len=-(-batch.max_seq_len // _BOUND) * _BOUND,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> HeedfulMetadata:
        """The metadata of a batch whose graph is replayed for any lengths that fit it."""
        made = self.build(0, common_attn_metadata)
        made.max_seq_len = max(made.max_seq_len, self._longest)
        if self._mixes:
            made.max_query_len = max(made.max_query_len, made.num_actual_tokens)
        return made

    def update_block_table(
        self, metadata: HeedfulMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> HeedfulMetadata:
        """The same batch over the pages of another group of layers."""
        made = copy.copy(metadata)
        made.block_table, made.slot_mapping = blk_table, slot_mapping
        return made


class HeedfulImpl(AttentionImpl[HeedfulMetadata]):
    """A layer's attention.

    Args:
        num_heads, num_kv_heads: of this rank. head_size: of queries, keys and values.
        sliding_window: how many of the newest tokens a query sees, itself among them.
        kv_cache_dtype: a name of vLLM's; "fp8" and "fp8_e4m3" are stored by the layer's scales.
        sinks: (num_heads,), float32 or of 16 bits.

    Raises:
        ValueError: naming what is not served.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        check_served(kv_cache_dtype)
        if attn_type not in _SERVED:
            refuse(f"attn_type {attn_type!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None
        if alibi_slopes is not None:
            # vLLM makes layers where its device is torch's default.
            device = torch.get_default_device()
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self.sinks, self.softcap = sinks, float(logits_soft_cap or 0.0)
        self._before = -1 if sliding_window is None else sliding_window - 1
        self._has_cache = attn_type not in _ENCODERS
        self._quantised = kv_cache_dtype in E4M3
        self._numerics = numerics()
        if self._has_cache:
            facts = head_size, head_size, torch.get_default_dtype(), kv_cache_dtype, None
            check_planned(*facts, sinks is not None, None, latent=False)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: HeedfulMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the batch's tokens, whose keys are in the cache already.

        Args:
            layer: has `_k_scale` and `_v_scale`, float32 () or (num_kv_heads,).
            query: (tokens, num_heads, head_size), perhaps with padding after the batch's tokens.
            key, value: (tokens, num_kv_heads, head_size), which an encoder alone reads.
            kv_cache: (pages, num_kv_heads, page_size, 2 * head_size), with any strides, the last of
                which is 1: keys, then values; both are read in place.
            attn_metadata: None in vLLM's profiling runs, whose results are zeros.
            output: as query; written in place.

        Returns:
            output.
        """
        if output_scale is not None or output_block_scale is not None:
            refuse("output_scale and output_block_scale (results of 8 or 4 bits)")
        if attn_metadata is None:
            return output.fill_(0)
        batch, causal = attn_metadata, attn_metadata.causal
        out, tokens = output, batch.num_actual_tokens
        if query.shape[0] != tokens:
            query, out = query[:tokens], output[:tokens]
        lengths: Any = (batch.query_start_loc, None, batch.max_query_len, batch.max_seq_len)
        if self._has_cache:
            count(("paged",))
            key, value = self._halves(kv_cache)
            options = {"block_table": batch.block_table, "seqused_k": batch.seq_lens}
            if self._quantised:
                options |= self._descales(layer, batch.seq_lens.shape[0])
        else:
            count(("packed",))
            key, value, options, causal = key[:tokens], value[:tokens], {}, False
            lengths = 2 * (batch.query_start_loc,) + 2 * (batch.max_query_len,)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        flash_attn_varlen_func(
            query,
            key,
            value,
            *lengths,
            softmax_scale=self.scale,
            causal=causal,
            window_size=(self._before, 0 if causal else self._before),
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sink=self.sinks,
            out=out,
            numerics=self._numerics,
            **options,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new keys and values, (tokens, num_kv_heads, head_size), into the cache, where
        slot_mapping (int64, at most as many) says. Tokens of slot -1 are dropped."""
        if not self._has_cache or not kv_cache.numel():
            return
        count(("append",))
        scales = (own_scale(layer._k_scale), own_scale(layer._v_scale)) if self._quantised else ()
        append_slots(key, value, *self._halves(kv_cache), slot_mapping, *scales)

    def _halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each (pages, page_size, num_kv_heads, head_size), where they lie."""
        if self._quantised:
            kv_cache = kv_cache.view(E4M3[self.kv_cache_dtype])
        rows, size = kv_cache.transpose(1, 2), self.head_size
        return rows[..., :size], rows[..., size:]

    def _descales(self, layer: Any, sequences: int) -> dict[str, Tensor]:
        """The factors of stored numbers."""
        scales = own_scale(layer._k_scale), own_scale(layer._v_scale)
        shape = sequences, self.num_kv_heads
        k, v = (scale.expand(shape) if scale.dim() else scale for scale in scales)
        return {"k_descale": k, "v_descale": v}


def own_scale(scale: Tensor) -> Tensor:
    """A layer's scale, without dims where it is one number."""
    return scale.view(()) if scale.numel() == 1 else scale


def check_served(kv_cache_dtype: str) -> None:
    """Raises ValueError for what no layer of heedful serves."""
    if kv_cache_dtype not in CACHE_DTYPES:
        refuse(f"kv_cache_dtype {kv_cache_dtype!r}, but {', '.join(CACHE_DTYPES)}")


def check_planned(*facts: Any, latent: bool) -> None:
    """Raises ValueError with the reason of `why_not`, if there is one. vLLM makes layers where the
    model's dtype is torch's default."""
    reason = why_not(*facts, latent=latent)
    if reason is not None:
        raise ValueError(reason)


def numerics() -> str | None:
    """Those of calls where vLLM wants batch invariance."""
    return "invariant" if envs.VLLM_BATCH_INVARIANT else None


def refuse(what: str) -> None:
    """Raises ValueError."""
    raise ValueError(f"heedful does not serve {what}; --attention-backend names another backend")
