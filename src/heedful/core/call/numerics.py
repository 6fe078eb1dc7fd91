"""Whether a result's bits may depend on how a call is made: `numerics`, decision 068.

It travels in the option `backend`, after the backend's name. So it is part of every key of a call,
and of every operator and traced program, whose schemas stay as they are.
"""

from typing import Any

from heedful.core.base import settings
from heedful.core.base.numbers import wrong_type

_MARK = " numerics="


def with_numerics(backend: Any, numerics: Any) -> Any:
    """The option `backend` of a call with both arguments. Raises TypeError or ValueError."""
    if numerics is None:
        return backend
    if not isinstance(numerics, str):
        wrong_type("numerics", "a str or None", numerics)
    _check(numerics)
    if backend is not None and not isinstance(backend, str):
        wrong_type("backend", "a str or None", backend)
    if hasattr(backend, "options"):
        raise ValueError(f"numerics must be None beside {backend}, got {numerics!r}")
    return f"{backend or ''}{_MARK}{numerics}"


def backend_of(option: str | None) -> str | None:
    """The backend in this option; None if it names none."""
    if option is None or _MARK not in option:
        return option
    return option.partition(_MARK)[0] or None


def is_invariant(option: str | None) -> bool:
    """Whether a call with this option has numerics="invariant", by itself or by the setting."""
    numerics = (option or "").partition(_MARK)[2] or settings.get("numerics")
    _check(numerics)
    return numerics == "invariant"


def _check(numerics: str) -> None:
    if numerics not in settings.NUMERICS:
        names = ", ".join(settings.NUMERICS)
        raise ValueError(f"numerics must be one of {names} or None, got {numerics!r}")
