"""Where tests of the Hopper kernels run."""

import pytest
import torch

from heedful.core.registry.by_hand import forced
from heedful.torch.base.device import toolchain

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the Hopper kernels run on sm_90 alone",
    ),
]
WITH_TRITON_3_9 = pytest.mark.skipif(
    (toolchain().triton or ()) < (3, 9),
    reason="needs Triton 3.9: Gluon before has no inline assembly, and its waits are a warpgroup's",
)
# Both kernels that decode over a cache.
DECODES = (
    forced("decode/portable"),
    pytest.param("hopper_decode", marks=[*ON_HOPPER, WITH_TRITON_3_9]),
)
