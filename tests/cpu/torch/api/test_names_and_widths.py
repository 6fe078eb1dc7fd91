"""Small facts that everything else stands on: widths of dtypes, names of arguments, what is usual,
and which of several operands counts."""

import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import heedful.torch as typed
from heedful.bench import lengths, training
from heedful.core.base import settings
from heedful.core.base.arrays import ITEM_BYTES, ArraySpec
from heedful.core.base.device import by_name
from heedful.core.call.arguments import WHOLE, Options, argument_name
from heedful.core.call.problem import ITEM_BITS, LATENT_ROWS, AttentionProblem
from heedful.core.call.storage import storage
from heedful.core.planning.plan import plan, stored_as
from heedful.torch.eager.kinds import MOST_KINDS, Kinds
from heedful.torch.traced import library

heedful: Any = typed


def test_dtypes_are_as_wide_as_those_of_torch():
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size
    stored = {"int4": 4, LATENT_ROWS: 8}
    bits = {name: 8 * getattr(torch, name).itemsize for name in ITEM_BITS if name not in stored}
    assert bits | stored == ITEM_BITS
    for name in ("int32", "int64", "float32"):
        assert ArraySpec.contiguous((3,), name).nbytes == 3 * getattr(torch, name).itemsize


@pytest.mark.parametrize(
    "kind, function",
    [
        ("dense", heedful.flash_attn_func),
        ("varlen", heedful.flash_attn_varlen_func),
        ("kvcache", heedful.flash_attn_with_kvcache),
    ],
)
def test_operands_and_options_are_named_as_the_public_function_has_them(kind, function):
    public = set(inspect.signature(function).parameters)
    wanted = {
        "dense": {"q", "k", "v", "bias", "seed", "return_lse"},
        "varlen": {"q", "k", "v", "bias", "seed", "seqused_k", "block_table", "return_lse"},
        "kvcache": {"k", "v", "seqused_k", "kv_batch_idx", "leftpad_k", "return_lse"},
    }[kind]
    assert {argument_name(name, kind) for name in wanted} <= public


def test_used_lengths_are_checked_whichever_of_them_there_are():
    q = torch.randn(7, 2, 8)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    wrong = torch.tensor([4, 2])
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises((TypeError, ValueError), match=name):
            heedful.flash_attn_varlen_func(q, q, q, bounds, bounds, 4, 4, **{name: wrong})


def test_an_operand_on_another_device_is_named():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="alibi_slopes"):
        heedful.flash_attn_func(q, q, q, alibi_slopes=torch.ones(2, device="meta"))


def test_a_plan_for_tensors_stored_otherwise_says_so():
    problem = AttentionProblem.dense(2, 300, 300, 8, head_dim=64, needs_grad=True)
    chosen = plan(problem, by_name("A100"))
    other = stored_as(chosen, aligned=False)
    assert not other.problem.aligned and other.configs != chosen.configs
    assert stored_as(chosen, aligned=True) is chosen


def test_rows_of_all_entries_have_30_bits():
    def is_even(batch: int, rows: int, between: int) -> bool:
        strides = (between * 16, 16, 8, 1)
        k = ArraySpec((batch, rows, 2, 8), strides, "float16", True, None)
        return storage(k, k, k, None)["even_rows"]

    assert is_even(4, 1000, (1 << 28) - 1)
    assert not is_even(4, 1000, 1 << 28)
    assert is_even(1000, 4, 1 << 20)


@pytest.mark.parametrize("softcap", [0.5, 1.0, 3.0])
def test_a_small_softcap_caps_on_a_cpu_too(softcap):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 200, 2, 16, dtype=torch.float64).float()
    got = heedful.flash_attn_func(q, k, v, softmax_scale=1.0, softcap=softcap, backend="cpu")
    scores = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double())
    p = torch.softmax(softcap * torch.tanh(scores / softcap), -1)
    want = torch.einsum("bhmn,bnhd->bmhd", p, v.double())
    rounding = 200 * torch.finfo(torch.float32).eps
    assert (got - want).abs().max() <= rounding * want.abs().max()


@pytest.mark.parametrize("wanting", ["q", "k", "v"])
def test_any_one_operand_that_wants_a_gradient_gets_it_in_every_call(wanting):
    # No multiple of 16 bytes, so that each call has to be looked up by its key.
    memory = torch.randn(3, 1 * 20 * 2 * 8 + 1)
    tensors = {name: x[1:].view(1, 20, 2, 8) for name, x in zip("qkv", memory, strict=True)}
    tensors[wanting] = tensors[wanting].detach().requires_grad_()
    for _ in range(3):
        out = heedful.flash_attn_func(tensors["q"], tensors["k"], tensors["v"])
        assert out.requires_grad
        (gradient,) = torch.autograd.grad(out.sum(), [tensors[wanting]])
        assert gradient.abs().max() > 0 or wanting == "q"


def test_too_many_kinds_are_forgotten():
    kinds = Kinds()
    for key in range(MOST_KINDS + 5):
        kinds.of((key,))
    assert len(kinds) <= MOST_KINDS and (MOST_KINDS + 4,) in kinds


def test_operators_say_that_they_comply_with_torch_compile():
    for name in ("attention_v10", "attention_v10_backward"):
        overload = getattr(torch.ops.heedful, name).default
        assert torch.Tag.pt2_compliant_tag in overload.tags


def test_only_a_call_without_any_option_is_usual():
    q = torch.zeros(1, 2, 1, 8)
    plain = Options(
        kind="dense",
        dropout_p=0.0,
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=False,
        return_attn_probs=False,
        return_lse=False,
        num_splits=0,
        backend=None,
        dropout_origin=WHOLE,
    )
    for causal in (True, False):
        assert library._is_usual(q, q, q, plain._replace(causal=causal))
    others = {"kind": "varlen", "dropout_p": 0.1, "softmax_scale": 0.3, "window_size": (1, -1)}
    others |= {"softcap": 2.0, "deterministic": True, "return_attn_probs": True, "causal": 1}
    others |= {
        "return_lse": True,
        "num_splits": 2,
        "backend": "cpu",
        "dropout_origin": (0, 0, 4, 0),
    }
    for name, value in others.items():
        assert not library._is_usual(q, q, q, plain._replace(**{name: value})), name
    for values in ({"backend": "cpu", "num_splits": 2}, {"dropout_p": 0.1, "softcap": 2.0}):
        assert not library._is_usual(q, q, q, plain._replace(**values))


def test_the_log_level_has_a_default_and_names_its_variable(monkeypatch):
    monkeypatch.delenv("HEEDFUL_LOG", raising=False)
    assert settings.get("log") == "warning"
    monkeypatch.setenv("HEEDFUL_LOG", "loud")
    with pytest.raises(ValueError, match="HEEDFUL_LOG"):
        settings.get("log")


def test_the_longest_sequence_of_a_timed_packed_call_has_the_length_it_says(monkeypatch):
    given = []
    monkeypatch.setattr(lengths, "flash_attn_varlen_func", lambda *a, **k: given.append(a))
    lengths.packed(600, torch.device("cpu"))()
    (q, _, _, bounds, _, longest, _), *_ = given
    assert bounds.diff().max() == longest == 600 and bounds[-1] == len(q)


def test_the_training_benchmark_is_of_the_model_that_the_documentation_names():
    size = training.RECIPE.size
    found = (size.layers, size.heads, size.heads_k, size.head_dim, size.context)
    assert found == (12, 8, 2, 128, 8192) and training.RECIPE.steps == 300
