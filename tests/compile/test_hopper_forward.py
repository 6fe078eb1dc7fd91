"""The Hopper forward compiled for sm_90 without a GPU: every config, and what makes a variant."""

import pytest

from heedful.core import configs
from heedful.core.configs import ConfigRow, TileConfig
from heedful.core.device import by_name
from heedful.core.plan import Plan
from heedful.core.problem import AttentionProblem
from heedful.launch import buffers, compiler
from heedful.launch.args import hopper
from heedful.launch.spec import TensorMap

DEVICE = by_name("H200")
_EXTRA = (("consumer_regs", 240), ("ordered", True), ("producer_regs", 24))
PLAIN = ConfigRow("hopper.forward", ("sm_90",), 128, TileConfig(128, 128, 4, 2, _EXTRA), "tests")
ROWS = [row for row in configs.ROWS if row.kernel == "hopper.forward"]


def planned(row, **facts):
    """The forward's one kernel call under a given row of the config table."""
    facts = {"head_dim": row.max_dim, "return_lse": True, **facts}
    problem = AttentionProblem.dense(2, 300, 300, 8, 4, **facts)
    plan = Plan(problem, DEVICE, "hopper", "run", configs={"hopper.forward": row.config})
    (call,) = hopper.forward(problem, plan, buffers.forward(problem)).calls
    return call


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"d{row.max_dim}-{row.config.block_m}")
def test_every_config_compiles_and_fits_an_sm(row, causal):
    made = compiler.artifact(planned(row, causal=causal), DEVICE.arch)
    assert made.shared_bytes <= DEVICE.shared_bytes
    registers = row.config.get("consumer_regs") * row.config.block_m // 64
    assert registers + row.config.get("producer_regs") <= 512  # of 65536, by 128 threads


def test_a_new_length_batch_or_head_count_is_the_same_variant():
    first = planned(PLAIN)
    problem = AttentionProblem.dense(3, 77, 1001, 16, 2, head_dim=128, return_lse=True)
    plan = Plan(problem, DEVICE, "hopper", "run", configs={"hopper.forward": PLAIN.config})
    (call,) = hopper.forward(problem, plan, buffers.forward(problem)).calls
    assert call.variant == first.variant


def test_packed_maps_end_with_each_sequence():
    """Row r of a sequence of n tokens that ends at token e is address (e - n + r) tokens, modulo
    2^64 bytes, and rows past the sequence are past the map."""
    call = planned(PLAIN, total_q=1000, total_k=1000)
    descriptor = call.arguments["k_desc"]
    assert isinstance(descriptor, TensorMap)
    tokens = descriptor.strides[3]
    end, length, at = 700, 300, 123
    coordinates = (1 << 30, end, 0, (1 << 30) - length + at, 0)
    address = 2 * sum(c * s for c, s in zip(coordinates, descriptor.strides, strict=True))
    assert address % (1 << 64) == (end - length + at) * tokens * 2
    assert (1 << 30) - length + length == descriptor.shape[3]
