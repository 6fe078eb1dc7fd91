"""JAX's private names: no other module may use them."""

from jax._src import dispatch


def wants_devices(primitive) -> None:
    """JAX tells a primitive's lowering the devices of the program, which a partitioning rule needs
    and which it leaves out elsewhere (jax 0.10 and 0.11)."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_one_primitive(function) -> None:
    """Makes jit of this function, which binds one primitive, name it if it gives a NaN. Otherwise
    JAX would call the function to find the place, which is jit of it again, without end."""
    function._apply_primitive = True
