"""New keys and values in slots of a paged cache: as plain assignment puts them there."""

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.arrays import ArraySpec
from heedful.torch.eager.slots import APPENDS, SLOTS, _laid, append_slots, slot_writer
from support.runs import standin
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

PAGES, SIZE, HEADS, DIM, DIM_V = 7, 5, 3, 24, 16
DROPPED = (-1, PAGES * SIZE, -7, 2**31 - 1)


def drawn(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caches(order: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values side by side in a row, of heads and tokens in this order; the columns of
    both."""
    shape = {"heads first": (PAGES, HEADS, SIZE), "tokens first": (PAGES, SIZE, HEADS)}[order]
    pool = drawn(*shape, DIM + DIM_V, seed=9).to(dtype)
    pool = pool.transpose(1, 2) if order == "heads first" else pool
    return pool[..., :DIM], pool[..., DIM:]


def scales(kind: str) -> dict[str, torch.Tensor]:
    if kind == "none":
        return {}
    shape = () if kind == "one" else (HEADS,)
    return {f"{n}_descale": drawn(*shape, seed=i).abs() + 0.05 for i, n in enumerate("kv")}


def assigned(new, cache: torch.Tensor, slots, scale) -> torch.Tensor:
    """The cache with each token where its slot says."""
    want = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < PAGES * SIZE:
            row = new[token].float()
            if cache.dtype == torch.float8_e4m3fn:
                row = row if scale is None else row / scale.expand(HEADS)[:, None]
                row = row.clamp(-448, 448)
            want[slot // SIZE, slot % SIZE] = row.to(cache.dtype)
    return want


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().view(torch.int32)


def check(tokens: int, kept: int, order: str, dtype, store, kind: str, integer) -> None:
    k, v = drawn(tokens, HEADS, DIM, dtype=dtype), drawn(tokens, HEADS, DIM_V, seed=1, dtype=dtype)
    slots = torch.randperm(PAGES * SIZE, generator=torch.Generator().manual_seed(2))[:kept]
    slots = slots.to(integer)
    for place, slot in zip((0, 3, 4), DROPPED, strict=False):
        if place < kept:
            slots[place] = slot
    k_cache, v_cache = caches(order, store)
    own = scales(kind)
    want = [
        assigned(new, cache, slots, own.get(f"{name}_descale"))
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache))
    ]
    append_slots(k, v, k_cache, v_cache, slots, **own)
    assert torch.equal(bits(k_cache), bits(want[0]))
    assert torch.equal(bits(v_cache), bits(want[1]))


E4M3 = torch.float8_e4m3fn
CASES = [
    (12, 12, "heads first", torch.float32, torch.float32, "none", torch.int64),
    (12, 9, "tokens first", torch.bfloat16, torch.bfloat16, "none", torch.int32),
    (30, 29, "heads first", torch.bfloat16, torch.bfloat16, "none", torch.int64),
    (12, 11, "heads first", torch.bfloat16, E4M3, "one", torch.int64),
    (12, 12, "tokens first", torch.float32, E4M3, "heads", torch.int64),
    (5, 5, "heads first", torch.float32, E4M3, "none", torch.int64),
    (1, 1, "heads first", torch.float32, torch.float32, "none", torch.int64),
    (4, 0, "heads first", torch.float32, torch.float32, "none", torch.int64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_go_into_their_slots_and_no_other(case):
    check(*case)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_launch_puts_them_there_too(case):
    with standin.gpu(interprets=True) as machine:
        check(*case)
    assert [launch.kernel.function for launch in machine.launches] == ["append_slots"][: case[1]]


@starts_interpreter
def test_the_kernel_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)


def test_another_number_of_tokens_is_of_the_same_case():
    with standin.gpu() as machine:
        for tokens in (3, 9, 20, 3):
            k, v = drawn(tokens, HEADS, DIM), drawn(tokens, HEADS, DIM_V)
            append_slots(k, v, *caches("heads first", k.dtype), torch.arange(tokens))
        compiled = [launch.kernel for launch in machine.launches]
        assert len(SLOTS) == 1 and len(APPENDS) == 3
    assert len(compiled) == 4 and len(set(compiled)) == 1


def test_a_writer_knows_all_but_where_new_tokens_begin():
    slots, pool = torch.arange(6, dtype=torch.int32), caches("tokens first", torch.float32)
    k, v = drawn(6, HEADS, DIM, seed=3), drawn(6, HEADS, DIM_V, seed=4)
    assert slot_writer(k, v, *pool, slots) is None
    with standin.gpu() as machine:
        write = slot_writer(k + 1, v + 1, *pool, slots)
        assert write is not None and not machine.launches
        append_slots(k, v, *pool, slots)
        write(k.data_ptr(), v.data_ptr())
        want, got = machine.launches
    assert (got.kernel, got.grid, got.arguments) == (want.kernel, want.grid, want.arguments)


def shaped(name: str, tensor) -> dict:
    given = {
        "k": drawn(4, HEADS, DIM),
        "v": drawn(4, HEADS, DIM_V),
        **dict(zip(("k_cache", "v_cache"), caches("heads first", torch.float32), strict=True)),
        "slots": torch.arange(4),
    }
    return given | {name: tensor}


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("k", drawn(4, DIM), "k must have 3 dims"),
        ("k", drawn(4, HEADS, DIM).double(), "k must be float16 or bfloat16 or float32"),
        ("v", drawn(4, HEADS, DIM_V).half(), "v must be float32, got float16"),
        ("v", drawn(4, 2, DIM_V), r"v must have shape \(tokens, heads_k, ...\) = \(4, 3\)"),
        ("slots", torch.arange(5), "slots must be at most k's 4 tokens, got 5"),
        ("slots", torch.arange(4).float(), "slots must be int32 or int64, got float32"),
        ("k_cache", drawn(PAGES, SIZE, HEADS, DIM + 1), "k_cache must have shape"),
        ("v_cache", drawn(PAGES, SIZE, HEADS, DIM_V).half(), "v_cache must be float32"),
        ("k_cache", drawn(PAGES, SIZE, DIM, HEADS).mT, "k_cache must be contiguous in its last"),
        ("v_cache", drawn(1, 1, HEADS, DIM_V).expand(PAGES, SIZE, HEADS, DIM_V), "not be expanded"),
        ("k_descale", torch.ones(2), r"k_descale must have shape \(heads_k,\)"),
        ("slots", [1, 2], "slots must be a torch.Tensor"),
    ],
)
def test_what_cannot_be_is_named_and_nothing_is_written(name, tensor, words):
    given = shaped(name, tensor)
    before = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    with pytest.raises((TypeError, ValueError), match=words):
        append_slots(**given)
    assert all(torch.equal(given[n], old) for n, old in before.items())


def test_a_kernel_has_new_tokens_as_one_sequence_and_scales_of_its_heads():
    make = ArraySpec.contiguous
    specs = {name: make((5, 4, 8), "bfloat16") for name in ("k_new", "v_new")}
    specs |= {name: make((3, 16, 4, 8), "int8") for name in ("k", "v")}
    specs |= {"slots": make((5,), "int64"), "k_descale": make((), "float32")}
    specs |= {"v_descale": make((4,), "float32")}
    laid = _laid(specs)
    for name in ("k_new", "v_new"):
        assert (laid[name].shape, laid[name].strides) == ((1, 5, 4, 8), (0, 32, 8, 1))
    assert (laid["k_descale"].shape, laid["k_descale"].strides) == ((1, 4), (0, 0))
    assert (laid["v_descale"].shape, laid["v_descale"].strides) == ((1, 4), (0, 1))
    assert {name: laid[name] for name in ("k", "v", "slots")} == {
        name: specs[name] for name in ("k", "v", "slots")
    }
