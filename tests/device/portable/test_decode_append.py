"""A decode that appends keys and values itself reads what it wrote, whichever program has them."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import heedful.torch as heedful
from heedful.core.registry.by_hand import forced
from heedful.launch.program import programs
from heedful.torch.eager.calls import CALLS
from support.captures import graph_capture
from support.hopper.device import DECODES, ON_HOPPER, WITH_TRITON_3_9

pytestmark = pytest.mark.gpu

CAPACITY = 4096


@st.composite
def steps(draw) -> dict[str, Any]:
    """What a step has: sizes, and options of the call."""
    return {
        "batch": draw(st.integers(1, 9)),
        "new": draw(st.sampled_from([1, 1, 2, 5, 16, 40, 300])),
        "heads": draw(st.sampled_from([(8, 8), (32, 8), (12, 2), (16, 1)])),
        "dim": draw(st.sampled_from([64, 96, 128, 256])),
        "rotary": draw(st.sampled_from([None, "pairs", "halves"])),
        "page_size": draw(st.sampled_from([0, 0, 1, 16, 64])),
        "pads": draw(st.booleans()),
        "rows": draw(st.booleans()),
        "window": draw(st.sampled_from([None, None, (20, 0), (100, 0)])),
        "causal": draw(st.booleans()),
        "splits": draw(st.sampled_from([0, 0, 1, 7])),
        "seed": draw(st.integers(0, 1 << 20)),
    }


def call_of(x: dict[str, Any], q_len: int) -> dict[str, Any]:
    """The arguments of a step."""
    torch.manual_seed(x["seed"])
    batch, new, dim, page_size = x["batch"], x["new"], x["dim"], x["page_size"]
    heads_q, heads_k = x["heads"]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    pages = batch * CAPACITY // page_size if page_size else 0
    held = (pages, page_size) if page_size else (batch + 2 * x["rows"], CAPACITY)
    made: dict[str, Any] = {
        "q": drawn(batch, q_len, heads_q, dim),
        **{f"{name}_cache": drawn(*held, heads_k, dim) for name in "kv"},
        **{name: drawn(batch, new, heads_k, dim) for name in "kv"},
    }
    lengths = torch.randint(0, CAPACITY - new + 1, (batch,)).int()
    lengths[torch.rand(batch) < 0.1] = -1
    if x["pads"]:
        made["cache_leftpad"] = (torch.rand(batch) * lengths.clamp(min=0) / 2).int().cuda()
    made["cache_seqlens"] = lengths.cuda()
    if page_size:
        made["block_table"] = torch.randperm(pages).int().view(batch, -1).cuda()
    elif x["rows"]:
        made["cache_batch_idx"] = torch.randperm(batch + 2)[:batch].int().cuda()
    if x["rotary"]:
        made |= {name: drawn(CAPACITY + new, dim // 4) for name in ("rotary_cos", "rotary_sin")}
        made["rotary_interleaved"] = x["rotary"] == "pairs"
    window = {} if x["window"] is None else {"window_size": x["window"]}
    return {**made, **window, "causal": x["causal"], "num_splits": x["splits"]}


def results(call: dict[str, Any], backend: str) -> list[torch.Tensor]:
    """Caches, out and lse of a step on caches of its own."""
    own = {f"{name}_cache": call[f"{name}_cache"].clone() for name in "kv"}
    out, lse = heedful.flash_attn_with_kvcache(
        **{**call, **own}, return_softmax_lse=True, backend=backend
    )
    return [*own.values(), out, lse]


def check(x: dict[str, Any], q_len: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against an append and a decode in turn, bit for bit."""
    call = call_of(x, q_len)
    found, results_of = [], []
    for make, kernels in ((programs.step, 1), (programs.in_turn, 2)):

        def made(*given, make=make, kernels=kernels, **named):
            program = make(*given, **named)
            assert len(program.calls) == kernels
            found.append(program)
            return program

        with monkeypatch.context() as patch:
            patch.setattr(programs, "step", made)
            CALLS.clear()
            results_of.append(results(call, backend))
    CALLS.clear()
    assert len(found) == 2
    ours, theirs = results_of
    for name, one, other in zip(("k", "v", "out", "lse"), ours, theirs, strict=True):
        assert torch.equal(one, other), name
    assert not torch.equal(ours[0], call["k_cache"]) or bool((call["cache_seqlens"] < 0).all())


@pytest.mark.parametrize("backend", DECODES)
@pytest.mark.parametrize("q_len", [1, 4, 16])
@settings(max_examples=20)
@given(x=steps())
def test_one_kernel_does_what_two_do(q_len, backend, x):
    heads_q, heads_k = x["heads"]
    assume(q_len * heads_q <= 64 * heads_k)  # more rows have another kernel
    if backend == "hopper_decode":
        # Such pages have the other kernel.
        assume(x["page_size"] != 1 and not (x["page_size"] and x["pads"]))
    with pytest.MonkeyPatch.context() as patch:
        check(x, q_len, backend, patch)


@pytest.mark.parametrize(
    "q_len", [pytest.param(n, marks=[*ON_HOPPER, WITH_TRITON_3_9]) for n in (1, 4)]
)
@settings(max_examples=12)
@given(x=steps(), dim=st.sampled_from((320, 512)))
def test_one_kernel_of_wide_heads_does_what_two_do(q_len, dim, x):
    heads_q, heads_k = x["heads"]
    assume(q_len * heads_q <= 32 * heads_k)
    assume(x["page_size"] != 1 and not (x["page_size"] and x["pads"]))
    with pytest.MonkeyPatch.context() as patch:
        check(x | {"dim": dim}, q_len, forced("decode/wide"), patch)


def test_a_replayed_graph_appends_where_lengths_say():
    x = {"batch": 4, "new": 3, "heads": (32, 8), "dim": 128, "rotary": "halves", "page_size": 16}
    x |= {"pads": False, "rows": False, "window": None, "causal": True, "splits": 0, "seed": 1}
    call = call_of(x, 3)
    heedful.flash_attn_with_kvcache(**call)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = heedful.flash_attn_with_kvcache(**call)
    for lengths in ([0, 17, 4093, -1], [4000, -1, 3, 900]):
        call["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        before = {f"{name}_cache": call[f"{name}_cache"].clone() for name in "kv"}
        graph.replay()
        want = heedful.flash_attn_with_kvcache(**{**call, **before})
        assert torch.equal(out, want)
        for name, cache in before.items():
            assert torch.equal(call[name], cache)
