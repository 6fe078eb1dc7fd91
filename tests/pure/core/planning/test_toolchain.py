"""What installed versions and loaded packs make of a plan."""

from dataclasses import replace

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.capability import Toolchain, Variant
from heedful.core.registry.tiles import HopperConfig

dense = AttentionProblem.dense


def test_a_missing_or_old_triton_is_a_reason():
    problem, device = dense(1, 64, 64, 8), by_name("H200")
    with pytest.raises(ValueError, match="needs triton >= 3.6, which is not installed"):
        plan(problem, device, Toolchain(triton=None))
    with pytest.raises(ValueError, match="needs triton >= 3.6, got 3.5"):
        plan(problem, device, Toolchain(triton=(3, 5)))


def test_a_pack_of_kernels_stands_for_triton_and_other_tools_are_still_asked_for():
    row = Variant(
        *("mine", "forward", "", {"cpu": "run"}, ("bfloat16",), frozenset()),
        least=(("triton", (3, 6)), ("torch", (2, 11))),
    )
    packed = Toolchain(None, (2, 10), packs=frozenset({("mine", (3, 9))}))
    why = row.why_not(dense(1, 8, 8, 1), by_name("CPU"), packed)
    assert why == ["needs torch >= 2.11, got 2.10"]
    older = replace(packed, packs=frozenset({("mine", (3, 5))}))
    why = row.why_not(dense(1, 8, 8, 1), by_name("CPU"), older)
    assert why == ["needs triton >= 3.6, got 3.5", "needs torch >= 2.11, got 2.10"]
    either = replace(older, triton=(3, 6))
    why = row.why_not(dense(1, 8, 8, 1), by_name("CPU"), either)
    assert why == ["needs torch >= 2.11, got 2.10"]
    other = replace(packed, packs=frozenset({("other", (3, 9))}))
    why = row.why_not(dense(1, 8, 8, 1), by_name("CPU"), other)
    assert why == ["needs triton >= 3.6, which is not installed", "needs torch >= 2.11, got 2.10"]


@pytest.mark.parametrize(
    "installed, packed, rescale",
    [
        (None, (3, 6), "exact"),
        (None, (3, 9), "speculative"),
        ((3, 6), (3, 9), "exact"),
        ((3, 9), (3, 6), "exact"),
        ((3, 9), (3, 9), "speculative"),
        ((3, 9), None, "speculative"),
    ],
)
def test_kernels_are_cut_for_the_older_triton_of_the_installed_and_the_packs(
    installed, packed, rescale
):
    """So a pack is found by who has no Triton or another, and what it lacks can be compiled."""
    held = frozenset({("hopper", packed)} if packed else ())
    packs = held | {("portable", (3, 1)), ("cdna", (3, 1))}
    tools = Toolchain(installed, packs=packs)
    long = dense(2, 4096, 4096, 8, head_dim=128)
    chosen = plan(long, by_name("H200"), tools, backend="hopper")
    config = chosen.configs["hopper.forward"]
    assert isinstance(config, HopperConfig) and config.rescale == rescale
