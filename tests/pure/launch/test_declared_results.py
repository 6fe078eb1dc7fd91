"""Programs declare each of their results as written, and no operand, whichever family's kernels
they are of: JAX passes on, and graphs order, by what is declared alone."""

from typing import Any

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.launch.program import buffers
from heedful.launch.program.programs import program
from heedful.launch.spec import Program

BASE = {"batch": 2, "heads_q": 8, "heads_k": 4, "head_dim": 128, "dtype": "bfloat16"}
DECODE: dict[str, Any] = {"seqlen_q": 1, "seqlen_k": 4000, "used_k": True}
LATENT = {**DECODE, "heads_q": 16, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True}
LONG: dict[str, Any] = {"seqlen_q": 2000, "seqlen_k": 2100}
PACKED = {**LONG, "total_q": 3000, "total_k": 3000}
MIXED = {**LONG, "total_q": 2300, "used_k": True, "mask": MaskSpec.of(True)}
GRADIENTS = {"needs_grad": True, "sink": True}
# Backend -> what it is asked.
ASKED: dict[str, list[dict[str, Any]]] = {
    "portable": [LONG, {**PACKED, **GRADIENTS}, {**LONG, "num_splits": 3}],
    "decode": [DECODE, {**DECODE, "num_splits": 3, "page_size": 16}],
    "hopper": [
        LONG,
        {**LONG, "num_splits": 3},
        {**PACKED, "dtype": "float8_e4m3fn"},
        {**LONG, "dtype": "float8_e4m3fn"},
        *({**LONG, "head_dim": d, **GRADIENTS} for d in (64, 128, 192, 256)),
        *({**PACKED, "head_dim": d, **GRADIENTS} for d in (64, 256)),
        {**LONG, "head_dim": 192, "head_dim_v": 128, **GRADIENTS},
        {**LONG, "deterministic": True, "heads_k": 1, **GRADIENTS},
        # Of few heads key tiles are split, and parts are added up.
        {**LONG, "batch": 1, "heads_k": 2, "needs_grad": True},
    ],
    "hopper_decode": [DECODE, {**DECODE, "num_splits": 3}, {**DECODE, "page_size": 64}],
    "hopper_mixed": [MIXED, {**MIXED, "page_size": 16}],
    "mla": [LATENT, {**LATENT, "page_size": 64}],
    "mla_swap_ab": [LATENT],
    "mixed/portable": [MIXED],
    "cdna": [LONG],
}
DEVICES = {"cdna": "MI300X", "decode": "MI300X", "portable": "B200"}


def made(backend: str, direction: str, problem: AttentionProblem) -> tuple[Program, set[str]]:
    """A program, and the names of its arguments."""
    arrays = getattr(buffers, direction)(problem)
    device = by_name(DEVICES.get(backend, "H200"))
    return program(plan(problem, device, backend=forced(backend)), direction, arrays), set(arrays)


@pytest.mark.parametrize(
    "backend, facts",
    [(backend, facts) for backend, asked in ASKED.items() for facts in asked],
    ids=str,
)
@pytest.mark.parametrize("returns_lse", [True, False])
def test_each_result_is_declared_as_written_and_no_operand(backend, facts, returns_lse):
    problem = AttentionProblem.dense(**{**BASE, **facts}, return_lse=returns_lse)
    for direction in ("forward", "backward")[: 1 + problem.needs_grad]:
        found, arguments = made(backend, direction, problem)
        results = {"out", "lse"} & arguments
        if direction == "backward":
            results = {f"d{name}" for name in ("q", "k", "v", "sink", "bias")} & arguments
        scratch = {workspace.name for workspace in found.workspaces}
        written = frozenset().union(*(call.writes for call in found.calls))
        assert results <= written <= results | scratch
        # Several kernels may have one: each writes it, or a part of it.
        assert all(call.reads & results <= call.writes for call in found.calls)
        operands = arguments - results - ({"v"} if problem.v_in_k else set())
        assert operands <= frozenset().union(*(call.reads for call in found.calls))
