"""The CDNA kernels compute attention within the error budget, without a finding, and to the same
bits whatever the order of the waves."""

from dataclasses import replace

import pytest

from emulated.backend import Emulated, device_of, execute
from heedful.core.configs import TileConfig
from heedful.core.plan import Plan
from heedful.launch.args import cdna
from heedful.torch.execute import buffer_spec
from support.budget import run
from support.cases import Case

# Keys for four turns of the hot loop and two with a mask; multiples of nothing.
BASE = Case(
    batch=1,
    seqlen_q=70,
    seqlen_k=403,
    heads_q=1,
    heads_k=1,
    head_dim=128,
    dtype="bfloat16",
    backward=False,
)
CASES = [
    BASE,
    replace(BASE, causal=True, dtype="float16"),
    # More rows than a tile, in heads that share keys; the first rows see nothing.
    replace(BASE, causal=True, seqlen_q=500, heads_q=3),
    replace(BASE, causal=True, varlen="qk", batch=3, seqlen_q=290, layout="packed", heads_q=2),
]
NARROW = [
    replace(BASE, head_dim=64, causal=True),
    # Three tiles a split and one in the last, in which not every row sees a key.
    replace(BASE, head_dim=64, causal=True, num_splits=3),
]
LONG = [
    *(
        replace(case, head_dim=dim, dtype=dtype)
        for case in CASES
        for dim in (64, 128)
        for dtype in ("bfloat16", "float16")
    ),
    *(
        replace(BASE, seqlen_k=n, causal=causal)
        for n in (384, 448, 1031)
        for causal in (False, True)
    ),
    *(replace(BASE, seqlen_q=n, causal=True) for n in (1, 256, 257)),
    replace(BASE, causal=True, bottom_right=False, seqlen_q=300),
    replace(BASE, causal=True, shift=-90),
    replace(BASE, causal=True, shift=37, seqlen_q=513),
    replace(BASE, layout="heads_first", heads_q=4, heads_k=2, batch=2),
    replace(BASE, varlen="k", batch=2, lens_k=(0, 450), seqlen_k=450),
    replace(BASE, varlen="q", batch=3, lens_q=(70, 0, 1)),
    replace(BASE, scale=1.5),
    *(replace(CASES[-1], num_splits=n, head_dim=dim) for n in (2, 9) for dim in (64, 128)),
]
SCHEDULES = ("lockstep", "round-robin", "delay:0-3", "random:0")
MORE_SCHEDULES = ("delay:4-7", "delay:1,6", *(f"random:{seed}" for seed in range(1, 11)))
TARGETS = ("gfx942", "gfx950")
TILE = TileConfig(256, 64, 8, 1)


class Cdna(Emulated):
    """The CDNA kernels, with their one tile size."""

    def _run(self, direction, problem, tensors):
        tiles = {"cdna.forward": TILE}
        chosen = Plan(
            problem,
            device_of(self.arch),
            "cdna",
            "emulated",
            configs=tiles,
            num_splits=max(1, problem.num_splits),
        )
        made = cdna.forward(problem, chosen, {n: buffer_spec(t) for n, t in tensors.items()})
        self.reports += execute(made, self.arch, tensors, self.schedules)
        for report in self.reports:
            assert report.clean, report.summary()


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("case", [*CASES, *NARROW], ids=str)
def test_forward_is_within_budget_under_every_kind_of_schedule(arch, case):
    run(Cdna(arch, schedules=SCHEDULES), case)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_every_shape_is_within_budget_under_many_schedules(arch, case):
    run(Cdna(arch, schedules=SCHEDULES + MORE_SCHEDULES), case)


def test_reads_of_lds_meet_no_bank_twice_on_cdna4():
    backend = Cdna("gfx950")
    run(backend, BASE)
    assert not any(backend.reports[0].bank_conflicts.values())
