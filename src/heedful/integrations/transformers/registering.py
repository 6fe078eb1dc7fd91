"""Puts heedful into transformers' registries under a name, and takes it out again."""

from transformers import AttentionInterface, AttentionMaskInterface

from heedful.integrations import check
from heedful.integrations.transformers import continuous as continuous_batching
from heedful.integrations.transformers.attention import attention
from heedful.integrations.transformers.masks import mask

# Parts of names to which transformers gives a meaning, and the meaning.
_TAKEN = {
    "flash": "a kernel of flash-attn, which it loads in its place",
    "sdpa": "its own sdpa",
    "flex_attention": "its own flex_attention",
    "/": "a repository of kernels, which it downloads",
    "|": "a paged implementation",
    "eager": "its own eager",
}
_names: list[str] = []


def register(name: str = "heedful", *, continuous: bool = False) -> None:
    """Makes `attn_implementation=name` run heedful, in from_pretrained and set_attn_implementation.
    A second call with one name does nothing.

    Args:
        name: any to which transformers gives no other meaning.
        continuous: also serve `generate_batch`, over pages. Transformers admits only names that it
            knows there, so this patches its modules until `unregister`.

    Raises:
        ValueError: the name means something else to transformers.
        RuntimeError: continuous, and this version of transformers has other functions than those
            that the tests ran with.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a non-empty str, got {name!r}")
    for part, what in _TAKEN.items():
        if part in name:
            raise ValueError(
                f"name must not hold {part!r}, got {name!r}: transformers takes it for {what}"
            )
    if name not in _names and name in AttentionInterface._global_mapping:
        raise ValueError(f"name must be free, got {name!r}, which transformers has already")
    check("transformers")
    if continuous:
        continuous_batching.patch(name)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    if name not in _names:
        _names.append(name)


def unregister(name: str | None = None) -> None:
    """Takes heedful out of transformers, under this name or under all. Models that were given the
    name cannot run until they are given another."""
    for each in [name] if name is not None else list(_names):
        if each not in _names:
            raise ValueError(f"name must be registered, got {each!r}; registered are {_names}")
        continuous_batching.restore(each)
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(each, None)
        _names.remove(each)


def is_registered() -> bool:
    return bool(_names)
