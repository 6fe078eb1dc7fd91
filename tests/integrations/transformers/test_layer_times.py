"""The bench of attention layers: each layer gives what the call beside it gives, and the table's
figures are those of its rounds."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from heedful.bench import layers

CPU = torch.device("cpu")


def test_a_layer_gives_what_the_call_beside_it_gives():
    calls = layers.Host(1, CPU).tensors
    assert len(calls) == 6
    for name, (layer,) in calls.items():
        if name.startswith(layers.LAYER):
            (call,) = calls[name.removeprefix(f"{layers.LAYER}: ")]
            with torch.set_grad_enabled("gradients" in name):
                out, weights = layer()
                assert out.requires_grad == ("gradients" in name)
                assert weights is None and torch.equal(out, call())


def test_layers_and_calls_have_the_options_that_the_table_says():
    calls = layers.Host(1, CPU).tensors
    named = {name: both[0].keywords for name, both in calls.items()}
    plain = {"softmax_scale": 0.125, "causal": True}
    assert named["flash_attn_func"] == named["flash_attn_func, with gradients"] == plain
    step = named["flash_attn_with_kvcache"]
    assert step.pop("cache_seqlens").tolist() == [100] * 8 and step == plain
    positions = named["layer: flash_attn_func"]["position_ids"]
    assert torch.equal(positions, torch.arange(128)[None])


def test_calls_and_layers_are_of_small_tensors_on_the_device():
    # What is made on no device in particular would lie elsewhere.
    with torch.device("meta"):
        trial = layers.Host(2, CPU)
    rows, step, cache = (1, 128, 8, 64), (8, 1, 8, 64), (8, 128, 8, 64)
    kinds = {"flash_attn_func": [rows] * 3, "flash_attn_func, with gradients": [rows] * 3}
    kinds |= {"flash_attn_with_kvcache": [step, cache, cache]}
    names = [name for kind in kinds for name in (kind, f"layer: {kind}")]
    assert [*trial.tensors] == names == [*trial.peers()]
    for name, calls in trial.tensors.items():
        first, second = (
            [x for x in (*call.args, *call.keywords.values()) if isinstance(x, torch.Tensor)]
            for call in calls
        )
        is_layer = name.startswith("layer: ")
        shapes = [tuple(x.transpose(1, 2).shape if is_layer else x.shape) for x in first[:3]]
        assert shapes == kinds[name.removeprefix("layer: ")]
        assert all(x.device == CPU for x in first)
        # Sets have tensors of their own.
        assert not any(torch.equal(x, y) for x, y in zip(first[:3], second[:3], strict=True))
        assert all(x.requires_grad for x in first[:3]) is ("gradients" in name)
        assert {x.dtype for x in first[:3]} == {torch.bfloat16}
    call = trial.tensors["flash_attn_with_kvcache"][0]
    assert call.keywords["cache_seqlens"].tolist() == [100] * 8


def test_calls_are_timed_with_their_gradients_where_they_have_some(monkeypatch):
    seen = []

    def host_us(calls, wait, queued):
        seen.append((calls, wait == trial.wait, queued, torch.is_grad_enabled()))
        return 7.0

    monkeypatch.setattr(layers.timing, "host_us", host_us)
    trial = layers.Host(1, CPU)
    for name, call in trial.tensors.items():
        assert trial.microseconds(name, call) == 7
        assert seen.pop() == (call, True, layers.QUEUED, "gradients" in name)


def test_the_command_says_the_device_and_the_table(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the one of {device}")
    monkeypatch.setattr(layers, "table", lambda device: iter([f"a table of {device}", "a line"]))
    layers.main()
    said = ["the one of cuda:3", "a table of cuda:3", "a line"]
    assert capsys.readouterr().out.splitlines() == said


def test_lines_have_the_least_and_the_median_and_both_over_the_call(monkeypatch):
    taken = iter([float(n * n) for n in range(1, 100)])
    monkeypatch.setattr(layers.timing, "host_us", lambda calls, wait, queued: next(taken))
    trial = layers.Host(1, CPU)
    monkeypatch.setattr(layers, "Host", lambda sets, device: trial)
    monkeypatch.setattr(trial, "enter_all", lambda: None)
    times = {"a": [5.0, 3.0, 9.0], "layer: a": [8.0, 9.0, 20.0]}
    monkeypatch.setattr(trial, "times", lambda rounds: times)
    head, *lines = layers.table(CPU, 1, 3)
    assert head.split() == ["least", "over", "median", "over"]
    assert [line.split()[-4:] for line in lines] == [
        ["3.0", "0.0", "5.0", "0.0"],
        ["8.0", "5.0", "9.0", "6.0"],
    ]
