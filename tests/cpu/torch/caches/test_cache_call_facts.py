"""What is found once for all calls over a cache of one kind, and what tells them from others."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful.torch as heedful
from heedful.core.call.arguments import CacheUpdate, Options
from heedful.core.call.operands import Operands
from heedful.launch.program import bound
from heedful.torch.api import kvcache, prefix
from heedful.torch.api.kvcache import CacheCall
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager import calls
from support.runs import standin


def some(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, requires_grad=grad)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.new_zeros(tensor.numel() + 16)[1 : 1 + tensor.numel()].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved


CACHE = {"q": some(2, 3, 4, 16), "k_cache": some(2, 12, 2, 16), "v_cache": some(2, 12, 2, 8)}
CACHE |= {"cache_seqlens": ints(5, 4)}
NEW = {"k": some(2, 3, 2, 16), "v": some(2, 3, 2, 8)}
PAGES = {"block_table": ints(0, 1, 2, 3, 4, 5).view(2, 3), "k_cache": some(6, 4, 2, 16)}
PAGES |= {"v_cache": some(6, 4, 2, 8)}
PREFIX = {"shared_prefix": (some(6, 2, 16), some(6, 2, 8))}
OUT = torch.zeros(2, 3, 4, 8)


def tables(rows: int) -> dict[str, torch.Tensor]:
    return {"rotary_cos": some(rows, 4), "rotary_sin": some(rows, 4)}


TURNED: dict[str, Any] = {**NEW, **tables(12), "causal": True}
NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": ""}
OPTIONS = ("causal", "window_size", "return_lse")


def parts(given: dict[str, Any]) -> tuple[Operands, Options, CacheUpdate, Any]:
    """Of a call that differs from a plain one by these arguments."""
    given = {**CACHE, **given}
    x = Operands(**{n: given.get(NAMES.get(n, n)) for n in Operands._fields})
    options = Options("kvcache", **{n: given[n] for n in OPTIONS if n in given})
    update = CacheUpdate(**{n: given.get(n) for n in CacheUpdate._fields})
    return x, options, update, given.get("out")


def made(given: dict[str, Any]) -> CacheCall:
    return CacheCall(*parts(given))


def facts_of(call: CacheCall) -> dict[str, Any]:
    return {
        "new": call.new,
        "capacity": call.capacity,
        "rotated": call.rotated,
        "returns_lse": call.returns_lse,
        "records": call.records,
        "aligned": call.aligned,
        "checks": call.checks,
        "counts": call.counts,
        "updates": call.update is not None or call.step is not None,
        "prefix": call.prefix is not None,
        "merges": call.prefix is not None and call.prefix.merge is not None,
        "used": call.attention.problem.used_k,
        "v in k": call.attention.problem.v_in_k,
        "its lse": call.attention.problem.return_lse,
        "plain": call.attention.plain,
    }


USUAL = {"new": 0, "capacity": 12, "rotated": None, "returns_lse": False, "records": False}
USUAL |= {"aligned": True, "checks": True, "counts": False, "updates": False, "prefix": False}
USUAL |= {"merges": False, "used": True, "v in k": False, "its lse": False, "plain": False}
APPENDS = {"new": 3, "updates": True, "counts": True}
PREFIXED = {"prefix": True, "merges": True, "its lse": True}
WANTING = {name: torch.zeros_like(t).requires_grad_() for name, t in CACHE.items() if t.dim() > 1}
# (what differs from a plain call, what differs in the facts). On a CPU no kernel counts or merges.
FACTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "whole": ({"cache_seqlens": None}, {"used": False}),
    "an int": ({"cache_seqlens": 5}, {}),
    "pages": (PAGES, {}),
    "lse": ({"return_lse": True}, {"returns_lse": True, "its lse": True}),
    "new tokens": (NEW, APPENDS),
    "one new token": ({"k": some(2, 1, 2, 16), "v": some(2, 1, 2, 8)}, {**APPENDS, "new": 1}),
    "rotary": (TURNED, APPENDS),
    "rotary, more queries": ({**TURNED, "q": some(2, 5, 4, 16)}, {**APPENDS, "rotated": 7}),
    "rotary, more queries and rows": (
        {**TURNED, **tables(13), "q": some(2, 5, 4, 16)},
        {**APPENDS, "rotated": 8},
    ),
    "rotary, rows for all": ({**TURNED, **tables(14), "q": some(2, 5, 4, 16)}, APPENDS),
    "rotary, queries at one place": (
        {**TURNED, "causal": False, "q": some(2, 5, 4, 16)},
        APPENDS,
    ),
    "rotary window": (
        {**TURNED, "causal": False, "window_size": (3, 0), "q": some(2, 5, 4, 16)},
        {**APPENDS, "rotated": 7},
    ),
    "prefix": (PREFIX, PREFIXED),
    "prefix with lse": ({**PREFIX, "return_lse": True}, {**PREFIXED, "returns_lse": True}),
    "prefix of no queries": (
        {**PREFIX, "q": some(2, 0, 4, 16)},
        {**PREFIXED, "merges": False, "aligned": False},
    ),
    "prefix and new tokens": ({**PREFIX, **NEW}, {**APPENDS, **PREFIXED}),
    "prefix and rotary": (
        {**PREFIX, **TURNED, **tables(19), "q": some(2, 5, 4, 16)},
        {**APPENDS, **PREFIXED, "rotated": 8},
    ),
    "v in k": ({"v_cache": CACHE["k_cache"][..., :8]}, {"v in k": True}),
    "an unaligned q": ({"q": unaligned(CACHE["q"])}, {"aligned": False}),
    "an unaligned k": ({**NEW, "k": unaligned(NEW["k"])}, {**APPENDS, "aligned": False}),
    **{f"a {n} that records": ({n: t}, {"records": True}) for n, t in WANTING.items()},
    "a k that records": ({**NEW, "k": some(2, 3, 2, 16, grad=True)}, {**APPENDS, "records": True}),
    "a sine that records": (
        {**TURNED, "rotary_sin": some(12, 4, grad=True)},
        {**APPENDS, "records": True},
    ),
    "a prefix that records": (
        {"shared_prefix": (PREFIX["shared_prefix"][0], some(6, 2, 8, grad=True))},
        {**PREFIXED, "records": True},
    ),
}


@pytest.mark.parametrize("place", ["cpu", "gpu"])
@pytest.mark.parametrize("name", FACTS)
def test_what_a_call_over_a_cache_needs_each_time_is_known_once(name, place):
    given, others = FACTS[name]
    if place == "cpu":
        call = made(given)
        others = {**others, "counts": False, "merges": False}
        others["plain"] = given.get("cache_seqlens", 0) is None
    else:
        with standin.gpu():
            call = made(given)
        others = {**others, "checks": False, "plain": True}
    assert facts_of(call) == {**USUAL, **others}
    for part in filter(None, (call.attention, call.prefix and call.prefix.call)):
        assert not (part.wants_grad or part.problem.needs_grad or part.problem.bias_grad)
    assert (call.step is not None) == call.counts


STRIDED = torch.stack([ints(5, 4), ints(0, 0)], 1)[:, 0]


@pytest.mark.parametrize("name", [*FACTS, "strided lengths", "padding", "rows", "slopes"])
def test_a_call_that_is_one_program_hands_over_the_addresses_of_its_arguments(name):
    others = {"strided lengths": {"cache_seqlens": STRIDED}, "padding": {"leftpad_k": ints(1, 0)}}
    others |= {"rows": {"kv_batch_idx": ints(1, 0)}, "slopes": {"alibi_slopes": some(2, 4)}}
    given = others.get(name) or FACTS.get(name, ({},))[0]
    x, options, update, out = parts(given)
    assert CacheCall(x, options, update, out).run_on is None, "on a CPU values are checked"
    with standin.gpu():
        call = CacheCall(x, options, update, out)
    lengths = {**CACHE, **given}["cache_seqlens"]
    more = {"shared_prefix", "leftpad_k"} & set(given)
    if more or isinstance(lengths, int) or lengths is STRIDED:
        assert call.run_on is None
        return
    assert call.run_on is not None
    if not call.aligned:
        return
    found = call.likeness.addresses(kvcache._arguments(x, update, out))
    wanted = [t.data_ptr() for t in (*x, *update, out) if isinstance(t, torch.Tensor)]
    assert found is not None and sorted(found) == sorted(wanted)


def test_keys_that_are_padded_are_counted_by_the_step_alone():
    with standin.gpu():
        assert made({**NEW, "leftpad_k": ints(1, 0)}).run_on is not None


def test_what_is_made_for_a_call_is_on_its_device(monkeypatch):
    # Tensors without memory are all at address 0.
    monkeypatch.setattr(kvcache, "check_apart", lambda *_: None)
    for module in (kvcache, calls):
        monkeypatch.setattr(module, "check_all_bare", lambda *_: None)
    given = {**CACHE, **TURNED, "cache_seqlens": 5}
    there = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with standin.gpu():
        call = made(there)
    assert call.step is not None and not call.attention.steps


def test_a_rotated_q_is_dense_where_the_callers_is_not():
    across = some(2, 16, 4, 3).permute(0, 3, 2, 1)
    for more, steps in ((NEW, 1), (TURNED, 0)):
        assert len(made({**more, "q": across}).attention.steps) == steps


@pytest.mark.parametrize("more", [{}, PREFIX], ids=["", "prefix"])
def test_all_that_runs_is_compiled_before_anything_is_written(more, monkeypatch):
    """Whichever kernel cannot be compiled, nothing is launched."""
    for most in range(9):
        compiled: list[str] = []
        with standin.gpu() as gpu:
            compiles = gpu.compile

            def compile_some(call, arch, compiles=compiles, compiled=compiled, most=most):
                if len(compiled) == most:
                    raise RuntimeError("no compiler")
                compiled.append(call.kernel.function)
                return compiles(call, arch)

            monkeypatch.setattr(bound, "compile_call", compile_some)
            given = {**CACHE, **TURNED, **tables(19), **more}
            try:
                heedful.flash_attn_with_kvcache(**given)
            except RuntimeError:
                assert not gpu.launches
                continue
        break
    assert "append_and_rotate" in compiled and len(compiled) == (4 if more else 2)
    assert len(gpu.launches) == len(compiled)


def fits(call: CacheCall, x: Operands, update: CacheUpdate) -> bool:
    """As flash_attn_with_kvcache asks."""
    found = call.likeness.addresses(kvcache._arguments(x, update, None))
    return found is not None and (found[call.k] == found[call.v]) is call.shares


def test_tensors_of_another_kind_are_not_taken_for_those_of_a_call():
    given = {**TURNED, **PAGES}
    x, _, update, _ = parts(given)
    call = made(given)
    assert fits(call, x, update)
    again = {name: t.clone() for name, t in {**CACHE, **given}.items() if name != "causal"}
    x, _, update, _ = parts(again)
    assert fits(call, x, update)
    for name, tensor in again.items():
        for other in (unaligned(tensor), torch.cat([tensor, tensor])):
            x, _, update, _ = parts({**again, name: other})
            assert not fits(call, x, update), name


def test_values_in_the_keys_are_another_kind_than_values_apart():
    k = CACHE["k_cache"]
    apart, within = {"v_cache": torch.randn_like(k)[..., :8]}, {"v_cache": k[..., :8]}
    for own, other in ((apart, within), (within, apart)):
        call = made(own)
        for given in (own, other):
            x, _, update, _ = parts(given)
            assert fits(call, x, update) == (given is own)


@pytest.mark.parametrize("name", ["plain", "a q that records", "a prefix that records"])
def test_recording_is_off_where_something_would_be_recorded(name, monkeypatch):
    """And left alone elsewhere, which costs nothing."""
    seen, run = [], kvcache._run

    def watched(*given):
        seen.append(torch.is_grad_enabled())
        return run(*given)

    monkeypatch.setattr(kvcache, "_run", watched)
    x, options, update, out = parts(FACTS[name][0])
    result = kvcache._eager(x, options, update._replace(rotary_interleaved=True), out)
    assert isinstance(result, torch.Tensor) and not result.requires_grad
    assert seen == [name == "plain"]


@pytest.mark.parametrize("sink", [None, torch.zeros(8)[::2]], ids=["", "sink"])
@pytest.mark.parametrize("out", [None, torch.zeros(2, 3, 4, 16)[..., :8]], ids=["", "out"])
def test_a_merge_is_bound_for_the_very_tensors_that_it_is_given(sink, out, monkeypatch):
    bound, run = [], []

    class Merge:
        def __init__(self, specs, device):
            bound.append((specs, device))

        def __call__(self, tensors, out):
            run.append((tensors, out))
            return tensors["apart_out"], tensors["apart_lse"]

    monkeypatch.setattr(prefix, "DeviceMerge", Merge)
    x, options, update, _ = parts({**PREFIX, "sink": sink, "out": out})
    with standin.gpu():
        kvcache._eager(x, options, update._replace(rotary_interleaved=True), out)
    ((specs, device),), ((tensors, into),) = bound, run
    assert device == x.q.device and into is out
    # There is one part: a step to the next of 0 is a multiple of whatever kernels may ask for.
    assert specs["partial_lse"].strides[0] == 0
    given = tensors if out is None else {**tensors, "out": out}
    assert set(specs) == set(given)
    for name, tensor in given.items():
        own, spec = array_spec(tensor), specs[name]
        assert (own.shape, own.dtype) == (spec.shape, spec.dtype)
        assert own.strides[-3:] == spec.strides[-3:] and (own.aligned or not spec.aligned)
