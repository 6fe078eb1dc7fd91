"""What jaxlib is told of a launch is all of it: code, sizes, grid and each parameter in order, read
back from the bytes."""

from dataclasses import replace

import pytest

pytest.importorskip("jax")

from heedful.jax.gpu import triton_call
from heedful.launch.code.artifact import Artifact
from heedful.launch.foreign import ForeignLaunch, TensorMapParameter
from heedful.launch.spec import Pointer, Scalar
from support import wire

MAP = TensorMapParameter("q", 9, 2, 3, (300, 4, 129), (2**33, 130, 1), (64, 1, 128))
PARAMETERS = (
    Pointer("out", "bfloat16", aligned=True),
    Pointer("bias", "float16", aligned=False),
    MAP,
    Scalar(7),
    Scalar(-5),
    Scalar(0),
    Scalar(2**40, "i64"),
    Scalar(-(2**40), "i64"),
    Scalar(0.15625, "fp32"),
    Scalar(True, "i1"),
)


def launch_of(grid=(300, 2, 1), target: str = "cuda:90") -> ForeignLaunch:
    artifact = Artifact(
        code=b"machine code",
        text="",
        symbol="kernel",
        target=target,
        num_warps=8,
        warp_size=32,
        shared_bytes=70_000,
        cluster=2,
        parameters=(),
        parameter_bytes=0,
    )
    names = frozenset({"out"}), frozenset({"out"})
    return ForeignLaunch(artifact, grid, PARAMETERS, *names, False, False)


def call_of(zeroed=None, **facts) -> wire.Call:
    return wire.Call(triton_call.opaque(launch_of(**facts), "a name", zeroed or {}))


def test_launches_that_no_field_describes_are_refused_by_their_kernels_name():
    launch = launch_of()
    with pytest.raises(RuntimeError, match="^kernel: compiler scratch is not supported$"):
        artifact = replace(launch.artifact, scratch_bytes=1)
        triton_call.message(replace(launch, artifact=artifact), "a name", {})
    with pytest.raises(RuntimeError, match="^kernel: cooperative launches are not supported$"):
        triton_call.message(replace(launch, cooperative=True), "a name", {})


def test_a_message_has_each_parameter_of_a_launch_in_order():
    fields, values = zip(*call_of(zeroed={1: 4096}).parameters, strict=True)
    kinds = (wire.ARRAY, wire.ARRAY, wire.DESCRIPTOR, *[wire.I32] * 3, *[wire.I64] * 2)
    assert fields == (*kinds, wire.F32, 2)
    # bytes that are zeroed, and what the address is a multiple of.
    assert wire.fields(values[0]) == {2: [16]} and wire.fields(values[1]) == {1: [4096]}
    described = wire.fields(wire.fields(values[2])[1][0])
    assert (described[1], described[2]) == ([MAP.element_type], [MAP.swizzle])
    for field, sizes in ((3, MAP.shape), (4, MAP.strides), (5, MAP.box)):
        assert wire.numbers(described[field][0]) == sizes
    whole = [value - 2**64 if value >= 2**63 else value for value in values[3:8]]
    assert whole == [7, -5, 0, 2**40, -(2**40)]
    assert values[8:] == (0.15625, 1)


def test_what_is_no_parameter_of_a_kernel_is_named():
    with pytest.raises(TypeError, match=r"no parameter of a kernel: 'text'"):
        triton_call._parameter("text", 0)


@pytest.mark.parametrize("target, capability", [("cuda:90", [90]), ("hip:gfx942", None)])
def test_a_message_has_the_code_and_its_sizes(target, capability):
    call = call_of(target=target)
    assert (call.name, call.grid, call.code) == ("a name", (300, 2, 1), b"machine code")
    assert call.kernel[wire.KERNEL_NAME] == [b"kernel"] and call.kernel[wire.NUM_WARPS] == [8]
    assert call.kernel[wire.SHARED] == [70_000] and call.kernel[wire.NUM_CTAS] == [2]
    assert call.kernel.get(wire.CAPABILITY) == capability
    image = wire.fields(call.kernel[wire.IMAGE][0])
    assert image == {1: [b"machine code"], 2: [b"kernel"], 3: [70_000]}
