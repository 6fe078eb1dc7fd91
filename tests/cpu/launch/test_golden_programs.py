"""A golden table of what kernels are given for problems that are worked out from figures alone: on
both sides of each bound, and of sizes that no test has the memory for. Of each problem only what
differs from the plain one is told.

After a change that is meant:

    WRITE_GOLDEN_PROGRAMS=1 pytest tests/cpu/launch/test_golden_programs.py
"""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from heedful.core.base.arrays import ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.core.registry.by_hand import OPTIONS, named
from heedful.launch.bind import portable_cache
from heedful.launch.program import buffers as canonical
from heedful.launch.program.bound import ProgramKind, changing, numbers_of
from heedful.launch.program.programs import program
from heedful.launch.spec import Program, Scalar, TensorMap
from heedful.launch.worker.codec import decode, encode
from support import launches
from support.golden.programs import BASE, CACHE, DECODE, NAMED, TABLE, Asked
from support.runs import standin

GOLDEN = Path(__file__).with_name("golden_launches")
PROGRAMS = {"append": portable_cache.append_kv, "update": portable_cache.update}


def cache_told(
    what: str,
    laid: dict,
    batch: int = 3,
    seqlen: int = 20,
    dim: int = 128,
    dim_v: int = 0,
    pages: int = 0,
    rows: bool = False,
    leftpad: bool = False,
    rotary: int = 0,
    **flags: int,
) -> list[str]:
    make, heads = ArraySpec.contiguous, 4
    arrays = {"cache_seqlens": make((batch,), "int32")}
    if rotary:
        arrays |= {f"rotary_{name}": make((300, rotary // 2), "float32") for name in ("cos", "sin")}
    tensors = {"q": dim, "rotated": dim} if what != "append" and rotary else {}
    tensors |= {"k_new": dim, "v_new": dim_v or dim}
    storage = (40, pages) if pages else (batch + rows, 310)
    for name in ("k", "v"):
        arrays[name] = make((*storage, heads, tensors[f"{name}_new"]), "bfloat16")
    arrays["seqused"] = make((batch,), "int32")
    arrays |= {"block_table": make((batch, 7), "int32")} if pages else {}
    arrays |= {"kv_batch_idx": make((batch,), "int32")} if rows else {}
    arrays |= {"leftpad_k": make((batch,), "int32")} if leftpad else {}
    flags |= {"page_size": pages} if pages else {}
    arrays |= {name: make((batch, seqlen, heads, d), "bfloat16") for name, d in tensors.items()}
    arrays |= {name: lying(arrays[name], strides) for name, strides in laid.items()}
    function: Any = PROGRAMS[what]
    try:
        made = function(arrays, **flags)
    except ValueError as error:
        return [f"none: {error}"]
    return launched(made, [*arrays], "B200")


def told(device: str, backend: str, asked: Asked) -> list[str]:
    """What the kernels of a problem are given, forward and backward, and their scratch; or why
    there are none."""
    facts, laid = asked
    spec = by_name(device)
    try:
        problem = AttentionProblem.dense(**{**BASE, **facts})
        chosen = plan(problem, spec, backend=NAMED.get(backend, backend))
        lines = given("forward", chosen, problem, laid, device)
        if problem.needs_grad:
            lines += given("backward", chosen, problem.gathered(), laid, device)
    except ValueError as error:
        return [f"none: {str(error).split(': ', 1)[-1]}"]
    return lines


def given(direction: str, chosen, problem: AttentionProblem, laid: dict, device: str) -> list[str]:
    if not chosen.problem.page_size:
        problem = chosen.problem
    arrays = getattr(canonical, direction)(problem if direction == "backward" else chosen.problem)
    for name, strides in laid.items():
        if name in arrays:
            arrays[name] = lying(arrays[name], strides)
    return launched(program(chosen, direction, arrays), [*arrays], device)


def launched(made: Program, names: list[str], device: str) -> list[str]:
    """Scratch and launches, word by word."""
    lines = [
        f"scratch {w.name} {w.buffer.shape} {w.buffer.dtype} zeroed={w.zeroed}".replace(", ", ",")
        for w in made.workspaces
    ]
    names += [w.name for w in made.workspaces]
    addresses = [4096 * (i + 1) for i in range(len(names))]
    with standin.gpu(device) as gpu:
        numbers = [numbers_of(call) for call in made.calls]
        grids = tuple([own[index] for own in numbers for index in changing(own)])
        run = ProgramKind(made, by_name(device).arch, 0, names, numbers).bind(grids)
        run(addresses, 0)
    for launch in gpu.launches:
        role, *more = [line.strip() for line in launches.described(launch)]
        name = launches.role(launch)
        # Words, of which those that have commas have no blanks.
        words = role.removeprefix(name).replace(", ", ",").split()
        lines += [f"{name}: {word}" for word in words]
        for line in more:
            about, *words = line.replace(", ", ",").split()
            if about in ("numbers", "constants"):
                about = ""
            else:
                lines.append(f"{name}: {about}")
                about += " "
            lines += [f"{name}: {about}{word}" for word in words]
    return lines


def lying(spec: ArraySpec, strides: tuple[int, ...] | None) -> ArraySpec:
    return spec._replace(aligned=False) if strides is None else spec._replace(strides=strides)


def key(word: str) -> str:
    return word.split("=")[0]


def table(title: str) -> str:
    """Of a device and a backend, or of what is done to a cache."""
    if title in PROGRAMS:
        asked = [(facts, laid) for name, facts, laid in CACHE if name == title]
        found = [(f"{f} {laid or ''}", cache_told(title, laid, **f)) for f, laid in asked]
    else:
        device, backend = title.rsplit(" ", 1)
        problems = TABLE[device, backend]
        found = [(f"{f} {laid or ''}", told(device, backend, (f, laid))) for f, laid in problems]
    return "\n".join(line.rstrip() for line in differing(title, found)) + "\n"


def differing(title: str, told: list[tuple[str, list[str]]]) -> list[str]:
    """The first in full, and of the others what differs from it."""
    usual = told[0][1]
    lines = [f"{title} {told[0][0]}", *(f"  {word}" for word in usual)]
    for asked, found in told[1:]:
        lines.append(f"{title} {asked}")
        lines.append("  " + "; ".join(word for word in found if word not in usual))
        keys = {key(word) for word in found}
        gone = [key(word) for word in usual if key(word) not in keys]
        # All that an absent launch would be given is absent, too.
        roles = {word.split(": ")[0] for word in found}
        lost = [word for word in gone if word.split(": ")[0] in roles]
        lines += [f"  without {', '.join(lost)}"] * bool(lost)
    return lines


@pytest.mark.parametrize("title", [*map(" ".join, TABLE), *PROGRAMS])
def test_what_kernels_are_given_is_that_of_the_golden_table(title):
    golden, found = GOLDEN / f"programs {title}.txt", table(title)
    if os.environ.get("WRITE_GOLDEN_PROGRAMS"):
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.mark.parametrize("title", [*map(" ".join, TABLE), *PROGRAMS])
def test_a_compiler_elsewhere_is_told_all_that_a_kernel_is_compiled_for(title, monkeypatch):
    made: list[Program] = []
    record = lambda program, *_: made.append(program) or []  # noqa: E731
    monkeypatch.setitem(globals(), "launched", record)
    table(title)
    calls = {call.specialization: call for program in made for call in program.calls}
    assert calls
    for call in calls.values():
        there, arch = decode(encode(call, "sm_90"))
        assert (there.specialization, arch) == (call.specialization, "sm_90")
        assert (there.reads, there.writes) == (call.reads, call.writes)
        assert [*there.parameters] == [*call.parameters]
        for argument in there.arguments.values():
            assert not isinstance(argument, Scalar) or argument.value == 0
            assert not isinstance(argument, TensorMap) or not any(argument.shape)


# Two values each, of which a kernel that takes both is given another one.
BY_HAND = {"block_m": (16, 32), "block_n": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)}
BY_HAND |= {
    "least_tiles": (1, 2),
    "fewest_shares": (4, 8),
    "conversion": (0, 1),
    "programs": (1, 2),
}
BY_HAND |= {"registers": (0, 168), "merge_values": (64, 128), "merge_stages": (1, 2)}
BY_HAND |= {"fetch_ahead": (0, 4)}


@pytest.mark.parametrize("option", OPTIONS["decode.forward"])
def test_a_decode_is_given_what_is_chosen_by_hand(option):
    lines = []
    for value in BY_HAND[option]:
        chosen = named("decode", "", **{option: value})
        facts = {**BASE, **DECODE, "seqlen_k": 64_000, "kv_dtype": "float8_e5m2"}
        problem = AttentionProblem.dense(**facts)
        made = plan(problem, by_name("H200"), backend=chosen)
        lines.append(given("forward", made, problem, {}, "H200"))
    assert lines[0] != lines[1]
