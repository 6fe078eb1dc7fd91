"""A new batch dim joins that of a call where nothing of the call tells batches apart."""

import pytest

from heedful.core.call.arguments import Options
from heedful.core.call.batching import joins
from heedful.core.call.operands import Operands

Q, K = (2, 8, 4, 16), (2, 9, 2, 16)
DENSE = Options("dense")


def operands(**more) -> Operands:
    return Operands(Q, K, K, **more)


def flags(*names: str) -> list[bool]:
    return [name in names for name in Operands._fields]


@pytest.mark.parametrize(
    "more, joined",
    [
        ({}, True),
        ({"bias": (8, 9)}, True),
        ({"bias": (1, 4, 8, 9)}, True),
        ({"bias": (2, 4, 8, 9)}, False),
        ({"alibi_slopes": (4,)}, True),
        ({"alibi_slopes": (2, 4)}, False),
        *(({name: (1, 4, 8, 2)}, True) for name in ("key_ranges", "block_rows", "block_keys")),
        *(({name: (2, 1, 8, 2)}, False) for name in ("key_ranges", "block_rows", "block_keys")),
        *(({name: (2,)}, False) for name in ("seqused_q", "seqused_k", "leftpad_k", "q_offsets")),
        ({"origins": (2, 4)}, False),
        *(({f"{name}_descale": ()}, True) for name in "qkv"),
        *(({f"{name}_descale": (1, 1)}, True) for name in "qkv"),
        *(({f"{name}_descale": (2, 1)}, False) for name in "qkv"),
        *(({f"{name}_descale": (1, 2)}, False) for name in "qkv"),
    ],
)
def test_what_is_one_for_all_batches_tells_none_apart(more, joined):
    assert joins(operands(**more), flags("q"), DENSE) == joined


def test_only_q_k_and_v_of_dense_calls_without_dropout_may_be_mapped():
    assert joins(operands(), flags("q", "k", "v"), DENSE)
    for other in Operands._fields[3:]:
        assert not joins(operands(), flags("q", other), DENSE)
    assert not joins(operands(), flags("q"), DENSE._replace(dropout_p=0.1))
    assert not joins(operands(), flags("q"), DENSE._replace(kind="varlen"))


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k", "leftpad_k", "q_offsets", "origins"])
def test_what_each_sequence_has_of_its_own_joins_no_others(name):
    assert not joins(operands(**{name: (2,)}), flags("q"), DENSE)


@pytest.mark.parametrize("name", ["key_ranges", "block_rows", "block_keys"])
def test_masks_of_one_batch_join_those_of_others(name):
    assert joins(operands(**{name: (1, 4, 8, 2)}), flags("q"), DENSE)
    assert not joins(operands(**{name: (2, 4, 8, 2)}), flags("q"), DENSE)
