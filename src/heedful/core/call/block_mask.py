"""The checks of a block mask's arrays."""

from typing import Any

from heedful.core.call.operands import Operands

# Rows and keys that a tile may have.
SIDES = (32, 64, 128)
_SHAPES = {
    "block_rows": "(batch or 1, heads_q or 1, tiles of queries, 2 + 2 width)",
    "block_keys": "(batch or 1, heads_q or 1, tiles of keys, 2 + 2 width)",
    "block_bits": "(tiles seen in part, side, side / 32)",
}


def check_blocks(x: Operands, sizes: Any) -> int:
    """Rows and keys of a tile, 0 without a block mask. sizes: with batch, heads_q, seqlen_q and
    seqlen_k. Raises TypeError or ValueError naming block_mask."""
    specs: dict[str, Any] = {name: getattr(x, name) for name in _SHAPES}
    if all(spec is None for spec in specs.values()):
        return 0
    for name, spec in specs.items():
        part = f"block_mask's {name.removeprefix('block_')}"
        if spec is None:
            raise ValueError(f"{part} must be given with its other arrays, got None")
        if spec.dtype != "int32":
            raise TypeError(f"{part} must be int32, got {spec.dtype}")
        if len(spec.shape) != 3 + (name != "block_bits"):
            raise ValueError(f"{part} must be {_SHAPES[name]}, got shape {tuple(spec.shape)}")
    pool, side, words = x.block_bits.shape
    if side not in SIDES or words * 32 != side or pool < 1:
        raise ValueError(
            f"block_mask's bits must be (at least 1, side, side / 32) with a side of"
            f" {', '.join(map(str, SIDES))}, got shape {(pool, side, words)}"
        )
    for name, length in (("block_rows", sizes.seqlen_q), ("block_keys", sizes.seqlen_k)):
        batch, heads, tiles, numbers = specs[name].shape
        fits = batch in (1, sizes.batch) and heads in (1, sizes.heads_q)
        if not fits or tiles != (length + side - 1) // side or numbers < 4 or numbers % 2:
            raise ValueError(
                f"block_mask's {name.removeprefix('block_')} must be {_SHAPES[name]} of"
                f" {sizes.batch} x {sizes.heads_q} heads and {length} positions in tiles of {side},"
                f" got shape {tuple(specs[name].shape)}"
            )
    return side
