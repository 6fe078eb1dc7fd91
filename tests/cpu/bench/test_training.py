"""The benchmark of training: what it computes from steps, and that it trains what it says."""

import dataclasses

import pytest

pytest.importorskip("torch")

import torch

from heedful.bench import training as bench
from heedful.demo import attention, text, training
from heedful.demo.agreement import Distance
from heedful.demo.model import GPT, ModelSize

SIZE = ModelSize(2, 4, 8, 24, heads_k=2)
RECIPE = dataclasses.replace(bench.RECIPE, size=SIZE, steps=16, dtype=torch.float32, backend="cpu")


def test_a_ratio_is_of_median_steps_and_its_least_of_one_round():
    # Steps take longer from round to round.
    steps = [1.0 + number // 10 for number in range(100)]
    ours = [9.0] * bench.WARM_UP + steps
    factors = [1.2] * 90 + [0.9] * 10
    theirs = [1.0] * bench.WARM_UP + [a * b for a, b in zip(factors, steps, strict=True)]
    assert bench.ratio(theirs, ours) == pytest.approx((1.2, 0.9))


def test_too_few_or_unlike_numbers_of_steps_give_no_ratio():
    with pytest.raises(ValueError, match="at least 15"):
        bench.ratio([1.0] * 14, [1.0] * 14)
    with pytest.raises(ValueError, match="as many steps"):
        bench.ratio([1.0] * 20, [1.0] * 21)


def test_a_model_of_fewer_key_heads_trains_alike_with_heedful_and_sdpa(capsys):
    source, device = text.load(), torch.device("cpu")
    attentions = {
        bench.OURS: attention.with_heedful("cpu"),
        bench.CUDNN: attention.with_math(),
        bench.FLASH: attention.with_sdpa(),
    }
    runs = training.start(RECIPE, len(source.vocabulary), attentions, {}, device)
    for _ in training.train(RECIPE, source, runs, device):
        pass
    bound = 3 * bench.strayed(runs[bench.FLASH], runs[bench.CUDNN]).largest
    rounding = 2.0**-23 * max(runs[bench.CUDNN].losses)
    assert bench.strayed(runs[bench.OURS], runs[bench.CUDNN]).largest <= bound + rounding
    bench.report(RECIPE, runs)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [bench.OURS, bench.CUDNN, bench.FLASH]


def test_heads_of_keys_shrink_the_projection():
    sizes = (dataclasses.replace(SIZE, heads_k=0), SIZE)
    widths = [GPT(size, 10).get_parameter("blocks.0.qkv.weight").shape[0] for size in sizes]
    assert widths == [3 * 32, 32 + 2 * 16]


def test_a_run_that_has_diverged_is_said_to_have(capsys):
    source, device = text.load(), torch.device("cpu")
    attentions = {bench.OURS: attention.with_math(), bench.CUDNN: attention.with_math()}
    runs = training.start(RECIPE, len(source.vocabulary), attentions, {}, device)
    for name, run in runs.items():
        run.seconds[:] = [1.0] * 20
        run.losses[:] = [3.0] * 19 + [2.0 if name == bench.CUDNN else float("inf")]
    bench.report(RECIPE, runs)
    ours, theirs = capsys.readouterr().out.splitlines()
    assert "loss nan" in ours and "loss 2.0000" in theirs


def test_seeds_are_put_together(capsys):
    far, near = Distance(0.5, 0.3), Distance(0.1, 0.4)
    bench.report_together(
        [{bench.OURS: far, bench.FLASH: near}] * 2
        + [dict.fromkeys((bench.OURS, bench.FLASH), near)]
    )
    ours, flash = capsys.readouterr().out.splitlines()
    assert ours == "heedful, 3 seeds: from cuDNN's loss at most 5.00e-01, RMS 3.37e-01"
    assert flash == "flash, 3 seeds: from cuDNN's loss at most 1.00e-01, RMS 4.00e-01"


def test_each_seed_is_trained_and_reported(capsys, monkeypatch):
    begun: list[tuple[int, int]] = []

    def trained(recipe, source):
        begun.append((recipe.steps, recipe.seed))
        names = (bench.OURS, bench.CUDNN, bench.FLASH)
        attentions = {str(name): attention.with_math() for name in names}
        runs = training.start(RECIPE, len(source.vocabulary), attentions, {}, torch.device("cpu"))
        for run in runs.values():
            run.seconds[:], run.losses[:] = [1.0] * 16, [float(recipe.seed)] * 16
        return runs

    monkeypatch.setattr(bench, "trained", trained)
    bench.main(["16", "5"])
    assert len(capsys.readouterr().out.splitlines()) == 3
    bench.main(["16", "3", "7"])
    said = capsys.readouterr().out.splitlines()
    assert begun == [(16, 5), (16, 3), (16, 7)] and len(said) == 8
    assert "loss 3.0000" in said[0] and "loss 7.0000" in said[3] and "2 seeds" in said[6]


def test_a_seed_draws_weights_and_batches():
    source, device = text.load(), torch.device("cpu")
    losses = []
    for seed in (1, 1, 2):
        recipe = dataclasses.replace(RECIPE, steps=1, seed=seed)
        runs = training.start(
            recipe, len(source.vocabulary), {"": attention.with_math()}, {}, device
        )
        assert list(training.train(recipe, source, runs, device)) == [1]
        losses.append(runs[""].losses)
    assert losses[0] == losses[1] != losses[2]
