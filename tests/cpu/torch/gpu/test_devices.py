"""What a call does on a GPU beside its kernels: which device is current, what is allocated where,
what the planner is told of the machine.
"""

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful
from heedful.core.base import forks
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import KNOWN, by_name
from heedful.core.call.operands import Operands
from heedful.core.planning.sizes import Workspace
from heedful.launch import validations
from heedful.launch.spec import Program
from heedful.torch.api import merge
from heedful.torch.base import device, forked
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager import backends, execute, zeros
from heedful.torch.operands.values import check_values
from support.runs import standin


class Current:
    """The current device, in place of torch.cuda.device: calls begin on another than theirs."""

    def __init__(self):
        self.index: Any = 1

    def __call__(self, where):
        owner = self
        index = where.index if isinstance(where, torch.device) else where

        class Entered:
            def __enter__(self):
                self.before, owner.index = owner.index, index

            def __exit__(self, *_):
                owner.index = self.before

        return Entered()


def attend(**keywords):
    q, k, v = (torch.randn(2, 19, 2, 16, requires_grad=True) for _ in range(3))
    result = heedful.flash_attn_func(q, k, v, **keywords)
    out = result[0] if isinstance(result, tuple) else result
    if out.requires_grad:
        out.sum().backward()


def with_everything():
    bias, sink = torch.randn(2, 19, 19, requires_grad=True), torch.randn(2, requires_grad=True)
    attend(bias=bias, sink=sink, return_lse=True, deterministic=True)


def dropped():
    attend(dropout_p=0.5, return_attn_probs=True)


def into_out():
    with torch.no_grad():
        attend(out=torch.zeros(2, 19, 2, 16), num_splits=3)


def decode(**keywords):
    q = torch.randn(2, 3, 2, 16)
    cache = torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    tables = torch.randn(60, 4), torch.randn(60, 4)
    heedful.flash_attn_with_kvcache(
        q, *cache, q, q, *tables, cache_seqlens=7, causal=True, **keywords
    )


def decode_behind_a_prefix():
    decode(shared_prefix=(torch.randn(9, 2, 16), torch.randn(9, 2, 16)))


def merging():
    heedful.merge_attn_states(torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 4, 5))


@pytest.mark.parametrize(
    "call", [attend, with_everything, dropped, into_out, decode, decode_behind_a_prefix, merging]
)
@pytest.mark.parametrize("first", [1, None], ids=["elsewhere", "there"])
def test_a_call_makes_its_tensors_device_the_current_one_and_leaves_it(call, first, monkeypatch):
    """Allocations and launches go to the current device."""
    current, places = Current(), []
    current.index = first
    with standin.gpu() as gpu, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", current)

        def poisoned(shape, dtype, where, *_):
            make = standin._poisoned(shape, dtype, where)

            def made():
                places.append(current.index)
                return make()

            return made

        def maker(where):
            return lambda shape, _, dtype: poisoned(shape, dtype, where)()

        patch.setattr(execute, "current_device", lambda: current.index)
        patch.setattr(execute, "maker", maker)
        gpu.before_launch = lambda _: places.append(current.index)
        call()
        call()
    assert gpu.launches and len(places) > len(gpu.launches)
    assert set(places) == {None} and current.index == first


def test_dense_tensors_of_a_gpu_are_made_as_compiled_code_makes_them(monkeypatch):
    made = []

    def empty(*given):
        made.append(given)

    monkeypatch.setattr(execute, "_empty_strided", empty)
    cuda = torch.device("cuda", 0)
    for shape, strides in (((2, 3, 5), (15, 5, 1)), ((4,), (1,)), ((), ())):
        execute.maker(cuda)(shape, strides, torch.float16)
        assert made.pop() == (shape, strides, torch.float16)
    on_cpu = execute.maker(torch.device("cpu"))((2, 3), (3, 1), torch.int8)
    assert on_cpu.shape == (2, 3) and on_cpu.dtype == torch.int8 and not made
    monkeypatch.setattr(execute, "_empty_strided", None)
    make = execute.maker(SimpleNamespace(type="cuda"))  # pyright: ignore
    with pytest.raises(TypeError, match="device"):
        make((2,), (1,), torch.int8)


def test_without_a_gpu_what_asks_for_its_stream_says_so():
    with pytest.raises(RuntimeError, match="built without a GPU"):
        execute._absent(0)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_a_buffer_is_its_tensors_metadata(offset):
    storage = torch.zeros(64, dtype=torch.float16)
    begin = offset + (-storage.data_ptr() // 2) % 8
    tensor = storage[begin : begin + 24].view(2, 12)[:, :4]
    wanted = ArraySpec((2, 4), (12, 1), "float16", offset % 8 == 0, tensor.device)
    assert array_spec(tensor) == wanted


def workspace(nbytes: int, zeroed: bool = False) -> Workspace:
    return Workspace(f"of {nbytes}", ArraySpec.contiguous((nbytes,), "uint8"), zeroed)


@pytest.fixture
def bound(monkeypatch):
    """Programs that note (addresses, stream) of a launch, on memory that is not there."""
    seen = []
    order = []

    def run(*given):
        seen.append(given)

    def program(_, arch, index, names, *_numbers):
        order[:] = arch, index, names
        return SimpleNamespace(bind=lambda _: run, run=lambda _, *given: seen.append(given))

    monkeypatch.setattr(execute, "ProgramKind", program)
    monkeypatch.setattr(execute, "current_device", lambda: None)
    monkeypatch.setattr(execute, "raw_stream", lambda index: 5 if index is None else -1)
    monkeypatch.setattr(execute, "_is_capturing", lambda: False)
    monkeypatch.setattr(zeros, "_of_stream", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    made = []

    def unpooled(nbytes, where):
        made.append(torch.full((nbytes,), 7, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(zeros, "unpooled", unpooled)
    return SimpleNamespace(seen=seen, order=order, regions=made)


CPU = torch.device("cpu")


def alone(program: Program, *names: str) -> Callable:
    """Runs a program by itself, on tensors."""
    run = execute.Case(program, "sm_90", torch.device("cpu"), names, {}).alone()
    return lambda tensors: run([tensor.data_ptr() for tensor in tensors])


def test_scratch_lies_in_lines_of_its_own_behind_the_tensors(bound):
    """Workspaces that begin anywhere, then those that begin with zeros."""
    spaces = (workspace(1), workspace(64, True), workspace(256), workspace(257), workspace(9, True))
    run = alone(Program((), spaces), "x", "y")
    assert bound.order == ["sm_90", None, ["x", "y", "of 1", "of 256", "of 257", "of 64", "of 9"]]
    tensors = [torch.zeros(3), torch.zeros(4)]
    run(tensors)
    run(tensors)
    for addresses, stream in bound.seen:
        assert stream == 5 and addresses[:2] == [t.data_ptr() for t in tensors]
        assert [a - addresses[2] for a in addresses[2:5]] == [0, 256, 512]
        assert addresses[6] - addresses[5] == 256
    (first, _), (second, _) = bound.seen
    (region,) = bound.regions
    assert first[5] == region.data_ptr() and second[5] == first[5] + 512
    assert region.numel() == zeros.REGION_BYTES and not region.any()


def test_in_a_graph_each_count_has_zeros_of_the_calls_own(bound, monkeypatch):
    monkeypatch.setattr(execute, "_is_capturing", lambda: True)
    spaces = (workspace(300), workspace(8, True), workspace(9, True))
    tensor = torch.zeros(3)
    found = []

    def look(addresses, stream):
        found.append((addresses, ctypes.string_at(addresses[2], 512)))

    kernels = SimpleNamespace(bind=lambda _: look)
    monkeypatch.setattr(execute, "ProgramKind", lambda *_: kernels)
    run = alone(Program((), spaces), "x")
    run([tensor])
    ((addresses, zeroed),) = found
    assert addresses[0] == tensor.data_ptr() and addresses[3] - addresses[2] == 256
    assert zeroed == bytes(512) and not bound.regions


@pytest.mark.parametrize("more", [0, 1])
def test_a_call_that_counts_in_much_fills_its_own(bound, more):
    size = zeros.MOST_BYTES - 256 + 256 * more
    run = alone(Program((), (workspace(256, True), workspace(size, True))))
    run([])
    assert len(bound.regions) == 1 - more
    assert zeros.MOST_BYTES * 16 == zeros.REGION_BYTES


def test_the_limit_of_scratch_holds_all_of_it_and_not_a_byte_less(bound, monkeypatch):
    program = Program((), (workspace(2**19), workspace(2**19, True)))
    monkeypatch.setenv("HEEDFUL_WORKSPACE_LIMIT_MB", "1")
    alone(program)
    larger = Program((), (workspace(2**19), workspace(2**19 + 1, True)))
    words = f"allows {2**20} bytes of scratch, this call needs {2**20 + 256}"
    with pytest.raises(ValueError, match=words):
        alone(larger)


def test_a_stream_is_filled_again_only_where_its_region_has_no_room():
    regions = []

    def region():
        regions.append(torch.full((zeros.REGION_BYTES,), 1, dtype=torch.uint8))
        return regions[-1]

    pool = zeros.Zeros(256, region)
    assert not regions
    base = pool.take(1)
    assert not regions[0].any()
    regions[0].fill_(1)
    assert pool.take(256) == base + 256 and pool.take(257) == base + 512
    assert pool.take(zeros.REGION_BYTES - 1024) == base + 1024
    assert regions[0].all()
    assert pool.take(256) == base and not regions[0].any() and len(regions) == 1


def test_a_fill_that_fails_leaves_nothing_to_take():
    class Failing:
        """A region that cannot be filled at first."""

        def __init__(self):
            self.fails, self.fills = True, 0

        def zero_(self):
            if self.fails:
                raise RuntimeError("no fill")
            self.fills += 1

        def data_ptr(self):
            return 4096

        def numel(self):
            return zeros.REGION_BYTES

    failing = Failing()
    pool = zeros.Zeros(256, lambda: failing)  # pyright: ignore[reportArgumentType]
    for fails in (True, False):
        failing.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="no fill"):
                pool.take(256)
    assert pool.take(zeros.REGION_BYTES) == 4096 and failing.fills == 1
    failing.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no fill"):
            pool.take(256)
    failing.fails = False
    assert pool.take(256) == 4096 and failing.fills == 2


def test_streams_of_each_device_have_their_own_zeros(monkeypatch):
    monkeypatch.setattr(zeros, "_of_stream", {})
    made = []
    monkeypatch.setattr(
        zeros, "unpooled", lambda *given: made.append(given) or torch.zeros(1 << 20)
    )
    places = [(torch.device("cuda", index), stream) for index in (0, 1) for stream in (0, 7)]
    pools = [zeros.of_stream(*place, 256) for place in places]
    assert len(set(map(id, pools))) == 4
    assert [zeros.of_stream(*place, 256) for place in places] == pools
    pools[2].take(1)
    assert made == [(zeros.REGION_BYTES, torch.device("cuda", 1))]


FIGURES = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 131,
    "shared_memory_per_block": 11,
    "shared_memory_per_block_optin": 22,
    "L2_cache_size": 33,
    "gcnArchName": "gfx942:sramecc+:xnack-",
}


def spec_of(monkeypatch, hip=None, **changes):
    figures = SimpleNamespace(**FIGURES | changes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: figures)
    monkeypatch.setattr(torch.version, "hip", hip)
    return device.device_spec.__wrapped__(torch.device("cuda", 0))


def test_the_planner_is_told_the_live_figures(monkeypatch):
    spec = spec_of(monkeypatch)
    assert (spec.name, spec.arch, spec.units) == ("NVIDIA H200", "sm_90", 131)
    assert (spec.shared_bytes, spec.l2_bytes) == (22, 33)
    assert spec_of(monkeypatch, major=8, minor=6).arch == "sm_86"
    assert (
        spec_of(monkeypatch, major=8, minor=6).dram_bytes_per_s
        == KNOWN["RTX 3090"].dram_bytes_per_s
    )
    amd = spec_of(monkeypatch, hip="7.0", name="AMD Instinct MI300X")
    assert (amd.arch, amd.vendor, amd.shared_bytes) == ("gfx942", "amd", 11)
    assert amd.bf16_flops == KNOWN["MI300X"].bf16_flops
    unknown = spec_of(monkeypatch, major=99)
    assert (unknown.arch, unknown.bf16_flops, unknown.dram_bytes_per_s) == ("sm_990", 0, 0)


@pytest.mark.parametrize("threads", [1, 77])
def test_a_cpu_has_as_many_units_as_torch_has_threads_and_others_are_refused(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device.device_spec.__wrapped__(CPU).units == threads
    assert device.device_spec.__wrapped__(CPU).arch == KNOWN["CPU"].arch
    with pytest.raises(ValueError, match="q must be on a CPU, CUDA or ROCm device, got mps"):
        device.device_spec(torch.device("mps"))


@pytest.mark.parametrize("available", [False, True])
def test_without_a_device_the_first_gpu_or_the_cpu_is_meant(available, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(device, "device_spec", lambda d: asked.append(d) or by_name("H200"))
    monkeypatch.setattr(validations, "validated", lambda spec: frozenset({"x"}))
    found = device.toolchain()
    assert asked == [torch.device("cuda:0" if available else "cpu")]
    assert found.validated == {"x"} and found.jax is None
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert found.torch is not None and found.torch[:2] == version
    device.toolchain(torch.device("cuda", 3))
    assert asked[1:] == [torch.device("cuda", 3)]
    monkeypatch.setattr(device, "compiler", lambda: None)
    assert device._versions.__wrapped__().triton is None


@pytest.mark.parametrize("capturing", [False, True])
def test_page_numbers_are_checked_on_their_own_device_and_in_no_graph(capturing, monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda d: entered.append(d) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    there = torch.device("cuda", 3)
    x = Operands(SimpleNamespace(device=there), None, None)
    problem: Any = SimpleNamespace(total_q=None, total_k=None, seqlen_q=1, seqlen_k=1)
    if capturing:
        with pytest.raises(ValueError, match="HEEDFUL_CHECK_PAGES"):
            check_values(x, problem, "kvcache")
    else:
        check_values(x, problem, "kvcache")
    assert entered == [there]


def test_only_gpus_of_a_bad_fork_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    forked.check_device(CPU)
    with pytest.raises(RuntimeError, match="^q is on cuda:1: "):
        forked.check_device(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    forked.check_device(torch.device("cuda", 1))


def test_whatever_asks_for_a_gpu_of_a_bad_fork_is_refused(monkeypatch):
    """Before the device is asked for what it is, which hangs or ends the process."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    problem: Any = SimpleNamespace()
    for ask in (backends.planned, lambda _, device: merge.DeviceMerge({}, device)):
        with pytest.raises(RuntimeError, match="^q is on cuda:1: "):
            ask(problem, torch.device("cuda", 1))


@pytest.mark.parametrize("stranded", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_work_on_another_thread_is_in_the_modes_of_the_caller(
    stranded, inference, grad, monkeypatch
):
    monkeypatch.setattr(forks, "is_stranded", lambda: stranded)

    def modes(*given):
        return given, torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        want = (1, 2), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        assert forked.on_own_thread(modes, 1, 2) == want


def programs_of(call: Callable[[], Any]) -> int:
    """How many programs the main kernel of a call on an H200 has."""
    with standin.gpu("H200") as gpu:
        call()
    mains = "forward", "backward"
    (grid,) = [each.grid for each in gpu.launches if each.kernel.function in mains]
    return grid[0]


@pytest.mark.parametrize("margin, programs", [(None, 132), (0, 132), (7, 124), (500, 2)])
def test_a_call_leaves_as_many_sms_to_others_as_it_says(margin, programs):
    q = torch.zeros(1, 40000, 1, 64, dtype=torch.float16)
    bounds = torch.tensor([0, 40000], dtype=torch.int32)
    both = (bounds, bounds, 40000, 40000)
    lse = torch.zeros(1, 1, 40000)
    for call in (
        lambda: heedful.flash_attn_func(q, q, q, sm_margin=margin),
        lambda: heedful.flash_attn_varlen_func(q[0], q[0], q[0], *both, sm_margin=margin),
        lambda: heedful.attention_backward(q, q, q, q, q, lse, sm_margin=margin),
    ):
        assert programs_of(call) == programs
    with standin.gpu("H200"):
        words = heedful.explain(heedful.flash_attn_func, q, q, q, sm_margin=margin)
    told = f", on {programs} SMs: {132 - programs} are left to others"
    assert (told in words) is (programs < 132)


def test_a_call_outranks_the_setting_of_sms_that_are_left():
    q = torch.zeros(1, 40000, 1, 64, dtype=torch.float16)
    heedful.configure(sm_margin=40)
    try:
        assert programs_of(lambda: heedful.flash_attn_func(q, q, q)) == 92
        assert programs_of(lambda: heedful.flash_attn_func(q, q, q, sm_margin=0)) == 132
        more: dict[str, Any] = {"sm_margin": 4, "backend": "hopper"}
        assert programs_of(lambda: heedful.flash_attn_func(q, q, q, **more)) == 128
    finally:
        heedful.configure(sm_margin=None)


@pytest.mark.parametrize("value, error", [(-1, ValueError), ("8", TypeError), (1.5, TypeError)])
def test_a_number_of_sms_that_cannot_be_is_named(value, error):
    q: Any = torch.zeros(1, 4, 1, 64)
    for call in (heedful.flash_attn_func, heedful.flash_attn_with_kvcache):
        with pytest.raises(error, match="^sm_margin must be "):
            call(q, q, q, sm_margin=value)
