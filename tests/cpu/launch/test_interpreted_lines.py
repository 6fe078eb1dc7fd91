"""A trace of an interpreted kernel names the lines of its source: mutation tests choose by them
which tests to run."""

import sys

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter


@triton.jit
def _doubled(x):
    twice = (
        x * 2  # doubled
    )
    return twice


@triton.jit
def _kernel(x_ptr, N: tl.constexpr, IS_DOUBLED: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    if IS_DOUBLED:
        x = _doubled(x)
    if not IS_DOUBLED:
        x = x + 1  # not doubled
    tl.store(x_ptr + tl.arange(0, N), x)


def traced_lines(*given) -> set[str]:
    """Texts of the lines of this file that a launch runs."""
    with open(__file__) as file:
        texts = file.read().splitlines()
    ran, before = set(), sys.gettrace()

    def trace(frame, event, _arg):
        if frame.f_code.co_filename != __file__:
            return None
        if event == "line":
            ran.add(texts[frame.f_lineno - 1].strip())
        return trace

    sys.settrace(trace)
    try:
        _kernel[(1,)](*given)
    finally:
        sys.settrace(before)
    return ran


@interpreted
def test_a_trace_names_the_lines_that_a_launch_runs_and_no_other():
    load, store = "x = tl.load(x_ptr + tl.arange(0, N))", "tl.store(x_ptr + tl.arange(0, N), x)"
    both = traced_lines(torch.ones(4), 4, True)
    assert {load, store, "x = _doubled(x)", "x * 2  # doubled", "return twice"} <= both
    assert "x = x + 1  # not doubled" not in both
    alone = traced_lines(torch.ones(4), 4, False)
    assert {load, store, "x = x + 1  # not doubled"} <= alone
    assert not alone & {"x = _doubled(x)", "return twice"}


@starts_interpreter
def test_the_checks_of_this_file_pass_in_the_interpreter():
    pass_in_the_interpreter(__file__)
