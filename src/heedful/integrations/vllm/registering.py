"""Puts heedful into vLLM's registries of attention backends. Names of classes go in: nothing of the
backends is imported before vLLM wants one."""

# vLLM is no part of what developers install.
# pyright: reportMissingImports=false

from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

_PACKAGE = "heedful.integrations.vllm"
_PLAIN = f"{_PACKAGE}.backend.HeedfulBackend"
_LATENT = f"{_PACKAGE}.mla.HeedfulMLABackend"
_PREFILL = f"{_PACKAGE}.mla.HeedfulMLAPrefill"


def register() -> None:
    """Makes vLLM know heedful. It calls this in each of its processes, by the entry point
    `vllm.general_plugins`. A second call does nothing.

    Backends get the names HEEDFUL and HEEDFULMLA, the prefill of latent attention the name
    HEEDFUL. In both registries HEEDFUL is CUSTOM too, unless another plug-in has that name.
    """
    for name, path in {"HEEDFUL": _PLAIN, "HEEDFULMLA": _LATENT}.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _PLAIN)
    if "HEEDFUL" not in MLAPrefillBackendEnum.__members__:
        register_mla_prefill_backend("HEEDFUL", _PREFILL)
    if not MLAPrefillBackendEnum.CUSTOM.is_overridden():
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, _PREFILL)


def is_registered() -> bool:
    """Whether this process has registered heedful with vLLM."""
    return "HEEDFUL" in AttentionBackendEnum.__members__
