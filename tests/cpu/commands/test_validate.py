"""`heedful validate`: what is right passes and is reported, what is wrong is neither recorded nor
forgiven. A CPU stands in for the GPU where the record is looked at."""

import json
import os
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from heedful.cli.validate import validate
from heedful.core.base.device import by_name
from heedful.core.registry import capability
from heedful.launch import validations
from heedful.launch.code import packs
from heedful.torch.base import device
from heedful.torch.eager import backends
from heedful.validation import grid, run, sensors

app = typer.Typer()
app.command()(validate)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    validations._read.cache_clear()
    yield
    validations._read.cache_clear()


def command(*arguments: str):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


class Off:
    """A runner whose output is off by a thousandth."""

    def __init__(self, runner):
        self._runner = runner
        self.backward_of = runner.backward_of

    def forward(self, x, out=None):
        out, lse, probs = self._runner.forward(x, out)
        return out.mul_(1.001), lse, probs


@pytest.fixture
def wrong_backend(monkeypatch):
    prepare = backends.prepare
    monkeypatch.setattr(backends, "prepare", lambda *args: Off(prepare(*args)))


def test_a_machine_without_a_gpu_says_so_passes_and_writes_the_report():
    done = command("--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "nothing to validate" in done.output
    with open("heedful-validation.json") as file:
        report = json.load(file)
    assert report["passed"] and report["wrong"] == [] and report["record"] is None
    assert {"date", "device", "driver", "versions", "spec", "sources"} <= set(report)
    ran = [p for p in report["problems"] if "results" in p]
    assert {p["backend"] for p in ran} == {"cpu", "sdpa"}
    for problem in ran:
        for result in problem["results"].values():
            for what in ("largest", "rms"):
                assert result["error"][what] <= result["budget"][what]
    backward = [p for p in ran if p["backward"]]
    assert all({"out", "lse", "dq", "dk", "dv"} <= set(p["results"]) for p in backward)
    assert len(backward) == len(grid.grid(small=True))
    assert any(figure.get("time_us") for figure in report["bench"])


def test_a_wrong_backend_fails_is_named_and_is_not_recorded(wrong_backend):
    report = "not/there/r.json"
    done = command("--device", "cpu", "--no-bench", "--backend", "cpu", "--report", report)
    assert done.exit_code == 1
    assert "wrong cpu, float32 dense: out:" in " ".join(done.output.split())
    with open(report) as file:
        report = json.load(file)
    assert not report["passed"] and report["wrong"]
    assert not list((validations.path_of(by_name("CPU"))).parent.glob("*"))


def test_a_backend_that_raises_fails(monkeypatch):
    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(backends, "prepare", broken)
    done = command("--device", "cpu", "--no-bench")
    assert done.exit_code == 1
    assert "no such instruction" in done.output


def test_an_unknown_backend_is_refused():
    assert command("--device", "cpu", "--backend", "hopper").exit_code == 2


@pytest.fixture
def stand_in(monkeypatch):
    """The CPU under a GPU's name, with a row that is gated: what is recorded is looked at."""
    rows = tuple(
        replace(row, levels={"cpu": "emulated"}, by_default=False) if row.backend == "cpu" else row
        for row in capability.VARIANTS
    )
    monkeypatch.setattr(capability, "VARIANTS", rows)
    return device.device_spec(CPU)


def test_only_kernels_that_nobody_ran_and_that_are_not_the_default_are_recorded(stand_in):
    assert run.gated(CPU) == {"cpu"}


def test_what_passed_is_recorded_and_a_later_failure_withdraws_it(stand_in, monkeypatch):
    from heedful.cli import validate as module

    class Gpu:
        type = "cuda"

    monkeypatch.setattr(device, "device_spec", lambda where: stand_in)
    monkeypatch.setattr(run, "device_spec", lambda where: stand_in)
    path = module._record(frozenset({"cpu", "sdpa"}), Gpu(), True)
    assert path and os.path.exists(path)
    assert device.toolchain(CPU).validated == {"cpu"}
    assert module._record(frozenset({"cpu"}), Gpu(), False) is None
    assert not os.path.exists(path)
    assert device.toolchain(CPU).validated == frozenset()


def test_a_call_takes_a_gated_kernel_unasked_once_it_is_recorded(stand_in):
    entry = grid.grid(small=True)[1]
    built = grid.build(entry, CPU)
    with pytest.raises(ValueError, match="asked for by name"):
        backends.prepare(built.problem, built.x)
    validations.write(stand_in, frozenset({"cpu"}), run.now())
    assert backends.prepare(built.problem, built.x).plan.backend == "cpu"


@pytest.mark.parametrize("entry", grid.grid(), ids=lambda entry: entry.name)
def test_every_problem_of_a_gpus_grid_can_be_built_and_planned(entry):
    from heedful.core.planning.plan import plan

    built = grid.build(entry, CPU)
    takers = {(name, "portable") for name in ("MI300X", "MI355X", "H200")}
    if entry.dtype == "float8_e4m3fn":
        takers = {("H200", "hopper"), ("MI355X", "cdna")}
    elif entry.dtype == "float8_e4m3fnuz":
        takers = {("MI300X", "cdna")}
    for name, backend in takers:
        assert plan(built.problem, by_name(name), backend=backend).backend == backend
    assert not packs.backends()


@pytest.mark.parametrize("entry", grid.grid(), ids=lambda entry: entry.name)
def test_a_problem_of_a_gpus_grid_has_the_arrays_that_it_says(entry):
    built = grid.build(entry, CPU)
    problem, x = built.problem, built.x
    said = {"seqused_q": problem.used_q, "seqused_k": problem.used_k, "sink": problem.sink}
    said |= {"cu_seqlens_q": problem.varlen_q, "cu_seqlens_k": problem.varlen_k}
    said |= {"block_table": problem.page_size, "alibi_slopes": problem.alibi}
    said |= {"bias": problem.bias, "block_rows": problem.block_mask, "tree_mask": problem.tree_mask}
    said |= {"key_ranges": problem.key_ranges, "leftpad_k": problem.leftpad_k}
    assert {name: getattr(x, name) is not None for name in said} == {
        name: bool(fact) for name, fact in said.items()
    }
    if problem.used_k:
        # Sequences of several lengths, the longest of all keys.
        assert x.seqused_k.amax() == problem.seqlen_k
        assert problem.batch == 1 or len(x.seqused_k.unique()) > 1


def test_the_grid_has_every_dtype_of_a_kernel_that_waits_for_it():
    """What passes is chosen unasked from then on, in all its dtypes."""
    waiting = {dtype for row in capability.VARIANTS if not row.by_default for dtype in row.dtypes}
    assert waiting <= {entry.dtype for entry in grid.grid()}


def test_variants_are_asked_for_by_their_names_by_aliases_or_all_of_a_backend(monkeypatch):
    monkeypatch.setattr(run, "device_spec", lambda _: by_name("H200"))
    names = run.backends_of(CPU)
    variants = ("mla_swap_ab", "mla", "mla_converting_pair", "mla_converting", "hopper")
    variants += ("wide", "portable")
    of_decode = [f"decode/{name}" for name in variants]
    want = {"decode": of_decode, "mla": ["decode/mla"], "decode/portable": ["decode/portable"]}
    for words, own in want.items():
        assert [str(name) for name in run.asked_of(words, names)] == own
    with pytest.raises(ValueError, match="must be among decode/mla_swap_ab, decode/mla, "):
        run.asked_of("decode/narrow", names)


def test_a_gpu_is_timed_on_training_prefill_and_decoding():
    cases = run.bench_cases(torch.device("cuda"))
    told = [
        (case.group, case.direction, p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_k)
        + (p.head_dim, p.mask.right == 0, p.needs_grad)
        for case in cases
        for p in [case.problem]
    ]
    forward = ("forward", "forward")
    assert told == [
        (*forward, *shape, causal, False)
        for shape in (
            (4, 4096, 4096, 16, 16, 128),
            (4, 4096, 4096, 32, 32, 64),
            (4, 8192, 8192, 64, 8, 128),
        )
        for causal in (False, True)
    ] + [
        ("backward", "backward", 4, 4096, 4096, 16, 16, 128, True, True),
        ("decode", "forward", 8, 1, 8192, 32, 8, 128, False, False),
    ]
    (one,) = run.bench_cases(torch.device("cpu"))
    assert (one.group, one.problem.dtype, one.problem.seqlen_k) == ("cpu", "float32", 512)


def test_the_rocm_is_that_of_the_first_file_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert sensors.rocm_version() is None
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version-dev").write_text("7.3-9\n")
    assert sensors.rocm_version() == "7.3-9"
    (tmp_path / ".info" / "version").write_text("7.2\n")
    assert sensors.rocm_version() == "7.2"
