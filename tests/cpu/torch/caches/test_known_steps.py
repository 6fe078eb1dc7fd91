"""A step over a cache that came before is one guard and one program: it makes no key, no call, no
plan and no kernel, and no memory but its results and one region of scratch."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import heedful
from heedful.launch.program import bound
from heedful.torch.api import kvcache
from heedful.torch.eager import backends
from heedful.torch.eager.calls import CALLS
from support.runs import standin

B, PAGES, PAGE, H, G, D = 2, 4, 16, 4, 2, 64


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


TABLE = torch.arange(B * PAGES, dtype=torch.int32).view(B, -1)
LENGTHS = torch.tensor([20, 33], dtype=torch.int32)
TABLES = {name: some(PAGES * PAGE, D // 2) for name in ("rotary_cos", "rotary_sin")}
# What a step is given; the decode kernel appends, too.
KINDS = ("read", "append", "append and rotary")


def step(kind: str, **more: Any) -> Any:
    """On tensors of its own, which lie elsewhere each time."""
    given: dict[str, Any] = {"q": some(B, 1, H, D), "block_table": TABLE, "causal": True}
    given |= {name: some(B * PAGES, PAGE, G, D) for name in ("k_cache", "v_cache")}
    if kind != "read":
        given |= {name: some(B, 1, G, D) for name in "kv"}
    if kind == "append and rotary":
        given |= TABLES
    return heedful.flash_attn_with_kvcache(**{**given, "cache_seqlens": LENGTHS, **more})


def refuse(*_, **__):
    raise AssertionError("made again")


@pytest.fixture
def made(monkeypatch) -> list[tuple]:
    """Shapes of all memory that a stand-in makes."""
    shapes: list[tuple] = []
    poisoned = standin._poisoned

    def noted(shape, *more):
        make = poisoned(shape, *more)

        def made():
            shapes.append(tuple(shape))
            return make()

        return made

    monkeypatch.setattr(standin, "_poisoned", noted)
    return shapes


@pytest.mark.parametrize("into", [False, True], ids=["", "into out"])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_step_is_one_program(kind, lse, into, made, monkeypatch):
    runs, run = [], bound.BoundProgram.run

    def noted(self, addresses, stream):
        runs.append(self)
        run(self, addresses, stream)

    monkeypatch.setattr(bound.BoundProgram, "run", noted)
    with standin.gpu("H200") as gpu:
        for _ in range(3):
            step(kind, return_softmax_lse=lse, out=some(B, 1, H, D) if into else None)
        owners = {kvcache: "CacheCall tensor_keys _arrays _options _run", bound: "compile_call"}
        owners[backends] = "planned program"
        for owner, names in owners.items():
            for name in names.split():
                monkeypatch.setattr(owner, name, refuse)
        made.clear()
        runs.clear()
        before, out = len(gpu.launches), some(B, 1, H, D) if into else None
        result = step(kind, return_softmax_lse=lse, out=out)
        (launch,) = gpu.launches[before:]
    assert launch.kernel.function == "decode"
    results = result if lse else (result,)
    assert [tuple(x.shape) for x in results] == [(B, 1, H, D), (B, H, 1)][: 1 + lse]
    assert results[0].data_ptr() in launch.arguments.values()
    assert out is None or results[0] is out
    assert len(runs) == 1
    scratch, *others = sorted(made, key=len)
    assert len(scratch) == 1
    assert others == [(B, H, 1)] * lse + [(B, 1, H, D)] * (not into)


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_step_into_memory_that_it_reads_is_refused(kind):
    with standin.gpu("H200") as gpu:
        for _ in range(3):
            step(kind, out=some(B, 1, H, D))
        before, q = len(gpu.launches), some(B, 1, H, D)
        with pytest.raises(ValueError, match="out must have memory of its own"):
            step(kind, q=q, out=q.view(q.shape))
    assert len(gpu.launches) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_other_tensors_is_not_taken_for_a_known_one(kind):
    """Values, types and tensors that are there, strides and where addresses begin."""
    wide = some(B, 1, H, 2 * D)[..., :D]
    moved = some(B * H * D + 8)[1 : 1 + B * H * D].view(B, 1, H, D)
    shared = some(B * PAGES, PAGE, G, D)
    others: list[dict[str, Any]] = [{"q": wide}, {"q": moved}, {"softcap": 1.0}, {"softcap": 1}]
    others += [{"causal": False}, {"window_size": (9, 0)}, {"sink": torch.randn(H)}, {}]
    others += [{"cache_seqlens": 5}, {"out": some(B, 1, H, D)}, {"num_splits": 2}]
    if kind == "read":
        others += [{"k_cache": shared, "v_cache": shared}]

    def seen(changes: list[dict[str, Any]]) -> list[list]:
        with standin.gpu("H200") as gpu:
            found = []
            for change in changes:
                before = len(gpu.launches)
                step(kind, **change)
                new = gpu.launches[before:]
                found.append(
                    [(launch.kernel, launch.constants, _numbers(launch)) for launch in new]
                )
        return found

    alone = [seen([other])[0] for other in others]
    for _ in range(2):
        assert seen([{}, {}, {}, *others, *others])[3:] == alone * 2


def _numbers(launch: standin.Launch) -> dict[str, Any]:
    return {name: x for name, x in launch.arguments.items() if name not in launch.memory}


@pytest.mark.parametrize("kind", ["append", "append and rotary"])
@pytest.mark.parametrize("device", ["H200", "B200", "MI300X"])
def test_the_attention_of_a_long_step_is_that_of_a_call_by_itself(device, kind):
    """Packs and the cache have the kernels of one for the other, but for those that append."""
    CALLS.clear()
    with standin.gpu(device) as gpu:
        step(kind, q=some(B, 40, H, D))
        (call,) = CALLS.young.values()
        loaded = len(gpu.loads)
        assert loaded > 1
        call.attention.runner.bind()
        assert len(gpu.loads) == loaded
