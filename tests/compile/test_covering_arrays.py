"""The covering arrays meet what they are said to, and their kernels compile within the limits.

`make test` takes a few problems that together have every feature value, each for one target of its
array. Those of Hopper's forward, which take seconds to compile, are lowered as far as their shared
memory is known, and one is compiled; the slow tier compiles all problems for all targets.
"""

import pytest

pytest.importorskip("triton")

from heedful.core.base.device import by_name
from heedful.core.call.problem import ITEM_BITS
from heedful.core.planning.plan import plan
from heedful.core.registry import capability, configs
from heedful.inspector import Inspection, of_artifact
from heedful.launch import compiler
from heedful.launch.prebuild import compiling
from machine_code.arrays import ARRAYS
from machine_code.covering import deal, each_value, pairs, possible_pairs
from machine_code.table import DEVICES
from support.arrays import variants
from support.kernels import shared_bytes

# Arrays of attention kernels with a table of tiles of their own: backend, whether of 8-bit queries.
FAMILIES = {"hopper": ("hopper", False), "fp8": ("hopper", True), "cdna": ("cdna", None)}
# Those that are compiled. test_portable.py has its own, and merges of splits come with the others.
COMPILED = ("hopper", "fp8", "cdna", "append", "update", "unused")
# Those that Triton 3.9 alone compiles, and what the oldest one does by default, too.
NEWEST = ("fp8", "cdna")
BY_OLDEST = {("hopper", "one"), ("append", "first"), ("update", "last")}
# Arrays of which one problem with features is compiled by default, and the others are lowered.
LOWERED = {"hopper": 3, "fp8": None}


def _marks(name: str, part: str) -> list:
    marks = [pytest.mark.slow] if name in LOWERED and part != "one" else []
    if (name, part) in BY_OLDEST:
        marks.append(pytest.mark.oldest_triton)
    elif name not in NEWEST:
        marks.append(pytest.mark.every_triton)
    return marks


PARTS = [
    pytest.param(name, part, marks=_marks(name, part))
    for name in COMPILED
    for part in ("first", "last", *(["one"] if LOWERED.get(name) else []))
]
SLOW = [(name, t) for name in (*COMPILED, "quantised", "combine") for t in ARRAYS[name].targets]


def problems(name: str, target: str):
    """Every problem of an array, with its plan."""
    device = by_name(DEVICES[target])
    for row in ARRAYS[name].rows:
        one = ARRAYS[name].launched(row, target)
        for entry in one.entries:
            yield plan(entry.problem, device, compiling(), one.backend)


@pytest.mark.parametrize("name", ARRAYS)
def test_every_possible_pair_of_values_is_met(name):
    array = ARRAYS[name]
    assert all(map(array.possible, array.rows))
    met = set().union(*(pairs(row, array.factors) for row in array.rows))
    assert met == possible_pairs(array.factors, array.possible)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_dtype_and_feature_that_a_kernel_takes_is_met(name):
    backend, is_fp8 = FAMILIES[name]
    (row,) = (
        row
        for row in capability.VARIANTS
        if (row.direction, row.packed_as) == ("forward", backend)
        and is_fp8 in (None, ITEM_BITS[row.dtypes[0]] == 8)
        # They have tests/compile/hopper/test_converting.py and test_forward_wide.py.
        and row.name not in ("converting", "forward_wide")
    )
    met = [chosen.problem for t in ARRAYS[name].targets for chosen in problems(name, t)]
    # Where the diagonal lies is a number; a gradient of the bias belongs to the backward.
    unseen = {"diagonal", "backward", "deterministic", "bias_grad", "rel_bias_grad"}
    features = set().union(*(problem.features() for problem in met))
    assert features - {"fp8"} == row.features - unseen
    assert {problem.dtype for problem in met} == set(row.dtypes)


def stored_stages(config) -> int:
    """The stages of keys as they are stored, before they are converted; 0 of kernels without."""
    return getattr(config, "stored_stages", 0)


@pytest.mark.parametrize("kernel", ["hopper.forward", "hopper.fp8_forward", "cdna.forward"])
def test_every_row_of_the_config_table_is_met(kernel):
    chosen = [p for name in FAMILIES for t in ARRAYS[name].targets for p in problems(name, t)]
    met = {id(configs.choose(kernel, p.problem, p.device)) for p in chosen if kernel in p.configs}
    assert met
    rows = [row for row in configs.ROWS if row.kernel == kernel]
    # Those that convert stored keys are met by tests/compile/hopper/test_converting.py, those of
    # numerics="invariant" by tests/pure/core/planning/test_invariant_plans.py.
    unmet = [row for row in rows if id(row) not in met and not stored_stages(row.config)]
    unmet = [row for row in unmet if not getattr(row.when, "__name__", "").startswith("invariant")]
    assert not unmet


def compile_within_limits(target: str, named) -> None:
    """Compiles all; reports every kernel over the limits of its target, not just the first."""
    limit, wrong = by_name(target).shared_bytes, []
    for name, call in named:
        made = compiler.artifact(call, target)
        if made.shared_bytes > limit:
            wrong.append(f"{name}: {made.shared_bytes} bytes of shared memory, {limit} fit")
        if "cdna" not in call.kernel.module:
            continue
        found = of_artifact(made)
        assert isinstance(found, Inspection)
        used = found.resources
        if used.vgpr_spills or used.sgpr_spills or used.scratch_bytes:
            wrong.append(f"{name}: {used}")
    assert not wrong, "\n".join(wrong)


def test_a_few_rows_have_every_value():
    rows = [
        {"a": 1, "b": 1},
        {"a": 1, "b": 2},
        {"a": 2, "b": 1},
        {"a": 3, "b": 2},
        {"a": 3, "b": 1},
    ]
    assert each_value(rows) == [rows[0], rows[2], rows[3]]


def few_rows(name: str) -> list[dict]:
    """Rows of an array which have every value of it."""
    array = ARRAYS[name]
    few = each_value(array.rows)
    assert set().union(*(row.items() for row in few)) == {
        item for row in array.rows for item in row.items()
    }
    return few


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_each_feature_value_compiles_for_a_target(name, part):
    array, few = ARRAYS[name], few_rows(name)
    middle, number = len(few) // 2, LOWERED.get(name) or 0
    parts = {"first": few[:middle], "last": few[middle:], "one": few[number : number + 1]}
    wanted = list(map(id, parts[part]))
    for target, rows in deal(few, array.targets).items():
        mine = [row for row in rows if id(row) in wanted]
        compile_within_limits(target, variants(array, target, mine))


@pytest.mark.parametrize("name", LOWERED)
def test_each_feature_value_is_lowered_for_a_target(name):
    """Its code is generated, its layouts are found, and its shared memory fits."""
    array = ARRAYS[name]
    for target, rows in deal(few_rows(name), array.targets).items():
        limit = by_name(target).shared_bytes
        taken = {which: shared_bytes(call, target) for which, call in variants(array, target, rows)}
        assert taken and max(taken.values()) > limit // 2
        assert not {which: n for which, n in taken.items() if n > limit}


@pytest.mark.parametrize(("name", "target"), [("hopper", "sm_90"), ("cdna", "gfx950")])
def test_shared_memory_of_a_lowered_kernel_is_that_of_the_compiled_one(name, target):
    array = ARRAYS[name]
    row = deal(few_rows(name), array.targets)[target][LOWERED.get(name) or 0]
    for _, call in variants(array, target, [row]):
        assert shared_bytes(call, target) == compiler.artifact(call, target).shared_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), SLOW)
def test_every_problem_compiles_for(name, target):
    array = ARRAYS[name]
    compile_within_limits(target, variants(array, target, array.rows))
