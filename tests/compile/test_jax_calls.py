"""JAX's programs for GPUs that are not here: a call for each kernel, with the machine code that
the PyTorch path launches. No torch: also run by a Python that has JAX's GPU plugin
(tools/jax_calls.sh).
"""

import os
import re
import zlib
from dataclasses import replace
from functools import partial

import pytest

# Where such a Python has run them: `make test` is done with them before the other tests begin.
if os.environ.get("TEST_JAX_CALLS_APART"):
    pytest.skip("run by a Python that has JAX's GPU plugin", allow_module_level=True)

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

from heedful import masks  # noqa: E402
from heedful.core.base.device import by_name  # noqa: E402
from heedful.core.call.problem import AttentionProblem  # noqa: E402
from heedful.core.planning.plan import plan  # noqa: E402
from heedful.core.registry.by_hand import named  # noqa: E402
from heedful.core.registry.capability import JAX_ON_GPUS  # noqa: E402
from heedful.jax import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402
from heedful.jax.base import device  # noqa: E402
from heedful.jax.gpu import empty, triton_call  # noqa: E402
from heedful.jax.gpu import programs as gpu  # noqa: E402
from heedful.launch.code.artifact import Artifact  # noqa: E402
from heedful.launch.compiler import artifact  # noqa: E402
from heedful.launch.foreign import ForeignLaunch, TensorMapParameter  # noqa: E402
from heedful.launch.program.programs import program  # noqa: E402
from heedful.launch.spec import Scalar  # noqa: E402
from support import wire  # noqa: E402
from support.problems.grids import slow_but  # noqa: E402

BF16 = jnp.bfloat16
ROWS = {"q": (2, 96, 4, 64), "k": (2, 160, 2, 64), "v": (2, 160, 2, 64)}


def shaped(*shape: int, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


QKV = [shaped(*shape) for shape in ROWS.values()]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Planned for an H200, with a jax that can call kernels, whatever version is here."""
    monkeypatch.setenv("HEEDFUL_DEVICE", "H200")
    monkeypatch.setattr(device, "_jax_version", lambda: JAX_ON_GPUS)


def lowered(function, *types, platform: str = "cuda") -> str:
    """The program of a call, as text. What JAX keeps of such a call may be for another device."""
    jax.clear_caches()
    traced = jax.jit(function).trace(*types)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def calls(function, *types, platform: str = "cuda", monkeypatch) -> list[wire.Call]:
    """The kernel calls of a program, read back."""
    seen = []
    made = triton_call.opaque

    def keep(*args):
        seen.append(made(*args))
        return seen[-1]

    monkeypatch.setattr(triton_call, "opaque", keep)
    text = lowered(function, *types, platform=platform)
    assert text.count(f"@{triton_call.TARGET}(") == len(seen)
    return [wire.Call(opaque) for opaque in seen]


def kept_slots(monkeypatch) -> list[gpu.Slots]:
    """How arrays become operands and results, of each launch that follows."""
    found: list[gpu.Slots] = []
    made = gpu.slots

    def keep(*given):
        found.append(made(*given))
        return found[-1]

    monkeypatch.setattr(gpu, "slots", keep)
    return found


def test_a_cooperative_launch_is_refused_since_no_field_would_say_so():
    code = Artifact(b"code", "", "some_kernel", "cuda:90", 4, 32, 0, 1, (), 0, 0, {})
    launch = ForeignLaunch(code, (1, 1, 1), (), frozenset(), frozenset(), False, False)
    assert triton_call.message(launch, "some", {})
    with pytest.raises(RuntimeError, match="some_kernel: cooperative launches are not supported"):
        triton_call.message(replace(launch, cooperative=True), "some", {})


CAUSAL = partial(flash_attn_func, causal=True)


def test_a_forward_is_one_call_of_the_code_that_torch_launches(monkeypatch):
    (call,) = calls(CAUSAL, *QKV, monkeypatch=monkeypatch)
    problem = AttentionProblem.dense(2, 96, 160, 4, 2, 64, causal=True)
    chosen = plan(problem, by_name("H200"))
    (launch,) = program(chosen, "forward").calls
    compiled = artifact(launch, "sm_90")
    assert chosen.backend == "hopper"
    assert call.code == compiled.code
    assert call.grid == launch.grid
    assert call.kernel[wire.NUM_WARPS] == [compiled.num_warps]
    assert call.kernel[wire.SHARED] == [compiled.shared_bytes]
    assert call.kernel[wire.CAPABILITY] == [90]


def test_codes_are_told_apart_where_jaxlib_looks_for_a_loaded_kernel(monkeypatch):
    """It goes by name, shared memory, target and the text in place of PTX."""
    one, other = (calls(f, *QKV, monkeypatch=monkeypatch)[0] for f in (CAUSAL, flash_attn_func))
    assert one.kernel[wire.KERNEL_NAME] == other.kernel[wire.KERNEL_NAME]
    assert one.code != other.code and one.kernel[wire.PTX] != other.kernel[wire.PTX]
    assert len(one.kernel[wire.PTX][0]) == 64


def test_what_must_be_zero_is_zeroed_by_the_call(monkeypatch):
    """The tile counter of packed sequences is begun by the kernel before; that of a causal mask
    over several waves starts at zero."""
    rows = [shaped(4, 4096, 16, 64)] * 3
    (call,) = calls(CAUSAL, *rows, monkeypatch=monkeypatch)
    assert call.zeroed() == [4]


def test_gradients_are_calls_whose_arrays_come_from_xla(monkeypatch):
    def loss(q, k, v, bias, sink):
        out = flash_attn_func(q, k, v, bias=bias, sink=sink, dropout_p=0.1, dropout_seed=1)
        return out.astype(jnp.float32).sum()

    types = (*QKV, shaped(4, 96, 160), shaped(4, dtype=jnp.float32))
    made = calls(jax.grad(loss, range(5)), *types, monkeypatch=monkeypatch)
    assert len(made) == 5
    text = lowered(jax.grad(loss, range(5)), *types)
    names = re.findall(r'@AllocateBuffer\(\).*?backend_config = "(\w+)"', text)
    # No two alike within a program: XLA would make them one, and copy.
    assert {"dq", "dk", "dv"} <= set(names)
    # XLA refuses a version that says nothing.
    assert "api_version = 0" not in text
    assert "output_operand_alias" in text


@pytest.mark.slow
def test_masks_of_ranges_are_found_by_a_kernel_before_the_forward(monkeypatch):
    def loss(q, k, v, ranges):
        return flash_attn_func(q, k, v, causal=True, key_ranges=ranges).astype(jnp.float32).sum()

    types = (*QKV, shaped(1, 1, QKV[0].shape[1], 2, dtype=jnp.int32))
    assert [call.name for call in calls(loss, *types, monkeypatch=monkeypatch)] == [
        "key_hulls",
        "forward",
    ]
    names = [c.name for c in calls(jax.grad(loss, (0, 1, 2)), *types, monkeypatch=monkeypatch)]
    masks = ["key_hulls", "query_hulls"]
    kernels = ["backward_prologue", "backward", "backward_epilogue"]
    assert names == ["key_hulls", "forward", *masks, *kernels]


@pytest.mark.slow
def test_rows_of_documents_are_cut_by_hand_before_both_directions(monkeypatch):
    backend = named("hopper", cuts_rows=1)

    def loss(q, k, v, documents):
        out = flash_attn_func(q, k, v, causal=True, key_ranges=documents, backend=backend)
        return out.astype(jnp.float32).sum()

    x, ids = shaped(1, 16384, 16, 64), jax.ShapeDtypeStruct((1, 16384), jnp.int32)
    documents = jax.eval_shape(masks.documents, ids)
    found = calls(jax.grad(loss, (0, 1, 2)), x, x, x, documents, monkeypatch=monkeypatch)
    cut = ["part_rows", "cut_rows", "schedule_varlen_tiles", "cut_hulls"]
    kernels = ["query_hulls", "backward_prologue", "backward", "backward_epilogue"]
    assert [call.name for call in found] == [*cut, "forward", *cut, *kernels]


def test_both_kernels_of_a_mixed_batch_write_one_result(monkeypatch):
    """Each its own rows: the second is given what the first made. So what the forward reads is
    there when the decode begins, beside which it may run."""
    q, cache = shaped(2048 + 9, 8, 128), [shaped(700, 16, 2, 128)] * 2
    bounds, used = (shaped(n, dtype=jnp.int32) for n in (11, 10))
    table = shaped(10, 70, dtype=jnp.int32)

    def attend(q, k, v, bounds, table, used):
        return flash_attn_varlen_func(
            q, k, v, bounds, None, 2048, 1120, causal=True, block_table=table, seqused_k=used
        )

    found = kept_slots(monkeypatch)
    made = calls(attend, q, *cache, bounds, table, used, monkeypatch=monkeypatch)
    problem = AttentionProblem.dense(
        *(10, 2048, 1120, 8, 2, 128), causal=True, total_q=2057, page_size=16, used_k=True
    )
    chosen = plan(problem, by_name("H200"))
    launches = program(chosen, "forward").calls
    assert (chosen.backend, chosen.variant) == ("mixed", "hopper") and len(launches) == 3
    assert [call.grid for call in made] == [launch.grid for launch in launches]
    # A tile of rows of each short sequence and KV head, an int32 each.
    assert [sum(call.zeroed()) for call in made] == [0, 10 * 2 * 4, 0]
    *_, short, attention = found
    for own in (short, attention):
        (place,) = (i for i, result in own.aliases.items() if own.results[result] == "out")
        assert own.operands[place] == "out"


def packed(q, k, v, bounds):
    return flash_attn_varlen_func(q, k, v, bounds, bounds, 96, 96, causal=True)


PACKED = (*(shaped(200, heads, 64) for heads in (4, 2, 2)), shaped(4, dtype=jnp.int32))


def test_packed_and_cached_calls_build(monkeypatch):
    assert len(calls(packed, *PACKED, monkeypatch=monkeypatch)) == 2
    cache = [shaped(7, 16, 2, 64)] * 2
    new = [shaped(2, 1, heads, 64) for heads in (4, 2, 2)]
    table, lengths = shaped(2, 3, dtype=jnp.int32), shaped(2, dtype=jnp.int32)

    def step(q, k, v, kc, vc, table, lengths):
        return flash_attn_with_kvcache(
            q, kc, vc, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    made = calls(step, *new, *cache, table, lengths, monkeypatch=monkeypatch)
    assert [call.name for call in made] == ["decode"]


# How a cache of (7, 16, 2, 64) is stored, the shape of its scales and those that it has.
DESCALES = ("k_descale", "v_descale")
SHIFTED = ("k_descale", "k_shift", "v_descale", "v_shift")
APPENDED = {
    "no scale": ("int8", (), ()),
    "one": ("float8_e4m3fn", (), DESCALES),
    "of heads": ("uint8", (2, 2), DESCALES),
    "of groups": ("float8_e4m3fn", (7, 16, 2, 4), DESCALES),
    "of groups, with shifts": ("uint8", (7, 16, 2, 4), SHIFTED),
}

# Groups with shifts have scales and shifts, which others have one of or none.
NAMES = slow_but({"of groups, with shifts"}, APPENDED)


def appending(storage: str, shape: tuple[int, ...], scales: tuple[str, ...], q_len: int = 1):
    """Arguments of a step with rotary positions over a cache in pages."""
    width = 32 if storage == "uint8" else 64
    given = {n: shaped(7, 16, 2, width, dtype=storage) for n in ("k_cache", "v_cache")}
    given |= {"q": shaped(2, q_len, 4, 64)} | {n: shaped(2, q_len, 2, 64) for n in "kv"}
    given |= {n: shaped(64, 16) for n in ("rotary_cos", "rotary_sin")}
    given |= {"cache_seqlens": shaped(2, dtype=jnp.int32)}
    given |= {"block_table": shaped(2, 3, dtype=jnp.int32)}
    return given | {n: shaped(*shape, dtype=jnp.float32) for n in scales}


def step(given):
    return flash_attn_with_kvcache(**given, causal=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_one_kernel_that_writes_caches_and_scales_where_they_are(name, monkeypatch):
    """It reads them as operands; its last parameters are the results that share their memory."""
    storage, shape, scales = APPENDED[name]
    written = scales if len(shape) > 2 else ()
    given = appending(storage, shape, scales)
    found = kept_slots(monkeypatch)
    made = calls(step, given, monkeypatch=monkeypatch)
    assert [call.name for call in made] == ["decode"]
    operands, results, aliases = found[0].operands, found[0].results, found[0].aliases
    shared = {operands[i]: results[j] for i, j in aliases.items()}
    assert all(one == other for one, other in shared.items())
    changed = {"k", "v", *written}
    assert set(shared) >= changed | {"out"}
    assert {n for n in shared if n in given or n in ("k", "v")} == changed
    assert set(results[: len(changed)]) == changed
    assert all(operands.count(n) == 1 for n in changed)
    assert set(operands) >= set(scales)
    for result, n in zip(
        jax.eval_shape(step, given), ("q", "k_cache", "v_cache", *written), strict=True
    ):
        assert (result.shape, result.dtype) == (given[n].shape, given[n].dtype)


@pytest.mark.parametrize("name", NAMES)
def test_another_kernels_step_appends_and_rotates_in_one_launch_ahead(name, monkeypatch):
    monkeypatch.setenv("HEEDFUL_BACKEND", "portable")
    storage, shape, scales = APPENDED[name]
    written = scales if len(shape) > 2 else ()
    found = kept_slots(monkeypatch)
    made = calls(step, appending(storage, shape, scales, 40), monkeypatch=monkeypatch)
    assert [call.name for call in made] == ["append_and_rotate", "attention_forward"]
    operands, results, aliases = found[0].operands, found[0].results, found[0].aliases
    assert {operands[i]: results[j] for i, j in aliases.items()} == {
        n: n for n in ("k", "v", "seqused_k", "q", *written)
    }


def test_a_step_over_a_shared_prefix_appends_ahead_of_both_parts(monkeypatch):
    given = appending("bfloat16", (), ())
    given["shared_prefix"] = (shaped(8, 2, 64), shaped(8, 2, 64))
    made = calls(step, given, monkeypatch=monkeypatch)
    assert [call.name for call in made][0] == "append_and_rotate"


def test_both_sides_of_a_shared_prefix_give_what_the_rounding_of_lse_left(monkeypatch):
    """Their results are merged by XLA, whose inputs they are."""
    q, k, v = QKV
    found = kept_slots(monkeypatch)

    def run(q, k, v, prefix):
        return flash_attn_with_kvcache(q, k, v, shared_prefix=prefix)[0]

    made = calls(run, q, k, v, (shaped(8, 2, 64), shaped(8, 2, 64)), monkeypatch=monkeypatch)
    assert len(made) == 2
    for own in found:
        assert {"out", "lse", "rest"} <= set(own.results)


def test_a_step_that_is_mapped_batches_as_its_two_parts_do(monkeypatch):
    given = appending("bfloat16", (), ())
    mapped = {n: jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for n, a in given.items()}
    made = calls(jax.vmap(step), mapped, monkeypatch=monkeypatch)
    assert [call.name for call in made] == ["append_and_rotate", "decode"]


@pytest.mark.slow
def test_a_traced_dropout_origin_is_read_from_memory(monkeypatch):
    """One program serves all shards: the seed's array holds the origin too, and no number does."""

    def run(q, k, v, place):
        origin = (place, 2 * place, 0, 0)
        return flash_attn_func(q, k, v, dropout_p=0.1, dropout_seed=1, dropout_origin=origin)

    place = shaped(dtype=jnp.int32)
    (known,) = calls(partial(run, place=1), *QKV, monkeypatch=monkeypatch)
    (traced,) = calls(run, *QKV, place, monkeypatch=monkeypatch)
    count = lambda call: sum(field == wire.I32 for field, _ in call.parameters)  # noqa: E731
    assert count(known) - count(traced) == 4
    assert "tensor<10xui32>" in lowered(run, *QKV, place)


def test_a_program_for_a_gpu_is_exported_where_there_is_none():
    pytest.importorskip("flatbuffers")
    names = (triton_call.TARGET, empty.TARGET)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = jax.export.export(jax.jit(CAUSAL), platforms=["cuda"], disabled_checks=checks)(*QKV)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",) and again.out_avals == exported.out_avals
    assert triton_call.TARGET in again.mlir_module()


@pytest.mark.parametrize(("name", "target"), [("MI300X", "gfx942"), ("MI355X", "gfx950")])
def test_calls_for_amd_carry_their_code_objects(name, target, monkeypatch):
    monkeypatch.setenv("HEEDFUL_DEVICE", name)
    made = calls(CAUSAL, *QKV, platform="rocm", monkeypatch=monkeypatch)
    assert all(call.code[:4] == b"\x7fELF" and target.encode() in call.code for call in made)


def test_an_older_jaxlib_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(device, "_jax_version", lambda: (0, 11, 0))
    with pytest.raises(ValueError, match="needs jax >= 0.11.1, got 0.11.0"):
        lowered(CAUSAL, *QKV)


def test_without_a_device_the_message_says_how_to_name_one(monkeypatch):
    monkeypatch.delenv("HEEDFUL_DEVICE")
    with pytest.raises(ValueError, match="HEEDFUL_DEVICE must name the device"):
        lowered(CAUSAL, *QKV)


def test_more_scratch_than_allowed_raises(monkeypatch):
    monkeypatch.setenv("HEEDFUL_WORKSPACE_LIMIT_MB", "0")
    with pytest.raises(ValueError, match="HEEDFUL_WORKSPACE_LIMIT_MB allows 0 bytes"):
        lowered(partial(flash_attn_func, num_splits=3), *QKV)


SLOTS = {
    "results stand last": (("q", "k", "out", "lse"), {"out", "lse"}, set(), ("q", "k"), {}),
    "a result before an input": (("q", "out", "k"), {"out"}, set(), ("q", "out", "k"), {1: 0}),
    "written in place": (("cache", "new"), {"cache"}, {"cache"}, ("cache", "new"), {0: 0}),
    "twice, last": (("v", "v_t", "q", "v_t", "n"), {"v_t", "n"}, set(), ("v", "v_t", "q"), {1: 0}),
    "alive and last": (("q", "out"), {"out"}, {"out"}, ("q", "out"), {1: 0}),
}


@pytest.mark.parametrize("name", SLOTS)
def test_arrays_become_operands_and_results_in_the_order_of_parameters(name):
    order, writes, live, operands, aliases = SLOTS[name]
    found = gpu.slots(order, frozenset(writes), frozenset({"q", "k", "v", "new"} | live))
    assert found.operands == operands
    assert {i: found.results.index(operands[i]) for i in aliases} == aliases == found.aliases
    # jaxlib hands out operands, then results.
    assert (found.operands + found.results)[: len(order)] == order


def test_an_array_written_twice_in_the_middle_is_refused():
    with pytest.raises(RuntimeError, match="more than one operand"):
        gpu.slots(("out", "out", "q"), frozenset({"out"}), frozenset({"q"}))


def _plugin():
    """jaxlib's own encoder, which the GPU plugin brings."""
    from jaxlib import gpu_triton

    return gpu_triton if hasattr(gpu_triton, "create_tma_descriptor_parameter") else None


@pytest.mark.skipif(_plugin() is None, reason="needs jax-cuda13-plugin (Python >= 3.12)")
def test_messages_are_those_of_jaxlibs_encoder_but_for_the_machine_code(monkeypatch):
    theirs = []
    made = triton_call.message

    def compare(launch, name, zeroed):
        ours = made(launch, name, zeroed)
        theirs.append((ours, _theirs(_plugin(), launch, name, zeroed)))
        return ours

    monkeypatch.setattr(triton_call, "message", compare)
    lowered(CAUSAL, *QKV)
    lowered(packed, *PACKED)
    lowered(step, appending(*APPENDED["of groups, with shifts"]))
    lowered(flash_attn_func, *[shaped(2, 256, 4, 128, dtype=jnp.float8_e4m3fn)] * 3)
    lowered(jax.grad(lambda *a: flash_attn_func(*a).astype(jnp.float32).sum()), *QKV)
    assert len(theirs) >= 8
    for ours, others in theirs:
        one, other = (wire.Call(zlib.compress(data)) for data in (ours, others))
        assert one.kernel.pop(wire.IMAGE)
        assert vars(one) == vars(other)


def _theirs(plugin, launch, name: str, zeroed) -> bytes:
    parameters = []
    for index, p in enumerate(launch.parameters):
        if isinstance(p, TensorMapParameter):
            parameters.append(
                plugin.create_tma_descriptor_parameter(
                    elem_type=p.element_type,
                    swizzle=p.swizzle,
                    shape=list(p.shape),
                    strides=list(p.strides),
                    block_shape=list(p.box),
                    oob_fill=0,
                )
            )
        elif isinstance(p, Scalar):
            value = float(p.value) if p.type == "fp32" else p.value
            parameters.append(plugin.create_scalar_parameter(value, p.type))
        else:
            divisor = 16 if p.aligned else 0
            parameters.append(plugin.create_array_parameter(zeroed.get(index, 0), divisor))
    a = launch.artifact
    how = a.num_warps, a.cluster, a.shared_bytes, triton_call.digest(a), "", 90
    kernel = plugin.TritonKernel(a.symbol, *how)
    return plugin.TritonKernelCall(kernel, *launch.grid, parameters).to_proto(name, b"")


@pytest.mark.parametrize(
    "order, writes, live, found",
    [
        ("q", "", "", gpu.Slots(("q",), (), {})),
        ("q out", "out", "", gpu.Slots(("q",), ("out",), {})),
        ("q out lse", "out lse", "", gpu.Slots(("q",), ("out", "lse"), {})),
        # What is not last, or has contents, is an operand and its alias.
        ("out q", "out", "", gpu.Slots(("out", "q"), ("out",), {0: 0})),
        ("q out", "out", "out", gpu.Slots(("q", "out"), ("out",), {1: 0})),
        ("q out lse", "out lse", "out", gpu.Slots(("q", "out"), ("lse", "out"), {1: 1})),
        ("q a b c", "a b c", "b", gpu.Slots(("q", "a", "b"), ("c", "a", "b"), {1: 1, 2: 2})),
        # Twice, last: the first is the operand.
        ("x q x", "x", "x", gpu.Slots(("x", "q"), ("x",), {0: 0})),
        ("x x", "x", "", gpu.Slots(("x",), ("x",), {0: 0})),
        ("x q x", "", "x", gpu.Slots(("x", "q", "x"), (), {})),
    ],
    ids=str,
)
def test_an_array_that_is_written_is_a_result_in_the_place_of_its_last_parameter(
    order, writes, live, found
):
    got = gpu.slots(tuple(order.split()), frozenset(writes.split()), frozenset(live.split()))
    assert got == found


@pytest.mark.parametrize("order", ["x x q", "x q x q", "x x x"])
def test_an_array_that_is_written_in_two_places_before_the_last_is_refused(order):
    with pytest.raises(RuntimeError, match="x is written, and more than one operand"):
        gpu.slots(tuple(order.split()), frozenset("x"), frozenset())


def test_memory_without_contents_has_a_name_that_tells_it_from_its_like():
    def two():
        return empty.empty((2, 3), jnp.float16, "out"), empty.empty((2, 3), jnp.float16, "lse")

    text = jax.jit(two).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @AllocateBuffer()") == 2 and text.count("tensor<2x3xf16>") > 2
    assert '"out"' in text and '"lse"' in text
    # XLA has this call by the first version alone, which the text leaves out.
    assert "api_version" not in text
