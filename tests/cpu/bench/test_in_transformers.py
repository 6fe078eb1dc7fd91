"""The bench of models: what it runs, compares, and says. Its models stand in for transformers'."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

NAME = "heedful.bench.in_transformers"


class Model:
    """Notes what it is asked. By the attention that is set it answers in float32."""

    def __init__(self, config: Any = None, answers: Any = None):
        self.config, self.answers = config, answers or {}
        self.asked: list[dict] = []
        self.implementation, self.cleared, self.grads = "", 0, True
        weight = torch.ones(2, 3, requires_grad=True)
        self.model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight))
        self.named = {
            "layers.sinks": torch.zeros(400),
            "experts.up": torch.zeros(900),
            "layers.q": torch.zeros(4),
        }

    def set_attn_implementation(self, name: str) -> None:
        self.implementation = name

    def zero_grad(self, set_to_none: bool) -> None:
        assert set_to_none
        self.cleared += 1
        self.model.embed_tokens.weight.grad = None

    def __call__(self, **asked):
        self.asked.append(asked)
        self.grads = torch.is_grad_enabled()
        weight = self.model.embed_tokens.weight
        return SimpleNamespace(loss=2 * weight.sum(), logits=torch.full((1, 3), 5.0).double())

    def generate(self, ids, **asked):
        self.asked.append(asked)
        made = torch.arange(1, 1 + asked["max_new_tokens"]).expand(len(ids), -1)
        return torch.cat([ids, made], 1)

    def generate_batch(self, prompts, generation_config):
        self.asked.append(vars(generation_config))
        # In an order of its own.
        answers = [
            SimpleNamespace(prompt_ids=prompt, generated_tokens=[prompt[0] + 1, 9])
            for prompt in reversed(prompts)
        ]
        return dict(enumerate(answers))

    def to(self, *where):
        self.where = where
        return self

    def eval(self):
        return self

    def named_parameters(self):
        return self.named.items()


@pytest.fixture
def bench(monkeypatch):
    """The program over a stand-in of transformers, on the CPU."""
    made = SimpleNamespace(
        __version__="5.0",
        LlamaConfig=lambda **facts: facts,
        LlamaForCausalLM=Model,
        GptOssConfig=lambda **facts: facts,
        GptOssForCausalLM=Model,
        GenerationConfig=SimpleNamespace,
    )
    asked: list[Any] = []
    plug_in = SimpleNamespace(
        paths=lambda: {"split": 2, "flash": 3},
        register=lambda **how: asked.append(how),
        reset_paths=lambda: asked.append("reset"),
    )
    monkeypatch.setitem(sys.modules, "transformers", made)
    monkeypatch.setitem(sys.modules, "heedful.integrations.transformers", plug_in)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    loaded = importlib.import_module(NAME)
    monkeypatch.setattr(loaded, "DEVICE", "cpu")
    loaded.asked = asked  # pyright: ignore[reportAttributeAccessIssue]
    yield loaded
    sys.modules.pop(NAME)


def test_models_have_the_shapes_that_their_names_say(bench):
    for heads, heads_k, dim in ((32, 8, 64), (16, 4, 128)):
        model = bench.llama(heads, heads_k, dim)
        assert model.where == ("cpu", torch.bfloat16)
        assert model.config == {
            "vocab_size": bench.VOCABULARY,
            "hidden_size": heads * dim,
            "intermediate_size": 4 * heads * dim,
            "num_hidden_layers": 16,
            "num_attention_heads": heads,
            "num_key_value_heads": heads_k,
            "head_dim": dim,
            "max_position_embeddings": 1 << 16,
            "tie_word_embeddings": True,
        }
    model = bench.gpt_oss()
    assert model.config == {
        "vocab_size": bench.VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1 << 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    # transformers leaves these two kinds as they are.
    named = model.named
    assert 0.8 < named["layers.sinks"].std() < 1.2
    assert 0.015 < named["experts.up"].std() < 0.025
    assert not named["layers.q"].any()


def test_tokens_are_the_same_again_and_none_is_padding(bench, monkeypatch):
    ids = bench.tokens(3, 500)
    assert ids.shape == (3, 500) and ids.equal(bench.tokens(3, 500))
    monkeypatch.setattr(bench, "VOCABULARY", 3)
    assert bench.tokens(100).unique().tolist() == [1, 2]


def test_training_gives_the_loss_and_the_size_of_a_gradient(bench):
    model = Model()
    job = bench.training(model, 7)
    assert job.name == "train 1 x 7"
    for times in (1, 2):
        # Gradients do not add up from run to run.
        assert job.run().tolist() == [12.0, pytest.approx(2 * 6**0.5)]
        assert model.cleared == times
    asked = model.asked[0]
    assert asked["input_ids"] is asked["labels"] and asked["labels"].shape == (1, 7)
    assert asked["use_cache"] is False


def test_a_prefill_gives_the_last_logits_in_float32_without_gradients(bench):
    model = Model()
    job = bench.prefill(model, 7)
    out = job.run()
    assert job.name == "prefill 1 x 7" and out.dtype == torch.float32 and out.tolist() == [[5] * 3]
    (asked,) = model.asked
    assert asked["logits_to_keep"] == 1 and asked["use_cache"] is False and not model.grads
    assert asked["input_ids"].shape == (1, 7)


def test_a_padded_prefill_has_more_padding_row_by_row(bench):
    model = Model()
    job = bench.padded_prefill(model, 4, 12)
    out = job.run()
    assert job.name == "padded prefill 4 x 12" and out.dtype == torch.float32
    (asked,) = model.asked
    mask = asked["attention_mask"]
    assert mask.tolist() == [[0] * pad + [1] * (12 - pad) for pad in (0, 2, 4, 6)]
    assert asked["input_ids"].shape == (4, 12) and asked["use_cache"] is False
    assert asked["logits_to_keep"] == 1 and not model.grads


def test_generation_gives_the_first_new_token_of_each_row(bench):
    for cache, name in ((None, "generate 2 x (5 + 3)"), ("static", "generate, static cache")):
        model = Model()
        job = bench.generation(model, 2, 5, 3, cache)
        out = job.run()
        assert job.name == name and out.tolist() == [[1.0], [1.0]] and out.dtype == torch.float32
        (asked,) = model.asked
        assert asked.pop("attention_mask").tolist() == [[1] * 5] * 2
        more = {"cache_implementation": cache, "disable_compile": True} if cache else {}
        new = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert asked == new | more


def test_continuous_batching_gives_the_first_token_of_each_prompt_in_order(bench):
    model = Model()
    job = bench.continuous(model, 3, 4, 6)
    want = [[prompt[0] + 1] for prompt in bench.tokens(3, 4).tolist()]
    out = job.run()
    assert job.name == "generate, continuous batching" and out.dtype == torch.float32
    assert out.tolist() == want
    numbers = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    assert model.asked == [numbers]


def test_every_bar_is_of_a_job_and_every_job_but_one_has_a_bar(bench, monkeypatch):
    monkeypatch.setattr(bench, "tokens", lambda *shape: torch.ones(shape, dtype=torch.int64))
    found, theirs = [], []
    for name, model, other, jobs in bench.jobs():
        theirs.append(other)
        found += [f"{name} {job.name}" for job in jobs]
        heads = {"D64 32/8": (32, 8, 64), "D128 16/4": (16, 4, 128), "gpt-oss": (64, 8, 64)}[name]
        config = model.config
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
        assert tuple(config[key] for key in keys) == heads
    assert theirs == ["sdpa", "sdpa", "eager"]
    batching = {name for name in found if name.endswith("continuous batching")}
    assert len(batching) == 2 and set(found) - batching == set(bench.BARS)


def test_rounds_take_turns_and_the_first_is_of_no_account(bench, monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 3)
    clock = iter(range(1000))
    ticks = {"sdpa": 1, "heedful": 3}
    model, order = Model(), []

    def run():
        order.append(model.implementation)
        for _ in range(ticks[model.implementation] + (10 if len(order) < 3 else 0)):
            next(clock)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    taken = bench.measure(model, "sdpa", bench.Job("a job", run))
    assert order == ["sdpa", "heedful"] * 4
    assert taken == {"sdpa": [2] * 3, "heedful": [4] * 3}


def test_results_are_compared_over_the_size_of_theirs(bench):
    model = Model()
    answers = {"eager": torch.tensor([3.0, 4.0]), "heedful": torch.tensor([3.0, 4.5])}
    apart = bench.compare(model, "eager", lambda: answers[model.implementation])
    assert apart == pytest.approx(0.1)


def said(bench, monkeypatch, name: str, apart: float, ours: list[float]) -> str:
    taken = {"sdpa": [0.003, 0.001, 0.002], "heedful": ours}
    monkeypatch.setattr(bench, "compare", lambda *_: apart)
    monkeypatch.setattr(bench, "measure", lambda *_: taken)
    return bench.line("D64 32/8", Model(), "sdpa", bench.Job(name, lambda: None))


def test_a_line_has_medians_ratios_by_round_the_bar_and_the_paths(bench, monkeypatch):
    line = said(bench, monkeypatch, "train 1 x 8192", 0.04, [0.001, 0.002, 0.004])
    assert line[:42] == f"{'D64 32/8 train 1 x 8192':42}"
    assert line[42:] == (
        "sdpa      2.0 ms  heedful      2.0 ms  1.000 x (0.500 to 3.000)"
        "  bar 1.075 MISSED  apart 4e-02  flash 3, split 2"
    )
    assert bench.asked == ["reset"]
    line = said(bench, monkeypatch, "generate 16 x (4096 + 32)", 0.9, [0.002, 0.002, 0.002])
    assert "bar 1.000 met" in line and "1.000 x (0.500 to 1.500)" in line and "9e-01" in line
    line = said(bench, monkeypatch, "generate, continuous batching", 0.0, [0.001] * 3)
    assert "bar" not in line and "2.000 x" in line


def test_a_job_that_is_wrong_or_fails_has_no_figure(bench, monkeypatch):
    line = said(bench, monkeypatch, "prefill 1 x 32768", 0.051, [0.001] * 3)
    assert line == f"{'D64 32/8 prefill 1 x 32768':40}  wrong: 5.1e-02 apart"
    assert "ms" in said(bench, monkeypatch, "prefill 1 x 32768", 0.05, [0.001] * 3)

    def fail(*_):
        raise ValueError("\n" + "no room " * 40 + "\nand more")

    monkeypatch.setattr(bench, "measure", fail)
    line = bench.line("gpt-oss", Model(), "eager", bench.Job("prefill", lambda: None))
    assert line == f"{'gpt-oss prefill':40}  ValueError: {('no room ' * 40)[:160]}"


@pytest.mark.parametrize(
    "words, lines",
    [((), ["a x", "a y", "b x"]), (("a", "x"), ["a x"]), (("y",), ["a y"]), (("z",), [])],
)
def test_words_choose_the_lines(bench, words, lines, monkeypatch):
    def jobs():
        for name, of in (("a", "xy"), ("b", "x")):
            yield name, Model(), "sdpa", [bench.Job(letter, lambda: None) for letter in of]

    monkeypatch.setattr(bench, "jobs", jobs)
    monkeypatch.setattr(bench, "line", lambda name, model, theirs, job: f"{name} {job.name}")
    monkeypatch.setattr(bench.sys, "argv", ["bench", *words])
    monkeypatch.setattr(bench.script, "current_gpu", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = []
    monkeypatch.setattr(bench.script, "say", found.append)
    bench.main()
    assert found == [f"GPU 3, torch {torch.__version__}, transformers 5.0", *lines]
    assert bench.asked == [{"continuous": True}]
