"""The decode kernel's half of a mixed batch, run by Triton's interpreter: short sequences are
within the budget, and rows of long ones are left to the other kernel.

They run in a process of their own: see `support.runs.interpreted`.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import Plan, plan
from heedful.core.registry.by_hand import forced
from heedful.core.registry.tiles import DecodeConfig, TileConfig
from heedful.launch.bind import decode
from heedful.launch.program import programs
from heedful.launch.spec import Program
from heedful.torch.base.arrays import array_spec
from support.problems import budget
from support.problems.cases import Case
from support.problems.grids import in_turns
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

# Small tiles: a short sequence is up to four, and long ones stand first, between and last.
TILES = DecodeConfig(16, 16, programs=1, least_tiles=1)
UNITS, SHORT = 5, 16
MIXED = Case(
    dtype="float16",
    backward=False,
    heads_q=4,
    heads_k=1,
    causal=True,
    varlen="q",
    used="k",
    batch=9,
    seqlen_q=40,
    seqlen_k=130,
    lens_q=(40, 1, 0, 17, 3, 16, 2, 1, 21),
    lens_k=(90, 130, 50, 17, 0, 16, 77, 1, 130),
)
CASES = (
    MIXED,
    replace(MIXED, page_size=16, sink=True, used=""),
    replace(MIXED, window=(30, 0), softcap=3.0, alibi="bh"),
    replace(MIXED, heads_q=6, heads_k=2, used="qk"),
    replace(MIXED, leftpad_k=True, causal=False),
    # All are short, or all are long.
    replace(MIXED, batch=3, lens_q=(1, 16, 2), lens_k=(130, 3, 64), seqlen_q=16),
    replace(MIXED, batch=2, lens_q=(40, 17), lens_k=(130, 30)),
)


class Halves:
    """Short sequences by the decode kernel that is told to leave the long ones, and these by one
    that is not, as the budget's `Backend`."""

    def __init__(self, num_splits: int):
        self.num_splits = num_splits

    def forward(self, problem, x, out):
        """(out, lse, None)."""
        problem = replace(problem, num_splits=self.num_splits)
        lse = torch.full(problem.lse_shape, torch.nan)
        self._run(problem, x, out, lse, SHORT)
        bounds = x.cu_seqlens_q.tolist()
        rest, rest_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        self._run(problem, x, rest, rest_lse, 0)
        for begin, end in zip(bounds, bounds[1:], strict=False):
            rows = slice(begin, end)
            if end - begin > SHORT:
                assert out[rows].isnan().all() and lse[:, rows].isnan().all()
                out[rows], lse[:, rows] = rest[rows], rest_lse[:, rows]
            elif self.num_splits == 1:
                # Whatever else is in the batch.
                assert torch.equal(out[rows], rest[rows])
                assert torch.equal(lse[:, rows], rest_lse[:, rows])
        return out, lse, None

    @staticmethod
    def _run(problem, x, out, lse, short: int) -> None:
        tensors = {name: t for name, t in x._asdict().items() if t is not None}
        tensors |= {"out": out, "lse": lse}
        specs = {name: array_spec(tensor) for name, tensor in tensors.items()}
        device = replace(by_name("MI300X"), units=UNITS)
        tiles: dict[str, TileConfig] = {"decode.forward": TILES}
        made = Plan(
            problem, device, "decode", "run", variant="portable", configs=tiles, short_q=short
        )
        program = decode.forward(problem, made, specs)
        interpret(Program(program.calls[:1], program.workspaces), tensors)

    def backward(self, problem, x, out, lse, dout, dlse=None):
        raise AssertionError("a mixed batch has no backward")


@interpreted
@pytest.mark.parametrize("case, num_splits", in_turns(CASES, (0, 1)), ids=str)
def test_short_sequences_are_within_the_budget_and_long_ones_are_not_touched(case, num_splits):
    budget.run(Halves(num_splits), case)


def mixed_program(lengths: list[int], **facts) -> Program:
    problem = AttentionProblem.dense(
        len(lengths),
        max(lengths),
        900,
        4,
        1,
        head_dim=32,
        total_q=sum(lengths) + 9,
        used_k=True,
        return_lse=True,
        **facts,
    )
    return programs.program(
        plan(problem, by_name("H200"), backend=forced("mixed/portable")), "forward"
    )


@interpreted
def test_tokens_of_no_sequence_are_cleared_once_by_the_kernel_ahead():
    lengths = [3, 200, 1]
    schedule, short, _ = mixed_program(lengths, dtype="float16").calls
    assert schedule.kernel.function == "schedule_varlen_tiles"
    assert short.kernel.function == "decode"
    total = sum(lengths) + 9
    bounds = torch.tensor([5, *lengths]).cumsum(0).to(torch.int32)
    arrays = {
        "cu_seqlens_q": bounds,
        "seqused_k": torch.tensor([100, 300, 0], dtype=torch.int32),
        "q": torch.randn(total, 4, 32).half(),
        "k": torch.randn(3, 900, 1, 32).half(),
        "v": torch.randn(3, 900, 1, 32).half(),
        "out": torch.full((total, 4, 32), torch.nan).half(),
        "lse": torch.full((4, total), torch.nan),
        "varlen_tiles": torch.zeros(50, dtype=torch.int32),
        "tile_counter": torch.ones(1, dtype=torch.int32),
    }
    gaps = torch.ones(total, dtype=torch.bool)
    gaps[5 : 5 + sum(lengths)] = False
    interpret(Program((schedule,), ()), arrays)
    assert not arrays["out"][gaps].any() and arrays["out"][~gaps].isnan().all()
    assert (arrays["lse"][:, gaps] == -torch.inf).all() and arrays["lse"][:, ~gaps].isnan().all()
    # One tile of the one long sequence, first of all.
    rows = schedule.constants["ROWS"]
    assert isinstance(rows, int)
    count = -(-200 // rows)
    assert arrays["varlen_tiles"][: 1 + 2 * count].tolist() == [count, *[1, 0] * count]


@interpreted
def test_rows_past_a_used_length_are_cleared_beyond_the_longest_sequence_too():
    """The one sequence has six tokens in storage, of which it uses one, and no other uses more."""
    problem = AttentionProblem.dense(
        1, 1, 900, 4, 1, head_dim=32, dtype="float16", total_q=6, used_q=True, used_k=True
    )
    made = programs.program(
        plan(problem, by_name("H200"), backend=forced("mixed/portable")), "forward"
    )
    arrays = {
        "cu_seqlens_q": torch.tensor([0, 6], dtype=torch.int32),
        "seqused_q": torch.tensor([1], dtype=torch.int32),
        "out": torch.full((6, 4, 32), torch.nan).half(),
    }
    clear = made.calls[-1]
    assert clear.kernel.function == "clear_unused"
    interpret(Program((clear,), ()), arrays)
    assert not arrays["out"][1:].any() and arrays["out"][:1].isnan().all()


@pytest.mark.slow
@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
