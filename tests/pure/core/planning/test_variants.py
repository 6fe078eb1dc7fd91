"""One variant of a backend is in the plan: by its gates, by an alias, or by hand."""

from dataclasses import replace

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan, explain, plan
from heedful.core.registry import capability
from heedful.core.registry.by_hand import Overrides, asked, named
from heedful.core.registry.capability import ALIASES, VARIANTS, Toolchain

dense = AttentionProblem.dense
H200, B200 = by_name("H200"), by_name("B200")
STEP = dense(64, 1, 8192, 8, 2, used_k=True)
LATENT = dense(64, 1, 8192, 16, 1, 576, head_dim_v=512, v_in_k=True, used_k=True)
SERVED = dense(128, 2048, 8192, 32, 8, causal=True, total_q=8316, page_size=16, used_k=True)
# Aliases, and a problem that each takes.
ASKED = {"hopper_decode": STEP, "mla": LATENT, "mla_swap_ab": LATENT, "hopper_mixed": SERVED}
ASKED["mla_converting"] = replace(LATENT, kv_dtype="float8_e4m3fn")
ASKED["mla_converting_pair"] = replace(ASKED["mla_converting"], heads_q=128)


def chosen(found: Plan) -> tuple[str, str]:
    return found.backend, found.variant


def test_a_user_can_name_eight_backends():
    want = {"hopper", "cdna", "portable", "decode", "mixed", "cpu", "sdpa", "scan"}
    assert set(capability.backends()) == want
    assert ALIASES.keys() == ASKED.keys() and not want & ALIASES.keys()


def test_variants_have_names_of_their_own_where_there_are_several():
    for direction in ("forward", "backward"):
        for row in capability.rows(direction):
            names = [v.name for v in row.variants]
            assert len(set(names)) == len(names)
            assert all(names) is (len(names) > 1)
            assert all(v.direction == direction and v.backend == row.backend for v in row.variants)
    backwards = [v.name for v in VARIANTS if (v.backend, v.direction) == ("hopper", "backward")]
    assert backwards == ["backward", "pair", "wide", "halves"]


@pytest.mark.parametrize("alias", ASKED)
def test_an_alias_chooses_its_variant_and_what_packs_call_it(alias):
    found = plan(ASKED[alias], H200, backend=alias)
    assert chosen(found) == ALIASES[alias]
    assert found.variant_of("forward").packed_as == alias
    assert asked(alias) == Overrides(*ALIASES[alias])


@pytest.mark.parametrize(
    "backend, problem, before, variant",
    [
        ("decode", STEP, (3, 9), "hopper"),
        ("decode", STEP, (3, 6), "portable"),
        ("decode", replace(STEP, softcap=3.0), (3, 9), "portable"),
        # More rows than the forward is left by default, which is not asked.
        ("decode", replace(STEP, seqlen_q=16), (3, 9), "hopper"),
        ("decode", dense(4, 1, 900, 8, 2, total_q=9, total_k=3000), (3, 9), "portable"),
        ("decode", LATENT, (3, 9), "mla_swap_ab"),
        ("decode", replace(LATENT, heads_q=64), (3, 9), "mla"),
        ("decode", replace(STEP, head_dim=512, head_dim_v=512), (3, 9), "wide"),
        ("mixed", SERVED, (3, 9), "hopper"),
        ("mixed", SERVED, (3, 6), "portable"),
        # One length: no batch that the planner would share.
        ("mixed", replace(SERVED, batch=8, total_q=8 * 2048), (3, 9), "hopper"),
    ],
)
def test_a_family_that_is_named_has_the_variant_that_gates_choose(
    backend, problem, before, variant
):
    found = plan(problem, H200, Toolchain(triton=before), backend)
    assert chosen(found) == (backend, variant)
    assert f"forward   {backend}/{variant} [run]" in explain(found)


def test_a_family_on_other_gpus_is_its_portable_kernel():
    assert chosen(plan(STEP, B200, backend="decode")) == ("decode", "portable")
    with pytest.raises(ValueError, match="backend='hopper_decode' cannot .*: no kernel for sm_100"):
        plan(STEP, B200, backend="hopper_decode")


@pytest.mark.parametrize(
    "dims, facts, variant",
    [
        ((128, 128), {}, "backward"),
        ((192, 128), {}, "pair"),
        ((192, 128), {"softcap": 3.0}, "wide"),
        ((256, 256), {}, "wide"),
        ((512, 384), {"softcap": 3.0}, "halves"),
    ],
)
def test_the_variant_of_a_backward_is_told_and_why_not_the_others(dims, facts, variant):
    asked = dense(2, 512, 512, 8, head_dim=dims[0], head_dim_v=dims[1], needs_grad=True, **facts)
    found = plan(asked, H200)
    assert (found.backward, found.backward_variant) == ("hopper", variant)
    said = explain(found)
    assert f"backward  hopper/{variant} [run]" in said
    others = {r.variant for r in found.rejected if r.label.startswith("hopper/")}
    backwards = {"backward", "pair", "wide", "halves"}
    assert others - {"forward", "forward_wide"} == backwards - {variant}
    assert found.sizes(direction="backward").launches.keys() >= {
        found.variant_of("backward").configs[0]
    }


def test_a_reason_that_all_variants_share_is_the_backends():
    found = plan(dense(2, 1024, 1024, 8, alibi=True, needs_grad=True), H200)
    (told,) = (r for r in found.rejected if (r.backend, r.direction) == ("hopper", "backward"))
    assert (told.label, told.reasons) == ("hopper", ("does not take ALiBi slopes",))


def test_nine_kernels_that_no_cpu_has_are_one_line():
    lines = explain(plan(dense(2, 1024, 1024, 8), by_name("CPU"))).splitlines()
    none = "rejected  decode, mixed, hopper, cdna, portable forward: no kernel for cpu"
    assert [line for line in lines if "no kernel for cpu" in line] == [none]


def test_what_is_chosen_by_hand_is_no_string_that_a_caller_could_write():
    name = named("decode", "portable", programs=3, registers=168)
    assert "+" not in name and asked(name) == Overrides(
        "decode", "portable", {"programs": 3, "registers": 168}
    )
    found = plan(STEP, H200, backend=name)
    assert chosen(found) == ("decode", "portable")
    config = found.configs["decode.forward"]
    assert (config.programs, config.registers) == (3, 168)  # pyright: ignore
    # Its letters alone are refused, and so is what its words were.
    assert name != str(name) and str(name) != name
    for words in (
        str(name),
        "decode/portable (programs=4)",
        "decode/portable+programs=3",
        "decode+programs=3",
    ):
        with pytest.raises(ValueError, match="backend must be one of decode, mixed, hopper, cdna"):
            plan(STEP, H200, backend=words)


def test_a_variant_of_one_direction_leaves_the_other_to_the_planner():
    asked = dense(2, 512, 512, 8, head_dim=256, needs_grad=True)
    found = plan(asked, H200, backend=named("hopper", "wide"))
    assert (found.variant, found.backward_variant) == ("forward", "wide")


def test_a_pack_of_one_variant_stands_for_no_other():
    """Their kernels are others: what is not packed would have to be compiled."""
    packs = frozenset({("decode", (3, 9))})
    packed = Toolchain(None, (2, 11), packs=packs)
    assert chosen(plan(STEP, H200, packed)) == ("decode", "portable")
    packed = replace(packed, packs=packs | {("hopper_decode", (3, 9))})
    assert chosen(plan(STEP, H200, packed)) == ("decode", "hopper")


def test_a_kernel_that_is_not_there_is_named():
    with pytest.raises(LookupError, match="decode has no forward 'narrow', only 'mla_swap_ab'"):
        capability.variant("decode", "forward", "narrow")
    with pytest.raises(LookupError, match=r"backend 'triton' has no forward \(of decode, mixed"):
        capability.variant("triton", "forward")
    with pytest.raises(LookupError, match="backend '' has no backward"):
        plan(STEP, H200).variant_of("backward")
