"""What a program is given when it is interpreted, and what Triton's interpreter is left as."""

from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton.language as tl
from triton.runtime import interpreter

from heedful.core.base.arrays import ArraySpec
from heedful.core.planning.sizes import Workspace
from heedful.launch.spec import KernelCall, KernelRef, Program, Scalar, TensorMap
from support.runs import interpreter as interpret

REF = KernelRef("heedful.kernels.portable.shared.unused", "clear_outside")


@pytest.fixture
def ran(monkeypatch):
    """(call, arrays) of each launch, none of which runs."""
    found: list[Any] = []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpret, "run_call", lambda *given: found.append(given))
    return found


def test_without_the_interpreter_a_program_is_refused(ran, monkeypatch):
    program = Program((KernelCall(REF, (1, 1, 1), {}),))
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
            interpret.interpret(program, {})
    assert not ran


def test_launches_run_in_order_but_for_empty_grids(ran):
    grids = [(1, 1, 1), (2, 0, 1), (0, 1, 1), (3, 2, 1)]
    calls = tuple(KernelCall(REF, grid, {}) for grid in grids)
    assert interpret.interpret(Program(calls), {}) == {}
    assert [call for call, _ in ran] == [calls[0], calls[3]]


def test_scratch_is_zero_where_that_is_promised_and_poisoned_elsewhere(ran):
    spaces = (
        Workspace("sums", ArraySpec.contiguous((2, 3), "float32"), False),
        Workspace("counts", ArraySpec.contiguous((4,), "int32"), True),
    )
    q = torch.zeros(1)
    made = interpret.interpret(Program((KernelCall(REF, (1, 1, 1), {}),), spaces), {"q": q})
    assert made["sums"].dtype == torch.float32 and made["sums"].shape == (2, 3)
    assert made["sums"].isnan().all()
    assert made["counts"].dtype == torch.int32 and not made["counts"].any()
    ((_, arrays),) = ran
    assert arrays == {"q": q, **made}


def test_what_the_interpreter_has_no_memory_for_is_refused():
    spec = TensorMap("x", "bfloat16", (64, 64), (64, 1), (64, 64), "layout")
    with pytest.raises(TypeError, match="total: the interpreter takes pointers and scalars only"):
        interpret.run_call(KernelCall(REF, (1, 1, 1), {"total": spec, "batch": Scalar(1)}), {})


def state() -> tuple:
    return (
        interpreter._patch_lang,
        interpreter._get_np_dtype,
        interpreter.interpreter_builder.options,
    )


def test_the_interpreter_is_as_before_after_a_launch_and_after_one_that_fails():
    before = state()
    with interpret._patched_once():
        during = state()
    assert state() == before
    assert all(a is not b for a, b in zip(during, before, strict=True))
    with pytest.raises(RuntimeError, match="of the kernel"), interpret._patched_once():
        raise RuntimeError("of the kernel")
    assert state() == before


@pytest.mark.parametrize("debug", [False, True])
def test_overflow_is_looked_for_only_when_debugging(debug, monkeypatch):
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=debug))
    with interpret._patched_once():
        assert builder.options.sanitize_overflow == debug


def seeing(**names) -> FunctionType:
    """A function within a kernel that sees these."""
    return FunctionType((lambda: None).__code__, names)


def test_each_module_of_the_language_is_patched_once_a_launch(monkeypatch):
    patched = []
    monkeypatch.setattr(interpreter, "_patch_lang", lambda f: patched.append(f) or "to restore")
    first, same, core, neither = seeing(tl=tl), seeing(x=1, tl=tl), seeing(c=tl.core), seeing(x=1)
    for _ in range(2):
        with interpret._patched_once():
            patch: Any = interpreter._patch_lang
            assert patch(first) == "to restore"
            assert [patch(f) for f in (first, same, neither)] == [None] * 3
            assert patch(core) == "to restore" and patch(core) is None
    assert patched == [first, core] * 2


def test_the_dtypes_of_scalars_are_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(interpreter, "_get_np_dtype", lambda kind: asked.append(kind) or len(asked))
    pointer = SimpleNamespace(name="of another class")
    with interpret._patched_once():
        found: Any = interpreter._get_np_dtype
        assert [found(kind) for kind in (tl.float32, tl.int8, tl.float32)] == [1, 2, 1]
        assert [found(pointer), found(pointer)] == [3, 4]
    assert asked == [tl.float32, tl.int8, pointer, pointer]
