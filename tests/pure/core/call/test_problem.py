"""What follows from the facts of a problem."""

from typing import Any

import pytest

from heedful.core.call.problem import AttentionProblem


@pytest.mark.parametrize(
    ("facts", "ragged"),
    [
        ({}, False),
        ({"total_q": 9}, False),
        ({"used_q": True}, False),
        ({"kv_batch_idx": True}, False),
        ({"total_k": 30}, True),
        ({"used_k": True}, True),
        ({"leftpad_k": True}, True),
        ({"page_size": 16}, True),
    ],
    ids=str,
)
def test_keys_are_ragged_that_end_where_a_sequence_ends(facts, ragged):
    given: dict[str, Any] = facts
    assert AttentionProblem.dense(2, 8, 16, 4, **given).ragged_k is ragged
