"""What is checked of tensors, and what of them is copied or expanded before kernels see them."""

from typing import Any

import pytest
import torch

from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import AttentionCall, CacheUpdate, Options
from heedful.core.call.operands import Operands
from heedful.core.call.problem import AttentionProblem, Lengths
from heedful.torch.base.arrays import abstract_spec, array_spec, dtype_name
from heedful.torch.eager import kinds
from heedful.torch.operands import adapt, cache_checks, checks, values
from heedful.torch.traced import batching

INT = torch.int32
CPU, META = torch.device("cpu"), torch.device("meta")

NO_GRAD = (False, False, False)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT)


def meta(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def said(error: type[Exception], function, *given, **keywords) -> str:
    with pytest.raises(error) as caught:
        function(*given, **keywords)
    assert caught.type is error
    return str(caught.value)


def is_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


# Tensors and what they are to checks.


def tensors(**more) -> Operands:
    shapes: Any = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 8)}
    return Operands(**{**{n: torch.randn(shape) for n, shape in shapes.items()}, **more})


def test_a_tensor_is_dense_and_on_the_device_of_another():
    checks.check_tensor("x", torch.zeros(2))
    checks.check_tensor("x", torch.zeros(2), CPU)
    assert (
        said(TypeError, checks.check_tensor, "x", [1]) == "x must be a torch.Tensor, got list ([1])"
    )
    words = "x must be a dense (strided) tensor, got layout torch.sparse_coo"
    assert said(TypeError, checks.check_tensor, "x", torch.eye(2).to_sparse()) == words
    words = "x must be on cpu like q, got meta"
    assert said(ValueError, checks.check_tensor, "x", meta(2), CPU) == words
    words = "x must be on meta like outs, got cpu"
    assert said(ValueError, checks.check_tensor, "x", torch.zeros(2), META, peer="outs") == words


@pytest.mark.parametrize(
    ("kind", "absent", "name"),
    [
        *(("dense", name, name) for name in "qkv"),
        *(("varlen", name, name) for name in ("q", "k", "v", "cu_seqlens_q")),
        *(("kvcache", name, own) for name, own in (("k", "k_cache"), ("v", "v_cache"))),
    ],
)
def test_operands_that_a_call_cannot_lack_are_named(kind, absent, name):
    x = tensors(cu_seqlens_q=ints(0, 5))
    checks.check_tensors(x, Options(kind))
    without = x._replace(**{absent: None})
    words = f"{name} must be a torch.Tensor, got NoneType (None)"
    assert said(TypeError, checks.check_tensors, without, Options(kind)) == words
    checks.check_tensors(x._replace(cu_seqlens_q=None), Options("dense"))
    if absent != "q":
        words = f"{name} must be on cpu like q, got meta"
        moved = x._replace(**{absent: meta(2)})
        assert said(ValueError, checks.check_tensors, moved, Options(kind)) == words


def test_a_call_is_described_by_its_tensors_specs():
    x, options = tensors(sink=torch.zeros(4)), Options("dense", causal=True)
    specs = Operands(*(None if t is None else array_spec(t) for t in x))
    assert checks.attention_call(x, options, NO_GRAD) == AttentionCall(specs, options)
    out, seed = torch.zeros(2, 5, 4, 8)[:, :, :, ::1], torch.tensor([5])
    call = checks.attention_call(x, options, (True, False, True), out, seed)
    specs = specs._replace(seed=array_spec(seed))
    assert call == AttentionCall(specs, options, True, False, True, array_spec(out))
    call = checks.attention_call(x, options, (False, True, False), seed=5, spec=lambda t: t.shape)  # pyright: ignore
    shapes = Operands(*(None if t is None else t.shape for t in x))
    assert call == AttentionCall(shapes, options, False, True)
    slopes = x._replace(alibi_slopes=torch.zeros(4, requires_grad=True))
    checks.attention_call(slopes, options, NO_GRAD)
    message = said(ValueError, checks.attention_call, slopes, options, (True, False))
    assert message.startswith("alibi_slopes must not require a gradient")
    words = "dropout_seed must be on cpu like q, got meta"
    assert said(ValueError, checks.attention_call, x, options, NO_GRAD, seed=meta(1)) == words
    words = "dropout_seed must fit 64 bits, got 18446744073709551616"
    assert said(ValueError, checks.attention_call, x, options, NO_GRAD, seed=2**64) == words
    words = "out must be on cpu like q, got meta"
    assert (
        said(ValueError, checks.attention_call, x, options, NO_GRAD, out=meta(2, 5, 4, 8)) == words
    )
    assert said(TypeError, checks.attention_call, x, options, NO_GRAD, out=1) == (
        "out must be a torch.Tensor, got int (1)"
    )


def test_a_cache_call_is_described_with_its_update():
    x, options = tensors(), Options("kvcache")
    new = {name: torch.randn(2, 1, 2, 16)[..., 1:9] for name in "kv"}
    tables = {name: torch.randn(9, 4) for name in ("rotary_cos", "rotary_sin")}
    prefix = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    lengths = ints(3, 4)
    update = CacheUpdate(**new, **tables, cache_seqlens=lengths, shared_prefix=prefix)
    out = torch.zeros(2, 5, 4, 8)
    for spec in (abstract_spec, array_spec):
        keywords = {} if spec is abstract_spec else {"spec": spec}
        call, found = cache_checks.cache_call(x, options, update, out, **keywords)
        specs = Operands(*(None if t is None else spec(t) for t in x))
        assert call == AttentionCall(specs, options, out=spec(out))
        wanted = {name: spec(tensor) for name, tensor in {**new, **tables}.items()}
        wanted |= {"cache_seqlens": spec(lengths), "shared_prefix": tuple(map(spec, prefix))}
        assert found == CacheUpdate(**wanted)
    plain = CacheUpdate(cache_seqlens=4, rotary_interleaved=True)
    call, found = cache_checks.cache_call(x, options, plain, None)
    assert found == plain and call.out is None
    for name in ("k", "v", "rotary_cos", "rotary_sin"):
        wrong = CacheUpdate(**{name: 3})
        words = f"{name} must be a torch.Tensor, got int (3)"
        assert said(TypeError, cache_checks.cache_call, x, options, wrong, None) == words
        words = f"{name} must be on cpu like q, got meta"
        wrong = CacheUpdate(**{name: meta(2)})
        assert said(ValueError, cache_checks.cache_call, x, options, wrong, None) == words
    for index in range(2):
        parts: list[Any] = list(prefix)
        parts[index] = meta(3, 2, 8)
        wrong = CacheUpdate(shared_prefix=tuple(parts))
        words = f"shared_prefix[{index}] must be on cpu like q, got meta"
        assert said(ValueError, cache_checks.cache_call, x, options, wrong, None) == words
    words = "shared_prefix must be a tuple (k, v), got list"
    wrong = CacheUpdate(shared_prefix=list(prefix))
    assert said(TypeError, cache_checks.cache_call, x, options, wrong, None) == words


def test_values_lie_in_keys_where_both_begin_alike_and_step_alike():
    k = torch.zeros(2, 3, 1, 16)
    assert cache_checks.lies_in(k[..., :8], k) and cache_checks.lies_in(k, k)
    apart = {
        "later columns": k[..., 8:],
        "memory of their own": k[..., :8].clone(),
        "other strides": torch.as_strided(k, (2, 3, 1, 8), (48, 16, 8, 1)),
        "fewer rows": k[:, :2, :, :8],
        "another dtype": k.view(torch.int32)[..., :8],
        "nothing": k[..., :0],
    }
    assert not [name for name, v in apart.items() if cache_checks.lies_in(v, k)]
    assert not cache_checks.lies_in(k, k[..., :8])
    assert not cache_checks.lies_in(k[:0], k[:0])


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink", "rel_bias"])
def test_a_gradient_is_wanted_where_an_operand_that_has_one_requires_it(name):
    given: dict[str, Any] = tensors(bias=torch.zeros(5, 7), sink=torch.zeros(4))._asdict()
    given["rel_bias"] = torch.zeros(4, 9)
    assert checks.gradients_wanted(Operands(**given)) == (False, False, False)
    assert not checks.requires_gradients(Operands(**given))
    x = Operands(**{**given, name: given[name].clone().requires_grad_()})
    assert checks.requires_gradients(x)
    assert checks.gradients_wanted(x) == (True, name == "bias", name == "rel_bias")
    with torch.no_grad():
        assert checks.gradients_wanted(x) == (False, False, False)
    odd = Operands(x.q, x.k, x.v, bias="bias", sink="sink", rel_bias="rel_bias")
    assert checks.gradients_wanted(odd) == (name in "qkv", False, False)


def test_operands_without_a_gradient_are_named_where_one_is_wanted_of_them():
    names = ("alibi_slopes", "q_descale", "k_descale", "v_descale", "k_shift", "v_shift")
    assert names == checks.CONSTANTS
    x = tensors(**{name: torch.zeros(2) for name in names}, bias=torch.zeros(1, requires_grad=True))
    assert checks.wanting(x) == "" and checks.wanting(tensors()) == ""
    checks.check_constants(x)
    for name in names:
        odd = x._replace(**{name: torch.zeros(2, requires_grad=True)})
        assert checks.wanting(odd) == name
        assert said(ValueError, checks.check_constants, odd) == (
            f"{name} must not require a gradient, as none is computed for it, got one that does"
            f" (pass {name}.detach(), or call under torch.no_grad())"
        )


def test_an_output_is_no_part_of_autograd():
    q, out = torch.zeros(2), torch.zeros(2)
    checks.check_own_out(out, q)
    words = (
        "out must be None where a gradient is wanted (autograd needs an output of its own; or"
        " use torch.no_grad()), got a tensor"
    )
    assert said(ValueError, checks.check_own_out, out, q, True) == words
    assert said(ValueError, checks.check_own_out, torch.zeros(2, requires_grad=True), q) == words


@pytest.mark.parametrize("compiling", [False, True])
def test_an_int_length_fits_the_cache_with_the_new_tokens(compiling, monkeypatch):
    monkeypatch.setattr(cache_checks, "is_compiling", lambda: compiling)
    for fits in (0, 9):
        cache_checks.check_int_length(fits, 3, 12)
    for wrong in (-1, 10):
        words = "cache_seqlens must lie between 0 and 9 (a capacity of 12 for 3 new tokens)"
        words += f", got {wrong}"
        if compiling:
            words = "cache_seqlens must lie within the cache, with room for the new tokens"
        assert said(ValueError, cache_checks.check_int_length, wrong, 3, 12) == words
    update = CacheUpdate(rotary_cos=torch.zeros(20, 4))
    cache_checks.check_rotated_length(17, 17, update)
    words = "rotary_cos must have a row for each of the queries' 21 positions, got 20"
    if compiling:
        words = "rotary_cos must have a row for each of the queries' positions"
    assert said(ValueError, cache_checks.check_rotated_length, 18, 17, update) == words


def test_keys_to_be_rotated_lie_apart_from_values():
    cache = torch.zeros(2, 3)
    cache_checks.check_apart(cache, cache.clone())
    cache_checks.check_apart(cache[:0], cache[:0])
    cache_checks.check_apart(cache[:, :1], cache[:, 1:])
    for shared in (cache[:, :2], cache[:, 1:], cache[1:]):
        assert said(ValueError, cache_checks.check_apart, cache, shared) == (
            "rotary_cos must be None where v_cache shares the memory of k_cache (v would overwrite"
            " the rotated keys), got a tensor"
        )


# Values of index tensors.


def test_values_lie_within_their_range():
    values.check_range("x", ints(2, 5), 2, 5)
    for wrong, got in ((ints(3, 1, 9), 1), (ints(3, 6, 0), 6)):
        words = f"x must hold values from 2 to 5, got {got}"
        assert said(ValueError, values.check_range, "x", wrong, 2, 5) == words
    values.check_room("x", ints(3, 5), 5)
    values.check_room("x", ints(), -1)
    words = "x must be at most the 5 tokens that there is room for, got 7"
    assert said(ValueError, values.check_room, "x", ints(6, 7), 5) == words


@pytest.mark.parametrize(
    ("begin", "end", "wrong"),
    [
        (0, 12, (0, 2, -1)),
        (0, 8, (1, 0, 9)),
        (0, 9, (0, 2, -1)),
        (3, 8, (1, 0, 9)),
        (4, 8, None),
        (8, 8, None),
        (0, 0, None),
        (ints(0, 8).view(2, 1), ints(9, 9).view(2, 1), (0, 2, -1)),
        (ints(0, 0).view(2, 1), ints(8, 4).view(2, 1), (1, 0, 9)),
        (ints(4, 4).view(2, 1), ints(8, 12).view(2, 1), None),
    ],
)
def test_pages_exist_where_they_are_in_use(begin, end, wrong):
    """Four rows a page, nine pages."""
    table = ints(0, 8, -1, 9, 0, 3).view(2, 3)
    if wrong is None:
        values.check_pages(table, 4, 9, begin, end)
        return
    row, entry, number = wrong
    assert said(ValueError, values.check_pages, table, 4, 9, begin, end) == (
        "block_table must hold pages from 0 to 8 where they are in use,"
        f" got {number} in row {row}, entry {entry}"
    )


def problem(**facts) -> AttentionProblem:
    return AttentionProblem.dense(2, 5, 7, 4, 2, 16, "float32", **facts)


def checked(kind: str = "varlen", facts: Any = None, **more):
    values.check_values(tensors(**more), problem(**facts or {}), kind)


PACKED = {"total_q": 5, "total_k": 7}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cu_seqlens_q": ints(-1, 2, 5)}, "cu_seqlens_q must rise from 0, got [-1, 2, 5]"),
        ({"cu_seqlens_k": ints(0, 2, 1)}, "cu_seqlens_k must rise from 0, got [0, 2, 1]"),
        ({"cu_seqlens_q": ints(0, 2, 6)}, "cu_seqlens_q must end within q's 5 tokens, got 6"),
        ({"cu_seqlens_k": ints(0, 2, 8)}, "cu_seqlens_k must end within k's 7 tokens, got 8"),
        (
            {"seqused_q": ints(5, 6)},
            "seqused_q must be at most the 5 tokens that there is room for, got 6",
        ),
        (
            {"cu_seqlens_k": ints(0, 4, 7), "seqused_k": ints(4, 5)},
            "seqused_k must be at most the 3 tokens that there is room for, got 5",
        ),
        (
            {"seqused_k": ints(5, 6), "leftpad_k": ints(2, 2), "facts": {}},
            "seqused_k must be at most the 7 tokens that there is room for, got 6",
        ),
        (
            {"seqused_k": ints(8, 1), "kind": "kvcache"},
            "cache_seqlens must be at most the 7 tokens that there is room for, got 8",
        ),
        (
            {"leftpad_k": ints(7, 8), "facts": {}},
            "leftpad_k must hold values from 0 to 7, got 8",
        ),
        ({"kv_batch_idx": ints(0, 2)}, "cache_batch_idx must hold values from 0 to 1, got 2"),
        ({"kv_batch_idx": ints(-1, 2)}, "cache_batch_idx must hold values from 0 to 1, got -1"),
        (
            {"cu_seqlens_q": ints(0, 0, 6), "facts": {"total_q": 6}},
            "max_seqlen_q must be at least the longest sequence, 6, got 5",
        ),
        (
            {"cu_seqlens_k": ints(0, 9, 9), "facts": {"total_k": 9}},
            "max_seqlen_k must be at least the longest sequence, 9, got 7",
        ),
        (
            {"block_table": ints(0, 1, 0, 2).view(2, 2)},
            "block_table must hold pages from 0 to 1 where they are in use,"
            " got 2 in row 1, entry 1",
        ),
    ],
)
def test_what_index_tensors_may_not_hold_is_said(given, words):
    given = {"facts": PACKED, **given}
    assert said(ValueError, checked, **given) == words


def test_index_tensors_may_hold_all_that_lies_within():
    checked(facts=PACKED, cu_seqlens_q=ints(0, 0, 5), cu_seqlens_k=ints(0, 7, 7))
    checked(facts=PACKED, cu_seqlens_q=ints(0), cu_seqlens_k=ints(0))
    # What is used of a sequence counts, where that is known.
    wide = {"total_k": 9}
    checked(facts=wide, cu_seqlens_k=ints(0, 9, 9), seqused_k=ints(7, -3))
    checked(seqused_q=ints(5, -9), seqused_k=ints(0, 7), kv_batch_idx=ints(1, 0))
    checked(seqused_k=ints(5, 0), leftpad_k=ints(2, 7))
    # Pads within packed keys are offsets among them.
    checked(facts=PACKED, leftpad_k=ints(9, 9))
    table = ints(0, 1, 0, 2).view(2, 2)
    checked(block_table=table, seqused_k=ints(7, 7))
    checked(block_table=table, seqused_k=ints(7, 0), leftpad_k=ints(0, 7))


# Copies and expansions.


def adapted(x: Operands, **facts) -> dict[str, Any]:
    """The operands that are others after the steps."""
    made = adapt.adapt(x, adapt.adaptations(x, problem(**facts)))
    return {n: m for n, m, own in zip(Operands._fields, made, x, strict=True) if m is not own}


SMALL = {
    "cu_seqlens_q": ints(0, 9, 3, 9, 5, 9)[::2],
    "seqused_q": ints(1, 9, 2, 9)[::2],
    "seqused_k": ints(3, 9, 2, 9)[::2],
    "kv_batch_idx": ints(1, 9, 0, 9)[::2],
    "leftpad_k": ints(0, 9, 1, 9)[::2],
    "block_table": ints(0, 9, 1, 9, 2, 9, 3, 9).view(2, 4)[:, ::2],
    "sink": torch.rand(8)[::2],
    "alibi_slopes": torch.rand(2, 8)[:, ::2],
    "tree_mask": (torch.rand(2, 5, 10) > 0.5)[..., ::2],
    "cu_seqlens_k": ints(0, 9, 3, 9, 7, 9)[::2],
}


@pytest.mark.parametrize("name", ["q", "k", "v", *SMALL])
def test_rows_that_are_not_contiguous_are_copied(name):
    apart = {n: getattr(tensors(), n).mT.contiguous().mT for n in "qkv"}
    value = {**apart, **SMALL}[name]
    if name in ("block_table", "cu_seqlens_k"):
        made = adapted(tensors()._replace(**{name: value}))
    else:
        made = adapted(tensors()._replace(**{name: value}), bias_grad=True)
    assert list(made) == [name]
    assert made[name].stride(-1) == 1 and torch.equal(made[name], value)
    assert adapted(tensors()._replace(**{name: value.contiguous()})) == {}


def test_a_row_of_one_element_has_any_stride():
    single = torch.zeros(2, 8)[:, ::8]
    assert single.stride(-1) == 8 and adapt.dense_rows(single) is single
    two = torch.zeros(2, 8)[:, ::4]
    assert adapt.dense_rows(two).stride() == (2, 1)
    dense = torch.zeros(2, 8)[:, :3]
    assert adapt.dense_rows(dense) is dense


def test_operands_that_broadcast_are_expanded_by_strides_of_0():
    scales = {f"{name}_descale": torch.tensor(2.0) for name in "qkv"}
    x = tensors(
        bias=torch.rand(4, 1, 7),
        alibi_slopes=torch.rand(4),
        tree_mask=torch.ones(1, 5, 5, dtype=torch.bool),
        **scales,
    )
    made = adapted(x)
    wanted = {"bias": (2, 4, 5, 7), "alibi_slopes": (2, 4), "tree_mask": (2, 5, 5)}
    wanted |= dict.fromkeys(scales, (2, 2))
    assert {name: tuple(t.shape) for name, t in made.items()} == wanted
    strides = {"bias": (0, 7, 0, 1), "alibi_slopes": (0, 1), "tree_mask": (0, 5, 1)}
    strides |= dict.fromkeys(scales, (0, 0))
    assert {name: t.stride() for name, t in made.items()} == strides
    assert all(is_view(t, getattr(x, name)) for name, t in made.items())
    whole = x._replace(**{name: t.contiguous() for name, t in made.items()})
    assert adapted(whole) == {}


def test_scales_of_groups_lie_as_the_cache_does():
    names = ("k_descale", "v_descale", "k_shift", "v_shift")
    x = tensors(**{name: torch.rand(2, 7, 2, 4)[..., ::2] for name in names})
    made = adapted(x, kv_group=8)
    assert list(made) == list(names)
    assert all(torch.equal(made[n], getattr(x, n)) and made[n].stride(-1) == 1 for n in names)
    assert adapted(x) == {}


@pytest.mark.parametrize(
    ("shape", "expanded", "copied"),
    [
        ((2, 4, 5, 7), None, False),
        ((2, 4, 5, 7), (2, 1, 5, 7), True),
        ((2, 4, 5, 7), (2, 4, 5, 1), True),
        ((1, 4, 1, 7), (1, 4, 1, 7), False),
        ((4, 5, 7), (1, 5, 7), True),
    ],
)
def test_an_expanded_bias_is_copied_where_each_element_has_a_gradient(shape, expanded, copied):
    bias = torch.rand(expanded or shape).expand(shape)
    for grad in (True, False):
        made = adapted(tensors(bias=bias), bias_grad=grad).get("bias", bias)
        assert is_view(made, bias) != (copied and grad)
        assert torch.equal(made, bias.expand(2, 4, 5, 7))
    assert adapt._is_expanded(bias) == copied
    assert not adapt._is_expanded(torch.zeros(1, 3).expand(1, 3))


def test_a_seed_without_dims_gets_one_and_others_stay():
    assert adapted(tensors(seed=torch.tensor(5)))["seed"].tolist() == [5]
    assert adapted(tensors(seed=torch.tensor([5]))) == {}


def test_of_pages_the_bounds_of_keys_tell_lengths_alone():
    pages = {"block_table": ints(0, 1).view(2, 1), "cu_seqlens_k": ints(0, 3, 7)}
    made = adapted(tensors(**pages, cu_seqlens_q=ints(0, 2, 5)))
    assert made["cu_seqlens_k"] is None and made["seqused_k"].tolist() == [3, 4]
    assert sorted(made) == ["cu_seqlens_k", "seqused_k"]
    used = {**pages, "seqused_k": ints(1, 2)}
    assert adapted(tensors(**used, cu_seqlens_q=ints(0, 2, 5))) == {"cu_seqlens_k": None}
    assert adapted(tensors(**pages)) == {}
    assert adapted(tensors(cu_seqlens_q=ints(0, 2, 5), cu_seqlens_k=ints(0, 3, 7))) == {}


def test_a_map_wants_bases_and_strides_of_16_bytes_and_no_element_twice():
    x = torch.zeros(4, 8, 16)
    assert adapt.is_mappable(x) and adapt.is_mappable(x[:, :, 4:8])
    assert adapt.is_mappable(x.half()[..., 8:]) and not adapt.is_mappable(x.half()[..., 4:])
    assert not adapt.is_mappable(x[..., 1:]) and not adapt.is_mappable(x[:1].expand(4, 8, 16))
    assert not adapt.is_mappable(torch.zeros(4, 6)) and adapt.is_mappable(torch.zeros(1, 6))


def test_the_gradient_of_a_bias_sums_over_what_was_broadcast():
    whole = torch.arange(2 * 4 * 5 * 7).view(2, 4, 5, 7).float()
    assert torch.equal(adapt.bias_gradient(whole, (2, 4, 5, 7)), whole)
    assert torch.equal(adapt.bias_gradient(whole, (5, 7)), whole.sum((0, 1)))
    assert torch.equal(adapt.bias_gradient(whole, (4, 1, 7)), whole.sum((0, 2), True)[0])
    one = adapt.bias_gradient(whole[:1, :1], (5, 7))
    assert one.shape == (5, 7) and torch.equal(one, whole[0, 0])


def test_autocast_casts_floats_to_its_dtype_and_leaves_the_rest(monkeypatch):
    given = {n: torch.zeros(2, dtype=getattr(torch, n)) for n in ("float32", "float16", "float64")}
    own, eight = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2).to(torch.float8_e4m3fn)
    threads = []
    monkeypatch.setattr(adapt, "on_own_thread", lambda f, *a: threads.append(a) or f(*a))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = adapt.autocast((*given.values(), own, eight, None, "x"), "cpu")
    assert [t.dtype for t in made[:5]] == [
        *(torch.bfloat16, torch.bfloat16, torch.float64),
        *(torch.bfloat16, torch.float8_e4m3fn),
    ]
    assert made[2] is given["float64"] and made[3] is own and made[4] is eight
    assert made[5:] == (None, "x") and threads == [(torch.bfloat16,)] * 2
    with torch.autocast("cpu", dtype=torch.float16):
        assert adapt.autocast((own,), "cpu")[0].dtype == torch.float16


# Kinds.


def test_what_a_tensor_is_of_its_kind_and_what_lengths_may_change():
    q = torch.zeros(2, 5, 4, 16, dtype=torch.float16)
    kind, sizes = kinds.of_tensor("q", q)
    assert kind == ("q", torch.float16, True, (4, 16), (1,), True, 2) and sizes == (2, 5)
    kind, sizes = kinds.of_tensor("q", q[:, 1:])
    assert kind == ("q", torch.float16, True, (4, 16), (1,), False, 2)
    assert sizes == (2, 4, 320, 64, 16)
    used = ints(1, 2, 3)[1:]
    kind, sizes = kinds.of_tensor("seqused_k", used)
    assert kind == ("seqused_k", INT, False, (), (1,), True, 1) and sizes == (2,)
    kind, sizes = kinds.of_tensor("seed", torch.tensor(5))
    assert kind == ("seed", torch.int64, True, (), (), True, 0) and sizes == ()


def test_a_call_is_its_kind_and_its_lengths():
    q, k = torch.zeros(5, 4, 16), torch.zeros(2, 7, 2, 16)
    like = problem(total_q=5)
    kind, sizes = kinds.of_call(like, {"q": q, "k": k})
    assert kind[0] == (True, False)
    assert kind[2:] == (
        ("q", torch.float32, True, (4, 16), (1,), True, 1),
        ("k", torch.float32, True, (2, 16), (1,), True, 2),
    )
    assert sizes == [2, 5, 7, 5, 0, 5, 2, 7]
    empty = like.at(Lengths(0, 5, 0, 5))
    assert kinds.of_call(empty, {})[1] == [0, 5, 0, 5, 0]
    assert kinds.of_call(like.at(Lengths(2, 5, 7, None, 9)), {})[0][0] == (False, True)
    assert kinds.of_call(empty, {})[0][1] == kind[1] != kinds.of_call(problem(sink=True), {})[0][1]
    numbers = [3, 6, 8, 9, 0, 9, 3, 8]
    other, specs = kinds.with_numbers(like, kind[2:], numbers)
    assert other == like.at(Lengths(3, 6, 8, 9))
    assert specs == {
        "q": ArraySpec((9, 4, 16), (64, 16, 1), "float32"),
        "k": ArraySpec((3, 8, 2, 16), (256, 32, 16, 1), "float32"),
    }


def test_specs_of_fake_tensors_are_aligned_and_others_as_they_are():
    odd = torch.zeros(9)[1:]
    wanted = ArraySpec((8,), (1,), "float32", False, CPU)
    assert array_spec(odd) == wanted and abstract_spec(odd) == wanted._replace(aligned=True)
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


# Mapped dims.


def test_a_mapped_dim_joins_the_batch_and_leaves_it():
    x = torch.arange(24).view(2, 3, 4)
    assert torch.equal(batching._fold(x, 1, 3), x.transpose(0, 1).reshape(6, 4))
    assert torch.equal(batching._fold(x, None, 5), x.repeat(5, 1, 1))
    assert [batching._batch(x, dim) for dim in (None, 0, 1, 2)] == [2, 3, 2, 2]


def test_elements_of_a_mapped_dim_run_in_order_each_with_its_own():
    seen = []

    def op(*given):
        seen.append(given)
        return given[0] + 1, given[1] * 2

    a, b = torch.arange(6).view(2, 3), torch.arange(6).view(3, 2) + 10
    (one, two), dims = batching._one_by_one(op, 3, (1, 0, None, None), (a, b, a, "x"))
    assert dims == (0, 0) and len(seen) == 3
    assert torch.equal(one, a.T + 1) and torch.equal(two, b * 2)
    assert all(given[2] is a and given[3] == "x" for given in seen)
