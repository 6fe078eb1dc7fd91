"""What a step and a layer cost beside their kernels: counted, not timed."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heedful import flash_attn_func
from heedful.integrations.transformers import attention as calls
from heedful.integrations.transformers import compact, paths, reset_paths
from heedful.integrations.transformers.masks import mask
from support.integrations.counts import known
from support.runs import standin

BATCH, ROOM, HEADS, HEADS_K, DIM = 3, 64, 4, 2, 64
# Of these no kernel is launched on a GPU.
FREE = {"view", "slice", "expand", "unbind", "select", "unsqueeze", "alias", "lift_fresh", "detach"}


class Launches(TorchDispatchMode):
    """The operators that launch something, or copy from or to the host."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def step(padded: bool, is_static: bool, used: int = 40) -> dict[str, Any]:
    """The arguments of the mask of one new token of each row."""
    length = ROOM if is_static else used
    counts = torch.zeros(BATCH, length, dtype=torch.bool)
    counts[:, :used] = True
    if padded:
        counts[0, :7] = False
    begin: Any = torch.tensor([used - 1]) if is_static else used - 1
    shape = {"batch_size": BATCH, "q_length": 1, "kv_length": length}
    return {**shape, "q_offset": begin, "attention_mask": counts}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_the_mask_of_a_step_takes_few_launches(padded, is_static):
    """Beside a copy to the host, and one from there."""
    given = step(padded, is_static)
    with torch.no_grad(), Launches() as seen:
        made = mask(**given)
    assert (made is None) == (not padded and not is_static)
    # A static cache says on the device where the queries begin.
    assert seen.names == ["sub"] * is_static + ["sum", "argmax", "flip", "argmax", "cat"]


@pytest.mark.parametrize("q_length", [1, 9])
def test_lengths_begin_where_calls_are_known_the_fastest(q_length):
    counts = torch.ones(BATCH, ROOM, dtype=torch.bool)
    counts[1, :11] = False
    made = mask(BATCH, q_length, ROOM, q_offset=ROOM - q_length, attention_mask=counts)
    assert made is not None
    found = [x for x in compact.read(made, BATCH, q_length, ROOM) if isinstance(x, Tensor)]
    assert len(found) == 8 and all(x.data_ptr() % 16 == 0 for x in found)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_layer_of_a_known_step_does_what_our_own_call_does(padded):
    """Over a static cache, whose rows lie heads before rows."""
    q = torch.randn(BATCH, 1, HEADS, DIM).half().transpose(1, 2)
    k, v = (torch.randn(BATCH, HEADS_K, ROOM, DIM).half() for _ in "kv")
    q_own, k_own, v_own = (x.transpose(1, 2) for x in (q, k, v))
    used = torch.full((BATCH,), 40, dtype=torch.int32)
    with standin.gpu("H200") as gpu, torch.no_grad():
        made, module = mask(**step(padded, True)), torch.nn.Module()
        reset_paths()
        own = known(lambda: flash_attn_func(q_own, k_own, v_own, causal=True, seqused_k=used))
        one = len(gpu.launches) // 5
        begin = len(gpu.launches)
        got = known(lambda: calls.attention(module, q, k, v, made))
        assert paths() == {"compact, cache call": 5}
        assert len(gpu.launches) - begin == 5 * one
    assert got["views"] == 3 and got["copies"] == 0 and got["made"] == own["made"]
    # attention, is_compact, read, _compact, window, _row_lengths, count
    assert got["functions"] <= own["functions"] + 7 + 5 * (not padded)


def sides(begins: list[int], ends: list[int]) -> Tensor:
    counts = torch.zeros(len(begins), ROOM, dtype=torch.bool)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        counts[row, begin:end] = True
    return counts


PADDINGS = {
    "left": sides([0, 5, 33], [ROOM] * 3),
    "both": sides([3, 0, 60], [60, 1, 64]),
    "a row without a token": sides([0, 7, 0], [ROOM, ROOM, 0]),
}


@pytest.mark.parametrize("counts", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("window", [None, 9])
def test_a_padded_layer_learns_as_with_a_mask_of_queries_and_keys(counts, window):
    heads: Any = {"attention_mask": counts, "local_size": window}
    if window is not None:
        from transformers.masking_utils import sliding_window_causal_mask_function

        heads["mask_function"] = sliding_window_causal_mask_function(window)
    made = mask(BATCH, ROOM, ROOM, **heads)
    assert made is not None
    shapes = (HEADS, HEADS_K, HEADS_K)
    q, k, v = qkv = [torch.randn(BATCH, n, ROOM, 16, requires_grad=True) for n in shapes]
    module = torch.nn.Module()
    reset_paths()
    out, _ = calls.attention(module, q, k, v, made, sliding_window=window)
    assert paths() == {"compact, packed call": 1}
    sees = compact.dense(compact.read(made, BATCH, ROOM, ROOM), BATCH, ROOM, ROOM)
    want, _ = calls.attention(module, q, k, v, sees, sliding_window=window)
    dout = torch.randn_like(out)
    for got, exact in zip(
        (out, *torch.autograd.grad(out, qkv, dout)),
        (want, *torch.autograd.grad(want, qkv, dout)),
        strict=True,
    ):
        torch.testing.assert_close(got, exact)


def test_a_padded_layer_learns_by_hoppers_own_backward():
    """It takes no lengths of what is used of the storage; the portable one takes four times as
    long."""
    made = mask(BATCH, ROOM, ROOM, attention_mask=PADDINGS["left"])
    with standin.gpu("H200") as gpu:
        qkv = [torch.randn(BATCH, ROOM, n, DIM).half().requires_grad_() for n in (4, 2, 2)]
        q, k, v = (x.transpose(1, 2) for x in qkv)
        out, _ = calls.attention(torch.nn.Module(), q, k, v, made)
        torch.autograd.grad(out, qkv, torch.randn_like(out))
        modules = {launch.kernel.module for launch in gpu.launches}
    assert "heedful.kernels.hopper.backward.kernel" in modules
    assert not [module for module in modules if ".portable.backward" in module]
