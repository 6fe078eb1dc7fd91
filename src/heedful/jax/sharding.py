"""Attention over several devices: each computes the batch entries and the heads that it has.

Under shard_map the caller says who has what. Under jit with sharded inputs a partitioning rule
does: batch and KV heads may be spread, all else is gathered.
"""

from typing import Any

import jax


def varying_like(made: Any, types) -> Any:
    """The type of a result as varying over manual mesh axes as that of the operands."""
    marked = [t for t in types if getattr(getattr(t, "mat", None), "varying", None)]
    if not marked:
        return made
    return made.update(manual_axis_type=max((t.mat for t in marked), key=lambda m: len(m.varying)))


def unvaried(context: Any) -> Any:
    """A lowering context whose operands vary over no axis: what is lowered is one device's part."""
    plain = [jax.core.ShapedArray(a.shape, a.dtype) for a in context.avals_in]
    results = [jax.core.ShapedArray(a.shape, a.dtype) for a in context.avals_out]
    return context.replace(avals_in=plain, avals_out=results)


def is_spread(context: Any) -> bool:
    """Whether what is lowered is for several devices that XLA shares the work among."""
    axes = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return set(axes.manual_axes) != set(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 1) > 1
