"""Small assembly kernels for tests: run a few instructions on chosen register contents."""

import numpy as np

from heedful.emulator import emulate

LANES = 64
_HEAD = '.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\nk:\n'
_TAIL = """
.amdhsa_kernel k
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_user_sgpr_count 2
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_sgpr_workgroup_id_y 0
  .amdhsa_system_sgpr_workgroup_id_z 0
  .amdhsa_float_denorm_mode_32 {denormals}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count: 0
    .args:
{args}
    .kernarg_segment_size: {size}
    .max_flat_workgroup_size: {threads}
    .name: k
.end_amdgpu_metadata
"""


def kernel(body, arch="gfx942", buffers=1, threads=64, scratch=0, denormals=3) -> str:
    """Text of a kernel `k` with pointer arguments at s[0:1]; s2 is the workgroup."""
    args = "\n".join(
        f"      - .offset: {8 * i}\n        .size: 8\n        .value_kind: global_buffer"
        for i in range(buffers)
    )
    lines = body.strip().splitlines() if isinstance(body, str) else body
    code = "\n".join(line if line.rstrip().endswith(":") else "\t" + line.strip() for line in lines)
    tail = _TAIL.format(
        args=args, size=8 * buffers, threads=threads, scratch=scratch, denormals=denormals
    )
    return _HEAD.format(arch=arch) + code + "\n\ts_endpgm\n" + tail


def bits(values) -> np.ndarray:
    """Values of any 32-bit type as uint32; Python integers are taken modulo 2^32."""
    array = np.asarray(values)
    if array.dtype in (np.float32, np.int32, np.uint32):
        return np.ascontiguousarray(array).view(np.uint32)
    return np.array([int(v) & 0xFFFFFFFF for v in array.ravel()], np.uint32)


def vector(body, inputs, outputs, arch="gfx942", denormals=3, checks=None, clean=True):
    """Run instructions with the arrays `inputs` in v10, v11, ...; return the registers `outputs`.

    Args:
        body: instruction lines. inputs: arrays of one length, 32 bits per element; the length is
            padded to whole waves by repeating the last element.
        outputs: names of VGPRs or AGPRs to return.

    Returns:
        uint32 (len(outputs), length).
    """
    inputs = [bits(x) for x in inputs]
    length = len(inputs[0])
    padded = -(-length // LANES) * LANES
    waves = padded // LANES
    assert waves <= 16, "at most 1024 values per call"
    table = np.stack([np.pad(x, (0, padded - length), mode="edge") for x in inputs])
    result = np.zeros((len(outputs), padded), np.uint32)
    lines = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "s_load_dwordx2 s[6:7], s[0:1], 0x8"]
    lines += ["v_lshlrev_b32_e32 v1, 2, v0", "s_waitcnt lgkmcnt(0)"]
    for i in range(len(inputs)):
        lines.append(f"v_add_u32_e32 v2, {i * padded * 4:#x}, v1")
        lines.append(f"global_load_dword v{10 + i}, v2, s[4:5]")
    lines += ["s_waitcnt vmcnt(0)", *body.strip().splitlines(), "s_waitcnt vmcnt(0) lgkmcnt(0)"]
    for i, name in enumerate(outputs):
        lines.append(f"v_add_u32_e32 v2, {i * padded * 4:#x}, v1")
        source = name
        if name.startswith("a"):
            lines.append(f"v_accvgpr_read_b32 v3, {name}")
            source = "v3"
        lines.append(f"global_store_dword v2, {source}, s[6:7]")
    text = kernel(lines, arch, buffers=2, threads=padded, denormals=denormals)
    checks = {"global-bounds", "waitcnt", "lds-bounds"} if checks is None else checks
    report = emulate(text, (1,), [table, result], checks=checks)
    assert report.clean or not clean, report.summary()
    return result[:, :length]


def scalar(body, inputs, outputs, arch="gfx942"):
    """Run scalar instructions with the columns of `inputs` in s10, s11, ...; one workgroup per row.

    Returns:
        uint32 (len(outputs), rows); the name "scc" gives the condition code.
    """
    table = np.stack([bits(x) for x in inputs], axis=1).copy()
    rows, columns = table.shape
    result = np.zeros((rows, len(outputs)), np.uint32)
    lines = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "s_load_dwordx2 s[6:7], s[0:1], 0x8"]
    lines += ["s_waitcnt lgkmcnt(0)", f"s_mul_i32 s3, s2, {4 * columns}"]
    lines += ["s_add_u32 s4, s4, s3", "s_addc_u32 s5, s5, 0"]
    lines += [f"s_load_dword s{10 + i}, s[4:5], {4 * i:#x}" for i in range(columns)]
    lines += ["s_waitcnt lgkmcnt(0)", *body.strip().splitlines()]
    if "scc" in outputs:
        lines.append("s_cselect_b32 s60, 1, 0")
    lines += [f"s_mul_i32 s3, s2, {4 * len(outputs)}"]
    for i, name in enumerate(outputs):
        lines += ["v_mov_b32_e32 v1, s3", f"v_mov_b32_e32 v2, {'s60' if name == 'scc' else name}"]
        lines.append(f"global_store_dword v1, v2, s[6:7] offset:{4 * i}")
    text = kernel(lines, arch, buffers=2)
    report = emulate(text, (rows,), [table, result], checks={"global-bounds", "waitcnt"})
    assert report.clean, report.summary()
    return result.T


# Four waves of a workgroup with two buffers: s[4:5], s[6:7] their addresses, v1 a lane's word.
WAVES = 4
SETUP = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
"""


def run(body, *, arch="gfx950", threads=64 * WAVES, setup=SETUP, lds_bytes=65536, **options):
    data = np.arange(1024, dtype=np.uint32)
    text = kernel(setup + body, arch=arch, buffers=2, threads=threads, scratch=16)
    out = np.zeros(1024, np.uint32)
    return emulate(text, (1,), [data, out], lds_bytes=lds_bytes, **options)


def only(report, kind):
    """The one finding of that kind, and no other kind."""
    assert report.kinds() == {kind}, report.summary()
    return report.findings[0]


# The last wave to come leaves its number.
LAST = """
    v_lshrrev_b32_e32 v2, 6, v0
    v_mov_b32_e32 v3, 0
    global_store_dword v3, v2, s[6:7]
"""
