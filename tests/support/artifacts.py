"""A compiled kernel that no compiler made."""

from heedful.launch.code.artifact import Artifact, Parameter


def artifact(code: bytes = b"\x7fELF machine code\n\0") -> Artifact:
    return Artifact(
        code,
        "// text",
        "kernel",
        "cuda:90",
        4,
        32,
        1024,
        1,
        (Parameter("x_ptr", "*bf16", 0), Parameter("n", "i32", 8)),
        12,
        tensor_maps={"q": {"swizzle": 3, "block_size": [64, 64]}},
        toolchain="triton 3.9.0",
    )
