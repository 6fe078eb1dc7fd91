"""The message of jaxlib's Triton kernel call, encoded by hand: machine code, launch, parameters.

Protocol buffers' wire format, of jaxlib's jax_triton.TritonAnyKernelCall (jaxlib/gpu/triton.proto,
0.11.1). jaxlib's own encoder has no way to pass machine code, is there beside CUDA's plugin alone,
and assembles PTX with its own ptxas.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping

from heedful.launch.code.artifact import Artifact
from heedful.launch.foreign import ForeignLaunch, TensorMapParameter
from heedful.launch.spec import Pointer, Scalar

TARGET = "triton_kernel_call_ffi"
# Fields of a scalar parameter by our types; JAX's proto has them in a oneof.
_BOOL, _I32, _I64, _F32 = 2, 3, 5, 7
_SCALARS = {"i1": _BOOL, "i32": _I32, "i64": _I64, "fp32": _F32}
_VARINT, _BYTES, _WORD = 0, 2, 5


def opaque(launch: ForeignLaunch, name: str, zeroed: Mapping[int, int]) -> bytes:
    """The arguments of the custom call: the compressed message.

    name: for people. zeroed: by index among the parameters, how many bytes of that array are zeroed
    before the launch.

    Raises RuntimeError for a kernel that wants scratch of its own, which would be allocated anew at
    each launch, and for a cooperative launch, which the message has no field for.
    """
    return zlib.compress(message(launch, name, zeroed))


def message(launch: ForeignLaunch, name: str, zeroed: Mapping[int, int]) -> bytes:
    """The TritonAnyKernelCall of a launch."""
    artifact = launch.artifact
    if artifact.scratch_bytes:
        raise RuntimeError(f"{artifact.symbol}: compiler scratch is not supported")
    if launch.cooperative:
        raise RuntimeError(f"{artifact.symbol}: cooperative launches are not supported")
    call = _message(1, _kernel(artifact))
    for field, size in enumerate(launch.grid, 2):
        call += _number(field, size)
    for index, parameter in enumerate(launch.parameters):
        call += _message(5, _parameter(parameter, zeroed.get(index, 0)))
    return _message(1, call) + _bytes(4, name.encode())


def digest(artifact: Artifact) -> str:
    """The key that tells machine codes apart: jaxlib finds a loaded kernel by name, shared memory,
    target and the text that stands here in place of PTX, so it must differ where the code does."""
    return hashlib.sha256(artifact.code).hexdigest()


def _kernel(artifact: Artifact) -> bytes:
    vendor, _, target = artifact.target.partition(":")
    capability = int(target) if vendor == "cuda" else 0
    image = _bytes(1, artifact.code)
    image += _bytes(2, artifact.symbol.encode()) + _number(3, artifact.shared_bytes)
    return (
        _bytes(1, artifact.symbol.encode())
        + _number(2, artifact.num_warps)
        + _number(3, artifact.shared_bytes)
        + _bytes(4, digest(artifact).encode())
        + _number(6, capability)
        + _key(10, _VARINT)
        + _varint(artifact.cluster)
        + _message(11, image)
    )


def _parameter(parameter, zeroed: int) -> bytes:
    match parameter:
        case Pointer():
            divisor = 16 if parameter.aligned else 0
            return _message(1, _number(1, zeroed) + _number(2, divisor))
        case Scalar(value=value, type=kind):
            field = _SCALARS[kind]
            if field == _F32:
                return _key(field, _WORD) + struct.pack("<f", value)
            return _key(field, _VARINT) + _varint(int(value))
        case TensorMapParameter():
            return _message(9, _message(1, _tensor_map(parameter)))
    raise TypeError(f"no parameter of a kernel: {parameter!r}")


def _tensor_map(parameter: TensorMapParameter) -> bytes:
    return (
        _number(1, parameter.element_type)
        + _number(2, parameter.swizzle)
        + _numbers(3, parameter.shape)
        + _numbers(4, parameter.strides)
        + _numbers(5, parameter.box)
    )


def _varint(value: int) -> bytes:
    """A whole number in groups of seven bits; a negative one as the 64 bits of its complement."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _number(field: int, value: int) -> bytes:
    """A field that is left out where it is 0, its default."""
    return _key(field, _VARINT) + _varint(value) if value else b""


def _numbers(field: int, values: Iterable[int]) -> bytes:
    return _message(field, b"".join(map(_varint, values)))


def _bytes(field: int, value: bytes) -> bytes:
    return _message(field, value) if value else b""


def _message(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content
