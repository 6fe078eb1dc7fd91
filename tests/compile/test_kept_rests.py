"""Kernels that keep the rest of a log-sum-exp, for a merge, are those that do not but for a few
instructions behind their loops."""

from dataclasses import replace

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.inspector.nvidia import NvidiaInspection, inspect_cubin
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.program import programs
from heedful.launch.spec import KernelCall

DEVICE = by_name("H200")
slow = pytest.mark.slow


def dense(rows: int, dim: int, **facts) -> AttentionProblem:
    return AttentionProblem.dense(1, rows, 4000, 8, 2, head_dim=dim, return_lse=True, **facts)


def decoded(rows: int, **facts) -> AttentionProblem:
    facts = {"head_dim": 128, "heads_k": 2, "used_k": True, **facts}
    return AttentionProblem.dense(8, rows, 4000, 16, return_lse=True, **facts)


LATENT = {"heads_k": 1, "head_dim": 576, "head_dim_v": 512, "v_in_k": True}


def side(backend: str, problem: AttentionProblem, marks=()):
    name = f"{backend}-d{problem.head_dim}-{problem.num_splits}"
    return pytest.param(backend, problem, marks=marks, id=name)


# What may be a side of a merge: by a backend, and each of its forms.
SIDES = [
    side("hopper", dense(3000, 64), marks=slow),
    side("hopper", dense(3000, 128), marks=slow),
    side("hopper", dense(3000, 192), marks=slow),
    side("hopper", dense(3000, 256), marks=slow),
    side("hopper", dense(64, 128, num_splits=4), marks=slow),
    side("hopper_decode", decoded(1), marks=slow),
    side("decode/portable", decoded(1), marks=slow),
    side("mla", decoded(8, **LATENT), marks=slow),
    side("mla_swap_ab", decoded(1, **LATENT), marks=slow),
    side("portable", dense(100, 128), marks=slow),
    side("portable", dense(100, 128, num_splits=4)),
]


def forward(problem: AttentionProblem, backend: str) -> list[KernelCall]:
    chosen = plan(problem, DEVICE, compiling(), forced(backend))
    return [*programs.program(chosen, "forward").calls]


def inspected(call: KernelCall) -> NvidiaInspection:
    return inspect_cubin(compiler.artifact(call, DEVICE.arch).code)


@pytest.mark.parametrize(("backend", "problem"), SIDES)
def test_to_keep_a_rest_costs_no_launch_no_stack_and_nothing_in_a_loop(backend, problem):
    before = forward(problem, backend)
    after = forward(replace(problem, keeps_rest=True), backend)
    assert [call.kernel for call in after] == [call.kernel for call in before]
    assert [call.grid for call in after] == [call.grid for call in before]
    assert "rest" in after[-1].writes and "rest" not in before[-1].writes
    for plain, keeping in zip(before, after, strict=True):
        if plain.specialization == keeping.specialization:
            continue
        plain, keeping = inspected(plain), inspected(keeping)
        assert keeping.stack_bytes <= plain.stack_bytes
        # An SM gives a thread registers by eights.
        assert -(-keeping.registers // 8) <= -(-plain.registers // 8)
        if plain.loop is not None and keeping.loop is not None:
            assert keeping.loop.spills <= plain.loop.spills
