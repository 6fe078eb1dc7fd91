"""The command line answers without torch, names what is wrong, and lies about nothing."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from heedful.cli import app

SOURCE = Path(__file__).parents[3] / "src"

# Runs the command line in a Python where importing the named packages fails.
_WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["heedful", *{arguments!r}]
from heedful.cli import main
main()
"""


def run(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    code = _WITHOUT.format(packages=set(without), arguments=list(arguments))
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "160", "NO_COLOR": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


@cache
def explained(*options: str) -> dict[str, Any]:
    """The problem that `heedful explain` understands, asked within this process."""
    testing = pytest.importorskip("typer.testing")
    shown = testing.CliRunner().invoke(app(), ["explain", "--device", "H200", *options, "--json"])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)["problem"]


def test_explain_works_where_torch_is_not_installed():
    shown = run("explain", "--device", "MI355X", "--causal", without=("torch", "triton", "jax"))
    assert shown.returncode == 0, shown.stderr
    assert "portable" in shown.stdout and "emulated" in shown.stdout


def test_explain_names_every_rejected_kernel_with_a_reason():
    shown = run("explain", "--device", "H200", "--backward", "--json")
    decision = json.loads(shown.stdout)
    rejected = {(r["backend"], r["direction"]) for r in decision["rejected"]}
    chosen = {
        (decision["forward"]["backend"], "forward"),
        (decision["backward"]["backend"], "backward"),
    }
    from heedful.core.registry.capability import VARIANTS

    assert rejected | chosen == {(v.backend, v.direction) for v in VARIANTS if v.serves("torch")}
    assert all(r["reasons"] for r in decision["rejected"])


@pytest.mark.parametrize(
    "option, value, fact",
    [
        ("--batch", "3", {"batch": 3}),
        ("--seqlen-k", "77", {"seqlen_q": 4096, "seqlen_k": 77}),
        ("--head-dim-v", "64", {"head_dim": 128, "head_dim_v": 64}),
        ("--dtype", "fp16", {"dtype": "float16", "kv_dtype": "float16"}),
        ("--softcap", "30", {"softcap": 30.0}),
        ("--page-size", "16", {"page_size": 16}),
        ("--splits", "5", {"num_splits": 5}),
        ("--dropout", "0.25", {"dropout_p": 0.25}),
    ],
)
def test_an_option_of_explain_reaches_the_problem(option, value, fact):
    assert fact.items() <= explained(option, value).items()


@pytest.mark.parametrize(
    "flag", ["alibi", "bias", "sink", "varlen", "causal", "unaligned", "uneven-rows"]
)
def test_a_flag_of_explain_changes_the_problem(flag):
    assert explained(f"--{flag}") != explained()


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--dtype", "fp99"), "dtype"),
        (("--heads", "3", "--heads-k", "2"), "heads"),
        (("--device", "Voodoo2"), "device"),
        (("--window", "left"), "window"),
        (("--backend", "nonsense"), "backend"),
        (("--splits", "-1"), "num_splits"),
    ],
)
def test_bad_input_is_named_on_stderr_without_a_traceback(arguments, named):
    shown = run(
        "explain", *(("--device", "H200") if "--device" not in arguments else ()), *arguments
    )
    assert shown.returncode == 2
    assert named in shown.stderr and "Traceback" not in shown.stderr
    assert shown.stdout == ""


def test_doctor_works_without_torch_and_says_how_to_get_it():
    shown = run("doctor", without=("torch", "triton", "jax"))
    assert shown.returncode == 0, shown.stderr
    assert "pip install" in shown.stdout


def test_the_package_itself_runs_as_the_command():
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "heedful", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, env=env)
    assert shown.stdout.startswith("heedful ") and not shown.stderr


def test_without_its_libraries_the_command_names_the_extra():
    shown = run("doctor", without=("typer",))
    assert shown.returncode == 1
    assert "heedful[cli]" in shown.stderr and "Traceback" not in shown.stderr


def test_inspect_reads_the_kernels_of_a_problem_for_a_device_that_is_elsewhere():
    pytest.importorskip("triton")
    shown = run("inspect", "--device", "MI355X", "--json", "-s", "256", "-d", "64")
    assert shown.returncode == 0, shown.stderr
    kernels = json.loads(shown.stdout)
    assert kernels and all("gfx950" in kernel["label"] for kernel in kernels)


def test_inspect_predicts_the_time_of_a_problem_s_launches_and_draws_all_waves(tmp_path):
    pytest.importorskip("triton")
    problem = ("--device", "MI300X", "-b", "1", "-s", "256", "-n", "2", "-d", "64", "--time", "1")
    picture = tmp_path / "waves.svg"
    shown = run("inspect", *problem, "--waves", str(picture), "--clocks", "500-20000")
    assert shown.returncode == 0, shown.stderr
    for words in ("predicted", "between", "busy: MFMA", "a wave waits: memory", "GHz"):
        assert words in shown.stdout
    drawn = picture.read_text()
    assert all(f"wave {number}" in drawn for number in range(4)) and "mfma" in drawn
    kernels = json.loads(run("inspect", *problem, "--json").stdout)
    for kernel in kernels:
        fastest, slowest = kernel["time"]["range"]
        assert 0 < fastest <= kernel["time"]["seconds"] <= slowest


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--device", "H200", "--time", "1"), "gfx942"),
        (("--time", "1"), "--device"),
        (("--device", "MI300X", "--waves", "waves.svg"), "--time"),
        (("--device", "MI300X", "--time", "1", "--clocks", "9-3"), "--clocks"),
    ],
)
def test_inspect_refuses_a_time_that_there_is_not(words, reason):
    shown = run("inspect", "-s", "256", "-d", "64", *words)
    assert shown.returncode == 2
    assert reason in shown.stderr and "Traceback" not in shown.stderr


def test_inspect_says_what_to_give_it():
    shown = run("inspect")
    assert shown.returncode == 2
    assert "--device" in shown.stderr and "Traceback" not in shown.stderr


def test_emulate_hands_its_arguments_on():
    shown = run("emulate", "--", "--help")
    assert shown.returncode == 0
    assert "--grid" in shown.stdout


def test_emulate_takes_its_own_options_without_a_separator():
    shown = run("emulate", "--object", "nowhere.co", "--grid", "4,2")
    assert shown.returncode == 2
    assert "nowhere.co" in shown.stderr
