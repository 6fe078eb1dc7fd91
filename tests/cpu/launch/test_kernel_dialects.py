"""Kernels are given to the compiler in the language that they are written in."""

import importlib
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.experimental.gluon._runtime import GluonJITFunction

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch.program.programs import program

PACKED = {"total_q": 330, "total_k": 510, "needs_grad": True}
LATENT = {"seqlen_q": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True, "used_k": True}


@pytest.mark.parametrize(
    "device, facts",
    [
        ("H200", PACKED),
        ("H200", {"head_dim": 256, "needs_grad": True}),
        ("H200", {"num_splits": 2, "seqlen_k": 4000}),
        ("H200", {"dtype": "float8_e4m3fn", **PACKED, "needs_grad": False}),
        ("H200", {"dtype": "float8_e4m3fn", "seqlen_q": 2048}),
        ("H200", LATENT),
        ("MI300X", {}),
        ("MI355X", {}),
        ("B200", {"needs_grad": True}),
        ("RTX 4090", {"seqlen_q": 1}),
    ],
    ids=str,
)
def test_a_call_says_in_which_language_its_kernel_is_written(device, facts):
    shape: dict[str, Any] = {"batch": 2, "seqlen_q": 200, "seqlen_k": 300, "heads_q": 16}
    problem = AttentionProblem.dense(**{**shape, "heads_k": 1, "head_dim": 128, **facts})
    chosen = plan(problem, by_name(device))
    for direction in ("forward", "backward")[: 1 + problem.needs_grad]:
        for call in program(chosen, direction).calls:
            module = importlib.import_module(call.kernel.module)
            is_gluon = isinstance(getattr(module, call.kernel.function), GluonJITFunction)
            assert call.kernel.dialect == ("gluon" if is_gluon else "triton"), call.kernel
