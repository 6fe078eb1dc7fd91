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


def test_layers_and_calls_have_the_sizes_that_the_table_says():
    """128 tokens, 8 heads of 64 dims; or a token of each of 8 sequences over 100 of 128 keys."""
    calls = layers.Host(2, CPU).tensors
    for name, both in calls.items():
        assert len(both) == 2
        is_step, needs_grad = "kvcache" in name, "gradients" in name
        for made in both:
            tensors = [x for x in made.args if isinstance(x, torch.Tensor)]
            q, k, v = tensors[:3]
            if name.startswith(layers.LAYER):
                assert (made.func, made.args[0].stride(1)) == (layers._layer, 64)
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            assert q.shape == ((8, 1, 8, 64) if is_step else (1, 128, 8, 64))
            assert k.shape == v.shape == ((8, 128, 8, 64) if is_step else (1, 128, 8, 64))
            assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
            assert {x.requires_grad for x in (q, k, v)} == {needs_grad}
            assert len({x.data_ptr() for x in (q, k, v)}) == 3
    named = {name: both[0].keywords for name, both in calls.items()}
    plain = {"softmax_scale": 0.125, "causal": True}
    assert named["flash_attn_func"] == named["flash_attn_func, with gradients"] == plain
    step = named["flash_attn_with_kvcache"]
    assert step.pop("cache_seqlens").tolist() == [100] * 8 and step == plain
    positions = named["layer: flash_attn_func"]["position_ids"]
    assert torch.equal(positions, torch.arange(128)[None])


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
