"""Whether a result's bits may depend on how a call is made: `numerics`, decision 068; how many SMs
a call leaves to others: `sm_margin`; and what who made its mask says of it: `Documents`.

All travel in the option `backend`, after the backend's name. So they are part of every key of a
call, and of every operator and traced program, whose schemas stay as they are.
"""

from typing import Any, NamedTuple

from heedful.core.base import settings
from heedful.core.base.numbers import whole, wrong_type

_NUMERICS, _MARGIN = " numerics=", " sm_margin="
_DOCUMENTS, _SCATTERED = " key_ranges=documents", " block_mask=scattered"
_MARKS = _NUMERICS, _MARGIN, _DOCUMENTS, _SCATTERED


class Documents(NamedTuple):
    """`key_ranges` of documents in rows of a batch, as `masks.documents` makes them. A plan may cut
    rows where documents begin (decision 072). This changes the time of a call; results are right
    for any ranges. ranges: int32 (batch or 1, 1, seqlen, 2)."""

    ranges: Any


def with_numerics(backend: Any, numerics: Any = None, sm_margin: Any = None) -> Any:
    """The option `backend` of a call with these arguments. Raises TypeError or ValueError."""
    if numerics is None and sm_margin is None:
        return backend
    words = ""
    if numerics is not None:
        if not isinstance(numerics, str):
            wrong_type("numerics", "a str or None", numerics)
        _check(numerics)
        words = f"{_NUMERICS}{numerics}"
    if sm_margin is not None:
        sms = whole("sm_margin", sm_margin, "an int or None")
        if sms < 0:
            raise ValueError(f"sm_margin must be >= 0, got {sms}")
        words += f"{_MARGIN}{sms}"
    if backend is not None and not isinstance(backend, str):
        wrong_type("backend", "a str or None", backend)
    if hasattr(backend, "options"):
        name = "sm_margin" if numerics is None else "numerics"
        raise ValueError(f"{name} must be None beside {backend}, got{words}")
    return f"{backend or ''}{words}"


def with_documents(backend: Any, key_ranges: Any) -> tuple[Any, Any]:
    """(the option `backend`, the array) of a call with these key_ranges. A choice by hand stays as
    it is: it says itself whether rows are cut."""
    if not isinstance(key_ranges, Documents):
        return backend, key_ranges
    return _with_word(backend, _DOCUMENTS), key_ranges.ranges


def with_block_mask(backend: Any, block_mask: Any) -> Any:
    """The option `backend` of a call with this BlockMask. A choice by hand stays as it is."""
    is_scattered = getattr(block_mask, "scattered", False) is True
    return _with_word(backend, _SCATTERED) if is_scattered else backend


def _with_word(backend: Any, word: str) -> Any:
    is_name = backend is None or (isinstance(backend, str) and not hasattr(backend, "options"))
    return f"{backend or ''}{word}" if is_name else backend


def are_scattered(option: str | None) -> bool:
    """Whether the lists of a call with this option are scattered, see `BlockMask`."""
    return option is not None and _SCATTERED in option


def has_documents(option: str | None) -> bool:
    """Whether the key_ranges of a call with this option are those of documents."""
    return option is not None and _DOCUMENTS in option


def backend_of(option: str | None) -> str | None:
    """The backend in this option; None if it names none."""
    if option is None or not any(mark in option for mark in _MARKS):
        return option
    return option.partition(" ")[0] or None


def margin_of(option: str | None) -> int:
    """How many SMs a call with this option leaves to others, by itself or by the setting."""
    sms = _word(option, _MARGIN)
    return int(sms) if sms else settings.get("sm_margin")


def is_invariant(option: str | None) -> bool:
    """Whether a call with this option has numerics="invariant", by itself or by the setting."""
    numerics = _word(option, _NUMERICS) or settings.get("numerics")
    _check(numerics)
    return numerics == "invariant"


def _word(option: str | None, mark: str) -> str:
    """The word after a mark in the option, "" without it."""
    return (option or "").partition(mark)[2].partition(" ")[0]


def _check(numerics: str) -> None:
    if numerics not in settings.NUMERICS:
        names = ", ".join(settings.NUMERICS)
        raise ValueError(f"numerics must be one of {names} or None, got {numerics!r}")
