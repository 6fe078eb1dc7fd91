"""New values are stored by the kernels as `quantize_kv` and `update_cache` store them, bit for bit.

They run in a process of their own: see `support.runs.interpreted`.
"""

from itertools import product

import pytest

pytest.importorskip("triton")

import torch

from heedful import pack_latent, quantize_kv
from heedful.core.call.arguments import CacheUpdate
from heedful.core.call.operands import Operands
from heedful.launch.bind import portable_cache
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.cache_update import update_cache
from support.problems.grids import in_turns
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

STORED = {
    "int4": torch.uint8,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
}
BATCH, NEW, HEADS, DIM = 3, 5, 2, 24


def drawn(*shape: int, seed: int) -> torch.Tensor:
    """Numbers of many sizes: float8 has other steps for each, and none for the smallest."""
    values = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=values) * torch.logspace(-5, 1, shape[-1])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype != torch.float32 else tensor.view(torch.int32)


def caches(
    storage: str, group: int, dim_v: int, shifted: bool, page_size: int
) -> dict[str, torch.Tensor]:
    """Operands of a cache with other values in all of it. group: values that share a scale, 0 = a
    head's."""
    x, rows = {}, (16, page_size) if page_size else (4, 20)
    for name, dim in (("k", DIM), ("v", dim_v)):
        values = drawn(*rows, HEADS, dim, seed=len(x))
        packed, scale, shift = quantize_kv(values, storage, group or dim, shifted)
        if not group:
            scale = drawn(BATCH, HEADS, seed=7).abs() + 0.01
            shift = drawn(BATCH, HEADS, seed=8) if shifted else None
        x |= {name: packed, f"{name}_descale": scale}
        x |= {} if shift is None else {f"{name}_shift": shift}
    if page_size:
        pages = torch.randperm(16, generator=torch.Generator().manual_seed(1))[:12].view(3, 4)
        # The cache lacks this page: nothing is written there.
        pages[1, 0] = 99
        x["block_table"] = pages.int()
    else:
        x["kv_batch_idx"] = torch.tensor([3, 0, 2], dtype=torch.int32)
    return x


# Values a scale, and columns of values.
GROUPS = ((0, 16), (4, 16), (8, 16), (24, 24))


@interpreted
@pytest.mark.parametrize(
    "kind, shifted, page_size",
    in_turns(product(GROUPS, STORED), (False, True), (0, 5)),
    ids=str,
)
def test_stored_values_and_scales_are_those_of_plain_torch(kind, shifted, page_size):
    (group, dim_v), storage = kind
    how = storage, group, dim_v, shifted, page_size
    x, start = caches(*how), torch.tensor([3, 0, 11]).int()
    k_new, v_new = drawn(BATCH, NEW, HEADS, DIM, seed=3), drawn(BATCH, NEW, HEADS, dim_v, seed=4)
    # A group of zeros has a scale of 1.
    k_new[0, 2] = 0
    cos, sin = (drawn(40, 3, seed=seed) for seed in (5, 6))
    update = CacheUpdate(k_new, v_new, cos, sin, start, True, None)
    want = {name: tensor.clone() for name, tensor in x.items()}
    q = torch.zeros(BATCH, 1, HEADS, DIM)
    update_cache(Operands(q=q, **want), update, start, True)

    given = {**x, "k_new": k_new, "v_new": v_new, "rotary_cos": cos, "rotary_sin": sin}
    given |= {"cache_seqlens": start, "seqused": torch.zeros_like(start)}
    specs = {name: array_spec(tensor) for name, tensor in given.items()}
    interpret(portable_cache.append_kv(specs, page_size), given)
    for name in want:
        assert torch.equal(bits(given[name]), bits(want[name])), name
    assert given["seqused"].tolist() == [count + NEW for count in start.tolist()]
    # All of it would be equal, too, if nothing were written.
    assert not torch.equal(bits(given["v"]), bits(caches(*how)["v"]))
    if group:
        assert not torch.equal(given["k_descale"], caches(*how)["k_descale"])


@interpreted
@pytest.mark.parametrize("page_size", (0, 5))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_stored_rows_of_latent_vectors_are_those_of_pack_latent(page_size, dtype):
    rows = (16, page_size) if page_size else (4, 20)
    cache = pack_latent(drawn(*rows, 1, 576, seed=0))
    new = drawn(BATCH, NEW, 1, 576, seed=1).to(dtype)
    # The interpreter cuts off what a GPU rounds to bfloat16.
    new[..., 512:] = new[..., 512:].bfloat16()
    # A group of zeros has a scale of 1.
    new[0, 2, :, 128:256] = 0
    start = torch.tensor([3, -1, 11]).int()
    given = {"k_new": new, "v_new": new[..., :512].contiguous(), "k": cache, "v": cache}
    given |= {name: x for name, x in caches("int8", 0, 16, False, page_size).items() if "_" in name}
    given = {name: x for name, x in given.items() if "descale" not in name}
    given |= {"cache_seqlens": start, "seqused": torch.zeros_like(start)}
    want = cache.clone()
    x = Operands(q=new, k=want, v=want, block_table=given.get("block_table"))
    x = x._replace(kv_batch_idx=given.get("kv_batch_idx"))
    update = CacheUpdate(new, given["v_new"], None, None, start, True, None)
    update_cache(x, update, start, True)
    assert not torch.equal(want, cache)
    specs = {name: array_spec(tensor) for name, tensor in given.items()}
    interpret(portable_cache.append_kv(specs, page_size), given)
    assert torch.equal(given["k"], want)
    assert given["seqused"].tolist() == [3 + NEW, 0, 11 + NEW]


@interpreted
@pytest.mark.parametrize("storage", [name for name in STORED if name.startswith("float8")])
def test_every_float8_is_its_own_nearest_and_ties_go_to_the_even_one(storage):
    """Numbers, and those halfway between neighbours, as torch rounds them."""
    dtype = STORED[storage]
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = codes[codes.isfinite()].unique()
    between = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, between, between * 1.001, -torch.zeros(1)])
    values = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(1, -1, 1, 16)
    k = torch.zeros(values.shape, dtype=dtype)
    given = {"k_new": values, "v_new": values.clone(), "k": k, "v": k.clone()}
    given |= {"cache_seqlens": torch.zeros(1).int(), "seqused": torch.zeros(1).int()}
    specs = {name: array_spec(tensor) for name, tensor in given.items()}
    interpret(portable_cache.append_kv(specs), given)
    assert torch.equal(given["k"].float(), values.to(dtype).float())


@pytest.mark.slow
@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
