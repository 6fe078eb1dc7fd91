"""What installed versions and loaded packs make of a plan."""

from dataclasses import replace

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import needs_pack, plan, without_packs
from heedful.core.registry.capability import Toolchain, Variant
from heedful.core.registry.tiles import HopperConfig

dense = AttentionProblem.dense


def test_a_missing_or_old_triton_is_a_reason():
    problem, device = dense(1, 64, 64, 8), by_name("H200")
    with pytest.raises(ValueError, match="needs triton >= 3.6, which is not installed"):
        plan(problem, device, Toolchain(triton=None))
    with pytest.raises(ValueError, match="needs triton >= 3.6, got 3.5"):
        plan(problem, device, Toolchain(triton=(3, 5)))


@pytest.mark.parametrize("device", ["MI300X", "MI355X"])
def test_a_tree_mask_beside_a_bias_needs_a_newer_triton_on_amd_gpus_alone(device):
    both = dense(1, 4, 64, 8, tree_mask=True, bias=True)
    old, newer = Toolchain(triton=(3, 6)), Toolchain(triton=(3, 7))
    with pytest.raises(ValueError, match="needs triton >= 3.7, got 3.6"):
        plan(both, by_name(device), old, "portable")
    assert plan(both, by_name(device), newer, "portable").backend == "portable"
    assert plan(both, by_name("H200"), old, "portable").backend == "portable"
    for alone in (replace(both, bias=False), replace(both, tree_mask=False)):
        assert plan(alone, by_name(device), old, "portable").backend == "portable"


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
        ((3, 6), (3, 9), "speculative"),
        ((3, 9), (3, 6), "exact"),
        ((3, 9), (3, 9), "speculative"),
        ((3, 9), None, "speculative"),
    ],
)
def test_kernels_are_planned_for_the_triton_of_their_pack_whatever_is_installed(
    installed, packed, rescale
):
    held = frozenset({("hopper", packed)} if packed else ())
    packs = held | {("portable", (3, 1)), ("cdna", (3, 1))}
    tools = Toolchain(installed, packs=packs)
    long = dense(2, 4096, 4096, 8, head_dim=128)
    chosen = plan(long, by_name("H200"), tools, backend="hopper")
    config = chosen.configs["hopper.forward"]
    assert isinstance(config, HopperConfig) and config.rescale == rescale


def test_a_pack_that_is_too_old_for_a_kernel_leaves_it_to_the_installed_triton():
    tools = Toolchain((3, 9), packs=frozenset({("hopper", (3, 6))}))
    chosen = plan(dense(2, 4096, 4096, 8, needs_grad=True), by_name("H200"), tools)
    assert (chosen.backend, chosen.backward) == ("hopper", "hopper")
    assert needs_pack(chosen, "forward") and not needs_pack(chosen, "backward")


@pytest.mark.parametrize("installed", [(3, 7), (3, 9)])
def test_a_pack_that_is_too_old_for_a_problem_leaves_it_to_the_installed_triton(installed):
    """A tree mask beside a bias: other problems of that kernel take the pack."""
    tools = Toolchain(installed, packs=frozenset({("portable", (3, 6))}))
    both, device = dense(1, 4, 64, 8, tree_mask=True, bias=True), by_name("MI355X")
    assert not needs_pack(plan(both, device, tools, "portable"), "forward")
    for other, where in ((replace(both, bias=False), device), (both, by_name("H200"))):
        assert needs_pack(plan(other, where, tools, "portable"), "forward")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_direction_can_be_planned_without_packs(direction):
    """The other one keeps its kernels, its tiles and its Triton."""
    tools = Toolchain((3, 6), packs=frozenset({("hopper", (3, 9))}))
    problem, device = dense(2, 4096, 4096, 8, needs_grad=True), by_name("H200")
    packed, alone = plan(problem, device, tools), plan(problem, device, Toolchain((3, 6)))
    other = "backward" if direction == "forward" else "forward"
    made = without_packs(packed, direction)
    assert not needs_pack(made, direction) and needs_pack(made, other)
    for of, want in ((direction, alone), (other, packed)):
        kernels = want.variant_of(of).configs
        assert made.variant_of(of) == want.variant_of(of)
        assert {k: made.configs[k] for k in kernels if k in want.configs} == {
            k: want.configs[k] for k in kernels if k in want.configs
        }
    assert set(made.configs) == set(made.measured)
    assert made.notes == (f"the {direction} is planned without packs: none has all of its kernels",)


def test_a_pack_beside_the_same_triton_or_none_is_needed_by_no_plan():
    problem, packs = dense(2, 4096, 4096, 8), frozenset({("hopper", (3, 9))})
    for installed in ((3, 9), None):
        tools = Toolchain(installed, packs=packs)
        assert not needs_pack(plan(problem, by_name("H200"), tools), "forward")
