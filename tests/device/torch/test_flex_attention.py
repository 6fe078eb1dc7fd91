"""attention-gym's masks on a GPU: `flex_attention` by the Hopper kernels beside torch's, both
against float64."""

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import scaled_dot_product_attention

from heedful.reference.budget import DRAWS, Error, over_budget, unsound
from heedful.reference.convert import as_numpy
from heedful.torch import flex_attention
from support.hopper.device import ON_HOPPER
from support.problems.gym_masks import GymMask, gym_masks

pytestmark = ON_HOPPER

LENGTH, WIDTH = 700, 28
NAMES = [str(mask) for mask in gym_masks(LENGTH, WIDTH)]


def with_gradients(attend, inputs, dout) -> dict[str, torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def compared(mask: GymMask, head_dim: int, draw: int) -> str:
    """What is wrong with ours, by the error of torch's, which may be half as large."""
    values = torch.Generator("cuda").manual_seed(draw)
    shape = (4, 2, 2, LENGTH, head_dim)
    made = torch.randn(shape, device="cuda", generator=values).bfloat16()
    *inputs, dout = made.unbind(0)
    given = torchs.create_block_mask(mask.shows, 2, 2, LENGTH, LENGTH, device="cuda")
    dense = torchs.create_mask(mask.shows, 2, 2, LENGTH, LENGTH, device="cuda")
    # Rows without keys are 0, as ours are: torch's softmax would make them NaN.
    seen = dense.any(-1, keepdim=True)
    exact = with_gradients(
        lambda *x: scaled_dot_product_attention(*x, attn_mask=dense | ~seen) * seen,
        [x.double() for x in inputs],
        dout,
    )
    torch_s = with_gradients(
        lambda *x: torchs.flex_attention(*x, block_mask=given), inputs, dout * seen
    )
    ours = with_gradients(lambda *x: flex_attention(*x, block_mask=given), inputs, dout)
    for name, want in exact.items():
        got, want, theirs = map(as_numpy, (ours[name], want, torch_s[name]))
        wrong = unsound(name, got, want)
        if wrong:
            return wrong
        wrong = over_budget(name, got, want, Error.between(theirs, want), "bfloat16")
        if wrong:
            return wrong
    return ""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_masks_of_attention_gym_err_as_torchs_flex_attention_does(name, head_dim):
    """At most twice as much as its own unfused code, gradients three times. As everywhere, an
    unlucky draw of values is drawn again: an error is wrong in all."""
    mask = next(m for m in gym_masks(LENGTH, WIDTH, "cuda") if m.name == name)
    wrong = ""
    for draw in range(DRAWS):
        wrong = compared(mask, head_dim, draw)
        if not wrong:
            return
    raise AssertionError(wrong)
