"""The answers to vLLM's questions that both backends, plain and latent, give alike."""

# vLLM is no part of what developers install.
# pyright: reportMissingImports=false

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf

from heedful.integrations.vllm.planned import STORED, why_not

CACHE_DTYPES = ["auto", *STORED]


class Answers:
    """A base before vLLM's own, whose answers it replaces. _keys_alone: how many of a key's last
    columns are no values, where these lie in the keys; 0 of caches of both."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = CACHE_DTYPES
    _keys_alone: ClassVar[int] = 0

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Grids follow from the longest query that the host knows of.
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """The planner's reason against the layer, if there is one."""
        sizes, latent = (head_size, head_size - cls._keys_alone), cls._keys_alone > 0
        facts = dtype, kv_cache_dtype, block_size, has_sink, device_capability
        return why_not(*sizes, *facts, latent=latent)
