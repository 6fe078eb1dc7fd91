"""V transposed for fp8 products, run by Triton's interpreter: every position takes its key.

They run in a process of their own: see `support.runs.interpreted`.
"""

import pytest

pytest.importorskip("triton")

import torch

from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.launch.bind import hopper_fp8
from heedful.launch.program import programs
from heedful.launch.spec import Program
from heedful.torch.base.arrays import array_spec
from support.runs.interpreted import interpreted, pass_in_the_interpreter, starts_interpreter
from support.runs.interpreter import interpret

BLOCK = 128


def transposed(v: torch.Tensor, batch: int, seqlen_k: int, cu_k: torch.Tensor | None = None):
    """(B, G, E, positions) as the transpose kernel leaves it, 0x7F (NaN) where it wrote none."""
    total = None if cu_k is None else v.shape[0]
    heads, dim = v.shape[-2:]
    # Of few queries, so that the attention kernel does not transpose V itself.
    problem = AttentionProblem.dense(
        batch,
        1,
        seqlen_k,
        heads,
        head_dim=dim,
        dtype="float8_e4m3fn",
        out_dtype="bfloat16",
        total_q=total,
        total_k=total,
    )
    tensors = {"v": v} if cu_k is None else {"v": v, "cu_seqlens_k": cu_k}
    specs = {name: array_spec(t) for name, t in tensors.items()}
    if cu_k is not None:
        specs["cu_seqlens_q"] = specs["cu_seqlens_k"]
    specs |= {"q": specs["v"], "k": specs["v"], "out": specs["v"]}
    whole = programs.program(plan(problem, by_name("H200"), backend="hopper"), "forward", specs)
    shapes = {w.name: w.buffer.shape for w in whole.workspaces}
    out = torch.full(shapes["v_t"], 0x7F, dtype=torch.uint8)
    arrays = {name: t.view(torch.uint8) if t is v else t for name, t in tensors.items()}
    arrays |= {"v_t": out}
    if "tile_counter" in shapes:
        arrays["tile_counter"] = torch.full((1,), -7, dtype=torch.int32)
    calls = [call for call in whole.calls if call.kernel.function == "transpose_v"]
    interpret(Program(tuple(calls), ()), arrays)
    assert "tile_counter" not in shapes or arrays["tile_counter"].item() == 0
    return out


def expected(v_NGE: torch.Tensor) -> torch.Tensor:
    """(G, E, positions) of one sequence: of every 16 keys, position 4t + 2h + b has 8h + 2t + b."""
    length, heads, dim = v_NGE.shape
    positions = -(-length // BLOCK) * BLOCK
    padded = torch.zeros(positions, heads, dim, dtype=torch.uint8)
    padded[:length] = v_NGE.view(torch.uint8)
    keys = padded.reshape(positions // 16, 2, 4, 2, heads, dim).transpose(1, 2)
    return keys.reshape(positions, heads, dim).permute(1, 2, 0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


@interpreted
@pytest.mark.parametrize("length", [1, 16, 128, 200, 384])
@pytest.mark.parametrize("dim", [16, 64, 80, 256])
def test_dense_values_are_transposed_in_operand_order_and_padded_with_zeros(length, dim):
    v = drawn(2, length, 3, dim)
    got = transposed(v, 2, length)
    for b in range(2):
        assert torch.equal(got[b], expected(v[b]))


@interpreted
def test_strided_values_are_transposed_like_dense_ones():
    v = drawn(2, 5, 150, 96).transpose(1, 2)[:, :140, 1:4, 16:80]
    assert torch.equal(transposed(v, 2, 140), transposed(v.clone(), 2, 140))


@interpreted
def test_packed_sequences_begin_at_blocks_and_read_nothing_of_their_neighbours():
    check_packed([130, 0, 5, 128, 77])


@interpreted
def test_more_packed_sequences_than_a_program_looks_at_at_once(monkeypatch):
    monkeypatch.setattr(hopper_fp8, "TRANSPOSE_SEQUENCES", 4)
    check_packed([40, 0, 0, 300, 0, 129, 1, 0, 0, 0, 60])


def check_packed(lengths: list[int]) -> None:
    cu_k = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    v = drawn(sum(lengths), 2, 64)
    got = transposed(v, len(lengths), max(lengths), cu_k)
    for b, length in enumerate(lengths):
        begin = int(cu_k[b])
        at = (begin // BLOCK + b) * BLOCK
        want = expected(v[begin : begin + length])
        assert torch.equal(got[0, :, :, at : at + want.shape[-1]], want)


@pytest.mark.slow
@starts_interpreter
def test_every_check_passes_in_the_interpreter():
    pass_in_the_interpreter(__file__)
