"""What decode steps are drawn of, what each way to make one is asked for, and the check of them."""

import math
import sys
import types
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import heedful
from heedful.bench import steps
from heedful.bench.harness.caches import Tensors
from heedful.bench.harness.check import OUTSIDE
from heedful.bench.steps import Step, draw, reference, sequence
from heedful.reference.budget import allowed

CPU, BF16 = torch.device("cpu"), torch.bfloat16
PLAIN = Step("plain", (64, 31, 33), heads=(4, 2), dims=(16, 16))
PAGED = replace(PLAIN, page=8, lengths=(20, 33, 8))
LATENT = Step("latent", (20, 33, 8), heads=(4, 1), dims=(24, 16), page=8)


class Gpu(str):
    """A GPU's name that is a CPU's."""

    type = "cuda"


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device: Any = Gpu("cpu")


def on_gpu(step: Step) -> Tensors:
    t = draw(step, CPU)
    return t._replace(q=t.q.as_subclass(OnGpu))


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


class Wrapper:
    """FlashInfer's wrappers by their documented interface, over our own call."""

    made: ClassVar[list["Wrapper"]] = []

    def __init__(self, workspace, layout=None, use_tensor_cores=None):
        assert workspace.dtype == torch.uint8 and workspace.device == CPU
        self.nbytes, self.layout = workspace.numel(), layout
        self.tensor_cores = use_tensor_cores
        self.made.append(self)

    def plan(self, *given, **more):
        # MLA's is told where queries begin, too.
        tensors = 3 if self.layout else 4
        *starts, bounds, pages, last = given[:tensors]
        sizes = given[tensors:]
        self.sizes, self.more, self.order = sizes, more, pages.tolist()
        assert {x.dtype for x in given[:tensors]} == {torch.int32}
        assert [s.tolist() for s in starts] in ([], [list(range(len(last) + 1))])
        self.last, counts = last.tolist(), bounds.diff()
        assert bounds[0] == 0 and bounds[-1] == len(pages)
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32, device=CPU)
        for row, own in zip(self.table, pages.split(counts.tolist()), strict=True):
            row[: len(own)] = own
        self.used = last
        if layout := self.layout:
            assert layout == "NHD"
            self.used = (counts - 1) * sizes[3] + last

    def run(self, q, *given):
        window = (-1, -1)
        if self.layout:
            ((k, v),) = given
            window = (self.more["window_left"], -1)
        else:
            rope, latent, tail = given
            assert all(x.is_contiguous() for x in (q, *given))
            q = torch.cat((plain(q), plain(rope)), -1)
            k, v = (x[:, :, None] for x in (torch.cat((latent, tail), -1), latent))
        tables = {"cache_seqlens": self.used, "block_table": self.table}
        return heedful.flash_attn_with_kvcache(
            plain(q)[:, None], k, v, window_size=window, **tables
        )[:, 0]


@pytest.fixture
def library(monkeypatch):
    module: Any = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    module.mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(steps, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(Wrapper, "made", [])
    return Wrapper.made


def planned(step: Step, made: list[Wrapper], **how: bool) -> tuple[Wrapper, Tensors]:
    """FlashInfer's wrapper of a step, whose result is right."""
    with torch.device("meta"):  # where what is not put on the device of the queries is
        t = on_gpu(step)
        call = steps.flashinfer(step, t, **how)
        assert not isinstance(call, str)
        assert reference(step, draw(step, CPU)).why_wrong(call()) is None
    (wrapper,) = made
    assert wrapper.nbytes == 64
    return wrapper, t


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("step", [PLAIN, PAGED], ids=["plain", "paged"])
def test_flashinfer_is_given_the_pages_that_each_sequence_has(step, window, tensor_cores, library):
    step = replace(step, window=window)
    wrapper, t = planned(step, library, tensor_cores=tensor_cores)
    dtypes = {"q_data_type": BF16, "kv_data_type": BF16}
    assert wrapper.more == {"window_left": window - 1, **dtypes}
    assert (wrapper.layout, wrapper.tensor_cores) == ("NHD", tensor_cores)
    if step.page:
        assert t.table is not None
        assert wrapper.order == [*t.table[0, :3], *t.table[1], t.table[2, 0]]
        assert (wrapper.sizes, wrapper.last) == ((4, 2, 16, 8), [4, 1, 8])
    else:
        assert wrapper.order == [0, 1, 2, 3, 4, 5, 8, 9, 10]
        assert (wrapper.sizes, wrapper.last) == ((4, 2, 16, 16), [16, 15, 1])


def test_flashinfer_splits_latent_vectors_as_its_own_wrapper_wants(library):
    wrapper, t = planned(LATENT, library)
    assert wrapper.sizes == (4, 16, 8, 8, False, 24**-0.5, BF16, BF16)
    assert (wrapper.last, wrapper.layout, wrapper.more) == ([20, 33, 8], None, {})
    assert steps.flashinfer(LATENT, t, tensor_cores=True) == "has one kernel of latent vectors"
    assert t.table is not None
    assert wrapper.order == [*t.table[0, :3], *t.table[1], t.table[2, 0]]


def test_what_flashinfer_is_not_timed_on_is_said(monkeypatch, library):
    assert steps.flashinfer(PLAIN, draw(PLAIN, CPU)) == "needs a GPU"
    t, reason = on_gpu(PLAIN), "is not timed on scales of rows, prefixes or padded rows"
    for facts in ({"stored": "int8"}, {"prefix": 5}, {"padded": 1}):
        assert steps.flashinfer(replace(PLAIN, **facts), t) == reason
    ragged = replace(PLAIN, lengths=(33, 16))
    assert steps.flashinfer(ragged, on_gpu(ragged)) == "is timed on whole pages of 16"
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    words = "import of flashinfer halted; None in sys.modules"
    assert steps.flashinfer(PLAIN, t) == f"ModuleNotFoundError: {words}"
    assert not library


def test_workspace_is_what_flashinfer_asks_for():
    # https://docs.flashinfer.ai/api/attention.html: 128 MB or more, 256 MB in its benchmarks.
    assert steps.WORKSPACE_BYTES == 2**28


# Ours.


def noted(monkeypatch, name: str) -> list:
    calls: list = []

    def call(*given, **options):
        calls.append((given, options))
        return torch.arange(12).view(3, 4)

    monkeypatch.setattr(steps, name, call)
    return calls


@pytest.mark.parametrize("step", [PLAIN, PAGED, replace(PAGED, stored="int8", prefix=5)], ids=str)
def test_ours_is_called_as_a_user_would(step, monkeypatch):
    calls = noted(monkeypatch, "flash_attn_with_kvcache")
    t = draw(step, CPU)
    steps.heedful(step, t)()
    steps.heedful(replace(step, window=7), t, "mla")()
    for (given, options), more in zip(calls, (((-1, -1), None), ((6, 0), "mla")), strict=True):
        assert all(a is b for a, b in zip(given, (t.q, t.k, t.v), strict=True))
        names = ("cache_seqlens", "block_table", "k_descale", "v_descale", "shared_prefix")
        held = (t.used, t.table, t.k_scale, t.v_scale, t.prefix)
        assert list(options) == [*names[:2], "window_size", *names[2:], "backend"]
        assert all(options[name] is own for name, own in zip(names, held, strict=True))
        assert (options["window_size"], options["backend"]) == more


def test_a_prefix_is_repeated_before_each_packed_sequence(monkeypatch):
    step = replace(PAGED, prefix=5)
    t = draw(step, CPU)
    right = steps.repeated(step, t)
    assert not isinstance(right, str)
    assert reference(step, t).why_wrong(right()) is None
    calls = noted(monkeypatch, "flash_attn_varlen_func")
    call = steps.repeated(step, t)
    assert not isinstance(call, str) and call().shape == (3, 1, 4)
    (((q, k, v, cu_q, cu_k, most_q, most_k), more),) = calls
    assert more == {} and (most_q, most_k) == (1, 38)
    assert (cu_q.tolist(), cu_k.tolist()) == ([0, 1, 2, 3], [0, 25, 63, 76])
    assert cu_q.dtype == cu_k.dtype == torch.int32 and torch.equal(q, t.q[:, 0])
    for whole, which in ((k, 0), (v, 1)):
        parts = [sequence(step, t, number)[which] for number in range(3)]
        assert torch.equal(whole, torch.cat(parts))
    assert steps.repeated(PLAIN, draw(PLAIN, CPU)) == "is for shared prefixes"


# What is drawn.


def shapes(t: Tensors) -> dict:
    """By field, shapes and dtypes."""
    found = {}
    for name, x in t._asdict().items():
        if name == "prefix" and x is not None:
            found[name] = [(tuple(part.shape), part.dtype) for part in x]
        elif x is not None:
            found[name] = (tuple(x.shape), x.dtype)
    return found


F32, FP8, INT32 = torch.float32, torch.float8_e4m3fn, torch.int32
SIZES = {"heads": (6, 2), "dims": (32, 16), "lengths": (20, 33, 8)}
LEAST = {"q": ((3, 1, 6, 32), BF16), "used": ((3,), INT32)}


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        ({}, {"k": ((3, 33, 2, 32), BF16), "v": ((3, 33, 2, 16), BF16)}),
        (
            {"dims": (32, 32), "page": 8, "prefix": 5},
            {
                "k": ((9, 8, 2, 32), BF16),
                "v": ((9, 8, 2, 32), BF16),
                "table": ((3, 5), INT32),
                "prefix": [((5, 2, 32), BF16), ((5, 2, 32), BF16)],
            },
        ),
        (
            {"dims": (32, 32), "stored": "float8_e4m3fn", "by_head": True},
            {
                "k": ((3, 33, 2, 32), FP8),
                "v": ((3, 33, 2, 32), FP8),
                "k_scale": ((3, 2), F32),
                "v_scale": ((3, 2), F32),
            },
        ),
        (
            {"dims": (32, 32), "stored": "int4", "page": 8},
            {
                "k": ((9, 8, 2, 16), torch.uint8),
                "v": ((9, 8, 2, 16), torch.uint8),
                "k_scale": ((9, 8, 2, 1), F32),
                "v_scale": ((9, 8, 2, 1), F32),
                "table": ((3, 5), INT32),
            },
        ),
    ],
    ids=["plain", "paged", "by head", "int4"],
)
def test_tensors_have_the_shapes_of_a_step(facts, want):
    step = Step("a", **(SIZES | facts))
    t = draw(step, CPU)
    assert shapes(t) == LEAST | want
    assert t.used.tolist() == [20, 33, 8]
    again, other = draw(step, CPU, 0), draw(step, CPU, 1)
    assert torch.equal(t.q, again.q) and not torch.equal(t.q, other.q)
    if t.table is not None:
        used = [*t.table[0, :3], *t.table[1], t.table[2, 0]]
        assert sorted(map(int, used)) == list(range(9)) != list(map(int, used))
        # What a sequence does not have is page 0.
        assert t.table[0, 3:].tolist() == [0, 0] and t.table[2, 1:].tolist() == [0] * 4
        assert other.table is not None and not torch.equal(t.table, other.table)
    if step.by_head:
        scales = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
        assert t.k_scale is not None and t.v_scale is not None
        assert t.k_scale.flatten().tolist() == pytest.approx(scales)
        assert torch.equal(t.k_scale, t.v_scale)
    if t.prefix is not None:
        assert not torch.equal(t.prefix[0], t.prefix[1])
    assert not torch.equal(t.k[..., :8], t.v[..., :8]) or step.is_mla


@pytest.mark.parametrize("stored", ["", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("page", [0, 8])
def test_a_sequence_is_its_own_keys_behind_the_prefix(page, stored):
    step = replace(PAGED, page=page, stored=stored, prefix=5)
    t = draw(step, CPU)
    for number, length in enumerate(step.lengths):
        for which, got in enumerate(sequence(step, t, number)):
            assert t.prefix is not None and torch.equal(got[:5], t.prefix[which].to(got.dtype))
            x, scale = ((t.k, t.k_scale), (t.v, t.v_scale))[which]
            for row in range(length):
                page_of, at = (number, row)
                if t.table is not None:
                    page_of, at = int(t.table[number, row // 8]), row % 8
                own = x[page_of, at].float()
                if scale is not None:
                    own *= scale[page_of, at]
                assert torch.equal(got[5 + row].float(), own.to(got.dtype).float())
            assert len(got) == length + 5


def test_scales_of_heads_are_those_of_their_sequence():
    step = replace(PLAIN, stored="float8_e4m3fn", by_head=True)
    t = draw(step, CPU)
    for which, got in enumerate(sequence(step, t, 1)):
        x, scale = ((t.k, t.k_scale), (t.v, t.v_scale))[which]
        assert scale is not None
        assert torch.equal(got, x[1, :31].float() * scale[1][:, None])


# The check.


def by_hand(step: Step, t: Tensors, number: int, group: int, wide: torch.dtype) -> torch.Tensor:
    """The output of one sequence's query heads of a KV head; what is stored is rounded below
    float64."""
    k, v = (x[:, group].to(wide) for x in sequence(step, t, number))
    each = step.heads[0] // step.heads[1]
    q = t.q[number, 0, group * each : (group + 1) * each].to(wide)
    stored = (lambda x: x) if wide == torch.float64 else (lambda x: x.to(BF16).to(wide))
    scores = q @ k.mT
    if wide != torch.float64:
        scores = (scores.to(BF16) * step.dims[0] ** -0.5).to(wide)
    else:
        scores = scores / math.sqrt(step.dims[0])
    return stored(stored(scores.softmax(-1)) @ v)


def right_of(step: Step, t: Tensors) -> torch.Tensor:
    """The exact output, rounded once."""
    out = torch.zeros(*t.q.shape[:-1], step.dims[1], dtype=BF16)
    each = step.heads[0] // step.heads[1]
    for number in range(len(step.lengths)):
        for group in range(step.heads[1]):
            exact = by_hand(step, t, number, group, torch.float64)
            out[number, 0, group * each : (group + 1) * each] = exact.to(BF16)
    return out


def test_the_first_the_last_the_shortest_and_the_longest_sequence_are_checked():
    step = replace(PLAIN, lengths=(40, 30, 64, 20, 64, 20, 50))
    t = draw(step, CPU)
    checker, right = reference(step, t), right_of(step, draw(step, CPU))
    assert checker.why_wrong(right) is None
    watched = {0, 2, 3, 6}
    for number in range(7):
        for head in range(4):
            wrong = right.clone()
            wrong[number, 0, head, 5] += 0.5
            found = checker.why_wrong(wrong)
            if number not in watched:
                assert found is None
                continue
            words = f"sequence {number}: out of batch 0, KV head {head // 2} is {OUTSIDE}: largest"
            assert str(found).startswith(words)
    assert str(checker.why_wrong(right[1:])) == "out has shape (6, 1, 4, 16), not (7, 1, 4, 16)"
    right[1, 0, 0, 0] = torch.inf
    assert checker.why_wrong(right) == "out is not finite"


def test_the_budget_of_a_sequence_is_twice_what_eager_errs_and_one_rounding():
    step = replace(PLAIN, lengths=(64,), heads=(2, 1))
    t = draw(step, CPU)
    truth = by_hand(step, t, 0, 0, torch.float64)
    error = by_hand(step, t, 0, 0, torch.float32).double() - truth
    # bfloat16 has 8 bits: half a unit in the last place is 2 ** -8 of a number.
    largest = 2 * float(error.abs().max()) + 2**-8 * float(truth.abs().max())
    (_, _, checker), *others = reference(step, t).parts
    assert not others
    (group,) = checker.groups
    budgets = [
        allowed("out", twin, once)
        for twin, once in zip(*(of.values() for of in group.budgets["out"]), strict=True)
    ]
    assert [budget.largest for budget in budgets] == [pytest.approx(largest)]
