"""Instructions of micro-kernels wait for none of those before: by the registers that they name."""

import re

import pytest

from heedful.validation import micro

PROBES = {(arch, probe.name): probe for arch in micro.ARCHES for probe in micro.probes(arch)}


def registers(text: str) -> list[range]:
    """The registers that an instruction names, in order."""
    found = re.findall(r"\bv(\d+)\b|v\[(\d+):(\d+)\]", text)
    return [range(int(a or b), int(a or c) + 1) for a, b, c in found]


@pytest.mark.parametrize(
    ("arch", "probe"),
    [(arch, probe) for (arch, name), probe in PROBES.items() if "MFMA" in name],
    ids=lambda x: getattr(x, "name", x),
)
def test_an_mfma_waits_for_none_of_the_three_before_and_vector_instructions_for_none_of_theirs(
    arch, probe
):
    """A and B are apart, of drawn values. All take turns at four registers, or pairs of them."""
    width = {"gfx942": 2, "gfx950": 4}[arch]
    products = [line for line in probe.body if "mfma" in line]
    others = [line for line in probe.body if "mfma" not in line]
    assert len(products) == 16
    for number, line in enumerate(products):
        sums, a, b, added = registers(line)
        first = 32 + number % 4 * 16
        assert sums == added == range(first, first + 16)
        assert (a, b) == (range(16, 16 + width), range(20, 20 + width))
    after = int(probe.name.split()[2]) if others else 0
    assert [line in products for line in probe.body] == ([True] + [False] * after) * 16
    size = 2 if "v_pk" in probe.name else 1
    for number, line in enumerate(others):
        first = 24 + number % 4 * 2
        assert line.startswith(f"{probe.name.split()[-1]} ")
        assert registers(line) == [range(first, first + size)] * 3


@pytest.mark.parametrize("arch", micro.ARCHES)
def test_exponentials_take_turns_at_eight_registers_and_the_clocks_fmas_wait(arch):
    exponentials, clock = (PROBES[arch, name].body for name in ("exponentials", "clock"))
    for number, line in enumerate(exponentials):
        assert registers(line) == [range(24 + number % 8, 25 + number % 8)] * 2
    assert len(exponentials) == len(clock) == 64 and len(set(clock)) == 1
    assert registers(clock[0]) == [range(24, 25)] * 4
