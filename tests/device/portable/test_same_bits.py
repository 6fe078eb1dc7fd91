"""With numerics="invariant" a row has the same bits, whichever way a call computes it."""

import pytest
import torch

import heedful.torch as heedful
from heedful import configure
from heedful.core.registry.tiles import PART_KEYS
from support.problems import ways

pytestmark = pytest.mark.gpu

KINDS = (
    ((64, 64), torch.bfloat16),
    ((96, 96), torch.bfloat16),
    ((128, 128), torch.bfloat16),
    ((128, 128), torch.float16),
    ((192, 128), torch.bfloat16),
    ((256, 256), torch.bfloat16),
)
# A tile's keys, and a part's.
BORDERS = (128, PART_KEYS)
DRAWN = {"longest": 2 * PART_KEYS + 200, "borders": BORDERS, "device": "cuda"}
ALIGNED = {"names": ways.ALIGNED, "pages": (16, 64, 256)}


@pytest.mark.parametrize("options", ways.OPTIONS)
@pytest.mark.parametrize("head_dims, dtype", KINDS, ids=str)
def test_two_ways_give_the_same_bits_by_the_portable_kernels(head_dims, dtype, options):
    kind = {"head_dims": head_dims, "dtype": dtype, "options": options, **DRAWN}
    configure(backend="portable")
    try:
        assert not ways.differing(range(24), "invariant", **kind)
    finally:
        configure(backend=None)


@pytest.mark.parametrize("options", ["causal", "window", "softcap", "sink"])
@pytest.mark.parametrize("head_dims, dtype", KINDS, ids=str)
def test_two_ways_give_the_same_bits_by_the_hopper_forward(head_dims, dtype, options):
    kind = {"head_dims": head_dims, "dtype": dtype, "options": options, **DRAWN}
    configure(backend="hopper")
    try:
        assert not ways.differing(range(24), "invariant", **ALIGNED, **kind)
    finally:
        configure(backend=None)


def test_fast_calls_differ_in_many_pairs():
    """So that the pairs above are those whose bits depend on the way."""
    kind = {"head_dims": (128, 128), "dtype": torch.bfloat16, "options": "causal"}
    assert len(ways.differing(range(60), "fast", **kind, **ALIGNED, **DRAWN)) >= 18


def gradients(call, own: list[torch.Tensor], before: int, after: int) -> list[torch.Tensor]:
    """Those of q, k and v of a sequence, with other rows around it. own: q, k, v and dout."""
    length, around = own[0].shape[0], []
    for t in own:
        others = [torch.randn(n, *t.shape[1:], device="cuda").to(t.dtype) for n in (before, after)]
        around.append(torch.cat([others[0], t, others[1]]))
    *x, dout = around
    x = [t.requires_grad_() for t in x]
    call(*x).backward(dout)
    return [t.grad[before : before + length] for t in x]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length, heads, heads_k", [(300, 2, 2), (1111, 4, 2), (4500, 2, 1)])
@pytest.mark.parametrize("head_dims, dtype", KINDS, ids=str)
def test_deterministic_gradients_are_the_same_bits_dense_and_packed_in_any_batch(
    head_dims, dtype, length, heads, heads_k, causal
):
    torch.manual_seed(0)
    options = {"causal": causal, "deterministic": True, "numerics": "invariant"}
    dim, dim_v = head_dims
    sizes = (heads, dim), (heads_k, dim), (heads_k, dim_v), (heads, dim_v)
    own = [torch.randn(length, *size, device="cuda", dtype=dtype) for size in sizes]

    def dense(*x):
        batch = [t.view(-1, length, *t.shape[1:]) for t in x]
        return heedful.flash_attn_func(*batch, **options).flatten(0, 1)

    def packed(q, k, v):
        ends = torch.tensor([0, 77, 77 + length, 577 + length], device="cuda", dtype=torch.int32)
        longest = max(500, length)
        return heedful.flash_attn_varlen_func(q, k, v, ends, ends, longest + 5, longest, **options)

    alone = gradients(dense, own, 0, 0)
    for call, before, after in ((dense, length, length), (packed, 77, 500)):
        among = gradients(call, own, before, after)
        assert all(torch.equal(a, b) for a, b in zip(alone, among, strict=True)), call
