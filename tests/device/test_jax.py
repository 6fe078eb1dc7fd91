"""JAX's calls on a GPU: the very kernels of the PyTorch path, to the bit."""

import os

import pytest

# Beside torch, which wants memory too; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import numpy as np  # noqa: E402

from support import api, jax_api  # noqa: E402
from support.budget import check  # noqa: E402
from support.cases import Case, build, twins, variants  # noqa: E402

pytestmark = pytest.mark.gpu

BASE = Case(dtype="bfloat16", head_dim=64, heads_q=4)
CALLS = [
    *variants(
        BASE,
        causal=[True],
        window=[(20, 5, 3)],
        bias=["bhqk", "hqk", "k"],
        sink=[True],
        softcap=[5.0],
        alibi=["h", "bh"],
        dropout_p=[0.3],
        dropout_origin=[(3, 2, 5, 8)],
        varlen=["qk"],
        num_splits=[3],
        seqlen_k=[0],
        seqlen_q=[300],
        batch=[0],
        head_dim=[32, 72, 96, 128, 192, 256],
        heads_k=[1, 4],
    ),
    Case(dtype="bfloat16", head_dim=64, dropout_p=0.3, return_probs=True),
    Case(dtype="bfloat16", head_dim=64, varlen="qk", causal=True, dropout_p=0.2, sink=True),
    Case(dtype="bfloat16", head_dim=128, varlen="qk", seqlen_q=200, seqlen_k=300, used="qk"),
    Case(dtype="bfloat16", head_dim=64, varlen="q", page_size=16, causal=True),
    Case(dtype="bfloat16", head_dim=128, causal=True, dropout_p=0.1, bias="hqk", sink=True),
    Case(dtype="float8_e4m3fn", head_dim=128, seqlen_q=256, seqlen_k=256, backward=False),
    Case(dtype="float8_e4m3fn", head_dim=128, causal=True, varlen="qk", backward=False),
]


def _supports_jax() -> bool:
    return any(d.platform == "gpu" for d in jax.devices())


@pytest.mark.skipif(not _supports_jax(), reason="JAX sees no GPU")
@pytest.mark.parametrize("case", twins(CALLS, "float16", "float32"), ids=str)
def test_a_call_gives_the_bits_of_the_pytorch_path(case):
    built = build(case, "cuda")
    want, got = api.results(built), jax_api.results(built)
    check(built, got, "cuda")
    for name, array in want.present().items():
        np.testing.assert_array_equal(getattr(got, name), array, err_msg=name)


CACHES = [
    *variants(
        Case(dtype="bfloat16", head_dim=64, heads_q=4, used="k", backward=False, causal=True),
        seqlen_q=[1],
        page_size=[1, 16],
        kv_batch_idx=[True],
        leftpad_k=[True],
        num_splits=[4],
    ),
    Case(dtype="bfloat16", tree_mask=True, used="k", seqlen_q=6, lens_k=(50, 6), backward=False),
    Case(
        dtype="bfloat16",
        kv_dtype="int8",
        kv_group=16,
        kv_shift=True,
        backward=False,
        heads_q=4,
        head_dim=64,
        seqlen_q=1,
        used="k",
    ),
    Case(dtype="bfloat16", kv_dtype="float8_e4m3fn", backward=False, heads_q=4, used="k"),
]


@pytest.mark.skipif(not _supports_jax(), reason="JAX sees no GPU")
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_a_call_over_a_cache_gives_the_bits_of_the_pytorch_path(case):
    built = build(case, "cuda")
    want, got = api.results(built), jax_api.results(built)
    check(built, got, "cuda")
    for name, array in want.present().items():
        np.testing.assert_array_equal(getattr(got, name), array, err_msg=name)
