"""Arrays of a block mask are refused by name where they are not those of the call."""

from types import SimpleNamespace
from typing import Any

import pytest

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.block_mask import check_blocks
from heedful.core.call.operands import Operands

SIZES = SimpleNamespace(batch=3, heads_q=4, seqlen_q=130, seqlen_k=256)


def ints(*shape: int, dtype: str = "int32") -> ArraySpec:
    return ArraySpec.contiguous(shape, dtype)


def operands(**changes: ArraySpec | None) -> Operands:
    """Lists of tiles of 128, two of queries and two of keys."""
    given: dict[str, Any] = {"q": None, "k": None, "v": None, "block_bits": ints(5, 128, 4)}
    given |= {"block_rows": ints(3, 4, 2, 6), "block_keys": ints(3, 4, 2, 6), **changes}
    return Operands(**given)


def test_a_call_without_lists_has_no_tiles():
    assert check_blocks(Operands(None, None, None), SIZES) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_rows": ints(1, 1, 2, 4), "block_keys": ints(1, 4, 2, 8)},
        {"block_rows": ints(3, 1, 2, 4), "block_bits": ints(1, 128, 4)},
    ],
    ids=str,
)
def test_lists_of_all_heads_or_entries_are_taken(changes):
    assert check_blocks(operands(**changes), SIZES) == 128


@pytest.mark.parametrize("side", [32, 64, 128])
def test_tiles_have_one_of_three_sides(side):
    rows, keys = -(-130 // side), 256 // side
    lists = {"block_rows": ints(3, 4, rows, 4), "block_keys": ints(3, 4, keys, 4)}
    assert check_blocks(operands(**lists, block_bits=ints(1, side, side // 32)), SIZES) == side


@pytest.mark.parametrize(
    "changes, words",
    [
        *(
            ({f"block_{name}": None}, f"^block_mask's {name} must be given with its other arrays")
            for name in ("rows", "keys", "bits")
        ),
        ({"block_keys": ints(3, 4, 2, 6, dtype="int64")}, "^block_mask's keys must be int32, got"),
        ({"block_rows": ints(4, 2, 6)}, "^block_mask's rows must be .*, got shape .4, 2, 6.$"),
        ({"block_bits": ints(1, 5, 128, 4)}, "^block_mask's bits must be .tiles seen in part"),
        *(
            ({"block_bits": ints(*shape)}, "^block_mask's bits must be .at least 1, side")
            for shape in ((5, 16, 1), (5, 256, 8), (5, 128, 3), (0, 128, 4), (5, 96, 3))
        ),
        *(
            ({"block_rows": ints(*shape)}, "^block_mask's rows must be .* 3 x 4 heads and 130 ")
            for shape in ((2, 4, 2, 6), (3, 2, 2, 6), (3, 4, 1, 6), (3, 4, 3, 6), (4, 3, 2, 6))
        ),
        *(
            ({"block_keys": ints(3, 4, 2, n)}, "^block_mask's keys must be .* and 256 positions")
            for n in (2, 3, 5)
        ),
        ({"block_keys": ints(3, 4, 3, 6)}, "^block_mask's keys must be .* in tiles of 128"),
    ],
    ids=str,
)
def test_a_list_of_another_call_is_refused_by_name(changes, words):
    with pytest.raises((TypeError, ValueError), match=words):
        check_blocks(operands(**changes), SIZES)
