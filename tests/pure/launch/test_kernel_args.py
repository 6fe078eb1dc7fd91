"""Groups of kernel arguments: what is declared, how a call is made of them, and what it writes."""

import importlib
import pkgutil
from typing import Any

import pytest

from heedful.core.base.device import by_name
from heedful.core.call.mask import MaskSpec
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.kernels import args
from heedful.kernels.args.kinds import Kind, Rows
from heedful.kernels.args.shared import Mask, TreeMask
from heedful.launch.program import buffers
from heedful.launch.program.programs import program
from heedful.launch.spec import (
    KernelCall,
    KernelRef,
    Pointer,
    Scalar,
    declared,
    leaves,
    map_leaves,
)

MODULES = [
    importlib.import_module(f"{args.__name__}.{module.name}")
    for module in pkgutil.iter_modules(args.__path__)
]
GROUPS = {
    x
    for module in MODULES
    for x in vars(module).values()
    if isinstance(x, type) and hasattr(x, "_fields")
}
GROUPS = sorted(GROUPS, key=lambda group: group.__name__)
MOST_FIELDS, MOST_PARAMETERS = 12, 20
REF = KernelRef("heedful.kernels.portable.forward.kernel", "attention_forward")
NARROW = Rows(Pointer("q", "float16"), Scalar(1, "i64"), Scalar(2), Scalar(3, "i64"))


def forward_call(**facts) -> KernelCall:
    problem = AttentionProblem.dense(2, 64, 512, 4, head_dim=64, return_lse=True, **facts)
    return program(plan(problem, by_name("B200"), backend="portable"), "forward").calls[0]


def call_of(**parameters: Any) -> KernelCall:
    return KernelCall(REF, (1, 1, 1), parameters)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_field_of_a_group_says_what_it_holds(group):
    assert len(group._fields) <= MOST_FIELDS and group.__doc__
    # What is read or written of an array, or of several, is said where they are used.
    used = [k for other in GROUPS for _, k, inner in declared(other) if group in inner]
    is_said = bool(used) and None not in used
    for name, kind, inner in declared(group):
        assert kind is not None or inner or name == "ptr" or is_said, name
        assert (kind is Kind.CONSTANT) == name.isupper(), name


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_a_leaf_that_is_missing_misspelt_or_given_twice_is_a_type_error(group):
    given = dict.fromkeys(group._fields)
    first, *_ = given
    with pytest.raises(TypeError, match="missing"):
        group(**{name: None for name in given if name != first})
    with pytest.raises(TypeError, match="unexpected"):
        group(**given, misspelt=None)
    with pytest.raises(TypeError, match="multiple values"):
        group(None, **given)


def test_leaves_have_dotted_names_in_order():
    call = forward_call(mask=MaskSpec.of(True))
    assert len(call.parameters) <= MOST_PARAMETERS
    names = [name for x in call.parameters.items() for name, *_ in leaves(*x)]
    assert names[:5] == ["io.q.ptr", "io.q.stride_b", "io.q.stride_n", "io.q.stride_h", "io.k.ptr"]
    assert len(set(names)) == len(names)
    assert set(names) == set(call.arguments) | set(call.constants)
    assert not set(call.arguments) & set(call.constants)
    assert call.arguments["params.mask.right"] == Scalar(0)
    assert call.constants["params.mask.HAS_RIGHT"] is True
    assert call.constants["params.mods.bias.ptr"] is None


def test_leaves_are_replaced_where_they_are():
    call = forward_call()
    seen = {}
    io = map_leaves(
        "io", call.parameters["io"], lambda name, leaf, path: seen.setdefault(path, name)
    )
    assert type(io) is type(call.parameters["io"]) and io.v.stride_n == "io.v.stride_n"
    assert seen[(2, 2)] == "io.v.stride_n"


def test_a_call_writes_what_its_groups_declare():
    call = forward_call()
    assert call.writes == {"out", "lse"} and call.reads == {"q", "k", "v"}


FACTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": MaskSpec.of(True), "sink": True},
    "packed": {"total_q": 150, "total_k": 1000, "used_q": True},
    "split": {"num_splits": 3},
    "packed and split": {"total_q": 150, "total_k": 1000, "num_splits": 2},
    "gradients": {"needs_grad": True, "sink": True, "bias": True, "bias_grad": True},
}


@pytest.mark.parametrize("facts", FACTS, ids=str)
@pytest.mark.parametrize(
    "device, backend, dtype",
    [
        ("B200", "portable", "bfloat16"),
        ("H200", "hopper", "bfloat16"),
        ("H200", "hopper", "float8_e4m3fn"),
        ("MI300X", "cdna", "bfloat16"),
        ("MI355X", "cdna", "bfloat16"),
    ],
)
def test_nothing_is_read_that_was_not_given_zeroed_or_written(device, backend, dtype, facts):
    problem = AttentionProblem.dense(
        2, 1500, 2048, 8, 4, 128, dtype, return_lse=True, **FACTS[facts]
    )
    try:
        chosen = plan(problem, by_name(device), backend=backend)
    except ValueError:
        pytest.skip("not a problem of this backend")
    for direction in ("forward", "backward")[: 1 + problem.needs_grad]:
        arrays = getattr(buffers, direction)(problem)
        made = program(chosen, direction, arrays)
        results = {"out", "lse"} if direction == "forward" else {n for n in arrays if n[0] == "d"}
        results -= {"dout", "dlse"}
        known = set(arrays) - results
        known |= {workspace.name for workspace in made.workspaces if workspace.zeroed}
        scratch = {workspace.name for workspace in made.workspaces}
        # What no sequence uses of results or partials is cleared beside what attention writes.
        cleared = {"clear_outside", "clear_unused", "schedule_varlen_tiles"}
        for call in made.calls:
            partly = results | scratch if call.kernel.function in cleared else set()
            # Warps of the fp8 kernel transpose V for the others.
            own = call.writes & {"v_t"}
            assert call.reads <= known | partly | own, call.kernel.function
            known |= call.writes
        written = frozenset().union(*(call.writes for call in made.calls))
        assert results <= written <= results | scratch


def test_what_a_loose_address_is_for_is_not_guessed():
    call = call_of(x=Pointer("x", "float32"))
    assert list(call.arguments) == ["x"]
    for access in ("reads", "writes"):
        with pytest.raises(TypeError, match="x: declared neither as read nor as written"):
            getattr(call, access)


def mask(**facts) -> Mask:
    return Mask(**{**dict.fromkeys(Mask._fields), **facts})


def tree(**facts) -> TreeMask:
    return TreeMask(**{**dict.fromkeys(TreeMask._fields), **facts})


@pytest.mark.parametrize(
    "group, said",
    [
        (mask(left=Pointer("x", "int32")), "mask.left is declared as number, got Pointer"),
        (mask(HAS_LEFT=Scalar(1)), "mask.HAS_LEFT is declared as constant, got Scalar"),
        (mask(HAS_LEFT=Pointer("x", "i32")), "mask.HAS_LEFT is declared as constant, got Pointer"),
        (mask(ranges=Scalar(1)), "mask.ranges must be .*RowArray"),
        (mask(tree=tree(ptr=Scalar(1))), "mask.tree.ptr is declared as read, got Scalar"),
        (mask(tree=tree(ptr=NARROW)), "mask.tree.ptr must be None, got .*Rows"),
        (NARROW, "mask.ptr must be declared as read, written or both"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_leaf_of_another_kind_than_declared_is_a_type_error(group, said):
    with pytest.raises(TypeError, match=said):
        call_of(mask=group)


def test_a_group_of_another_class_than_its_field_is_a_type_error():
    io = forward_call().parameters["io"]
    with pytest.raises(TypeError, match="io.out must be .*SplitRows"):
        call_of(io=io._replace(out=io.q))
    # One of those that a field may have.
    latent = AttentionProblem.dense(
        2, 1, 512, 16, 1, 576, head_dim_v=512, v_in_k=True, used_k=True, num_splits=1
    )
    for backend in ("mla", "mla_swap_ab"):
        (call,) = program(plan(latent, by_name("H200"), backend=backend), "forward").calls
        params = call.parameters["params"]
        with pytest.raises(TypeError, match="params.tile must be .*DecodeTile.* or .*MlaSwapTile"):
            call_of(params=params._replace(tile=params.mask))
    # A whole group may be absent.
    assert call_of(io=io._replace(lse=None)).writes == {"out"}
    assert leaves("io", io._replace(lse=None))[-3] == ("io.lse", None, Kind.WRITTEN)


def test_a_cluster_has_at_least_one_program():
    with pytest.raises(ValueError, match="cluster must be >= 1, got 0"):
        KernelCall(REF, (1, 1, 1), {}, cluster=0)


def test_a_group_holds_groups_where_it_says_so_and_nowhere_else():
    with pytest.raises(TypeError, match=r"^x\.ptr must be "):
        leaves("x", NARROW._replace(ptr=(1, 2)), Kind.READ)
    with pytest.raises(TypeError, match=r"^x\.ptr must be declared as read, written or both$"):
        leaves("x", NARROW)
