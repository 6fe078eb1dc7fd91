"""The plan of a call, in words, without running it."""

from collections.abc import Callable

from heedful.core import plan
from heedful.torch.calls import Explain, Explained


def explain(function: Callable, *args, **kwargs) -> str:
    """What would run `function(*args, **kwargs)`, and why nothing else does; nothing is launched or
    written.

    Args:
        function: one of heedful's attention functions.

    Returns:
        The chosen kernels, their tiles, notes and every rejected kernel with its reasons, as text.

    Raises:
        TypeError, ValueError: as the call itself would.
    """
    kwargs["backend"] = Explain(kwargs.get("backend") or "")
    try:
        function(*args, **kwargs)
    except Explained as explained:
        return plan.explain(explained.plan)
    raise TypeError(
        f"function must be an attention function of heedful on real tensors, got {function!r}"
    )
