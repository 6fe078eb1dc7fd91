"""What arguments stand for before a call is known or described: plain values, lengths in tensors,
packed forms; and what is said of those that stand for nothing."""

from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as typed
from heedful.core.call.arguments import CacheUpdate, Options
from heedful.core.call.operands import Operands
from heedful.torch.api import attention as api
from heedful.torch.api import kvcache, packed
from heedful.torch.operands import plain
from heedful.torch.traced import library

heedful: Any = typed
META = torch.device("meta")


def meta(*shape: int, dtype=torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Index:
    def __index__(self):
        return 7


def said(kind: type[Exception], function, *given) -> str:
    with pytest.raises(kind) as caught:
        function(*given)
    assert caught.type is kind
    return str(caught.value)


def test_ints_stand_for_themselves_and_one_in_a_tensor_for_its_value():
    large = 2**70
    assert plain.plain_int("n", large) is large
    for value in (Index(), np.int8(7), np.array([7]), torch.tensor(7), torch.tensor([[7]])):
        found = plain.plain_int("n", value)
        assert type(found) is int and found == 7
    assert said(TypeError, plain.plain_int, "n", 7.0) == "n must be an int, got float (7.0)"
    assert said(TypeError, plain.plain_int, "n", "x", "one") == "n must be one, got str ('x')"
    words = " (a tensor elsewhere would have to be waited for), got Tensor"
    assert said(TypeError, plain.plain_int, "n", meta()) == f"n must be an int{words}"
    assert said(TypeError, plain.plain_int, "n", meta(), "one") == f"n must be one{words}"
    assert (
        said(TypeError, plain.plain_int, "n", torch.tensor(True)) == "n must be an int, got Tensor"
    )


@pytest.mark.parametrize("compiling", [False, True])
def test_floats_stand_for_themselves_and_so_do_ints(compiling, monkeypatch):
    monkeypatch.setattr(plain, "is_compiling", lambda: compiling)
    half, large = 0.5, 2**70
    assert plain.plain_float("x", half) is half and plain.plain_float("x", large) is large
    found = [plain.plain_float("x", value) for value in (np.float32(2), torch.tensor(2.0), Index())]
    assert found == [2, 2, 7] and [type(value) for value in found] == [float] * 3
    assert said(TypeError, plain.plain_float, "x", True) == "x must be a float, got bool (True)"
    words = "x must be a float (a tensor elsewhere would have to be waited for), got Tensor"
    assert said(TypeError, plain.plain_float, "x", meta()) == words
    if compiling:
        assert plain.plain_float("x", 10**400) == 10**400
    else:
        words = "x must be finite, got an int beyond the range of floats"
        assert said(ValueError, plain.plain_float, "x", 10**400) == words


def test_a_tensor_that_wants_a_gradient_stands_for_no_number():
    wanting = torch.tensor(0.5, requires_grad=True)
    words = (
        "x must not require a gradient, as none is computed for it (detach it),"
        " got a tensor that does"
    )
    assert said(ValueError, plain.plain_float, "x", wanting) == words
    with torch.no_grad():
        assert plain.plain_float("x", wanting) == 0.5
    assert plain.plain_float("x", wanting.detach()) == 0.5


def test_bools_stand_for_themselves_and_one_in_a_tensor_for_its_value():
    for value in (True, np.bool_(True), torch.tensor(True), torch.tensor([True])):
        assert plain.plain_flag("on", value) is True
    for value in (False, np.bool_(False), torch.tensor(False)):
        assert plain.plain_flag("on", value) is False
    assert said(TypeError, plain.plain_flag, "on", 1) == "on must be a bool, got int (1)"
    assert (
        said(TypeError, plain.plain_flag, "on", torch.tensor(1)) == "on must be a bool, got Tensor"
    )
    words = "on must be a bool (a tensor elsewhere would have to be waited for), got Tensor"
    assert said(TypeError, plain.plain_flag, "on", meta(dtype=torch.bool)) == words


@pytest.mark.parametrize(
    ("function", "values", "words"),
    [
        (
            plain.plain_window,
            [3, 1],
            "window_size must be (left, right) or (left, right, first), each",
        ),
        (
            plain.plain_origin,
            [1, 2, 3, 4],
            "dropout_origin must be (batch, head, row, column), each",
        ),
    ],
)
def test_sequences_stand_for_tuples_of_their_ints(function, values, words):
    for given in (values, np.array(values), torch.tensor(values), [Index(), *values[1:]]):
        found = function(given)
        assert type(found) is tuple and found[1:] == tuple(values[1:])
        assert [type(value) for value in found] == [int] * len(values)
    own = tuple(values)
    assert function(own) is own
    message = said(TypeError, function, meta(len(values)))
    assert message.startswith(words) and message.endswith(" waited for), got Tensor")


@pytest.mark.parametrize("compiling", [False, True])
def test_lengths_are_read_on_a_cpu_alone_and_only_where_nothing_is_traced(compiling, monkeypatch):
    monkeypatch.setattr(plain, "is_compiling", lambda: compiling)
    read = 99 if compiling else 5
    for value in (torch.tensor(5), torch.tensor([5]), torch.tensor([[5]], dtype=torch.int8)):
        found = plain.plain_length("n", value, 99)
        assert type(found) is int and found == read
    assert plain.plain_length("n", meta(1), 99) == 99
    assert plain.plain_length("n", 5, 99) == 5 and plain.plain_length("n", Index(), 99) == 7
    assert said(TypeError, plain.plain_length, "n", "x", 9) == "n must be an int, got str ('x')"
    wrong = [torch.tensor([5, 5]), torch.tensor([]), torch.tensor(5.0), torch.tensor(5j)]
    wrong += [torch.tensor(True), meta(2), meta(dtype=torch.float32)]
    for value in wrong:
        words = "n must be an int, also in a tensor of one element, got Tensor"
        assert said(TypeError, plain.plain_length, "n", value, 99) == words


def test_a_length_that_a_transform_hides_is_as_large_as_it_can_be():
    def largest(length: torch.Tensor) -> torch.Tensor:
        return torch.full((), plain.plain_length("n", length, 99))

    assert torch.vmap(largest)(torch.tensor([5, 6])).tolist() == [99, 99]


def test_seeds_are_none_ints_or_int64_tensors_on_the_calls_device():
    cpu = torch.device("cpu")
    assert plain.plain_seed(None, cpu) is None
    number, seed = 2**70, torch.tensor([5])
    assert plain.plain_seed(number, cpu) is number and plain.plain_seed(seed, cpu) is seed
    assert plain.plain_seed(Index(), cpu) == 7
    for value in (torch.tensor(5, dtype=torch.int32), torch.tensor([5], dtype=torch.uint8)):
        found = plain.plain_seed(value, cpu)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.int64 and found.shape == value.shape and int(found) == 5
    # One number goes to the call's device; more, which none takes, stay where they are.
    for given, place in ((seed, META), (torch.tensor([5, 6]), cpu), (meta(1), META)):
        found = plain.plain_seed(given, META)
        assert isinstance(found, torch.Tensor) and found.device == place
    on_meta = plain.plain_seed(meta(1, dtype=torch.int32), cpu)
    assert isinstance(on_meta, torch.Tensor)
    assert (on_meta.device, on_meta.dtype) == (META, torch.int64)
    for value, kind in (
        (0.5, "float (0.5)"),
        *((torch.tensor(x), "Tensor") for x in (0.5, 1j, True)),
    ):
        words = f"dropout_seed must be an int or an int64 tensor, got {kind}"
        assert said(TypeError, plain.plain_seed, value, cpu) == words


Q = torch.zeros(3, 1, 2, 8)


def test_a_length_in_a_tensor_without_dims_is_that_of_every_sequence():
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        found = plain.plain_update(
            CacheUpdate(cache_seqlens=torch.tensor(4, dtype=dtype), rotary_interleaved=True), Q
        )
        assert found.cache_seqlens.tolist() == [4, 4, 4]
        assert found.cache_seqlens.dtype == torch.int32 and found.rotary_interleaved is True
    for odd in (torch.tensor(4.0), torch.tensor(True), torch.tensor([4, 4, 4])):
        update = CacheUpdate(cache_seqlens=odd, rotary_interleaved=True)
        assert plain.plain_update(update, Q) is update
    update = CacheUpdate(cache_seqlens=torch.tensor(4), rotary_interleaved=True)
    assert plain.plain_update(update, torch.tensor(0.0)) is update


def test_an_update_with_plain_values_is_the_very_one():
    for lengths in (None, 4, torch.tensor([4, 4, 4])):
        update = CacheUpdate(cache_seqlens=lengths, rotary_interleaved=False)
        assert plain.plain_update(update, Q) is update
    numbers = CacheUpdate(cache_seqlens=Index(), rotary_interleaved=np.bool_(False))
    found = plain.plain_update(numbers, Q)
    assert found == CacheUpdate(cache_seqlens=7, rotary_interleaved=False)
    assert type(found.cache_seqlens) is int and found.rotary_interleaved is False
    lengths = torch.tensor([4, 4, 4])
    flag = CacheUpdate(cache_seqlens=lengths, rotary_interleaved=torch.tensor(True))
    found = plain.plain_update(flag, Q)
    assert found.cache_seqlens is lengths and found.rotary_interleaved is True
    words = "cache_seqlens must be an int, an int32 or int64 tensor or None, got float (4.0)"
    wrong = CacheUpdate(cache_seqlens=4.0, rotary_interleaved=True)
    assert said(TypeError, plain.plain_update, wrong, Q) == words
    words = "rotary_interleaved must be a bool, got int (1)"
    wrong = CacheUpdate(rotary_interleaved=1)
    assert said(TypeError, plain.plain_update, wrong, Q) == words


def test_only_the_very_same_values_are_the_same():
    given = Options("dense", softcap=1.0)
    assert plain.is_same(given, Options(*given))
    assert not plain.is_same(given._replace(softcap=1), given)
    options = Options("varlen", Index(), torch.tensor(5), softcap=np.float32(2), causal=np.bool_(1))
    made = plain.plain_options(options)
    assert made == Options("varlen", 7, 5, softcap=2.0, causal=True) and made.causal is True
    for name in ("window_size", "dropout_origin"):
        message = said(TypeError, plain.plain_options, Options("dense")._replace(**{name: meta(2)}))
        assert message.startswith(f"{name} must be (") and message.endswith(", got Tensor")


QUERIES, KEYS, PAGES = torch.zeros(5, 4, 16), torch.zeros(7, 2, 16), torch.zeros(9, 4, 2, 16)
TABLE = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("q", "k", "bias", "table", "most"),
    [
        (QUERIES, KEYS, None, None, (5, 7)),
        (QUERIES, KEYS, torch.zeros(3, 4), None, (3, 4)),
        (QUERIES, KEYS, torch.zeros(2, 6, 3, 4), None, (3, 4)),
        (QUERIES, KEYS, torch.zeros(1, 4), None, (5, 4)),
        (QUERIES, KEYS, torch.zeros(3, 1), None, (3, 7)),
        (QUERIES, KEYS, torch.zeros(2, 4), None, (2, 4)),
        (QUERIES, KEYS, torch.zeros(3, 2), None, (3, 2)),
        (QUERIES, KEYS, torch.zeros(4), None, (5, 4)),
        (QUERIES, KEYS, torch.zeros(()), None, (5, 7)),
        (QUERIES, KEYS, "bias", None, (5, 7)),
        (QUERIES, PAGES, None, TABLE, (5, 12)),
        (QUERIES, PAGES, torch.zeros(3, 4), TABLE, (3, 4)),
        (QUERIES, PAGES, None, TABLE[0], (5, 9)),
        (QUERIES, PAGES, None, "table", (5, 9)),
        (QUERIES[:, 0], KEYS[0, 0], None, TABLE, (5, 0)),
        (QUERIES[0, 0], KEYS[:, 0], None, None, (0, 7)),
        ("q", None, None, TABLE, (0, 0)),
        ("q", None, torch.zeros(3, 4), None, (3, 4)),
    ],
)
def test_a_length_that_is_not_read_is_that_of_the_storage_or_the_bias(q, k, bias, table, most):
    assert api.plain_lengths((meta(), meta(1)), q, k, bias, table) == most
    assert api.plain_lengths((3, meta()), q, k, bias, table) == (3, most[1])
    assert api.plain_lengths((torch.tensor(2), Index()), q, k, bias, table) == (2, 7)


def test_a_length_that_is_none_is_named():
    for given, name in (((1.5, 3), "max_seqlen_q"), ((3, 1.5), "max_seqlen_k")):
        words = f"{name} must be an int, got float (1.5)"
        assert said(TypeError, api.plain_lengths, given, QUERIES, KEYS, None, None) == words


# Arguments of the public functions, each another value, and what they are to Operands and Options.
COMMON: dict[str, Any] = {
    "dropout_p": 0.25,
    "softmax_scale": 0.5,
    "causal": True,
    "window_size": (3, 2),
}
COMMON |= {"softcap": 4.0, "deterministic": True, "return_attn_probs": True}
KEYWORDS: dict[str, Any] = {
    "return_lse": True,
    "num_splits": 6,
    "backend": "x",
    "dropout_origin": (1, 2, 3, 4),
}
MORE: dict[str, Any] = {
    name: f"its {name}" for name in ("bias", "sink", "q_descale", "k_descale", "v_descale")
}
MORE |= {"alibi_slopes": "its alibi_slopes"}
WHERE: dict[str, Any] = {name: f"its {name}" for name in ("cu_seqlens_q", "cu_seqlens_k")}
USED: dict[str, Any] = {name: f"its {name}" for name in ("seqused_q", "seqused_k", "block_table")}
LONGEST: dict[str, Any] = {"max_seqlen_q": 11, "max_seqlen_k": 12}
QKV: dict[str, Any] = dict(zip("qkv", torch.zeros(3, 4).unbind(), strict=True))


@pytest.fixture(params=[False, True], ids=["eager", "dispatched"])
def passed_on(request, monkeypatch):
    """What the public functions call, and with what."""
    seen = []

    def noted(way):
        return lambda *given: seen.append((way, given)) or "result"

    for module in (api, kvcache):
        monkeypatch.setattr(module, "needs_dispatcher", lambda *_: request.param)
    # What runs the call through the dispatcher comes last.
    monkeypatch.setattr(api, "attend", lambda *given: noted("eager")(*given[:7]))
    monkeypatch.setattr(library, "attend", noted("dispatched"))
    # What its likeness is known by comes last.
    monkeypatch.setattr(kvcache, "_eager", lambda *given: noted("eager")(*given[:4]))

    def traced(*given):
        assert not torch.is_grad_enabled()
        return noted("dispatched")(*given)

    monkeypatch.setattr(kvcache, "_traced", traced)
    return request.param, seen


def assert_passed(passed_on, function, given: dict[str, Any], *wanted) -> None:
    dispatched, seen = passed_on
    seen.clear()
    assert function(**given) == "result"
    ((way, got),) = seen
    assert way == ("dispatched" if dispatched else "eager")
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, tuple):
            assert all(map(lambda a, b: a is b or a == b, ours, theirs)), (ours, theirs)
        else:
            assert ours is theirs


def test_every_argument_of_a_dense_call_reaches_its_place(passed_on):
    more = {"out": "its out", "dropout_seed": "its seed"}
    lengths = {name: f"its {name}" for name in ("seqused_q", "seqused_k", "leftpad_k")}
    given = {**QKV, **COMMON, **KEYWORDS, **MORE, **lengths, **more}
    options = Options("dense", **COMMON, **KEYWORDS)
    ends = "its out", "its seed"
    wanted = [*QKV.values(), Operands(**QKV, **MORE, **lengths), options, *ends]
    assert_passed(passed_on, heedful.flash_attn_func, given, *wanted)
    for name, value in MORE.items():
        wanted[3:] = Operands(**QKV, **{name: value}), Options("dense"), None, None
        assert_passed(passed_on, heedful.flash_attn_func, {**QKV, name: value}, *wanted)
    wanted[3] = None
    assert_passed(passed_on, heedful.flash_attn_func, QKV, *wanted)


def test_every_argument_of_a_packed_call_reaches_its_place(passed_on):
    more = {"out": "its out", "dropout_seed": "its seed"}
    given = {**QKV, **WHERE, **LONGEST, **COMMON, **KEYWORDS, **MORE, **USED, **more}
    options = Options("varlen", **LONGEST, **COMMON, **KEYWORDS)
    x = Operands(**QKV, **MORE, **WHERE, **USED)
    wanted = [*QKV.values(), x, options, "its out", "its seed"]
    assert_passed(passed_on, heedful.flash_attn_varlen_func, given, *wanted)
    given |= {name: torch.tensor(value) for name, value in LONGEST.items()}
    assert_passed(passed_on, heedful.flash_attn_varlen_func, given, *wanted)
    for name in LONGEST:
        one = {**given, **LONGEST, name: Index()}
        wanted[4] = options._replace(**{name: 7})
        assert_passed(passed_on, heedful.flash_attn_varlen_func, one, *wanted)
    given = {**QKV, **WHERE, **LONGEST}
    wanted[3:] = Operands(**QKV, **WHERE), Options("varlen", **LONGEST), None, None
    assert_passed(passed_on, heedful.flash_attn_varlen_func, given, *wanted)


@pytest.mark.parametrize("function", [heedful.flash_attn_func, heedful.flash_attn_varlen_func])
def test_torchs_own_determinism_is_the_calls(function, passed_on, monkeypatch):
    _, seen = passed_on
    where = {**WHERE, **LONGEST} if function is heedful.flash_attn_varlen_func else {}
    for own in (False, True):
        monkeypatch.setattr(api, "are_deterministic_algorithms_enabled", lambda own=own: own)
        for given in (False, True, 0):
            function(**QKV, **where, deterministic=given)
            made = seen.pop()[1][4].deterministic
            assert made is (own if given is False else given)


SEQUENCES = {"window_size": [4, 2], "dropout_origin": [1, 2, 3, 9]}


def test_sequences_are_tuples_in_all_that_is_passed_on(passed_on):
    _, seen = passed_on
    for name, value in SEQUENCES.items():
        heedful.flash_attn_func(**QKV, **{name: value})
        heedful.flash_attn_varlen_func(**QKV, **WHERE, **LONGEST, **{name: value})
        for _, given in seen:
            assert getattr(given[4], name) == tuple(value)
        seen.clear()
    heedful.flash_attn_with_kvcache(QKV["q"], QKV["k"], QKV["v"], window_size=[4, 2])
    assert seen.pop()[1][1].window_size == (4, 2)


CACHES: dict[str, Any] = {"q": QKV["q"], "k_cache": QKV["k"], "v_cache": QKV["v"]}
SCALES = ("k_descale", "v_descale", "k_shift", "v_shift", "alibi_slopes", "sink", "tree_mask")
NEW = ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "shared_prefix")


def test_every_argument_of_a_cache_call_reaches_its_place(passed_on):
    names = {name: f"its {name}" for name in (*SCALES, *NEW)}
    of_rows = {"block_table": "table", "cache_batch_idx": "rows", "cache_leftpad": "pads"}
    common = {name: COMMON[name] for name in ("softmax_scale", "causal", "window_size", "softcap")}
    given = {**CACHES, **names, **of_rows, **common, "num_splits": 6, "backend": "x"}
    given |= {"return_softmax_lse": True, "rotary_interleaved": "flag", "out": "its out"}
    x = Operands(**QKV, **{name: names[name] for name in SCALES})
    x = x._replace(block_table="table", kv_batch_idx="rows", leftpad_k="pads")
    options = Options("kvcache", **common, return_lse=True, num_splits=6, backend="x")
    update = CacheUpdate(**{name: names[name] for name in NEW}, rotary_interleaved="flag")
    call = heedful.flash_attn_with_kvcache
    assert_passed(passed_on, call, given, x, options, update, "its out")
    update = CacheUpdate(rotary_interleaved=True)
    assert_passed(passed_on, call, CACHES, Operands(**QKV), Options("kvcache"), update, None)


STANDS_FOR = {
    "qkvpacked": ("flash_attn_func", {"qkv": (2, 5, 3, 4, 16)}, {}),
    "kvpacked": ("flash_attn_func", {"q": (2, 5, 4, 16), "kv": (2, 7, 2, 4, 16)}, {}),
    "varlen_qkvpacked": (
        "flash_attn_varlen_func",
        {"qkv": (5, 3, 4, 16)},
        {"cu_seqlens": "where", "max_seqlen": 9},
    ),
    "varlen_kvpacked": (
        "flash_attn_varlen_func",
        {"q": (5, 4, 16), "kv": (7, 2, 4, 16)},
        {"cu_seqlens_q": "q's", "cu_seqlens_k": "k's", "max_seqlen_q": 9, "max_seqlen_k": 8},
    ),
}


@pytest.mark.parametrize("name", STANDS_FOR)
def test_a_packed_form_passes_on_every_argument_to_what_it_stands_for(name, monkeypatch):
    own, shapes, where = STANDS_FOR[name]
    function, target = getattr(heedful, f"flash_attn_{name}_func"), getattr(api, own)
    seen: list[dict] = []

    def noted(q, k, v, *rest, **keywords):
        names = target.__code__.co_varnames[: target.__code__.co_argcount]
        given = dict(zip(names, (q, k, v, *rest), strict=False))
        seen.append({**given, **keywords})
        return "result"

    noted.__kwdefaults__ = target.__kwdefaults__
    monkeypatch.setattr(packed, own, noted)
    tensors = {n: torch.randn(shape) for n, shape in shapes.items()}
    options = {**COMMON, "alibi_slopes": "slopes"}
    more = {"bias": "its bias", "return_lse": True}
    assert function(**tensors, **where, **options, **more) == "result"
    (got,) = seen
    both = {
        f"{n}_{side}": where[n] for n in ("cu_seqlens", "max_seqlen") if n in where for side in "qk"
    }
    rows = {**(both or where), **options, **more}
    parts = (
        dict(zip("qkv", tensors["qkv"].unbind(-3), strict=True))
        if "qkv" in tensors
        else {
            "q": tensors["q"],
            **dict(zip("kv", tensors["kv"].unbind(-3), strict=True)),
        }
    )
    assert {n: got[n] for n in rows} == rows and set(got) == {*rows, *"qkv"}
    for letter, tensor in parts.items():
        assert torch.equal(got[letter], tensor) and got[letter].shape == tensor.shape
    unpacked = packed.unpacked_arguments({**tensors, **where, **more})
    assert set(unpacked) == {*"qkv", *(both or where), *more}
    for letter, tensor in parts.items():
        assert torch.equal(unpacked[letter], tensor)
    for n, value in (both or where).items():
        assert unpacked[n] is value


def test_what_is_not_packed_so_is_said_with_the_layout():
    wanted = {
        ("qkv", False): ("(batch, seqlen, 3, heads, head_dim)", (2, 5, 3, 4, 16), (2, 5, 2, 4, 16)),
        ("kv", False): ("(batch, seqlen_k, 2, heads_k, head_dim)", (2, 5, 2, 4, 16), (2, 2, 4, 16)),
        ("qkv", True): ("(total, 3, heads, head_dim)", (5, 3, 4, 16), (5, 4, 3, 16)),
        ("kv", True): ("(total_k, 2, heads_k, head_dim)", (5, 2, 4, 16), (2, 5, 2, 4, 16)),
    }
    for (name, varlen), (layout, shape, wrong) in wanted.items():
        parts = packed._unpacked(name, torch.zeros(shape), varlen)
        assert [part.shape for part in parts] == [(*shape[:-3], *shape[-2:])] * len(name)
        words = f"{name} must be {layout}, got shape {wrong}"
        assert said(ValueError, packed._unpacked, name, torch.zeros(wrong), varlen) == words
    assert len(packed._unpacked("kv", torch.zeros(2, 5, 2, 4, 16))) == 2
    assert said(TypeError, packed._unpacked, "kv", 3) == "kv must be a torch.Tensor, got int (3)"
