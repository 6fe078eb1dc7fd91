"""Whether a result's bits may depend on how a call is made: `numerics`, decision 068; and how many
SMs a call leaves to others: `sm_margin`.

Both travel in the option `backend`, after the backend's name. So they are part of every key of a
call, and of every operator and traced program, whose schemas stay as they are.
"""

from typing import Any

from heedful.core.base import settings
from heedful.core.base.numbers import whole, wrong_type

_NUMERICS, _MARGIN = " numerics=", " sm_margin="


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


def backend_of(option: str | None) -> str | None:
    """The backend in this option; None if it names none."""
    if option is None or not (_NUMERICS in option or _MARGIN in option):
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
