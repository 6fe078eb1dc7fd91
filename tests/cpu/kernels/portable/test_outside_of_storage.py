"""Nothing outside of the caller's tensors is touched, whatever page numbers, indices and lengths
say: the portable kernels and the order of Hopper's tiles, run by Triton's interpreter.

Caches and outputs lie within larger tensors of NaN. What is read out there shows in the results,
and what is written there is NaN no more. They run in a process of their own: see
`support.runs.interpreted`.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan, plan
from heedful.core.registry.configs import ROWS
from heedful.core.registry.tiles import TileConfig
from heedful.launch.bind import portable, portable_cache
from heedful.launch.program import buffers, programs
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Program, Scalar
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager.cache_update import append_kv
from support.fenced import Fenced
from support.problems.grids import in_turns
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret, run_call

TILES = TileConfig(16, 16)
KERNELS = {row.kernel: TILES for row in ROWS if row.kernel.startswith("portable.")}
INF = float("inf")
Named = dict[str, Any]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def forward(problem: AttentionProblem, num_splits: int = 1, **tensors: torch.Tensor):
    """(out, lse) of the portable kernels, which write nothing beside them."""
    problem, is_split = replace(problem, num_splits=num_splits), num_splits > 1
    chosen = Plan(problem, by_name("H200"), "portable", "run", configs=KERNELS, is_split=is_split)
    q = tensors["q"]
    results = {
        "out": Fenced.like(torch.full((*q.shape[:-1], problem.head_dim_v), 7.0)),
        "lse": Fenced.like(torch.full(problem.lse_shape, 7.0)),
    }
    given: Named = {**tensors, **{name: fenced.inside for name, fenced in results.items()}}
    specs = {name: array_spec(tensor) for name, tensor in given.items()}
    interpret(portable.forward(problem, chosen, specs), given)
    for fenced in results.values():
        fenced.assert_whole()
    return results["out"].inside, results["lse"].inside


def cache_problem(batch: int, rows: int, seqlen_k: int, **facts) -> AttentionProblem:
    return AttentionProblem.dense(
        batch, rows, seqlen_k, 2, 1, head_dim=16, dtype="float32", used_k=True, **facts
    )


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@interpreted
@pytest.mark.parametrize("num_splits", [1, 3])
def test_pages_that_do_not_exist_give_what_the_nearest_that_does_gives(num_splits):
    pages, page_size = 6, 8
    k, v = Fenced.like(randn(pages, page_size, 1, 16)), Fenced.like(randn(pages, page_size, 1, 16))
    q, used = randn(3, 2, 2, 16), ints(30, 17, 32)
    table = ints(2, -1, 5, 6, 0, 1, 7, 3, -2, 3, 4, 8).view(3, 4)
    problem = cache_problem(3, 2, 32, page_size=page_size, causal=True)
    given: Named = {"q": q, "k": k.inside, "v": v.inside, "seqused_k": used}
    got = forward(problem, num_splits, **given, block_table=table)
    want = forward(problem, num_splits, **given, block_table=table.clamp(0, pages - 1))
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


@interpreted
def test_scales_of_pages_that_do_not_exist_are_those_of_the_nearest():
    pages, page_size = 4, 8
    k, v = (
        Fenced.like(torch.randint(-9, 9, (pages, page_size, 1, 16), dtype=torch.int8))
        for _ in range(2)
    )
    scales = [Fenced.like(torch.rand(pages, page_size, 1, 2)) for _ in range(4)]
    names = ("k_descale", "v_descale", "k_shift", "v_shift")
    given: Named = {name: fenced.inside for name, fenced in zip(names, scales, strict=True)}
    given |= {"q": randn(1, 1, 2, 16), "k": k.inside, "v": v.inside, "seqused_k": ints(32)}
    table = ints(-1, 4, 2, 5).view(1, 4)
    facts: dict[str, Any] = {"kv_dtype": "int8", "kv_group": 8, "kv_shift": True}
    problem = cache_problem(1, 1, 32, page_size=page_size, **facts)
    got, _ = forward(problem, **given, block_table=table)
    want, _ = forward(problem, **given, block_table=table.clamp(0, pages - 1))
    assert got.isfinite().all() and torch.equal(got, want)


@interpreted
def test_entries_past_a_length_are_never_looked_up():
    """Numbers so large that an access by them would end the process."""
    k, v = randn(4, 8, 1, 16), randn(4, 8, 1, 16)
    table = ints(1, 2, 2**31 - 1, 3, -(2**31), 2**30).view(2, 3)
    problem = cache_problem(2, 1, 24, page_size=8)
    given: Named = {"q": randn(2, 1, 2, 16), "k": k, "v": v, "seqused_k": ints(16, 5)}
    got, _ = forward(problem, **given, block_table=table)
    want, _ = forward(problem, **given, block_table=ints(1, 2, 0, 3, 0, 0).view(2, 3))
    assert torch.equal(got, want)


@interpreted
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_lengths_below_one_read_nothing_and_give_zeros(num_splits, sink):
    nothing = torch.full((4, 24, 1, 16), torch.nan)
    lengths = ints(-1, 0, -(2**31), -7)
    given: Named = {
        "q": randn(4, 3, 2, 16),
        "k": nothing,
        "v": nothing,
        "seqused_k": lengths,
    }
    logits = randn(2)
    given |= {"sink": logits} if sink else {}
    problem = cache_problem(4, 3, 24, sink=sink)
    out, lse = forward(problem, num_splits, **given)
    assert (out == 0).all()
    want = logits[None, :, None].expand(lse.shape) if sink else torch.full(lse.shape, -INF)
    torch.testing.assert_close(lse, want)


@interpreted
def test_lengths_beyond_the_storage_end_with_it():
    k, v = Fenced.like(randn(2, 24, 1, 16)), Fenced.like(randn(2, 24, 1, 16))
    given: Named = {"q": randn(2, 2, 2, 16), "k": k.inside, "v": v.inside}
    problem = cache_problem(2, 2, 24)
    got = forward(problem, **given, seqused_k=ints(31, 2**31 - 1))
    want = forward(problem, **given, seqused_k=ints(24, 24))
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


@interpreted
def test_rows_and_padding_outside_of_the_cache_are_the_nearest_inside():
    k, v = Fenced.like(randn(3, 24, 1, 16)), Fenced.like(randn(3, 24, 1, 16))
    given: Named = {
        "q": randn(4, 1, 2, 16),
        "k": k.inside,
        "v": v.inside,
        "seqused_k": ints(20, 9, 24, 9),
    }
    problem = cache_problem(4, 1, 24, kv_batch_idx=True, leftpad_k=True)
    got = forward(problem, **given, kv_batch_idx=ints(-1, 3, 1, 9), leftpad_k=ints(-2, 20, 25, 3))
    want = forward(problem, **given, kv_batch_idx=ints(0, 2, 1, 2), leftpad_k=ints(0, 20, 24, 3))
    for a, b in zip(got, want, strict=True):
        assert not a.isnan().any() and torch.equal(a, b)


PACKED: Named = dict(head_dim=16, dtype="float32", total_q=40, total_k=40)
BOUNDS = {
    "before": (9, 20, 30, 40),
    "behind": (0, 11, 20, 31),
    "both": (3, 20, 20, 33),
    "none": (0, 11, 20, 40),
    "nobody": (0, 0, 0, 0),
    "falling": (30, 10, 40, 5),
    "outside": (-5, 20, 60, 2**31 - 1),
}


@interpreted
@pytest.mark.parametrize("bounds, num_splits, sink", in_turns(BOUNDS, (1, 3), (False, True)))
def test_every_packed_token_has_a_result_and_those_of_no_sequence_zeros(bounds, num_splits, sink):
    cu = ints(*BOUNDS[bounds])
    tensors = [Fenced.like(randn(40, 2, 16)) for _ in range(3)]
    problem = AttentionProblem.dense(3, 40, 40, 2, sink=sink, **PACKED)
    given = dict(zip("qkv", (fenced.inside for fenced in tensors), strict=True))
    given |= {"sink": randn(2)} if sink else {}
    out, lse = forward(problem, num_splits, **given, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert out.isfinite().all() and not lse.isnan().any()
    free = torch.ones(40, dtype=torch.bool)
    for begin, end in zip(cu.clamp(0, 40).tolist(), cu[1:].clamp(0, 40).tolist(), strict=False):
        free[begin:end] = False
    if bounds not in ("falling", "outside"):
        assert (out[free] == 0).all() and (lse[:, free] == -INF).all()
        assert (out[~free] != 0).all() and lse[:, ~free].isfinite().all()


@interpreted
def test_packed_tokens_without_any_sequence_are_zeros():
    problem = AttentionProblem.dense(0, 0, 0, 2, **PACKED)
    q, none = randn(40, 2, 16), ints(0)
    out, lse = forward(problem, q=q, k=q, v=q, cu_seqlens_q=none, cu_seqlens_k=none)
    assert (out == 0).all() and (lse == -INF).all()


def gradients(problem: AttentionProblem, **given: Any) -> dict[str, torch.Tensor]:
    """Results and gradients, written inside of their tensors. given: with dout."""
    inputs = {name: t for name, t in given.items() if name != "dout"}
    given["out"], given["lse"] = forward(problem, **inputs)
    outputs = {f"d{name}": Fenced.like(given[name]) for name in ("q", "k", "v", "bias")}
    given |= {name: fenced.inside for name, fenced in outputs.items()}
    chosen = Plan(problem, by_name("H200"), "portable", "run", configs=KERNELS)
    specs = {name: array_spec(tensor) for name, tensor in given.items()}
    interpret(portable.backward(problem, chosen, specs), given)
    for fenced in outputs.values():
        fenced.assert_whole()
        assert not fenced.inside.isnan().any()
    return {name: given[name] for name in ("out", "lse", *outputs)}


def biased(sequences: int) -> tuple[AttentionProblem, dict[str, torch.Tensor]]:
    """Packed sequences beside a bias that has room for 12 queries and keys of each."""
    problem = AttentionProblem.dense(
        sequences, 40, 40, 2, needs_grad=True, bias=True, bias_grad=True, **PACKED
    )
    x = {name: Fenced.like(randn(40, 2, 16)) for name in ("q", "k", "v", "dout")}
    x["bias"] = Fenced.like(randn(sequences, 2, 12, 12))
    given = {name: fenced.inside for name, fenced in x.items()}
    return replace(problem, seqlen_q=12, seqlen_k=12), given


@interpreted
@pytest.mark.parametrize("bounds", ["falling", "outside"])
def test_gradients_of_impossible_bounds_stay_inside(bounds):
    cu = ints(*BOUNDS[bounds])
    problem, given = biased(3)
    gradients(problem, **given, cu_seqlens_q=cu, cu_seqlens_k=cu)


@interpreted
def test_a_sequence_longer_than_a_bias_ends_where_that_does():
    problem, given = biased(2)
    given["cu_seqlens_q"] = given["cu_seqlens_k"] = ints(0, 20, 40)
    got = gradients(problem, **given)
    used = replace(problem, used_q=True, used_k=True)
    want = gradients(used, **given, seqused_q=ints(12, 12), seqused_k=ints(12, 12))
    # Nobody computes whole tiles of rows behind.
    rows = [*range(16), *range(20, 36)]
    for name, tensor in want.items():
        at = (slice(None), rows) if name == "lse" else rows if name != "dbias" else ...
        assert torch.equal(got[name][at], tensor[at]), name


def append(x: dict[str, torch.Tensor], page_size: int = 0, position0: int = 0) -> torch.Tensor:
    """Appends in place; returns the keys that each sequence has then."""
    x = {**x, "seqused": torch.full(x["cache_seqlens"].shape, 77, dtype=torch.int32)}
    specs = {name: array_spec(t) for name, t in x.items()}
    interpret(portable_cache.append_kv(specs, page_size, True, position0), x)
    return x["seqused"]


BAD_APPENDS = {
    # Lengths; then pages or rows of sequences.
    "pages": ((3, 7, 0), (0, 6, 2, -1, 1, 3, -9, 4, 5)),
    "padded rows": ((-1, 2, -9), (0, 1, 2, 3, 4, 5, 5, 5, 5)),
    "past the end": ((23, 24, 2**31 - 1), (0, 1, 2, 3, 4, 5, 5, 5, 5)),
    "rows": ((3, 7, 0), (-1, 3, 1)),
    "padded cache rows": ((-1, 23, 2**31 - 2), (0, 1, 2)),
}


@interpreted
@pytest.mark.parametrize("kind", BAD_APPENDS)
def test_new_tokens_that_have_no_place_are_dropped_and_the_others_written(kind):
    lengths, places = (ints(*values) for values in BAD_APPENDS[kind])
    page_size, new = 8 if len(places) == 9 else 0, 4
    shape = (6, page_size, 2, 16) if page_size else (3, 24, 2, 16)
    k, v = Fenced.like(randn(*shape)), Fenced.like(randn(*shape))
    k_new, v_new = randn(3, new, 2, 16), randn(3, new, 2, 16)
    x = {"k_new": k_new, "v_new": v_new, "k": k.inside, "v": v.inside, "cache_seqlens": lengths}
    x["block_table" if page_size else "kv_batch_idx"] = places.view(3, 3) if page_size else places
    want = k.inside.clone(), v.inside.clone()
    for b, length in enumerate(lengths.tolist()):
        for i in range(new if length >= 0 else 0):
            entry, at = divmod(length + i, page_size or 24)
            entry = int(places.view(3, -1)[b, entry]) if length + i < 24 else -1
            if 0 <= entry < shape[0]:
                want[0][entry, at], want[1][entry, at] = k_new[b, i], v_new[b, i]
    plain = Fenced.like(x["k"]), Fenced.like(x["v"])
    used = append(x, page_size)
    for fenced, expected in zip((k, v), want, strict=True):
        fenced.assert_whole()
        assert torch.equal(fenced.inside, expected)
    assert ((used <= 0) == (lengths < 0)).logical_or(lengths > 2**30).all()
    # In plain torch, with and without a look at the values.
    table = x.get("block_table")
    for sees_values in (True, False):
        twins = [Fenced.like(fenced.inside) for fenced in plain]
        keys, values = (fenced.inside for fenced in twins)
        rows = x.get("kv_batch_idx")
        append_kv(keys, values, k_new, v_new, lengths, rows, table, sees_values)
        for fenced, expected in zip(twins, want, strict=True):
            fenced.assert_whole()
            assert torch.equal(fenced.inside, expected)


@interpreted
def test_rotary_positions_outside_of_the_tables_read_the_nearest():
    cos, sin = Fenced.like(randn(24, 4)), Fenced.like(randn(24, 4))
    tables = {"rotary_cos": cos.inside, "rotary_sin": sin.inside}
    lengths, q = ints(-9, 22, 2**31 - 100), randn(3, 4, 2, 16)
    shape = (3, 24, 2, 16)
    x = {"k_new": q, "v_new": q, "k": randn(*shape), "v": randn(*shape), "cache_seqlens": lengths}
    x |= {"q": q, "rotated": torch.full_like(q, torch.nan), "seqused": torch.zeros_like(lengths)}
    x |= tables
    specs = {name: array_spec(t) for name, t in x.items()}
    interpret(portable_cache.update(specs, position0=3), x)
    assert x["rotated"].isfinite().all()
    assert x["k"].isfinite().all()


def order(bounds: torch.Tensor, total: int, num_splits: int = 1, dtype: str = "bfloat16"):
    """Hopper's order of tiles: (tiles told of, out, lse); what it writes lies inside."""
    sizes = {"total_q": total, "total_k": total, "return_lse": True, "dtype": dtype}
    problem = AttentionProblem.dense(
        len(bounds) - 1, total, total, 4, head_dim=64, num_splits=num_splits, **sizes
    )
    chosen = plan(problem, by_name("H200"), backend="hopper")
    given = buffers.forward(problem)
    whole = programs.program(chosen, "forward", given)
    specs = given | {w.name: w.buffer for w in whole.workspaces}
    arrays = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    fences = {}
    for name in ("varlen_tiles", "tile_counter", "out", "lse", "partial_lse"):
        if name in specs:
            kind = torch.int32 if specs[name].dtype == "int32" else torch.float32
            fences[name] = Fenced.like(torch.full(specs[name].shape, 7, dtype=kind))
            arrays[name] = fences[name].inside
    first = replace(whole.calls[0])
    assert first.kernel.function == "schedule_varlen_tiles"
    interpret(Program((first,), ()), arrays)
    for fenced in fences.values():
        fenced.assert_whole()
    lse = arrays["partial_lse" if num_splits > 1 else "lse"]
    count = int(arrays["varlen_tiles"][0])
    assert 0 <= count <= (len(arrays["varlen_tiles"]) - 1) // 2
    return arrays["varlen_tiles"][1:].view(-1, 2)[:count], arrays["out"], lse


@interpreted
@pytest.mark.parametrize("bounds, num_splits", in_turns(BOUNDS, (1, 3)))
def test_hopper_clears_tokens_of_no_sequence_and_tells_of_tiles_that_exist(bounds, num_splits):
    total, cu = 4000, ints(*BOUNDS[bounds]).long() * 100
    cu = cu.clamp(-(2**31), 2**31 - 1).int()
    tiles, out, lse = order(cu, total, num_splits)
    assert ((tiles[:, 0] >= 0) & (tiles[:, 0] < 3)).all()
    if bounds in ("falling", "outside"):
        return
    free = torch.ones(total, dtype=torch.bool)
    free[cu[0] : cu[-1]] = False
    assert (lse[..., free] == -INF).all() and (lse[..., ~free] == 7).all()
    untouched = out if num_splits > 1 else out[~free]
    assert (untouched == 7).all() and (num_splits > 1 or (out[free] == 0).all())


@triton.jit
def touch(x, count, at, IS_STORED: tl.constexpr):
    lanes = tl.arange(0, 4)
    if IS_STORED:
        tl.store(x + at + lanes, lanes.to(tl.float32), mask=lanes < count)
    else:
        tl.sum(tl.load(x + at + lanes, mask=lanes < count), 0)


@interpreted
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    "at, count, inside", [(0, 4, True), (3, 3, True), (3, 4, False), (-1, 4, False), (9, 0, True)]
)
def test_an_element_beside_a_tensor_is_noticed_whatever_is_made_of_it(at, count, inside, stored):
    """All programs that the interpreter runs in tests are looked after so."""
    arrays = {"x": torch.zeros(8)[1:7], "y": torch.zeros(8)}
    given = {"x": Pointer("x", "float32"), "count": Scalar(count), "at": Scalar(at)}
    call = KernelCall(KernelRef(__name__, "touch"), (1, 1, 1), given | {"IS_STORED": stored})
    with nullcontext() if inside else pytest.raises(Exception, match="outside of the arrays"):
        run_call(call, arrays)


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
