"""The MLA decodes compile for Hopper with few spills in the loop over keys or none, their products
and loads those that they are made for."""

import pytest

pytest.importorskip("triton")

from compile.test_decode import buffers_of
from heedful.core.base.device import by_name
from heedful.core.call.problem import LATENT_ROWS, AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import forced
from heedful.inspector.nvidia import disassemble, measure, parse_sass
from heedful.launch.bind import mla
from heedful.launch.compiler import compile_now
from heedful.launch.prebuild import compiling
from support.problems.grids import slow_but

pytestmark = pytest.mark.skipif(
    (compiling().triton or ()) < (3, 9), reason="gl.inline_asm came with Triton 3.9"
)

# Name: facts of the problem beside 4 sequences of 4096 latent vectors.
PROBLEMS = {
    "16 heads": {"heads_q": 16, "page_size": 64},
    "128 heads": {"heads_q": 128, "page_size": 64},
    "four tokens": {"heads_q": 128, "seqlen_q": 4, "causal": True, "used_q": True},
    "one length": {"heads_q": 128, "dtype": "float16", "used_k": False},
    "pages of 16": {"heads_q": 40, "page_size": 16, "num_splits": 3},
    "whole": {"heads_q": 128, "num_splits": 1, "page_size": 64},
    "in order, pages of 16": {"heads_q": 128, "page_size": 16, "num_splits": 3},
    "merged by all, pages of 16": {"heads_q": 128, "page_size": 16},
    # As it may be chosen by hand.
    "shared queries": {"heads_q": 128, "page_size": 64, "backend": "mla+query_boxes=0+merge=0"},
    "merged by one": {"heads_q": 128, "page_size": 64, "backend": "mla+merge=0"},
    "all": {"heads_q": 128, "page_size": 64, "backend": "mla+ahead=1+in_order=1+merge=1"},
    # Few rows, which are columns of products.
    "swapped": {"heads_q": 16, "page_size": 64, "backend": "mla_swap_ab+merge=0"},
    "swapped, four tokens": {"heads_q": 8, "seqlen_q": 4, "causal": True, "page_size": 16},
    "swapped, one length": {"heads_q": 32, "dtype": "float16", "used_k": False, "num_splits": 1},
    "swapped, merged by all": {"heads_q": 32, "page_size": 16},
    # Of 8 bits, which are converted in registers.
    "converting": {"heads_q": 16, "page_size": 64, "kv_dtype": "float8_e4m3fn"},
    "converting, 128 heads": {"heads_q": 128, "page_size": 16, "kv_dtype": "float8_e4m3fn"},
    "converting, one length": {"heads_q": 32, "used_k": False, "kv_dtype": "float8_e4m3fn"},
    "converting rows": {"heads_q": 16, "page_size": 64, "kv_dtype": LATENT_ROWS},
    "pair": {"heads_q": 64, "page_size": 64, "kv_dtype": "float8_e4m3fn"},
    "pair, four tokens": {
        "heads_q": 128,
        "seqlen_q": 4,
        "causal": True,
        "page_size": 16,
        "kv_dtype": "float8_e4m3fn",
    },
    "pair, rows": {"heads_q": 128, "page_size": 64, "kv_dtype": LATENT_ROWS},
    "converting rows, whole": {"heads_q": 8, "num_splits": 1, "kv_dtype": LATENT_ROWS},
}
# It takes ten seconds to compile one. By default: each mask and order of products; small pages.
# float16 and one length are those of few rows below.
DEFAULT = ("128 heads",)
# Registers that a step spills, where two boxes of queries leave few for addresses, or the producer
# has some of the consumers' for numbers of small pages. Elsewhere none.
SPILLS = {
    "four tokens": 4,
    "whole": 1,
    "merged by all, pages of 16": 2,
    "pages of 16": 2,
    "in order, pages of 16": 2,
}
SWAPPED = [name for name in PROBLEMS if name.startswith("swapped")]
# By default those that merge otherwise, or have another dtype.
FEW_ROWS = slow_but({"swapped, merged by all"}, SWAPPED)
CONVERTING = [name for name in PROBLEMS if name.startswith("converting")]
PAIRS = [name for name in PROBLEMS if name.startswith("pair")]
BY_DEFAULT = slow_but(
    DEFAULT, (name for name in PROBLEMS if name not in (*SWAPPED, *CONVERTING, *PAIRS))
)


def sass_of(name: str):
    facts = {"seqlen_q": 1, "used_k": True, **PROBLEMS[name]}
    heads = (facts.pop("heads_q"), 1)
    kernels = {"swapped": "mla_swap_ab", "converting": "mla_converting"}
    kernels["pair"] = "mla_converting_pair"
    first = name.replace(",", "").split()[0]
    backend = facts.pop("backend", kernels.get(first, "mla"))
    problem = AttentionProblem.dense(
        4,
        facts.pop("seqlen_q"),
        4096,
        *heads,
        head_dim=576,
        head_dim_v=512,
        v_in_k=True,
        **facts,
    )
    buffers = buffers_of(problem)
    (call,) = mla.forward(
        problem, plan(problem, by_name("H200"), backend=forced(backend)), buffers
    ).calls
    return parse_sass(disassemble(compile_now(call, "sm_90").code).text)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_both_loops_over_keys_have_a_step_of_products_and_few_spills(name):
    code, labels, branches = sass_of(name)
    loops = {(labels[to], at + 1) for at, to in branches if labels.get(to, at + 1) <= at}
    found = {bounds: measure(code[slice(*bounds)]) for bounds in loops}
    # Nine boxes of scores, and both blocks' values, of four products each.
    steps = [b for b, sass in found.items() if sass.wgmma == 4 * (9 + 2)]
    # Blocks out of line jump back, too, over more than a loop.
    first, second = sorted(steps, key=lambda b: b[1] - b[0])[:2]
    assert first[1] <= second[0] or second[1] <= first[0]
    assert found[first].spills + found[second].spills <= SPILLS.get(name, 0)


def test_keys_come_by_tensor_maps_and_products_run_into_each_other():
    code, _, _ = sass_of("128 heads")
    words = [instruction.text for instruction in code]
    # Two blocks of nine boxes, and nine boxes of queries.
    assert sum("UTMALDG" in text for text in words) == 18 + 9
    products = [text for text in words if "HGMMA" in text or "WARPGROUP.DEPBAR" in text]
    assert sum("HGMMA" in text for text in products) == 2 * 44
    # Where products are serialised each has a wait behind it.
    assert sum("DEPBAR" in text for text in products) == 2 * 3


@pytest.mark.parametrize("name", FEW_ROWS)
def test_the_loop_over_keys_of_few_rows_has_a_block_of_products_and_no_spill(name):
    code, labels, branches = sass_of(name)
    loops = [(labels[to], at + 1) for at, to in branches if labels.get(to, at + 1) <= at]
    # Nine boxes of keys by queries, eight of values by probabilities, of four products each.
    steps = [b for b in loops if measure(code[slice(*b)]).wgmma == 4 * (9 + 8)]
    begin, end = min(steps, key=lambda b: b[1] - b[0])
    loads = [b for b in loops if measure(code[slice(*b)]).tma]
    for loop in ((begin, end), min(loads, key=lambda b: b[1] - b[0])):
        assert measure(code[slice(*loop)]).spills == 0
    words = [instruction.text for instruction in code[begin:end]]
    # The scores' wait, and one for each box of values, which is released as soon as it is read.
    assert sum("WARPGROUP.DEPBAR" in text for text in words) == 1 + 8
    rows = PROBLEMS[name]["heads_q"] * PROBLEMS[name].get("seqlen_q", 1)
    shape = 16 if rows <= 16 else 32
    assert sum(f"64x{shape}x16" in text for text in words) == 4 * (9 + 8)


@pytest.mark.parametrize("name", slow_but({CONVERTING[0]}, CONVERTING))
def test_values_of_8_bits_become_left_operands_by_one_conversion_for_two_and_no_exchange(name):
    code, labels, branches = sass_of(name)
    loops = [(labels[to], at + 1) for at, to in branches if labels.get(to, at + 1) <= at]
    # Nine boxes of keys by queries, eight of values by probabilities, of four products each.
    steps = [b for b in loops if measure(code[slice(*b)]).wgmma == 4 * (9 + 8)]
    begin, end = min(steps, key=lambda b: b[1] - b[0])
    assert measure(code[begin:end]).spills == 0
    words = [instruction.text for instruction in code[begin:end]]
    # A thread has half a value of each key and column: of keys those of 8 bits, of values 512.
    is_rows = PROBLEMS[name]["kv_dtype"] == LATENT_ROWS
    keys, values = (512 if is_rows else 576) // 2, 512 // 2
    assert sum("F2FP.F16.E4M3.UNPACK" in text for text in words) == (keys + values) // 2
    # Loads of four registers, of two pairs of columns each; those of values are also permuted.
    assert sum("LDSM.16.M" in text for text in words) == (keys + values) // 16
    assert sum("PRMT" in text for text in words) <= values // 4 + 2
    # Products run into each other: waits for those before the box before, and for the last.
    assert sum("WARPGROUP.DEPBAR" in text for text in words) == 5 + 4


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_both_consumers_of_64_rows_convert_half_as_often_and_their_products_are_not_in_turn(name):
    code, labels, branches = sass_of(name)
    loops = [(labels[to], at + 1) for at, to in branches if labels.get(to, at + 1) <= at]
    is_rows = PROBLEMS[name]["kv_dtype"] == LATENT_ROWS
    # Nine boxes of keys by queries, and of both blocks' values a half each, of four products. The
    # eight boxes of plain keys are a loop over four pairs of them.
    boxes = 9 if is_rows else 3
    found = {b: measure(code[slice(*b)]) for b in loops}
    steps = [b for b, sass in found.items() if sass.wgmma == 4 * (boxes + 8) and not sass.tma]
    inner = [b for b in steps if not any(b[0] <= c[0] and c[1] <= b[1] and b != c for c in steps)]
    assert len(inner) == 2
    # For 128 keys, as many as for 64 where one consumer has them all; a loop converts the part that
    # follows, and so the first one stands before it.
    keys, values = (512 if is_rows else 64 * (boxes + 1)) // 2, 512 // 2
    for begin, end in inner:
        words = [instruction.text for instruction in code[begin:end]]
        assert sum("64x64x16" in text for text in words) == 4 * (boxes + 8)
        assert sum("F2FP.F16.E4M3.UNPACK" in text for text in words) == (keys + values) // 2
        # Where products are serialised each has a wait behind it.
        waits = 9 + 2 * 5 + 1 if is_rows else 1 + 2 + 2 * 5
        assert sum("WARPGROUP.DEPBAR" in text for text in words) <= waits
        assert found[begin, end].spills <= 60
