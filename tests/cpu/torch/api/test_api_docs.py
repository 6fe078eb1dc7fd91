"""The API's pages name what the functions take, and nothing that they do not."""

import inspect
import re
from pathlib import Path

import pytest

import heedful.torch as heedful

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "api.md").read_text(encoding="utf-8")
FUNCTIONS = [getattr(heedful, name) for name in heedful.__all__]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_page_names_every_function_and_its_own_keywords(function):
    assert f"`{function.__name__}(" in PAGE
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f"`{name}`" in PAGE, f"{function.__name__}'s {name}"


def test_keywords_in_the_tables_exist():
    taken = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) > 15 and named <= taken, named - taken


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_docstrings_name_every_argument_of_their_own(function):
    """Arguments that another function's docstring describes are those of flash_attn_func."""
    shared = set(inspect.signature(heedful.flash_attn_func).parameters)
    if function is heedful.flash_attn_func:
        shared = set()
    if "packed" in function.__name__:
        shared |= set(inspect.signature(heedful.flash_attn_varlen_func).parameters)
    text = function.__doc__ or ""
    for name, parameter in inspect.signature(function).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert name in shared or variadic or re.search(rf"\b{name}\b", text), name


def test_the_signatures_begin_as_flash_attns_do():
    """Positional arguments of flash_attn 2.8, in order; all else is keyword-only."""
    common = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    common = f"{common} return_attn_probs"
    bounds = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    cache = (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
        " block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes"
        " num_splits return_softmax_lse"
    )
    wanted = {
        "flash_attn_func": f"q k v {common}",
        "flash_attn_varlen_func": f"q k v {bounds} {common} block_table",
        "flash_attn_with_kvcache": cache,
        "flash_attn_qkvpacked_func": f"qkv {common}",
        "flash_attn_kvpacked_func": f"q kv {common}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {common}",
        "flash_attn_varlen_kvpacked_func": f"q kv {bounds} {common}",
    }
    for name, words in wanted.items():
        parameters = inspect.signature(getattr(heedful, name)).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == words.split(), name
