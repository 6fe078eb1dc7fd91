"""Each peer of a benchmark is asked for the problem of the case, by the names of its own
interface; one that cannot take the case says why."""

import contextlib
import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias

import heedful
from heedful.bench.harness import peers
from heedful.bench.harness.cases import PAGE, Case, cases
from heedful.bench.harness.check import Checker
from heedful.bench.harness.exact import Results
from heedful.bench.harness.peers import PEERS, chosen_by, defaults, draw, find
from heedful.bench.harness.run import call_of
from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.launch.code.identity import kernel_key
from heedful.launch.prebuild import kernels
from heedful.launch.record import Entry
from support.runs import standin

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def dense(group: str = "forward", len_q=40, len_k=40, heads=(4, 2), **facts) -> Case:
    made: dict[str, Any] = {"dtype": "float32"} | facts
    return Case(group, AttentionProblem.dense(2, len_q, len_k, heads[0], heads[1], 16, **made))


def windowed(left: int = 7, right: int = 0) -> Case:
    return dense(mask=MaskSpec.of(False, (left, right)))


def packed(lengths=(9, 30, 1), causal=True) -> Case:
    longest = max(lengths)
    made: dict[str, Any] = {"dtype": "float32", "causal": causal}
    made |= {"total_q": sum(lengths), "total_k": sum(lengths)}
    problem = AttentionProblem.dense(len(lengths), longest, longest, 4, 2, 16, **made)
    return Case("shapes", problem, lengths=lengths)


def paged(causal: bool = False) -> Case:
    case = dense("overhead", 1, 4 * PAGE, head_dim_v=8, causal=causal)
    return dataclasses.replace(case, host=True, paged=True)


# By peer, what it takes beside dense inputs of 16 and 32 bits.
TAKES = {
    "heedful": {"packed", "windowed", "paged", "fp8"},
    "bf16": {"packed", "windowed", "fp8"},
    "flash": {"packed", "windowed"},
    "cudnn": set(),
    "efficient": set(),
    "math": set(),
    "sdpa": set(),
    "flex": set(),
    "flash_attn": {"packed", "windowed"},
    "fa3": {"packed", "windowed"},
    "fa4": {"packed", "windowed"},
    "flashinfer": {"paged"},
}
UNTAKEN = {
    "packed": (packed(), "does not take packed sequences"),
    "windowed": (windowed(), "does not take sliding windows"),
    "paged": (paged(), "is not timed on paged caches"),
    "fp8": (dense(dtype="float8_e4m3fn"), "is not timed on 8-bit inputs"),
}


@pytest.mark.parametrize("name", TAKES)
def test_a_peer_refuses_what_it_does_not_take(name):
    asked = []
    peer = dataclasses.replace(PEERS[name], unfit=lambda *what: asked.append(what))
    for feature, (case, reason) in UNTAKEN.items():
        taken = feature in TAKES[name]
        assert peer.why_not(case, CUDA) == (None if taken else reason)
        # What it takes, it may still have a reason against.
        assert asked == ([(case, CUDA)] if taken else [])
        asked.clear()
    assert peer.why_not(dense(), CPU) is None and len(asked) == 1


# As `heedful bench --list` says.
WORDS = {
    "heedful": "what the planner chooses",
    "bf16": "heedful on the same values in bfloat16, beside 8-bit inputs",
    "flash": "SDPA's FlashAttention-2",
    "cudnn": "SDPA's cuDNN",
    "efficient": "SDPA's memory-efficient kernel",
    "math": "SDPA's unfused math",
    "sdpa": "SDPA as it dispatches by itself",
    "flex": "FlexAttention, compiled for the shape",
    "flash_attn": "the flash-attn package",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4, CuTe DSL",
    "flashinfer": "FlashInfer, paged decode",
}


def test_peers_are_these_by_name_and_words():
    assert [(name, peer.name, peer.words) for name, peer in PEERS.items()] == [
        (name, name, words) for name, words in WORDS.items()
    ]
    assert list(WORDS) == list(TAKES)


ON_A_CPU = ["flash", "math", "sdpa"]


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math", "sdpa"])
def test_sdpa_on_a_cpu_has_some_kernels(name):
    own = None if name in ON_A_CPU else "has no CPU kernel"
    assert PEERS[name].why_not(dense(), CPU) == own
    assert PEERS[name].why_not(dense(), CUDA) is None


def test_no_cpu_kernel_takes_packed_sequences_or_windows():
    for case in (packed(), windowed()):
        assert PEERS["flash"].why_not(case, CPU) == "has no CPU kernel"
        assert PEERS["flash"].why_not(case, CUDA) is None


def test_sixteen_gibibytes_of_scores_are_the_most():
    for keys, reason in ((16384, None), (16385, "would hold 16 GiB of scores")):
        problem = AttentionProblem.dense(2, 16384, keys, 8, 8, 64)
        assert PEERS["math"].why_not(Case("forward", problem), CUDA) == reason
        # Others hold none.
        assert PEERS["sdpa"].why_not(Case("forward", problem), CUDA) is None


def test_flex_has_no_backward_on_a_cpu():
    backward = dataclasses.replace(dense(), direction="backward")
    flex = PEERS["flex"]
    assert flex.why_not(backward, CPU) == "has no backward on CPU"
    assert flex.why_not(dense(), CPU) is flex.why_not(backward, CUDA) is None


LIBRARIES = {
    "flash_attn": ("flash_attn", "flash_attn_func", dense()),
    "fa3": ("flash_attn_interface", "flash_attn_func", dense()),
    "fa4": ("flash_attn.cute", "flash_attn_func", dense()),
    "flashinfer": ("flashinfer", "BatchDecodeWithPagedKVCacheWrapper", paged()),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_or_broken_says_so(name, monkeypatch):
    (module, attribute, case), peer = LIBRARIES[name], PEERS[name]
    assert peer.why_not(case, CPU) == "has no CPU kernel"
    found = types.ModuleType(module)
    found.__dict__[attribute] = object()
    errors: list[Any] = [ImportError("no\nlibrary"), OSError(), found]
    asked = []

    def imported(wanted):
        asked.append(wanted)
        answer = errors.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(peers, "import_module", imported)
    assert peer.why_not(case, CUDA) == f"{module} does not import: no"
    assert peer.why_not(case, CUDA) == f"{module} does not import: OSError"
    assert peer.why_not(case, CUDA) is None
    del found.__dict__[attribute]
    errors.append(found)
    assert attribute in str(peer.why_not(case, CUDA))
    assert set(asked) == {module}


def test_flashinfer_decodes_one_token_over_pages():
    peer, reason = PEERS["flashinfer"], "timed on decode of one token over pages of 16 only"
    for case in (
        dense(len_q=1, len_k=64),
        dense("decode", 2, 64),
        dense("decode", 1, 65),
        dataclasses.replace(dense(), paged=True),
    ):
        assert peer.why_not(case, CPU) == reason
    for case in (dense("decode", 1, 64), paged()):
        assert peer.why_not(case, CPU) == "has no CPU kernel"


def test_heedful_gives_the_planners_reason():
    assert PEERS["heedful"].why_not(dense(), CPU) is None
    assert find("heedful:cpu").why_not(dense(), CPU) is None
    assert "portable" in str(find("heedful:portable").why_not(dense(), CPU))
    # SDPA has no log-sum-exp for a backward.
    grad = dense(needs_grad=True)
    assert "sdpa" in str(find("heedful:sdpa").why_not(grad, CPU))
    assert find("heedful:sdpa").why_not(dense(), CPU) is None


def test_values_in_bfloat16_are_for_8_bit_forwards_on_the_device():
    peer, fp8 = PEERS["bf16"], dense(dtype="float8_e4m3fn")
    assert peer.why_not(dense(), CPU) == "is for 8-bit inputs"
    assert peer.why_not(fp8, CPU) is None
    for more in ({"host": True}, {"direction": "backward"}):
        reason = peer.why_not(dataclasses.replace(fp8, **more), CPU)
        assert reason == "is timed on the device and forward alone"


def test_a_forced_backend_is_a_peer_of_its_own():
    forced = find("heedful:sdpa")
    assert (forced.name, forced.words) == ("heedful:sdpa", "the sdpa backend, forced")
    assert PEERS["heedful"].words == "what the planner chooses"
    assert {"pages", "packs", "windows", "fp8"} <= vars(forced).keys()
    assert all((forced.pages, forced.packs, forced.windows, forced.fp8))
    assert find("math") is PEERS["math"]
    with pytest.raises(ValueError) as raised:
        find("heedful-cpu")
    known = "heedful, bf16, flash, cudnn, efficient, math, sdpa, flex, flash_attn, fa3, fa4,"
    words = f"peers must be among {known} flashinfer or heedful:BACKEND, got 'heedful-cpu'"
    assert str(raised.value) == words


@pytest.mark.parametrize(
    ("case", "device", "without"),
    [
        (dense(), CUDA, {"sdpa"}),
        (dense(), CPU, {"sdpa", "flex", "math"}),
        (cases("overhead")[0], CUDA, set()),
        (cases("overhead")[0], CPU, {"flex", "math"}),
        (cases("overhead")[-1], CUDA, set(PEERS) - {"heedful", "sdpa"}),
    ],
)
def test_all_peers_take_part_but_those_that_say_nothing_new(case, device, without):
    assert [p.name for p in defaults(case, device)] == [n for n in PEERS if n not in without]


# What is drawn.


def test_inputs_have_the_cases_shapes_dtypes_and_scale():
    problem = AttentionProblem.dense(2, 300, 500, 4, 2, 64, dtype="bfloat16", head_dim_v=32)
    case = Case("forward", problem, input_scale=4.0)
    inputs = draw(case, CPU)
    assert [tuple(x.shape) for x in inputs] == [
        (2, 300, 4, 64),
        (2, 500, 2, 64),
        (2, 500, 2, 32),
        (2, 300, 4, 32),
    ]
    assert {x.dtype for x in inputs} == {torch.bfloat16}
    spreads = [float(x.float().std()) for x in inputs]
    assert spreads == pytest.approx([4.0, 4.0, 1.0, 1.0], rel=0.05)
    assert all(abs(float(x.float().mean())) < 0.1 for x in inputs)
    again, other = draw(case, CPU), draw(case, CPU, 1)
    assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(inputs, other, strict=True))


def test_packed_inputs_are_one_row_and_8_bit_ones_have_a_wider_output():
    assert [x.shape[:3] for x in draw(packed(), CPU)] == [(1, 40, n) for n in (4, 2, 2, 4)]
    inputs = draw(dense(dtype="float8_e4m3fn"), CPU)
    assert {x.dtype for x in inputs[:3]} == {torch.float8_e4m3fn}
    assert inputs.dout.dtype == torch.bfloat16


# What each is asked for. A result is right only if what was asked is the case's problem.


def result(peer, case: Case):
    with torch.device("meta"):  # where what is not put on the device of the inputs is
        inputs = draw(case, CPU)
        out = peer.make(case, inputs)(*inputs[:3])
        assert Checker(case, inputs).why_wrong(Results(out.detach())) is None
    return inputs


@pytest.fixture
def asked(monkeypatch):
    """Calls of heedful: (name, positional tensors, options)."""
    calls = []

    def noted(name: str):
        right = getattr(heedful, name)

        def call(*tensors, **options):
            calls.append((name, tensors, options))
            return right(*tensors, **options)

        return call

    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(heedful, name, noted(name))
    return calls


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize(
    ("case", "function", "options"),
    [
        (dense(), "flash_attn_func", {"causal": False}),
        (dense(causal=True), "flash_attn_func", {"causal": True}),
        (windowed(7, 3), "flash_attn_func", {"window_size": (7, 3)}),
        (dense("decode", 1), "flash_attn_with_kvcache", {"causal": False}),
        (dense("decode", 4, causal=True), "flash_attn_with_kvcache", {"causal": True}),
    ],
    ids=["dense", "causal", "window", "decode", "chunk"],
)
def test_heedful_is_called_as_a_user_would(case, function, options, backend, asked):
    inputs = result(find(f"heedful:{backend}") if backend else PEERS["heedful"], case)
    ((name, tensors, given),) = asked
    assert name == function and given == options | {"backend": backend}
    assert all(a is b for a, b in zip(tensors, inputs[:3], strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_heedful_is_given_packed_sequences_by_their_starts(causal, asked):
    result(find("heedful:cpu"), packed(causal=causal))
    ((name, tensors, given),) = asked
    assert name == "flash_attn_varlen_func" and [t.ndim for t in tensors] == [3, 3, 3]
    for side in "qk":
        starts = given.pop(f"cu_seqlens_{side}")
        assert starts.tolist() == [0, 9, 39, 40] and starts.dtype == torch.int32
        assert given.pop(f"max_seqlen_{side}") == 30
    assert given == {"causal": causal, "backend": "cpu"}


@pytest.mark.parametrize("causal", [False, True])
def test_heedful_reads_a_cache_through_its_pages_which_are_made_once(causal, asked):
    case = paged(causal)
    inputs = draw(case, CPU)
    with torch.device("meta"):
        forward = find("heedful:cpu").make(case, inputs)
    for _ in range(2):
        out = forward(*inputs[:3])
        assert Checker(case, inputs).why_wrong(Results(out)) is None
    (_, first, given), (_, second, _) = asked
    assert first[0] is inputs.q and first[1] is second[1] and first[2] is second[2]
    for pages, whole in zip(first[1:], inputs[1:3], strict=True):
        assert pages.shape == (8, PAGE, 2, whole.shape[-1])
        assert pages.data_ptr() == whole.data_ptr()
    assert given.pop("block_table").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert given.pop("cache_seqlens").tolist() == [64, 64]
    assert given == {"causal": causal, "backend": "cpu"}
    others = draw(case, CPU, 1)
    assert Checker(case, others).why_wrong(Results(forward(*others[:3]))) is None


def test_values_in_bfloat16_are_the_8_bit_ones(asked):
    case = dense(dtype="float8_e4m3fn", causal=True)
    inputs = result(PEERS["bf16"], case)
    ((_, tensors, given),) = asked
    assert given == {"causal": True, "backend": None}
    for wide, narrow in zip(tensors, inputs[:3], strict=True):
        assert wide.dtype == torch.bfloat16 and torch.equal(wide, narrow.to(torch.bfloat16))


@pytest.fixture
def sdpa(monkeypatch):
    """Calls of SDPA: (backends forced, options)."""
    calls, forced = [], []
    right = F.scaled_dot_product_attention

    @contextlib.contextmanager
    def kernel(backend):
        forced.append(backend)
        yield
        forced.remove(backend)

    def call(q, k, v, **options: Any):
        calls.append((list(forced), dict(options)))
        assert q.shape[1] == 4 and k.shape[1] == v.shape[1]  # heads first
        mask = options.get("attn_mask")
        if isinstance(mask, CausalBias):
            options["attn_mask"] = mask._materialize()
        return right(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", call)
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", kernel)
    return calls


FORCED = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "sdpa": [],
}


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_is_asked_for_the_mask_and_the_groups_on_its_backend(name, heads, causal, sdpa):
    result(PEERS[name], dense(heads=heads, causal=causal))
    ((forced, options),) = sdpa
    assert forced == FORCED[name]
    want = {"enable_gqa": True} if heads == (4, 2) else {}
    assert options == want | ({"is_causal": True} if causal else {})


@pytest.mark.parametrize("name", FORCED)
def test_a_causal_mask_of_fewer_queries_ends_at_the_last_key(name, sdpa):
    result(PEERS[name], dense(len_q=20, len_k=50, heads=(4, 4), causal=True))
    ((_, options),) = sdpa
    mask = options["attn_mask"]
    # Each backend has a form of its mask that it takes fastest: a tensor of ones for some.
    assert isinstance(mask, CausalBias) == (name not in ("cudnn", "math"))
    assert list(options) == ["attn_mask"]
    full = dense(len_q=20, len_k=50, heads=(4, 4))
    result(PEERS[name], full)
    assert sdpa[1][1] == {}


def by_flash_attention(calls):
    """What aten's FlashAttention computes, by heedful."""

    def kernel(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, debug, **more):
        calls.append(((starts_q, starts_k, longest_q, longest_k), more))
        assert dropout == 0.0 and debug is False
        window = more.get("window_size_left", -1), more.get("window_size_right", -1)
        if starts_q is None:
            made = heedful.flash_attn_func(q, k, v, causal=causal, window_size=window)
        else:
            made = heedful.flash_attn_varlen_func(
                q, k, v, starts_q, starts_k, longest_q, longest_k, causal=causal
            )
        return made, None

    return kernel


def test_flash_attention_itself_is_asked_where_sdpa_has_no_word(monkeypatch):
    calls: list = []
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", by_flash_attention(calls))
    result(PEERS["flash"], windowed(7, 3))
    result(PEERS["flash"], packed())
    result(PEERS["flash"], packed(causal=False))
    (window, more), (lengths, none), _ = calls
    assert window == (None, None, 40, 40)
    assert more == {"window_size_left": 7, "window_size_right": 3} and none == {}
    assert lengths[0].tolist() == lengths[1].tolist() == [0, 9, 39, 40]
    assert lengths[2:] == (30, 30)


def in_plain_torch(q, k, v, block_mask, enable_gqa):
    """What FlexAttention computes, uncompiled."""
    assert enable_gqa is (q.shape[1] > k.shape[1])
    mask = None
    if block_mask is not None:
        assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
        assert block_mask.kv_num_blocks.device == q.device
        rows, cols = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        mask = block_mask.mask_mod(0, 0, rows[:, None], cols)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize("facts", [{}, {"causal": True}, {"causal": True, "len_q": 20}], ids=str)
def test_flex_is_compiled_for_the_shape_with_the_cases_mask(heads, facts, monkeypatch):
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    log = []

    def compiled(function, dynamic):
        assert function is flex_attention and dynamic is False
        log.append("compile")
        return in_plain_torch

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: log.append("reset"))
    with config.patch(donated_buffer=True):
        result(PEERS["flex"], dense(heads=heads, len_k=60, **facts))
        # A backward is timed many times on one graph.
        assert config.donated_buffer is False
    assert log == ["reset", "compile"]


def library(name: str, calls: list, beside: bool) -> types.ModuleType:
    """A flash-attn package that notes its calls; beside: a log-sum-exp lies beside each output."""

    def function(right):
        def call(*tensors, **options):
            calls.append((right.__name__, options))
            out = right(*tensors, **options)
            return (out, None) if beside else out

        return call

    made = types.ModuleType(name)
    for one in (heedful.flash_attn_func, heedful.flash_attn_varlen_func):
        made.__dict__[one.__name__] = function(one)
    return made


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", ["flash_attn", "fa3", "fa4"])
def test_flash_attn_packages_are_called_by_their_own_interface(name, beside, monkeypatch):
    calls: list = []
    module = LIBRARIES[name][0]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, module, library(module, calls, beside))
    for case in (dense(), dense(causal=True), windowed(7, 3), packed()):
        result(PEERS[name], case)
    (_, plain), (_, causal), (_, window), (function, lengths) = calls
    assert plain == {"causal": False} and causal == {"causal": True}
    assert window == {"causal": False, "window_size": (7, 3)}
    assert function == "flash_attn_varlen_func" and lengths["causal"] is True
    assert set(lengths) - {"causal"} == {
        f"{what}_{side}" for what in ("cu_seqlens", "max_seqlen") for side in "qk"
    }


def test_flashinfer_is_planned_once_for_the_pages_of_a_cache(monkeypatch):
    plans = []

    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores):
            assert use_tensor_cores  # two heads share keys
            assert layout == "NHD" and workspace.dtype == torch.uint8 and workspace.device == CPU
            assert workspace.numel() == 256 * 2**20  # what its documentation asks for

        def plan(self, steps, pages, last, heads_q, heads_k, dim, page, **dtypes):
            plans.append((heads_q, heads_k, dim, page, dtypes))
            self.table = pages.view(len(last), -1)
            assert steps.tolist() == [0, 4, 8] and pages.dtype == steps.dtype == torch.int32
            self.lengths = (steps.diff() - 1) * page + last
            assert self.lengths.tolist() == [64, 64] and last.dtype == torch.int32

        def run(self, q, cache):
            assert q.shape == (2, 4, 16)
            return heedful.flash_attn_with_kvcache(
                q[:, None], *cache, cache_seqlens=self.lengths, block_table=self.table
            )[:, 0]

    module = types.ModuleType("flashinfer")
    module.__dict__["BatchDecodeWithPagedKVCacheWrapper"] = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    result(PEERS["flashinfer"], dense("decode", 1, 64, dtype="bfloat16"))
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    assert plans == [(4, 2, 16, PAGE, dtypes)]


@pytest.mark.parametrize("name", ["heedful", "heedful:hopper+draws=1"])
def test_kernels_compiled_beforehand_are_those_that_calls_load(name):
    pytest.importorskip("triton")
    problem = AttentionProblem.dense(2, 300, 300, 4, 2, 128, causal=True, needs_grad=True)
    case = Case("backward", problem, "backward")
    peer = find(name)
    with standin.gpu("H200") as gpu:
        inputs = draw(case, CPU)
        call_of(case, peer.make(case, inputs), inputs).run()
        calls: list[Any] = [getattr(made, "call", None) for made in gpu.loads]
        loaded = {kernel_key(call, "sm_90") for call in calls}
    spec, backend = by_name("H200"), chosen_by(peer.name)
    entries = [Entry(problem, direction, None, spec) for direction in ("forward", "backward")]
    assert loaded and loaded == set(kernels(entries, [spec], backend)[0])
