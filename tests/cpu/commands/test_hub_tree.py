"""The tree for the `kernels` library: it gives the functions of an installed heedful, by that
library and by transformers, and otherwise says what to install. `make hub` brings the library."""

import functools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch

import heedful
import hub_tree

BUILD = Path("build") / "torch-universal"


@pytest.fixture
def folder(tmp_path) -> Path:
    hub_tree.write(tmp_path / "hub")
    return tmp_path / "hub"


def run(folder: Path) -> dict:
    path = folder / BUILD / "__init__.py"
    names = {"__name__": "of_the_hub"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


def test_its_module_has_the_functions_of_the_package(folder):
    names = run(folder)
    assert {"flash_attn_func", "flash_attn_varlen_func", "attention_backward"} <= set(
        names["__all__"]
    )
    assert sorted(hub_tree.functions()) == names["__all__"]
    assert all(names[name] is getattr(heedful, name) for name in names["__all__"])


def test_without_the_package_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "heedful", None)
    with pytest.raises(ImportError, match=r'pip install "heedful\[cuda\]>=') as caught:
        run(folder)
    assert heedful.__version__ in str(caught.value)


def test_beside_an_older_package_it_says_which_it_needs(folder, monkeypatch):
    old = ModuleType("heedful")
    old.__dict__["__version__"] = "0.0.9"
    monkeypatch.setitem(sys.modules, "heedful", old)
    with pytest.raises(ImportError, match=r"0\.0\.9 is installed: pip install --upgrade"):
        run(folder)


def test_an_error_within_the_package_is_not_taken_for_its_absence(folder, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "heedful.py").write_text("import not_there_either")
    monkeypatch.syspath_prepend(str(broken))
    monkeypatch.delitem(sys.modules, "heedful")
    with pytest.raises(ImportError, match="not_there_either"):
        run(folder)


def test_its_metadata_say_version_license_and_the_least_library(folder):
    facts = json.loads((folder / BUILD / "metadata.json").read_text())
    assert facts["name"] == "heedful" and facts["license"] == "MIT"
    assert facts["id"].isidentifier() and heedful.__version__.replace(".", "_") in facts["id"]
    assert facts["python-depends"] == [] and facts["kernels-minver"] == hub_tree.LEAST


def test_a_folder_of_something_else_is_left_alone(folder, tmp_path):
    hub_tree.write(folder)
    (folder / "mine.txt").touch()
    with pytest.raises(FileExistsError, match="mine.txt"):
        hub_tree.write(folder)
    assert (folder / BUILD / "metadata.json").exists()


def test_the_library_loads_it(folder):
    library = pytest.importorskip("kernels")
    found = library.get_local_kernel(folder)
    assert found.flash_attn_func is heedful.flash_attn_func
    assert set(hub_tree.functions()) <= set(dir(found))


def test_transformers_runs_it_by_its_name(folder, monkeypatch):
    pytest.importorskip("kernels")
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_kernels_available():
        pytest.skip("this transformers is for another version of kernels")
    # The library reads this once in a process.
    monkeypatch.setenv("LOCAL_KERNELS", f"heedful/heedful={folder}")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    words = torch.randint(0, 64, (2, 12))
    mask = torch.ones_like(words)
    mask[1, :5] = 0
    with torch.no_grad():
        want = model(words, attention_mask=mask).logits
        calls, real = [], heedful.flash_attn_varlen_func

        @functools.wraps(real)
        def counted(*given, **named):
            calls.append(given[0].shape)
            return real(*given, **named)

        monkeypatch.setattr(heedful, "flash_attn_varlen_func", counted)
        model.set_attn_implementation("heedful/heedful", allow_all_kernels=True)
        got = model(words, attention_mask=mask).logits
    assert calls == [(19, 4, 16)] * 2
    assert (got - want)[mask.bool()].abs().max() <= 2e-5
