"""From a plan to machine code with no GPU: programs, foreign descriptions, lists, packs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import heedful
from heedful.core.base import installed
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch import compiler, noted, record
from heedful.launch.code import packs
from heedful.launch.code.artifact import lay_out
from heedful.launch.foreign import TensorMapParameter, describe
from heedful.launch.prebuild import kernels, prebuild
from heedful.launch.program.programs import program
from support.packs import forget

PROBLEM = AttentionProblem.dense(1, 128, 128, 8, head_dim=64, return_lse=True)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A process that has neither compiled nor loaded anything, with a disk cache of its own."""
    monkeypatch.setenv("HEEDFUL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_artifacts", {})
    forget(monkeypatch)
    compiler.counters.clear()
    return tmp_path


def forward_program(name: str, problem: AttentionProblem = PROBLEM, backend: str | None = None):
    chosen = plan(problem, by_name(name), backend=backend)
    return program(chosen, "forward"), chosen.device.arch


def test_lengths_batch_heads_and_scale_compile_nothing_new():
    variants = set()
    for facts in ({}, {"batch": 7}, {"seqlen_q": 1001, "seqlen_k": 77}, {"scale": 0.3}):
        shape = {"batch": 2, "seqlen_q": 512, "seqlen_k": 512, "heads_q": 64, **facts}
        made, _ = forward_program("H200", AttentionProblem.dense(**shape))
        variants |= {call.specialization for call in made.calls}
    assert len(variants) == 1


def test_the_number_of_splits_compiles_nothing_new():
    variants, splits = set(), set()
    for length, heads in ((4096, 4), (5000, 8), (8192, 16), (30000, 8), (131072, 2)):
        problem = AttentionProblem.dense(1, 1, length, heads)
        splits.add(plan(problem, by_name("H200"), backend="portable").num_splits)
        made, _ = forward_program("H200", problem, "portable")
        variants |= {call.specialization for call in made.calls}
    assert len(splits) > 1 and min(splits) > 1
    assert len(variants) == 2


def test_a_variant_is_compiled_once_a_process_and_once_a_cache(fresh):
    made, arch = forward_program("H200")
    first = [compiler.artifact(call, arch) for call in made.calls]
    assert compiler.counters == {"compiles": len(first)}
    assert [compiler.artifact(call, arch) for call in made.calls] == first
    assert compiler.counters["memory_hits"] == len(first)
    compiler._artifacts.clear()
    assert [compiler.artifact(call, arch) for call in made.calls] == first
    assert compiler.counters["disk_hits"] == len(first)
    assert compiler.counters["compiles"] == len(first)


def test_parameters_are_laid_out_with_natural_alignment():
    parameters, size = lay_out(
        [("a", "*bf16"), ("n", "i32"), ("s", "i64"), ("d", "tensordesc<bf16[8, 8]>")], {"d": 2}
    )
    offsets = {p.name: p.offset for p in parameters}
    assert [offsets[name] for name in ("a", "n", "s", "d")] == [0, 8, 16, 64]
    assert [offsets[f"d.shape[{i}]"] for i in range(2)] == [192, 196]
    assert [offsets[f"d.strides[{i}]"] for i in range(2)] == [200, 208]
    assert size == 232


def test_a_foreign_launcher_gets_everything_with_no_framework_importable():
    code = (
        "import sys\n"
        "for name in ('torch', 'jax', 'numpy'): sys.modules[name] = None\n"
        "from heedful.core.planning.plan import plan\n"
        "from heedful.core.call.problem import AttentionProblem\n"
        "from heedful.core.base.device import by_name\n"
        "from heedful.launch.foreign import describe\n"
        "from heedful.launch.program.programs import program\n"
        "chosen = plan(AttentionProblem.dense(1, 128, 128, 8, head_dim=64), by_name('H200'))\n"
        "(launch,) = describe(program(chosen, 'forward'), 'sm_90').launches\n"
        "print(launch.artifact.text[:8], launch.artifact.num_warps, launch.artifact.shared_bytes,"
        " launch.artifact.cluster, len(launch.parameters))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("//")


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_a_foreign_description_lists_parameters_in_the_kernels_order(backend):
    made, arch = forward_program("H200", backend=backend)
    (launch,) = describe(made, arch).launches
    compiled = [p for p in launch.artifact.parameters if not p.name.startswith("scratch")]
    assert len(compiled) == len(launch.parameters)
    for parameter, given in zip(compiled, launch.parameters, strict=True):
        kind = "tensormap" if isinstance(given, TensorMapParameter) else given.type
        assert kind == parameter.type
    assert launch.artifact.scratch_bytes == 0


@pytest.mark.parametrize("name", ["H200", "MI300X"])
def test_a_pack_serves_what_it_was_built_for_with_no_compilation(name, fresh):
    entries = [record.Entry(PROBLEM, "forward")]
    device = by_name(name)
    told = []
    count = prebuild(entries, [device], fresh / "pack", 1, progress=lambda *a: told.append(a))
    assert [done for done, _, _ in told] == list(range(1, count + 1))
    packs.load_pack(fresh / "pack")
    made, arch = forward_program(name)
    assert all(compiler.artifact(call, arch).code for call in made.calls)
    assert compiler.counters == {"pack_hits": len(made.calls)}


def test_without_triton_only_packed_kernels_are_found(fresh, monkeypatch):
    monkeypatch.setattr(installed, "compiler", lambda: None)
    made, arch = forward_program("H200")
    with pytest.raises(RuntimeError, match="in no loaded pack.*heedful prebuild"):
        compiler.artifact(made.calls[0], arch)


def test_a_recorded_list_reads_back_as_it_was_written(fresh):
    chosen = plan(PROBLEM, by_name("H200"))
    made = program(chosen, "forward")
    from heedful.launch.program.buffers import forward

    with record.record(fresh / "list.json"):
        noted.note(chosen, "forward", forward(PROBLEM))
        noted.note(chosen, "forward", forward(PROBLEM))
    (entry,) = record.load(fresh / "list.json")
    assert entry == record.Entry(PROBLEM, "forward", forward(PROBLEM), chosen.device)
    found, backends = kernels([entry], [by_name("H200")])
    assert {call.specialization for call, _ in found.values()} == {
        c.specialization for c in made.calls
    }
    assert backends == {chosen.backend}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[]", "format"),
        ('{"format": 2}', "format"),
        ({"format": 1, "problems": [{}]}, "problem 0"),
        ({"format": 1, "problems": [{"problem": {"batch": 1}}]}, "problem 0"),
    ],
)
def test_a_bad_list_is_refused_with_its_place(fresh, content, says):
    path = fresh / "list.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=says):
        record.load(path)
