"""Calls that come again: what each of them costs, and what is asked of it anew."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful.torch as typed
from heedful.core.call.arguments import Options
from heedful.core.call.operands import Operands
from heedful.torch.eager import backends, calls, kinds
from heedful.torch.eager.calls import CALLS, KINDS, LATEST, PLAIN
from support.runs import standin

heedful: Any = typed
INT = torch.int32


def some(*shape: int, **more) -> torch.Tensor:
    return torch.randn(shape, **more)


def moved(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The same values, that many bytes behind a multiple of 16."""
    memory = torch.zeros(tensor.nbytes + 32, dtype=torch.uint8)
    begin = nbytes - memory.data_ptr() % 16 + 16
    placed = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    assert placed.data_ptr() % 16 == nbytes
    return placed.copy_(tensor)


def tensors() -> dict[str, Any]:
    return {"q": some(2, 5, 4, 16), "k": some(2, 7, 2, 16), "v": some(2, 7, 2, 8)}


def refuse(*_, **__):
    raise AssertionError("not to be called")


@pytest.fixture(autouse=True)
def nothing_is_known():
    for known in (CALLS, KINDS, LATEST, PLAIN):
        known.clear()
    yield
    for known in (CALLS, KINDS, LATEST, PLAIN):
        known.clear()


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink"])
@pytest.mark.parametrize("more", [{}, {"dropout_p": 0.5}], ids=["", "dropout"])
def test_a_gradient_is_there_each_time_whichever_operand_wants_it(name, more):
    given = {**tensors(), "bias": some(5, 7), "sink": some(4)}
    if name in "qkv":
        del given["bias"], given["sink"]
    given[name].requires_grad_()
    for _ in range(3):
        out = heedful.flash_attn_func(**given, **more)
        (grad,) = torch.autograd.grad(out.sum(), [given[name]])
        assert grad.shape == given[name].shape and grad.any()
        with torch.no_grad():
            assert not heedful.flash_attn_func(**given, **more).requires_grad


@pytest.mark.parametrize("wanted", [False, True])
def test_nothing_is_recorded_of_calls_without_gradients(wanted, monkeypatch):
    monkeypatch.setattr(calls, "_apply", refuse)
    given = tensors()
    given["q"].requires_grad_(wanted)
    for _ in range(3):
        with torch.set_grad_enabled(not wanted):
            heedful.flash_attn_func(**given)


def test_a_function_is_applied_without_a_look_for_wrappers(monkeypatch):
    monkeypatch.setattr(calls.Attention, "apply", refuse)
    given = tensors()
    given["q"].requires_grad_()
    for _ in range(3):
        assert heedful.flash_attn_func(**given).requires_grad


def test_options_are_looked_at_once_whatever_the_lengths(monkeypatch):
    heedful.flash_attn_func(**tensors(), softcap=2.0)
    monkeypatch.setattr(calls, "plain_options", refuse)
    heedful.flash_attn_func(some(2, 9, 4, 16), some(2, 9, 2, 16), some(2, 9, 2, 8), softcap=2.0)
    with pytest.raises(AssertionError, match="not to be called"):
        heedful.flash_attn_func(**tensors(), softcap=2)


def test_flags_and_numbers_in_tensors_are_read_each_time():
    given = tensors()
    cases: list[tuple[str, torch.Tensor, Any]] = [
        ("causal", torch.tensor(False), True),
        ("softcap", torch.tensor(0.0), 2.0),
        ("return_lse", torch.tensor(False), True),
    ]
    for name, value, other in cases:
        wanted = [heedful.flash_attn_func(**given, **{name: n}) for n in (value.item(), other)]
        for want in wanted:
            for _ in range(2):
                got = heedful.flash_attn_func(**given, **{name: value})
                for one, two in zip(got, want, strict=True):
                    assert torch.equal(one, two), name
            value.fill_(other)


def test_autocast_of_another_device_is_not_that_of_a_call():
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert heedful.flash_attn_func(**tensors()).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("nbytes", [4, 8, 12])
def test_where_in_16_bytes_a_tensor_begins_tells_calls_apart(name, nbytes):
    given = tensors()
    with standin.gpu():
        for place, known in ((0, 1), (nbytes, 2), (0, 2), (nbytes, 2)):
            heedful.flash_attn_func(**{**given, name: moved(given[name], place)})
            assert len(CALLS) == known
    for bases in (0, nbytes):
        q, k, v = (moved(t, bases if n == name else 0) for n, t in given.items())
        key = calls.call_key(q, k, v, None, None, None, bases)
        wanted = tuple(bases if n == name else 0 for n in "qkv")
        assert key[12] == (wanted if bases else 0)


def test_eight_bits_at_an_odd_address_are_not_taken_for_aligned_ones():
    given = {n: some(2, 7, 2, 16).to(torch.float8_e4m3fn) for n in "qkv"}
    with standin.gpu("H200"):
        heedful.flash_attn_func(**given)
        with pytest.raises(ValueError, match="does not take bases or strides off 16 bytes"):
            heedful.flash_attn_func(**{**given, "q": moved(given["q"], 1)})


def packed(longest: int = 3, rows: int = 5, **more) -> dict[str, Any]:
    bounds = torch.tensor([0, min(longest, rows), min(longest, rows)], dtype=INT)
    given = {"q": some(rows, 4, 16), "k": some(rows, 2, 16), "v": some(rows, 2, 16)}
    given |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone()}
    return given | {"max_seqlen_q": longest, "max_seqlen_k": longest} | more


def in_pages() -> dict[str, Any]:
    given = packed(k=some(6, 4, 2, 16), v=some(6, 4, 2, 16), cu_seqlens_k=None)
    given |= {"block_table": torch.zeros(2, 3, dtype=INT)}
    return given | {"seqused_k": torch.tensor([4, 5], dtype=INT)}


def test_packed_sequences_are_known_by_their_kind_unless_their_keys_are_in_pages():
    for given, known in ((packed(), 1), (in_pages(), 0)):
        with standin.gpu():
            heedful.flash_attn_varlen_func(**given)
            assert (len(KINDS), len(LATEST)) == (known, known)


@pytest.mark.parametrize("lengths", [(3, 0, 2, 0), (0, 0, 3, 0), (1, 0, 1, 0)], ids=str)
def test_calls_of_new_lengths_have_the_very_problem_of_their_own(lengths):
    """Also where there is nothing at all."""
    with standin.gpu():
        for length in lengths:
            given = packed(length, rows=length + 1)
            # The first of new lengths keeps nothing.
            for _ in range(2):
                heedful.flash_attn_varlen_func(**given)
            (kind,) = LATEST.values()
            known = *CALLS.young.values(), *kind._calls.values()
            found = [call.problem for call in known if call is not None]
            x = Operands(**{n: given[n] for n in Operands._fields if n in given})
            options = Options("varlen", length, length)
            assert calls.Call(x, options, (False, False, False), None).problem in found
            assert len(KINDS) == 1


def test_lengths_are_told_to_runners_as_their_problem_has_them(monkeypatch):
    told, runner = [], backends.GpuRunner.at

    def noted(self, numbers, sizes, comes_again):
        made = runner(self, numbers, sizes, comes_again)
        told.append((made.problem, [*numbers[:5], *sizes]))
        return made

    monkeypatch.setattr(backends.GpuRunner, "at", noted)
    with standin.gpu():
        for length in (5, 6):
            given = {**tensors(), "q": some(2, length, 4, 16)}
            told.clear()
            for _ in range(2):
                heedful.flash_attn_func(**given)
            problem, values = told[-1]
            assert problem.seqlen_q == length
            assert values == kinds.of_call(problem, given)[1]


def test_the_kinds_of_the_last_calls_are_as_many_as_kinds_are_kept():
    with standin.gpu():
        for key in range(256):
            LATEST.of((key,), object)
        heedful.flash_attn_func(**tensors())
        assert len(LATEST) == 1


def test_a_drawn_key_is_any_that_torch_can_draw(monkeypatch):
    asked, draw = [], torch.randint

    def noted(*given, **more):
        asked.append(given)
        return draw(*given, **more)

    monkeypatch.setattr(torch, "randint", noted)
    assert calls.make_seed(None, torch.device("cpu")).dtype == torch.int64
    ((high, shape),) = asked
    assert shape == (1,)
    with pytest.raises((RuntimeError, OverflowError, ValueError)):
        draw(high + 1, shape)


@pytest.mark.parametrize("seed", [None, 5, torch.tensor([5])], ids=str)
def test_a_kernel_is_planned_for_a_key_of_one_integer(seed, monkeypatch):
    seen, prepare = [], backends.prepare

    def noted(problem, given, *how):
        seen.append(given.seed)
        return prepare(problem, given, *how)

    monkeypatch.setattr(backends, "prepare", noted)
    x = Operands(**tensors())
    calls.Call(x, Options("dense", dropout_p=0.5), (False, False, False), None, seed)
    calls.Call(x, Options("dense"), (False, False, False), None, seed)
    made, none = seen
    assert (made.shape, made.dtype, made.device) == ((1,), torch.int64, x.q.device)
    assert none is None


def test_what_is_not_in_the_key_of_the_latest_call_is_checked_after_it_too():
    """Also where no kernel is launched for what is wrong."""
    given = tensors()
    with standin.gpu() as gpu:
        for _ in range(3):
            heedful.flash_attn_func(**given)
        before = len(gpu.launches)
        for _ in range(2):
            with pytest.raises(ValueError, match="^out must have shape "):
                heedful.flash_attn_func(**given, out=torch.zeros(2, 6, 4, 8))
            with pytest.raises(TypeError, match="^out must be "):
                heedful.flash_attn_func(**given, out=torch.zeros(2, 5, 4, 8, dtype=torch.float16))
            with pytest.raises(ValueError, match="^dropout_seed must fit 64 bits"):
                heedful.flash_attn_func(**given, dropout_seed=2**64)
        assert len(gpu.launches) == before
        out = torch.zeros(2, 5, 4, 8)
        assert heedful.flash_attn_func(**given, out=out) is out


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_what_is_no_tensor_is_named_under_autocast_too(name):
    given = {"q": some(2, 1, 4, 16), "k_cache": some(2, 9, 2, 16), "v_cache": some(2, 9, 2, 16)}
    for _ in range(2):
        with torch.autocast("cpu"), pytest.raises(TypeError, match=f"^{name} must be a torch.Tens"):
            heedful.flash_attn_with_kvcache(**{**given, name: 3})
