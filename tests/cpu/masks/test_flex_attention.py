"""attention-gym's masks by their definitions, through torch's BlockMask and flex_attention, against
torch's FlexAttention."""

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import scaled_dot_product_attention

from heedful import BlockMask
from heedful.torch import flex_attention
from support.problems.grids import in_turns
from support.problems.gym_masks import gym_masks

LENGTH, WIDTH = 300, 18  # of sequences, and of NATTEN's images
MASKS = gym_masks(LENGTH, WIDTH)
CAUSAL = MASKS[0].shows


def inputs(heads_k: int = 2) -> tuple:
    torch.manual_seed(0)
    shapes = ((2, 2, LENGTH, 16), (2, heads_k, LENGTH, 16), (2, heads_k, LENGTH, 8))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("mask", in_turns(MASKS, each=2), ids=str)
def test_masks_agree_with_torchs_flex_attention_and_so_do_their_gradients(mask):
    given = torchs.create_block_mask(mask.shows, 2, 2, LENGTH, LENGTH, device="cpu")
    q, k, v = inputs()
    aux = torchs.AuxRequest(lse=True)
    plain = (t.detach() for t in (q, k, v))
    want, of_torch = torchs.flex_attention(*plain, block_mask=given, return_aux=aux)
    got, ours = flex_attention(q, k, v, block_mask=given, return_aux=aux)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours.lse, of_torch.lse)
    # On a CPU torch's has no gradients.
    dense = torchs.create_mask(mask.shows, 2, 2, LENGTH, LENGTH, device="cpu")
    want = scaled_dot_product_attention(q, k, v, attn_mask=dense)
    rows = dense.any(-1).all(0).all(0)
    grads = (
        torch.autograd.grad(out[..., rows, :].square().sum(), (q, k, v)) for out in (got, want)
    )
    torch.testing.assert_close(*grads)


def test_a_backend_is_chosen_by_the_options_of_kernels():
    q, k, v = inputs()
    options = {"BACKEND": "cpu"}
    assert torch.equal(flex_attention(q, k, v, kernel_options=options), flex_attention(q, k, v))
    assert options == {"BACKEND": "cpu"}
    with pytest.raises(ValueError, match="^backend must be .* got 'none'"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "none"})


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("size", [32, (64, 128), 256])
def test_a_block_mask_of_torch_is_its_function(mask, size):
    shows = mask.shows
    given = torchs.create_block_mask(shows, 2, 2, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=size)
    made = BlockMask.of(given)
    want = torchs.create_mask(shows, 2, 2, LENGTH, LENGTH, device="cpu")
    assert torch.equal(made.to_dense(), want)
    sizes = {"seqlen_q": LENGTH, "seqlen_k": LENGTH, "batch": 2, "heads": 2}
    own = BlockMask.of(shows, **sizes, like=want, side=made.side)
    assert torch.equal(own.to_dense(), want)
    assert torch.equal(own.rows, made.rows) and torch.equal(own.keys, made.keys)


@pytest.mark.parametrize(("name", "value"), [("side", 32), ("heads", 2), ("seqlen_q", 7)])
def test_sizes_of_a_block_mask_of_torch_are_its_own(name, value):
    given = torchs.create_block_mask(MASKS[0].shows, 1, 1, LENGTH, LENGTH, device="cpu")
    with pytest.raises(ValueError, match=f"^{name} must be .* got {value}"):
        BlockMask.of(given, **{name: value})


def test_the_mask_mod_is_asked_about_tiles_in_part_alone():
    asked = []

    def mask(b, h, i, j):
        asked.append(1)
        return i >= j

    lists = torch.tensor([[[1, 1, 1]]]), torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]])
    none = torch.zeros_like(lists[0]), torch.zeros_like(lists[1])
    for count, given in ((0, (*none, *lists)), (1, (*lists, *none))):
        asked.clear()
        made = torchs.BlockMask.from_kv_blocks(
            *(part.int() for part in given), BLOCK_SIZE=128, mask_mod=mask
        )
        shown = BlockMask.of(made).to_dense()
        assert len(asked) == count
        i = torch.arange(384)
        same = i[:, None] // 128 == i // 128
        assert torch.equal(shown[0, 0], same & (i[:, None] >= i) if count else same)


def test_fewer_heads_of_keys_and_no_mask_are_taken():
    q, k, v = (t.detach() for t in inputs(1))
    want = torchs.flex_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(flex_attention(q, k, v, enable_gqa=True), want)


BAD = [
    ({"score_mod": lambda s, b, h, i, j: s}, "score_mod.*softcap.*alibi_slopes.*bias"),
    ({"kernel_options": {"BLOCK_M": 64}}, "kernel_options.*'BLOCK_M'"),
    ({"return_aux": True}, "return_aux.*AuxRequest.*True"),
    ({"block_mask": torch.ones(1, 1, LENGTH, LENGTH).bool()}, "block_mask.*BlockMask.of"),
]


@pytest.mark.parametrize("given, words", BAD, ids=[next(iter(given)) for given, _ in BAD])
def test_what_it_does_not_take_is_refused_by_name(given, words):
    with pytest.raises((TypeError, ValueError), match=words):
        flex_attention(*inputs(), **given)


def test_fewer_heads_of_keys_are_asked_for():
    with pytest.raises(ValueError, match="enable_gqa must be True"):
        flex_attention(*inputs(1))


def test_compiled_code_takes_our_mask_and_refuses_torchs():
    given = torchs.create_block_mask(CAUSAL, None, None, LENGTH, LENGTH, device="cpu")
    q, k, v = (t.detach() for t in inputs())
    run = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    want = flex_attention(q, k, v, block_mask=given)
    torch.testing.assert_close(run(q, k, v, block_mask=BlockMask.of(given)), want)
    with pytest.raises(Exception, match="where the call is traced"):
        run(q, k, v, block_mask=given)


@pytest.mark.parametrize("lengths", [(60, 200), (200, 60)], ids=str)
def test_torchs_mask_may_have_other_lengths_of_queries_than_of_keys(lengths):
    given = torchs.create_block_mask(
        lambda b, h, i, j: j - i < 50, None, None, *lengths, device="cpu", BLOCK_SIZE=64
    )
    rows, columns = (torch.arange(length) for length in lengths)
    seen = BlockMask.of(given).to_dense()[0, 0]
    assert torch.equal(seen, columns - rows[:, None] < 50)


def test_tiles_of_torchs_that_no_tile_of_ours_divides_are_refused():
    for size in (48, (64, 40)):
        sizes = size if isinstance(size, tuple) else (size, size)
        given = torchs.create_block_mask(CAUSAL, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=size)
        words = rf"mask must have a BLOCK_SIZE of multiples of 32, got \({sizes[0]}, {sizes[1]}\)"
        with pytest.raises(ValueError, match=words):
            BlockMask.of(given)
    given = torchs.create_block_mask(CAUSAL, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=64)
    assert BlockMask.of(given, side=64).side == 64
    for more, words in (
        ({"side": 32}, "side must be 64, that of torch's mask, got 32"),
        ({"capacity": 3}, "capacity must be None with a BlockMask of torch, got 3"),
        ({"seqlen_q": 96}, "seqlen_q must be None with a BlockMask of torch, got 96"),
        ({"heads": 2}, "heads must be 1 with a BlockMask of torch, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^{words}$"):
            BlockMask.of(given, **more)
