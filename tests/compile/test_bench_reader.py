"""The read that all others are held against: how it is launched, and what it compiles to."""

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from heedful.bench.harness import reader


class Launches:
    """Stands in for the kernel: keeps each launch."""

    def __init__(self):
        self.found = []

    def __getitem__(self, grid):
        return lambda *given, **options: self.found.append((grid, given, options))


def test_each_program_reads_words_of_its_own_in_wide_loads_that_leave_the_cache_alone(monkeypatch):
    launches, kernel = Launches(), reader._read
    monkeypatch.setattr(reader, "_read", launches)
    words = torch.zeros(2 * 8192 + 1)
    sums = reader.read_words(words)
    ((grid, given, options),) = launches.found
    assert grid == sums.shape == (3,) and sums.dtype == torch.float32
    assert given[0] is words and given[1] is sums and given[2] == 2 * 8192 + 1
    assert options.pop("WORDS") == 8192

    signature = {"x": "*fp32", "sums": "*fp32", "size": "i64", "WORDS": "constexpr"}
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1, 2)}
    source = ASTSource(kernel, signature, {(3,): 8192}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    loads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line]
    # 8192 words for 256 threads, four in a load.
    assert len(loads) == 8
    assert all("evict_first" in line and ".v4." in line for line in loads)
    # Past 2^31 words they are found by 64 bits.
    assert "arith.extsi" in compiled.asm["ttir"]
