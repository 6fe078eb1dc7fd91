"""The mutation tool plants the bugs of attention code that its semantic operators say, and a test
that such a bug sends round for ever ends soon."""

import json
import time
from pathlib import Path

import pytest

from mutation.__main__ import PARTS, sources_of
from mutation.mutants import mutants
from mutation.server import Hub

ROOT = Path(__file__).parents[3]
DEVICE, ARGS = "src/heedful/kernels/portable/x.py", "src/heedful/kernels/args/x.py"

# operator, source -> its mutants.
EACH = {
    ("edge", "a = len_q < c"): {"a = len_q < c - 1"},
    ("edge", "a = rows_M >= n | 1"): {"a = rows_M >= (n | 1) - 1"},
    ("edge", "a = cols <= right"): {"a = cols <= right + 1"},
    ("edge", "a = b < c"): set(),
    ("edge", "a = tl.max(row, 1)"): set(),
    ("edge", "a = min(row + 1, n)"): {"a = min((row + 1) + 1, n)", "a = min((row + 1) - 1, n)"},
    ("edge", "a = range(n, stop)"): {"a = range(n, stop + 1)", "a = range(n, stop - 1)"},
    ("axes", "a = x[:, None] & y[0]"): {"a = x[None, :] & y[0]"},
    ("axes", "a = tl.trans(k) + j.T"): {"a = k + j.T", "a = tl.trans(k) + j"},
    ("axes", "a = t.transpose(2, 0, 1)"): {"a = t.transpose(0, 2, 1)", "a = t.transpose(2, 1, 0)"},
    ("axes", "a = f('gmd,gnd->gmn', b)"): {"a = f('gmd,gnd->gnm', b)"},
    ("other axis", "a = s.heads_q // s.heads_k"): {
        "a = s.heads_k // s.heads_k",
        "a = s.heads_q // s.heads_q",
    },
    ("other axis", "a = s.heads_q"): set(),
    ("other axis", "def f(len_q, len_k):\n    return len_q"): {
        "def f(len_q, len_k):\n    return len_k"
    },
    ("other axis", "def f(len_q):\n    return len_q\nlen_k = 1"): set(),
    ("other axis", "a = t.HEAD_DIM + t.HEAD_DIM_V"): {
        "a = t.HEAD_DIM_V + t.HEAD_DIM_V",
        "a = t.HEAD_DIM + t.HEAD_DIM",
    },
    ("factor", "a = b * (c + d) + e / f"): {
        "a = b + e / f",
        "a = (c + d) + e / f",
        "a = b * (c + d) + e",
    },
    ("base", "a = math.log2(b)"): {"a = math.log(b)"},
    ("base", "a = tl.exp(b) * LOG2E"): {"a = tl.exp2(b) * LOG2E", "a = tl.exp(b) * 1.0"},
    ("base", "a = LOG2E - LN2"): {"a = LN2 - LN2", "a = LOG2E - LOG2E"},
    ("base", "log.debug(a)"): set(),
    ("index", "a = h // group"): {"a = h % group", "a = h"},
    ("index", "a = h % group"): {"a = h"},
    ("set for add", "a = x.at[i].add(v)"): {"a = x.at[i].set(v)"},
    ("set for add", "x.index_add_(0, i, v)"): {"x.index_copy_(0, i, v)"},
    ("set for add", "tl.atomic_add(p, v)"): {"tl.store(p, v)"},
    ("set for add", "a += b"): {"a = b"},
    ("field", "a = Rows(b, stride_b=c, stride_h=d)"): {"a = Rows(b, stride_b=d, stride_h=c)"},
    ("field", "a = {'b': c, 'd': e}"): {"a = {'b': e, 'd': c}"},
    ("field", "a = Scalar(b)"): {"a = Scalar(b + 1)"},
}


@pytest.mark.parametrize("operator, source", EACH)
def test_a_semantic_operator_makes_these_mutants_and_no_other(operator, source):
    made = {m.apply(source) for m in mutants("m", source) if m.operator == operator}
    assert made == EACH[operator, source]


def test_what_a_group_declares_as_read_is_declared_as_written():
    source = "class A(NamedTuple):\n    a: In[Ptr]\n    b: InOut[Rows]\n    c: Num\n"
    made = {m.apply(source) for m in mutants(ARGS, source)}
    assert made == {source.replace("In[", "Out["), source.replace("InOut", "In")}
    assert not list(mutants(DEVICE, source))


def test_what_only_a_compiler_reads_of_device_code_is_left_alone():
    source = "def f():\n    tl.static_assert(a)\n    b = load(p, mask=m, eviction_policy=e)"
    assert {m.text for m in mutants(DEVICE, source)} == {"p"}


def test_assembly_is_left_alone_that_no_interpreter_knows():
    source = "def f(i):\n    return f'mov $0, {i};' + str(i + 1)"
    assert not list(mutants(DEVICE, source)) and list(mutants("m", source))
    source = "def f(x):\n    return tl.inline_asm_elementwise('', '', [x], pack=2)"
    assert {m.operator for m in mutants(DEVICE, source)} == {"return nothing"}


def test_parts_hold_each_source_that_they_name_and_no_kernel_that_only_a_gpu_runs():
    found = {name: set(sources_of(part, ROOT, [])) for name, part in PARTS.items()}
    for name, part in PARTS.items():
        for place in part.places:
            assert any(f.startswith(f"src/heedful/{place}") for f in found[name]), place
    assert "src/heedful/jax/tiled/tiles.py" in found["host"]
    assert "src/heedful/kernels/portable/forward/kernel.py" in found["kernels"]
    assert found["host"].isdisjoint(found["kernels"])
    assert not any("kernels/hopper" in file for file in set().union(*found.values()))


SPINS = """
def test_is_done():
    assert True

def test_spins():
    while True:
        pass

def test_waits():
    import threading
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    hub = Hub("plain", tmp_path_factory.mktemp("cache"), preloaded=())
    found = hub.connect()
    yield found
    found.close()
    hub.close()


@pytest.mark.parametrize("test", ["test_spins", "test_waits"])
def test_a_test_that_spins_or_waits_ends_by_its_own_time_and_not_by_that_of_all(
    tmp_path, server, test
):
    (tmp_path / "test_it.py").write_text(SPINS)
    start = time.monotonic()
    names = ["test_it.py::test_is_done", f"test_it.py::{test}"]
    answer = server.run(tmp_path, names[:1], 600.0, each=[0.1])
    assert answer["code"] == 0, json.dumps(answer)
    answer = server.run(tmp_path, names, 600.0, each=[0.1, 0.1])
    assert answer["code"] is None or answer["code"] < 0
    assert time.monotonic() - start < 60
