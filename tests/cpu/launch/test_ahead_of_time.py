"""What is compiled ahead of time, inspected or handed to a foreign launcher is what a call runs."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from heedful import flash_attn_func, flash_attn_with_kvcache
from heedful.core.base import installed
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.capability import Toolchain
from heedful.launch import compiler, foreign, noted, prebuild, record
from heedful.launch.code import store
from heedful.launch.code.artifact import lay_out
from heedful.launch.code.identity import kernel_key
from heedful.launch.code.manifest import WheelFacts, read_manifest
from heedful.launch.program import buffers
from heedful.launch.program.programs import program
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.calls import CALLS
from support.artifacts import artifact
from support.problems.cases import Case, build, variants
from support.runs import api, standin

BASE = Case(heads_q=4, dtype="bfloat16", seqlen_q=40, seqlen_k=64, head_dim=64)
CASES = [
    BASE,
    replace(BASE, backward=False),
    *variants(
        BASE, bias=["bhqk"], alibi=["bh"], sink=[True], dropout_p=[0.5], varlen=["qk"], used=["qk"]
    ),
    *variants(
        replace(BASE, backward=False),
        tree_mask=[True],
        leftpad_k=[True],
        return_probs=[True],
        kv_dtype=["int8", "float8_e5m2"],
        head_dim_v=[32],
    ),
    replace(BASE, backward=False, kv_dtype="int8", kv_group=16, kv_shift=True),
    replace(BASE, backward=False, kv_dtype="int4", kv_group=32),
    replace(BASE, backward=False, kv_dtype="int8", kv_group=16, page_size=16),
    replace(BASE, backward=False, kv_batch_idx=True),
    replace(BASE, backward=False, dtype="float8_e4m3fn"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_arrays_that_nobody_made_are_like_those_of_a_plain_call(case):
    built = build(case)
    given = {name: array_spec(t) for name, t in built.x._asdict().items() if t is not None}
    given |= {"out": given["q"]._replace(dtype=built.problem.out_dtype)}
    shape = (*given["q"].shape[:-1], built.problem.head_dim_v)
    given["out"] = ArraySpec.contiguous(shape, built.problem.out_dtype)
    made = buffers.forward(built.problem)
    if case.dtype.startswith("float8"):
        # Descales are the caller's to give, or not.
        given = {name: spec for name, spec in given.items() if "descale" not in name}
    for name in ("lse", "probs"):
        made.pop(name, None)
    assert set(made) == set(given)
    for name, spec in made.items():
        want = given[name]
        if name in ("k", "v", "k_descale", "k_shift", "v_descale", "v_shift") and case.page_size:
            # A cache has more pages than its sequences need.
            want = ArraySpec.contiguous((spec.shape[0], *want.shape[1:]), want.dtype)
        if case.kv_batch_idx and name in ("k", "v"):
            want = ArraySpec.contiguous((case.batch, *want.shape[1:]), want.dtype)
        if name in ("alibi_slopes", "q_descale"):
            want = ArraySpec.contiguous(want.shape, want.dtype)
        dtype = "int4" if case.kv_dtype == "int4" and name in "kv" else want.dtype
        assert spec == want._replace(dtype=dtype, aligned=True, device=None), name


@pytest.mark.parametrize(
    "facts, lse, probs",
    [
        ({}, False, False),
        ({"return_lse": True}, True, False),
        ({"needs_grad": True}, True, False),
        ({"return_probs": True}, True, True),
    ],
)
def test_results_are_there_where_somebody_reads_them(facts, lse, probs):
    problem = replace(build(replace(BASE, backward=False)).problem, **facts)
    made = buffers.forward(problem)
    assert ("lse" in made, "probs" in made) == (lse, probs)
    if lse:
        assert made["lse"] == ArraySpec.contiguous((2, 4, 40), "float32")
    if probs:
        assert made["probs"] == ArraySpec.contiguous((2, 4, 40, 64), "bfloat16")


@pytest.mark.parametrize("case", [BASE, replace(BASE, bias="bhqk", sink=True)], ids=str)
def test_gradients_lie_as_what_they_are_of(case):
    made = buffers.backward(build(case).problem)
    pairs = {"dq": "q", "dk": "k", "dv": "v", "dout": "out"}
    pairs |= {"dbias": "bias", "dsink": "sink"} if case.bias else {}
    for gradient, of in pairs.items():
        assert made[gradient] == made[of]
    assert "probs" not in made and made["lse"].dtype == "float32"
    assert set(made) - set(pairs) - set(pairs.values()) == {"lse"}


@pytest.mark.parametrize("device, backend", [("H200", "hopper"), ("B200", "portable")])
def test_a_recording_holds_the_kernels_that_ran_and_no_other(device, backend, tmp_path):
    """A call's own kernels, forward and backward, are those that its list has compiled."""
    case = replace(BASE, layout="packed", causal=True)
    with standin.gpu(device) as gpu, record.record(tmp_path / "list.json"):
        api.results(build(case), backend=backend)
    entries = record.load(tmp_path / "list.json")
    assert [entry.direction for entry in entries] == ["forward", "backward"]
    kernels, backends = prebuild.kernels(entries, [by_name(device)], None)
    assert backends == {backend}
    ran = {(launch.kernel.module, launch.kernel.function) for launch in gpu.launches}
    listed = {(call.kernel.module, call.kernel.function) for call, _ in kernels.values()}
    assert listed == ran
    assert {arch for _, arch in kernels.values()} == {by_name(device).arch}
    constants = [launch.constants for launch in gpu.launches]
    assert all(dict(call.constants) in constants for call, _ in kernels.values())


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("turns", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("device", ["H200", "MI300X"])
def test_a_recording_of_a_step_holds_the_kernels_that_append(device, turns, q_len, tmp_path):
    """Whether attention is one with them, or follows."""
    x: dict[str, Any] = {}
    x |= {name: torch.randn(2, q_len, n, 64) for name, n in (("q", 4), ("k", 2), ("v", 2))}
    x |= {f"{name}_cache": torch.randn(2, 128, 2, 64) for name in "kv"}
    x |= {name: torch.randn(128, 32) for name in ("rotary_cos", "rotary_sin") if turns}
    x = {name: tensor.bfloat16() for name, tensor in x.items()}
    lengths = torch.tensor([3, 70], dtype=torch.int32)
    CALLS.clear()
    with standin.gpu(device) as gpu, record.record(tmp_path / "list.json"):
        flash_attn_with_kvcache(**x, cache_seqlens=lengths, causal=True)
    ran = {(launch.kernel, *sorted(launch.constants.items())) for launch in gpu.launches}
    assert {kernel.function for kernel, *_ in ran} >= ({"decode"} if q_len == 1 else set())
    entries = record.load(tmp_path / "list.json")
    kernels, _ = prebuild.kernels(entries, [by_name(device)], None)
    listed = {(call.kernel, *sorted(call.constants.items())) for call, _ in kernels.values()}
    assert ran and listed >= ran
    (step,) = [entry for entry in entries if entry.direction == "step"]
    assert step.options == {"interleaved": True, "position0": 0}


def test_a_recording_ends_with_its_block(tmp_path):
    with standin.gpu("B200"):
        with record.record(tmp_path / "outer.json"):
            with record.record(tmp_path / "inner.json"):
                api.results(build(replace(BASE, backward=False)))
            api.results(build(replace(BASE, backward=False, causal=True)))
        api.results(build(replace(BASE, backward=False, sink=True)))
    outer, inner = (record.load(tmp_path / f"{name}.json") for name in ("outer", "inner"))
    assert [entry.problem.mask.causal for entry in inner] == [False]
    assert [entry.problem.mask.causal for entry in outer] == [False, True]


def test_a_recording_says_that_it_is_empty_and_where_it_cannot_be_written(tmp_path):
    q = torch.randn(1, 8, 2, 16)
    with pytest.warns(UserWarning, match="is empty"), record.record(tmp_path / "list.json"):
        flash_attn_func(q, q, q)
    assert record.load(tmp_path / "list.json") == []
    called = []
    with pytest.raises(OSError), record.record(tmp_path / "not" / "there.json"):
        called.append("the work began")
    assert not called


def test_a_wheel_holds_machine_code_alone_that_its_drivers_load(tmp_path, monkeypatch):
    """Byte 8 of an ELF header: the version of the ABI, 7 of CUDA 12 and 8 of CUDA 13."""
    facts = WheelFacts("0.1.0", "sm_90", 12)
    code = {7: b"\x7fELF\0\0\0\0\7", 8: b"\x7fELF\0\0\0\0\x08", 0: b""}
    entry = record.Entry(AttentionProblem.dense(1, 64, 64, 2, needs_grad=False), "forward")

    def built(abi: int) -> None:
        made = replace(artifact(), code=code[abi])
        monkeypatch.setattr(prebuild, "_compiled", lambda wanted, jobs: ((k, made) for k in wanted))
        prebuild.prebuild([entry], [by_name("H200")], tmp_path / str(abi), 1, wheel=facts)

    built(7)
    manifest = read_manifest((tmp_path / "7" / "manifest.json").read_bytes())
    assert manifest.wheel == facts
    (key,) = manifest.digests
    kept = store.parse(key, (tmp_path / "7" / f"{key}.kernel").read_bytes())
    assert kept == replace(artifact(), code=code[7], text="")
    for abi, words in (
        (8, "needs a driver of CUDA 13, the wheel is for CUDA 12"),
        (0, "CUDA None"),
    ):
        with pytest.raises(ValueError, match=words):
            built(abi)
        assert not (tmp_path / str(abi) / "manifest.json").exists()


def test_an_entry_is_planned_for_the_device_that_it_was_seen_on(tmp_path):
    small = by_name("H200").live(units=8)
    problem = build(replace(BASE, backward=False, seqlen_q=1, seqlen_k=9000, batch=1)).problem
    entry = record.Entry(problem, "forward", device=small)
    assert record.Entry.from_json(entry.to_json()) == entry

    def grids(seen, device):
        found, _ = prebuild.kernels([replace(entry, device=seen)], [device])
        return sorted(call.grid for call, _ in found.values())

    assert grids(small, by_name("H200")) == grids(None, small) != grids(None, by_name("H200"))
    # Figures of another architecture say nothing.
    assert grids(by_name("MI300X"), by_name("H200")) == grids(None, by_name("H200"))


def test_a_list_by_hand_may_leave_out_what_is_usual(tmp_path):
    sizes = {"batch": 1, "seqlen_q": 8, "seqlen_k": 16, "heads_q": 2}
    facts = {"problem": {**sizes, "mask": {"right": 0}, "dropout_origin": [1, 2, 3, 4]}}
    entry = record.Entry.from_json(facts)
    assert (entry.direction, entry.buffers, entry.device) == ("forward", None, None)
    assert entry.problem.mask.causal and entry.problem.dropout_origin == (1, 2, 3, 4)
    spec = {"shape": [1, 2], "strides": [2, 1], "dtype": "float16"}
    entry = record.Entry.from_json({**facts, "buffers": {"q": spec}, "direction": "backward"})
    assert entry.buffers == {"q": ArraySpec((1, 2), (2, 1), "float16")}
    for appends, words in (
        ({}, 'must say what it "appends"'),
        ({"tokens": 1, "rotary": "thirds"}, "rotary must be.*'thirds'"),
    ):
        with pytest.raises(ValueError, match=words):
            record.Entry.from_json({**facts, "direction": "step", "appends": appends})
    with pytest.raises(ValueError, match="direction must be one of.*'sideways'"):
        record.Entry.from_json({**facts, "direction": "sideways"})


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("rotary", ["", "halves", "pairs"])
def test_a_step_by_hand_needs_the_kernels_of_a_recorded_one(tmp_path, rotary, page_size):
    def some(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    storage = (128, 16) if page_size else (4, 512)
    more: dict[str, Any] = {}
    if page_size:
        more["block_table"] = torch.zeros(4, 32, dtype=torch.int32)
    if rotary:
        more |= {"rotary_cos": some(512, 64), "rotary_sin": some(512, 64)}
        more["rotary_interleaved"] = rotary == "pairs"
    row, new = some(4, 1, 8, 128), some(4, 1, 2, 128)
    lengths = torch.full((4,), 100, dtype=torch.int32)
    with standin.gpu("H200"), record.record(tmp_path / "list"):
        caches = [some(*storage, 2, 128) for _ in "kv"]
        k_cache, v_cache = caches
        flash_attn_with_kvcache(
            row, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True, **more
        )
    (recorded,) = (e for e in record.load(tmp_path / "list") if e.direction == "step")
    appends = {"tokens": 1} | ({"rotary": rotary} if rotary else {})
    facts = {"problem": asdict(recorded.problem), "direction": "step", "appends": appends}
    by_hand = record.Entry.from_json(json.loads(json.dumps(facts)))
    want, got = (prebuild.kernels([e], [by_name("H200")])[0] for e in (recorded, by_hand))
    assert want and want.keys() == got.keys()


LISTED = {"batch": 1, "seqlen_q": 8, "seqlen_k": 16, "heads_q": 2}


@pytest.mark.parametrize(
    "content, says",
    [
        ("{", "is not JSON"),
        ("[]", 'must be an object with "format": 1'),
        ({"format": 2, "problems": []}, 'must be an object with "format": 1'),
        ({"problems": []}, 'must be an object with "format": 1'),
        ({"format": 1, "problems": [{}]}, "problem 0: 'problem'"),
        (
            {"format": 1, "problems": [{"problem": LISTED}, {"problem": {**LISTED, "batch": -1}}]},
            "problem 1: batch must be >= 0",
        ),
        ({"format": 1, "problems": [{"problem": {**LISTED, "colour": 1}}]}, "problem 0: .*colour"),
        (
            {"format": 1, "problems": [{"problem": {**LISTED, "dropout_origin": [1, 2]}}]},
            "problem 0: dropout_origin must be",
        ),
    ],
)
def test_what_is_wrong_with_a_list_is_said_with_its_place(tmp_path, content, says):
    path = tmp_path / "list.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"{path}.*{says}"):
        record.load(path)


def test_a_list_may_be_empty_and_keeps_everything_of_its_entries(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('{"format": 1}')
    assert record.load(path) == []
    built = build(replace(BASE, window=(5, 0, 2), dropout_p=0.5, backward=False))
    specs = {"q": ArraySpec((1, 2), (9, 1), "float16", aligned=False)}
    entries = [
        record.Entry(built.problem, "forward"),
        record.Entry(built.problem, "backward", specs, by_name("H200").live(units=7)),
    ]
    record.save(path, entries)
    assert record.load(path) == entries
    # Somebody may go on by hand: a value a line.
    assert path.read_text() == json.dumps(json.loads(path.read_text()), indent=1)


def test_a_kernel_is_compiled_in_another_process_as_in_this_one(monkeypatch):
    monkeypatch.setattr(compiler, "artifact", lambda call, arch: (call, arch))
    kernel = KernelRef("heedful.kernels.portable.shared.unused", "clear_outside")
    call = KernelCall(kernel, (1, 1, 1), {})
    assert prebuild._compile(call, "sm_90") == (call, "sm_90")


def test_nothing_is_noted_where_nobody_records(monkeypatch):
    monkeypatch.setattr(noted, "_lock", None)
    noted.note(None, "forward", {})  # pyright: ignore[reportArgumentType]


def test_a_recording_is_written_though_the_calls_inside_fail(tmp_path):
    path = tmp_path / "list.json"
    with standin.gpu("B200"):
        with pytest.raises(ZeroDivisionError), record.record(path):
            api.results(build(replace(BASE, backward=False)))
            raise ZeroDivisionError
        api.results(build(replace(BASE, backward=False, causal=True)))
    assert len(record.load(path)) == 1


def test_gradients_are_planned_for_and_a_backend_may_be_named():
    problem = build(replace(BASE, backward=False)).problem
    assert not problem.needs_grad
    for direction in ("forward", "backward"):
        found, backends = prebuild.kernels([record.Entry(problem, direction)], [by_name("H200")])
        assert backends == {"hopper"}
        functions = {call.kernel.function for call, _ in found.values()}
        assert ("backward_prologue" in functions) == (direction == "backward")
    _, backends = prebuild.kernels(
        [record.Entry(problem, "forward")], [by_name("H200")], "portable"
    )
    assert backends == {"portable"}


@pytest.mark.parametrize("jobs, workers", [(1, 1), (0, 1), (99, 3), (2, 2)])
def test_every_kernel_is_compiled_once_into_a_pack_by_as_many_as_are_of_use(
    tmp_path, monkeypatch, jobs, workers
):
    made, said, asked = [], [], []

    def compile_now(call, arch):
        made.append((call.kernel.function, arch))
        return replace(standin.Gpu().compile(call, arch), call=None)

    def pool(count, mp_context):
        asked.append((count, mp_context.get_start_method()))
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(prebuild, "_compile", compile_now)
    monkeypatch.setattr(prebuild, "ProcessPoolExecutor", pool)
    written = {}
    monkeypatch.setattr(prebuild, "write_pack", lambda *given: written.update(given=given))
    problem = build(BASE).problem
    entries = [record.Entry(problem, d) for d in ("forward", "backward", "forward")]
    devices, folder = [by_name("B200")], tmp_path / "pack"
    count = prebuild.prebuild(entries, devices, folder, jobs, progress=lambda *g: said.append(g))
    assert count == 3 and asked == [(workers, "spawn")]
    functions = ["attention_forward", "key_gradients", "query_gradients"]
    assert sorted(made) == [(name, "sm_100") for name in functions]
    assert [numbers[:2] for numbers in said] == [(1, 3), (2, 3), (3, 3)]
    assert sorted(name for *_, name in said) == functions
    where, packed, backends, wheel = written["given"]
    assert (
        where == folder and wheel is None and backends == {"portable": installed.triton_version()}
    )
    assert {key: a.symbol for key, a in packed.items()} == {
        key: call.kernel.function
        for key, (call, _) in prebuild.kernels(entries, devices)[0].items()
    }


@pytest.mark.parametrize("backend", [None, "portable", "hopper"])
@pytest.mark.parametrize("triton", [(3, 6), (3, 9)])
def test_a_process_without_triton_finds_what_any_triton_packed(monkeypatch, triton, backend):
    monkeypatch.setattr(prebuild, "compiling", lambda: Toolchain(triton))
    problem = AttentionProblem.dense(2, 300, 300, 4, head_dim=64, causal=True, needs_grad=True)
    entries = [record.Entry(problem, d) for d in ("forward", "backward")]
    packed, backends = prebuild.kernels(entries, [by_name("H200")], backend)
    without = Toolchain(None, packs=frozenset((name, triton) for name in backends))
    chosen = plan(problem, by_name("H200"), without, backend)
    calls = [call for entry in entries for call in prebuild.program_of(chosen, entry).calls]
    assert {kernel_key(call, "sm_90") for call in calls} == set(packed)


def test_what_no_portable_kernel_does_is_refused_before_anything_is_launched():
    facts = {"head_dim": 64, "return_probs": True, "needs_grad": True}
    problem = AttentionProblem.dense(1, 64, 64, 2, **facts)
    chosen = plan(problem, by_name("B200"))
    given = buffers.forward(problem)
    given.pop("lse")
    with pytest.raises(ValueError, match="probs need lse"):
        program(chosen, "forward", given)
    with pytest.raises(ValueError, match="does not take cache rows by index"):
        plan(replace(problem, kv_batch_idx=True), by_name("B200"))


def test_shifts_of_a_cache_lie_as_its_scales_do():
    grouped = AttentionProblem.dense(
        1, 4, 64, 2, head_dim=64, kv_dtype="int8", kv_group=16, kv_shift=True
    )
    chosen = plan(grouped, by_name("B200"))
    given = buffers.forward(grouped)
    assert program(chosen, "forward", given).calls
    for name in ("k", "v"):
        moved = given[f"{name}_shift"]._replace(strides=(512, 16, 4, 1))
        with pytest.raises(ValueError, match=f"{name}_shift must have the strides of {name}_desc"):
            program(chosen, "forward", {**given, f"{name}_shift": moved})
    with pytest.raises(ValueError, match="a cache without a scale per group"):
        plan(replace(grouped, kv_group=0), by_name("B200"))


def test_cpu_problems_have_nothing_to_compile():
    entry = record.Entry(build(BASE).problem, "forward")
    with pytest.raises(ValueError, match="nothing to compile"):
        prebuild.kernels([entry], [by_name("CPU")])
    chosen = plan(entry.problem, by_name("CPU"))
    with pytest.raises(ValueError, match="'cpu', which has no kernels to launch"):
        program(chosen, "backward")


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_a_foreign_launcher_is_given_what_the_driver_is(backend, monkeypatch):
    built = build(replace(BASE, backward=False, causal=True, sink=True))
    chosen = plan(built.problem, by_name("H200"), backend=backend)
    made = program(chosen, "forward")
    stub = standin.Gpu()

    def compiled(call, arch):
        artifact = stub.compile(call, arch)
        for name, meta in artifact.tensor_maps.items():
            meta |= {"elem_type": 9, "elem_size": 2, "swizzle": 3, "name": name}
        return artifact

    monkeypatch.setattr(foreign, "artifact", compiled)
    told = foreign.describe(made, "sm_90")
    assert told.workspaces == made.workspaces
    for launch, call in zip(told.launches, made.calls, strict=True):
        assert launch.grid == call.grid
        queued = (call.programmatic, call.cooperative)
        assert (launch.programmatic, launch.cooperative) == queued
        assert (launch.reads, launch.writes) == ({"q", "k", "v", "sink"}, {"out"})
        flat = [p for p in launch.artifact.parameters if not p.name.startswith("scratch[")]
        assert len(flat) == len(launch.parameters)
        for parameter, given in zip(flat, launch.parameters, strict=True):
            name = re.sub(r"\.(shape|strides)\[\d\]$", "", parameter.name)
            argument: Any = call.arguments[name]
            if isinstance(given, foreign.TensorMapParameter):
                meta = (given.element_type, given.element_bytes, given.swizzle)
                assert meta == (9, 2, 3) and given.box == argument.block
                facts = (given.buffer, given.shape, given.strides)
                assert facts == (argument.buffer, argument.shape, argument.strides)
            elif name != parameter.name:
                part, axis = parameter.name.split(".")[-1].rstrip("]").split("[")
                value = getattr(argument, part)[int(axis)]
                assert given == Scalar(value, "i32" if part == "shape" else "i64")
            else:
                assert isinstance(given, (Pointer, Scalar)) and given == argument


def test_a_foreign_launcher_that_wants_text_is_told_where_a_kernel_has_none():
    kept = foreign.ForeignLaunch(
        artifact(b"1"), (1, 1, 1), (), frozenset(), frozenset(), *[False] * 2
    )
    assert kept.text == kept.artifact.text != ""
    bare = replace(kept, artifact=replace(kept.artifact, text=""))
    with pytest.raises(RuntimeError, match=f"{kept.artifact.symbol}, .* machine code alone"):
        bare.text  # noqa: B018  (to read it is the test)


def test_every_type_has_its_size_and_is_aligned_by_it():
    kinds = ["i8", "u8", "i1", "u8", "i32", "fp32", "i8", "i64", "*bf16", "u8"]
    parameters, size = lay_out([(f"p{i}", kind) for i, kind in enumerate(kinds)], {})
    assert [p.offset for p in parameters] == [0, 1, 2, 3, 4, 8, 12, 16, 24, 32, 40, 48]
    assert [p.name for p in parameters[-2:]] == ["scratch[0]", "scratch[1]"]
    assert [p.type for p in parameters] == [*kinds, "*i8", "*i8"]
    assert size == 56


@pytest.mark.parametrize("base, offset", [(0, 64), (0x210, 48), (8, 56)])
def test_a_tensor_map_is_aligned_in_the_memory_that_the_kernel_sees(base, offset):
    parameters, _ = lay_out([("n", "i32"), ("d", "tensordesc<bf16[8]>")], {"d": 1}, base)
    assert [p.offset for p in parameters[:4]] == [0, offset, offset + 128, offset + 136]
    assert asdict(parameters[1]) == {"name": "d", "type": "tensormap", "offset": offset}


def test_what_is_compiled_is_planned_for_the_triton_that_compiles_it(monkeypatch):
    chosen = installed.Compiler("3.6.1", Path("/nowhere"))
    monkeypatch.setattr(installed, "compiler", lambda: chosen)
    assert prebuild.compiling() == Toolchain(triton=(3, 6, 1))
    monkeypatch.setattr(installed, "compiler", lambda: None)
    assert prebuild.compiling() == Toolchain()
