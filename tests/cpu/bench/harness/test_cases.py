"""What a benchmark times is what its tables say, in the words and numbers of those tables."""

import dataclasses
from unittest import mock

import pytest
import torch

from heedful.bench.harness.cases import GROUPS, PAGE, Case, cases
from heedful.bench.harness.peers import find
from heedful.cli.bench import _compile_first
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.launch import prebuild
from support.runs import standin

DENSE = [
    f"{size} h{heads} d{dim}"
    for dim, heads in ((64, "32/32"), (128, "16/16"), (256, "8/8"))
    for size in ("16x1024x1024", "4x4096x4096", "1x16384x16384")
] + ["4x8192x8192 h64/8 d128"]
FEW = ["4x8192x8192 h32/8", "1x8192x8192 h32/8", "1x8192x8192 h8/2"]
FEW = [f"{shape} d128 bfloat16" for shape in FEW]
OTHER = ["h32/4 d128 bfloat16", "h16/16 d96 bfloat16", "h8/8 d192 bfloat16"]
OTHER += ["h16/16 d192/128 bfloat16", "h16/16 d128 float16"]
MODELS = ["h32/32 d64 bfloat16", "h16/16 d128 bfloat16", "h8/8 d256 bfloat16"]
SMALL = ["1x512x512 h8/8 d64", "1x2048x2048 h4/4 d64", "2x1024x1024 h8/2 d128"]
STEPS = ["1x1x8192", "1x1x131072", "8x1x8192", "64x1x8192", "128x1x2048"]


def both(shapes: list[str], words: str) -> list[str]:
    """Full and causal cases of these shapes."""
    return [f"{words}{shape}{mask}" for shape in shapes for mask in ("", " causal")]


# By group, the names of its cases: figures of a name are compared over the years.
NAMES = {
    "forward": both([f"{shape} bfloat16" for shape in DENSE], "forward "),
    "backward": both([f"{shape} bfloat16" for shape in DENSE], "backward "),
    "kv_heads": both(FEW, "backward "),
    "splits": [
        "forward 1x40000x40000 h2/2 d64 bfloat16",
        "forward 1x128x65535 h16/16 d64 bfloat16",
        "forward 1x32768x32768 h8/8 d64 bfloat16",
        "forward 8x8192x8192 h16/16 d64 bfloat16",
    ],
    "shapes": [
        *both(OTHER, "forward 4x4096x4096 "),
        *(f"forward 1x16384x16384 {model} window 1024" for model in MODELS),
        *(f"forward 64 packed, 52439 tokens, {model} causal" for model in MODELS),
    ],
    "decode": [
        *(f"forward {size} h32/8 d128 bfloat16" for size in STEPS),
        "forward 16x4x16384 h64/8 d128 bfloat16 causal",
    ],
    "overhead": [
        "host forward 1x128x128 h8/8 d64 bfloat16",
        "host forward with grad 1x128x128 h8/8 d64 bfloat16",
        "host backward 1x128x128 h8/8 d64 bfloat16",
        "host forward over pages 4x1x256 h8/8 d64 bfloat16",
        "host forward compiled 1x128x128 h8/8 d64 bfloat16",
    ],
    "cpu": [
        *both([f"{shape} bfloat16" for shape in SMALL], "forward "),
        *both([f"{shape} bfloat16" for shape in SMALL], "backward "),
    ],
}


def test_every_group_has_a_list():
    assert list(GROUPS) == list(NAMES)


@pytest.mark.parametrize("group", NAMES)
def test_a_groups_cases_are_those_of_its_table(group):
    assert [case.name for case in cases(group)] == NAMES[group]


@pytest.mark.parametrize("group", NAMES)
def test_a_case_is_what_its_name_says(group):
    for case in cases(group):
        p, words = case.problem, case.name
        assert case.group == group
        assert case.host == words.startswith("host ")
        assert case.paged == ("over pages" in words)
        assert case.compiled == ("compiled" in words)
        assert (case.direction == "backward") == ("backward" in words)
        assert case.direction in ("forward", "backward")
        assert case.grad == (" with grad" in words or "host backward" in words)
        # What is asked of a kernel: a log-sum-exp, or a backward, only where a gradient follows.
        assert p.needs_grad == (case.grad or case.direction == "backward")
        assert (p.mask.right == 0) == ("causal" in words or "window" in words)
        assert p.mask.left == (1023 if "window" in words else -1)
        assert case.is_windowed == ("window" in words)
        assert bool(case.lengths) == ("packed" in words)
        assert p.kv_dtype == p.dtype
        if not case.lengths:
            assert (p.total_q, p.total_k) == (None, None)
        if case.paged:
            assert p.seqlen_k % PAGE == 0


def test_packed_sequences_are_many_of_unlike_length():
    for case in cases("shapes")[-3:]:
        p, lengths = case.problem, case.lengths
        assert p.batch == len(lengths) == 64
        assert p.seqlen_q == p.seqlen_k == max(lengths)
        assert p.total_q == p.total_k == sum(lengths) == case.starts[-1]
        assert case.starts[:3] == (0, lengths[0], lengths[0] + lengths[1])
        assert len(case.starts) == 65
        # Log-normal: the median is 512, and a standard deviation is a factor of e.
        ordered = sorted(lengths)
        assert 400 < ordered[32] < 660
        assert 120 < ordered[10] < 300 and 900 < ordered[54] < 2100
        assert ordered[0] >= 1 and ordered[-1] <= 16384


def test_another_dtype_and_scale_reach_every_case_that_names_none():
    for group in GROUPS:
        for plain, other in zip(cases(group), cases(group, "float32", 4.0), strict=True):
            named = plain.problem.dtype == "float16"
            assert other.problem.dtype == ("float16" if named else "float32")
            assert other.input_scale == 4.0 and plain.input_scale == 1.0
            assert other.name.endswith(" inputs x4") and "inputs" not in plain.name


def test_an_unknown_group_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="cases must be among forward, .*cpu, got 'all'"):
        cases("all")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_work_is_counted_over_the_pairs_and_both_products(direction):
    def flops(len_q, len_k, causal, dim_v=24):
        problem = AttentionProblem.dense(3, len_q, len_k, 6, 2, 16, causal=causal, head_dim_v=dim_v)
        return Case("forward", problem, direction).flops()

    times = 2.5 if direction == "backward" else 1
    assert flops(50, 70, False) == times * 3 * 6 * 50 * 70 * 2 * (16 + 24)
    # A causal mask hides half of a square; of any other shape papers count all.
    assert flops(50, 50, True) == times * 3 * 6 * 50 * 50 / 2 * 2 * (16 + 24)
    assert flops(50, 70, True) == flops(50, 70, False)
    assert flops(50, 70, False, 16) == times * 4 * 3 * 6 * 50 * 70 * 16


def test_keys_and_values_are_counted_once_in_their_own_size():
    problem = AttentionProblem.dense(3, 5, 70, 6, 2, 16, head_dim_v=24)
    assert Case("decode", problem).kv_bytes() == 3 * 70 * 2 * (16 + 24) * 2
    wide = dataclasses.replace(problem, dtype="float32", kv_dtype="float32")
    assert Case("decode", wide).kv_bytes() == 3 * 70 * 2 * (16 + 24) * 4
    narrow = dataclasses.replace(problem, kv_dtype="int8")
    assert Case("decode", narrow).kv_bytes() == 3 * 70 * 2 * (16 + 24)


def test_packed_keys_and_values_are_counted_by_token():
    problem = AttentionProblem.dense(3, 70, 70, 6, 2, 16, total_q=100, total_k=100)
    case = Case("shapes", problem, lengths=(9, 70, 21))
    assert case.kv_bytes() == 100 * 2 * (16 + 16) * 2


def test_a_name_tells_what_sets_a_case_apart():
    plain = Case("forward", AttentionProblem.dense(2, 30, 50, 6, 2, 16, dtype="float32"))
    assert plain.name == "forward 2x30x50 h6/2 d16 float32" and plain.direction == "forward"
    assert dataclasses.replace(plain, input_scale=0.5).name == plain.name + " inputs x0.5"
    # Gradients tell forwards of the host apart: a backward always has them.
    graph = dataclasses.replace(plain, grad=True)
    assert graph.name == plain.name
    assert dataclasses.replace(graph, host=True).name.startswith("host forward with grad 2x30")
    back = dataclasses.replace(graph, host=True, direction="backward")
    assert back.name == "host backward 2x30x50 h6/2 d16 float32"
    every = dataclasses.replace(plain, host=True, paged=True, compiled=True)
    assert every.name.startswith("host forward over pages compiled 2x30x50")
    window = dataclasses.replace(plain.problem, mask=MaskSpec.of(False, (0, 4)))
    assert Case("forward", window).shape.endswith("float32 window 1")
    assert Case("forward", window).is_windowed and not plain.is_windowed


@pytest.mark.parametrize("options", ["draws=0", "draws=0+last_waves=0"])
def test_kernels_of_all_named_peers_are_compiled_beforehand(options):
    pytest.importorskip("triton")
    peers = [find("heedful"), find(f"heedful:hopper+{options}"), find("cudnn")]
    with standin.gpu("H200"), mock.patch.object(prebuild, "compile_all") as compiled:
        _compile_first(cases("kv_heads"), peers, torch.device("cpu"), 3)
    (calls, jobs), _ = compiled.call_args
    assert jobs == 3
    made = [c.arguments for c, _ in calls if c.kernel.function == "backward"]
    # Full, causal and causal in splits of key tiles, drawn and not, and full whose tail is in
    # splits, drawn; lengths and heads are numbers.
    assert len(made) == 7
    assert sum("params.order.tile_counter" in arguments for arguments in made) == 4
    assert sum("params.order.parts.partials" in arguments for arguments in made) == 3
    assert sum("params.order.parts.whole" in arguments for arguments in made) == 1
