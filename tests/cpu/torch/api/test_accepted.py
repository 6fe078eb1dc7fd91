"""What a peer takes is taken: numbers, flags and windows of any kind that stand for plain ones,
and lengths in tensors. A call so written is the plain call.
"""

from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import heedful.torch as typed
from heedful.core.call.operands import Operands
from heedful.torch.eager import calls
from heedful.torch.eager.calls import CALLS
from heedful.torch.eager.pages import added_up, gathered, page_numbers
from heedful.torch.operands.plain import plain_length
from support.problems.budget import check
from support.problems.cases import Case, build, variants
from support.problems.grids import in_turns
from support.runs.api import compiled, dense, results

# What is passed here is more than the signatures say.
heedful: Any = typed


class Index:
    """A number of nobody's library."""

    def __init__(self, value: int):
        self.value = value

    def __index__(self) -> int:
        return self.value


class Real:
    """One that is not whole."""

    def __init__(self, value: float):
        self.value = value

    def __float__(self) -> float:
        return self.value


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed() -> Any:
    torch.manual_seed(0)
    tensors = torch.randn(9, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 8)
    return *tensors, ints(0, 4, 9), ints(0, 5, 12)


def same(a, b) -> bool:
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# (argument, the plain value, values that stand for it)
STANDS_FOR = [
    (
        "window_size",
        (4, 2),
        [
            [4, 2],
            deque([4, 2]),
            np.array([4, 2]),
            np.array([4, 2], np.uint8),
            (np.int64(4), np.int32(2)),
            torch.tensor([4, 2]),
            (torch.tensor(4), torch.tensor([2])),
            [Index(4), 2],
            torch.Size([4, 2]),
        ],
    ),
    ("window_size", (4, 2, 1), [[4, 2, 1], np.array([4, 2, 1]), torch.tensor([4, 2, 1])]),
    ("window_size", (-1, -1), [[-1, -1], (np.int64(-1), -1), torch.tensor([-1, -1])]),
    (
        "num_splits",
        1,
        [np.int64(1), np.array(1), np.array([1]), torch.tensor(1), torch.tensor([1]), Index(1)],
    ),
    (
        "softcap",
        2.5,
        [np.float64(2.5), np.float32(2.5), torch.tensor(2.5), torch.tensor([2.5]), Fraction(5, 2)],
    ),
    ("softcap", 2, [2.0, np.int8(2), torch.tensor(2), Index(2), Real(2.0), Decimal(2)]),
    ("softmax_scale", 0.25, [np.float16(0.25), np.array([0.25]), torch.tensor(0.25).bfloat16()]),
    ("causal", True, [np.bool_(True), np.array(True), torch.tensor(True)]),
    ("deterministic", True, [np.bool_(True)]),
    ("return_lse", True, [np.bool_(True), torch.tensor([True])]),
    ("return_attn_probs", True, [np.bool_(True)]),
]
SEEDED = [
    ("dropout_p", 0.25, [np.float32(0.25), torch.tensor(0.25), Fraction(1, 4)]),
    (
        "dropout_seed",
        7,
        [
            np.int64(7),
            np.uint64(7),
            np.array([7]),
            torch.tensor(7),
            torch.tensor([7]),
            ints(7),
            torch.tensor(7, dtype=torch.uint8),
            Index(7),
        ],
    ),
    ("dropout_seed", 2**64 - 1, [np.uint64(2**64 - 1), -1, torch.tensor(-1)]),
    (
        "dropout_origin",
        (1, 2, 3, 8),
        [[1, 2, 3, 8], np.array([1, 2, 3, 8]), torch.tensor([1, 2, 3, 8]), (1, 2, 3, np.int64(8))],
    ),
]
EACH = [(name, plain, other) for name, plain, others in STANDS_FOR for other in others]
SEEDED_EACH = [(name, plain, other) for name, plain, others in SEEDED for other in others]


def words(value) -> str:
    return f"{type(value).__name__}-{value!r:.40}" if not callable(value) else str(value)


@pytest.mark.parametrize("first", ["plain", "other"])
@pytest.mark.parametrize(("name", "plain", "other"), EACH, ids=words)
def test_what_stands_for_a_value_is_that_value(name, plain, other, first):
    """Whichever of both the library has seen before."""
    CALLS.clear()
    tensors = dense()
    order = (plain, other, other) if first == "plain" else (other, other, plain)
    got = [heedful.flash_attn_func(*tensors, **{name: value}) for value in order]
    assert same(got[0], got[1]) and same(got[1], got[2])


@pytest.mark.parametrize(("name", "plain", "other"), SEEDED_EACH, ids=words)
def test_what_stands_for_a_dropout_is_that_dropout(name, plain, other):
    CALLS.clear()
    q, k, v = (tensor.requires_grad_() for tensor in dense())
    keywords: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 3}
    got = []
    for value in (plain, other):
        out = heedful.flash_attn_func(q, k, v, **keywords | {name: value})
        got.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert same(*got)
    assert not same(got[0][0], heedful.flash_attn_func(q, k, v, **keywords))


@pytest.mark.parametrize(("name", "plain", "other"), EACH + SEEDED_EACH, ids=words)
def test_no_call_is_kept_by_an_unusual_value(name, plain, other):
    """It could change in place, or be freed: what is kept is kept by the plain one."""
    tensors = dense()
    keywords = {"dropout_p": 0.5, "dropout_seed": 3} if "dropout" in name else {}
    CALLS.clear()
    heedful.flash_attn_func(*tensors, **keywords | {name: plain})
    kept = len(CALLS)
    for _ in range(2):
        heedful.flash_attn_func(*tensors, **keywords | {name: other})
    # An int is a float to each call, but another key; and so is a seed in a tensor.
    assert len(CALLS) <= kept + 1
    if type(other) not in (int, float):
        assert not any(value is other for key in CALLS.young for value in flat(key))


def flat(key):
    for part in key:
        yield part
        if type(part) is tuple:
            yield from flat(part)


def test_a_number_that_changes_in_place_is_read_anew():
    tensors = dense()
    window, cap = np.array([4, 2]), torch.tensor(2.0)
    for left in (4, 1, 3):
        window[0] = left
        cap.fill_(left)
        got = heedful.flash_attn_func(*tensors, window_size=window, softcap=cap)
        want = heedful.flash_attn_func(*tensors, window_size=(left, 2), softcap=float(left))
        assert torch.equal(got, want)


def test_one_and_true_and_halves_are_told_apart_in_a_window():
    tensors = dense()
    heedful.flash_attn_func(*tensors, window_size=(1, 0), dropout_origin=(1, 0, 0, 0))
    for wrong in ((True, 0), (1.0, 0), (np.bool_(True), 0)):
        with pytest.raises(TypeError, match="window_size"):
            heedful.flash_attn_func(*tensors, window_size=wrong)
        with pytest.raises(TypeError, match="dropout_origin"):
            heedful.flash_attn_func(*tensors, dropout_origin=(*wrong, 0, 0))


def test_plain_python_values_cost_no_second_look(monkeypatch):
    """Neither ints for floats, nor a window, nor an origin."""
    tensors = dense()
    keywords = {"softcap": 2, "dropout_p": 0, "window_size": (3, 1), "num_splits": 1}
    heedful.flash_attn_func(*tensors, **keywords)

    def refuse(*_):
        raise AssertionError("made plain what was plain")

    monkeypatch.setattr(calls, "plain_options", refuse)
    heedful.flash_attn_func(*tensors, **keywords)


LENGTHS = [
    np.int64(7),
    np.array(7),
    np.array([7]),
    torch.tensor(7),
    torch.tensor([7], dtype=torch.int32),
    Index(7),
]


@pytest.mark.parametrize("longest", LENGTHS, ids=words)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_the_longest_length_may_be_what_stands_for_an_int(longest, grad):
    CALLS.clear()
    q, k, v, bounds_q, bounds_k = packed()
    for tensor in (q, k, v):
        tensor.requires_grad_(grad)

    def attention(most_q, most_k):
        return heedful.flash_attn_varlen_func(
            q, k, v, bounds_q, bounds_k, most_q, most_k, causal=True, return_lse=True
        )

    want, got = attention(5, 7), attention(longest, longest)
    assert same(got, want)
    if grad:
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out, _ in (got, want)]
        assert same(*grads)


def test_the_packed_forms_take_what_the_others_take():
    q, k, v, bounds_q, bounds_k = packed()
    kv = torch.stack([k, torch.nn.functional.pad(v, (0, 8))], 1)
    qkv = torch.stack([q, q + 1, q + 2], 1)
    unusual = {"window_size": np.array([3, 1]), "softcap": torch.tensor(2.0)}
    plain: dict[str, Any] = {"window_size": (3, 1), "softcap": 2.0}
    for keywords, five, seven in ((plain, 5, 7), (unusual, torch.tensor(5), np.int32(7))):
        made = (
            heedful.flash_attn_varlen_qkvpacked_func(qkv, bounds_q, five, **keywords),
            heedful.flash_attn_varlen_kvpacked_func(
                q, kv, bounds_q, bounds_k, five, seven, **keywords
            ),
            heedful.flash_attn_qkvpacked_func(qkv[None], **keywords),
            heedful.flash_attn_kvpacked_func(q[None], kv[None], **keywords),
        )
        if keywords is plain:
            want = made
    assert same(made, want)


class Elsewhere(torch.Tensor):
    """A tensor of a device that a test has none of; it cannot be read."""

    @property
    def device(self):
        return torch.device("cuda:0")

    def item(self):
        raise AssertionError("the device was waited for")

    __index__ = __int__ = __float__ = __bool__ = tolist = item


def elsewhere(value: int) -> Any:
    return torch.tensor(value).as_subclass(Elsewhere)


def test_a_length_on_a_device_is_never_read():
    assert plain_length("max_seqlen_q", elsewhere(7), 21) == 21
    assert plain_length("max_seqlen_q", elsewhere(7)[None], 21) == 21
    with pytest.raises(TypeError, match="max_seqlen_q must be an int"):
        plain_length("max_seqlen_q", torch.ones(2).as_subclass(Elsewhere), 21)


BOUNDED = [
    Case(varlen="qk", batch=3),
    *variants(
        Case(varlen="qk", batch=3),
        causal=[True],
        window=[(9, 3)],
        heads_q=[4],
        alibi=["bh"],
        bias=["bhqk", "k", "bq"],
        sink=[True],
        dropout_p=[0.3],
        used=["qk"],
        lens_k=[(0, 53, 1)],
        batch=[0, 1],
        backward=[False],
        num_splits=[1],
    ),
    Case(varlen="qk", page_size=4, causal=True, backward=False, batch=3),
    Case(varlen="q", page_size=7, used="k", backward=False, batch=3),
]


@pytest.mark.parametrize("case", BOUNDED, ids=str)
def test_a_length_that_is_not_read_changes_nothing(case, monkeypatch):
    """All tokens stand for the longest sequence, or the bias's own length."""
    import support.runs.api

    def of_a_device(*args, **keywords):
        *rest, longest_q, longest_k = args
        return heedful.flash_attn_varlen_func(
            *rest, elsewhere(longest_q), elsewhere(longest_k), **keywords
        )

    class Api:
        flash_attn_varlen_func = staticmethod(of_a_device)

    monkeypatch.setattr(support.runs.api, "heedful", Api)
    built = build(case)
    check(built, results(built))


def test_a_length_that_is_not_read_is_all_tokens_to_explain():
    q, k, v, bounds_q, bounds_k = packed()
    text = heedful.explain(
        heedful.flash_attn_varlen_func, q, k, v, bounds_q, bounds_k, elsewhere(5), elsewhere(7)
    )
    assert "problem   2x9x12 " in text


def test_compiled_code_takes_a_length_in_a_tensor_without_reading_it():
    """Whole graph: a read would break it."""

    def attention(q, k, v, bounds_q, bounds_k):
        longest_q, longest_k = (bounds.diff().max() for bounds in (bounds_q, bounds_k))
        return heedful.flash_attn_varlen_func(
            q, k, v, bounds_q, bounds_k, longest_q, longest_k, causal=True
        )

    function = compiled(attention)
    q, k, v, *bounds = packed()
    tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
    for cuts in (bounds, [ints(0, 1, 9), ints(0, 11, 12)]):
        got, want = function(*tensors, *cuts), attention(*tensors, *cuts)
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in (got, want)]
        assert same(*grads)


def test_fake_and_mapped_lengths_are_not_read():
    with FakeTensorMode():
        q, k, v, bounds_q, bounds_k = packed()
        out = heedful.flash_attn_varlen_func(
            q, k, v, bounds_q, bounds_k, torch.tensor(5), torch.tensor(7)
        )
    assert out.shape == (9, 4, 8)
    q, k, v, bounds_q, bounds_k = packed()
    many = torch.stack([q, 2 * q])

    def attention(q, longest):
        return heedful.flash_attn_varlen_func(q, k, v, bounds_q, bounds_k, longest, 7)

    got = torch.func.vmap(attention)(many, torch.tensor([5, 5]))
    want = torch.stack([attention(each, 5) for each in many])
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "keywords",
    in_turns(
        [
            {"window_size": [3, 1]},
            {"window_size": (3, 1, 2)},
            {"softcap": 2, "num_splits": 1},
            {"dropout_p": 0.5, "dropout_seed": 5, "dropout_origin": (1, 2, 3, 5)},
            {"dropout_p": 0.5, "dropout_seed": torch.tensor(5), "dropout_origin": [1, 2, 3, 5]},
        ],
        each=4,
    ),
    ids=str,
)
def test_compiled_calls_take_what_eager_calls_take(keywords):
    def attention(q, k, v):
        return heedful.flash_attn_func(q, k, v, backend="cpu", **keywords)

    tensors = [tensor.requires_grad_() for tensor in dense()]
    got, want = compiled(attention)(*tensors), attention(*tensors)
    assert torch.equal(got, want)
    assert same(*(torch.autograd.grad(out.square().sum(), tensors) for out in (got, want)))


def test_a_window_that_is_made_in_compiled_code_is_taken():
    def attention(q, k, v, left):
        return heedful.flash_attn_func(q, k, v, window_size=(left, 1), backend="cpu")

    tensors = dense()
    function = compiled(attention)
    for left in (3, 1, 5):
        arguments: Any = (*tensors, left)
        assert torch.equal(function(*arguments), attention(*arguments))


def cache() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(2, 12, 2, 16),
        "v_cache": torch.randn(2, 12, 2, 8),
        "k": torch.randn(2, 1, 2, 16),
        "v": torch.randn(2, 1, 2, 8),
        "cache_seqlens": 5,
        "return_softmax_lse": True,
    }


CACHE = [
    ("cache_seqlens", 5, [np.int64(5), np.array(5), Index(5), torch.tensor(5), ints(5)[0]]),
    ("window_size", (3, 0), [[3, 0], np.array([3, 0])]),
    ("causal", True, [np.bool_(True)]),
    ("return_softmax_lse", True, [np.bool_(True)]),
    ("softcap", 2.0, [np.float32(2), torch.tensor(2.0)]),
    ("num_splits", 1, [np.int32(1)]),
]
CACHE_EACH = [(name, plain, other) for name, plain, others in CACHE for other in others]


@pytest.mark.parametrize("first", ["plain", "other"])
@pytest.mark.parametrize(("name", "plain", "other"), CACHE_EACH, ids=words)
def test_a_cache_call_takes_what_stands_for_a_value(name, plain, other, first):
    CALLS.clear()
    order = (plain, other, other) if first == "plain" else (other, other, plain)
    got = []
    for value in order:
        arguments = cache() | {name: value}
        out = heedful.flash_attn_with_kvcache(**arguments)
        got.append((*out, arguments["k_cache"], arguments["v_cache"]))
    assert same(got[0], got[1]) and same(got[1], got[2])


def test_a_rotary_flag_may_be_numpys():
    tables = {"rotary_cos": torch.rand(12, 4), "rotary_sin": torch.rand(12, 4)}
    got = [
        heedful.flash_attn_with_kvcache(**cache() | tables, rotary_interleaved=flag)
        for flag in (False, np.bool_(False), True, np.bool_(True))
    ]
    assert same(got[0], got[1]) and same(got[2], got[3]) and not same(got[1], got[2])


def test_quantisation_takes_numpys_numbers():
    x = torch.randn(2, 3, 16)
    want = heedful.quantize_kv(x, "int8", 4, True)
    assert same(heedful.quantize_kv(x, "int8", np.int64(4), np.bool_(True)), want)


def test_a_split_of_the_keys_on_a_cpu_is_what_explain_says():
    q, k, v = dense()
    for splits, line in ((0, ""), (1, ""), (3, "splits    3")):
        keywords = {"num_splits": splits, "return_lse": True}
        lines = heedful.explain(heedful.flash_attn_func, q, k, v, **keywords).splitlines()
        assert "forward   cpu [run]" in lines
        assert [found for found in lines if found.startswith("splits")] == [line] * bool(line)


def test_a_split_call_has_gradients_and_compiles():
    torch.manual_seed(0)
    tensors = [torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3)]

    def attention(q, k, v):
        return heedful.flash_attn_func(q, k, v, causal=True, num_splits=3)

    got, want = compiled(attention)(*tensors), attention(*tensors)
    assert torch.equal(got, want)
    assert same(*(torch.autograd.grad(out.square().sum(), tensors) for out in (got, want)))
    whole = heedful.flash_attn_func(*tensors, causal=True)
    # Sums in another order: equal to roundings, not to the bit.
    torch.testing.assert_close(got, whole)
    assert not torch.equal(got, whole)


def test_keys_in_pages_have_gradients():
    """Those of the gathered keys, in the pages that they came from; compiled too."""
    torch.manual_seed(0)
    q, pages_k, pages_v = (torch.randn(s) for s in ((9, 4, 16), (5, 4, 2, 16), (5, 4, 2, 8)))
    bounds, used, table = ints(0, 4, 9), ints(7, 5), ints(3, 1, 0, 4).view(2, 2)

    def paged(q, k, v):
        return heedful.flash_attn_varlen_func(
            q, k, v, bounds, None, 5, 8, causal=True, block_table=table, seqused_k=used
        )

    def gathered(q, k, v):
        k, v = (torch.cat([t[3], t[1, :3], t[0], t[4, :1]]) for t in (k, v))
        return heedful.flash_attn_varlen_func(q, k, v, bounds, ints(0, 7, 12), 5, 8, causal=True)

    tensors = [t.requires_grad_() for t in (q, pages_k, pages_v)]
    want = [torch.autograd.grad(gathered(*tensors).square().sum(), tensors)]
    want += [torch.autograd.grad(gathered(*tensors).square().sum(), tensors[:1])]
    for attention in (paged, compiled(paged)):
        for grads, leaves in zip(want, (tensors, tensors[:1]), strict=True):
            got = torch.autograd.grad(attention(*tensors).square().sum(), leaves)
            for a, b in zip(got, grads, strict=True):
                torch.testing.assert_close(a, b)


def test_pages_are_gathered_and_their_gradients_added_up():
    """Page 1 twice, page 3 never; no number past a sequence's end is looked at, and none in use
    leads out of the cache."""
    pages = torch.arange(4 * 2 * 1 * 3.0).view(4, 2, 1, 3)
    table = ints(1, 2, 99, 1, 0, -5, 77, -1, 2).view(3, 3)
    x = Operands(None, pages, pages, seqused_k=ints(3, 4, 2), block_table=table)
    numbers = page_numbers(x, 5)
    assert numbers.tolist() == [[1, 2, 0], [1, 0, 0], [3, 0, 0]]
    rows = gathered(pages, numbers)
    assert torch.equal(rows[0, :4], pages[1:3].flatten(0, 1))
    grad = torch.zeros_like(rows)
    grad[0, :3], grad[1, :4], grad[2, :2] = 1.0, 10.0, 100.0
    total = added_up(grad, numbers, pages)
    assert total[:, :, 0, 0].tolist() == [[10, 10], [11, 11], [1, 0], [100, 100]]
    empty = page_numbers(x._replace(k=pages[:0], seqused_k=ints(0, 0, 0)), 5)
    assert not gathered(pages[:0], empty).any() and not added_up(grad, empty, pages[:0]).numel()
    assert page_numbers(x, 0).shape == (3, 0)
