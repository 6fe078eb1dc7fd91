"""The demo tells right from wrong: it passes with heedful's kernels and fails with broken ones."""

import dataclasses
import math

import pytest
import torch
from typer.testing import CliRunner

from heedful.demo import attention, job, text, training
from heedful.demo.agreement import LOSS_EPS, compare, differences
from heedful.demo.generate import generate
from heedful.demo.model import GPT, ModelSize
from heedful.demo.training import Recipe

CPU = torch.device("cpu")
SIZE = ModelSize(2, 2, 8, 24)
TINY = Recipe(SIZE, 4, 30, 1e-2, torch.float32, "cpu")


@pytest.fixture(scope="module")
def source():
    return text.load()


def test_heedfuls_tiled_kernels_train_as_sdpa_does(source, monkeypatch):
    monkeypatch.setattr(job, "SAMPLED", 40)
    report = job.run(TINY, source, CPU)
    assert report.agreement.agrees, report.agreement
    assert report.learned, "thirty steps were not enough to learn character frequencies"
    assert report.sample.startswith(job.PROMPT)
    assert len(report.sample) == len(job.PROMPT) + job.SAMPLED


def _first_key_lost(layer, q, k, v):
    return right(layer, q, k, torch.cat((0 * v[:, :1], v[:, 1:]), 1))


def _gradient_of_k_lost(layer, q, k, v):
    return right(layer, q, k.detach(), v)


right = attention.with_heedful("cpu")
BROKEN = {
    "scaled by a thousandth": lambda layer, q, k, v: right(layer, q, k, v) * 1.001,
    "first value lost": _first_key_lost,
    "gradient of k lost": _gradient_of_k_lost,
    "keys one late": lambda layer, q, k, v: right(layer, q, k.roll(1, 1), v),
    "not a number": lambda layer, q, k, v: right(layer, q, k, v) * math.nan,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_attention_disagrees(name, source, monkeypatch):
    monkeypatch.setattr(job, "SAMPLED", 1)
    few = dataclasses.replace(TINY, steps=8)
    report = job.run(few, source, CPU, ours=BROKEN[name])
    assert not report.agreement.agrees and not report.passed


def test_the_command_ends_with_an_error_when_the_curves_disagree(tmp_path, monkeypatch):
    import typer

    from heedful.cli.demo import demo

    app = typer.Typer()
    app.command()(demo)
    monkeypatch.setattr(training, "ON_CPU", TINY)
    monkeypatch.setattr(job, "SAMPLED", 1)
    arguments = ["--device", "cpu", "--steps", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(attention, "with_heedful", lambda backend: BROKEN["keys one late"])
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "timing.png"}


def test_the_command_says_how_long_it_takes_and_what_it_shows(tmp_path, monkeypatch):
    from matplotlib import pyplot

    from heedful.bench.harness import machine
    from heedful.cli import app
    from heedful.demo import plots

    monkeypatch.setattr(training, "ON_CPU", TINY)
    monkeypatch.setattr(job, "SAMPLED", 1)
    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(plots.pyplot, "close", figures.append)
        result = CliRunner().invoke(app(), ["demo", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    before, _, after = said.partition("Training loss")
    assert "takes about 3 min on two idle cores" in before
    assert "trains with heedful as it does with SDPA" in after
    assert "It shows nothing of speed" in after
    titles = [figure.get_suptitle() for figure in figures]
    assert titles == [
        f"{what}, on {machine.cpu_name()}"
        for what in ("A GPT trained with heedful and with SDPA", "Speed of training, step by step")
    ]
    pyplot.close("all")


def test_equal_curves_agree_without_any_noise():
    assert compare([2.0, 1.0], [2.0, 1.0], [2.0, 1.0]).agrees


def test_the_bound_is_three_times_the_noise_plus_the_rounding_of_the_losses():
    found = compare([2.0, 1.5], [2.0, 1.0], [2.25, 1.0])
    whole = found.parts[-1]
    assert whole.bound.largest == 3 * 0.25 + 2.0 * LOSS_EPS
    assert whole.bound.rms == 3 * math.sqrt(0.25**2 / 2) + 2.0 * LOSS_EPS
    assert found.agrees
    assert not compare([2.0, 1.8], [2.0, 1.0], [2.25, 1.0]).agrees


def test_late_noise_does_not_cover_an_early_fault():
    theirs = [2.0] * 20
    noisy_at_the_end = [2.0] * 19 + [3.0]
    assert compare(noisy_at_the_end, theirs, noisy_at_the_end).agrees
    faulty_early = [2.0, 2.0 + 1e-5] + theirs[2:]
    assert not compare(faulty_early, theirs, noisy_at_the_end).agrees


def test_a_nan_never_agrees():
    assert differences([math.nan], [1.0]) == [math.inf]
    assert not compare([math.nan], [1.0], [1.0]).agrees


def test_a_control_that_broke_does_not_excuse_the_others(source):
    report = compare([2.0], [1.0], [math.nan])
    assert not report.agrees


def test_runs_start_from_the_same_weights_and_the_control_one_rounding_off(source):
    attentions = {"a": right, "b": attention.with_sdpa()}
    runs = training.start(TINY, 10, attentions, {"control": attention.with_math()}, CPU)
    moved = 0
    eps = torch.finfo(torch.float32).eps
    for a, b, control in zip(*(run.model.parameters() for run in runs.values()), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
        assert ((control - a).abs() <= eps * a.abs()).all()
        moved += int((control != a).sum())
    assert moved > 0


def test_text_from_the_cache_is_the_text_of_full_forwards(source):
    torch.manual_seed(0)
    model = GPT(SIZE, len(source.vocabulary))
    prompt = source.encode("def heed(")
    with_cache = generate(model, prompt, 30, torch.Generator().manual_seed(3), torch.float32, "cpu")
    tokens, generator = prompt.tolist(), torch.Generator().manual_seed(3)
    for _ in range(30):
        logits = model(torch.tensor([tokens]), right)[0, -1].detach()
        tokens.append(
            int(torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator))
        )
    assert with_cache == tokens


def test_learning_rate_rises_and_falls_to_almost_nothing():
    rates = [TINY.rate(step) for step in range(TINY.steps)]
    peak = rates.index(max(rates))
    assert rates[0] > 0 and max(rates) == TINY.peak_rate
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 <= rates[-1] < rates[0]


def test_every_character_of_the_text_survives_the_vocabulary(source):
    words = "The with statement"
    assert source.decode(source.encode(words).tolist()) == words
    whole = source.decode(torch.cat((source.train, source.held_out)).tolist())
    assert "with" in whole and len(set(whole)) == len(source.vocabulary)


def test_the_unigram_loss_is_the_best_of_any_fixed_odds(source):
    counts = torch.bincount(source.train, minlength=len(source.vocabulary)).double()
    odds = counts / counts.sum()
    assert source.unigram_nats() == pytest.approx(
        float(-(odds[odds > 0].log() * odds[odds > 0]).sum())
    )
    blurred = 0.9 * odds + 0.1 / len(odds)
    assert source.unigram_nats() < float(-(blurred.log() * odds).sum())
