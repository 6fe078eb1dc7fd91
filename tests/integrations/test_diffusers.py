"""`heedful.integrations.diffusers`: tiny models of diffusers with heedful beside the same models
with torch's own attention. Skipped where diffusers is not installed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="needs diffusers, which is not installed")

import diffusers
from diffusers.models import attention_dispatch as dispatch

from heedful.integrations import diffusers as plug_in

MOST_APART = 2e-5
# Its names are found on first use, which type checkers do not see.
models: Any = diffusers


@pytest.fixture(autouse=True)
def registered():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plug_in.register()
    yield
    torch.set_num_threads(threads)
    if plug_in.is_registered():
        plug_in.unregister()
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)  # pyright: ignore


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flux() -> tuple[Any, dict]:
    model = models.FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": drawn(2, 12, 8),
        "encoder_hidden_states": drawn(2, 6, 32, seed=1),
        "pooled_projections": drawn(2, 16, seed=2),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": torch.randint(0, 5, (12, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
    }


def wan() -> tuple[Any, dict]:
    model = models.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": drawn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": drawn(1, 7, 16, seed=1),
    }


def sd3() -> tuple[Any, dict]:
    model = models.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
    )
    return model, {
        "hidden_states": drawn(2, 4, 16, 16),
        "encoder_hidden_states": drawn(2, 6, 32, seed=1),
        "pooled_projections": drawn(2, 16, seed=2),
        "timestep": torch.tensor([3, 3]),
    }


def qwenimage() -> tuple[Any, dict]:
    model = models.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return model, {
        "hidden_states": drawn(2, 16, 16),
        "encoder_hidden_states": drawn(2, 7, 32, seed=1),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


def unet() -> tuple[Any, dict]:
    model = models.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=2,
    )
    return model, {
        "sample": drawn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 3]),
        "encoder_hidden_states": drawn(2, 6, 16, seed=1),
    }


FAMILIES: dict[str, Callable[[], tuple[Any, dict]]] = {
    each.__name__: each for each in (flux, wan, sd3, qwenimage, unet)
}
# Its processors call torch's attention themselves.
NOT_DISPATCHED = {"unet", "sd3"}


def outputs(model: Any, backend: str, given: dict) -> torch.Tensor:
    model.set_attention_backend(backend)
    return model(**given).sample


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """The shapes of the calls that reach heedful."""
    found: list[tuple] = []
    original = plug_in.flash_attn_func

    def watched(q, k, *args, **kwargs):
        found.append((tuple(q.shape), tuple(k.shape)))
        return original(q, k, *args, **kwargs)

    monkeypatch.setattr(plug_in, "flash_attn_func", watched)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_equals_itself_with_torchs_attention(family, calls):
    torch.manual_seed(0)
    model, given = FAMILIES[family]()
    found = []
    for backend in ("native", "heedful"):
        model.zero_grad()
        out = outputs(model.eval(), backend, given)
        out.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append((out.detach(), gradients))
    assert float((found[0][0] - found[1][0]).abs().max()) <= MOST_APART
    floor = 1e-3 * max(float(g.abs().max()) for g in found[0][1])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert float((one - other).abs().max()) <= 5e-4 * (float(one.abs().max()) + floor)
    assert bool(calls) == (family not in NOT_DISPATCHED)


def test_a_scope_runs_heedful_and_gives_torchs_back(calls):
    q = drawn(1, 5, 2, 8)
    with dispatch.attention_backend("heedful"):
        inside = dispatch.dispatch_attention_fn(q, q, q)
    assert len(calls) == 1
    torch.testing.assert_close(inside, dispatch.dispatch_attention_fn(q, q, q))
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 7), (5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (2, 1, 1, 7)])
def test_masks_equal_torchs(kind, shape):
    q, k = drawn(2, 5, 4, 8), drawn(2, 7, 4, 8, seed=1)
    mask = drawn(*shape, seed=2)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True
    name = dispatch.AttentionBackendName
    both = [
        dispatch.dispatch_attention_fn(q, k, k, attn_mask=mask, scale=0.3, backend=each)
        for each in (name.NATIVE, name("heedful"))
    ]
    torch.testing.assert_close(*both)


def test_the_log_sum_exp_lies_as_diffusers_wants_it():
    q = drawn(2, 5, 4, 8)
    _, lse = plug_in.attention(q, q, q, return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, q) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_heads_are_shared_where_that_is_allowed():
    q, k = drawn(2, 5, 4, 8), drawn(2, 5, 2, 8, seed=1)
    found = plug_in.attention(q, k, k, is_causal=True, enable_gqa=True)
    shared = k.repeat_interleave(2, 2)
    torch.testing.assert_close(found, plug_in.attention(q, shared, shared, is_causal=True))
    with pytest.raises(ValueError, match="key must have query's 4 heads without enable_gqa, got 2"):
        plug_in.attention(q, k, k)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"_parallel_config": object()}, "context parallelism"),
        ({"is_causal": True}, "is_causal wants as many queries as keys"),
    ],
)
def test_what_is_not_served_is_refused_by_name(more, words):
    q, k = drawn(2, 5, 4, 8), drawn(2, 7, 4, 8)
    with pytest.raises(ValueError, match=words):
        plug_in.attention(q, k, k, **more)


def names() -> set[str]:
    return {each.value for each in dispatch.AttentionBackendName.__members__.values()}


def test_registering_twice_is_once_and_unregistering_leaves_nothing():
    plug_in.unregister()
    before, tables = names(), len(dispatch._AttentionBackendRegistry._backends)
    plug_in.register("ours")
    plug_in.register("ours")
    assert names() - before == {"ours"} and plug_in.is_registered()
    assert dispatch.AttentionBackendName("ours") in list(dispatch.AttentionBackendName)
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName("ours"))  # pyright: ignore
    plug_in.unregister()
    assert names() == before and not plug_in.is_registered()
    assert len(dispatch._AttentionBackendRegistry._backends) == tables
    active, _ = dispatch._AttentionBackendRegistry.get_active_backend()
    assert active == dispatch.AttentionBackendName.NATIVE


@pytest.mark.parametrize("name", ["native", "flash", "Ours", "a b", "", None])
def test_a_name_that_means_something_else_is_refused(name):
    before = names()
    with pytest.raises(ValueError, match="name must be"):
        plug_in.register(name)
    assert names() == before


@pytest.mark.slow
def test_a_compiled_model_equals_itself():
    torch.manual_seed(0)
    model, given = flux()
    with torch.no_grad():
        wanted = outputs(model.eval(), "native", given)
        model.set_attention_backend("heedful")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert float((compiled(**given).sample - wanted).abs().max()) <= MOST_APART
