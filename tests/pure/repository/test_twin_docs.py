"""What PyTorch's and JAX's functions of one name have in common is said in the same words."""

import ast
import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "src" / "heedful"
TWINS = {
    "flash_attn_func": "api/attention",
    "flash_attn_varlen_func": "api/attention",
    "flash_attn_with_kvcache": "api/kvcache",
    "attention_backward": "api/gradients",
    "merge_attn_states": "api/merge",
    "quantize_kv": "operands/quant",
    "dequantize_kv": "operands/quant",
}
# Arguments of which the frameworks take different values.
DIFFERENT = {
    "flash_attn_func": {"v", "window_size", "deterministic", "dropout_seed", "dropout_origin"},
    "flash_attn_varlen_func": {"cu_seqlens_q, cu_seqlens_k", "max_seqlen_q, max_seqlen_k"},
    "flash_attn_with_kvcache": {
        "k_cache",
        "v_cache",
        "k, v",
        "rotary_cos, rotary_sin",
        "cache_seqlens",
    },
    "attention_backward": {"dout"},
    "merge_attn_states": {"lses"},
    "quantize_kv": {"dtype"},
    "dequantize_kv": set(),
}


def docstring(framework: str, function: str) -> str:
    path = SOURCES / framework / f"{TWINS[function]}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.get_docstring(node) or ""
    raise LookupError(function)


def arguments(text: str) -> dict[str, str]:
    """The entries of the section "Args" by name, without line breaks."""
    section = re.search(r"\nArgs:\n(.*?)\n(?=\S|\Z)", text + "\n", re.DOTALL)
    entries = re.split(r"^ {4}(?=\S)", section[1] if section else "", flags=re.MULTILINE)
    found = (re.fullmatch(r"([\w, *]+): (.*)", entry.strip(), re.DOTALL) for entry in entries)
    return {one[1]: " ".join(one[2].split()) for one in found if one}


def test_arguments_are_read():
    text = (
        "One.\n\nArgs:\n    q: (batch,\n        rows).\n    k, v: as q: alike.\n\nReturns:\n    x"
    )
    assert arguments(text) == {"q": "(batch, rows).", "k, v": "as q: alike."}


@pytest.mark.parametrize("function", TWINS)
def test_twins_say_the_same_in_the_same_words(function):
    torch, jax = (arguments(docstring(framework, function)) for framework in ("torch", "jax"))
    both = torch.keys() & jax.keys()
    assert len(both) > 2
    differ = {name for name in both if torch[name] != jax[name]}
    assert differ == DIFFERENT[function]


@pytest.mark.parametrize("function", TWINS)
def test_twins_have_one_summary_and_one_source(function):
    both = [docstring(framework, function) for framework in ("torch", "jax")]
    for pattern in (r"\A.*?[.:](?=\s|\Z)", r"\nSource: .*"):
        torch, jax = (re.findall(pattern, text, re.DOTALL) for text in both)
        assert [text.split() for text in torch] == [text.split() for text in jax]
