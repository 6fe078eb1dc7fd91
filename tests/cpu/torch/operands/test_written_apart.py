"""A call that would write over what it reads is refused, in part too, each time, and writes
nothing."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, strategies

pytest.importorskip("triton")

import heedful.torch as typed
from heedful.core.base.arrays import ArraySpec
from heedful.core.call.storage import may_share
from heedful.torch.operands.apart import Apart
from support.runs import standin

heedful: Any = typed
INT = torch.int32
WORDS = "must have memory of its own, as it is written, got some of that of"


def views() -> strategies.SearchStrategy:
    """A base, sizes and strides of a view."""
    dims = strategies.lists(
        strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 12)), max_size=3
    )
    return strategies.tuples(strategies.integers(0, 20), dims)


def places(base: int, dims, item: int) -> set[int]:
    steps = (range(0, size * stride, stride) for size, stride in dims)
    firsts = [base + sum(at) for at in itertools.product(*steps)]
    return {item * first + byte for first in firsts for byte in range(item)}


@given(views(), views())
def test_arrays_said_to_lie_apart_have_no_byte_in_common(one, other):
    specs = []
    for _, dims in (one, other):
        shape, strides = tuple([s for s, _ in dims]), tuple([s for _, s in dims])
        specs.append(ArraySpec._make((shape, strides, "float32", True, None)))
    common = places(one[0], one[1], 4) & places(other[0], other[1], 4)
    if not may_share(specs[0], specs[1], 4 * (other[0] - one[0])):
        assert not common


def spec(tensor: torch.Tensor) -> ArraySpec:
    return ArraySpec(tuple(tensor.shape), tensor.stride(), "float32")


def test_arrays_in_each_others_gaps_lie_apart():
    pool = torch.empty(4, 2, 8, 2, 16)
    matrix = torch.empty(10, 96)
    across = torch.empty(5, 3, 7)
    for one, other in (
        (pool[:, 0], pool[:, 1]),
        (pool[::2], pool[1::2]),
        (pool[..., :4], pool[..., 4:12]),
        (matrix[:, :32], matrix[2:7, 32:64]),
        (across[:, 0].mT, across[:, 2].mT),
    ):
        for a, b in ((one, other), (other, one)):
            assert not may_share(spec(a), spec(b), b.data_ptr() - a.data_ptr())
    assert may_share(spec(pool[:, 0]), spec(pool[1, :]), 4 * pool.stride(0))


def dense() -> dict[str, Any]:
    q, k, v = (torch.randn(2, 33, 2, 16) for _ in range(3))
    bias, sink = torch.randn(1, 2, 33, 33), torch.randn(2)
    given = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    return given | {"out": torch.zeros(2, 33, 2, 16)}


def packed() -> dict[str, Any]:
    bounds = torch.tensor([0, 20, 33], dtype=INT)
    q, k, v = (torch.randn(33, 2, 16) for _ in range(3))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone()}
    return given | {"max_seqlen_q": 20, "max_seqlen_k": 20, "out": torch.zeros(33, 2, 16)}


def cached() -> dict[str, Any]:
    given = {"q": torch.randn(2, 1, 2, 16)}
    given |= {name: torch.randn(2, 40, 2, 16) for name in ("k_cache", "v_cache")}
    given |= {name: torch.randn(2, 1, 2, 16) for name in ("k", "v")}
    return given | {"cache_seqlens": torch.tensor([2, 5], dtype=INT), "num_splits": 1}


def with_out() -> dict[str, Any]:
    return cached() | {"out": torch.zeros(2, 1, 2, 16)}


KINDS = {
    dense: (heedful.flash_attn_func, ("out",)),
    packed: (heedful.flash_attn_varlen_func, ("out",)),
    cached: (heedful.flash_attn_with_kvcache, ("k_cache", "v_cache")),
    with_out: (heedful.flash_attn_with_kvcache, ("out", "k_cache")),
}


def into_part(written: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, with the same values, in one piece of memory of which a few bytes are both's."""
    sizes = [t.numel() * t.element_size() for t in (written, read)]
    both = torch.zeros(sum(sizes), dtype=torch.uint8)
    begin = max(0, sizes[0] - 16)
    later = both[begin : begin + sizes[1]].view(read.dtype).view(read.shape).copy_(read)
    first = both[: sizes[0]].view(written.dtype).view(written.shape)
    first.view(torch.uint8).view(-1)[:begin].copy_(written.view(torch.uint8).view(-1)[:begin])
    return first, later


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_call_that_writes_what_it_reads_is_refused_each_time(make, gpu):
    run, written = KINDS[make]
    others = [name for name, t in make().items() if isinstance(t, torch.Tensor)]
    pairs = [(w, r) for w in written for r in others if r != w]
    pairs = [(w, r) for w, r in pairs if not {w, r} <= {"k_cache", "v_cache"}]

    def check():
        for known in (False, True):
            for place, name in pairs:
                arguments = make()
                if known:
                    run(**make())
                    run(**make())
                arguments[place], arguments[name] = into_part(arguments[place], arguments[name])
                before = arguments[place].clone()
                with pytest.raises(ValueError, match=WORDS):
                    run(**arguments)
                assert torch.equal(arguments[place], before)

    if not gpu:
        return check()
    with standin.gpu("H200"):
        check()


def test_an_output_in_the_gaps_of_an_input_and_caches_in_one_pool_are_taken():
    pool = torch.randn(2, 33, 4, 2, 16)
    q, k, v, out = pool.unbind(2)
    wanted = heedful.flash_attn_func(q, k, v)
    heedful.flash_attn_func(q, k, v, out=out)
    torch.testing.assert_close(out, wanted)
    pages = torch.randn(4, 2, 8, 2, 16)
    table = torch.arange(4, dtype=INT).view(2, 2)
    q, k, v = (torch.randn(2, 1, 2, 16) for _ in range(3))
    lengths = torch.tensor([3, 9], dtype=INT)
    for _ in range(3):
        heedful.flash_attn_with_kvcache(
            q, pages[:, 0], pages[:, 1], k, v, cache_seqlens=lengths, block_table=table
        )
    # A shared prefix may be other rows of the same cache.
    rows = {"cache_batch_idx": torch.tensor([1, 2], dtype=INT), "cache_seqlens": lengths}
    cache = torch.randn(3, 16, 2, 16), torch.randn(3, 16, 2, 16)
    prefix = cache[0][0], cache[1][0]
    heedful.flash_attn_with_kvcache(q, *cache, k, v, shared_prefix=prefix, **rows)


def test_through_the_dispatcher_an_output_over_an_input_is_right():
    """It is written after everything was read."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    big = torch.randn(3, 33, 2, 16)
    k, v = torch.randn(2, 33, 2, 16), torch.randn(2, 33, 2, 16)
    wanted = heedful.flash_attn_func(big[:2], k, v)
    with Mode():
        heedful.flash_attn_func(big[:2], k, v, out=big[1:])
        with pytest.raises(ValueError, match=WORDS):
            heedful.flash_attn_with_kvcache(
                big[:2, :1], k, v, k[:, 3:4], v[:, :1].clone(), cache_seqlens=2
            )
    torch.testing.assert_close(big[1:], wanted)


def test_addresses_that_were_looked_at_are_kept_in_a_bounded_number():
    out, k = torch.zeros(4, 8), torch.zeros(4, 8)
    found = Apart({"k": k, "out": out}, ["out"])
    for layer in range(600):
        found.check([0, 4096 * (1 + layer)])
    assert 0 < len(found._seen) <= 256
