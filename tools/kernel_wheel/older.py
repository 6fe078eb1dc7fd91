"""The code for drivers of CUDA 12, assembled from the assembly of the set for CUDA 13.

Triton writes the same PTX for both assemblers but for the version in its header, and some nine
tenths of a kernel's compilation come before the assembler. So the second set takes a tenth of the
time of the first, and a kernel has the bytes that compiling it with the older assembler gives.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from heedful.core.base import installed, settings
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.cache import DiskCache
from heedful.launch.code.identity import cache_key
from heedful.launch.spec import KernelCall

# What Triton 3.9 tells an assembler of a kernel without source lines.
FLAGS = ("-lineinfo", "-v", "--regAllocOptLevel=2", "-suppress-debug-info", "--gpu-name=sm_90a")


def ptx_version(assembler: Path) -> str:
    """The newest PTX that an assembler of CUDA 12.6 or newer, below 13, reads: "8.8" of 12.9."""
    major, minor = installed.numbers(installed.assembler_version(assembler))[:2]
    if major != 12 or minor < 6:
        raise ValueError(f"{assembler} is of CUDA {major}.{minor}: one of 12.6 or newer is wanted")
    return f"8.{minor - 1}"


def assembled(artifact: Artifact, fuses: bool, assembler: Path) -> Artifact:
    """The kernel by this assembler. fuses: whether products may be fused with sums. Raises
    CalledProcessError where it does not assemble."""
    header = f".version {ptx_version(assembler)}"
    text = re.sub(r"\.version \d+\.\d+", header, artifact.text)
    fused = () if fuses else ("--fmad=false",)
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(text)
        command = (assembler, *FLAGS, *fused, source, "-o", made)
        subprocess.run(command, check=True, capture_output=True)
        code = made.read_bytes()
    triton = artifact.toolchain.partition(",")[0]
    tool = f"{triton}, {assembler.name} {installed.assembler_version(assembler)}"
    return replace(artifact, code=code, text=text, toolchain=tool)


def assemble_all(
    wanted: Mapping[str, tuple[KernelCall, str]],
    compiled: Mapping[str, str],
    assembler: Path,
    jobs: int,
) -> int:
    """Keeps in this user's cache what an assembler makes of the kernels whose assembly is there, by
    the keys of the compiler that is told of it; returns how many it made. The others are left to
    that compiler.

    wanted: by kernel key. compiled: under which cache key each was compiled for newer drivers.
    """
    cache = DiskCache(*(settings.get(n) for n in ("cache_dir", "cache_limit", "cache_read_only")))

    def make(kernel: str) -> bool:
        call, arch = wanted[kernel]
        key = cache_key(call, arch)
        newest = None if cache.get(key) else cache.get(compiled[kernel])
        if newest is None or not newest.text:
            return False
        fuses = bool(call.options.get("enable_fp_fusion", True))
        return cache.get_or_make(key, lambda: assembled(newest, fuses, assembler))[1]

    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(make, wanted))
