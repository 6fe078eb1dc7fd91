"""The problems of `heedful validate`: names that say what is in them, and tensors of it on the
device."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from heedful.validation import grid

CPU = torch.device("cpu")
FEATURES = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (70, 9)},
    "softcap": {"facts": {"softcap": 5.0}},
    "dropout": {"facts": {"dropout_p": 0.2}},
    "ALiBi": {"alibi": True, "causal": True},
    "bias": {"bias": True},
    "sink": {"sink": True, "causal": True},
    "packed sequences": {"packed": True, "causal": True},
    "deterministic": {"causal": True, "facts": {"deterministic": True}},
}
SMALL = grid.Entry("small", (3, 12, 20, 4, 2, 16), "float32")
TENSORS = ("q", "k", "v", "alibi_slopes", "bias", "sink", "seed", "q_descale", "k_descale")
TENSORS += ("v_descale", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seqused_k")


def test_every_dtype_has_every_feature_by_its_name():
    by_name = {entry.name: entry for entry in grid.grid()}
    for dtype in ("bfloat16", "float16", "float32"):
        plain = grid.Entry(dtype, dtype=dtype)
        for feature, facts in FEATURES.items():
            name = f"{dtype} {feature}"
            assert by_name.pop(name) == replace(plain, name=name, **facts)
        for dim in (40, 64, 256):
            entry = by_name.pop(f"{dtype} causal, head dim {dim}")
            assert (entry.shape, entry.causal, entry.dtype) == ((2, 290, 450, 4, 2, dim), 1, dtype)
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz"):
        for dim in (64, 128):
            base = f"{dtype}, head dim {dim}"
            plain = grid.Entry(base, (2, 290, 450, 4, 2, dim), dtype)
            assert by_name.pop(base) == plain
            for name, packed in ((f"{base}, causal", 0), (f"{base}, packed sequences", 1)):
                made = replace(plain, name=name, causal=True, packed=bool(packed))
                assert by_name.pop(name) == made
    short = [replace(SMALL, name=f"float32 {name}", **facts) for name, facts in FEATURES.items()]
    assert grid.grid(small=True) == [replace(e, shape=(1, 45, 70, 2, 1, 32)) for e in short]
    # The rest are decodes and shapes of their own.
    assert all(entry.dtype == "bfloat16" for entry in by_name.values())
    decode = (3, 1, 700, 8, 2, 128)
    found = {name: e for name, e in by_name.items() if name.startswith("decode")}
    assert {e.shape for e in found.values()} == {decode} and len(found) == 4
    assert found["decode in 4 splits"].facts == {"num_splits": 4}
    assert found["decode, pages of 16"].page_size == 16
    assert found["decode, int8 cache"].kv_dtype == "int8"
    others = {name: e for name, e in by_name.items() if name not in found}
    assert {
        name: (e.shape, e.causal, e.packed, e.page_size, e.head_dim_v) for name, e in others.items()
    } == {
        "more queries than keys, causal": ((1, 700, 390, 3, 1, 128), True, False, 0, 0),
        "head dims 128 and 64": ((2, 290, 450, 4, 2, 128), False, False, 0, 64),
        "2,000 keys, head dim 64, causal": ((1, 500, 2000, 4, 4, 64), False, False, 0, 0),
        "a prefill and decodes, pages of 16": ((5, 300, 700, 8, 2, 128), True, True, 16, 0),
    }


KINDS = {
    "dense": SMALL,
    "values of another dim": replace(SMALL, head_dim_v=8),
    "packed": replace(SMALL, packed=True, causal=True),
    "pages": replace(SMALL, shape=(3, 1, 120, 4, 2, 16), page_size=16),
    "mixed pages": replace(SMALL, shape=(3, 12, 120, 4, 2, 16), packed=True, page_size=16),
    "int8": replace(SMALL, kv_dtype="int8"),
    "fp8": replace(SMALL, dtype="float8_e4m3fn"),
    "all": replace(SMALL, alibi=True, bias=True, sink=True, facts={"dropout_p": 0.25}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_is_on_its_device_the_same_again_and_another_by_draw(kind):
    entry = KINDS[kind]
    # What is made on no device in particular would lie elsewhere.
    built, again, other = (grid.build(entry, CPU, draw) for draw in (0, 0, 1))
    moved = grid.build(entry, torch.device("meta"))
    for name in TENSORS:
        x, same, another = (getattr(b.x, name) for b in (built, again, other))
        assert (x is None) == (getattr(moved.x, name) is None)
        if x is not None:
            assert torch.equal(x, same) and x.device == CPU and getattr(moved.x, name).is_meta
            is_drawn = name not in ("seed", "seqused_k") and "cu_seqlens" not in name
            assert torch.equal(x, another) is not is_drawn, name
    for x, y in ((built.dout, moved.dout), (built.dlse, moved.dlse)):
        assert (x is None) == (y is None) and (y is None or y.is_meta)


@pytest.mark.parametrize("kind", KINDS)
def test_a_problems_sizes_are_those_of_its_tensors(kind):
    entry = KINDS[kind]
    problem, x, dout, dlse = (
        getattr(grid.build(entry, CPU), n) for n in ("problem", "x", "dout", "dlse")
    )
    batch, seqlen_q, seqlen_k, heads, heads_k, dim = entry.shape
    dim_v = entry.head_dim_v or dim
    assert (problem.heads_q, problem.heads_k, problem.head_dim) == (heads, heads_k, dim)
    assert (problem.seqlen_q, problem.seqlen_k, problem.head_dim_v) == (seqlen_q, seqlen_k, dim_v)
    assert problem.scale == 1 / math.sqrt(dim) and problem.return_lse
    rows, keys = (batch, seqlen_q), (batch, seqlen_k)
    if kind == "packed":
        # The longest, shorter ones, and one without queries.
        assert x.cu_seqlens_q.tolist() == [0, 12, 16, 20, 20]
        assert x.cu_seqlens_k.tolist() == [0, 20, 30, 40, 45]
        rows, keys = (20,), (45,)
        assert (problem.batch, problem.total_q, problem.total_k) == (4, 20, 45)
    if kind == "mixed pages":
        assert x.cu_seqlens_q.tolist() == [0, 12, 13, 14, 14] and x.cu_seqlens_k is None
        rows = (14,)
        assert (problem.batch, problem.total_q) == (4, 14)
    if entry.page_size:
        pages = problem.batch * 8
        assert sorted(x.block_table.flatten().tolist()) == list(range(pages))
        assert x.block_table.shape == (problem.batch, 8) and x.block_table.dtype == torch.int32
        assert x.seqused_k.tolist() == [120, 83, 46, 9][: problem.batch]
        assert problem.page_size == 16 and problem.used_k
        keys = (pages, 16)
    assert x.q.shape == (*rows, heads, dim)
    assert x.k.shape == (*keys, heads_k, dim) and x.v.shape == (*keys, heads_k, dim_v)
    assert not torch.equal(x.q.flatten()[:9].float(), x.k.flatten()[:9].float())
    trained = kind in ("dense", "values of another dim", "packed", "all")
    assert problem.needs_grad is trained and problem.bias_grad is (kind == "all")
    assert (dout is None) == (dlse is None) == (not trained)
    if trained:
        assert dout.shape == (*rows, heads, dim_v) and dlse.shape == problem.lse_shape
        assert dlse.dtype == torch.float32 and dout.dtype == torch.float32


def test_scales_slopes_and_seeds_are_of_use():
    """Stored values become some two at most, scales are about one, none is zero."""
    int8 = grid.build(KINDS["int8"], CPU).x
    for x, scale in ((int8.k, int8.k_descale), (int8.v, int8.v_descale)):
        assert x.dtype == torch.int8 and x.min() < -100 and x.max() > 100
        assert scale.shape == (3, 2) and 0.5 / 75 <= scale.min() < scale.max() <= 1.5 / 75
    assert int8.q_descale is None and not torch.equal(int8.k_descale, int8.v_descale)
    fp8 = grid.build(KINDS["fp8"], CPU).x
    for scale in (fp8.q_descale, fp8.k_descale, fp8.v_descale):
        assert scale.shape == (3, 2) and 0.5 <= scale.min() < scale.max() <= 1.5
    every = grid.build(KINDS["all"], CPU).x
    slopes = every.alibi_slopes
    # The batch shares them, and they stay shared where they are moved.
    assert slopes.shape == (3, 4) and slopes.stride(0) == 0
    assert 0 <= slopes.min() < slopes.max() <= 0.3 and slopes.max() > 0.05
    assert every.bias.shape == (3, 4, 12, 20) and every.sink.shape == (4,)
    assert every.seed.tolist() == [0x1E3779B97F4A7C15]
    assert grid.build(SMALL, CPU).x.seed is None
