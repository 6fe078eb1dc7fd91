"""The Hopper forward of head dims above 256 compiled for sm_90 without a GPU."""

import re

import pytest

pytest.importorskip("triton")

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.inspector.nvidia import disassemble, parse_sass
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from heedful.launch.program import programs
from support.problems.grids import slow_but

pytestmark = pytest.mark.skipif(
    (compiling().triton or ()) < (3, 9), reason="gl.inline_asm came with Triton 3.9"
)
DEVICE = by_name("H200")
FACTS = {
    "plain": {"return_lse": True},
    "causal": {"causal": True},
    "all": {
        "mask": MaskSpec.of(True, (100, 0, 9)),
        "softcap": 20.0,
        "sink": True,
        "used_q": True,
        "used_k": True,
        "leftpad_k": True,
        "dtype": "float16",
    },
    "in parts": {"num_splits": 3},
    "packed": {"causal": True, "total_q": 1500, "total_k": 1700},
    "pages of 16": {"page_size": 16, "causal": True, "used_k": True},
    "packed, pages of 64": {"page_size": 64, "total_q": 1500, "causal": True, "used_k": True},
}


def attention(way: str = "", **facts):
    """The attention kernel's call."""
    problem = AttentionProblem.dense(2, 1000, 1100, 8, 4, head_dim=512, **facts)
    chosen = plan(problem, DEVICE, compiling(), forced(f"hopper/forward_wide{way}"))
    calls = programs.program(chosen, "forward").calls
    return next(call for call in calls if call.kernel.function == "forward_wide")


def test_a_cluster_has_a_program_for_each_64_rows():
    assert attention().cluster == 2 and attention("+block_m=64").cluster == 1
    # 16 heads of eight tiles of 128 rows, or sixteen of 64.
    assert attention().grid == (128, 1, 1) and attention("+block_m=64").grid == (256, 1, 1)


def products(call) -> list[str]:
    """Products, waits for them and accesses of spills, in the order of the machine code."""
    code, _, _ = parse_sass(disassemble(compiler.artifact(call, DEVICE.arch).code).text)
    wanted = re.compile(r"(@!?U?P\d )?(HGMMA|WARPGROUP\.DEPBAR|LDL|STL)")
    return [one.text for one in code if wanted.match(one.text)]


@pytest.mark.parametrize("name", slow_but({"causal"}, ("plain", "causal")))
def test_products_run_beside_each_other_and_nothing_spills_among_them(name):
    """Where registers do not fit, the assembler waits for each product by itself."""
    found = products(attention(**FACTS[name]))
    waits = [text for text in found if "DEPBAR" in text]
    # Twice four parts of scores (the first tile, and the loop), twice two parts of values.
    assert len(waits) == 2 * 4 + 2 * 2
    assert sum("HGMMA" in text for text in found) == 2 * 4 * 8 + 2 * 2 * 4
    first, last = (
        [i for i, text in enumerate(found) if "DEPBAR" in text][place] for place in (3, 7)
    )
    assert not any("LDL" in text or "STL" in text for text in found[first:last])


@pytest.mark.parametrize(
    "facts",
    slow_but([{"causal": True}], ({}, {"causal": True}, {"used_k": True})),
    ids=("dense", "causal", "ends of sequences"),
)
def test_boxes_for_a_cluster_are_loaded_by_the_maps_of_keys_and_values(facts):
    """Inline assembly names the kernel's parameters by their numbers."""
    text = compiler.artifact(attention(**facts), DEVICE.arch).text
    maps = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", text)
    assert len(maps) == 4
    loaded = re.findall(r"mov.b64 map, (\w+);[^}]*multicast::cluster", text)
    assert set(loaded) == {maps[1], maps[2]}


@pytest.mark.slow
@pytest.mark.parametrize("way", ("", "+block_m=64"))
@pytest.mark.parametrize("name", FACTS)
def test_kernels_fit_an_sm(name, way):
    made = compiler.artifact(attention(way, **FACTS[name]), DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    assert made.num_warps * 32 == 512
    # Who shares keys loads them for both.
    assert (".multicast::cluster" in made.text) == (way == "")
    assert made.cluster == (2 if way == "" else 1)
