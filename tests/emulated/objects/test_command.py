"""`--object` on the command line: arguments by name, outputs held against a reference."""

import json

import numpy as np
import pytest

from emulated.helpers.assembled import stand_in, write_object
from emulated.objects.test_objects import SCALE, SCALE_ARGUMENTS
from heedful.emulator.command import main

REFERENCE = """
def scaled(given):
    return {"OUT": given["scale"] * given["X"]}

def doubled(given):
    return {"OUT": 2 * given["scale"] * given["X"]}

def stray(given):
    return {"Y": given["X"]}

def short(given):
    return {"OUT": given["X"][:3]}
"""
SETS = ["--set", "OUT=f32:128=nan", "--set", "scale=f32=0.25", "--set", "n=i32=128"]


@pytest.fixture
def launch(tmp_path):
    path = write_object(tmp_path, {"scale": (SCALE, SCALE_ARGUMENTS, 64)})
    (tmp_path / "r.py").write_text(REFERENCE)
    command = ["--object", str(path), "--objdump", stand_in(tmp_path)]

    def run(*more, x="f32:128"):
        return main([*command, *SETS, "--set", f"X={x}", *more])

    def reference(name):
        return ["--reference", f"{tmp_path / 'r.py'}:{name}"]

    return run, reference


def test_an_output_as_the_reference_gives_it_exits_with_0(launch, capsys):
    run, reference = launch
    assert run(*reference("scaled")) == 0
    shown = capsys.readouterr().out
    assert "no findings" in shown and "OUT: relative rms error 0.00e+00" in shown


def test_a_wrong_output_exits_with_1_unless_tolerated(launch, capsys):
    run, reference = launch
    assert run(*reference("doubled"), "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert found["relative_rms"] == pytest.approx(0.5)
    assert run(*reference("doubled"), "--tolerance", "0.6") == 0


def test_a_value_that_the_kernel_left_out_is_no_match(launch, capsys):
    run, reference = launch
    assert run("--set", "n=i32=64", *reference("scaled"), "--tolerance", "1000") == 1
    assert "64 not a number" in capsys.readouterr().out


def test_arrays_come_from_files_and_go_to_files(launch, tmp_path):
    run, _ = launch
    x = np.linspace(-1, 1, 128)
    np.save(tmp_path / "x.npy", x)
    assert run("--save", str(tmp_path / "out"), x=f"f32:@{tmp_path / 'x.npy'}") == 0
    saved = np.load(tmp_path / "out" / "OUT.npy")
    np.testing.assert_array_equal(saved, 0.25 * x.astype(np.float32))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "Z=i32=1"], "0 arguments called 'Z'"),
        (["--set", "scale"], "expected NAME=ARGUMENT"),
        (["--set", "X=f32:@nowhere.npy"], "nowhere.npy"),
        (["--arg", "i32=1"], "cannot be mixed"),
        (["k.s"], "name one kernel"),
        (["--objdump", "/nowhere"], "cannot run /nowhere"),
        (["--name", "other"], r"none of ['scale']"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(launch, capsys, more, message):
    assert launch[0](*more) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [("stray", "gives ['Y']"), ("short", "has shape (3,)"), ("none", "has no 'none'")],
)
def test_a_reference_that_does_not_fit_is_refused(launch, capsys, name, message):
    run, reference = launch
    assert run(*reference(name)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "kind", "code"), [("gfx942", "fp8", 0x40), ("gfx950", "fp8", 0x38)]
)
def test_a_float_of_8_bits_is_the_chips(arch, kind, code):
    from heedful.emulator.values import parse_value

    value = parse_value(f"{kind}:4=ones", np.random.default_rng(0), arch)
    assert list(value.data) == [code] * 4
    np.testing.assert_array_equal(value.decoded(), 1.0)
