"""The portable kernels, as compiled for CDNA3 and CDNA4, compute attention within the error budget
and without a finding."""

from typing import Any

import pytest

from emulated.backend import TARGETS, Emulated
from support.budget import run
from support.cases import Case, variants

BASE = Case(
    batch=1,
    seqlen_q=75,
    seqlen_k=147,
    heads_q=2,
    heads_k=1,
    head_dim=64,
    dtype="bfloat16",
    backward=False,
)
FEATURES: dict[str, Any] = dict(causal=[True], sink=[True])


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("case", [BASE, *variants(BASE, **FEATURES)], ids=str)
def test_forward_is_within_budget(arch, case):
    run(Emulated(arch), case)
