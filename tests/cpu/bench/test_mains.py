"""The commands that print figures of a GPU: what they time, on which device, and what they say."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.attention import SDPBackend

from heedful.bench import lengths
from heedful.bench import training as bench
from heedful.core.planning.plan import plan
from heedful.demo import attention, training
from heedful.demo.training import Run
from heedful.torch.eager import backends

GPU = torch.device("cuda", 3)


@pytest.fixture
def current(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)


def test_new_lengths_are_beside_sdpa_of_the_least_length_on_the_current_device(
    current, monkeypatch, capsys
):
    made = []

    def maker(name: str):
        def make(length, device, grad=False):
            made.append((name, length, device, grad))
            return name

        return make

    for name in ("sdpa", "dense", "packed"):
        monkeypatch.setattr(lengths, name, maker(name))
    monkeypatch.setattr(lengths, "with_backward", lambda call: f"{call} with backward")

    def median_us(calls, device):
        assert calls == ["sdpa"] * 400 and device == GPU
        return 10.0

    def known_and_new(make, device):
        assert device == GPU
        return {
            "dense": (12.0, 15.0),
            "dense with backward": (40.0, 50.0),
            "packed": (20.0, 30.0),
            "packed with backward": (60.0, 90.0),
        }[make(700)]

    monkeypatch.setattr(lengths, "median_us", median_us)
    monkeypatch.setattr(lengths, "known_and_new", known_and_new)
    lengths.main()
    assert made == [
        ("sdpa", 512, GPU, False),
        ("dense", 700, GPU, False),
        ("dense", 700, GPU, True),
        ("packed", 700, GPU, False),
        ("packed", 700, GPU, True),
    ]
    assert capsys.readouterr().out.splitlines() == [
        "SDPA forward: 10.0 us",
        "dense forward: known 12.0 us (1.20 of SDPA's forward), new 15.0 us (1.50; 1.25 of known)",
        "dense forward and backward: known 40.0 us (4.00 of SDPA's forward),"
        " new 50.0 us (5.00; 1.25 of known)",
        "packed forward: known 20.0 us (2.00 of SDPA's forward), new 30.0 us (3.00; 1.50 of known)",
        "packed forward and backward: known 60.0 us (6.00 of SDPA's forward),"
        " new 90.0 us (9.00; 1.50 of known)",
    ]


def test_new_lengths_are_drawn_apart_from_those_that_show_which_cases_there_are(monkeypatch):
    timed = []
    monkeypatch.setattr(lengths, "median_us", lambda calls, device: timed.append(calls) or 1.0)
    itself: Any = int
    assert lengths.known_and_new(itself, GPU) == (1.0, 1.0)
    first, known, new = timed
    assert known == [512] * 400 and len(first) == len(new) == 400
    for drawn in (first, new):
        assert 512 <= min(drawn) < 600 and 1950 < max(drawn) < 2048
    assert len({512, *first, *new}) == 801


def test_calls_of_new_lengths_are_of_these_shapes(monkeypatch):
    asked = []
    for name in ("flash_attn_func", "flash_attn_varlen_func", "scaled_dot_product_attention"):
        monkeypatch.setattr(lengths, name, lambda *a, n=name, **k: asked.append((n, a, k)))
    cpu = torch.device("cpu")
    with torch.device("meta"):  # where what is not put on the device that is named is
        lengths.dense(600, cpu)()
        lengths.packed(600, cpu, grad=True)()
        lengths.sdpa(600, cpu)()
    (dense, (q, *_), causal), (packed, (p, *_, bounds, _, longest, most), _), (sdpa, (s, *_), _) = (
        asked
    )
    assert (dense, packed) == ("flash_attn_func", "flash_attn_varlen_func")
    assert sdpa == "scaled_dot_product_attention"
    assert {x.device for x in (q, p, s, bounds)} == {cpu}
    assert q.shape == (1, 600, 8, 64) and s.shape == (1, 8, 600, 64) and p.shape == (977, 8, 64)
    assert bounds.tolist() == [0, 600, 900, 977] and bounds.dtype == torch.int32
    assert longest == most == 600 and p.requires_grad and not q.requires_grad
    assert all(
        keywords == ({"is_causal": True} if n == sdpa else {"causal": True})
        for n, _, keywords in asked
    )
    assert causal == {"causal": True} and q.dtype == p.dtype == s.dtype == torch.bfloat16


def test_training_is_beside_two_kernels_of_sdpa_from_the_same_start(current, monkeypatch, capsys):
    """300 steps of a GPT of 12 layers, 8 heads of queries to 2 of keys, 8192 characters long."""
    monkeypatch.setattr(attention, "with_heedful", lambda backend: ("heedful", backend))
    monkeypatch.setattr(attention, "with_backend", lambda kernel: kernel)
    begun, done = [], []

    def start(recipe, vocabulary, attentions, controls, device):
        begun.append((attentions, controls, device))
        model: Any = torch.nn.Linear(1, 1)
        optimizer: Any = None
        runs = {name: Run(name, model, attend, optimizer) for name, attend in attentions.items()}
        for number, run in enumerate(runs.values()):
            run.seconds += [9.0] * 5 + [2.0 + number] * 295
            run.losses += [3.0] * 299 + [2.0 - number / 4]
        return runs

    def train(recipe, source, runs, device):
        assert device == GPU and source.vocabulary
        for _ in range(recipe.steps):
            done.append(recipe)
            yield len(done)

    monkeypatch.setattr(training, "start", start)
    monkeypatch.setattr(training, "train", train)
    bench.main()
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    assert begun == [({"heedful": ("heedful", None), **kernels}, {}, GPU)]
    assert len(done) == 300
    size = done[0].size
    assert (size.layers, size.heads, size.head_dim, size.context) == (12, 8, 128, 8192)
    assert size.heads_k == 2 and done[0].dtype == torch.bfloat16 and done[0].batch == 1
    assert capsys.readouterr().out.splitlines() == [
        "heedful: 4,096 tokens/s, heedful 1.000 times as fast (least round 1.000);"
        " loss 2.0000, from cuDNN's at most 2.50e-01, RMS 1.44e-02",
        "cudnn: 2,731 tokens/s, heedful 1.500 times as fast (least round 1.500);"
        " loss 1.7500, from cuDNN's at most 0.00e+00, RMS 0.00e+00",
        "flash: 2,048 tokens/s, heedful 2.000 times as fast (least round 2.000);"
        " loss 1.5000, from cuDNN's at most 2.50e-01, RMS 1.44e-02",
    ]


def test_rounds_of_training_begin_behind_the_steps_that_compile():
    """Ten rounds: of 25 steps, two each behind the first five."""
    theirs = [0.0] * 5 + [float(2 + step // 2) for step in range(20)]
    assert bench.ratio(theirs, [1.0] * 25) == (6.5, 2.0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [lengths.dense, lengths.packed])
def test_calls_that_are_timed_as_new_are_of_known_kinds(make, grad, monkeypatch):
    pytest.importorskip("triton")
    from support.runs import standin

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(lengths, "CALLS", 12)
    planned = []
    monkeypatch.setattr(backends, "plan", lambda *a: planned.append(a) or plan(*a))
    with standin.gpu("H200") as gpu:

        def call(length: int):
            made = make(length, torch.device("cpu"), grad)
            return lengths.with_backward(made) if grad else made

        times = lengths.known_and_new(call, torch.device("cpu"))
        assert len(gpu.launches) >= 3 * 12 and all(time > 0 for time in times)
        assert 0 < len(planned) <= 4
    with standin.gpu("H200"):
        assert lengths.median_us([lengths.sdpa(512, torch.device("cpu"))], torch.device("cpu")) > 0
