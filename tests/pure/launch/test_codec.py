"""Kernel calls as JSON: what goes to another process is what comes back; nothing else is read."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from heedful.core.base.symbols import Trace
from heedful.kernels.args.hopper_decode import HopperDecodeIO
from heedful.kernels.args.kinds import Rows
from heedful.launch.code.identity import kernel_key
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar, TensorMap
from heedful.launch.worker.codec import decode, encode

NONE: Any = None
ROWS = Rows(Pointer("q", "bfloat16", False), Scalar(0, "i64", 8), Scalar(0), Scalar(0))
MAP = TensorMap("k", "float16", (0, 0, 0), (0, 0, 0), (1, 64, 64), "Layout(rank=3)")
REF = KernelRef("heedful.kernels.hopper.forward.kernel", "forward", "gluon")
CALL = KernelCall(
    REF,
    (1, 1, 1),
    {
        "io": HopperDecodeIO(ROWS, MAP, Pointer("v", "int4"), NONE, NONE, None),
        "absent": None,
        "FLAG": True,
        "SCALE": 0.1,
    },
    {"num_warps": 4, "allow": "a\nb", "maxnreg": None},
    2,
)


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_a_call_comes_back_as_it_was(arch):
    assert decode(encode(CALL, arch)) == (CALL, arch)
    assert kernel_key(decode(encode(CALL, arch))[0], arch) == kernel_key(CALL, arch)


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**63, True, False, None, "", "\0\ud7ff", 0.1, -0.0, 5e-324, math.inf, -math.inf],
)
def test_a_constant_comes_back_with_its_type_and_every_bit(value):
    sent = replace(CALL, parameters={"X": value}, options={"x": value})
    back, _ = decode(encode(sent, "sm_90"))
    for found in (back.parameters["X"], back.options["x"]):
        assert type(found) is type(value) and repr(found) == repr(value)


def test_numbers_stay_here_and_symbols_need_not_be_known():
    trace = Trace()
    (length,) = trace.symbols([5])
    given = Scalar(8 * length, "i64", 8)
    far = TensorMap("k", "float16", (length,) * 3, (7, 7, 1), (1, 64, 64), "Layout(rank=3)")
    sent = replace(CALL, grid=(7, 8, 9), parameters={**CALL.parameters, "n": given, "map": far})
    back, _ = decode(encode(sent, "sm_90"))
    assert not trace._asked, "a question of the length"
    assert back.parameters["n"] == Scalar(0, "i64", 8) and back.grid == (1, 1, 1)
    assert back.parameters["map"] == MAP


@pytest.mark.parametrize("value", [(1, 2), [1], {"a": 1}, b"x", object(), int, 1j])
def test_what_is_no_plain_value_is_not_sent(value):
    with pytest.raises(TypeError, match="neither an argument nor a constant"):
        encode(replace(CALL, options={"x": value}), "sm_90")


def test_a_group_that_no_kernel_declares_is_not_sent():
    other = type("Rows", (Rows,), {})
    with pytest.raises(TypeError, match="neither an argument nor a constant"):
        encode(replace(CALL, options={"x": other(*ROWS)}), "sm_90")


def _with(**parts: Any) -> bytes:
    return json.dumps({**json.loads(encode(CALL, "sm_90")), **parts}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'{"kernel": []}',
        b"\xff",
        b"[" * 100_000,
        _with(kernel=["os", "system", "triton"]),
        _with(kernel=["heedful.kernels.x", 1, "triton"]),
        _with(kernel=[["heedful.kernels."], "f", "triton"]),
        _with(arch=90),
        _with(cluster="2"),
        _with(cluster=0),
        _with(parameters=[["x", ["group", "os.system", ["ls"]]]]),
        _with(parameters=[["x", ["group", "kinds.Rows", []]]]),
        _with(parameters=[["x", ["group", "kinds.Kind", [1]]]]),
        _with(parameters=[["x", ["pointer", "q", "bfloat16", 1]]]),
        _with(parameters=[["x", ["pointer", "q", "decimal", True]]]),
        _with(parameters=[["x", ["scalar", "i32", "1"]]]),
        _with(parameters=[["x", ["map", "k", "float16", 10**9, [1], "l"]]]),
        _with(parameters=[["x", ["map", "k", "float16", 1, ["1"], "l"]]]),
        _with(parameters=[["x", ["float", "import"]]]),
        _with(parameters=[["x", ["float", "0x1p99999"]]]),
        _with(parameters=[["x", {}]]),
        _with(parameters=[["x", []]]),
        _with(parameters=[[["x"], 1]]),
        _with(parameters=["x"]),
        _with(parameters=7),
        _with(options=[[1, 1]]),
    ],
    ids=lambda data: data.decode(errors="replace")[:60],
)
def test_what_encode_does_not_write_is_refused(data):
    with pytest.raises(ValueError):
        decode(data)


def test_reading_a_call_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; from heedful.launch.worker.codec import decode;"
        " print(decode(sys.stdin.buffer.read())[0].specialization)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=encode(CALL, "sm_90"), capture_output=True
    )
    assert done.stdout.decode().strip() == repr(CALL.specialization), done.stderr
