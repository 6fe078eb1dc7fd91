"""On one rank, with nobody to exchange anything with, each strategy computes the bits of
`flash_attn_varlen_func`, and of `flash_attn_with_kvcache`, whatever the arguments are."""

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from heedful import distributed, flash_attn_func, flash_attn_varlen_func
from heedful.core.call.spread import CAUSAL, Piece
from heedful.distributed import ContextPlan, decode, gather, traced
from heedful.distributed.attention import _REFUSED
from heedful.distributed.layouts import LAYOUTS, Layout, zigzag

# Their positional arguments come as lists.
attention: Any = distributed.attention
attend: Any = traced.attend
packed: Any = flash_attn_varlen_func
LENGTHS, HEADS, HEADS_K, DIM, DIM_V = (70, 0, 33), 4, 2, 16, 24
STRATEGIES = ("gather", "heads", "ring")
TOKENS = sum(LENGTHS)


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    """The only rank of its group."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")


def planned(strategy: str, lengths: Any = LENGTHS) -> ContextPlan:
    return ContextPlan(None, zigzag(lengths, 1), strategy, (HEADS, HEADS_K), CAUSAL, ())


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """q, k, v and the gradient of out."""
    drawn = torch.Generator().manual_seed(0)
    sizes = (HEADS, DIM), (HEADS_K, DIM), (HEADS_K, DIM_V), (HEADS, DIM_V)
    made = [torch.randn(*shape, *size, generator=drawn).to(dtype) for size in sizes]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


RANGES = torch.tensor([[row % 5, row % 7 + 20] for row in range(TOKENS)], dtype=torch.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "nothing": {},
    "scale": {"softmax_scale": -0.3},
    "softcap": {"softcap": 2.0, "causal": True},
    "window": {"window_size": (20, 5)},
    "a window that is a list": {"window_size": [20, -1]},
    "first keys": {"window_size": (9, 0, 4)},
    "ALiBi": {"alibi_slopes": torch.linspace(0.1, 1, HEADS), "causal": True},
    "ALiBi both ways": {"alibi_slopes": torch.linspace(0.1, 1, HEADS)},
    "sink": {"sink": torch.linspace(-1, 2, HEADS), "causal": True},
    "ranges": {"key_ranges": RANGES},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 7, "causal": True},
    "deterministic": {"deterministic": True},
    "fast": {"numerics": "fast", "sm_margin": 3},
    "backend": {"backend": "cpu", "causal": True},
}


def by_varlen(given: Any, more: Any) -> Any:
    starts = torch.tensor([0, 70, 70, 103], dtype=torch.int32)
    q, k, v = given
    return flash_attn_varlen_func(q, k, v, starts, starts, 70, 70, **more, return_lse=True)


def results(call: Any, dout: Tensor, given: Any, more: Any) -> list[Tensor]:
    """out, lse and gradients."""
    out, lse = call(given, more)
    leaves = [x for x in (*given, more.get("sink")) if x is not None]
    return [out, lse, *torch.autograd.grad([out, lse], leaves, [dout, lse.detach().sin()])]


# Whose calls, of a document each, sum in another order.
APART = ("dropout", "first keys")


def same(found: list[Tensor], wanted: list[Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_takes_each_argument_as_that_of_one_process_does(name, strategy):
    more = dict(OPTIONS[name])
    if "sink" in more:
        more["sink"] = more["sink"].clone().requires_grad_()
    *given, dout = rows(TOKENS)
    made = planned(strategy)
    found = results(lambda x, m: attention(*x, made, **m, return_lse=True), dout, given, more)
    wanted = results(by_varlen, dout, given, more)
    torch.testing.assert_close(found, wanted)
    assert name in APART or all(same(found, wanted))
    out = attention(*(x.detach() for x in given), made, **more)
    assert torch.equal(out, found[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numerics_reach_the_calls(strategy):
    """No kernel of a CPU has the invariant ones, and a ring has none."""
    said = "it merges parts" if strategy == "ring" else "no kernel can run the forward"
    with pytest.raises(ValueError, match=said):
        attention(*rows(TOKENS)[:3], planned(strategy), causal=True, numerics="invariant")


def test_arguments_stand_in_the_order_of_flash_attn():
    names = [*inspect.signature(attention).parameters]
    assert names[:3] == ["q", "k", "v"] and names[3] == "plan"
    theirs = [*inspect.signature(flash_attn_func).parameters]
    assert names[4:11] == theirs[3:10]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_of_equal_documents_is_one_of_a_dense_call(strategy):
    *given, dout = rows(2, 40)
    made = planned(strategy, (40, 40))
    more = {"causal": True}
    found = results(lambda x, m: attention(*x, made, **m, return_lse=True), dout, given, more)
    starts = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat: Any = [x.detach().flatten(0, 1).requires_grad_() for x in given]
    out, lse = packed(*flat, starts, starts, 40, 40, causal=True, return_lse=True)
    of_lse = lse.unflatten(1, (2, 40)).movedim(1, 0)
    cotangents = [dout.flatten(0, 1), lse.detach().sin()]
    grads = torch.autograd.grad([out, lse], flat, cotangents)
    wanted = [out.unflatten(0, (2, 40)), of_lse, *(x.unflatten(0, (2, 40)) for x in grads)]
    assert all(same(found, wanted))
    assert torch.equal(attention(*given, made, causal=True), found[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_16_bits_are_those_of_one_process(strategy, dtype):
    *given, dout = rows(TOKENS, dtype=dtype)
    made, more = planned(strategy), {"causal": True}
    found = results(lambda x, m: attention(*x, made, **m, return_lse=True), dout, given, more)
    wanted = results(by_varlen, dout, given, more)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    # Sums of gradients are float32 first, as out of a ring is.
    assert all(same(found, wanted)) or strategy == "ring"


@pytest.mark.parametrize("name", _REFUSED)
def test_what_ranks_cannot_compute_is_refused_with_its_reason_and_none_is_taken(name):
    *given, _ = rows(TOKENS)
    made = planned("gather")
    with pytest.raises(ValueError) as caught:
        attention(*given, made, **{name: 1})
    words = f"{name} is not taken under context parallelism: {_REFUSED[name]}"
    assert str(caught.value) == words
    attention(*given, made, **{name: None})


def test_every_argument_of_a_packed_call_is_taken_or_refused():
    """But for those that say where documents lie, which the plan does."""
    known = {*inspect.signature(attention).parameters, *_REFUSED}
    parameters = inspect.signature(flash_attn_varlen_func).parameters
    theirs = {name for name, each in parameters.items() if each.kind != each.VAR_KEYWORD}
    by_plan = ("cu_seqlens", "max_seqlen", "seqused", "block_table", "q_offset")
    left = {name for name in theirs - known if not name.startswith(by_plan)}
    # Other names of a sink, and what comes with results.
    assert left == {"learnable_sink", "s_aux", "return_attn_probs", "rel_bias", "return_max_logits"}


def two_ranks(lengths: Any, layout: str = "contiguous") -> ContextPlan:
    """The plan of the first of two ranks or of three."""
    count = 3 if len({*lengths}) == 1 else 2
    made = LAYOUTS[layout](lengths, count, CAUSAL)
    return ContextPlan(None, made, "gather", (HEADS, HEADS_K), CAUSAL, ())


def of_shape(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


PLAIN = {"q": (TOKENS, HEADS, DIM), "k": (TOKENS, HEADS_K, DIM), "v": (TOKENS, HEADS_K, DIM)}
BATCH = {"q": (2, 128, HEADS, DIM), "k": (2, 128, HEADS_K, DIM), "v": (2, 128, HEADS_K, DIM)}
# Changes of a call, its error, and what that says.
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no plan": ({"plan": 3}, TypeError, "plan must be a ContextPlan, got int"),
    "rows": (
        {"k": of_shape(102, HEADS_K, DIM)},
        ValueError,
        "k must be (103, 2, head_dim), the plan's tokens and heads on rank 0, got (102, 2, 16)",
    ),
    "heads": (
        {"q": of_shape(TOKENS, 3, DIM)},
        ValueError,
        "q must be (103, 4, head_dim), the plan's tokens and heads on rank 0, got (103, 3, 16)",
    ),
    "dims": (
        {"v": of_shape(TOKENS, HEADS_K)},
        ValueError,
        "v must be (103, 2, head_dim), the plan's tokens and heads on rank 0, got (103, 2)",
    ),
    "dtype": (
        {"k": of_shape(TOKENS, HEADS_K, DIM, dtype=torch.float16)},
        ValueError,
        "k must be torch.float32 on cpu, as q, got torch.float16 on cpu",
    ),
    "device": (
        {"v": of_shape(TOKENS, HEADS_K, DIM).to("meta")},
        ValueError,
        "v must be torch.float32 on cpu, as q, got torch.float32 on meta",
    ),
    "sink": ({"sink": torch.zeros(2)}, ValueError, "sink must be (4,), got (2,)"),
    "slopes": (
        {"alibi_slopes": torch.zeros(1, 4)},
        ValueError,
        "alibi_slopes must be (4,), got (1, 4)",
    ),
    "seed": (
        {"dropout_p": 0.1, "dropout_seed": True},
        ValueError,
        "dropout_seed must be an int, the same on every rank, where dropout_p > 0",
    ),
    "ranges": (
        {"key_ranges": torch.zeros(TOKENS, 3, dtype=torch.int32)},
        ValueError,
        "key_ranges must be (103, 2 or 4), the plan's tokens on rank 0, got (103, 3)",
    ),
    "ranges of long": (
        {"key_ranges": torch.zeros(TOKENS, 4, dtype=torch.int64)},
        ValueError,
        "key_ranges must be int32 on cpu, got torch.int64 on cpu",
    ),
    "ranges elsewhere": (
        {"key_ranges": torch.zeros(TOKENS, 4, dtype=torch.int32, device="meta")},
        ValueError,
        "key_ranges must be int32 on cpu, got torch.int32 on meta",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told_with_what_they_must_be(name):
    changes, error, said = WRONG[name]
    given: Any = {each: torch.zeros(shape) for each, shape in PLAIN.items()}
    with pytest.raises(error) as caught:
        attention(**{**given, "plan": planned("gather"), **changes})
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("lengths", "changes", "said"),
    [
        (
            (256, 128),
            {},
            "q must be (plan.tokens, heads_q, head_dim), got (2, 128, 4, 16): a batch",
        ),
        (
            (256,) * 3,
            {},
            "q must be (plan.tokens, heads_q, head_dim), got (2, 128, 4, 16): a batch",
        ),
        ((256,) * 2, {}, "q must be packed: this rank holds [128, 0] tokens of the documents"),
    ],
    ids=str,
)
def test_a_batch_that_ranks_do_not_share_evenly_is_refused(lengths, changes, said):
    given = {each: torch.zeros(shape) for each, shape in BATCH.items()}
    with pytest.raises(ValueError) as caught:
        attention(**{**given, **changes}, plan=two_ranks(lengths))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "shape"), [("k", (2, 40, 2)), ("v", (2, 39, 2, 16)), ("k", (1, 40, 2, 16))]
)
def test_keys_of_another_batch_are_refused(name, shape):
    given: Any = {each: torch.zeros(2, 40, *size[2:]) for each, size in BATCH.items()}
    given[name] = torch.zeros(shape)
    with pytest.raises(ValueError) as caught:
        attention(**given, plan=planned("gather", (40, 40)))
    assert str(caught.value) == f"{name} must be (2, 40, heads_k, ...), as q, got {shape}"


# Parts of steps.


def test_heads_are_grouped_as_sizes_say_with_their_query_heads():
    assert gather._groups([1, 3], (8, 4)) == [
        gather.Group(slice(0, 1), slice(0, 2)),
        gather.Group(slice(1, 4), slice(2, 8)),
    ]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_groups_are_those_of_a_replay_where_a_transfer_costs_the_host_little(
    captured, is_shared, monkeypatch
):
    asked: list[Any] = []
    on: Any = SimpleNamespace(schedule="its schedule", kept={})

    def sizes(*given: Any) -> Any:
        asked.append(given)
        return [1, 1], False

    monkeypatch.setattr(gather.cost, "head_groups", sizes)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    q: Any = SimpleNamespace(shape=(9, 4, 16), device=torch.device("cuda:0"))
    k: Any = SimpleNamespace(shape=(9, 2, 16), itemsize=2)
    v: Any = SimpleNamespace(shape=(9, 2, 24))
    for backward in (False, True, True):
        found = gather.groups(q, k, v, on, backward, is_shared)  # pyright: ignore
        assert found == (gather._groups([1, 1], (4, 2)), False)
    replayed = captured or is_shared
    facts = "its schedule", (4, 2), (16, 24), 2
    assert asked == [(*facts, False, replayed), (*facts, True, replayed)]


def test_on_a_cpu_all_heads_are_one_group():
    q, k, v, _ = rows(TOKENS)
    found = gather.groups(q, k, v, SimpleNamespace(), False, False)  # pyright: ignore
    assert found == ([gather.Group(slice(0, 2), slice(0, 4))], True)


@pytest.mark.parametrize(
    ("count", "is_local"), [(0, False), (0, True), (1, False), (1, True), (2, False)]
)
def test_sums_of_parts_are_rounded_once_and_of_none_are_zeros(count, is_local):
    """bfloat16 has 8 bits: 256 + 1 is rounded, and so is the half of it."""
    totals = torch.full((3, 2), 256.0).bfloat16(), torch.full((3, 2), 256.0).bfloat16()
    parts = [[torch.full((3, 2), n + 1.0), torch.full((3, 2), n + 3.0)] for n in range(count)]
    parts = parts if is_local else [[x.bfloat16() for x in part] for part in parts]
    gather._add(totals, parts, is_local)
    for place, total in enumerate(totals):
        wanted = sum(n + 1.0 + 2 * place for n in range(count)) + 256.0 * is_local
        assert torch.equal(total, torch.full((3, 2), wanted).bfloat16())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_rows_that_cross_ranks_go_back_to_their_places(name, dim):
    """In another order on the rank than in the batch: later chunks and whole documents first."""
    pieces = Piece(0, 128, 200), Piece(1, 0, 30), Piece(0, 0, 128)
    made = ContextPlan(None, Layout((200, 30), (pieces,)), "gather", (2, 2), CAUSAL, ())
    rows = torch.cat([torch.arange(128, 200), torch.arange(200, 230), torch.arange(128)])
    x = torch.randn(230, 230, requires_grad=True)
    weights = torch.randn(230, 230)
    found = getattr(made, name)(x, dim)
    (grad,) = torch.autograd.grad(found, x, weights)
    order = torch.argsort(rows) if name == "gather" else rows
    assert torch.equal(found, x.index_select(dim, order))
    assert torch.equal(grad, weights.index_select(dim, torch.argsort(order)))
    assert torch.equal(made.unshard(made.shard(x, dim), dim), x)
    with pytest.raises(ValueError, match="shard must have this rank's 230 rows along dim 0, got 2"):
        made.unshard(x[:2])


# The operator of compiled code.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(TOKENS,), (2, 40)], ids=["packed", "batch"])
def test_the_operator_computes_what_the_call_does(strategy, shape):
    *given, dout = rows(*shape)
    made = planned(strategy, LENGTHS if len(shape) == 1 else (40, 40))
    sink = torch.linspace(-1, 2, HEADS).requires_grad_()
    slopes = torch.linspace(0.1, 1, HEADS)
    more = 0.0, 0.4, True, (30, 0), 3.0, False, None, None

    def operator(x: Any, m: Any) -> Any:
        return attend(*x, m["sink"], slopes, None, made, more)

    def call(x: Any, m: Any) -> Any:
        named = {"softmax_scale": 0.4, "causal": True, "window_size": (30, 0), "softcap": 3.0}
        named |= m | {"alibi_slopes": slopes}
        return attention(*x, made, **named, return_lse=True)

    found, wanted = (results(each, dout, given, {"sink": sink}) for each in (operator, call))
    assert all(same(found, wanted))
    # There is a gradient of lse alone, too.
    grads = []
    for each in (operator, call):
        _, lse = each(given, {"sink": sink})
        grads.append(torch.autograd.grad(lse.sum(), given, allow_unused=True)[:2])
    assert all(same(*grads))


def test_the_operator_passes_each_option_on(monkeypatch):
    """Another order of options would still be one of numbers."""
    seen = {}

    def called(q, k, v, made, **more):
        seen.update(more)
        return traced._fake_forward(q, k, v, None, None, None, None)

    monkeypatch.setattr(import_module("heedful.distributed.attention"), "attention", called)
    *given, _ = (x.detach() for x in rows(TOKENS))
    told = 0.5, 0.4, True, [30, 0], 3.0, True, 9, "cpu"
    sink, slopes = torch.zeros(HEADS), torch.ones(HEADS)
    attend(*given, sink, slopes, RANGES, planned("gather"), told)
    assert torch.equal(seen.pop("sink"), sink) and torch.equal(seen.pop("alibi_slopes"), slopes)
    assert torch.equal(seen.pop("key_ranges"), RANGES)
    names = "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic"
    names += "dropout_seed", "backend"
    assert seen == dict(zip(names, told, strict=True)) | {"return_lse": True}


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("shape", [(TOKENS,), (2, 40)], ids=["packed", "batch"])
def test_shapes_of_a_traced_call_are_those_of_the_call(shape, has_sink):
    dtype = torch.bfloat16 if has_sink else torch.float32
    *given, dout = (x.detach() for x in rows(*shape, dtype=dtype))
    made = planned("gather", LENGTHS if len(shape) == 1 else (40, 40))
    sink = torch.zeros(HEADS) if has_sink else None
    more = 0.0, None, True, (-1, -1), 0.0, False, None, None

    def both(given: Any, dout: Any, sink: Any, number: Any) -> list[Tensor]:
        out, lse = torch.ops.heedful_context.attention(*given, sink, None, None, number, *more)
        grads = torch.ops.heedful_context.backward(
            dout, None, out, lse, *given, sink, None, None, number, *more
        )
        return [out, lse, *grads]

    real = both(given, dout, sink, made.number)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (*given, dout)]
        hollow = None if sink is None else mode.from_tensor(sink)
        traced_ones = both(fake[:3], fake[3], hollow, mode.from_tensor(made.number))
    for x, y in zip(real, traced_ones, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    for x, y in zip(real[2:], traced_ones[2:], strict=True):
        assert x.stride() == y.stride()


@pytest.mark.parametrize("which", [0, 1])
def test_the_operator_computes_no_gradient_of_a_result_that_has_none(which, monkeypatch):
    """A gradient of lse that is not there costs nothing; all ranks need one of out."""
    module, seen = import_module("heedful.distributed.attention"), []
    real = module.differentiated

    def noted(dout: Any, dlse: Any, *more: Any) -> Any:
        seen.append((dout, dlse))
        return real(dout, dlse, *more)

    monkeypatch.setattr(module, "differentiated", noted)
    *given, _ = rows(TOKENS)
    more = 0.0, None, True, (-1, -1), 0.0, False, None, None
    results = attend(*given, None, None, None, planned("gather"), more)
    torch.autograd.grad(results[which].sum(), given, allow_unused=True)
    ((dout, dlse),) = seen
    assert (dlse is None) == (which == 0) and bool(dout.any()) == (which == 0)


def test_a_second_derivative_of_the_operator_raises():
    *given, dout = rows(TOKENS)
    more = 0.0, None, True, (-1, -1), 0.0, False, None, None
    out, _ = attend(*given, None, None, None, planned("gather"), more)
    (grad,) = torch.autograd.grad(out, given[0], dout.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


# Decoding.


@pytest.fixture
def gathers(monkeypatch) -> None:
    monkeypatch.setattr(decode, "_all_gather", lambda every, mine, group=None: every.copy_(mine))


def test_a_step_of_decoding_passes_each_argument_on(gathers, monkeypatch):
    seen: dict[str, Any] = {}
    real = decode.flash_attn_with_kvcache

    def called(*given: Any, **more: Any) -> Any:
        seen.update(more, given=given)
        return more["out"].zero_(), torch.zeros(3, HEADS, 1)

    monkeypatch.setattr(decode, "flash_attn_with_kvcache", called)
    q, cache = torch.zeros(3, 1, HEADS, DIM), torch.zeros(3, 8, HEADS_K, DIM)
    new = torch.zeros(3, 1, HEADS_K, DIM)
    names = "cache_seqlens", "cache_batch_idx", "block_table", "softmax_scale", "softcap"
    names += "k_descale", "v_descale", "sink", "backend"
    told: Any = {name: object() for name in names}
    for owner, k in ((None, None), (0, new)):
        more: Any = {"owner": owner, "k": k, "v": k}
        decode.attention_with_kvcache(q, cache, cache, **more, **told)
        assert [*map(id, seen.pop("given"))] == [*map(id, (q, cache, cache, k, k))]
        assert {name: seen[name] for name in names} == told
        assert seen["causal"] is (owner == 0) and seen["return_softmax_lse"] is True
    assert {*seen} <= {*inspect.signature(real).parameters}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_of_decoding_by_one_rank_is_that_of_one_process(gathers, tokens, dtype):
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(2, tokens, HEADS, DIM, generator=drawn)
    k_cache, v_cache = (torch.randn(2, 20, HEADS_K, d, generator=drawn) for d in (DIM, DIM_V))
    k, v = (torch.randn(2, tokens, HEADS_K, d, generator=drawn) for d in (DIM, DIM_V))
    given: Any = [x.to(dtype) for x in (q, k_cache, v_cache, k, v)]
    copies = [x.clone() for x in given]
    more: Any = {"cache_seqlens": torch.tensor([9, 0], dtype=torch.int32)}
    out, lse = decode.attention_with_kvcache(*given, owner=0, return_lse=True, **more)
    want, want_lse = decode.flash_attn_with_kvcache(
        *copies, causal=True, return_softmax_lse=True, **more
    )
    assert out.dtype == dtype and torch.equal(out, want) and torch.equal(lse, want_lse)
    assert all(map(torch.equal, given[1:3], copies[1:3]))
    alone = decode.attention_with_kvcache(*given[:3], **more)
    seen = decode.flash_attn_with_kvcache(*copies[:3], **more)
    assert isinstance(alone, Tensor) and torch.equal(alone, seen)


def test_parts_of_a_step_are_float32_whatever_is_the_default(gathers):
    q, cache = torch.randn(2, 1, HEADS, DIM), torch.randn(2, 20, HEADS_K, DIM)
    want = decode.attention_with_kvcache(q, cache, cache)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = decode.attention_with_kvcache(q, cache, cache)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"owner": -1}, ValueError, "owner must be a rank of the group from 0 to 0, got -1"),
        ({"owner": 1}, ValueError, "owner must be a rank of the group from 0 to 0, got 1"),
        ({"owner": True}, ValueError, "owner must be a rank of the group from 0 to 0, got True"),
        ({"owner": 0, "k": "new"}, ValueError, "k and v must be tensors on rank 0, the owner"),
        ({"owner": 0, "v": "new"}, ValueError, "k and v must be tensors on rank 0, the owner"),
        ({"v": "new"}, ValueError, "owner must be a rank where k and v are to be appended"),
        ({"q": "flat"}, ValueError, r"q must have 4 dims, got shape \(3,\)"),
        ({"v_cache": None}, TypeError, "v_cache must be a torch.Tensor"),
    ],
    ids=str,
)
def test_a_wrong_step_of_decoding_is_refused(more, error, said):
    made = {"new": torch.zeros(3, 1, HEADS_K, DIM), "flat": torch.zeros(3)}
    more = {name: made.get(x, x) if isinstance(x, str) else x for name, x in more.items()}
    given: Any = {"q": torch.zeros(3, 1, HEADS, DIM)}
    given |= {name: torch.zeros(3, 8, HEADS_K, DIM) for name in ("k_cache", "v_cache")}
    with pytest.raises(error, match=said):
        decode.attention_with_kvcache(**given | more)
