"""What the portable decode loads, prefetches and multiplies: words of rows, lines of the cache, and
the dtypes of products. In Triton's interpreter; in a process of their own: see
`support.runs.interpreted`.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.kernels.args.kinds import In, Rows
from heedful.kernels.portable.decode import cache, kernel
from heedful.kernels.portable.decode.cache import KeyRows, load_words, value_of_words
from heedful.kernels.portable.decode.results import columns_of_rows
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar
from support.problems import budget
from support.problems.cases import Case
from support.runs.decode_programs import TILES, Interpreted
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import prefetched, run_call

INT8, E4M3, E5M2, F16, BF16 = tl.int8, tl.float8e4nv, tl.float8e5, tl.float16, tl.bfloat16
PLAIN, PTX, FMA = cache.PLAIN.value, cache.PTX.value, cache.FMA.value


@pytest.mark.parametrize(
    "group, slices, dim, whole",
    [
        (64, 1, 64, True),
        (64, 2, 128, True),
        (32, 4, 128, True),
        (1, 1, 1, True),
        (64, 1, 128, False),
        (32, 2, 128, False),
        (0, 1, 64, False),
        (0, 1, 0, False),
    ],
)
def test_a_slice_has_one_scale_where_its_group_is_as_long(group, slices, dim, whole):
    assert kernel.is_by_slice(group, slices, dim) is whole


@pytest.mark.parametrize(
    "values, stored, method, short",
    [
        (2, E4M3, FMA, True),
        (2, E5M2, FMA, True),
        (2, INT8, FMA, False),
        (4, INT8, FMA, False),
        (1, F16, FMA, False),
        (2, E4M3, PTX, False),
        (2, E4M3, PLAIN, False),
    ],
    ids=str,
)
def test_floats_of_8_bits_alone_become_float16(values, stored, method, short):
    assert cache.is_float16(values, stored, method) is short
    # Numbers that scales multiplied may lie outside of its range.
    for dtype in (F16, BF16):
        assert cache.operand_type(values, stored, dtype, method, False) == (F16 if short else dtype)
        assert cache.operand_type(values, stored, dtype, method, True) == dtype
    by_fma = method == FMA and values > 1 and not short
    assert cache.is_by_fma(values, stored, method) is by_fma
    assert cache.unit_of(values, stored, BF16, method) == (64.0 if by_fma else 1.0)
    assert cache.unit_of(values, stored, F16, method) == 1.0


@pytest.mark.parametrize(
    "block_m, values, stored, held",
    [
        (8, 2, INT8, True),
        (8, 4, INT8, True),
        (16, 1, F16, True),
        (16, 2, E4M3, True),
        (16, 2, INT8, False),
        (32, 1, F16, False),
        (32, 2, E4M3, False),
    ],
    ids=str,
)
def test_offsets_of_rows_are_held_where_registers_are_left(block_m, values, stored, held):
    assert cache.holds_rows(block_m, values, stored) is held
    assert kernel.keys_lead(block_m) is (block_m < 16)


@pytest.mark.parametrize(
    "v_in_k, dim, dim_v, values, words",
    [
        (True, 576, 512, 1, 64),
        (True, 576, 512, 2, 32),
        (True, 520, 512, 1, 16),
        (True, 545, 512, 2, 32),
        (True, 545, 512, 1, 64),
        (True, 512, 512, 1, 0),
        (False, 576, 512, 1, 0),
    ],
)
def test_keys_past_the_values_fill_a_product(v_in_k, dim, dim_v, values, words):
    assert cache.rest_words(v_in_k, dim, dim_v, values) == words
    assert cache.has_own_scales(v_in_k, 128) is v_in_k
    assert not cache.has_own_scales(v_in_k, 0)


def test_a_row_of_results_has_a_power_of_two_columns():
    assert columns_of_rows(64, 1, 1) == 64
    assert columns_of_rows(32, 2, 3) == 256
    assert columns_of_rows(64, 2, 1) == 128


class Loaded(NamedTuple):
    x: In[Rows]


@triton.jit
def load(
    io: Loaded,
    out,
    first,
    count,
    entry,
    g,
    slice_words,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    ACROSS: tl.constexpr,
    IS_PAGED: tl.constexpr,
    N: tl.constexpr,
):
    at_N = tl.arange(0, N)
    where = entry.to(tl.int64)
    if IS_PAGED:
        # Each row in an entry of its own.
        where = (entry + at_N % 2).to(tl.int64)
    keys = KeyRows(where, (first.to(tl.int64), at_N.to(tl.int64)), at_N < count, g)
    words = load_words(io.x, keys, slice_words, DIM, BLOCK, VALUES, ACROSS)
    places = tl.arange(0, words.shape[0])[:, None] * words.shape[1]
    tl.store(out + places + tl.arange(0, words.shape[1])[None, :], words.to(tl.int32))


@interpreted
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    "dtype, values, dim, block, slice_words",
    [
        ("int16", 1, 16, 16, 0),
        ("int16", 1, 13, 16, 0),
        ("int8", 2, 32, 16, 0),
        ("int8", 2, 26, 16, 0),
        ("int8", 2, 60, 16, 16),
        ("int8", 2, 64, 16, 16),
        # Bytes of int4 hold two values each.
        ("uint8", 4, 64, 16, 0),
        ("uint8", 4, 40, 16, 0),
        ("uint8", 4, 100, 16, 16),
    ],
)
def test_words_of_rows_are_those_of_memory_and_0_beyond_it(
    dtype, values, dim, block, slice_words, across, paged
):
    entries, rows, heads, n = 3, 21, 2, 16
    first, count, entry, g = 4, 14, 1, 1
    size = getattr(torch, dtype).itemsize
    each = 80 // size  # elements of a row, more than it has of values
    stored = torch.randint(-100, 100, (entries, rows, heads, each // (2 // size)))
    x = stored.to(torch.int16).view(getattr(torch, dtype))
    words = x.view(torch.int16).int()
    want = torch.zeros(n, block, dtype=torch.int32)
    inside = min(block, -(-dim // values) - slice_words)
    for row in range(count):
        page = entry + row % 2 if paged else entry
        want[row, :inside] = words[page, first + row, g, slice_words : slice_words + inside]
    out = torch.full((block, n) if across else (n, block), -1, dtype=torch.int32)
    numbers = {"first": first, "count": count, "entry": entry, "g": g, "slice_words": slice_words}
    parameters = {
        "io": Loaded(Rows(Pointer("x", dtype), *map(Scalar, x.stride()[:3]))),
        "out": Pointer("out", "int32"),
        **{name: Scalar(number) for name, number in numbers.items()},
        "DIM": dim,
        "BLOCK": block,
        "VALUES": values,
        "ACROSS": across,
        "IS_PAGED": paged,
        "N": n,
    }
    run_call(KernelCall(KernelRef(__name__, "load"), (1, 1, 1), parameters), {"x": x, "out": out})
    assert (out.T if across else out).equal(want)


class Noting(Interpreted):
    """Keeps the problem and its operands."""

    def forward(self, problem, x, out):
        self.problem, self.x = problem, x
        return super().forward(problem, x, out)


FETCHED = Case(
    dtype="float16",
    backward=False,
    seqlen_q=1,
    seqlen_k=83,
    heads_q=6,
    heads_k=3,
    head_dim=64,
    head_dim_v=32,
)


@interpreted
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        FETCHED,
        replace(FETCHED, batch=2, used="k", lens_k=(83, 40), leftpad_k=True),
        replace(FETCHED, batch=2, kv_batch_idx=True, kv_dtype="int8", head_dim_v=64),
        replace(FETCHED, heads_k=2, heads_q=4, head_dim=128, head_dim_v=64, v_in_k=True),
        replace(FETCHED, layout="heads_first"),
    ],
    ids=str,
)
def test_programs_of_all_heads_prefetch_each_line_of_a_tile_once(case, ahead):
    """Of rows that exist, and only where heads lie side by side."""
    backend = Noting(1, replace(TILES, fetch_ahead=ahead))
    prefetched.clear()
    budget.run(backend, case)
    x, problem = backend.x, backend.problem
    want: Counter[int] = Counter()
    for b in range(problem.batch):
        entry = b if x.kv_batch_idx is None else int(x.kv_batch_idx[b])
        pad = 0 if x.leftpad_k is None else int(x.leftpad_k[b])
        count = problem.seqlen_k - pad
        if x.seqused_k is not None:
            count = min(int(x.seqused_k[b]), count)
        for t in (x.k,) if problem.v_in_k else (x.k, x.v):
            if t.stride(2) != t.shape[-1]:
                continue
            for row in range(ahead * TILES.block_n, count):
                start = t[entry, pad + row].data_ptr()
                want.update(range(start, start + t[0, 0].numel() * t.element_size(), 64))
    assert Counter(prefetched) == want
    assert bool(want) == (case.layout != "heads_first")


# Of each two sizes, no two alike: slices of keys and of values, their dims, heads, rows and pages.
TINY = Case(dtype="float16", backward=False, batch=1, seqlen_q=1, seqlen_k=19, heads_q=2, heads_k=1)
INT8 = replace(TINY, kv_dtype="int8", head_dim=64, head_dim_v=96, kv_group=32)
APART = (
    INT8,
    replace(INT8, kv_shift=True, page_size=3, head_dim=96, head_dim_v=64),
    replace(INT8, kv_group=16, head_dim_v=32, heads_q=3, causal=True, seqlen_q=2),
    replace(TINY, kv_dtype="int4", head_dim=128, head_dim_v=64, kv_group=64, leftpad_k=True),
    replace(
        TINY, kv_dtype="float8_e5m2", head_dim=24, head_dim_v=40, heads_k=2, batch=2, alibi="bh"
    ),
    replace(TINY, v_in_k=True, head_dim=80, head_dim_v=64, page_size=4, window=(7, 0)),
    replace(TINY, v_in_k=True, head_dim=576, head_dim_v=512, kv_dtype="fp8_ds_mla", page_size=5),
    replace(TINY, head_dim=8, head_dim_v=24, layout="heads_first", sink=True, heads_k=2),
    # A scale of each value.
    replace(TINY, kv_dtype="int8", kv_group=1, head_dim=16, kv_shift=True),
)


@interpreted
@pytest.mark.parametrize("case", APART, ids=str)
@pytest.mark.parametrize("rows", [16, 8])
def test_no_size_is_taken_for_another(case, rows):
    budget.run(Interpreted(2, replace(TILES, block_m=rows)), case)


@triton.constexpr_function
def unit_of_integers(_values, stored, _dtype, _method):
    """`unit_of` as conversions of integers to bfloat16 have it."""
    return 64.0 if stored.is_int8() or stored.is_uint8() else 1.0


@triton.jit
def in_units(
    words,
    VALUES: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
    CONVERSION: tl.constexpr,
    i: tl.constexpr,
):
    """`value_of_words` as these conversions have it: in float16, exactly."""
    return value_of_words(words, VALUES, STORED, DTYPE, tl.constexpr(0), i) * 0.015625


IN_UNITS = replace(TINY, kv_dtype="int8", head_dim=64, seqlen_q=2)


@interpreted
@pytest.mark.parametrize("rows", [16, 8])
@pytest.mark.parametrize(
    "case",
    [
        IN_UNITS,
        replace(IN_UNITS, alibi="h"),
        replace(IN_UNITS, kv_group=64, kv_shift=True),
        replace(IN_UNITS, kv_group=32, kv_shift=True, page_size=3),
        replace(IN_UNITS, kv_group=8, kv_shift=True),
        replace(IN_UNITS, kv_group=1, head_dim=16, kv_shift=True, softcap=3.0),
        replace(IN_UNITS, kv_dtype="int4", kv_group=16, kv_shift=True),
        replace(IN_UNITS, v_in_k=True, head_dim=80, head_dim_v=64),
    ],
    ids=str,
)
def test_integers_that_conversions_make_too_small_are_within_the_budget(case, rows):
    """Converted to bfloat16 they are 64 times too small, which scores, results and shifts of groups
    make up for."""
    with (
        mock.patch.object(kernel, "unit_of", unit_of_integers),
        mock.patch.object(kernel, "value_of_words", in_units),
    ):
        budget.run(Interpreted(2, replace(TILES, block_m=rows)), case)


seen: set[str] = set()


@triton.jit
def noting(
    words,
    VALUES: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
    CONVERSION: tl.constexpr,
    i: tl.constexpr,
):
    """`value_of_words` without PTX, which the interpreter does not know; notes the dtype."""
    seen.add(str(DTYPE))  # pyright: ignore
    return value_of_words(words, VALUES, STORED, DTYPE, tl.constexpr(0), i)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rows", [16, 8])
@pytest.mark.parametrize(
    "mods, dtypes",
    [
        ({}, ("fp16",)),
        # One scale of each row: it multiplies the product of keys, and probabilities.
        ({"kv_group": 64, "head_dim": 64}, ("fp16",)),
        # Several slices of values leave no one scale to fit probabilities by.
        ({"kv_group": 32, "head_dim": 64}, ("bf16", "fp16")),
        ({"kv_group": 16, "head_dim": 64}, ("bf16",)),
        ({"kv_group": 1, "head_dim": 16}, ("bf16",)),
        ({"kv_dtype": "int8"}, ("bf16",)),
        ({"kv_dtype": "int8", "kv_group": 64, "head_dim": 64}, ("bf16",)),
    ],
    ids=str,
)
def test_products_are_of_float16_where_no_scale_of_a_group_is_in_them(mods, dtypes, rows):
    facts: dict[str, Any] = {"seqlen_q": 2, "seqlen_k": 19, "heads_q": 2, "heads_k": 1, "batch": 1}
    case = Case(
        **{"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "backward": False, **facts, **mods}
    )
    seen.clear()
    tiles = replace(TILES, conversion=FMA, block_m=rows)
    # The interpreter multiplies patterns of bits as bfloat16: the results say nothing.
    with mock.patch.object(kernel, "value_of_words", noting), suppress(AssertionError):
        budget.run(Interpreted(tiles=tiles), case)
    assert {name.removeprefix("triton.language.") for name in seen} == set(dtypes)


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
