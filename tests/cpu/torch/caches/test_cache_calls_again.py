"""Calls over a cache that come again: what they are known by, and what is checked of each."""

import ctypes
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import heedful.torch as heedful
from heedful.core.call.arguments import CacheUpdate
from heedful.core.call.operands import Operands
from heedful.torch.api import kvcache
from heedful.torch.eager.calls import CALLS
from support import launches
from support.runs import standin

INT = torch.int32
# Of lengths that kernels are given once new keys are counted.
LENGTHS = ("seqused", "used_k", "seqused_k")


def some(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.new_zeros(tensor.numel() + 16)[1 : 1 + tensor.numel()].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved.copy_(tensor)


STEP = {"q": some(2, 1, 4, 16), "k_cache": some(2, 12, 2, 16), "v_cache": some(2, 12, 2, 16)}
STEP |= {"cache_seqlens": torch.tensor([5, 4], dtype=INT)}
PREFIX = {"shared_prefix": (some(3, 2, 16), some(3, 2, 16))}
LONGER = {"shared_prefix": (some(6, 2, 16), some(6, 2, 16))}


def decode(**more) -> Any:
    return heedful.flash_attn_with_kvcache(**{**STEP, **more})


def refuse(*_):
    raise AssertionError("not known")


@pytest.fixture(autouse=True)
def nothing_is_known():
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.mark.parametrize("name", ["plain", "out", "prefix", "unaligned"])
def test_the_latest_call_is_one_of_aligned_tensors_that_came_twice(name, monkeypatch):
    """Without a prefix of the caller's, which is checked by its key."""
    kinds = {"out": {"out": torch.zeros(2, 1, 4, 16)}, "prefix": PREFIX}
    more = {**kinds, "unaligned": {"q": unaligned(STEP["q"])}, "plain": {}}[name]
    decode(**more)
    assert not CALLS.latest and len(CALLS) == 1
    monkeypatch.setattr(kvcache, "CacheCall", refuse)
    decode(**more)
    ((key, call),) = CALLS.young.items()
    assert list(CALLS.latest.values()) == ([call] if name in ("plain", "out") else [])
    decode(**more)
    monkeypatch.setattr(CALLS, "latest", {})
    monkeypatch.setattr(CALLS, "_old", CALLS.young)
    monkeypatch.setattr(CALLS, "young", {})
    decode(**more)
    assert CALLS.young == {key: call}


def test_a_call_whose_arguments_have_no_key_is_made_each_time():
    sparse = torch.eye(2).to_sparse()
    for _ in range(2):
        with pytest.raises(TypeError, match="^cache_leftpad must be a dense"):
            decode(cache_leftpad=sparse)
    assert not CALLS.young and not CALLS.latest


def test_what_is_not_in_the_key_of_the_latest_call_is_checked_after_it_too():
    for _ in range(2):
        decode()
    for _ in range(2):
        with pytest.raises(ValueError, match="^out must have shape "):
            decode(out=torch.zeros(2, 2, 4, 16))
        with pytest.raises(ValueError, match="^out must have memory of its own"):
            decode(out=STEP["q"])
        decode(out=torch.zeros(2, 1, 4, 16))
    for wrong in (list(PREFIX["shared_prefix"]), torch.zeros(2, 3, 2, 16), 3, torch.tensor(3)):
        with pytest.raises(TypeError, match="^shared_prefix must be a tuple"):
            decode(shared_prefix=wrong)


def test_prefixes_of_other_lengths_are_calls_of_their_own():
    wanted = []
    for more in (PREFIX, LONGER):
        CALLS.clear()
        wanted.append(decode(**more))
    for _ in range(3):
        for more, want in zip((PREFIX, LONGER), wanted, strict=True):
            assert torch.equal(decode(**more), want)


@pytest.mark.parametrize("name", ["int32", "int64", "int", "none"])
def test_lengths_of_another_type_are_calls_of_their_own(name):
    lengths: Any = {"int": 5, "none": None, "int64": STEP["cache_seqlens"].long()}
    lengths["int32"] = STEP["cache_seqlens"]
    for _ in range(2):
        decode(**{"cache_seqlens": lengths[name]} if name != "int64" else {})
    want = decode(cache_seqlens=lengths["int32"])
    assert torch.equal(decode(cache_seqlens=lengths["int64"]), want)
    with pytest.raises(TypeError, match="^cache_seqlens must be int32 or int64"):
        decode(cache_seqlens=lengths["int32"].short())
    for short in (torch.zeros(1, dtype=INT), torch.zeros(2, 1, dtype=INT)):
        with pytest.raises(ValueError, match="^cache_seqlens must "):
            decode(cache_seqlens=short)


def test_flags_and_numbers_in_tensors_are_read_each_time():
    q = some(2, 3, 4, 16)
    cases: list[tuple[str, torch.Tensor, Any]] = [
        ("causal", torch.tensor(False), True),
        ("softcap", torch.tensor(0.0), 2.0),
        ("return_softmax_lse", torch.tensor(False), True),
        ("cache_seqlens", torch.tensor(2), 5),
    ]
    for name, value, other in cases:
        wanted = [decode(q=q, **{name: plain}) for plain in (value.item(), other)]
        for want in wanted:
            for _ in range(2):
                got = decode(q=q, **{name: value})
                for one, two in zip(got, want, strict=True):
                    assert torch.equal(one, two), name
            value.fill_(other)


def test_autocast_of_another_device_is_not_that_of_a_call():
    half = {name: t.half() for name, t in STEP.items() if name != "cache_seqlens"}
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(TypeError, match="^k_cache must be float32"):
            decode(**{**half, "q": STEP["q"]})
    finally:
        torch.set_autocast_enabled("cuda", before)


def test_autocast_leaves_integers_for_the_checks_to_find():
    whole = torch.zeros(2, 1, 2, 16, dtype=INT)
    with torch.autocast("cpu"):
        for name in "kv":
            given = {"k": some(2, 1, 2, 16), "v": some(2, 1, 2, 16), name: whole}
            with pytest.raises(TypeError, match=f"^{name} must be float32 like {name}_cache"):
                decode(**given)
        with pytest.raises(TypeError, match="^q must be "):
            decode(q=torch.zeros(2, 1, 4, 16, dtype=INT))


def test_lengths_of_an_int_are_made_where_the_queries_are():
    update = CacheUpdate(cache_seqlens=5)
    x = Operands(torch.empty(2, 3, 4, 16, device="meta"), None, None)
    for made in (kvcache._length_like(update, x.q), kvcache._start(update, x)):
        assert (made.device.type, made.dtype, made.shape) == ("meta", INT, (2,))
    x = Operands(some(2, 3, 4, 16), None, None)
    assert kvcache._start(update, x).tolist() == [5, 5]
    apart = torch.tensor([[5, 0], [4, 0]], dtype=INT)[:, 0]
    assert kvcache._length_like(CacheUpdate(cache_seqlens=apart), x.q) is apart
    dense = kvcache._start(CacheUpdate(cache_seqlens=apart), x)
    assert dense.tolist() == [5, 4] and dense.is_contiguous()


def test_parameters_are_tensors_like_others():
    want = decode()
    for name in ("q", "k_cache", "v_cache"):
        for _ in range(3):
            assert torch.equal(decode(**{name: Parameter(STEP[name])}), want)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("new", [0, 1])
def test_keys_before_a_sequence_begins_are_not_counted(new, checks, monkeypatch):
    """By whatever counts the keys that there are once new ones are written."""
    monkeypatch.setenv("HEEDFUL_CHECK_PAGES", checks)
    pads, table = torch.tensor([2, 1], dtype=INT), torch.arange(6, dtype=INT).view(2, 3)
    more: dict[str, Any] = {"cache_leftpad": pads, "block_table": table}
    more |= {name: some(6, 4, 2, 16) for name in ("k_cache", "v_cache")}
    if new:
        more |= {name: some(2, 1, 2, 16) for name in "kv"}
    read: list[tuple[str, list[int]]] = []
    with standin.gpu() as gpu:

        def look(slot) -> None:
            """At the lengths that attention is given, while they are in memory."""
            made = slot._code.call.kernel.function
            (offset,) = (p.offset for p in slot._code.parameters if p.name.endswith(LENGTHS))
            address = int.from_bytes(slot.buffer.raw[offset : offset + 8], "little")
            read.append((made, [*(ctypes.c_int32 * 2).from_address(address)]))

        gpu.before_launch = look
        for _ in range(3):
            decode(**more)
    # The kernel that counts is not run: new memory is full of -1.
    if new:
        assert read == [("append_keys", [-1, -1]), ("attention_forward", [-1, -1])] * 3
        append, attend = (launches.places(launch) for launch in gpu.launches[-2:])
        assert append["seqused"].address == attend["seqused_k"].address
        assert append["leftpad_k"].address == pads.data_ptr()
    else:
        assert read == [("attention_forward", [3, 3])] * 3
