"""Kinds and their cases: told by what was asked, and forgotten where there are too many."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from heedful.core.call.problem import AttentionProblem, Lengths
from heedful.torch.base.arrays import array_spec
from heedful.torch.eager import kinds
from heedful.torch.eager.kinds import Kind, Kinds, of_tensor


def test_heads_and_their_dims_tell_kinds_apart_and_lengths_do_not():
    def kind(name: str, *shape: int):
        return of_tensor(name, torch.empty(shape))[0]

    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        assert kind(name, 2, 9, 4, 16) == kind(name, 3, 8, 4, 16)
        assert len({kind(name, 2, 9, *rest) for rest in ((4, 16), (5, 16), (4, 8))}) == 3
        assert kind(name, 9, 4, 16) == kind(name, 8, 4, 16) != kind(name, 9, 5, 16)
    assert kind("seqused_k", 2) == kind("seqused_k", 3)


TENSORS: dict[str, torch.Tensor] = {
    "q": torch.zeros(2, 9, 4, 16),
    "k": torch.zeros(9, 2, 24)[:, :, :16],
    "v": torch.zeros(2, 9, 2, 16, dtype=torch.float16)[1:],
    "bias": torch.zeros(1, 1, 5, 7).expand(2, 4, 5, 7),
    "sink": torch.zeros(4),
    "seqused_k": torch.zeros(4, dtype=torch.int32)[::2],
    "seed": torch.tensor(5),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_array_is_its_kind_and_its_sizes(name):
    tensor = TENSORS[name]
    kind, sizes = of_tensor(name, tensor)
    assert kinds.with_sizes(kind, iter(sizes)) == array_spec(tensor)._replace(device=None)
    assert kind.dense == (name in ("q", "v", "sink", "seed"))
    lead = tensor.shape[: kind.moving]
    assert sizes == (tuple(lead) if kind.dense else (*lead, *tensor.stride()[:-1]))


@pytest.mark.parametrize("offset", [*range(1, 16), 16, 32])
def test_arrays_of_16_bytes_and_others_are_of_two_kinds(offset):
    memory = torch.zeros(64, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16
    one, other = (of_tensor("x", memory[begin + n :][:8])[0] for n in (0, offset))
    assert (one == other) == (offset % 16 == 0)


def test_packed_tokens_and_batches_are_of_kinds_of_their_own():
    problems = [
        AttentionProblem.dense(2, 0, 7, 4, 2, 16, "float32").at(Lengths(2, 0, 7, q, k))
        for q in (None, 0, 5)
        for k in (None, 0, 9)
    ]
    found = [kinds.of_call(problem, {"sink": TENSORS["sink"]}) for problem in problems]
    assert [values for _, values in found] == [
        [2, 0, 7, q or 0, k or 0, 4] for q in (None, 0, 5) for k in (None, 0, 9)
    ]
    told = [kind for kind, _ in found]
    assert len(set(told)) == 4
    assert told[4] == told[5] == told[7] == told[8] and told[1] == told[2] and told[3] == told[6]
    for problem, (kind, values) in zip(problems, found, strict=True):
        made, arrays = kinds.with_numbers(problem, kind[2:], values)
        assert made == problem
        assert arrays == {"sink": array_spec(TENSORS["sink"])._replace(device=None)}


def test_a_kind_keeps_so_many_cases_and_forgets_the_oldest():
    kind, made = Kind(), []

    def make(numbers) -> SimpleNamespace:
        (length,) = numbers
        # Asked for: a case of this value alone.
        assert length == len(made)
        made.append(length)
        return SimpleNamespace(outputs=[length + 1])

    for length in range(67):
        assert kind.find([length], make)[1] == (length + 1,)
    kept = [length for length in range(len(made)) if kind.known([length]) is not None]
    # The first one stays with those that it might have been joined with.
    assert kept == [0, *range(4, 67)]
    case, numbers = kind.find([kept[0]], make)
    assert numbers == (kept[0] + 1,) and len(made) == 67


def test_kinds_are_forgotten_where_there_are_too_many():
    found: Kinds = Kinds()
    for key in range(256):
        found.of((key,), object)
    first = found.of((0,), object)
    assert len(found) == 256 and found.of((0,), object) is first
    found.of(("one more",), object)
    assert list(found) == [("one more",)]
