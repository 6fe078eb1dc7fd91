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
ALIGNED = {"names": tuple(ways.HOPPER_WAYS), "pages": (16, 64, 256)}


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
    """By default, too."""
    kind = {"head_dims": head_dims, "dtype": dtype, "options": options, **DRAWN}
    assert not ways.differing(range(24), "invariant", **ALIGNED, **kind)


def rotated(x, cos, sin, interleaved: bool):
    """x (batch, tokens, heads, columns) rotated by plain operators: each product and sum is
    rounded to float32, the result to the dtype of x."""
    c, s, wide = cos[:, None].float(), sin[:, None].float(), x.float()
    half = cos.shape[-1]
    parts = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.split(half, -1)
    turned = parts[0] * c - parts[1] * s, parts[1] * c + parts[0] * s
    made = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return made.to(x.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("held, tokens", [(0, 300), (777, 1), (8190, 5)])
def test_rotary_positions_in_a_step_that_appends_are_those_of_plain_operators(
    held, tokens, interleaved
):
    torch.manual_seed(held)
    angles = torch.arange(held + tokens, device="cuda")[:, None] * torch.rand(64, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    q, k, v = (torch.randn(2, tokens, n, 128, device="cuda").bfloat16() for n in (4, 2, 2))
    caches = torch.randn(2, 2, held + tokens, 2, 128, device="cuda").bfloat16()
    lengths = torch.full((2,), held, dtype=torch.int32, device="cuda")
    usual = {"causal": True, "return_softmax_lse": True, "numerics": "invariant"}
    tables = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    places = slice(held, held + tokens)
    made = []
    for turn, more in ((False, tables), (True, {})):
        new = [rotated(t, cos[places], sin[places], interleaved) if turn else t for t in (q, k)]
        own = caches.clone()
        step = {"k": new[1], "v": v, "cache_seqlens": lengths, **usual, **more}
        made.append((*heedful.flash_attn_with_kvcache(new[0], own[0], own[1], **step), own))
    assert ways.same_bits(*made)


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
