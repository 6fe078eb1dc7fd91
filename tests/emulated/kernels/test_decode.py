"""The decode kernel, as compiled for CDNA3 and CDNA4, computes attention within the error budget
and without a finding; who finishes the last part of a unit merges them."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from emulated.helpers.backend import TARGETS, Emulated, device_of, execute
from heedful import quantize_kv
from heedful.core.call.arguments import CacheUpdate, Options
from heedful.core.call.describe_cache import check_cache
from heedful.core.call.operands import Operands
from heedful.core.planning.plan import plan
from heedful.launch.program import programs
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.cache_step import named
from heedful.torch.operands.cache_checks import cache_call
from support.problems.budget import run
from support.problems.cases import Case
from support.problems.grids import in_turns, slow_but

BASE = Case(
    batch=2,
    seqlen_q=3,
    seqlen_k=331,
    heads_q=4,
    heads_k=1,
    head_dim=64,
    dtype="bfloat16",
    backward=False,
)
MLA = replace(BASE, batch=1, seqlen_k=75, head_dim=576, head_dim_v=512, v_in_k=True)
CASES = [
    BASE,
    replace(BASE, causal=True, dtype="float16", used="k", sink=True),
    replace(BASE, page_size=16, tree_mask=True),
    replace(BASE, varlen="qk", used="qk", batch=3, window=(90, 0)),
    replace(BASE, kv_batch_idx=True, leftpad_k=True, head_dim=128, seqlen_q=1),
    replace(BASE, kv_dtype="int8", kv_group=64, kv_shift=True),
    replace(BASE, kv_dtype="int4", kv_group=32, page_size=5),
    # Values that lie in keys: 80 rows are two tiles.
    replace(MLA, heads_q=40, seqlen_q=2, causal=True, page_size=16),
    replace(MLA, heads_q=8, seqlen_q=1, used="k", dtype="float16"),
]


@pytest.mark.parametrize(
    "case, arch, num_splits",
    in_turns(CASES, TARGETS, (0, 2), each=6),
    ids=str,
)
def test_decode_is_within_budget(case, arch, num_splits):
    run(Emulated(arch, "decode"), replace(case, num_splits=num_splits))


@pytest.mark.parametrize(
    "arch, kind",
    slow_but(
        {("gfx942", "float8_e4m3fnuz")},
        (("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")),
    ),
)
def test_an_fp8_cache_is_within_budget(arch, kind):
    run(Emulated(arch, "decode"), replace(BASE, kv_dtype=kind))


@pytest.mark.parametrize(
    "storage, arch", slow_but({("int8", "gfx950")}, product(["", "int8"], TARGETS))
)
def test_a_decode_that_appends_reads_what_it_wrote(arch, storage):
    """Bit for bit what an append and a decode in turn do, whichever wave is ahead."""
    torch.manual_seed(0)
    start, dim, new = torch.tensor([37, 60], dtype=torch.int32), 64, 5

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    x: dict[str, Any] = {"q": drawn(2, new, 4, dim), "k": drawn(2, 72, 1, dim)}
    x["v"] = drawn(2, 72, 1, dim)
    for name in "kv" if storage else "":
        x[name], x[f"{name}_descale"], _ = quantize_kv(x[name], storage, dim)
    tables = torch.randn(80, dim // 2), torch.randn(80, dim // 2)
    update = CacheUpdate(drawn(2, new, 1, dim), drawn(2, new, 1, dim), *tables, start, False, None)
    operands = Operands(**x)
    call = cache_call(
        operands._replace(seqused_k=start), Options("kvcache", causal=True), update, None
    )
    chosen = plan(check_cache(*call), device_of(arch), backend="decode")
    made = []
    for make, schedules in (
        (programs.step, ("lockstep", "delay:each", "random:0-3")),
        (programs.in_turn, ("lockstep",)),
    ):
        fresh = Operands(**{name: tensor.clone() for name, tensor in x.items()})
        arrays = named(fresh, update, start, True) | {"out": drawn(2, new, 4, dim)}
        specs = {name: array_spec(tensor) for name, tensor in arrays.items()}
        for report in execute(make(chosen, specs, False, 0), arch, arrays, schedules):
            assert report.clean, report.summary()
        made.append(arrays)
    ours, theirs = made
    assert torch.equal(ours["out"], theirs["out"])
    for name in (name for name in x if name != "q"):
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name
        assert not torch.equal(ours[name].view(torch.uint8), x[name].view(torch.uint8)), name
