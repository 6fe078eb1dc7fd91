"""JAX's names without promise: the only module that may use them."""

from jax._src import dispatch


def wants_devices(primitive) -> None:
    """JAX tells a primitive's lowering the devices of the program, which a partitioning rule needs
    and which it leaves out elsewhere (jax 0.10 and 0.11)."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_one_primitive(function) -> None:
    """jit of this function, which binds one primitive, names it where a NaN came of it. It would
    else call the function to find where, which would be jit of it again, without end."""
    function._apply_primitive = True
