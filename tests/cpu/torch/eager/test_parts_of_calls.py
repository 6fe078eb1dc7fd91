"""The parts that a call is put together from, each on its own: what is known of tensors, what is
remembered, what must go through torch's dispatcher, and the backwards of saved tensors.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

import heedful.torch as typed
from heedful.core.base.arrays import ArraySpec
from heedful.core.call.arguments import Options
from heedful.core.call.operands import Gradients, Operands
from heedful.core.call.storage import storage
from heedful.torch.api import attention as api
from heedful.torch.base import dispatch
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager import saved as saving
from heedful.torch.eager.calls import CALLS, LRU, make_seed
from heedful.torch.eager.keys import tensor_key
from heedful.torch.eager.saved import Backwards, check_restored
from heedful.torch.operands import adapt, cache_checks
from heedful.torch.operands.plain import plain_length, plain_seed
from heedful.torch.traced import private
from support.runs.api import dense_problem

heedful: Any = typed


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offset(tensor: Tensor, elements: int = 1) -> Tensor:
    """The same from an address that is that many elements past a multiple of 16 bytes."""
    room = tensor.new_zeros(tensor.numel() + 32)
    begin = -(room.data_ptr() // room.element_size()) % (16 // room.element_size()) + elements
    return room[begin : begin + tensor.numel()].view(tensor.shape).copy_(tensor)


ROWS = torch.zeros(2, 6, 3, 8)


@pytest.mark.parametrize(
    ("tensor", "is_aligned"),
    [
        (ROWS, True),
        (offset(ROWS, 1), False),
        (offset(ROWS, 2), False),
        (offset(ROWS, 4), True),
        (torch.zeros(2, 6, 3, 12)[..., :8], True),
        (torch.zeros(2, 6, 3, 10)[..., :8], False),
        (torch.zeros(2, 6, 3, 8, dtype=torch.float16), True),
        (torch.zeros(2, 6, 3, 12, dtype=torch.float16)[..., :8], False),
        (torch.zeros(2, 6, 3, 7, dtype=torch.float16), False),
        (torch.zeros(2, 6, 1, 7)[:, :1, :, :1], False),
        (torch.zeros(1, 1, 1, 7), True),
        (torch.zeros(1, 1, 3, 8).as_strided((1, 1, 3, 8), (5, 7, 8, 1)), True),
    ],
)
@pytest.mark.parametrize("place", range(4))
def test_alignment_is_that_of_addresses_and_of_strides_that_are_stepped(tensor, is_aligned, place):
    given: list[Any] = [ROWS, ROWS, ROWS, None]
    given[place] = tensor
    specs: list[Any] = [tensor if tensor is None else array_spec(tensor) for tensor in given]
    assert storage(*specs)["aligned"] == is_aligned


def strided(batch: int, rows: int, batch_stride: int, row_stride: int) -> ArraySpec:
    """Keys: (batch, rows, 1, 8)."""
    return ArraySpec((batch, rows, 1, 8), (batch_stride, row_stride, 8, 1), "float32")


@pytest.mark.parametrize(
    ("cache", "even"),
    [
        (strided(2, 6, 48, 8), True),
        (strided(2, 6, 56, 8), True),
        (strided(2, 6, 52, 8), False),
        (strided(1, 6, 52, 8), True),
        (strided(2, 1, 52, 8), True),
        (strided(2, 2, 0, 8), True),
        (strided(2, 6, 48, 0), False),
        (strided(2, 6, 48, -8), False),
        (strided(2, 6, 4, 8), False),
        (strided(1 << 10, 6, 8 << 20, 8), False),
        (strided((1 << 10) - 1, 6, 8 << 20, 8), True),
    ],
)
@pytest.mark.parametrize("place", [1, 2])
def test_rows_are_even_where_a_batch_entry_is_a_whole_number_of_them(cache, even, place):
    rows = array_spec(ROWS)
    given: list[Any] = [rows, rows, rows, None]
    given[place] = cache
    assert storage(*given)["even_rows"] == even
    assert storage(cache, rows, rows, cache)["even_rows"]


def test_packed_keys_have_no_batch_stride():
    packed = ArraySpec((6, 3, 8), (1, 7, 1), "float32")
    assert storage(packed, packed, packed, None)["even_rows"]


FAR_ROWS = 1 << 22  # elements of 2 bytes: 8 MiB


@pytest.mark.parametrize(
    ("spec", "near"),
    [
        (ArraySpec((2, 6, 1, 8), (8, FAR_ROWS, 8, 1), "float16"), False),
        (ArraySpec((2, 6, 1, 8), (8, FAR_ROWS - 8, 8, 1), "float16"), True),
        (ArraySpec((2, 6, 1, 8), (8, -FAR_ROWS, 8, 1), "float16"), False),
        (ArraySpec((2, 6, 1, 8), (8, FAR_ROWS // 2, 8, 1), "float32"), False),
        (ArraySpec((2, 6, 1, 8), (8, 2 * FAR_ROWS - 16, 8, 1), "float8_e4m3fn"), True),
        # A row alone is not stepped over, and batches and heads lie where they like.
        (ArraySpec((2, 1, 1, 8), (8, FAR_ROWS, 8, 1), "float16"), True),
        (ArraySpec((2, 6, 2, 8), (FAR_ROWS, 8, FAR_ROWS, 1), "float16"), True),
        (ArraySpec((6, 1, 8), (FAR_ROWS, 8, 1), "float16"), False),
        (ArraySpec((6, 2, 8), (8, FAR_ROWS, 1), "float16"), True),
        (ArraySpec((6, 8), (FAR_ROWS, 1), "float16"), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", range(4))
def test_rows_are_near_where_a_tile_of_them_is_within_32_bits(spec, near, place):
    rows = array_spec(ROWS)
    given: list[Any] = [rows, rows, rows, None]
    given[place] = spec
    assert storage(*given)["near_rows"] == near


def test_only_tensors_without_dense_rows_are_copied_and_named():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    every_other = torch.stack([q, q], -1)[..., 0]
    for name in "qkv":
        given = {"q": q, "k": k, "v": v, name: every_other}
        text = heedful.explain(heedful.flash_attn_func, **given)
        notes = [line.split(maxsplit=1)[1] for line in text.splitlines() if "copied" in line]
        assert notes == [f"{name} is copied: its last dim has stride 2"]
    assert "copied" not in heedful.explain(heedful.flash_attn_func, q, k, v)
    thin = torch.randn(1, 5, 2, 2)[..., :1]
    assert "copied" not in heedful.explain(heedful.flash_attn_func, thin.mT.mT, thin, thin)
    assert adapt.dense_rows(q) is q and adapt.dense_rows(thin) is thin
    assert adapt.dense_rows(every_other).is_contiguous()


def test_autocast_is_for_floats_of_other_dtypes():
    eight, wide = torch.zeros(2).to(torch.float8_e4m3fn), torch.zeros(2).double()
    half, single = torch.zeros(2).bfloat16(), torch.zeros(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = adapt.autocast((eight, wide, half, single, None, "what", single.int()), "cpu")
    assert got[0] is eight and got[1] is wide and got[2] is half and got[4:6] == (None, "what")
    assert got[3].dtype == torch.bfloat16 and got[6].dtype == torch.int32


@pytest.mark.parametrize(
    ("bias", "longest_q", "longest_k"),
    [(None, 11, 13), ((5, 7), 5, 7), ((1, 7), 11, 7), ((7,), 11, 7), ((5, 1), 5, 13), ((), 11, 13)],
)
def test_a_length_that_is_not_read_is_that_of_the_bias_or_of_the_storage(
    bias, longest_q, longest_k
):
    bias = None if bias is None else torch.zeros(bias)
    q, k = torch.zeros(11, 2, 8), torch.zeros(13, 2, 8)
    assert api._most_rows(q, bias, -2) == longest_q
    assert api._most_rows(k, bias, -1) == longest_k
    pages, table = torch.zeros(9, 4, 2, 8), torch.zeros(3, 5, dtype=torch.int32)
    assert api._most_rows(pages, bias, -1, table) == (20 if longest_k == 13 else 7)


def test_a_length_that_is_not_read_may_be_of_anything():
    for wrong in (None, "q", torch.zeros(()), torch.zeros(3)):
        assert api._most_rows(wrong, None, -2) == 0
    assert api._most_rows(torch.zeros(3, 8), "bias", -2, torch.zeros(3)) == 3
    fake = torch.empty(1, dtype=torch.int32, device="meta")
    assert plain_length("n", fake, 17) == 17 and plain_length("n", ints(5), 17) == 5


def test_seeds_come_to_the_device_as_int64():
    meta = torch.device("meta")
    for seed in (torch.tensor(5, dtype=torch.uint8), ints(5)):
        moved = plain_seed(seed, meta)
        assert isinstance(moved, Tensor) and (moved.device, moved.dtype) == (meta, torch.int64)
    two = plain_seed(ints(5, 6), meta)
    assert isinstance(two, Tensor) and two.device.type == "cpu" and two.dtype == torch.int64
    cpu = torch.device("cpu")
    given = torch.tensor([5])
    assert plain_seed(given, cpu) is given and make_seed(given, cpu) is given
    for number, signed in ((0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)):
        made = make_seed(number, cpu)
        assert made.shape == (1,) and made.dtype == torch.int64 and made.item() == signed
    drawn = make_seed(None, cpu)
    assert drawn.shape == (1,) and drawn.dtype == torch.int64


class Onlooker(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


def test_whatever_wants_to_see_a_call_sees_it():
    plain = torch.zeros(1)
    parameter = torch.nn.Parameter(plain)
    needs = dispatch.needs_dispatcher
    assert not needs(plain, plain, plain) and not needs(parameter, parameter, plain)
    with torch.no_grad(), torch.autocast("cpu"), torch.inference_mode():
        assert not needs(plain, plain, plain)
    own = plain.as_subclass(Own)
    for place in range(3):
        for other in (own, None, [1.0]):
            given: list[Any] = [plain] * 3
            given[place] = other
            assert needs(*given)
    assert needs(plain.to("meta"), plain, plain)
    with Onlooker():
        assert needs(plain, plain, plain)
    with forward_ad.dual_level():
        assert needs(plain, plain, plain)
    seen = []
    vmap(lambda x: seen.append(needs(plain, plain, plain)) or x)(plain)
    assert seen == [True]
    assert not needs(plain, plain, plain)


def test_metadata_is_the_same_where_nothing_that_a_plan_sees_differs():
    q = torch.randn(2, 3, 4)
    fits = dispatch.same_metadata((q, q.clone()))
    assert fits(q.clone(), offset(q)) and fits(q.neg(), q)
    for other in (q[:1], q.mT.contiguous().mT, q.half(), q.clone().requires_grad_(), q.to("meta")):
        assert not fits(q, other) and not fits(other, q.clone())


def test_a_tangent_is_found_wherever_it_is():
    plain = torch.zeros(2)
    assert not private.has_tangent((plain, None, 3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(plain, torch.ones(2))
        assert private.has_tangent((None, plain, dual))
        assert not private.has_tangent((None, plain))
        with forward_ad._set_fwd_grad_enabled(False):
            assert not private.has_tangent((dual,))


def test_the_key_of_a_tensor_holds_what_a_plan_may_depend_on():
    tensor = torch.randn(2, 6, 8)
    key = tensor_key(tensor)
    assert tensor_key(tensor.clone()) == key and hash(key) is not None
    others = [tensor[:1], tensor.mT, tensor.half(), offset(tensor), tensor.to("meta")]
    others += [tensor.clone().requires_grad_(), tensor[:, ::2], None, "tensor"]
    private: Any = torch
    others += [private._neg_view(tensor), private._efficientzerotensor(tensor.shape)]
    assert len({key, *map(tensor_key, others)}) == len(others) + 1


@pytest.mark.parametrize("half", range(1, 7))
def test_as_many_calls_are_kept_as_there_is_room_for(half):
    """Half of them at least, and never more than all."""
    calls = LRU(half)
    for i in range(50):
        calls.latest["it"] = i
        calls.put(i, str(i))
        assert len(calls) <= 2 * half
        newest = range(max(0, i + 1 - half), i + 1)
        kept = {**calls._old, **calls.young}
        assert all(kept[j] == str(j) for j in newest)
        # What is known without a key is no older than the young ones.
        assert "it" in calls.latest or len(calls.young) == 1
    assert len(calls) > half
    calls.clear()
    assert len(calls) == 0 and not calls.latest and calls.find(49) is None


def test_thousands_of_kinds_of_calls_are_kept():
    assert CALLS._half == 2048


def saved(**changes) -> tuple[Operands, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = Operands(*(torch.randn(2, 5, 2, 8) for _ in range(3)), sink=torch.randn(2))
    given = {"out": torch.randn(2, 5, 2, 8), "lse": torch.randn(2, 2, 5)}
    given |= {"dout": torch.randn(2, 5, 2, 8)}
    for name, change in changes.items():
        if name in given:
            given[name] = change(given[name])
        else:
            x = x._replace(**{name: change(getattr(x, name))})
    return x, given["out"], given["lse"], given["dout"]


class Made:
    """Backwards of one kind of call, which count what they are made for and say what they are run
    with."""

    def __init__(self):
        self.made: list[tuple] = []
        self.runs: list[tuple[int, tuple]] = []
        x, *_ = saved()
        self.problem = dense_problem(*x[:3], sink=True, needs_grad=True)
        self.call = Backwards(self, x, Options(kind="dense"))

    def backward_like(self, tensors, has_dlse, once):
        """None is known by lengths alone."""

    def backward_of(self, *given):
        number = len(self.made)
        self.made.append(given)

        def run(*given):
            self.runs.append((number, given))
            return Gradients(None, None, None)

        return run

    def __call__(self, x, out, lse, *cotangents, **keywords) -> int:
        """Which of those that were made has run."""
        self.call((*self.call.pick(x), out, lse), *cotangents, **keywords)
        return self.runs[-1][0]


def wide(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout"])
def test_a_backward_is_bound_once_to_each_layout(name):
    backward = Made()
    for _ in range(3):
        assert backward(*saved()) == 0
    assert backward(*saved(**{name: wide})) == 1
    assert backward(*saved(**{name: heads_first})) == 2
    assert backward(*saved(**{name: offset})) == 3
    for _ in range(2):
        for number, change in enumerate((Tensor.clone, wide, heads_first, offset)):
            assert backward(*saved(**{name: change})) == number
    assert len(backward.made) == 4


def test_backwards_with_and_without_a_cotangent_of_the_lse_are_two():
    """A cotangent may have any strides."""
    backward, dlse = Made(), torch.randn(2, 2, 5)
    for _ in range(3):
        assert backward(*saved()) == 0
        assert backward(*saved(), dlse) == 1
        assert backward(*saved(), dlse.mT.contiguous().mT) == 1
    assert backward.runs[-1][1][4].is_contiguous() and backward.runs[0][1][4] is None
    assert len(backward.made) == 2 and backward.made[0][4] is None


@pytest.mark.parametrize(
    "names",
    [("q", "out", "lse", "dout", "sink"), *((name,) for name in ("q", "out", "lse", "dout"))],
    ids=" ".join,
)
def test_a_backward_is_given_operands_and_dense_results(names):
    backward = Made()

    def every_other(t):
        return torch.stack([t, t], -1)[..., 0]

    changes = dict.fromkeys(names, every_other)
    want = saved()
    for _ in range(2):
        backward(*saved(**changes), kv_grad=False)
        x, out, lse, dout, dlse, kv_grad = backward.runs[-1][1]
        for got, wanted in zip(
            (*x[:3], x.sink, out, lse, dout), (*want[0][:3], want[0].sink, *want[1:]), strict=True
        ):
            assert torch.equal(got, wanted) and got.stride(-1) == 1
        assert lse.is_contiguous() and dlse is None and kv_grad is False
    backward(*saved()[:3], None)
    assert not backward.runs[-1][1][3].any() and backward.runs[-1][1][3].shape == out.shape
    assert backward.runs[-1][1][5] is True


def test_aligned_tensors_like_the_last_ones_are_known_without_a_key(monkeypatch):
    backward, dlse = Made(), torch.randn(2, 2, 5)
    given, other = saved(), saved(q=wide)
    assert [backward(*given), backward(*given, dlse), backward(*other)] == [0, 1, 2]

    def refuse(*_):
        raise AssertionError("looked up again")

    monkeypatch.setattr(backward.call, "_find", refuse)
    # Nor is anything laid out that lies as it should.
    monkeypatch.setattr(saving, "adapt", refuse)
    assert [backward(*other), backward(*given, dlse)] == [2, 1]
    for name in ("q", "k", "v", "out", "dout"):
        with pytest.raises(AssertionError, match="looked up again"):
            backward(*saved(**{"q": wide, name: lambda t: offset(t, 3)}))


def test_layouts_that_differ_each_time_do_not_fill_the_memory():
    backward = Made()

    def gap(size):
        return lambda t: torch.cat([t] * (2 + size), -1)[..., : t.shape[-1]]

    for _ in range(2):
        for size in range(64):
            assert backward(*saved(q=gap(size))) == size
    assert len(backward.call._layouts) == 64
    for size in range(64, 200):
        backward(*saved(q=gap(size)))
        assert len(backward.call._layouts) <= 64


def test_what_a_hook_restores_is_what_was_saved():
    cpu, half = torch.device("cpu"), torch.zeros(2, 3).half()
    check_restored("q", half, (2, 3), torch.float16, cpu)
    wanted = (
        r"^q must come back from a saved-tensor hook as it was saved, \(2, 3\) torch.float16 on"
    )
    for other in (half.float(), half[:1], half.mT, half.to("meta"), half.to_sparse()):
        with pytest.raises(ValueError, match=rf"{wanted} cpu, got \(\d, \d\) torch.float\d\d on "):
            check_restored("q", other, (2, 3), torch.float16, cpu)


@pytest.mark.parametrize("name", ["q", "k", "v", "sink", "out", "lse"])
def test_a_tensor_that_a_hook_changed_is_named(name):
    with pytest.raises(ValueError, match=f"^{name} must come back"):
        Made()(*saved(**{name: lambda t: t.double()}))


def test_one_tensor_in_two_places_is_another_layout_than_two(monkeypatch):
    backward = Made()

    def shared():
        x, out, lse, dout = saved()
        return x._replace(k=x.q), out, lse, dout

    for _ in range(2):
        assert [backward(*saved()), backward(*shared())] == [0, 0]
        for given in (saved(), shared()):
            backward(*given)
            assert (backward.runs[-1][1][0].k is backward.runs[-1][1][0].q) == (
                given[0].k is given[0].q
            )
    given = saved()
    x = given[0]._replace(v=given[0].q)
    assert backward(x, *given[1:]) == 0
    monkeypatch.setattr(backward.call, "_find", None)
    assert backward(x, *given[1:]) == 0
    with pytest.raises(TypeError):
        backward(*given)


@pytest.mark.parametrize("length, new, capacity", [(-1, 0, 4), (5, 0, 4), (4, 1, 4), (0, 5, 4)])
def test_traced_code_refuses_lengths_outside_of_the_cache_too(length, new, capacity, monkeypatch):
    """In words without numbers, which a tracer has none of."""
    monkeypatch.setattr(cache_checks, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="within the cache, with room for the new tokens$"):
        cache_checks.check_int_length(length, new, capacity)


@pytest.mark.parametrize("length, new, capacity", [(0, 0, 4), (4, 0, 4), (3, 1, 4), (0, 4, 4)])
def test_traced_code_takes_lengths_up_to_the_cache_s_own(length, new, capacity, monkeypatch):
    monkeypatch.setattr(cache_checks, "is_compiling", lambda: True)
    cache_checks.check_int_length(length, new, capacity)
