"""The CDNA kernels compute attention within the error budget, without a finding, whatever the
order of the waves."""

from dataclasses import replace

import pytest

from emulated.backend import Emulated
from support.budget import run
from support.cases import Case

# More rows than one tile, more keys than the prologue and one masked tile; multiples of nothing.
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
