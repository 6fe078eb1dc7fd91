"""A GPU whose process dies ends the others' by the group's time-out."""

import os
import time
from importlib import import_module

import pytest
import torch

from heedful.distributed import attention, plan
from support.runs.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SECONDS = 5.0


def dies(rank: int, count: int, transport: str, when: str) -> str:
    """What the others meet when the last rank ends in the first step, or in its backward."""
    made = plan(
        lengths=[512 * count],
        heads_q=4,
        heads_k=2,
        head_dim=64,
        strategy="gather",
        transport=transport,
    )
    q, k, v = (
        torch.randn((made.tokens, heads, 64), device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    )
    if rank == count - 1:
        name = {"step": "attended", "backward": "differentiated"}[when]
        setattr(import_module("heedful.distributed.gather"), name, lambda *a, **k: os._exit(1))
    try:
        attention(q, k, v, made, causal=True).sum().backward()
        torch.cuda.synchronize()
        # Another, as a rank may have got all that it wanted.
        attention(q, k, v, made, causal=True).sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Kernels that a step needs are in the cache: one rank waits no longer than the time-out for
    another that compiles."""
    made = Ranks(torch.cuda.device_count(), tmp_path_factory.mktemp("warm"), 120.0, "nccl")
    try:
        made.run(warmed)
    finally:
        made.close()


# NCCL's watchdog ends a process four times as long after the time-out, so that others write what
# they know, and a quarter of a minute is the default.
SOON = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}


@pytest.mark.parametrize("when", ["step", "backward"])
@pytest.mark.parametrize("transport", ["send", "copy"])
def test_the_others_end_by_the_time_out(tmp_path, transport, when):
    made = Ranks(torch.cuda.device_count(), tmp_path, SECONDS, "nccl", SOON)
    try:
        made.run(warmed)
        start = time.monotonic()
        *others, (ended, _) = made.outcomes(dies, transport, when)
        assert ended == "ended"
        # NCCL's watchdog ends the process where a kernel of its waits; else an error is raised.
        assert all(said == "ended" or answer for said, answer in others)
        assert time.monotonic() - start < SECONDS + 20
    finally:
        made.close()


def warmed(rank: int, count: int) -> None:
    """Compiles what a step needs."""
    made = plan(lengths=[512 * count], heads_q=4, heads_k=2, head_dim=64, strategy="gather")
    shapes = [(made.tokens, heads, 64) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    attention(q.requires_grad_(), k, v, made, causal=True).sum().backward()
    torch.cuda.synchronize()
