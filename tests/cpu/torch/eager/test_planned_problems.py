"""The problem that is planned for a call is what was asked: each argument changes its own facts and
no others, whichever function it is an argument of, and the operands are the caller's tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import heedful.torch as typed
from heedful.core.call.mask import MaskSpec
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem
from heedful.torch.eager import backends
from heedful.torch.eager.calls import CALLS
from heedful.torch.operands.cache_checks import lies_in

heedful: Any = typed


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def planned() -> Iterator[list[tuple[AttentionProblem, Operands]]]:
    """What is planned meanwhile: problems and the operands that they are planned for."""
    found: list[tuple[AttentionProblem, Operands]] = []
    prepare = backends.prepare

    def note(problem, x, *more):
        found.append((problem, x))
        return prepare(problem, x, *more)

    CALLS.clear()
    with mock.patch.object(backends, "prepare", note):
        yield found
    CALLS.clear()


def the_plan(function, *args, **keywords) -> tuple[AttentionProblem, Operands]:
    with planned() as found:
        function(*args, **keywords)
    (one,) = found
    return one


def problem_of(function, *args, **keywords) -> AttentionProblem:
    return the_plan(function, *args, **keywords)[0]


Q, K, V = torch.randn(2, 5, 4, 64), torch.randn(2, 7, 2, 64), torch.randn(2, 7, 2, 32)
EIGHTS = tuple(t.to(torch.float8_e4m3fn) for t in (Q, K, V))
DENSE = AttentionProblem(
    batch=2,
    heads_q=4,
    heads_k=2,
    seqlen_q=5,
    seqlen_k=7,
    head_dim=64,
    head_dim_v=32,
    dtype="float32",
    kv_dtype="float32",
    out_dtype="float32",
    scale=0.125,
)
BOUNDS_Q, BOUNDS_K = ints(0, 2, 5), ints(0, 3, 7)
PACKED_Q, PACKED_K, PACKED_V = Q[0], K[0], V[0]
VARLEN = replace(DENSE, seqlen_q=3, seqlen_k=4, total_q=5, total_k=7)


def varlen(**keywords):
    """flash_attn_varlen_func by keywords, which may be changed."""
    given: dict[str, Any] = {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_V}
    given |= {"cu_seqlens_q": BOUNDS_Q, "cu_seqlens_k": BOUNDS_K}
    given |= {"max_seqlen_q": 3, "max_seqlen_k": 4}
    return heedful.flash_attn_varlen_func(**given | keywords)


def decode(**keywords):
    return heedful.flash_attn_with_kvcache(**{"q": Q, "k_cache": K, "v_cache": V} | keywords)


def dense(**keywords):
    return heedful.flash_attn_func(**{"q": Q, "k": K, "v": V} | keywords)


SEED = {"dropout_p": 0.5, "dropout_seed": 3}
TREE = torch.ones(2, 5, 5, dtype=torch.bool)
PAGES = {"k": torch.randn(6, 4, 2, 64), "v": torch.randn(6, 4, 2, 32)}
PAGES |= {"block_table": ints(0, 1, 2, 3).view(2, 2)}
CACHE_PAGES = {"k_cache": PAGES["k"], "v_cache": PAGES["v"], "block_table": PAGES["block_table"]}


def grad(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def unaligned(tensor: Tensor) -> Tensor:
    moved = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def uneven(tensor: Tensor) -> Tensor:
    """With a gap behind each batch entry that is no whole number of rows."""
    batch, gap = tensor.shape[0], 8
    room = tensor.new_zeros(batch, tensor[0].numel() + gap)
    return room[:, : tensor[0].numel()].view(tensor.shape).copy_(tensor)


def far(tensor: torch.Tensor) -> torch.Tensor:
    """With rows 8 MiB apart."""
    batch, rows, heads, dim = tensor.shape
    room = tensor.new_empty(batch, rows, (8 << 20) // tensor.element_size())
    return room[..., : heads * dim].view(tensor.shape)


# (keywords of a call, the facts that they change)
COMMON: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (SEED, {"dropout_p": 0.5}),
    ({**SEED, "dropout_origin": (1, 2, 3, 8)}, {"dropout_p": 0.5, "dropout_origin": (1, 2, 3, 8)}),
    ({"dropout_origin": (1, 2, 3, 8)}, {}),
    ({"return_attn_probs": True}, {"return_lse": True}),
    ({**SEED, "return_attn_probs": True}, {"dropout_p": 0.5, "return_lse": True}),
    ({"return_lse": True}, {"return_lse": True}),
    ({"deterministic": True}, {"deterministic": True}),
    ({"bias": torch.randn(4, 1, 1)}, {"bias": True}),
    ({"bias": grad(torch.randn(4, 1, 1))}, {"bias": True, "needs_grad": True, "bias_grad": True}),
    ({"sink": grad(torch.randn(4))}, {"sink": True, "needs_grad": True}),
]
EVERYWHERE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"softmax_scale": 0.3}, {"scale": 0.3}),
    ({"causal": True}, {"mask": MaskSpec.of(True, (-1, -1))}),
    ({"window_size": (3, 1)}, {"mask": MaskSpec.of(False, (3, 1))}),
    ({"window_size": (3, 1, 2), "causal": True}, {"mask": MaskSpec.of(True, (3, 1, 2))}),
    ({"softcap": 2.0}, {"softcap": 2.0}),
    ({"alibi_slopes": torch.rand(4)}, {"alibi": True}),
    ({"sink": torch.randn(4)}, {"sink": True}),
    ({"num_splits": 3}, {"num_splits": 3}),
]
GRADIENT = [({name: grad(t)}, {"needs_grad": True}) for name, t in (("q", Q), ("k", K), ("v", V))]
OWN: list[tuple[Callable, dict[str, Any], dict[str, Any]]] = [
    *((dense, keywords, facts) for keywords, facts in GRADIENT),
    (dense, {"q": unaligned(Q)}, {"aligned": False}),
    (dense, {"k": unaligned(K)}, {"aligned": False}),
    (dense, {"v": unaligned(V)}, {"aligned": False}),
    (dense, {"out": unaligned(torch.zeros(2, 5, 4, 32))}, {"aligned": False}),
    (dense, {"out": torch.zeros(2, 5, 4, 32)}, {}),
    *((dense, {name: far(t)}, {"near_rows": False}) for name, t in (("q", Q), ("k", K), ("v", V))),
    (
        dense,
        {"q": Q.half(), "k": K.half(), "v": V.half()},
        dict.fromkeys(("dtype", "kv_dtype", "out_dtype"), "float16"),
    ),
    (dense, {"bias": torch.randn(2, 4, 5, 7)}, {"bias": True}),
    (decode, {"k_cache": uneven(K)}, {"even_rows": False}),
    (decode, {"v_cache": uneven(V)}, {"even_rows": False}),
    (decode, {"v_cache": K[..., :32]}, {"v_in_k": True}),
    (decode, {"v_cache": K[..., 32:]}, {}),
    # Another function's calls are not known by where their tensors lie.
    (dense, {"v": K[..., :32]}, {}),
    (decode, {"cache_seqlens": ints(3, 2)}, {"used_k": True}),
    (decode, {"cache_batch_idx": ints(1, 0)}, {"kv_batch_idx": True}),
    (decode, {"cache_leftpad": ints(1, 0)}, {"leftpad_k": True}),
    (decode, {"tree_mask": TREE}, {"tree_mask": True}),
    (decode, {"return_softmax_lse": True}, {"return_lse": True}),
    (decode, CACHE_PAGES, {"page_size": 4, "seqlen_k": 8}),
    (varlen, {"seqused_q": ints(1, 2)}, {"used_q": True}),
    (varlen, {"seqused_k": ints(1, 2)}, {"used_k": True}),
    (varlen, PAGES, {"page_size": 4, "total_k": None, "used_k": True}),
    (varlen, {"max_seqlen_q": 9, "max_seqlen_k": 11}, {"seqlen_q": 9, "seqlen_k": 11}),
]
BASES = {dense: DENSE, varlen: VARLEN, decode: DENSE}
ASKED = [(f, *pair) for f in (dense, varlen) for pair in (*COMMON, *EVERYWHERE)]
ASKED += [(decode, *pair) for pair in (({}, {}), *EVERYWHERE)]
ASKED += OWN


def words(value) -> str:
    return "-".join(value) or "plain" if isinstance(value, dict) else value.__name__


@pytest.mark.parametrize(("function", "keywords", "facts"), ASKED, ids=words)
def test_each_argument_is_its_own_fact(function, keywords, facts):
    if keywords.get("return_attn_probs") and keywords.get("dropout_p"):
        facts = facts | {"return_probs": True}
    assert problem_of(function, **keywords) == replace(BASES[function], **facts)


@pytest.mark.parametrize(("function", "keywords", "facts"), ASKED, ids=words)
def test_nothing_is_recorded_where_gradients_are_off(function, keywords, facts):
    with torch.no_grad():
        problem = problem_of(function, **keywords)
    assert not problem.needs_grad and not problem.bias_grad


def test_values_apart_are_not_taken_from_keys_that_others_lay_in():
    """Calls that differ in nothing but where v lies have plans of their own, whoever came first."""
    view, apart = K[..., :32], torch.randn_like(K)[..., :32]
    assert view.stride() == apart.stride()
    with planned() as found:
        for v in (view, apart, view, apart, apart, view):
            decode(v_cache=v)
    assert [problem.v_in_k for problem, _ in found] == [True, False]
    with planned() as found:
        for v in (apart, view, apart):
            decode(v_cache=v, out=torch.empty(2, 5, 4, 32))
    assert [problem.v_in_k for problem, _ in found] == [False, True]


def test_values_lie_in_keys_as_their_first_columns_alone():
    assert lies_in(K[..., :32], K) and lies_in(K, K)
    for v, k in (
        (K[..., 1:33], K),
        (K[:, :-1, :, :32], K),
        (K[..., :32].contiguous(), K),
        (K[..., :32].view(torch.int32), K),
        (K, K[..., :32]),
        (K[:0], K[:0]),
    ):
        assert not lies_in(v, k)


@pytest.mark.parametrize("function", [dense, varlen])
def test_torchs_deterministic_algorithms_are_asked_of_the_call(function):
    assert not problem_of(function).deterministic
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert problem_of(function).deterministic
    finally:
        torch.use_deterministic_algorithms(before)


def test_what_is_planned_is_told_once_a_kind(caplog):
    with caplog.at_level("INFO", "heedful"), planned():
        for _ in range(3):
            dense(softcap=11.0)
    told = [record.message for record in caplog.records if "-> cpu" in record.message]
    assert len(told) == 1


class Onlooker(TorchDispatchMode):
    """Sees every operator, and changes nothing: calls go through torch's dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("function", "keywords", "facts"), ASKED, ids=words)
def test_torchs_dispatcher_plans_the_same(function, keywords, facts):
    """Of an operator the log-sum-exp may be a result in any case, and nothing is written in place;
    whether the bias has a gradient is known in its backward, and that V lies in K is not known."""
    keywords = {name: value for name, value in keywords.items() if name != "out"}
    eager, its_x = the_plan(function, **keywords)
    with Onlooker():
        problem, x = the_plan(function, **keywords)
    usual: dict[str, Any] = {"return_lse": True, "bias_grad": False, "v_in_k": False}
    if not eager.needs_grad:
        usual["deterministic"] = False
    got, want = (replace(each, **usual) for each in (problem, eager))
    assert got == want
    present = {n: t for n, t in its_x._asdict().items() if t is not None and n != "seed"}
    assert_operands(x._replace(seed=None), **present)


def test_eight_bits_have_an_output_of_their_own():
    eight = dict(zip("qkv", EIGHTS, strict=True))
    facts = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
    base = replace(DENSE, **facts)
    assert problem_of(dense, **eight) == replace(base, out_dtype="bfloat16")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        out = torch.zeros(2, 5, 4, 32, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        assert problem_of(dense, **eight, out=out) == replace(base, out_dtype=name)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float8_e4m3fnuz, "float8_e4m3fnuz"),
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.int8, "int8"),
        (torch.uint8, "int4"),
    ],
)
def test_a_quantised_cache_is_known_by_its_storage(dtype, name):
    stored = [t.to(dtype) for t in (K, V)]
    if name == "int4":
        stored = [t[..., : t.shape[-1] // 2].contiguous() for t in stored]
    scales = {n: torch.ones(2, 2) for n in ("k_descale", "v_descale")}
    cache = dict(zip(("k_cache", "v_cache"), stored, strict=True))
    base = replace(DENSE, kv_dtype=name)
    assert problem_of(decode, **cache) == base
    assert problem_of(decode, **cache, **scales) == base
    shifts = {n: torch.zeros(2, 2) for n in ("k_shift", "v_shift")}
    assert problem_of(decode, **cache, **scales, **shifts) == replace(base, kv_shift=True)
    groups = {
        f"{n}_{kind}": torch.ones(2, 7, 2, size)
        for n, size in (("k", 16), ("v", 8))
        for kind in ("descale", "shift")
    }
    by_group = replace(base, kv_group=4, kv_shift=True)
    assert problem_of(decode, **cache, **groups) == by_group


def test_every_operand_is_the_callers_tensor():
    """None goes to another's place."""
    slopes, sink, seed = torch.rand(2, 4), torch.randn(4), torch.tensor([7])
    bias = torch.randn(2, 4, 5, 7)
    scales = {f"{n}_descale": torch.rand(2, 2) for n in "qkv"}
    problem, x = the_plan(
        dense, alibi_slopes=slopes, sink=sink, bias=bias, dropout_p=0.5, dropout_seed=seed
    )
    assert_operands(x, q=Q, k=K, v=V, alibi_slopes=slopes, sink=sink, bias=bias, seed=seed)
    eight = dict(zip("qkv", EIGHTS, strict=True))
    assert_operands(the_plan(dense, **eight, **scales)[1], **eight, **scales)
    used = {"seqused_q": ints(2, 1), "seqused_k": ints(3, 2)}
    bounds = {"cu_seqlens_q": BOUNDS_Q, "cu_seqlens_k": BOUNDS_K}
    packed = {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_V}
    bias = torch.randn(2, 4, 3, 4)
    more = {"sink": sink, "alibi_slopes": slopes, "bias": bias}
    assert_operands(the_plan(varlen, **used, **more)[1], **used, **bounds, **packed, **more)
    paged = {**packed, **PAGES, "cu_seqlens_q": BOUNDS_Q}
    _, x = the_plan(varlen, **PAGES, cu_seqlens_k=None, **used)
    assert_operands(x, **paged, **used)
    _, x = the_plan(varlen, **PAGES)
    assert_operands(x, **paged, seqused_k=ints(3, 4))


def test_every_operand_of_a_cache_is_the_callers_tensor():
    sink, slopes = torch.randn(4), torch.rand(2, 4)
    stored = {"k": K.to(torch.int8), "v": V.to(torch.int8)}
    names = ("k_descale", "v_descale", "k_shift", "v_shift")
    scales = {name: torch.rand(2, 2) for name in names}
    lengths, rows, pads = ints(4, 3), ints(1, 0), ints(1, 2)
    _, x = the_plan(
        decode,
        k_cache=stored["k"],
        v_cache=stored["v"],
        cache_seqlens=lengths,
        cache_batch_idx=rows,
        cache_leftpad=pads,
        tree_mask=TREE,
        sink=sink,
        alibi_slopes=slopes,
        **scales,
    )
    assert_operands(
        x,
        q=Q,
        **stored,
        seqused_k=lengths,
        kv_batch_idx=rows,
        leftpad_k=pads,
        tree_mask=TREE,
        sink=sink,
        alibi_slopes=slopes,
        **scales,
    )
    _, x = the_plan(decode, **CACHE_PAGES, cache_seqlens=lengths)
    assert_operands(x, q=Q, **PAGES, seqused_k=lengths)


def assert_operands(x: Operands, **wanted: Tensor) -> None:
    for name, got in x._asdict().items():
        want = wanted.pop(name, None)
        assert (got is None) == (want is None), name
        if want is not None:
            assert got.dtype == want.dtype and torch.equal(got.float(), want.float()), name
    assert not wanted


SELF = torch.randn(2, 5, 3, 4, 64)
KV = torch.randn(2, 7, 2, 2, 64)
FORMS = {
    "qkv": (
        (heedful.flash_attn_qkvpacked_func, (SELF,)),
        (heedful.flash_attn_func, SELF.unbind(2)),
    ),
    "kv": (
        (heedful.flash_attn_kvpacked_func, (Q, KV)),
        (heedful.flash_attn_func, (Q, *KV.unbind(2))),
    ),
    "varlen qkv": (
        (heedful.flash_attn_varlen_qkvpacked_func, (SELF[0], BOUNDS_Q, 3)),
        (
            heedful.flash_attn_varlen_func,
            (*SELF[0].unbind(1), BOUNDS_Q, BOUNDS_Q, 3, 3),
        ),
    ),
    "varlen kv": (
        (heedful.flash_attn_varlen_kvpacked_func, (Q[0], KV[0], BOUNDS_Q, BOUNDS_K, 3, 4)),
        (
            heedful.flash_attn_varlen_func,
            (Q[0], *KV[0].unbind(1), BOUNDS_Q, BOUNDS_K, 3, 4),
        ),
    ),
}
# The arguments that flash-attn has after the tensors and lengths, in its order.
POSITIONAL: dict[str, Any] = {
    "dropout_p": 0.25,
    "softmax_scale": 0.3,
    "causal": True,
    "window_size": (3, 1),
    "softcap": 2.0,
    "alibi_slopes": torch.rand(4),
    "deterministic": True,
    "return_attn_probs": True,
}


def assert_one_plan(one, other) -> None:
    """AssertionError unless both calls are planned alike, on the same numbers."""
    problem, x = the_plan(*one[0], **one[1])
    its_problem, its_x = the_plan(*other[0], **other[1])
    assert problem == its_problem
    present = {name: t for name, t in its_x._asdict().items() if t is not None and name != "seed"}
    assert_operands(x._replace(seed=None), **present)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["", *POSITIONAL, "return_lse", "num_splits", "sink", "bias"])
def test_a_packed_form_is_the_call_on_its_parts(form, name):
    (packed, whole), (function, parts) = FORMS[form]
    more = {"return_lse": True, "num_splits": 2, "sink": torch.rand(4), "bias": torch.rand(1)}
    keywords = {name: (POSITIONAL | more)[name]} if name else {}
    assert_one_plan(((packed, *whole), keywords), ((function, *parts), keywords))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", range(len(POSITIONAL) + 1))
def test_positional_arguments_are_those_of_flash_attn(form, count):
    (packed, whole), (function, parts) = FORMS[form]
    first = dict(list(POSITIONAL.items())[:count])
    by_name = ((function, *parts), first)
    assert_one_plan(((function, *parts, *first.values()), {}), by_name)
    assert_one_plan(((packed, *whole, *first.values()), {}), by_name)


def test_positional_arguments_of_a_cache_call_are_those_of_flash_attn():
    positional: dict[str, Any] = {
        "cache_seqlens": ints(3, 2),
        "cache_batch_idx": ints(1, 0),
        "cache_leftpad": ints(1, 0),
        "block_table": None,
        "softmax_scale": 0.3,
        "causal": True,
        "window_size": (3, 1),
        "softcap": 2.0,
        "rotary_interleaved": True,
        "alibi_slopes": torch.rand(4),
        "num_splits": 2,
        "return_softmax_lse": True,
    }
    function = heedful.flash_attn_with_kvcache
    for count in range(len(positional) + 1):
        first = dict(list(positional.items())[:count])
        call = (function, Q, K, V, None, None, None, None, *first.values())
        assert_one_plan((call, {}), ((function, Q, K, V), first))


def test_a_prefix_is_one_sequence_of_every_query_without_mask_or_sink():
    prefix = (torch.randn(6, 2, 64), torch.randn(6, 2, 32))
    sink = torch.randn(4)
    with planned() as found:
        decode(
            causal=True,
            sink=sink,
            softcap=2.0,
            softmax_scale=0.3,
            cache_seqlens=5,
            shared_prefix=prefix,
        )
    (own, x), (before, y) = found
    asked = replace(DENSE, softcap=2.0, scale=0.3, return_lse=True)
    assert own == replace(asked, used_k=True, mask=MaskSpec.of(True, (-1, -1)))
    assert before == replace(asked, batch=1, seqlen_q=10, seqlen_k=6)
    assert x.sink is None
    assert_operands(y, q=Q.view(1, 10, 4, 64), k=prefix[0][None], v=prefix[1][None])


def test_a_backend_is_the_one_that_was_named(monkeypatch):
    named = []
    prepare = backends.prepare

    def note(problem, x, backend, *more):
        named.append(backend)
        return prepare(problem, x, backend, *more)

    monkeypatch.setattr(backends, "prepare", note)
    for function in (dense, varlen, decode):
        CALLS.clear()
        function(backend="cpu")
        CALLS.clear()
        function()
    assert named == ["cpu", None] * 3
    for name in ("cpu", "sdpa"):
        assert f"forward   {name}" in heedful.explain(
            heedful.flash_attn_func, Q, K, K, backend=name
        )


def test_a_length_as_an_int_is_that_of_each_sequence():
    assert problem_of(decode, cache_seqlens=3) == replace(DENSE, used_k=True)
