"""Kernels write the buffers that they are declared to write, no other, and what they write depends
on nothing but the buffers that they are declared to read: every portable kernel, launch by launch,
in Triton's interpreter. They run in a process of their own: see `support.runs.interpreted`.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.planning.plan import Plan
from heedful.core.registry.configs import ROWS
from heedful.core.registry.tiles import PortableConfig, PortablePartsConfig, TileConfig
from heedful.launch.bind import portable, portable_cache
from heedful.launch.spec import KernelCall, Program
from heedful.torch.base.arrays import array_spec
from support.problems.cases import Built, Case, build
from support.runs import interpreter
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter

SMALL: dict[str, TileConfig] = {
    row.kernel: PortableConfig(16, 16) for row in ROWS if row.kernel.startswith("portable.")
}
PARTS: dict[str, TileConfig] = {"portable.forward": PortablePartsConfig(16, 16, part_keys=16)}
PACKED = Case(
    batch=2,
    seqlen_q=20,
    seqlen_k=24,
    varlen="qk",
    used="qk",
    bias="bhqk",
    rel_bias=9,
    sink=True,
    dropout_p=0.3,
    lse_grad=True,
)
PAGED = Case(page_size=5, seqlen_q=18, seqlen_k=40, return_probs=True, backward=False)
IN_PARTS = Case(batch=2, seqlen_q=20, seqlen_k=40, varlen="qk", sink=True, backward=False)


def all_kernels() -> set[str]:
    """module.function of every kernel that a module of `launch.bind` launches."""
    files = (Path(str(module.__file__)) for module in (portable, portable_cache))
    text = "".join(file.read_text() for file in files)
    # The folder is no part of a kernel's name here.
    return set(re.findall(r'"(?:backward|cache|forward|shared)\.(\w+\.\w+)"', text))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, what lies between its elements included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def check_access(call: KernelCall, arrays: dict[str, torch.Tensor]) -> None:
    """Runs a launch twice, each time over other contents of what is declared as written alone; what
    it keeps of a buffer is there afterwards."""
    memory = {name: bytes_of(tensor) for name, tensor in arrays.items()}
    kept = {name: held.clone() for name, held in memory.items()}
    runs = []
    for poison in (0xFF, 0xAA):
        for name in call.writes:
            memory[name].fill_(poison if name not in call.reads else 0xFF)
        before = {name: held.clone() for name, held in memory.items()}
        interpreter.run_call(call, arrays)
        written = {name: held != before[name] for name, held in memory.items()}
        assert {name for name, where in written.items() if where.any()} == call.writes, call.kernel
        runs.append(({name: held.clone() for name, held in memory.items()}, written))
    (first, where), (second, also) = runs
    for name in call.writes:
        written = where[name] | also[name]
        assert torch.equal(first[name][written], second[name][written]), (call.kernel, name)
        memory[name].copy_(torch.where(written, first[name], kept[name]))


def nan_like(spec: ArraySpec) -> torch.Tensor:
    return torch.full(spec.shape, torch.nan, dtype=getattr(torch, spec.dtype))


def check(made: Program, arrays: dict[str, torch.Tensor]) -> set[str]:
    """Checks every launch of a program; returns module.function of their kernels."""
    scratch = {w.name: nan_like(w.buffer) for w in made.workspaces}
    for call in made.calls:
        check_access(call, arrays | scratch)
    refs = (call.kernel for call in made.calls)
    return {f"{ref.module.rpartition('.')[2]}.{ref.function}" for ref in refs}


def specs_of(arrays: dict[str, torch.Tensor]) -> dict[str, ArraySpec]:
    return {name: array_spec(tensor) for name, tensor in arrays.items()}


def forward(built: Built, splits: int = 1) -> tuple[set[str], dict[str, torch.Tensor]]:
    """The kernels of a forward, and its arrays."""
    problem = built.problem
    arrays = {name: t for name, t in built.x._asdict().items() if t is not None}
    arrays["out"] = torch.full((*arrays["q"].shape[:-1], problem.head_dim_v), torch.nan)
    arrays["lse"] = torch.full(problem.lse_shape, torch.nan)
    if problem.return_probs:
        shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        arrays["probs"] = torch.full(shape, torch.nan)
    tiles = PARTS if problem.invariant else SMALL
    facts = {"configs": tiles, "is_split": splits > 1}
    chosen = Plan(problem, by_name("H200"), "portable", "run", **facts)
    return check(portable.forward(problem, chosen, specs_of(arrays)), arrays), arrays


def backward(built: Built, arrays: dict[str, torch.Tensor]) -> set[str]:
    assert built.dout is not None and built.dlse is not None
    arrays |= {"dout": built.dout, "dlse": built.dlse}
    gradients = ("q", "k", "v", "bias", "sink", "rel_bias")
    arrays |= {f"d{name}": torch.full_like(arrays[name], torch.nan) for name in gradients}
    chosen = Plan(built.problem, by_name("H200"), "portable", "run", configs=SMALL)
    return check(portable.backward(built.problem, chosen, specs_of(arrays)), arrays)


def cleared() -> set[str]:
    """Tokens before the first of two sequences and behind the last."""
    built = build(Case(batch=2, seqlen_q=6, varlen="q", backward=False))
    arrays = {"out": torch.full((30, 2, 8), torch.nan), "lse": torch.full((2, 30), torch.nan)}
    arrays["cu_seqlens_q"] = torch.tensor([3, 8, 20], dtype=torch.int32)
    call = portable.clear_outside_call(built.problem, specs_of(arrays))
    check_access(call, arrays)
    return {"unused.clear_outside"}


def cached() -> set[str]:
    """New keys in pages, and queries, both rotated."""
    draws = torch.Generator().manual_seed(0)
    angles = {name: torch.randn(40, 3, generator=draws) for name in ("rotary_cos", "rotary_sin")}
    new = {name: torch.randn(2, 3, 2, 8, generator=draws) for name in ("k_new", "v_new")}
    caches = {name: torch.randn(8, 4, 2, 8, generator=draws) for name in ("k", "v")}
    starts = {"cache_seqlens": torch.tensor([3, 0], dtype=torch.int32)}
    table = torch.randperm(8, generator=draws).view(2, 4).int()
    used = {"block_table": table, "seqused": torch.full((2,), -1, dtype=torch.int32)}
    arrays = {**new, **caches, **starts, **angles, **used}
    found = check(portable_cache.append_kv(specs_of(arrays), page_size=4), arrays)
    q = torch.randn(2, 3, 2, 8, generator=draws)
    arrays |= {"q": q, "rotated": torch.full_like(q, torch.nan)}
    slots = {"slots": torch.tensor([9, -1, 30]), **{n: x[:1] for n, x in new.items()}, **caches}
    found |= check(portable_cache.append_slots(specs_of(slots)), slots)
    return found | check(portable_cache.update(specs_of(arrays), page_size=4), arrays)


def merged() -> set[str]:
    """A part, into results of as many rows, all of which it also reads."""
    shape = 2, 5, 3, 8
    arrays = {name: torch.randn(shape) for name in ("out", "part")}
    arrays |= {name: torch.randn(2, 3, 5) for name in ("lse", "part_lse")}
    before = {name: tensor.clone() for name, tensor in arrays.items()}
    call = portable.merge_into_call(specs_of(arrays))
    interpreter.run_call(call, arrays)
    written = {name for name, tensor in arrays.items() if not torch.equal(tensor, before[name])}
    assert written == call.writes and call.reads == arrays.keys()
    return {"merge_into.merge_part"}


@interpreted
def test_every_kernel_writes_what_it_declares_from_what_it_declares():
    built = build(PACKED)
    found, arrays = forward(built)
    found |= backward(built, arrays)
    paged, _ = forward(build(PAGED), splits=3)
    whole = build(IN_PARTS)
    whole = replace(whole, problem=replace(whole.problem, invariant=True))
    found |= forward(whole, splits=1)[0] | forward(whole, splits=3)[0]
    assert found | paged | cleared() | cached() | merged() == all_kernels()


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
