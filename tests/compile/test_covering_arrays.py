"""The covering arrays meet what they are said to, and their kernels compile within the limits.

`make test` compiles a few problems that together have every feature value, each for one target of
its array, but for plain fp8 ones; the slow tier compiles all of them for all targets.
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

# Arrays of attention kernels with a table of tiles of their own: backend, whether of 8-bit queries.
FAMILIES = {"hopper": ("hopper", False), "fp8": ("hopper", True), "cdna": ("cdna", None)}
# Those that are compiled. test_portable.py has its own, and merges of splits come with the others.
COMPILED = ("hopper", "fp8", "cdna", "append", "update", "unused")
# Those that Triton 3.9 alone compiles, and what the oldest one does by default, too.
NEWEST = ("fp8", "cdna")
BY_OLDEST = {("hopper", "first"), ("append", "first"), ("update", "last")}
# Plain fp8 kernels, which tests/compile/hopper/test_fp8.py has.
HAD = {("fp8", "first")}


def _marks(name: str, half: str) -> list:
    marks = [pytest.mark.slow] if (name, half) in HAD else []
    if (name, half) in BY_OLDEST:
        marks.append(pytest.mark.oldest_triton)
    elif name not in NEWEST:
        marks.append(pytest.mark.every_triton)
    return marks


HALVES = [
    pytest.param(name, half, marks=_marks(name, half))
    for name in COMPILED
    for half in ("first", "last")
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


@pytest.mark.parametrize(("name", "half"), HALVES)
def test_each_feature_value_compiles_for_a_target(name, half):
    array = ARRAYS[name]
    few = each_value(array.rows)
    assert set().union(*(row.items() for row in few)) == {
        item for row in array.rows for item in row.items()
    }
    middle = len(few) // 2
    halves = {"first": few[:middle], "last": few[middle:]}
    wanted = list(map(id, halves[half]))
    for target, rows in deal(few, array.targets).items():
        mine = [row for row in rows if id(row) in wanted]
        compile_within_limits(target, variants(array, target, mine))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), SLOW)
def test_every_problem_compiles_for(name, target):
    array = ARRAYS[name]
    compile_within_limits(target, variants(array, target, array.rows))
