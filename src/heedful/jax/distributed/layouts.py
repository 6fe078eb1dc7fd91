"""Which tokens each device of a mesh axis has. All devices have equally many, in chunks: of n
devices device r has, of 2 n chunks, r and 2 n - 1 - r (`zigzag`), or of n the r-th (`contiguous`).
"""

from collections.abc import Iterable
from typing import Any

from jax import Array, lax
from jax import numpy as jnp

LAYOUTS = ("zigzag", "contiguous")


def chunks_of(layout: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each device, in the order in which it has them. ValueError for another
    layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS))}, got {layout!r}")
    if layout == "contiguous":
        return tuple((r,) for r in range(devices))
    return tuple((r, 2 * devices - 1 - r) for r in range(devices))


def order(layout: str, devices: int) -> tuple[int, ...]:
    """Chunks as they follow each other from the first device to the last."""
    return tuple(chunk for chunks in chunks_of(layout, devices) for chunk in chunks)


def chunk_size(layout: str, devices: int, tokens: int, name: str) -> int:
    """Tokens of a chunk. ValueError naming the argument where chunks would differ."""
    count = len(order(layout, devices))
    if tokens % count:
        raise ValueError(
            f"{name} must have a multiple of {count} tokens ({layout!r} over {devices} devices; pad"
            f" it), got {tokens}"
        )
    return tokens // count


def shard(x: Array, devices: int, layout: str = "zigzag", axis: int = 1) -> Array:
    """The whole batch with its tokens in the order in which devices have them: cut along `axis` in
    `devices` equal parts, as `PartitionSpec` does, each device has its own.

    Args:
        x: any array, of which `axis` is that of tokens: a multiple of 2 devices for "zigzag".
        devices: of the mesh axis; of two axes, those of the ring's.
        layout: "zigzag" or "contiguous".
        axis: 1 where x is (batch, tokens, ...), 0 where sequences are packed.

    Raises:
        ValueError: naming the argument.
    """
    return _in_order(
        x, order(layout, devices), chunk_size(layout, devices, x.shape[axis], "x"), axis
    )


def unshard(x: Array, devices: int, layout: str = "zigzag", axis: int = 1) -> Array:
    """The reverse of `shard`: tokens in their natural order. Arguments and errors are the same."""
    places = _inverse(order(layout, devices))
    return _in_order(x, places, chunk_size(layout, devices, x.shape[axis], "x"), axis)


def axes_of(axis_name: Any, strategy: str, strategies: Iterable[str]) -> tuple[str, str | None]:
    """The axis of the layout, and that of heads, if these have one of their own. TypeError or
    ValueError naming the argument."""
    if strategy not in strategies:
        raise ValueError(f"strategy must be one of {(*strategies,)}, got {strategy!r}")
    if (strategy == "heads x ring") != isinstance(axis_name, (tuple, list)):
        what = "the axes of the ring and of heads" if "x" in strategy else "the name of an axis"
        raise ValueError(f"axis_name must be {what} under strategy {strategy!r}, got {axis_name!r}")
    if isinstance(axis_name, str):
        return axis_name, None
    if len(axis_name) != 2:
        raise ValueError(f"axis_name must be the axes of the ring and of heads, got {axis_name!r}")
    return axis_name[0], axis_name[1]


def positions(tokens: int, axis_name: str | tuple[str, str], layout: str = "zigzag") -> Array:
    """int32 (tokens,): where in the whole batch each token of this device lies. It runs under
    shard_map.

    Args:
        tokens: how many this device has.
        axis_name: the mesh axis over which tokens are spread, or, as of `attention`, two.
        layout: "zigzag" or "contiguous".

    Raises:
        ValueError: naming the argument.
    """
    if not isinstance(axis_name, str):
        of_ring, of_heads = axis_name
        together = positions(tokens * lax.axis_size(of_heads), of_ring, layout)
        return lax.dynamic_slice_in_dim(together, lax.axis_index(of_heads) * tokens, tokens)
    begins = chunk_begins(tokens, axis_name, layout)
    each = tokens // len(begins)
    return jnp.concatenate([begin + jnp.arange(each, dtype=jnp.int32) for begin in begins])


def chunk_begins(tokens: int, axis_name: str, layout: str) -> list[Array]:
    """Where in the whole batch each chunk of this device begins: int32 (), traced."""
    devices = lax.axis_size(axis_name)
    each = chunk_size(layout, devices, tokens * devices, "q")
    rank = lax.axis_index(axis_name)
    table = jnp.asarray(chunks_of(layout, devices), jnp.int32)
    return [table[rank, i] * each for i in range(table.shape[1])]


def gathered(x: Array, axis_name: str, layout: str, axis: int) -> Array:
    """All tokens in their natural order, on each device."""
    devices = lax.axis_size(axis_name)
    whole = lax.all_gather(x, axis_name, axis=axis, tiled=True)
    return unshard(whole, devices, layout, axis)


def scattered(x: Array, axis_name: str, layout: str, axis: int) -> Array:
    """This device's tokens of the sum over devices of an array of all tokens."""
    in_order = shard(x, lax.axis_size(axis_name), layout, axis)
    return lax.psum_scatter(in_order, axis_name, scatter_dimension=axis, tiled=True)


def _inverse(places: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(places.index(chunk) for chunk in range(len(places)))


def _in_order(x: Any, places: tuple[int, ...], each: int, axis: int) -> Array:
    """Chunks of `each` tokens one after the other."""
    if places == tuple(range(len(places))):
        return jnp.asarray(x)
    parts = [lax.slice_in_dim(x, p * each, (p + 1) * each, axis=axis) for p in places]
    return jnp.concatenate(parts, axis)
