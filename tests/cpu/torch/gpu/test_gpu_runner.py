"""The public functions through the runner that serves GPUs, its kernels interpreted: see
`support.runs.standin`."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import heedful
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.torch import attention_backward
from heedful.torch.eager import backends
from support.problems import budget
from support.problems.cases import Case, build
from support.problems.grids import in_turns
from support.runs import api, standin
from support.runs.gradients import keywords_of
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

BASE = Case(seqlen_q=19, seqlen_k=27, head_dim=16, heads_q=4)
CASES = (
    replace(BASE, causal=True),
    replace(BASE, layout="packed", window=(9, 3), sink=True),
    replace(BASE, bias="hqk", alibi="bh", causal=True),
    replace(BASE, varlen="qk", used="qk", batch=3, causal=True),
    replace(BASE, dropout_p=0.3, return_probs=True),
    replace(BASE, page_size=4, backward=False),
    replace(BASE, varlen="qk", page_size=4, batch=3, causal=True),
    replace(BASE, varlen="q", page_size=7, used="k", layout="packed", sink=True),
    replace(
        BASE, varlen="q", page_size=64, used="qk", bias="hk", dropout_p=0.3, deterministic=True
    ),
    replace(BASE, page_size=4, backward=False, num_splits=3, seqlen_k=70, leftpad_k=True),
    replace(BASE, kv_dtype="int8", kv_group=8, kv_shift=True, backward=False),
)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_are_within_the_budget(case):
    built = build(case)
    with standin.gpu(interprets=True, tiles=(16, 16)) as gpu:
        budget.check(built, api.results(built))
    assert gpu.launches


@interpreted
@pytest.mark.parametrize("case", in_turns(CASES[:4], each=2), ids=str)
def test_kernels_write_gradients_into_rows_with_gaps(case):
    built = build(replace(case, deterministic=True))
    keywords = keywords_of(built) | {"dlse": built.dlse}
    with standin.gpu(interprets=True, tiles=(16, 16)) as gpu:
        out, lse, *_ = api.call(built, api._leaves(replace(built, dout=None)))
        tensors: Any = (built.dout, *built.x[:3], out, lse)
        want: Any = attention_backward(*tensors, **keywords)
        for _ in range(2):
            wider = ((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 8) for x in built.x[:3])
            made = [torch.full(shape, torch.nan) for shape in wider]
            into = [x[..., :-1, :-8] for x in made]
            got: Any = attention_backward(*tensors, **keywords, into=into)
            for place, grad, true in zip(into, got, want, strict=False):
                assert grad is place and torch.equal(place, true)
            assert all(x[..., -1, :].isnan().all() and x[..., -8:].isnan().all() for x in made)
        addresses = {value for launch in gpu.launches for value in launch.arguments.values()}
        # Operands with a bias are adapted first; gradients are then copied.
        assert bool(case.bias) or all(place.data_ptr() in addresses for place in into)


def test_a_forward_that_was_bound_ahead_is_not_bound_again():
    """By a caller that writes to a cache first: what cannot be compiled fails before that."""
    built = build(replace(BASE, backward=False))
    with standin.gpu() as gpu:
        runner = backends.prepare(built.problem, built.x, None)
        runner.bind()
        loaded = len(gpu.loads)
        assert loaded and not gpu.launches
        runner.bind()
        runner.forward(built.x)
        assert len(gpu.loads) == loaded and gpu.launches


@interpreted
def test_appending_to_a_cache_and_attending_is_what_the_cpu_does():
    values = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(shape, generator=values)

    def step(backend):
        rows, values = k_cache.clone(), v_cache.clone()
        out = heedful.flash_attn_with_kvcache(
            *(q, rows, values, k, v, cos, sin, lengths),
            block_table=table,
            causal=True,
            backend=backend,
        )
        return out, rows, values

    q, k, v = some(2, 3, 4, 16), some(2, 3, 2, 16), some(2, 3, 2, 16)
    k_cache, v_cache = some(8, 4, 2, 16), some(8, 4, 2, 16)
    cos, sin = some(16, 8), some(16, 8)
    lengths = torch.tensor([5, 0], dtype=torch.int32)
    table = torch.tensor([[6, 1, 3], [0, 7, 2]], dtype=torch.int32)
    want = step("cpu")
    with standin.gpu(interprets=True):
        got = step(None)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=8 * torch.finfo(torch.float32).eps)


def columns_apart(t: torch.Tensor) -> torch.Tensor:
    """The same values; the last dim has stride 2."""
    return torch.stack([t, t], -1)[..., 0]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ANGLE = torch.rand(40, 4)
ROTARY = {"rotary_cos": ANGLE.cos(), "rotary_sin": ANGLE.sin()}
TURNED = {"rotary_cos": columns_apart(ANGLE.cos()), "rotary_sin": columns_apart(ANGLE.sin())}
PREFIX = {"shared_prefix": (torch.rand(5, 2, 16), torch.rand(5, 2, 16)), "causal": True}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int": {"cache_seqlens": 3},
    "no sequence": {"cache_seqlens": ints(-1, 5)},
    "rows": {"cache_batch_idx": ints(2, 0), "cache_leftpad": ints(1, 2)},
    "pads apart": {"cache_leftpad": columns_apart(ints(1, 2))},
    "rotary": ROTARY,
    "rotary halves": {**ROTARY, "rotary_interleaved": False},
    "rotary causal": {**ROTARY, "causal": True},
    "rotary causal halves": {**ROTARY, "causal": True, "rotary_interleaved": False},
    "rotary window": {**TURNED, "window_size": (3, 0)},
    "prefix": {**PREFIX, "return_softmax_lse": True},
    "prefix rotary": {**PREFIX, **ROTARY, "sink": torch.rand(4)},
    "pages": {"block_table": ints(4, 1, 5, 0, 3, 2).view(2, 3), **ROTARY, "causal": True},
    "nothing new": {"k": torch.rand(2, 0, 2, 16), "v": torch.rand(2, 0, 2, 16), **ROTARY},
}


@interpreted
@pytest.mark.parametrize("name, strided", in_turns(STEPS, (False, True)), ids=str)
def test_a_step_over_a_cache_is_what_the_cpu_does(name, strided):
    """Again, too, on other numbers."""
    values = torch.Generator().manual_seed(0)
    keywords = dict(STEPS[name])
    pages = "block_table" in keywords
    rows = 6 if pages else 3 if "cache_batch_idx" in keywords else 2
    capacity = 4 if pages else 12

    def step(given, caches, backend):
        stored = [cache.clone() for cache in caches]
        out = heedful.flash_attn_with_kvcache(
            given["q"], *stored, **{n: given[n] for n in given if n != "q"}, backend=backend
        )
        return *(out if isinstance(out, tuple) else (out,)), *stored

    calls = []
    for _ in range(2):
        given = {n: torch.randn(2, 2, 2, 16, generator=values) for n in "kv"}
        given["q"] = torch.randn(2, 2, 4, 16, generator=values)
        given = {n: columns_apart(t) if strided else t for n, t in given.items()}
        given |= {"cache_seqlens": ints(4, 0), **keywords}
        caches = [torch.randn(rows, capacity, 2, 16, generator=values) for _ in "kv"]
        calls.append((given, caches))
    wants = [step(given, caches, "cpu") for given, caches in calls]
    with standin.gpu(interprets=True, tiles=(16, 16)):
        gots = [step(given, caches, None) for given, caches in calls]
    for got, want in zip(gots, wants, strict=True):
        for ours, theirs in zip(got, want, strict=True):
            # As many roundings as a score has terms, and its weights as keys.
            atol = 64 * torch.finfo(torch.float32).eps * theirs.abs().nan_to_num(posinf=0).max()
            assert torch.allclose(ours, theirs, rtol=0, atol=atol.item())


def shared_pages(grad: str = "qkv") -> Any:
    """Two sequences that begin with the same two pages, and numbers of no page past their ends."""
    values = torch.Generator().manual_seed(0)
    shapes = ((9, 4, 16), (6, 4, 2, 16), (6, 4, 2, 16))
    q, k, v = (torch.randn(shape, generator=values) for shape in shapes)
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        tensor.requires_grad_(name in grad)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    used = torch.tensor([10, 13], dtype=torch.int32)
    table = torch.tensor([[3, 1, 4, -7], [3, 1, 0, 5]], dtype=torch.int32)
    return (q, k, v), (bounds, None, 5, 16), {"seqused_k": used, "block_table": table}


@interpreted
@pytest.mark.parametrize("grad", ["qkv", "q", "kv", "qv"])
def test_a_page_that_sequences_share_gets_the_sum_of_their_gradients(grad):
    tensors, lengths, keywords = shared_pages(grad)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]

    def attend(backend):
        out = heedful.flash_attn_varlen_func(
            *tensors, *lengths, causal=True, backend=backend, **keywords
        )
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    want = attend("cpu")
    with standin.gpu(interprets=True) as gpu:
        got = attend(None)
    assert gpu.launches
    for ours, theirs in zip(got, want, strict=True):
        # Sums of 13 keys or of 9 queries, each rounded to float32 a few times.
        atol = 64 * torch.finfo(torch.float32).eps * theirs.abs().max().item()
        assert torch.allclose(ours, theirs, rtol=0, atol=atol)


@interpreted
def test_no_gradient_the_size_of_the_cache_is_made_where_only_queries_want_one():
    tensors, lengths, keywords = shared_pages("q")
    _, k, v = tensors
    with standin.gpu(interprets=True):
        out = heedful.flash_attn_varlen_func(*tensors, *lengths, **keywords)
        with Shapes() as made:
            out.sum().backward()
    assert made.shapes and k.shape not in made.shapes and v.shape not in made.shapes


class Shapes(TorchDispatchMode):
    """The shapes of all that operations return."""

    def __init__(self):
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tensor.shape)
        return made


@interpreted
@pytest.mark.parametrize("num_splits", [1, 2])
def test_decoding_from_a_latent_cache_is_within_the_budget(num_splits):
    """Keys of 576, the values their first 512 (MLA): appended once, read from where they are."""
    values = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 4, 576, generator=values).half()
    new = torch.randn(2, 1, 1, 576, generator=values).half()
    pages = torch.randn(12, 16, 1, 576, generator=values).half()
    table = torch.randperm(12, generator=values).view(2, 6).int()
    lengths = torch.tensor([70, 15], dtype=torch.int32)

    def step(backend):
        cache = pages.clone()
        out = heedful.flash_attn_with_kvcache(
            *(q, cache, cache[..., :512], new, new[..., :512]),
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
            num_splits=num_splits,
            backend=backend,
        )
        return out, cache

    _, want = step("cpu")
    with standin.gpu(interprets=True) as gpu:
        out, cache = step(None)
    assert gpu.launches and torch.equal(cache, want)
    x = Operands(q, cache, cache[..., :512], seqused_k=lengths + 1, block_table=table)
    sizes = {"head_dim_v": 512, "page_size": 16, "used_k": True, "causal": True}
    problem = AttentionProblem.dense(2, 1, 96, 4, 1, 576, "float16", **sizes)
    api.assert_agrees(out, problem, x)


def call_with_slopes(slopes):
    q, k, v = (torch.arange(2 * 19 * 4 * 16).view(2, 19, 4, 16).sin() + i for i in range(3))
    return heedful.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)


def call_with_a_tree(tree):
    q, k, v = (torch.arange(2 * 19 * 4 * 16).view(2, 19, 4, 16).sin() + i for i in range(3))
    return heedful.flash_attn_with_kvcache(q, k, v, tree_mask=tree)


def call_with_scales(scales):
    stored = torch.arange(2 * 19 * 4 * 16).view(2, 19, 4, 16).fmod(200).sub(100).to(torch.int8)
    q = torch.arange(2 * 4 * 16).view(2, 1, 4, 16).sin()
    return heedful.flash_attn_with_kvcache(q, stored, stored, k_descale=scales, v_descale=scales)


@interpreted
@pytest.mark.parametrize(
    ("call", "operand"),
    [
        (call_with_slopes, torch.rand(8)[::2]),
        (call_with_slopes, torch.rand(2, 8)[:, ::2]),
        (call_with_slopes, torch.rand(4, 2).T),
        (call_with_slopes, torch.rand(1).expand(4)),
        (call_with_a_tree, (torch.rand(1, 19, 38) > 0.3)[..., ::2]),
        (call_with_a_tree, (torch.rand(2, 19, 19) > 0.3).mT),
        (call_with_scales, torch.rand(2, 8)[:, ::2]),
        (call_with_scales, torch.rand(2, 19, 4, 4)[..., ::2]),
    ],
)
def test_small_operands_may_have_any_strides(call, operand):
    want = call(operand.contiguous())
    with standin.gpu(interprets=True, tiles=(16, 16)):
        assert torch.equal(call(operand), call(operand.contiguous()))
        got = call(operand)
    # As many roundings as a score has terms, and its weights as keys.
    slack = 64 * torch.finfo(torch.float32).eps * want.abs().max()
    assert ((got - want).abs() <= slack).all()


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
