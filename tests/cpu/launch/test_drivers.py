"""What the drivers say to the vendors' libraries: a library of Python functions records it."""

import ctypes
import importlib.util
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from heedful.launch import driver
from heedful.launch.code.artifact import Artifact, Parameter, map_words
from heedful.launch.driver import cuda, hip
from support.vendor_library import CONTEXT, FUNCTION, HANDLE, Library

ARTIFACT = Artifact(
    code=b"\x7fELF code",
    text="",
    symbol="some_kernel",
    target="cuda:90",
    num_warps=12,
    warp_size=32,
    shared_bytes=100_000,
    cluster=1,
    parameters=(Parameter("x", "*bf16", 0), Parameter("n", "i32", 8)),
    parameter_bytes=12,
)
TEMPLATE = bytes(range(12))
GRID = (5, 3, 2)


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(cuda, "_library", lambda: made)
    monkeypatch.setattr(hip, "_library", lambda: made)
    # They bind themselves to the library at the first call: as before it.
    monkeypatch.setattr(cuda, "_launch", lambda *arguments: made.cuLaunchKernelEx(*arguments))
    monkeypatch.setattr(cuda, "_encode", lambda *given: made.cuTensorMapEncodeTiled(*given))
    monkeypatch.setattr(cuda, "_replace", lambda *given: made.cuTensorMapReplaceAddress(*given))
    monkeypatch.setattr(cuda, "_copy", cuda._bind_copy)
    return made


def slot(artifact=ARTIFACT, module=cuda, template=TEMPLATE, programmatic=False, cooperative=False):
    made = module.Slot(artifact, ctypes.c_void_p(FUNCTION), 1, programmatic, cooperative)
    made.buffer[: len(template)] = template
    made.set_grid(*GRID)
    return made


def test_a_copy_has_both_addresses_the_size_and_the_stream(library):
    into, rows = 0x7F00_0000_0010, 0x7F10_0000_0020
    for code in (0, 0, 201, 700):
        library.calls.clear()
        library.codes["cuMemcpyDtoDAsync_v2"] = [code, 0]
        if code == 700:
            with pytest.raises(RuntimeError, match="CUDA error 700: bad luck"):
                cuda.copy(into, rows, 64, 0xABC, 1)
            continue
        cuda.copy(into, rows, 64, 0xABC, 1)
        copied = [call[1:] for call in library.calls if call[0] == "cuMemcpyDtoDAsync_v2"]
        assert copied == [(into, rows, 64, 0xABC)] * (2 if code else 1)
        # A thread that has no context gets the device's.
        assert ("cuCtxSetCurrent" in library.names()) == bool(code)


def test_a_launch_has_the_grid_the_warps_the_memory_and_the_arguments(library):
    made = slot()
    assert made.address % 64 == 0
    made.buffer[0:8] = (123456789).to_bytes(8, "little")
    made.launch(0xABC)
    assert library.names() == ["cuLaunchKernelEx"]
    (launched,) = library.launched
    assert launched.pop("address") == made.address
    assert launched == {
        "grid": GRID,
        "block": (12 * 32, 1, 1),
        "shared": 100_000,
        "stream": 0xABC,
        "attributes": [],
        "function": FUNCTION,
        "bytes": (123456789).to_bytes(8, "little") + TEMPLATE[8:],
    }


def test_the_planner_is_told_the_figures_of_a_device_without_a_framework(library):
    assert cuda.figures(0) == {
        "name": "NVIDIA RTX A6000",
        "arch": "sm_86",
        "units": 84,
        "shared_bytes": 101376,
        "l2_bytes": 6 << 20,
    }
    # Nobody else may have used the driver before.
    name, flags = library.calls[0]
    assert name == "cuInit" and flags.value == 0


def test_each_launch_goes_to_its_own_stream(library):
    made = slot()
    for stream in (1, 2, None):
        made.launch(stream)
    assert [launched["stream"] for launched in library.launched] == [1, 2, None]


def test_a_cluster_is_of_neighbours_in_a_grid_that_is_wider_by_as_many(library):
    slot(replace(ARTIFACT, cluster=2)).launch(0)
    (launched,) = library.launched
    assert launched["grid"] == (10, 3, 2)
    assert launched["attributes"] == [(4, (2, 1, 1))]


@pytest.mark.parametrize("offset", [0, 48, 64, 112])
def test_tensor_maps_lie_on_64_bytes_wherever_they_are_in_the_buffer(library, offset):
    maps = (Parameter("d", "tensormap", offset),)
    artifact = replace(ARTIFACT, parameters=maps, parameter_bytes=offset + 128)
    for _ in range(20):
        made = slot(artifact, template=bytes(offset + 128))
        assert (made.address + offset) % 64 == 0
        assert bytes(made.buffer) == bytes(offset + 128)


def test_what_the_driver_is_given_lies_as_in_cudas_header():
    """Offsets of CUlaunchConfig and CUlaunchAttribute, by a C compiler."""
    config, attribute = cuda.Config, cuda.Config().attributes._type_
    offsets = {name: getattr(config, name).offset for name, *_ in config._fields_}
    assert offsets == {
        "grid": 0,
        "block": 12,
        "shared_bytes": 24,
        "stream": 32,
        "attributes": 40,
        "num_attributes": 48,
    }
    assert (attribute.id.offset, attribute.value.offset) == (0, 8)
    assert (ctypes.sizeof(config), ctypes.sizeof(attribute)) == (56, 72)


@pytest.mark.parametrize("module", [cuda, hip])
def test_the_size_of_the_arguments_is_there_as_long_as_they_are(library, module):
    made = slot(module=module)
    # In the place of what was let go.
    others = [ctypes.c_size_t(0xBAD) for _ in range(100)]
    made.launch(0)
    assert others and len(library.launched[0]["bytes"]) == len(TEMPLATE)


@pytest.mark.parametrize("shared, asks", [(48 * 1024, False), (48 * 1024 + 1, True)])
def test_a_function_is_loaded_on_its_device_and_asks_for_shared_memory_beyond_48_kib(
    library, shared, asks
):
    function = cuda.load(replace(ARTIFACT, shared_bytes=shared), 3)
    assert function.value == FUNCTION
    names = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuDriverGetVersion"]
    names += ["cuModuleLoadData", "cuModuleGetFunction"] + ["cuFuncSetAttribute"] * asks
    assert library.names() == names
    said = {name: arguments for name, *arguments in library.calls}
    assert said["cuCtxSetCurrent"][0].value == CONTEXT + HANDLE + 3
    assert said["cuModuleLoadData"][1] == ARTIFACT.code
    assert said["cuModuleGetFunction"][2] == b"some_kernel"
    if asks:
        attributed, attribute, size = said["cuFuncSetAttribute"]
        assert (attributed.value, attribute, size) == (FUNCTION, 8, shared)


def test_a_thread_without_a_context_gets_the_devices_and_launches_again(library):
    library.codes["cuLaunchKernelEx"] = [201, 0]
    slot().launch(7)
    entered = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert library.names() == ["cuLaunchKernelEx", *entered, "cuLaunchKernelEx"]
    assert library.calls[3][1].value == CONTEXT + HANDLE + 1
    assert library.launched[0] == library.launched[1]


@pytest.mark.parametrize("codes", [[201, 201], [700], [201, 700]])
def test_a_failed_launch_raises_the_drivers_words(library, codes):
    library.codes["cuLaunchKernelEx"] = list(codes)
    with pytest.raises(RuntimeError, match=f"CUDA error {codes[-1]}: bad luck"):
        slot().launch(0)


@pytest.mark.parametrize(
    "name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuCtxSetCurrent"]
)
def test_a_failure_to_load_raises(library, name):
    library.codes[name] = [2]
    with pytest.raises(RuntimeError, match="CUDA error 2: bad luck"):
        cuda.load(ARTIFACT, 0)


def cubin(abi: int) -> bytes:
    """The start of machine code as ptxas writes it, with this version of the ABI."""
    return b"\x7fELF\x02\x01\x01" + bytes([0x41, abi]) + bytes(7)


@pytest.mark.parametrize(
    "abi, version, loads",
    [(7, 12000, True), (7, 13010, True), (8, 12090, False), (8, 13000, True), (9, 12000, True)],
)
def test_an_old_driver_is_given_no_code_of_a_newer_cuda(library, abi, version, loads):
    library.version = version
    made = replace(ARTIFACT, code=cubin(abi), toolchain="triton 3.9.0 ptxas 13.4")
    if loads:
        assert cuda.load(made, 0).value == FUNCTION
        return
    words = (
        "some_kernel, made by triton 3.9.0 ptxas 13.4, needs a driver of CUDA 13, this machine's"
    )
    with pytest.raises(RuntimeError, match=f"{words} serves CUDA 12.9: update the driver"):
        cuda.load(made, 0)
    assert "cuModuleLoadData" not in library.names()


def test_a_kernel_that_does_not_load_is_named_with_the_driver(library):
    library.codes["cuModuleLoadData"] = [209]
    words = "some_kernel, made by an unknown assembler, did not load on a driver of CUDA 13.0: CUDA"
    with pytest.raises(RuntimeError, match=f"{words} error 209: bad luck"):
        cuda.load(ARTIFACT, 0)


def fresh(module, name: str, monkeypatch):
    """The driver's module as no call has seen it, over a library that must have this name."""
    opened = Library()
    monkeypatch.setattr(ctypes, "PyDLL", lambda asked: {name: opened}[asked])
    spec = importlib.util.spec_from_file_location("fresh", module.__file__)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made, opened


def test_the_library_is_asked_for_its_launch_function_once(monkeypatch):
    module, opened = fresh(cuda, "libcuda.so.1", monkeypatch)
    made = slot(module=module)
    made.launch(1)
    monkeypatch.setattr(module, "_library", None)
    made.launch(2)
    assert [launched["stream"] for launched in opened.launched] == [1, 2]


def test_hip_opens_its_own_library(monkeypatch):
    module, opened = fresh(hip, "libamdhip64.so", monkeypatch)
    slot(module=module).launch(5)
    assert [launched["stream"] for launched in opened.launched] == [5]


HANDLES = {"cuModuleGetFunction": 1, "cuFuncSetAttribute": 0}
HIP_HANDLES = {"hipModuleGetFunction": 1, "hipModuleLaunchKernel": 0}


@pytest.mark.parametrize(("module", "handles"), [(cuda, HANDLES), (hip, HIP_HANDLES)])
def test_handles_are_passed_as_pointers_whatever_they_come_as(module, handles, monkeypatch):
    """ctypes passes an int that it is not told of as one of 32 bits."""

    class Functions:
        def __getattr__(self, name: str):
            setattr(self, name, found := SimpleNamespace())
            return found

    opened = Functions()
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: opened)
    module._library.__wrapped__()
    for name, place in handles.items():
        assert getattr(opened, name).argtypes[place] is ctypes.c_void_p


META = {"elem_size": 2, "elem_type": 9, "swizzle": 3, "block_size": [1, 64, 128]}


# Two maps of arrays of two bytes an element, behind a number: the first at 64.
MAPPED = replace(
    ARTIFACT,
    parameters=(
        Parameter("n", "i32", 0),
        Parameter("x", "tensormap", 64),
        Parameter("y", "tensormap", 192),
        Parameter("m", "i32", 320),
    ),
    parameter_bytes=324,
    tensor_maps={"x": META, "y": {**META, "elem_type": 4, "swizzle": 0, "block_size": [32, 16]}},
)


def mapped():
    """A slot, and where the words of its two maps lie."""
    words, end = map_words(MAPPED)
    assert words == {"x": 328, "y": 328 + 8 * 6} and end == 328 + 8 * 10
    made = slot(MAPPED, template=b"")
    assert len(made.buffer) == end
    return made, words.values()


def address_of(pointer) -> int:
    """Of what the driver is given by reference."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address is not None
    return address


def said_of_maps(calls: list[tuple], made) -> list[tuple]:
    """(place in the buffer, type, base, dims, steps, box, flags) of each map that was encoded."""
    found = []
    for name, where, kind, rank, base, dims, steps, box, ones, *flags in calls:
        where, dims, steps = (address_of(pointer) for pointer in (where, dims, steps))
        assert name == "cuTensorMapEncodeTiled" and where % 64 == 0
        assert tuple(ones._obj) == (1,) * rank
        sizes = ctypes.string_at(dims, 8 * rank), ctypes.string_at(steps, 8 * (rank - 1))
        read = [struct.unpack(f"{len(s) // 8}Q", s) for s in sizes]
        place = where - made.address
        found.append((place, kind, base.value, *read, tuple(box._obj), tuple(flags)))
    return found


X: tuple = (64, 9, 0xF00, (7, 5, 3), (400, 2000), (128, 64, 1), (0, 3, 2, 0))
Y: tuple = (192, 4, 0xABC0, (64, 9), (256,), (16, 32), (0, 0, 2, 0))


@pytest.mark.parametrize("numbers", [None, (0,), (1,), (1, 0)], ids=str)
def test_tensor_maps_are_encoded_into_the_buffer_from_its_words(library, numbers):
    """Again and again, from the words that lie there then."""
    made, (x, y) = mapped()
    for more in (0, 1 << 40):
        struct.pack_into("6Q", made.buffer, x, 0xF00 + more, 7, 5, 3, 400, 2000)
        struct.pack_into("4Q", made.buffer, y, 0xABC0 + more, 64, 9, 256)
        before = made.buffer.raw
        library.calls.clear()
        if numbers is None:
            made.encode_all()
        for number in numbers or ():
            made.encode(number)
        wanted = [(X, Y)[number] for number in ((0, 1) if numbers is None else numbers)]
        wanted = [(*one[:2], one[2] + more, *one[3:]) for one in wanted]
        assert said_of_maps(library.calls, made) == wanted
        for number in (0, 1) if numbers is None else numbers:
            place = (64, 192)[number]
            assert made.buffer[place : place + 128] == bytes(range(128))
            before = before[:place] + bytes(range(128)) + before[place + 128 :]
        assert made.buffer.raw == before


SIZES = (7, 5, 3, 400, 2000)


def with_twin(**meta):
    """A slot of two maps at 64 and 192, the second with these facts besides the first's, and where
    the words of both lie."""
    artifact = replace(MAPPED, tensor_maps={"x": META, "y": META | meta})
    words, _ = map_words(artifact)
    return slot(artifact, template=b""), words.values()


@pytest.mark.parametrize("place", range(len(SIZES)))
def test_a_map_that_differs_in_its_address_alone_is_another_one_with_its_own(library, place):
    """In a third of the time. One that differs in a size or a step is encoded."""
    made, (x, y) = with_twin()
    others = [*SIZES]
    for sizes in (SIZES, others, SIZES):
        library.calls.clear()
        struct.pack_into("6Q", made.buffer, x, 0xF00, *SIZES)
        struct.pack_into("6Q", made.buffer, y, 0xABC0, *sizes)
        made.encode_all()
        if sizes == SIZES:
            assert library.names() == ["cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress"]
            assert made.buffer[192:320] == struct.pack("<Q", 0xABC0) + bytes(range(8, 128))
        else:
            assert [said[2] for said in said_of_maps(library.calls, made)] == [0xF00, 0xABC0]
        others[place] += 16


@pytest.mark.parametrize("meta", [{"swizzle": 2}, {"elem_type": 4}, {"block_size": [1, 64, 64]}])
def test_maps_of_other_boxes_are_each_encoded(library, meta):
    made, places = with_twin(**meta)
    for place in places:
        struct.pack_into("6Q", made.buffer, place, 0xF00, *SIZES)
    made.encode_all()
    assert library.names() == ["cuTensorMapEncodeTiled"] * 2


def test_a_map_whose_address_cannot_be_raises(library):
    made, places = with_twin()
    for place in places:
        struct.pack_into("6Q", made.buffer, place, 0xF00, *SIZES)
    library.codes["cuTensorMapReplaceAddress"] = [1]
    with pytest.raises(RuntimeError, match="CUDA error 1: bad luck"):
        made.encode_all()


@pytest.mark.parametrize("encode", ["all", 0, 1])
def test_a_tensor_map_that_cannot_be_raises(library, encode):
    made, _ = mapped()
    library.codes["cuTensorMapEncodeTiled"] = [1]
    with pytest.raises(RuntimeError, match="CUDA error 1: bad luck"):
        made.encode_all() if encode == "all" else made.encode(encode)


def test_the_words_of_maps_are_no_arguments(library):
    made, _ = mapped()
    made.launch(3)
    assert len(library.launched[0]["bytes"]) == MAPPED.parameter_bytes


def test_another_grid_is_that_of_the_next_launch(library):
    made = slot(replace(ARTIFACT, cluster=2))
    for grid in ((1, 2, 3), (70_000, 1, 9)):
        made.set_grid(*grid)
        made.launch(0)
    assert [launched["grid"] for launched in library.launched] == [(2, 2, 3), (140_000, 1, 9)]
    assert {launched["block"] for launched in library.launched} == {(12 * 32, 1, 1)}


@pytest.mark.parametrize("cluster, sizes", [(1, []), (2, [(4, (2, 1, 1))])])
def test_a_programmatic_launch_is_one_beside_a_cluster(library, cluster, sizes):
    slot(replace(ARTIFACT, cluster=cluster), programmatic=True).launch(0)
    (launched,) = library.launched
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert launched["attributes"] == [*sizes, (6, (1, 0, 0))]


@pytest.mark.parametrize("programmatic, later", [(False, []), (True, [(6, (1, 0, 0))])])
@pytest.mark.parametrize("cluster, sizes", [(1, []), (2, [(4, (2, 1, 1))])])
def test_a_cooperative_launch_is_one_beside_what_else_it_is(
    library, cluster, sizes, programmatic, later
):
    artifact = replace(ARTIFACT, cluster=cluster)
    slot(artifact, programmatic=programmatic, cooperative=True).launch(0)
    (launched,) = library.launched
    # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert launched["attributes"] == [*sizes, *later, (2, (1, 0, 0))]


def test_a_cooperative_launch_says_where_each_parameter_lies(library):
    """Captured into a graph, one that gives them as a whole is an invalid argument (H200)."""
    made = slot(MAPPED, template=b"", cooperative=True)
    made.launch(0)
    (launched,) = library.launched
    places = tuple(made.address + parameter.offset for parameter in MAPPED.parameters)
    assert launched["parameters"] == places and len(places) == 4


def test_a_cooperative_launch_is_one_of_older_devices_too(library):
    slot(replace(ARTIFACT, target="cuda:80"), cooperative=True).launch(0)
    assert library.launched[0]["attributes"] == [(2, (1, 0, 0))]


def test_a_cooperative_launch_that_is_too_large_raises_the_drivers_words(library):
    library.codes["cuLaunchKernelEx"] = [720]
    with pytest.raises(RuntimeError, match="CUDA error 720"):
        slot(cooperative=True).launch(0)


CANNOT = {
    "cluster": {"cluster": 2},
    "programmatic": {"programmatic": True},
    "cooperative": {"cooperative": True},
}


@pytest.mark.parametrize(
    "module, target, said, how",
    [(hip, "hip:gfx950", "HIP has neither", how) for how in CANNOT]
    + [(cuda, "cuda:89", "9.0", how) for how in ("cluster", "programmatic")],
)
def test_a_launch_that_a_driver_cannot_make_is_refused(library, module, target, said, how):
    facts = dict(CANNOT[how])
    artifact = replace(ARTIFACT, target=target, cluster=facts.pop("cluster", 1))
    with pytest.raises(ValueError, match=said):
        slot(artifact, module, **facts)


def test_hip_is_told_the_same(library):
    artifact = replace(ARTIFACT, num_warps=4, warp_size=64)
    assert hip.load(artifact, 2).value == FUNCTION
    assert library.names() == ["hipSetDevice", "hipModuleLoadData", "hipModuleGetFunction"]
    said = {name: arguments for name, *arguments in library.calls}
    assert said["hipSetDevice"][0].value == 2
    assert said["hipModuleLoadData"][1] == ARTIFACT.code
    assert said["hipModuleGetFunction"][2] == b"some_kernel"
    made = slot(artifact, hip)
    made.buffer[0:8] = (1 << 40).to_bytes(8, "little")
    made.launch(0xABC)
    (launched,) = library.launched
    function, *numbers = launched["head"]
    assert function.value == FUNCTION
    assert numbers == [*GRID, 4 * 64, 1, 1, 100_000] and launched["stream"] == 0xABC
    assert launched["bytes"] == (1 << 40).to_bytes(8, "little") + TEMPLATE[8:]
    assert launched["address"] == made.address


def test_hip_raises_the_drivers_words(library, monkeypatch):
    monkeypatch.setattr(library, "hipGetErrorString", lambda code: b"no luck", raising=False)
    library.codes["hipModuleLaunchKernel"] = [9]
    with pytest.raises(RuntimeError, match="HIP error 9: no luck"):
        slot(module=hip).launch(0)


def test_hips_words_are_read_where_its_answer_points_to(monkeypatch):
    """A function of C whose answer is a text stands for the library's."""
    others = ("hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")
    library = SimpleNamespace(**{name: SimpleNamespace() for name in others})
    library.hipGetErrorString = ctypes.pythonapi["Py_GetVersion"]
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library)
    hip._library.cache_clear()
    with pytest.raises(RuntimeError) as raised:
        hip.check(1)
    hip._library.cache_clear()
    assert str(raised.value) == f"HIP error 1: {sys.version}"


@pytest.mark.parametrize("module, vendor", [(cuda, "CUDA"), (hip, "HIP")])
def test_an_error_that_the_driver_has_no_words_for_is_unknown(module, vendor, monkeypatch):
    silent = Library()
    monkeypatch.setattr(silent, "_answer", lambda name, arguments: None)
    monkeypatch.setattr(module, "_library", lambda: silent)
    module.check(0)
    assert not silent.calls
    monkeypatch.setattr(silent, "hipGetErrorString", lambda code: None, raising=False)
    with pytest.raises(RuntimeError, match=f"{vendor} error 3: unknown"):
        module.check(3)


def test_a_vendor_has_its_driver():
    assert driver.driver("nvidia") is cuda and driver.driver("amd") is hip
    with pytest.raises(ValueError, match="cpu"):
        driver.driver("cpu")
