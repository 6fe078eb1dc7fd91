"""What a call of a known kind is known by, and what is found once for all calls of its kind."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful.torch as typed
from heedful.core.call.arguments import Options
from heedful.core.call.operands import Gradients, Operands
from heedful.launch.code import packs
from heedful.torch.api import merge
from heedful.torch.eager import backends, calls, keys, saved
from heedful.torch.eager.calls import CALLS, KINDS, LATEST, LRU, Call, Once
from support.runs import standin

heedful: Any = typed
CPU = torch.device("cpu")
INT = torch.int32


def some(*shape: int, grad: bool = False, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.new_zeros(tensor.numel() + 16)[1 : 1 + tensor.numel()].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved


def test_a_generation_is_forgotten_once_another_is_full():
    known = LRU(3)
    for number in range(3):
        known.put(number, f"value {number}")
    known.latest["how"] = "value 2"
    assert list(known.young) == [0, 1, 2] and len(known) == 3 and known.find(0) is None
    known.put(3, "value 3")
    assert known.young == {3: "value 3"} and known.latest == {} and len(known) == 4
    assert known.find(0) == "value 0" and known.find(9) is None
    assert list(known.young) == [3, 0] and len(known) == 4
    known.latest["how"] = "value 0"
    known.put(4, "value 4")
    assert known.latest == {"how": "value 0"}
    known.put(5, "value 5")
    assert known.young == {5: "value 5"} and known.find(1) is None
    assert known.find(3) == "value 3"
    known.latest["how"] = "value 3"
    known.clear()
    assert (len(known), known.young, known.latest, known.find(3)) == (0, {}, {}, None)


def test_the_smallest_map_keeps_one_and_the_one_before():
    known = LRU(1)
    known.put("a", 1)
    known.put("b", 2)
    assert known.young == {"b": 2} and known.find("a") == 1 and known.find("b") == 2
    assert CALLS._half == 2048


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_knows_no_call():
    maps = (KINDS, LATEST, merge.MERGES, backends.FAMILIES)
    for known in maps:
        known["a key"] = 1
    CALLS.put("a key", 1)
    try:
        child = os.fork()
        if child == 0:
            os._exit(sum("a key" in known for known in (*maps, CALLS.young)))
        assert os.waitpid(child, 0)[1] == 0
    finally:
        for known in (*maps, CALLS.young):
            del known["a key"]


# What is known of one kind of call: (tensors, options, grad, seed), and what differs from a plain
# call on a CPU.
DENSE: dict[str, Any] = {"q": some(2, 5, 4, 16), "k": some(2, 7, 2, 16), "v": some(2, 7, 2, 8)}
HALF: dict[str, Any] = {n: t.half() for n, t in DENSE.items()}
EIGHT: dict[str, Any] = {n: t.to(torch.float8_e4m3fn) for n, t in DENSE.items()}
BOUNDS = {name: torch.tensor([0, 5], dtype=INT) for name in ("cu_seqlens_q", "cu_seqlens_k")}
ROWS: dict[str, Any] = {"q": some(5, 4, 16), "k": some(5, 2, 16), "v": some(5, 2, 16), **BOUNDS}
PAGES: dict[str, Any] = {"q": some(2, 1, 4, 16), "k": some(3, 4, 2, 16), "v": some(3, 4, 2, 16)}
PAGES["block_table"] = torch.tensor([[0], [2]], dtype=INT)
SEED = torch.tensor([5])
FACTS: dict[str, tuple] = {
    "plain": (DENSE, {}, {}),
    "lse": (DENSE, {"return_lse": True}, {"results": 1}),
    "probabilities": (DENSE, {"return_attn_probs": True, "return_lse": True}, {"results": 2}),
    "probabilities alone": (DENSE, {"return_attn_probs": True}, {"results": 2}),
    "gradients": (DENSE, {"grad": (True, False, False)}, {"wants_grad": True, "backwards": True}),
    "sink": ({**DENSE, "sink": torch.zeros(4)}, {}, {}),
    "strided": (
        {**DENSE, "q": some(2, 5, 16, 4).mT},
        {},
        {"plain": False, "steps": 1},
    ),
    "bias": ({**DENSE, "bias": some(5, 7)}, {}, {"plain": False, "steps": 1}),
    "dropout": ({**DENSE}, {"dropout_p": 0.5}, {"plain": False, "dropout": True}),
    "a seed alone": (DENSE, {"seed": SEED}, {}),
    "dropout of a seed": (
        DENSE,
        {"dropout_p": 0.5, "seed": SEED},
        {"plain": False, "dropout": True},
    ),
    "dropout of a seed without dims": (
        DENSE,
        {"dropout_p": 0.5, "seed": torch.tensor(5)},
        {"plain": False, "dropout": True, "steps": 1},
    ),
    "a number as seed": (
        DENSE,
        {"dropout_p": 0.5, "seed": 5},
        {"plain": False, "dropout": True},
    ),
    "indices": (
        ROWS,
        {"kind": "varlen", "max_seqlen_q": 5, "max_seqlen_k": 5},
        {"plain": False, "checks": True, "kind": "varlen"},
    ),
    "wanting": (
        {**DENSE, "alibi_slopes": torch.zeros(2, 4, requires_grad=True)},
        {},
        {"plain": False, "wanting": True},
    ),
    "pages": (PAGES, {"kind": "kvcache"}, {"kind": "kvcache"}),
}
USUAL = {"dropout": False, "kind": "dense", "plain": True, "results": 0, "steps": 0}
USUAL |= {"checks": False, "wanting": False, "wants_grad": False, "backwards": False}


def made(given: dict[str, Any], facts: dict[str, Any]) -> Call:
    options = {n: v for n, v in facts.items() if n not in ("grad", "seed", "kind")}
    seed = facts.get("seed")
    x, grad = Operands(**given), facts.get("grad", (False, False, False))
    return Call(x, Options(facts.get("kind", "dense"), **options), grad, None, seed)


def facts_of(call: Call) -> dict[str, Any]:
    found = {name: getattr(call, name) for name in USUAL}
    return {**found, "steps": len(call.steps), "backwards": call.backwards is not None}


@pytest.mark.parametrize("place", ["cpu", "gpu", "gpu that checks pages"])
@pytest.mark.parametrize("name", FACTS)
def test_what_a_kind_of_call_needs_each_time_is_known_once(name, place, monkeypatch):
    given, options, others = FACTS[name]
    if place == "cpu":
        if name == "pages":
            others = {**others, "checks": True, "plain": False}
        call = made(given, options)
    else:
        if place != "gpu":
            monkeypatch.setenv("HEEDFUL_CHECK_PAGES", "1")
        checks = name == "pages" and place != "gpu"
        if checks or name == "indices":
            others = {**others, "checks": checks, "plain": not checks}
        with standin.gpu():
            call = made(given, options)
    assert facts_of(call) == {**USUAL, **others}
    assert call.likeness is None
    assert call.problem == call.runner.problem == call.runner.plan.problem
    assert call.problem.needs_grad == others.get("backwards", False)


def test_a_call_of_other_lengths_shares_all_but_its_runner():
    x = Operands(**DENSE)
    call = Call(x, Options("dense", return_lse=True), (True, False, False), None)
    assert call.is_aligned(x) and call.likeness is not None and call.backwards is not None
    runner: Any = SimpleNamespace(forward="its forward", problem="its problem")
    given = []
    call.runner = SimpleNamespace(at=lambda *more: given.append(more) or runner)
    other = call.at([3, 4], (5,), x, True)
    assert given == [([3, 4], (5,), True)]
    shared = ("checks", "dropout", "kind", "plain", "results", "steps", "wanting")
    for name in (*shared, "wants_grad"):
        assert getattr(other, name) is getattr(call, name)
    assert (other.runner, other.forward, other.problem) == (runner, "its forward", "its problem")
    assert other.likeness is None
    assert other.backwards is not None and other.backwards is not call.backwards
    assert other.backwards.runner is runner and other.backwards._device == CPU
    plain = Call(x, Options("dense"), (False, False, False), None)
    plain.runner = call.runner
    assert plain.at([], (), x, False).backwards is None


def test_a_call_is_alike_where_its_tensors_are_and_aligned_where_they_all_are():
    x = Operands(**DENSE)
    call = Call(x, Options("dense"), (False, False, False), None)
    assert call.is_aligned(x) and call.likeness is not None
    like: Any = call.likeness
    for name in "qkv":
        assert not call.is_aligned(x._replace(**{name: unaligned(DENSE[name])}))
        assert like.addresses(x._replace(**{name: DENSE[name].half()})) is None
    addresses = [tensor.data_ptr() for tensor in x[:3]]
    assert call.likeness is like and like.addresses(x) == addresses and like.alike(*x[:3])


def test_what_a_call_returns_is_told_by_its_options():
    options = [Options("dense", return_attn_probs=p, return_lse=s) for p in (0, 1) for s in (0, 1)]
    assert [calls.results_of(given) for given in options] == [0, 1, 2, 2]
    out, lse, probs = some(2, dtype=torch.float64), some(3), some(4)
    assert calls.returned(0, out, lse, probs) is out
    assert calls.returned(1, out, lse, probs) == (out, lse)
    assert calls.returned(2, out, lse, probs) == (out, lse, probs)
    empty = calls.returned(2, out, lse, None)
    assert empty[:2] == (out, lse) and empty[2].shape == (0,) and empty[2].dtype == torch.float64


def test_an_output_of_torchs_own_attention_is_dense_unless_it_is_the_callers():
    q, k, v = some(2, 5, 4, 16), some(2, 7, 4, 16), some(2, 7, 4, 16)
    out = heedful.flash_attn_func(q, k, v, backend="sdpa")
    assert out.is_contiguous()
    wide = torch.zeros(2, 5, 4, 32)[..., :16]
    assert heedful.flash_attn_func(q, k, v, backend="sdpa", out=wide) is wide
    assert torch.equal(wide, out)
    apart = some(4, 5).T
    for place in (None, apart):
        result = calls._dense_forward(lambda *_: (apart, "lse", "probs"), Operands(q, k, v), place)
        assert result[1:] == ("lse", "probs") and torch.equal(result[0], apart)
        assert (result[0] is apart) == (place is apart) != result[0].is_contiguous()


def test_a_seed_is_a_philox_key_on_the_device():
    assert calls.make_seed(SEED, CPU) is SEED
    keys = {0: 0, 5: 5, -3: -3, 2**63 - 1: 2**63 - 1, 2**63: -(2**63), 2**64 - 1: -1}
    for seed, key in keys.items():
        made = calls.make_seed(seed, CPU)
        assert (made.tolist(), made.dtype, made.device) == ([key], torch.int64, CPU)
    assert calls.make_seed(5, torch.device("meta")).is_meta
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"^dropout_seed must fit 64 bits, got {seed}$"):
            calls.make_seed(seed, CPU)
    torch.manual_seed(3)
    want = torch.randint(2**63 - 1, (1,))
    torch.manual_seed(3)
    assert torch.equal(calls.make_seed(None, CPU), want)
    assert calls.make_seed(None, torch.device("meta")).is_meta


def test_a_key_is_all_that_a_plan_depends_on_of_tensors():
    q, k, v = some(1, 3, 2, 8), unaligned(some(1, 4, 2, 8)), some(1, 4, 2, 4, grad=True).half()
    own = torch.Tensor
    of_q = (own, (1, 3, 2, 8), (48, 16, 8, 1), torch.float32, CPU, 0, False, False)
    of_k = (own, (1, 4, 2, 8), (64, 16, 8, 1), torch.float32, CPU, 4, False, False)
    of_v = (own, (1, 4, 2, 4), (32, 8, 4, 1), torch.float16, CPU, 0, True, False)
    assert [keys.tensor_key(t) for t in (q, k, v)] == [of_q, of_k, of_v]
    assert keys.tensor_key(3) == (int,)
    assert keys.tensor_keys((q, None, "x")) == (of_q, None, (str,))
    sizes = *of_q[1:5], *of_k[1:5], *of_v[1:5]
    bare = keys.call_key(q, k, v, None, None, None, 0)
    assert bare == (*sizes, 0, False, None, None, None)
    out, x = torch.zeros(1, 3, 2, 4), Operands(q, k, v, sink=q)
    key = keys.call_key(q, k, v, x, out, SEED, 4)
    of_out = (own, (1, 3, 2, 4), (24, 8, 4, 1), torch.float32, CPU, 0, False, False)
    of_seed = (own, (1,), (1,), torch.int64, CPU, 0, False, False)
    rest = (None, None, None, of_q, *(None,) * 20)
    assert key == (*sizes, (0, 4, 0), False, rest, of_out, of_seed)
    private: Any = torch
    for place in range(3):
        turned: list[Any] = [q, k, v]
        turned[place] = private._neg_view(turned[place])
        assert keys.call_key(turned[0], turned[1], turned[2], x, out, SEED, 4) != key


# How a call is known again: of each kind of call, after the first, whether its kind, the kind of
# the last calls, and the last call itself are known.
KNOWN = {
    "plain": ({}, (1, 1, 0)),
    "masked": ({"causal": True, "softcap": 2.0}, (1, 1, 0)),
    "sink": ({"sink": torch.zeros(4)}, (1, 1, 0)),
    "gradients": ({"q": some(2, 5, 4, 16, grad=True)}, (1, 1, 0)),
    "bias": ({"bias": some(5, 7)}, (0, 0, 0)),
    "slopes": ({"alibi_slopes": some(4)}, (0, 0, 0)),
    "strided": ({"q": some(2, 5, 16, 4).mT}, (0, 0, 0)),
    "dropout": ({"dropout_p": 0.5}, (0, 0, 0)),
    "out": ({"out": torch.zeros(2, 5, 4, 8)}, (0, 0, 0)),
    "unaligned": ({"q": unaligned(some(2, 5, 4, 16))}, (1, 0, 0)),
    "unaligned sink": ({"sink": unaligned(torch.zeros(4))}, (1, 0, 0)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_kinds_are_known_of_calls_whose_lengths_alone_may_differ(name):
    more, wanted = KNOWN[name]
    with standin.gpu():
        heedful.flash_attn_func(**{**DENSE, **more})
        assert (len(KINDS), len(LATEST), len(CALLS.latest)) == wanted
        assert len(CALLS) == 1
        heedful.flash_attn_func(**{**DENSE, **more})
        # The call of the kind is another object; unknown kinds have their keys.
        assert len(CALLS) == 1 and len(KINDS) == wanted[0]
    KINDS.clear()
    heedful.flash_attn_func(**{**DENSE, **more})
    assert (len(KINDS), len(LATEST)) == (0, 0)


def refuse(*_, **__):
    raise AssertionError("not known")


def test_a_call_that_comes_again_needs_less_each_time(monkeypatch):
    """A key, then its kind, then its lengths, then a look at its tensors."""

    def call(length: int = 5):
        q = some(2, length, 4, 16)
        return heedful.flash_attn_func(q, DENSE["k"], DENSE["v"])

    with standin.gpu() as gpu:
        call()
        (kind,) = LATEST.values()
        monkeypatch.setattr(calls, "call_key", refuse)
        assert not kind._calls
        call()
        # Most lengths come once.
        assert list(kind._calls.values()) == [None]
        call()
        (known,) = kind._calls.values()
        assert known is not None
        assert not CALLS.latest
        for _ in range(2):
            call(6)
        assert len(kind._calls) == 2
        monkeypatch.setattr(Call, "at", refuse)
        call()
        assert list(CALLS.latest.values()) == [known]
        with monkeypatch.context() as patched:
            patched.setattr(calls.LatestKind, "find", refuse)
            assert call().shape == (2, 5, 4, 8)
            with pytest.raises(AssertionError, match="not known"):
                call(6)
        assert call(6).shape == (2, 6, 4, 8)
        assert list(CALLS.latest.values()) != [known]
    assert len(gpu.launches) == 8


@pytest.mark.parametrize("change", ["dtype", "packs"])
def test_the_kind_of_the_last_calls_is_not_that_of_others(change, monkeypatch):
    with standin.gpu():
        heedful.flash_attn_func(**DENSE)
        ((base, kind),) = LATEST.items()
        how, x = (base, (None, None)), Operands(**DENSE)
        addresses = [tensor.data_ptr() for tensor in x[:3]]
        once, told = kind.find(x, (None, None), how)
        assert isinstance(once, Once) and told == addresses
        found, told = kind.find(x, (None, None), how)
        assert isinstance(found, Call) and told == addresses
        assert kind.find(x, (None, None), how)[0] is found
        given = Operands(**HALF) if change == "dtype" else x
        if change == "packs":
            monkeypatch.setattr(packs, "backends", lambda: frozenset({"another"}))
        assert kind.find(given, (None, None), how) == (None, None)


def test_calls_without_a_key_are_made_and_not_kept():
    CALLS.clear()
    found = calls.make(None, Operands(**DENSE), Options("dense"), (False, False, False))
    assert isinstance(found, Call) and len(CALLS) == 0
    kept = calls.make("key", Operands(**DENSE), Options("dense"), (False, False, False))
    assert CALLS.young == {"key": kept}
    CALLS._old, CALLS.young = CALLS.young, {}
    assert CALLS.find("key") is kept
    CALLS.clear()


@pytest.mark.parametrize("which", ["out", "lse", "both"])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qkv"])
def test_a_backward_is_told_which_cotangents_there_are(which, wanted, monkeypatch):
    """And whether gradients of keys or values are wanted."""
    seen = []

    def backward(self, saved, dout, dlse=None, kv_grad=True):
        seen.append((dout is None, dlse is None, kv_grad))
        return Gradients(*(torch.full_like(t, 3.0) for t in saved[:3]))

    monkeypatch.setattr(saved.Backwards, "__call__", backward)
    tensors = {n: t.clone().requires_grad_(n in wanted) for n, t in DENSE.items()}
    out, lse = heedful.flash_attn_func(**tensors, return_lse=True)
    loss = {"out": out, "lse": lse, "both": out.sum() + lse.sum()}[which]
    leaves = [tensors[name] for name in wanted]
    grads = torch.autograd.grad(loss.sum(), leaves)
    assert seen == [(which == "lse", which == "out", wanted != "q")]
    assert all(g.shape == t.shape and g.eq(3.0).all() for g, t in zip(grads, leaves, strict=True))


def test_the_engine_asks_for_no_other_way_to_say_what_our_backward_is(monkeypatch):
    def refuse(_):
        raise AssertionError("asked")

    monkeypatch.setattr(torch.autograd.function.BackwardCFunction, "_get_user_fn", refuse)
    q = DENSE["q"].clone().requires_grad_()
    out = heedful.flash_attn_func(**{**DENSE, "q": q})
    (grad,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert grad.shape == q.shape and grad.any()


def test_probabilities_are_no_part_of_autograd():
    tensors = {n: t.clone().requires_grad_() for n, t in DENSE.items()}
    options = {"dropout_p": 0.5, "return_attn_probs": True}
    out, lse, probs = heedful.flash_attn_func(**tensors, **options)
    assert [t.requires_grad for t in (out, lse, probs)] == [True, True, False]
    assert [t.requires_grad for t in heedful.flash_attn_func(**DENSE, **options)] == [False] * 3


def test_what_is_saved_for_the_backward_is_what_the_caller_gave():
    saved_tensors = []

    def pack(tensor):
        saved_tensors.append(tuple(tensor.shape))
        return tensor

    x = {n: t.clone().requires_grad_() for n, t in DENSE.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        heedful.flash_attn_func(**x)
        bare = [(2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8), (2, 5, 4, 8), (2, 4, 5)]
        assert saved_tensors == bare
        saved_tensors.clear()
        heedful.flash_attn_func(**x, bias=some(5, 7), sink=torch.zeros(4), dropout_p=0.5)
    assert saved_tensors == [*bare[:3], (5, 7), (4,), (1,), *bare[3:]]
