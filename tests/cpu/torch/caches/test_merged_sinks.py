"""A sink in a merge is one more part, whose output is 0, however far its logit is from the parts'
log-sum-exps."""

import pytest
import torch

import heedful.torch as heedful
from support.problems.merges import Parts, largest_share, parts_near

SHAPES = ((2, 3, 37, 2, 8), (5, 60, 2, 8))
# Beside log-sum-exps of a few: e to the largest is no float32.
LOGITS = (-1e4, -200.0, 0.0, 3.0, 200.0, 1e4)


def with_sink(shape: tuple[int, ...], logit: float) -> tuple[Parts, torch.Tensor, Parts]:
    """Parts, the sink of each head, and the parts with one more that the sink is."""
    parts = parts_near(0.0, shape)
    sink = logit + torch.arange(shape[-2], dtype=torch.float32)
    one_more = sink.double()[:, None].expand(parts.exact.shape[1:])
    whole = Parts(
        torch.cat([parts.outs, torch.zeros_like(parts.outs[:1])]),
        torch.cat([parts.exact, one_more[None]]),
    )
    return parts, sink, whole


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("logit", LOGITS)
def test_a_sink_is_one_more_part_whose_output_is_0(logit, shape):
    parts, sink, whole = with_sink(shape, logit)
    largest_share(whole, *heedful.merge_attn_states(parts.outs, parts.lses, sink))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("logit", LOGITS)
def test_a_sink_is_one_more_part_in_jax_too(logit, shape):
    jnp = pytest.importorskip("jax.numpy")
    from heedful.jax import merge_attn_states

    parts, sink, whole = with_sink(shape, logit)
    given = (jnp.asarray(x.numpy()) for x in (parts.outs, parts.lses, sink))
    out, lse = (torch.tensor(x.__array__()) for x in merge_attn_states(*given))
    largest_share(whole, out, lse)
