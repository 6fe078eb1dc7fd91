"""A kernel draws its part of a dropout mask wherever it is told of its place: by numbers of the
launch, or in memory behind the seed. In Triton's interpreter; in a process of their own: see
`support.runs.interpreted`.
"""

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from heedful.kernels.args.shared import Dropout
from heedful.kernels.common.philox import kept_quads
from heedful.kernels.portable.shared.dropout import dropout_words, keep_tile
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar
from heedful.reference.philox import keep_mask, key_words, philox4x32
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import run_call

SEED, P, M, N = 0x7123456789ABCDEF, 0.37, 8, 16


@triton.jit
def draw(out, b, h, dropout: Dropout, M: tl.constexpr, N: tl.constexpr):
    kept_MN = keep_tile(dropout_words(dropout), b, h, 0, 0, dropout, M, N)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, kept_MN.to(tl.int8))


@triton.jit
def draw_quads(out, b, h, row0, col0, dropout: Dropout, M: tl.constexpr, N: tl.constexpr):
    rows = row0 + tl.arange(0, M)[:, None]
    quads = col0 + 4 * tl.arange(0, N // 4)[None, :]
    zeros = tl.zeros([M, N // 4], tl.uint32)
    at = tl.arange(0, M)[:, None] * N + 4 * tl.arange(0, N // 4)[None, :]
    k0, k1, k2, k3 = kept_quads(dropout, quads, rows, h, b, zeros)
    tl.store(out + at, k0)
    tl.store(out + at + 1, k1)
    tl.store(out + at + 2, k2)
    tl.store(out + at + 3, k3)


@interpreted
def test_fours_of_neighbours_are_those_of_the_reference_and_a_word_at_the_threshold_is_dropped():
    b, h, row0, col0 = 1, 2, 5, 24
    counter = (np.arange(col0, col0 + N, 4)[None] >> 2, row0 + np.arange(M)[:, None], h, b)
    words = philox4x32(key_words(SEED), counter).reshape(M, N)
    # Of each of the four columns a word that is the threshold itself.
    for column in range(4):
        threshold = words[3, 4 + column]
        dropout = Dropout(
            Pointer("seed", "int64"),
            Scalar(int(threshold.astype(np.int32))),
            None,
            *[Scalar(0)] * 4,
            origins=None,
            IS_ON=True,
            IS_QUAD=True,
        )
        out = torch.full((M, N), -1, dtype=torch.int8)
        numbers = {"b": b, "h": h, "row0": row0, "col0": col0}
        parameters = {"out": Pointer("out", "int8"), "dropout": dropout, "M": M, "N": N}
        parameters |= {name: Scalar(number) for name, number in numbers.items()}
        call = KernelCall(KernelRef(__name__, "draw_quads"), (1, 1, 1), parameters)
        run_call(call, {"out": out, "seed": torch.tensor([SEED], dtype=torch.int64)})
        assert np.array_equal(out.numpy(), words < threshold)


@interpreted
@pytest.mark.parametrize("is_quad", [True, False])
@pytest.mark.parametrize("told", ["by the launch", "after the seed", "of each sequence"])
@pytest.mark.parametrize("origin", [(0, 0, 0, 0), (5, 3, 9, 12), (2**32 - 2, 1, 2**31, 8)], ids=str)
def test_a_mask_is_the_references_wherever_its_place_is_told(origin, told, is_quad):
    b, h = 1, 2
    signed = [n - 2**32 if n >= 2**31 else n for n in origin]
    seed = torch.tensor([SEED, *origin] if told == "after the seed" else [SEED], dtype=torch.int64)
    place = [Scalar(n) if told == "by the launch" else None for n in signed]
    threshold = int(np.uint32(round((1 - P) * 2**32)).astype(np.int32))
    own = told == "of each sequence"
    dropout = Dropout(
        Pointer("seed", "int64"),
        Scalar(threshold),
        None,
        *place,
        origins=Pointer("origins", "int32") if own else None,
        IS_ON=True,
        IS_QUAD=is_quad,
    )
    # That of the sequence before it is another; columns of groups of four count in fours.
    row, column = [n + own * b * (place == 0) for place, n in enumerate(signed)], signed[3]
    row[3] = column // 4 if is_quad else column
    origins = torch.tensor([[9] * 4, row], dtype=torch.int64).to(torch.int32)
    out = torch.full((M, N), -1, dtype=torch.int8)
    parameters = {"out": Pointer("out", "int8"), "b": Scalar(b), "h": Scalar(h)}
    parameters |= {"dropout": dropout, "M": M, "N": N}
    call = KernelCall(KernelRef(__name__, "draw"), (1, 1, 1), parameters)
    run_call(call, {"out": out, "seed": seed, "origins": origins})
    assert np.array_equal(out.numpy(), keep_mask(SEED, P, b, h + 1, M, N, origin)[h])


@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
