"""Where tests of the Hopper kernels run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from heedful.core import capability
from heedful.torch import backends
from heedful.torch.device import toolchain

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the Hopper kernels run on sm_90 alone",
    ),
]
WITH_TRITON_3_9 = pytest.mark.skipif(
    (toolchain().triton or ()) < (3, 9),
    reason="fp8 needs Triton 3.9, before which every wait is one of the whole warpgroup",
)

# What the kernels of the Hopper backward do beyond what their row says that they take.
_UNTRIED = {"deterministic", "softcap"}


@contextmanager
def whole_backward() -> Iterator[None]:
    """While it is open, the planner takes the Hopper backward for all that its kernels do, so that
    they can be compiled and tried on a GPU before anybody gets them unasked."""
    rows = tuple(
        replace(row, features=row.features | _UNTRIED)
        if (row.backend, row.direction) == ("hopper", "backward")
        else row
        for row in capability.ROWS
    )
    backends.FAMILIES.clear()
    with mock.patch.object(capability, "ROWS", rows):
        yield
    backends.FAMILIES.clear()
