"""What ranks compute of their part of a batch is what one process computes of the whole."""

import math
import re
from functools import lru_cache
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from heedful.distributed import ContextPlan, attention, plan
from support.distributed.context import CASES, computed, packed
from support.problems import budget
from support.problems.budget import Results
from support.problems.cases import Built, Case, build
from support.problems.grids import in_turns, slow_but
from support.runs.ranks import Ranks

# (ranks, strategy, layout). What is slow says little that the others do not.
WAYS = [
    (2, "gather", "contiguous"),
    (2, "gather", "documents"),
    (2, "heads", "documents"),
    (4, "gather", "zigzag"),
    (4, "ring", "zigzag"),
    (4, "heads x ring", "documents"),
]
SLOW = [
    (2, "gather", "zigzag"),
    (4, "heads", "zigzag"),
    (2, "ring", "documents"),
    (4, "gather", "contiguous"),
    (4, "gather", "documents"),
    (2, "ring", "zigzag"),
    (4, "ring", "contiguous"),
    (4, "heads x ring", "zigzag"),
]


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Groups by how many ranks they have, made when they are wanted."""
    made: dict[int, Ranks] = {}

    def group(count: int) -> Ranks:
        if count not in made:
            made[count] = Ranks(count, tmp_path_factory.mktemp("ranks"))
        return made[count]

    yield group
    for ranks in made.values():
        ranks.close()


@lru_cache
def whole(name: str) -> Built:
    return build(CASES[name])


# By default each case meets one way, and each way as many cases as the others.
BY_DEFAULT = {(name, WAYS[i % len(WAYS)]) for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name, way", slow_but(BY_DEFAULT, product(CASES, (*WAYS, *SLOW))), ids=str)
def test_ranks_compute_what_one_process_does(groups, name, way):
    count, strategy, layout = way
    found, *_ = groups(count).run(computed, CASES[name], strategy, layout)
    budget.check(whole(name), found)


@pytest.mark.parametrize("strategy", ["heads", "ring"])
def test_first_keys_are_dropped_as_the_whole_batch_drops_them(groups, strategy):
    case = packed(window=(100, 0, 40), dropout_p=0.2)
    found, *_ = groups(2).run(computed, case, strategy, "documents")
    budget.check(build(case), found)


def in_place(rank: int, count: int, case: Case, strategy: str, layout: str) -> Results | None:
    """`computed` as on GPUs: rows sent from and to where they belong; KV heads in two groups under
    "gather"."""
    from heedful.distributed import exchange, gather

    def all_to_all(into, sent, group, async_op) -> Any:
        peers = [peer for peer in range(count) if peer != rank]
        ops = [dist.P2POp(dist.irecv, into[peer], peer) for peer in peers if len(into[peer])]
        ops += [dist.P2POp(dist.isend, sent[peer], peer) for peer in peers if len(sent[peer])]
        works = dist.batch_isend_irecv(ops) if ops else []
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    def groups(*_: Any) -> tuple[list[gather.Group], bool]:
        return [gather.Group(slice(n, n + 1), slice(4 * n, 4 * n + 4)) for n in range(2)], False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "groups", groups)
        patch.setattr(exchange, "takes_lists", lambda group: True)
        patch.setattr(exchange, "ROUNDS", 9)
        patch.setattr(exchange.dist, "all_to_all", all_to_all)
        return computed(rank, count, case, strategy, layout)


class Mapped:
    """As `peers.Peers`, of files that each rank maps."""

    def __init__(self, folder: Path, rank: int, count: int, size: int):
        self.size, self._steps = size, 0
        files = [str(folder / str(r)) for r in range(count)]
        made = torch.UntypedStorage.from_file
        mine = made(files[rank], True, size)
        dist.barrier()
        self._theirs: list[Any] = [
            mine if r == rank else made(files[r], True, size) for r in range(count)
        ]

    def ready(self, channel: int) -> None:
        dist.barrier()

    def begin(self) -> None:
        dist.barrier()
        self._steps += 1

    def view(self, rank: int, begin: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        every = torch.empty(0, dtype=torch.uint8).set_(self._theirs[rank])
        size = math.prod(shape) * dtype.itemsize
        return every[begin : begin + size].view(dtype).view(shape)

    def pull(self, pairs: Any, after: Any, of_keys: bool) -> Any:
        # At the latest moment.
        return SimpleNamespace(wait=lambda: [into.copy_(rows) for into, rows in pairs])


class Stream:
    """A stand-in for a GPU's, on which everything runs at once: how often it was waited for, and
    how often it was made current."""

    def __init__(self, *_: Any):
        self.waits = self.uses = 0

    def wait_event(self, event: Any) -> None:
        self.waits += 1

    def wait_stream(self, other: "Stream") -> None:
        self.waits += 1

    def __enter__(self) -> None:
        self.uses += 1

    def __exit__(self, *_: Any) -> None:
        pass


def with_lanes(patch: pytest.MonkeyPatch) -> Stream:
    """Steps have two lanes of stand-ins; the second."""
    from heedful.distributed import calls, gather

    event = SimpleNamespace(record=lambda: None, wait=lambda: None)
    beside = Stream()
    patch.setattr(torch.cuda, "current_stream", Stream)
    patch.setattr(torch.cuda, "Stream", lambda device: beside)
    patch.setattr(torch.cuda, "Event", lambda: event)
    patch.setattr(torch.cuda, "stream", lambda stream: stream)
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    patch.setattr(gather.Step, "lanes", lambda self, like: calls.Lanes(like.device, 2))
    patch.setattr(calls, "_STREAMS", {})
    return beside


def by_reading(
    rank: int, count: int, case: Case, layout: str, folder: Path, lanes: bool = False
) -> tuple[Results | None, int]:
    """`computed` by "gather" that reads other ranks' memory; KV heads in two groups. And how many
    steps have, or how many calls ran on a second lane."""
    from heedful.distributed import gather

    made = Mapped(folder, rank, count, 1 << 22)

    def groups(*_: Any) -> tuple[list[gather.Group], bool]:
        return [gather.Group(slice(n, n + 1), slice(4 * n, 4 * n + 4)) for n in range(2)], False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "groups", groups)
        of_plan = import_module("heedful.distributed.plan")
        patch.setattr(of_plan, "peers_of", lambda group, size: (made, ""))
        beside = with_lanes(patch) if lanes else None
        found = computed(rank, count, case, "copy", layout)
    return found, made._steps if beside is None else beside.uses


READING = [
    (2, "documents", "causal"),
    (2, "contiguous", "window"),
    (2, "zigzag", "sink"),
    (4, "zigzag", "first keys"),
    (4, "documents", "dropout"),
]


@pytest.mark.parametrize(("count", "layout", "name"), slow_but(READING[1:4:2], READING))
def test_ranks_may_read_each_others_memory(groups, tmp_path, count, layout, name):
    found = groups(count).run(by_reading, CASES[name], layout, tmp_path)
    budget.check(whole(name), found[0][0])
    # A forward and a backward.
    assert {steps for _, steps in found} == {2}


@pytest.mark.parametrize(
    ("count", "layout", "name"),
    [(2, "documents", "sink"), (4, "zigzag", "causal"), (2, "contiguous", "window")],
)
def test_calls_that_take_two_lanes_in_turn_give_the_same(groups, tmp_path, count, layout, name):
    """Local calls come first or last there, and gradients are summed after them."""
    found = groups(count).run(by_reading, CASES[name], layout, tmp_path, True)
    budget.check(whole(name), found[0][0])
    assert all(uses >= 2 for _, uses in found)


def test_rows_that_are_no_wide_words_are_read_too(groups, tmp_path):
    """k and v of three float32, which together are three words of 8 bytes."""
    case = packed(head_dim=3, head_dim_v=3)
    found = groups(2).run(by_reading, case, "zigzag", tmp_path)
    budget.check(build(case), found[0][0])


@pytest.mark.parametrize(
    "way, name",
    in_turns(
        [
            (2, "gather", "documents"),
            (4, "gather", "zigzag"),
            (2, "gather", "contiguous"),
            (2, "heads", "contiguous"),
            (4, "heads", "zigzag"),
            (2, "ring", "zigzag"),
            (4, "ring", "contiguous"),
        ],
        ("window both ways", "first keys", "dropout"),
        each=2,
    ),
    ids=str,
)
def test_heads_in_groups_and_rows_that_are_sent_in_place_change_nothing(groups, name, way):
    count, strategy, layout = way
    found, *_ = groups(count).run(in_place, CASES[name], strategy, layout)
    budget.check(whole(name), found)


def equal_documents(rank: int, count: int) -> bool:
    """Whether a batch of 4 dims gives what its packed rows give."""
    made = plan(lengths=[512, 512], heads_q=4, heads_k=2, head_dim=16, layout="zigzag")
    torch.manual_seed(0)
    q, k, v = (made.shard(torch.randn(1024, heads, 16)) for heads in (4, 2, 2))
    out, lse = attention(q, k, v, made, causal=True, return_lse=True)
    rows = made.tokens // 2
    q, k, v = (x.view(2, rows, *x.shape[1:]) for x in (q, k, v))
    found, found_lse = attention(q, k, v, made, causal=True, return_lse=True)
    flat = found_lse.movedim(0, 1).flatten(1)
    return torch.equal(found.flatten(0, 1), out) and torch.equal(flat, lse)


def test_a_batch_of_equal_documents_may_keep_its_four_dims(groups):
    assert groups(2).run(equal_documents) == [True, True]


def no_gradient_of_out(rank: int, count: int, strategy: str) -> list[float]:
    """The largest gradients of q, k and v where rank 0 has none of out."""
    made = plan(lengths=[512], heads_q=4, heads_k=2, head_dim=16, strategy=strategy)
    torch.manual_seed(0)
    q, k, v = (made.shard(torch.randn(512, h, 16)).requires_grad_() for h in (4, 2, 2))
    out, lse = attention(q, k, v, made, causal=True, return_lse=True)
    total = lse.sum() if rank == 0 else out.sum() + lse.sum()
    return [float(grad.abs().max()) for grad in torch.autograd.grad(total, (q, k, v))]


@pytest.mark.parametrize("strategy", ["gather", "heads", "ring"])
def test_a_rank_without_a_gradient_of_out_takes_part_in_the_backward(groups, strategy):
    for found in groups(2).run(no_gradient_of_out, strategy):
        assert min(found) > 0


def changed_before(rank: int, count: int, strategy: str, name: str) -> str:
    """What a backward says after an operand was changed in place."""
    made = plan(lengths=[8, 9], heads_q=4, heads_k=2, head_dim=16, strategy=strategy)
    q, k, v = (torch.randn(made.tokens, h, 16, requires_grad=True) for h in (4, 2, 2))
    operands: dict[str, Any] = {
        "key_ranges": torch.tensor([[0, 9]], dtype=torch.int32).repeat(made.tokens, 1),
        "sink": torch.zeros(4),
        "alibi_slopes": torch.ones(4),
    }
    out = attention(q, k, v, made, causal=True, **{name: operands[name]})
    operands[name].add_(1)
    with pytest.raises(RuntimeError) as caught:
        out.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("gather", "key_ranges"),
        ("heads", "sink"),
        ("ring", "alibi_slopes"),
        ("heads", "key_ranges"),
    ],
)
def test_an_operand_that_changes_before_the_backward_is_seen(groups, strategy, name):
    for said in groups(2).run(changed_before, strategy, name):
        assert "modified by an inplace operation" in said


def in_autocast(rank: int, count: int, strategy: str) -> bool:
    """Whether autocast's results are those of tensors that were cast before, also of mixed ones."""
    made = plan(lengths=[8, 9], heads_q=4, heads_k=2, head_dim=16, strategy=strategy)
    leaves = [torch.randn(made.tokens, h, 16, requires_grad=True) for h in (4, 2, 2)]
    cast = [x.bfloat16() for x in leaves]

    def results(q, k, v) -> list[torch.Tensor]:
        out = attention(q, k, v, made, causal=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves, retain_graph=True)]

    want = results(*cast)
    with torch.autocast("cpu", torch.bfloat16):
        found = [results(*leaves), results(leaves[0], leaves[1], cast[2])]
    return all(map(torch.equal, found[0] + found[1], want * 2))


@pytest.mark.parametrize("strategy", ["gather", "heads", "ring"])
def test_autocast_casts_as_it_does_for_calls_of_one_process(groups, strategy):
    assert groups(2).run(in_autocast, strategy) == [True, True]


def twice(rank: int, count: int, strategy: str) -> str:
    """What is said where a sum of a gradient and of something else is differentiated."""
    made = plan(lengths=[8, 9], heads_q=4, heads_k=2, head_dim=16, strategy=strategy)
    q, k, v = (torch.randn(made.tokens, h, 16, requires_grad=True) for h in (4, 2, 2))
    out = attention(q, k, v, made, causal=True)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        (grad.square().sum() + q.sum()).backward()
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["gather", "heads", "ring"])
def test_a_second_derivative_raises_and_is_not_left_out(groups, strategy):
    for said in groups(2).run(twice, strategy):
        assert "differentiate twice" in said


def on_another_device(rank: int, count: int) -> bool:
    """Whether a default device changes nothing, at first use and later."""
    torch.manual_seed(0)
    x, tokens = torch.randn(17, 2, 16), torch.arange(17)
    ranges = torch.tensor([[0, 9]], dtype=torch.int32).repeat(17, 1)

    def results() -> list[torch.Tensor]:
        made = plan(lengths=[8, 9], heads_q=2, heads_k=2, head_dim=16, strategy="gather")
        q = made.shard(x)
        out = attention(q, q, q, made, causal=True, key_ranges=made.shard(ranges))
        return [out, made.unshard(out), made.positions(), made.shift_labels(tokens)]

    want = results()
    with torch.device("meta"):
        found = results()
    return all(map(torch.equal, found, want))


def test_the_default_device_changes_nothing(groups):
    assert groups(2).run(on_another_device) == [True, True]


def with_a_tangent(rank: int, count: int, strategy: str) -> str:
    made = plan(lengths=[8, 9], heads_q=4, heads_k=2, head_dim=16, strategy=strategy)
    q, k, v = (torch.randn(made.tokens, h, 16) for h in (4, 2, 2))
    with pytest.raises(NotImplementedError) as caught, forward_ad.dual_level():
        attention(q, k, forward_ad.make_dual(v, v), made)
    with forward_ad.dual_level():
        attention(q, k, v, made)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["gather", "heads"])
def test_a_tangent_is_refused_and_not_lost(groups, strategy):
    for said in groups(2).run(with_a_tangent, strategy):
        assert said == "attention over ranks has no forward-mode derivative"


def refused(rank: int, count: int, more: dict[str, Any], change: str) -> str:
    """What attention says, without any transfer: only rank 0 calls it."""
    if rank:
        return ""
    made = plan_of_rank(rank, count, **more.pop("plan", {}))
    q, k, v = torch.randn(made.tokens, 4, 16), *torch.randn(2, made.tokens, 2, 16)
    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    changes = {
        "": lambda: None,
        "fewer rows of k": lambda: given.update(k=k[1:]),
        "other heads": lambda: given.update(q=q[:, :2]),
        "another dtype": lambda: given.update(v=v.half()),
        "float64": lambda: given.update(q=q.double(), k=k.double(), v=v.double()),
        "a list": lambda: given.update(q=[1]),
        "a batch cut otherwise": lambda: given.update(
            q=q[None].repeat(2, 1, 1, 1), k=k.view(8, -1, 2, 16), v=v[None].repeat(2, 1, 1, 1)
        ),
    }
    changes[change]()
    with pytest.raises((TypeError, ValueError)) as caught:
        attention(plan=made, **given, **more)
    return str(caught.value)


def plan_of_rank(rank: int, count: int, **more: Any) -> ContextPlan:
    """A plan that no rank has agreed to."""
    from heedful.core.call.spread import CAUSAL
    from heedful.distributed.layouts import zigzag

    facts = {"strategy": "gather", "heads": (4, 2), "lengths": [512]} | more
    layout = zigzag(facts.pop("lengths"), count)
    return ContextPlan(None, layout, mask=CAUSAL, reasons=(), **facts)


@pytest.mark.parametrize(
    ("more", "change", "said"),
    [
        ({"bias": 1}, "", "bias is not taken"),
        ({"k_descale": 1}, "", "k_descale is not taken"),
        ({"num_splits": 2}, "", "num_splits is not taken"),
        ({"causaul": True}, "", "unexpected keyword argument 'causaul'"),
        ({"block_mask": 1}, "", "block_mask is not taken.*key_ranges are"),
        (
            {"numerics": "invariant", "plan": {"strategy": "ring"}},
            "",
            "numerics must be 'fast' under strategy 'ring': it merges parts",
        ),
        (
            {"numerics": "invariant", "causal": True, "window_size": (10, 0, 4)},
            "",
            r"numerics must be 'fast' under strategy 'gather' with window_size\[2\]",
        ),
        ({"key_ranges": [[0, 1]]}, "", "key_ranges must be a plain tensor"),
        ({"key_ranges": torch.zeros(9, 2)}, "", r"key_ranges must be \(256, 2 or 4\)"),
        ({"key_ranges": torch.zeros(256, 2)}, "", "key_ranges must be int32 on cpu"),
        (
            {
                "key_ranges": torch.zeros(256, 2, dtype=torch.int32),
                "window_size": (10, 0, 4),
            },
            "",
            r"key_ranges must be None with window_size\[2\] under strategy 'gather'",
        ),
        (
            {"window_size": (10, 0, 4), "dropout_p": 0.1, "dropout_seed": 1},
            "",
            r"dropout_p must be 0 with window_size\[2\]",
        ),
        (
            {"causal": True, "window_size": (10, 0, 4), "alibi_slopes": torch.ones(4)},
            "",
            r"alibi_slopes must be None with window_size\[2\]",
        ),
        ({"dropout_p": 0.1}, "", "dropout_seed must be an int"),
        (
            {
                "alibi_slopes": torch.ones(4),
                "window_size": (10, 0, 4),
                "plan": {"strategy": "ring"},
            },
            "",
            r"alibi_slopes must be None with window_size\[2\] under strategy 'ring'",
        ),
        ({"sink": torch.ones(3)}, "", r"sink must be \(4,\)"),
        ({}, "fewer rows of k", r"k must be \(256, 2, head_dim\)"),
        ({}, "other heads", r"q must be \(256, 4, head_dim\)"),
        ({}, "another dtype", "v must be torch.float32"),
        ({}, "float64", "q must be float16, bfloat16 or float32"),
        ({}, "a list", "^q must be a torch.Tensor, got list"),
        (
            {"plan": {"lengths": [256, 256]}},
            "a batch cut otherwise",
            r"^k must be \(2, 256, heads_k, ...\), as q, got \(8, 32, 2, 16\)",
        ),
        ({"sink": [1.0] * 4}, "", "^sink must be a torch.Tensor, got list"),
        ({"return_lse": "yes"}, "", "^return_lse must be a bool, got str"),
    ],
)
def test_what_a_rank_can_see_is_wrong_is_refused_before_anything_is_sent(
    groups, more, change, said
):
    found, _ = groups(2).run(refused, more, change)
    assert re.search(said, found)
