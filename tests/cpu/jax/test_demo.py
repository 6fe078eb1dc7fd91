"""The demo's model in JAX is the PyTorch one: the same weights, the same loss and gradients."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

from heedful.demo import attention, in_jax, text  # noqa: E402
from heedful.demo.model import GPT, ModelSize  # noqa: E402

SIZE = (2, 2, 8, 40)


def both(context: int = 40):
    """(loss, gradients by name) of either framework, from the same weights and text."""
    torch.manual_seed(0)
    loaded = text.load()
    model = GPT(ModelSize(*SIZE), len(loaded.vocabulary))
    tokens, follow = text.batch(loaded.train, 2, context, torch.Generator().manual_seed(0))
    loss = model.losses(tokens, follow, attention.with_heedful("cpu")).mean()
    loss.backward()
    theirs = {name: w.grad.numpy() for name, w in model.named_parameters() if w.grad is not None}
    weights = {name: jnp.asarray(w.detach().numpy()) for name, w in model.named_parameters()}
    given = [jnp.asarray(t.numpy().astype(np.int32)) for t in (tokens, follow)]

    def mean(weights):
        return in_jax.losses(weights, in_jax.Size(*SIZE), *given).mean()

    ours = jax.jit(jax.value_and_grad(mean))(weights)
    return (float(loss), theirs), ours


def test_loss_and_gradients_are_those_of_the_pytorch_model():
    """Within float32's rounding of sums over the model's widest dim, layer upon layer."""
    (loss, theirs), (value, ours) = both()
    eps = float(np.finfo(np.float32).eps)
    assert abs(float(value) - loss) <= 64 * eps * loss
    assert theirs.keys() == ours.keys()
    for name, want in theirs.items():
        assert np.abs(ours[name] - want).max() <= 512 * eps * np.abs(want).max(), name


def test_training_lowers_the_loss(capsys):
    assert in_jax.main(steps=12, batch=2, size=in_jax.Size(1, 2, 8, 32)) < 4.6
    assert "held out" in capsys.readouterr().out
