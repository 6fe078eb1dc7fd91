"""Latent vectors in rows of 656 bytes: what packing keeps, calls of both frameworks over such rows,
and the words of errors."""

from typing import Any

import numpy as np
import pytest
import torch

import heedful.torch as heedful
from heedful.core.call.problem import LATENT_ROWS
from heedful.reference.quant import unpack_latent
from support.problems.budget import run
from support.problems.cases import Case
from support.runs.prepared import Prepared

torch.manual_seed(0)
X = 3 * torch.randn(12, 16, 1, 576)
ROWS = heedful.pack_latent(X)
VALUES = heedful.unpack_latent(ROWS)
Q = torch.randn(2, 2, 16, 576)
HOW: dict[str, Any] = {
    "cache_seqlens": torch.tensor([80, 33], dtype=torch.int32),
    "block_table": torch.randperm(12).int().view(2, 6),
    "causal": True,
}
PLAIN = Case(
    dtype="bfloat16",
    backward=False,
    seqlen_q=2,
    seqlen_k=131,
    heads_q=8,
    heads_k=1,
    head_dim=576,
    head_dim_v=512,
    v_in_k=True,
    kv_dtype=LATENT_ROWS,
    used="k",
)


# Rows that begin at odd bytes.
UNEVEN = torch.zeros(12, 16, 1, 657, dtype=torch.uint8)[..., :656]


def new_tokens(count: int) -> dict[str, torch.Tensor]:
    new = X[:2, :count] / 2
    return {"k": new, "v": new[..., :512]}


def test_rows_have_e4m3_then_four_scales_then_bfloat16():
    assert ROWS.shape == (12, 16, 1, 656) and ROWS.dtype == torch.uint8
    scale = X[..., :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448
    assert torch.equal(ROWS[..., 512:528].contiguous().view(torch.float32), scale)
    assert torch.equal(ROWS[..., 528:].contiguous().view(torch.bfloat16), X[..., 512:].bfloat16())
    assert torch.allclose(torch.from_numpy(unpack_latent(ROWS.numpy())).float(), VALUES, rtol=1e-6)
    # e4m3 has 3 bits behind the first, and steps of its subnormals below.
    off = (VALUES - X)[..., :512].unflatten(-1, (4, 128)).abs()
    most = torch.maximum(X[..., :512].unflatten(-1, (4, 128)).abs() / 16, scale[..., None] / 1024)
    assert (off <= 1.001 * most).all()


def test_every_byte_of_e4m3_is_read_as_torch_reads_it():
    every = torch.arange(256, dtype=torch.uint8)
    rows = torch.zeros(256, 656, dtype=torch.uint8)
    rows[:, 7] = every
    rows[:, 512:516] = torch.ones(1).view(torch.uint8)
    found = torch.from_numpy(unpack_latent(rows.numpy()))[:, 7]
    want = every.view(torch.float8_e4m3fn).double()
    assert torch.equal(found.nan_to_num(-1e9), want.nan_to_num(-1e9))


def test_a_call_over_rows_is_one_over_their_values():
    found = heedful.flash_attn_with_kvcache(Q, ROWS, ROWS, **HOW)
    want = heedful.flash_attn_with_kvcache(Q, VALUES, VALUES[..., :512], **HOW)
    assert torch.equal(found, want)


@pytest.mark.parametrize("page_size", (0, 16))
def test_the_cpu_is_within_the_budget(page_size):
    run(Prepared("cpu"), Case(**{**vars(PLAIN), "page_size": page_size}))


def test_jax_packs_and_attends_alike():
    jnp = pytest.importorskip("jax.numpy")
    import heedful.jax as hj

    rows = hj.pack_latent(jnp.asarray(X.numpy()))
    assert np.array_equal(np.asarray(rows), ROWS.numpy())
    assert np.array_equal(np.asarray(hj.unpack_latent(rows)), VALUES.numpy())
    how = {n: jnp.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x for n, x in HOW.items()}
    found, *_ = hj.flash_attn_with_kvcache(jnp.asarray(Q.numpy()), rows, rows, **how)
    want = heedful.flash_attn_with_kvcache(Q, ROWS, ROWS, **HOW)
    assert np.allclose(np.asarray(found), want.numpy(), rtol=0, atol=1e-4)


# In pages, the last of which gets full; by rows of the cache, of which one sequence has none.
PLACES = (
    {"cache_seqlens": torch.tensor([93, 33], dtype=torch.int32), "block_table": HOW["block_table"]},
    {
        "cache_seqlens": torch.tensor([-1, 5], dtype=torch.int32),
        "cache_batch_idx": torch.tensor([4, 9], dtype=torch.int32),
    },
)


def written(how: dict[str, Any], new: torch.Tensor) -> torch.Tensor:
    """The rows after new tokens (B, S, 1, 656), token by token."""
    rows = ROWS.clone()
    for b, start in enumerate(how["cache_seqlens"].tolist()):
        for at in range(start, start + new.shape[1] if start >= 0 else start):
            if "block_table" in how:
                rows[how["block_table"][b, at // 16], at % 16] = new[b, at - start]
            else:
                rows[how["cache_batch_idx"][b], at] = new[b, at - start]
    return rows


@pytest.mark.parametrize("how", PLACES, ids=("pages", "rows"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_appended_tokens_are_packed_as_pack_latent_packs_them(how, dtype):
    q, new = Q.to(dtype), {name: x.to(dtype) for name, x in new_tokens(3).items()}
    want, rows = written(how, heedful.pack_latent(new["k"])), ROWS.clone()
    out = heedful.flash_attn_with_kvcache(q, rows, rows, **new, **how)
    assert torch.equal(rows, want)
    lengths = torch.where(how["cache_seqlens"] < 0, -1, how["cache_seqlens"] + 3)
    later = {**how, "cache_seqlens": lengths}
    assert torch.equal(out, heedful.flash_attn_with_kvcache(q, rows, rows, **later))
    # Rows that are packed already are copied.
    packed, copied = heedful.pack_latent(new["k"]), ROWS.clone()
    same = heedful.flash_attn_with_kvcache(q, copied, copied, k=packed, v=packed, **how)
    assert torch.equal(copied, want) and torch.equal(same, out)


@pytest.mark.parametrize("how", PLACES, ids=("pages", "rows"))
def test_jax_appends_alike(how):
    jnp = pytest.importorskip("jax.numpy")
    import heedful.jax as hj

    new = new_tokens(3)
    given = {n: jnp.asarray(x.numpy()) for n, x in {**how, **new}.items()}
    rows = jnp.asarray(ROWS.numpy())
    out, k_cache, v_cache, *_ = hj.flash_attn_with_kvcache(
        jnp.asarray(Q.numpy()), rows, rows, **given
    )
    want = written(how, heedful.pack_latent(new["k"]))
    assert np.array_equal(np.asarray(k_cache), want.numpy())
    assert np.array_equal(np.asarray(v_cache), want.numpy())
    found = heedful.flash_attn_with_kvcache(Q, ROWS.clone(), ROWS.clone(), **new, **how)
    assert np.allclose(np.asarray(out), found.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q": Q[..., :512]}, "q must have a head_dim of 576 beside k_cache of 656 bytes"),
        ({"v_cache": ROWS[..., :512]}, "v_cache must be k_cache itself beside k_cache of 656"),
        (
            {"k_cache": ROWS[..., :655].contiguous()},
            "v_cache must have a head_dim of 1 to 512, got 1310",
        ),
        (
            {"k_descale": torch.tensor(1.0), "v_descale": torch.tensor(1.0)},
            "k_descale must be None beside k_cache of 656 bytes a row, which have scales",
        ),
        (
            {**new_tokens(1), "rotary_cos": torch.ones(96, 8), "rotary_sin": torch.ones(96, 8)},
            "rotary_cos must be None beside k_cache of 656 bytes a row (k's first columns are",
        ),
        (
            {**new_tokens(1), "v": X[:2, :1]},
            "v must have shape (batch, new_len, heads_k, head_dim) = (2, 1, 1, 512), got (2, 1, 1",
        ),
        (
            {**new_tokens(1), **dict.fromkeys(("k_cache", "v_cache"), UNEVEN)},
            "k_cache must have rows at multiples of 4 bytes, as float32 scales are written into",
        ),
    ],
    ids=["q", "v_cache", "k_cache", "k_descale", "rotary_cos", "v", "strides"],
)
def test_what_does_not_belong_to_rows_is_named(given, words):
    call: dict[str, Any] = {"q": Q, "k_cache": ROWS, "v_cache": ROWS, **HOW, **given}
    if "v_cache" not in given:
        call["v_cache"] = call["k_cache"]
    before = ROWS.clone()
    with pytest.raises(ValueError) as caught:
        heedful.flash_attn_with_kvcache(**call)
    assert str(caught.value).startswith(words)
    assert torch.equal(ROWS, before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: heedful.pack_latent(X[..., :575]), "x must be (..., 576), got shape (12, 16, 1"),
        (lambda: heedful.pack_latent(X.int()), "x must be float16 or bfloat16 or float32, got int"),
        (lambda: heedful.unpack_latent(ROWS[..., :576]), "packed must be (..., 656), got shape"),
        (lambda: heedful.unpack_latent(X), "packed must be uint8, got float32"),
        (lambda: heedful.unpack_latent(ROWS, torch.int8), "dtype must be float16, bfloat16 or"),
    ],
)
def test_what_is_no_latent_vector_is_named(call, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).startswith(words)
