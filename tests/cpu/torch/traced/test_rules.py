"""Operators tell torch's dispatcher, rule by rule, how mapped dims, shards and gradients go through
them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import heedful.torch as typed
from heedful.core.call.arguments import Options
from heedful.core.call.operands import Operands
from heedful.torch.operands import adapt
from heedful.torch.traced import autograd_rules, batching, library, private, sharded
from support.runs import api
from support.runs.mesh import on_each_rank, shard

# Calls here pass more than the signatures say.
heedful: Any = typed
OPS: Any = torch.ops.heedful


def stacked(call: Any, given: Any, dims: Any, count: int) -> tuple[Tensor, ...]:
    """The results of each element on its own."""
    rows = []
    for index in range(count):
        each = [
            x if dim is None else x.select(dim, index) for x, dim in zip(given, dims, strict=True)
        ]
        made = call(*each)
        rows.append(made if isinstance(made, tuple) else (made,))
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def same(found: Any, wanted: Any) -> bool:
    parts = found if isinstance(found, tuple) else (found,)
    return all(torch.equal(x, y) for x, y in zip(parts, wanted, strict=True))


# Mapped dims.

SIZE = 3
# Where the mapped dim lies in q, k and v.
DIMS = [(0, 0, 0), (0, None, None), (None, 0, None), (1, 2, 0), (None, None, 4)]


def mapped(dims: Any, *shapes: tuple[int, ...]) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=drawn)
        if dim is None
        else torch.randn(*shape[:dim], SIZE, *shape[dim:], generator=drawn)
        for dim, shape in zip(dims, shapes, strict=True)
    ]


@pytest.mark.parametrize("overload", ["default", "options"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_mapped_output_is_that_of_each_element(dims, overload):
    """Bits may be those of another batch, which has other sums."""
    given = mapped(dims, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    more = (True,) if overload == "default" else (0.3, True, [5, 0], 2.0, 0, "cpu")
    op = getattr(OPS.inference_v10, overload)

    def call(*tensors: Tensor) -> Tensor:
        return op(*tensors, *more)

    found = torch.func.vmap(call, in_dims=dims)(*given)
    torch.testing.assert_close((found,), stacked(call, given, dims, SIZE))


@pytest.mark.parametrize("kind", ["lse", "largest scores"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_mapped_call_has_the_results_of_each_element(dims, kind):
    given = mapped(dims, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    more = {"return_max_logits": True} if kind == "largest scores" else {"return_lse": True}

    def call(*tensors: Tensor) -> Any:
        return heedful.flash_attn_func(*tensors, causal=True, **more)

    found = torch.func.vmap(call, in_dims=dims)(*given)
    wanted = stacked(call, given, dims, SIZE)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("more", "joins"),
    [
        ({}, True),
        ({"causal": True, "softcap": 2.0}, True),
        ({"sink": torch.zeros(4)}, True),
        ({"alibi_slopes": torch.zeros(2, 4)}, False),
        ({"dropout_p": 0.5, "dropout_seed": 1}, False),
    ],
    ids=str,
)
def test_elements_are_one_call_where_no_result_depends_on_its_place(more, joins, monkeypatch):
    seen = []
    real = batching._one_by_one
    monkeypatch.setattr(batching, "_one_by_one", lambda *given: seen.append(1) or real(*given))
    q, k, v = mapped((0, 0, None), (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    call = torch.func.vmap(lambda q, k: heedful.flash_attn_func(q, k, v, return_lse=True, **more))
    call(q, k)
    assert len(seen) == (not joins)


@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, 2), (None, 0, 0)], ids=str)
def test_a_mapped_step_behind_a_prefix_is_that_of_each_element(dims, with_prefix):
    given = mapped(dims, (2, 3, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    of_prefix = 0 if with_prefix else None
    prefix = mapped((of_prefix, None), (5, 2, 8), (5, 2, 8))

    def call(*tensors: Tensor) -> Any:
        more = {"shared_prefix": tensors[3:], "return_softmax_lse": True}
        return heedful.flash_attn_with_kvcache(*tensors[:3], causal=True, **more)

    every, places = [*given, *prefix], (*dims, of_prefix, None)
    found = torch.func.vmap(call, in_dims=places)(*every)
    torch.testing.assert_close(found, stacked(call, every, places, SIZE))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_mapped_seed_is_kept_where_it_is(dim):
    seeds = torch.arange(6).view(2, 3)
    kept = torch.func.vmap(OPS.kept_seed, in_dims=dim, out_dims=dim)(seeds)
    assert torch.equal(kept, seeds) and kept.data_ptr() != seeds.data_ptr()


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, 0), (None, 2, 0)], ids=str)
def test_mapped_gradients_are_those_of_each_element(dims):
    given = mapped(dims, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))

    def loss(*tensors: Tensor) -> Tensor:
        out, lse = heedful.flash_attn_func(*tensors, causal=True, return_lse=True)
        return out.square().sum() + lse.sin().sum()

    call = torch.func.grad(loss, argnums=(0, 1, 2))
    found = torch.func.vmap(call, in_dims=dims)(*given)
    torch.testing.assert_close(found, stacked(call, given, dims, SIZE))


# Gradients.


def test_without_gradients_of_results_operands_have_none():
    needs = (True,) * (1 + len(Operands._fields) + len(Options._fields) + 1)
    ctx = SimpleNamespace(options=Options("dense"), needs_input_grad=needs, saved_tensors=())
    found = autograd_rules.Attention.backward(ctx, None, None, torch.zeros(1))
    assert found == (None,) * len(needs)


@pytest.mark.parametrize("name", [*"qkv", "bias", "sink", "rel_bias"])
def test_only_operands_that_require_gradients_get_them(name):
    q, k, v = api.dense()
    given = {"bias": torch.zeros(9, 12), "sink": torch.zeros(4), "rel_bias": torch.zeros(4, 3)}
    given |= {"q": q, "k": k, "v": v}
    given[name].requires_grad_()
    out = heedful.flash_attn_func(**given)
    with_mode = torch.func.grad(
        lambda leaf: heedful.flash_attn_func(**{**given, name: leaf}).square().sum()
    )(given[name].detach())
    (grad,) = torch.autograd.grad(out.square().sum(), given[name])
    assert torch.equal(with_mode, grad) and grad.any()


def test_tensors_that_only_autograd_sees_are_plain():
    keyset = torch._C._dispatch_keys(torch.zeros(1, requires_grad=True))
    plain = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    assert private.is_plain(plain | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU))
    assert not private.is_plain(keyset)
    assert not private.is_plain(plain)


def test_memory_that_the_dispatcher_cannot_resolve_is_refused_by_name():
    q, k, v = api.dense()
    freed = k.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="^k must be a plain tensor"):
        OPS.inference_v10(q, freed, v)
    # Zeros without memory are made before.
    none = torch._efficientzerotensor(k.shape)  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(OPS.inference_v10(q, none, v), OPS.inference_v10(q, k * 0, v))


# Shards.


BOTH = Shard(0), Shard(2)


def spread_over(work: Any, kind: str = "dense", places: Any = BOTH) -> list:
    """`work(Spread, mesh)` on each rank of a mesh of two dims."""

    def call(mesh: DeviceMesh) -> Any:
        whole = torch.zeros(4, 6, 4, 8) if kind == "dense" else torch.zeros(6, 4, 8)
        tensors = [shard(whole, mesh, list(places)) for _ in range(3)]
        more: dict[str, Any] = {}
        if kind == "varlen":
            starts = torch.tensor([0, 4, 6], dtype=torch.int32)
            more = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        longest = (4, 4) if kind == "varlen" else (None, None)
        x = Operands(*tensors, **more)
        return work(sharded.Spread(x, Options(kind, *longest), (False, False, False)), mesh)

    return on_each_rank((2, 2), call)


# The axis of each dim of the arrays of a call: batch, heads, or neither.
AXES = {
    "dense": {
        "out": "b-h-", "lse": "bh-", "bias": "bh--", "probs": "bh--", "key_ranges": "bh--",
        "block_rows": "bh--", "block_keys": "bh--", "alibi_slopes": "bh", "q_descale": "bh",
        "k_descale": "bh", "v_descale": "bh", "sink": "h", "rel_bias": "h-", "seqused_q": "b",
        "seqused_k": "b", "leftpad_k": "b", "q_offsets": "b", "origins": "b-", "seed": "-",
        "block_bits": "---", "q": "b-h-", "k": "b-h-", "v": "b-h-",
    },
    "varlen": {
        "q": "-h-", "k": "-h-", "v": "-h-", "out": "-h-", "lse": "h-", "sink": "h",
        "rel_bias": "h-", "cu_seqlens_q": "-", "cu_seqlens_k": "-", "seqused_k": "-",
        "block_table": "--", "origins": "--", "block_bits": "---", "alibi_slopes": "bh",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", AXES)
def test_arrays_lie_on_the_mesh_as_their_dims_do(kind):
    """The first dim of the mesh spreads the batch, or nothing, and the second the heads."""
    places = BOTH if kind == "dense" else (Replicate(), Shard(1))

    def work(spread: Any, mesh: Any) -> None:
        for name, axes in AXES[kind].items():
            shape = [4] * len(axes)
            of_batch = Shard(axes.index("b")) if "b" in axes and kind == "dense" else Replicate()
            of_heads = Shard(axes.index("h")) if "h" in axes else Replicate()
            assert spread.placements(name, shape) == (of_batch, of_heads), name
            # Without the first dims, as a bias may be.
            assert spread.placements(name, shape[1:])[1] == (
                Shard(axes[1:].index("h")) if "h" in axes[1:] else Replicate()
            ), name
        for name in ("bias", "alibi_slopes", "key_ranges", "k_descale"):
            axes = AXES["dense"][name]
            assert spread.placements(name, [1] * len(axes)) == (Replicate(), Replicate())
        assert spread.placements("sink", [1])[1] == Shard(0)

    spread_over(work, kind, places)


@pytest.mark.parametrize("kind", AXES)
def test_what_is_equal_on_all_ranks_may_be_plain_and_nothing_else(kind):
    equal = {"cu_seqlens_q", "cu_seqlens_k", "block_table", "seed", "block_bits"}
    equal |= set() if kind == "dense" else {"seqused_q", "seqused_k", "q_offsets", "origins"}
    places = BOTH if kind == "dense" else (Replicate(), Shard(1))

    def work(spread: Any, mesh: Any) -> None:
        for name in Operands._fields:
            plain = torch.zeros(4, 4, 4, 4)
            if name in equal:
                assert spread.local(name, plain) is plain, name
            else:
                with pytest.raises(TypeError, match="must be a DTensor, as others of this call"):
                    spread.local(name, plain)
            assert spread.local(name, None) is None

    spread_over(work, kind, places)


def test_a_rank_knows_its_first_entry_and_head_and_its_part():
    def work(spread: Any, mesh: Any) -> Any:
        options = Options("dense", dropout_p=0.5, dropout_origin=(10, 20, 30, 40))
        bias = shard(torch.arange(16.0).view(4, 4, 1, 1), mesh, [Shard(0), Shard(1)])
        part = spread.local("bias", bias)
        assert spread.options(Options("dense")) == Options("dense")
        return spread.options(options).dropout_origin, part.flatten().tolist()

    assert spread_over(work) == [
        ((10, 20, 30, 40), [0, 1, 4, 5]),
        ((10, 22, 30, 40), [2, 3, 6, 7]),
        ((12, 20, 30, 40), [8, 9, 12, 13]),
        ((12, 22, 30, 40), [10, 11, 14, 15]),
    ]


def test_two_dims_of_a_mesh_that_spread_one_axis_count_as_one():
    def work(spread: Any, mesh: Any) -> Any:
        options = Options("dense", dropout_p=0.5, dropout_origin=(0, 0, 0, 0))
        return spread.options(options).dropout_origin[:2]

    assert spread_over(work, places=(Shard(2), Shard(2))) == [(0, n) for n in range(4)]


def test_an_empty_result_and_a_second_derivative_are_whole_on_every_rank():
    def work(spread: Any, mesh: Any) -> None:
        made = spread.empty(torch.zeros(0))
        assert made.placements == (Replicate(), Replicate()) and made.shape == (0,)
        grad = shard(torch.zeros(4, 6, 4, 8), mesh, [Shard(0), Shard(2)])
        seen = []

        def op(*given: Any) -> Tensor:
            seen.append(given)
            return torch.zeros(5)

        twice = sharded.twice(op, grad, (1, 2), torch.float16)
        assert isinstance(twice, DTensor) and twice.placements == (Replicate(), Replicate())
        ((local, *facts),) = seen
        assert local.shape == (2, 6, 2, 8) and facts == [(1, 2), torch.float16]

    spread_over(work)


def test_a_mesh_without_this_rank_is_refused():
    def work(mesh: DeviceMesh) -> None:
        if mesh.get_rank() == 0:
            return
        elsewhere = DeviceMesh("cpu", [0], _init_backend=False)
        whole = torch.zeros(2, 6, 4, 8)
        q = DTensor.from_local(
            whole, elsewhere, [Replicate()], run_check=False, shape=whole.shape,
            stride=whole.stride(),
        )  # fmt: skip
        with pytest.raises(ValueError, match="q must lie on a mesh that this rank is part of"):
            sharded.Spread(Operands(q, q, q), Options("dense"), (False, False, False))

    on_each_rank((2,), work)


def test_a_cache_takes_no_shards():
    def work(mesh: DeviceMesh) -> None:
        q = shard(torch.zeros(2, 6, 4, 8), mesh, [Replicate()])
        with pytest.raises(TypeError, match="flash_attn_with_kvcache takes no DTensors"):
            sharded.Spread(Operands(q, q, q), Options("kvcache"), (False, False, False))

    on_each_rank((1,), work)


def test_largest_scores_of_heads_are_the_largest_of_ranks_that_share_them():
    q, k, v = (torch.randn(4, 6, 4, 8) for _ in range(3))
    _, whole = heedful.flash_attn_func(q, k, v, return_max_logits=True)

    def work(mesh: DeviceMesh) -> Tensor:
        given = [shard(x, mesh, [Shard(0), Shard(2)]) for x in (q, k, v)]
        _, found = heedful.flash_attn_func(*given, return_max_logits=True)
        assert found.placements == (Partial("max"), Shard(0)) and found.shape == whole.shape
        return found.to_local()

    first, second, third, fourth = on_each_rank((2, 2), work)
    parts = torch.maximum(first, third), torch.maximum(second, fourth)
    torch.testing.assert_close(torch.cat(parts), whole)


def test_gradients_by_hand_take_shards():
    """In a process whose first call with DTensors this is, too."""
    q, k, v = (torch.randn(4, 6, 4, 8) for _ in range(3))
    out, lse = heedful.flash_attn_func(q, k, v, return_lse=True)
    want = heedful.attention_backward(out, q, k, v, out, lse)

    def work(mesh: DeviceMesh) -> None:
        tensors = [shard(x, mesh, [Shard(2)]) for x in (out, q, k, v, out)]
        grads = heedful.attention_backward(*tensors, shard(lse, mesh, [Shard(1)]))
        first = 2 * mesh.get_local_rank(0)
        for mine, whole in zip(grads[:3], want[:3], strict=True):
            torch.testing.assert_close(mine.to_local(), whole[:, :, first : first + 2])

    asked = []
    with pytest.MonkeyPatch.context() as patch:
        real = library.take_shards
        patch.setattr(library, "take_shards", lambda: asked.append(1) or real())
        on_each_rank((2,), work)
    assert len(asked) == 2


# Operands.


class OfAGpu(Tensor):
    """Memory that says it is a GPU's."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda:0")


@pytest.mark.parametrize("kind", [Tensor, OfAGpu])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_bias_of_bools_is_0_where_it_shows_and_hides_the_rest(kind, dtype):
    seen = torch.tensor([[True, False, True]]).as_subclass(kind)
    made = adapt._numbers(seen, dtype).as_subclass(Tensor)
    assert made.dtype == dtype and made.tolist() == [[0.0, -torch.inf, 0.0]]
