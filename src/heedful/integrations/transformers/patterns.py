"""The patterns of transformers' mask functions that lengths and a window can express. An unknown
pattern is never guessed."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import masking_utils


class Pattern(NamedTuple):
    """causal: a query sees no later key. left: how many keys before its own it sees, -1 = all.
    right: how many after, where it is not causal. documents: (batch, length), by token the document
    that it is of; True where compiled code has to find it."""

    causal: bool = False
    left: int = -1
    documents: Tensor | bool | None = None


class Request(NamedTuple):
    """A model's request for a mask, as far as patterns need it."""

    mask_function: Callable
    is_custom: bool
    local_size: int | None
    allow_is_causal_skip: bool
    allow_is_bidirectional_skip: bool
    config: Any
    is_square: bool


def _code(function: Callable) -> Any:
    return getattr(function, "__code__", None)


# Functions that transformers creates for each mask are recognised by their code.
_AND = _code(masking_utils.and_masks())
_OR = _code(masking_utils.or_masks())
_CAUSAL_WINDOW = _code(masking_utils.sliding_window_overlay(1))
_WINDOW = _code(masking_utils.sliding_window_bidirectional_overlay(1))
_DOCUMENTS = _code(masking_utils.packed_sequence_mask_function(None))  # pyright: ignore[reportArgumentType]
# Old versions have none.
_remapped = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _code(_remapped(None, None)) if _remapped else object()
_CHUNKS = _code(masking_utils.chunked_overlay(1, None))  # pyright: ignore[reportArgumentType]

_CUSTOM = "the model adds a mask function of its own"


def find(request: Request) -> Pattern | str:
    """The pattern of a mask function, or why lengths cannot express it."""
    if request.is_custom:
        return _CUSTOM
    facts: dict[str, Any] = {}
    reason = _read(request.mask_function, facts)
    if reason is not None:
        return reason
    if "both" in facts:
        if facts.get("causal") or "left" in facts:
            return "a window to both sides beside a causal mask"
        return Pattern(False, facts["both"], facts.get("documents"))
    if "left" in facts and not facts.get("causal"):
        return "a window to the left that is not causal"
    return Pattern(facts.get("causal", False), facts.get("left", -1), facts.get("documents"))


def _read(function: Callable, facts: dict[str, Any]) -> str | None:
    """Writes into `facts` what a mask function is made of. Returns why it cannot."""
    code = _code(function)
    if function is masking_utils.causal_mask_function:
        facts["causal"] = True
    elif function is masking_utils.bidirectional_mask_function:
        pass
    elif code is _CAUSAL_WINDOW:
        facts["left"] = min(facts.get("left", 1 << 30), _closure(function)["sliding_window"] - 1)
    elif code is _WINDOW:
        facts["both"] = min(facts.get("both", 1 << 30), _closure(function)["sliding_window"])
    elif code is _REMAPPED:
        return _read(_closure(function)["mask_function"], facts)
    elif code is _DOCUMENTS:
        facts["documents"] = _closure(function)["packed_sequence_mask"]
    elif code is _AND:
        reasons = [_read(each, facts) for each in _closure(function)["mask_functions"]]
        return next((reason for reason in reasons if reason), None)
    elif code is _CHUNKS:
        return "attention in chunks"
    elif code is _OR:
        return "tokens that see each other both ways, or another union of masks"
    else:
        return f"a mask function that is not known: {getattr(function, '__qualname__', function)}"
    return None


def _closure(function: Callable) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def find_traced(request: Request) -> Pattern | str:
    """As `find`, for compiled code: Dynamo cannot read closures, so only the flags decide."""
    if request.is_custom:
        return _CUSTOM
    if request.mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if request.mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    size = request.local_size
    if size is not None:
        of_chunks = getattr(request.config, "attention_chunk_size", None)
        if size != getattr(request.config, "sliding_window", None) or size == of_chunks:
            return "a local size that is not the window, in compiled code"
    if request.allow_is_causal_skip:
        return Pattern(True, -1 if size is None else size - 1)
    if request.allow_is_bidirectional_skip:
        return Pattern(False, -1 if size is None else size)
    if _code(request.mask_function) is _AND and request.is_square:
        return Pattern(True, -1 if size is None else size - 1, documents=True)
    return "a mask function that compiled code cannot read"
